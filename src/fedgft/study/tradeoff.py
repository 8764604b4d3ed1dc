"""The trade-off between accuracy and gap: every method over its whole range of strengths.

All strengths and replicates of a method are one batch of runs. The choice (the knee, or the most
accurate model within a target) depends only on the clients' rows; test rows are only reported.

Two kinds of references stand beside the trained methods. Decision rules change FedAvg's decisions:
`thresholds` by group and `derived` decisions need the group of every person at the time of the
decision, a `blind` rule does not. Pooled references see all rows in one place, which shows what
federation costs: the controller with one client, and Fairlearn's methods. Fairlearn's decisions are
randomized: a row counts with the probability with which it is accepted.
"""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.metadata import version

import numpy as np

from fedgft.algorithms import METHODS
from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.registry import WITHOUT_STRENGTH
from fedgft.data.dataset import Federation
from fedgft.engine.select_best import GAP_TOLERANCE
from fedgft.errors import FedgftError, import_extra
from fedgft.metrics import Metric, NotEstimableWarning
from fedgft.metrics.functions import is_collapsed
from fedgft.metrics.intervals import floor
from fedgft.metrics.metric import Statistics
from fedgft.study.cache import ResultCache
from fedgft.study.post_processing import RULE_METHODS, SumsPair, apply_rules
from fedgft.study.results import Row, cell_columns, decision_columns, mean_of, mean_sd, measure
from fedgft.study.study import Point, Result, Study, count_choices
from fedgft.sums import Sums, stack

BOUNDS = (0.001, 0.01, 0.03)  # constraint bounds for ExponentiatedGradient
MAX_TARGET = 0.99  # targets must be below one
FIT_COST = 20  # simulator runs that take as long as one Fairlearn fit
CONSTRAINTS = {
    "sp": ("DemographicParity", "demographic_parity"),
    "eop": ("TruePositiveRateParity", "true_positive_rate_parity"),
    "fpr": ("FalsePositiveRateParity", "false_positive_rate_parity"),
    "eo": ("EqualizedOdds", "equalized_odds"),
}
"Fairlearn's names of a metric: its constraint class, and the constraint of ThresholdOptimizer."
Accept = Callable[[np.ndarray, np.ndarray], np.ndarray]  # features, groups -> P(accepted)


@dataclass(frozen=True, eq=False)
class TradeoffPoint:
    """One method at one strength.

    Parameters
    ----------
    method, strength
        The strength is None where the method has none.
    federation, test
        Sums over the clients' and over the test rows, (replicate, ...).
    result
        The trained cell; None for references.
    """

    method: str
    strength: float | None
    federation: Sums
    test: Sums
    result: Result | None = None

    @classmethod
    def from_result(cls, result: Result) -> "TradeoffPoint":
        """The point of a trained cell."""
        strength = None if result.method in WITHOUT_STRENGTH else float(result.strength[0])
        return cls(result.method, strength, result.client_sums, result.test_sums, result)

    def values(self, metric: Metric, where: str) -> tuple[np.ndarray, np.ndarray]:
        """(replicate,) each: accuracy and gap of decisions on "federation" or "test" rows."""
        sums: Sums = getattr(self, where)
        return sums.accuracy(), sums.gap(metric, "hard")

    def mean(self, metric: Metric, where: str) -> tuple[float, float]:
        """Accuracy and gap, each averaged over the replicates that have it."""
        accuracy, gap = self.values(metric, where)
        return _mean(accuracy), _mean(gap)

    def complete(self, metric: Metric) -> bool:
        """Whether all replicates have accuracy and gap; a replicate without them may be bad."""
        return all(np.isfinite(v).all() for v in self.values(metric, "federation"))

    def meets(self, metric: Metric, target: float) -> bool:
        """Whether the mean gap on the clients' rows is within the target."""
        return self.mean(metric, "federation")[1] <= target + GAP_TOLERANCE

    def collapsed(self) -> np.ndarray:
        """(replicate,): whether the model gives nearly all rows the same class."""
        return is_collapsed(self.federation)

    def choose_replicate(self, metric: Metric, target: float | None) -> int:
        """The replicate whose model is saved.

        It is the most accurate replicate within the target, or else the fairest; without a target,
        the replicate whose gap is nearest to the mean. A collapsed replicate is chosen only if all
        have collapsed.
        """
        accuracy, gap = self.values(metric, "federation")
        if target is None:
            return int(np.nanargmin(np.abs(gap - np.nanmean(gap)) + self.collapsed()))
        within = (gap <= target + GAP_TOLERANCE) & ~self.collapsed()
        if within.any():
            return int(np.argmax(np.where(within, accuracy, -np.inf)))
        return int(np.nanargmin(gap + self.collapsed()))


@dataclass(frozen=True, eq=False)
class Frontier:
    """All points of a study at one alpha, and what is chosen from them.

    Parameters
    ----------
    study, metric, alpha
        The replicates, whose gap, and the heterogeneity of the partition.
    target
        The largest gap; None: the knee is chosen.
    points
        FedAvg's point first; all strengths of a method are adjacent.
    """

    study: Study
    metric: Metric
    alpha: float
    target: float | None
    points: list[TradeoffPoint]

    @cached_property
    def chosen(self) -> TradeoffPoint | None:
        """The point that `choose_point` chooses; None: no gap is estimable."""
        return choose_point(self.points, self.metric, self.target)

    @cached_property
    def replicate(self) -> int | None:
        """The replicate of the chosen point whose model is saved."""
        return (
            None if self.chosen is None else self.chosen.choose_replicate(self.metric, self.target)
        )

    @property
    def why(self) -> str:
        """A text that says why this replicate was chosen."""
        if self.target is None:
            return "whose gap is nearest to the mean of the replicates"
        if self._is_within_target():
            return "the most accurate one within the target on its clients' rows"
        return "whose gap is nearest to the target: none is within it on its clients' rows"

    def _is_within_target(self) -> bool:
        """Whether the saved replicate is within the target and has not collapsed."""
        if self.chosen is None or self.replicate is None or self.target is None:
            return False
        gap = self.chosen.values(self.metric, "federation")[1][self.replicate]
        return bool(
            gap <= self.target + GAP_TOLERANCE and not self.chosen.collapsed()[self.replicate]
        )

    def rows(self) -> list[Row]:
        """One row per point, see `point_row`."""
        return [point_row(self.study, self.metric, self.alpha, point) for point in self.points]

    def summary(self) -> Row:
        """The target, the knee of each method, and what was chosen and saved."""
        knees = {}
        for method in dict.fromkeys(point.method for point in self.points):
            knee = find_knee([s for s in self.points if s.method == method], self.metric)
            knees[method] = knee and {"method": knee.method, "strength": knee.strength}
        return {"target": self.target, "chosen": self._describe_chosen(), "knees": knees}

    def _describe_chosen(self) -> Row | None:
        target = self.target
        chosen = self.chosen
        if chosen is None or self.replicate is None:
            return None
        gap = float(chosen.values(self.metric, "federation")[1][self.replicate])
        lost = chosen.collapsed()
        met = None if target is None else self._is_within_target()
        return {
            "method": chosen.method,
            "strength": chosen.strength,
            "reached": None if target is None else chosen.meets(self.metric, target),
            "collapsed": int(lost.sum()),
            "replicate": self.replicate,
            "seed": self.study.seeds[self.replicate],
            "why": self.why,
            "saved_gap": gap,
            "saved_reached": met,
        }


def trace_frontier(
    study: Study,
    metric: Metric,
    alpha: float,
    methods: Sequence[str],
    *,
    points: int = 12,
    target: float | None = None,
    fits: ResultCache | None = None,
) -> Frontier:
    """Sweep every method and choose a point and a replicate.

    Parameters
    ----------
    study, metric, alpha
        The replicates, whose gap, and the heterogeneity of the partition.
    methods
        Names of `METHODS` and of `RULE_METHODS`. FedAvg is always among them.
    points
        Strengths per method.
    target
        The largest gap; None: the knee is chosen.
    fits
        Where Fairlearn's fits are kept; None: without pooled references.
    """
    metric = study.bind(metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)  # some targets are out of reach
        swept = sweep_methods(study, metric, alpha, methods, points=points, target=target)
        if fits is not None:
            widest = widest_gap(swept[0], metric)
            swept += sweep_pooled(study, metric, alpha, points=points, widest=widest)
            swept += fit_fairlearn_methods(study, metric, alpha, fits)
    return Frontier(study, metric, alpha, target, swept)


def frontier_work(study: Study, methods: Sequence[str], points: int, *, references: bool) -> int:
    """Run-rounds that a frontier takes at least: the length of a progress bar.

    `references`: whether pooled references are among them. A fit of Fairlearn's counts as
    `FIT_COST` runs.
    """
    rates = count_choices(study.protocol.lr)
    swept = [m for m in methods if m != "lrw" and m not in RULE_METHODS]
    runs = 1 + rates + points * len(swept) + ("lrw" in methods)
    if references:
        runs += rates + points + FIT_COST * (len(BOUNDS) + 1)
    return runs * len(study.seeds) * study.protocol.settings.rounds


def strength_grid(
    method: str, points: int, *, widest: float, target: float | None = None
) -> list[float]:
    """The strengths to sweep.

    Targets and tolerances go from zero to FedAvg's gap `widest`, closer together near zero, with
    `target` among them; lam and beta cover three powers of ten.
    """
    if method == "fedgft-control" or method in RULE_METHODS:
        grid = min(widest, MAX_TARGET) * np.linspace(0, 1, points) ** 2
        if target is not None:
            grid[np.argmin(np.abs(grid - target))] = target
        # No fixed thresholds have rates that are equal to the last row.
        least = GAP_TOLERANCE if method in RULE_METHODS else 0.0
        return np.sort(np.maximum(grid, least)).tolist()
    low, high = (0.1, 100.0) if METHODS[method].strength == "beta" else (0.3, 300.0)
    return np.geomspace(low, high, points).round(3).tolist()


def sweep_methods(
    study: Study,
    metric: Metric,
    alpha: float,
    methods: Sequence[str],
    *,
    points: int = 12,
    target: float | None = None,
) -> list[TradeoffPoint]:
    """The points of every method, FedAvg's first."""
    fedavg = study.run(alpha, "fedavg", metric)
    swept = [TradeoffPoint.from_result(fedavg)]
    widest = widest_gap(swept[0], metric)
    for method in methods:
        if method in RULE_METHODS:
            grid = strength_grid(method, points, widest=widest, target=target)
            pairs = apply_rules(study, fedavg, method, metric, grid)
            swept += [TradeoffPoint(method, t, *pair) for t, pair in zip(grid, pairs, strict=True)]
        elif method != "fedavg":
            strengths: Sequence[float | None] = [None]
            if method not in WITHOUT_STRENGTH:
                strengths = strength_grid(method, points, widest=widest, target=target)
            cells = [Point(alpha, strength=strength) for strength in strengths]
            swept += map(TradeoffPoint.from_result, study.sweep(method, metric, cells))
    return swept


def widest_gap(fedavg: TradeoffPoint, metric: Metric) -> float:
    """FedAvg's gap, up to which targets are swept; 0.1 where it has none."""
    gap = fedavg.mean(metric, "federation")[1]
    return gap if np.isfinite(gap) and gap > 0 else 0.1


def sweep_pooled(
    study: Study, metric: Metric, alpha: float, *, points: int, widest: float
) -> list[TradeoffPoint]:
    """The controller with one client that holds all training rows, tested on the same test rows.

    In the same number of rounds it takes more steps, as centralized training would.
    """
    settings = replace(study.protocol.settings, cohort=None, noise=0.0)
    protocol = replace(study.protocol, settings=settings, base="fedavg", mu=None, server_lr=None)
    merged = [
        replace(f, offsets=f.offsets[[0, -1]], keys=f.keys[:1]) for f in study.federations(alpha)
    ]
    pooled = replace(study, clients=1, protocol=protocol, _known={("federations", alpha): merged})
    grid = strength_grid("fedgft-control", points, widest=widest)
    results = pooled.sweep("fedgft-control", metric, [Point(alpha, strength=t) for t in grid])
    return [replace(TradeoffPoint.from_result(result), method="pooled") for result in results]


def fit_fairlearn_methods(
    study: Study, metric: Metric, alpha: float, fits: ResultCache
) -> list[TradeoffPoint]:
    """Fairlearn's two methods on the pooled rows of each replicate.

    A method that Fairlearn cannot fit (a group with one label only, for example) is left out, with
    a warning.
    """
    points = []
    work = FIT_COST * study.protocol.settings.rounds
    for bound in (*BOUNDS, None):
        name = "threshold-optimizer" if bound is None else "exponentiated-gradient"
        each = []
        try:
            for federation in study.federations(alpha):
                each.append(fit_fairlearn(federation, metric, bound, fits))
                study.on_progress("Fairlearn, pooled rows", work)
        except FedgftError:
            raise
        except ValueError as error:
            text = f"{name}: left out, Fairlearn cannot fit it ({error})"
            warnings.warn(text, NotEstimableWarning, stacklevel=2)
            continue
        points.append(TradeoffPoint(name, bound, *_stack_pairs(each)))
    return points


def point_row(study: Study, metric: Metric, alpha: float, point: TradeoffPoint) -> Row:
    """A point with the columns of `fedgft compare`; None where it has no scores or no strength.

    References have no scores. Columns about training are left out.
    """
    values = measure(metric, point.federation, point.test)
    of_decisions = ("accuracy_federation", "accuracy", "gap_hard", "gap_hard_test")
    return {
        **cell_columns(study, alpha, point.method, metric),
        "seeds": len(point.test.count),
        "strength": point.strength,
        **mean_sd({name: values[name] for name in of_decisions}),
        **decision_columns(
            study.dataset, metric, point.federation, point.test, counts=_count(point, metric)
        ),
        "gap_soft": mean_of(values["gap_soft"]),
        "gap_soft_test": mean_of(values["gap_soft_test"]),
    }


def _count(point: TradeoffPoint, metric: Metric) -> Statistics | None:
    """The counts for intervals, see `History.count_decisions`; None for references."""
    return None if point.result is None else point.result.history.count_decisions(metric)


def pareto_front(points: Sequence[TradeoffPoint], metric: Metric) -> list[TradeoffPoint]:
    """The points that no other beats in accuracy and gap on the clients' rows, smallest gap first.

    Gaps below the noise floor count as equal, so no accuracy is given up for them.
    """
    known = [(s, *_above_floor(s, metric)) for s in points if s.complete(metric)]
    known.sort(key=lambda item: (item[2], -item[1]))
    best = np.maximum.accumulate([-np.inf, *(accuracy for _, accuracy, _ in known)])
    return [s for (s, accuracy, _), other in zip(known, best, strict=False) if accuracy > other]


def find_knee(points: Sequence[TradeoffPoint], metric: Metric) -> TradeoffPoint | None:
    """The point beyond which a larger gap brings little further accuracy.

    It is the point farthest above the line between the two ends of the Pareto front, with both axes
    scaled to their range; None if no point lies above that line.
    """
    front = pareto_front(points, metric)
    if len(front) < 3:
        return None
    accuracy, gap = np.array([_above_floor(s, metric) for s in front]).T
    x = (gap - gap[0]) / (gap[-1] - gap[0])
    y = (accuracy - accuracy[0]) / (accuracy[-1] - accuracy[0])
    best = int(np.argmax(y - x))
    return front[best] if y[best] - x[best] > 0 else None


def choose_point(
    points: Sequence[TradeoffPoint], metric: Metric, target: float | None
) -> TradeoffPoint | None:
    """The most accurate trained method within the target, or else nearest to it.

    Without a target, it is the knee, or the fairest point if there is no knee. Points are compared
    by means over replicates on the clients' rows. A point that has collapsed in half of its
    replicates is chosen only if all points have.
    """
    known = [s for s in points if s.method in METHODS]
    trained = [s for s in known if s.collapsed().mean() < 0.5] or known
    front = pareto_front(trained, metric)
    best = find_knee(trained, metric) if target is None else best_within(trained, metric, target)
    return best or (front[0] if front else None)


def best_within(
    points: Sequence[TradeoffPoint], metric: Metric, gap: float
) -> TradeoffPoint | None:
    """The most accurate point with at most this gap on the clients' rows, or None."""
    fair = [s for s in points if s.complete(metric) and s.meets(metric, gap)]
    return max(fair, key=lambda s: s.mean(metric, "federation")[0], default=None)


def _above_floor(point: TradeoffPoint, metric: Metric) -> tuple[float, float]:
    """Accuracy, and the larger of the gap and its noise floor on these rows."""
    accuracy, gap = point.mean(metric, "federation")
    share = 1.0
    if point.result is not None:
        share = point.result.federations[0].dataset.effective_share
    chance = _mean(np.asarray(floor(metric, share * point.federation.statistics(metric, "hard"))))
    return accuracy, max(gap, chance) if np.isfinite(chance) else gap


def _mean(values: np.ndarray) -> float:
    mean = mean_of(values)
    return float("nan") if mean is None else mean


# References: thresholds by group, and Fairlearn's methods on pooled rows


def explain_no_rules(study: Study) -> str | None:
    """Why there are no decision rules for these rows; None if there are."""
    classes = len(study.dataset.classes)
    if study.dataset.row_weights is not None:
        return "rules count rows, and these have weights"
    if study.dataset.axis is not None:
        return "rules know neither strata nor randomized groups"
    return f"the label has {classes} classes" if classes != 2 else None


def _stack_pairs(pairs: Sequence[SumsPair]) -> SumsPair:
    """The sums of all replicates in one array per kind of rows."""
    clients, test = (stack(list(each)) for each in zip(*pairs, strict=True))
    return clients, test


def check_fairlearn(metric: Metric, classes: int) -> None:
    """Raise `FedgftError` unless Fairlearn is installed and has methods for this metric."""
    import_extra("fairlearn", "`references`")
    if metric.name not in CONSTRAINTS or classes != 2:
        raise FedgftError(
            f"`references`: Fairlearn has no method for {metric.name} with {classes} classes; "
            f"it knows {', '.join(CONSTRAINTS)} with two",
            kind="unsupported",
        )


def fit_fairlearn(
    federation: Federation, metric: Metric, bound: float | None, fits: ResultCache | None = None
) -> SumsPair:
    """ExponentiatedGradient with this bound, or (None) ThresholdOptimizer, on the pooled rows.

    Fits take long, so `fits` keeps them. The key is made of the rows themselves, in their own
    order, so that all partitions of one table share it. Training takes rows whose group is
    recorded; the sums are over all rows.
    """
    places = (np.sort(federation.rows), np.sort(federation.test))
    key = _fit_key(federation, metric, bound, places)
    kept = None if fits is None else fits.get(key)
    if kept is None:
        known = places[0][federation.dataset.groups[places[0]] >= 0]
        kept = {"decision": []}
        with warnings.catch_warnings():  # Fairlearn's, about its own dependencies
            warnings.simplefilter("ignore")
            accept = _fit(metric, bound, *_pooled_rows(federation, known))
            for rows in places:
                accepted = accept(*_pooled_rows(federation, rows)[::2])
                sums = _sum_decisions(federation, rows, accepted)
                kept["decision"].append(sums.decision.tolist())
        if fits is not None:
            fits.put(key, kept)
    clients, test = (_sums_of_decisions(np.array(each)) for each in kept["decision"])
    return clients, test


def _fit_key(
    federation: Federation, metric: Metric, bound: float | None, places: Sequence[np.ndarray]
) -> str:
    data = federation.dataset
    versions = [version(name) for name in ("fairlearn", "scikit-learn")]
    digest = hashlib.sha256(repr((metric.name, bound, versions)).encode())
    for function in (fit_fairlearn, _fit, _sum_decisions):
        digest.update(inspect.getsource(function).encode())
    for rows in places:
        # Hash unscaled features: the scaling depends on how the sums of the clients are rounded.
        for array in (data.features, data.labels, data.groups):
            digest.update(np.ascontiguousarray(array[rows]).data)
    return "fairlearn-" + digest.hexdigest()[:32]


def _fit(
    metric: Metric, bound: float | None, x: np.ndarray, y: np.ndarray, a: np.ndarray
) -> Accept:
    """Fit features `x`, labels `y` and groups `a`; return the rule that accepts rows."""
    linear_model = import_module("sklearn.linear_model")  # slow to import
    logistic = linear_model.LogisticRegression(max_iter=200)
    constraint, name = CONSTRAINTS[metric.name]
    if bound is not None:
        fairlearn = import_extra("fairlearn.reductions", "`references`")
        parity = getattr(fairlearn, constraint)(difference_bound=bound)
        mixture = fairlearn.ExponentiatedGradient(logistic, parity, eps=bound, max_iter=20)
        mixture.fit(x, y, sensitive_features=a)
        return lambda x, a: mixture._pmf_predict(x)[:, 1]
    fairlearn = import_extra("fairlearn.postprocessing", "`references`")
    options = {"constraints": name, "predict_method": "predict_proba"}
    adjusted = fairlearn.ThresholdOptimizer(estimator=logistic, **options)
    adjusted.fit(x, y, sensitive_features=a)

    def accept(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        """Rows without a group are decided by the estimator, at one half."""
        accepted = 1.0 * (adjusted.estimator_.predict_proba(x)[:, 1] >= 0.5)
        known = a >= 0
        accepted[known] = adjusted._pmf_predict(x[known], sensitive_features=a[known])[:, 1]
        return accepted

    return accept


def _pooled_rows(
    federation: Federation, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = federation.dataset
    return federation.scale_rows(rows), data.labels[rows], data.groups[rows]


def _sum_decisions(federation: Federation, rows: np.ndarray, positive: np.ndarray) -> Sums:
    """The sums of decisions, each with its probability; there are no scores."""
    data = federation.dataset
    positive = np.clip(positive, 0.0, 1.0)  # weights of a mixture add up to one but for rounding
    probs = np.stack((1 - positive, positive), 1)
    sums = Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))
    return _sums_of_decisions(sums.score)


def _sums_of_decisions(decision: np.ndarray) -> Sums:
    return Sums(decision.sum(-1), np.full_like(decision, np.nan), decision)

"""Group-blind rules: fair decisions where the group may not be used to decide.

A model of label and group given the columns, trained by sums of gradients over all clients, gives
P(Y = y, A = g | x). With the model's score s(x) = P(Y = 1 | x), the best rule with gaps within the
targets that sees only x accepts a person if (the Lagrangian of the problem is linear in decisions)

    benefit s(x) - cost (1 - s(x)) - sum over v, g:  lam[v, g] c[v, g](x)  >=  0

where c[v, g](x) is what accepting this person adds to the rate of group g under condition v, in
expectation: for statistical parity P(A = g | x) / P(A = g), for equal opportunity
P(Y = 1, A = g | x) / P(Y = 1, A = g). So the threshold of the score bends with the person's columns
(Corbett-Davies et al. 2017; Zeng et al. 2024).

The multipliers lam minimize the dual problem, a convex function whose value and gradient are sums
over rows. The model of the group is not perfect, so the rates of real decisions differ from the
expected ones; this difference is measured, in sums as well, and the targets are shifted by it. A
last search looks at the value and the gaps of real decisions alone. The sites use the group to fit
the rule; deciding takes columns only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from threadpoolctl import threadpool_limits  # comes with scikit-learn

from fedgft.data.dataset import Dataset, Federation, get_raw_scaling, standardize
from fedgft.data.encode import Encoder, Numeric, data_error
from fedgft.data.public import load
from fedgft.data.table import read_frame
from fedgft.errors import FedgftError
from fedgft.fair_model import softmax
from fedgft.formatting import printable
from fedgft.metrics.metric import Metric
from fedgft.rules.adjustment import check_weight, describe_outcome, find_rule, read_limits
from fedgft.rules.counts import ALL_SITES, RuleCounts, count_federation
from fedgft.rules.decision_rule import Acceptance, DecisionRule
from fedgft.rules.expect import RuleOutcome
from fedgft.rules.group_model import MAX_LOGIT, GroupModel, to_logit
from fedgft.rules.rule_problem import RuleProblem, Target
from fedgft.site_sums import MeasurementSpec

STEPS = 200  # of the training of the group model
MAX_KEPT_ROWS = 200_000  # of a federation whose group model is kept
RIDGE = 1e-6  # keeps its weights finite
MAX_SHIFTS = 6  # how often the targets are shifted
MAX_TRIALS = 400  # of one search without gradients
STEP_SIZES = (0.05, 0.02)  # of its first steps
PENALTY = 5.0  # lost value per unit of a gap above its target; more than any gap saves
TOLERANCE = 5e-4  # by which a gap may exceed its target
SMOOTH = 0.004  # width of the rounding of the dual problem's kinks, in units of the score
MAX_MULTIPLIER = 5.0


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows whose group is recorded, and the rates that decisions about them have.

    Parameters
    ----------
    scores, labels, groups
        (n,) each.
    pairs
        (n, 2, g): P(Y = y, A = g | x).
    metrics
        The metrics with their largest gaps.
    benefit, cost
        The value of a right positive decision, and the cost of a wrong one.
    """

    scores: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    pairs: np.ndarray
    metrics: Mapping[Metric, float]
    benefit: float
    cost: float

    @cached_property
    def gain(self) -> np.ndarray:
        """What accepting each person is worth, (n,), in units of the score."""
        return self.scores - self.cost / (self.benefit + self.cost)

    @cached_property
    def units(self) -> list[np.ndarray]:
        """For each metric, (v, y): what accepting a row of this label adds to the numerator."""
        found = []
        for metric in self.metrics:
            slope, offset = metric.affine(2)
            unit = slope[0] + offset[0][..., None]
            found.append(unit[..., 1] - unit[..., 0])
        return found

    @cached_property
    def bases(self) -> list[np.ndarray]:
        """For each metric, (v, g): the rate if nobody is accepted."""
        found = []
        for metric, shares in zip(self.metrics, self._denominators, strict=True):
            slope, offset = metric.affine(2)
            rejected = offset[0] + slope[0][..., 0]  # (v, y)
            found.append(rejected @ self._cells / shares)
        return found

    @cached_property
    def _cells(self) -> np.ndarray:
        """The share of rows of each label and group, (y, g)."""
        cells = np.zeros(self.pairs.shape[1:])
        np.add.at(cells, (self.labels, self.groups), 1 / len(self.labels))
        return cells

    @cached_property
    def _denominators(self) -> list[np.ndarray]:
        """For each metric, (v, g): the share of rows in the event."""
        found = []
        for metric in self.metrics:
            _, offset = metric.affine(2)
            share = offset[1] @ self._cells
            if (share <= 0).any():
                text = f"{metric.name} is not estimable: no row of its event in a group"
                raise FedgftError(text, field="target", kind="data")
            found.append(share)
        return found

    @cached_property
    def contributions(self) -> np.ndarray:
        """What accepting each person adds to each rate in expectation, (n, condition * group)."""
        parts = [
            np.einsum("vy,nyg->nvg", unit, self.pairs) / share
            for unit, share in zip(self.units, self._denominators, strict=True)
        ]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], 1)

    @cached_property
    def limits(self) -> np.ndarray:
        """The largest gap of each condition, (condition,)."""
        pairs = zip(self.metrics.values(), self.units, strict=True)
        return np.concatenate([np.full(len(unit), limit) for limit, unit in pairs])

    @property
    def shape(self) -> tuple[int, int]:
        """Conditions of all metrics, and groups."""
        return len(self.limits), self.pairs.shape[2]

    def decide(self, multipliers: np.ndarray) -> np.ndarray:
        """Return the decisions under these multipliers, (n,) bool."""
        return self.gain - self.contributions @ multipliers.ravel() >= 0

    def rates(self, accepted: np.ndarray) -> np.ndarray:
        """Return the rates of real decisions, (condition, group)."""
        chosen = np.zeros_like(self._cells)
        np.add.at(chosen, (self.labels, self.groups), accepted / len(accepted))
        parts = [
            base + unit @ chosen / share
            for base, unit, share in zip(self.bases, self.units, self._denominators, strict=True)
        ]
        return np.concatenate(parts)

    def expected_rates(self, accepted: np.ndarray) -> np.ndarray:
        """Return the rates that the group model expects of these decisions."""
        gained = (self.contributions * accepted[:, None]).mean(0).reshape(self.shape)
        return np.concatenate(self.bases) + gained

    def excess(self, rates: np.ndarray) -> float:
        """Return by how much the largest gap exceeds its limit."""
        return float((np.ptp(rates, axis=1) - self.limits).max())

    def worth(self, accepted: np.ndarray) -> float:
        """Return the value of the decisions per person, by the labels."""
        right = accepted & (self.labels == 1)
        wrong = accepted & (self.labels == 0)
        return float(self.benefit * right.mean() - self.cost * wrong.mean())

    def minimize_dual(self, start: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Return the multipliers, (condition, group), that minimize the dual problem.

        `shift` (condition, group) is added to the expected rates.
        """
        size = start.size
        bases = (np.concatenate(self.bases) + shift).ravel()
        half = np.repeat(self.limits, self.shape[1]) / 2

        def dual(x: np.ndarray) -> tuple[float, np.ndarray]:
            up, down = x[:size], x[size:]
            margin = (self.gain - self.contributions @ (up - down)) / SMOOTH
            value = SMOOTH * np.logaddexp(0.0, margin).mean()
            chance = 1 / (1 + np.exp(-np.clip(margin, -500, 500)))
            slope = -(self.contributions * chance[:, None]).mean(0) - bases
            value += float(half @ (up + down) - bases @ (up - down))
            return value, np.concatenate((half + slope, half - slope))

        groups = np.kron(np.eye(self.shape[0]), np.ones(self.shape[1]))  # sums over groups
        zero_sum = np.concatenate((groups, -groups), 1)
        optimize = import_module("scipy.optimize")  # slow to import
        found = optimize.minimize(
            dual,
            np.concatenate((np.maximum(start, 0).ravel(), np.maximum(-start, 0).ravel())),
            jac=True,
            method="SLSQP",
            bounds=[(0.0, MAX_MULTIPLIER)] * (2 * size),
            constraints={"type": "eq", "fun": lambda x: zero_sum @ x, "jac": lambda x: zero_sum},
            options={"maxiter": 200, "ftol": 1e-10},
        )
        return (found.x[:size] - found.x[size:]).reshape(self.shape)

    def search(self) -> tuple[np.ndarray, float]:
        """Return the best costs of the pairs found, (pair,), and by how much they miss the targets.

        Solutions of the dual problem with shifted targets come first; from the best of them, a
        search without gradients (Nelder and Mead) goes by the value and the gaps of real decisions.
        """
        multipliers = np.zeros(self.shape)
        tried = []
        for _ in range(MAX_SHIFTS):
            accepted = self.decide(multipliers)
            shift = self.rates(accepted) - self.expected_rates(accepted)
            multipliers = self.minimize_dual(multipliers, shift)
            costs = self.cost_pairs(multipliers)
            tried.append((self._penalize(costs), costs))
        best, costs = min(tried, key=lambda each: each[0])
        optimize = import_module("scipy.optimize")  # slow to import
        for size in STEP_SIZES:
            corners = costs + size * np.diag(np.where(np.arange(len(costs)) % 2, 1.0, -1.0))
            options = {
                "initial_simplex": np.vstack((costs, corners)),
                "maxfev": MAX_TRIALS,
                "adaptive": True,
                "xatol": 1e-5,
                "fatol": 1e-7,
            }
            found = optimize.minimize(self._penalize, costs, method="Nelder-Mead", options=options)
            if found.fun < best:
                best, costs = found.fun, found.x
        excess = self.excess(self.rates(self.apply(costs)))
        return costs, excess if excess > TOLERANCE else 0.0

    def apply(self, costs: np.ndarray) -> np.ndarray:
        """Return the decisions under these costs of the pairs, (n,) bool."""
        return self.gain - self.pairs.reshape(len(self.pairs), -1) @ costs >= 0

    def _penalize(self, costs: np.ndarray) -> float:
        """Return a number to minimize: the lost value, and a penalty for gaps above the targets."""
        accepted = self.apply(costs)
        return PENALTY * max(0.0, self.excess(self.rates(accepted))) - self.worth(accepted)

    def cost_pairs(self, multipliers: np.ndarray) -> np.ndarray:
        """Return by how much the threshold rises per probability of each pair, (pair,)."""
        costs = np.zeros(self.pairs.shape[1:])  # (y, g)
        first = 0
        for unit, share in zip(self.units, self._denominators, strict=True):
            mine = multipliers[first : first + len(unit)]
            costs += np.einsum("vg,vy->yg", mine / share, unit)
            first += len(unit)
        return costs.ravel()


def fit_blind_rule(
    federation: Federation,
    scores: np.ndarray,
    *,
    target: Mapping[Any, float],
    benefit: float = 1.0,
    cost: float = 1.0,
    attribute: str = "group",
    label: str = "",
    digests: Mapping[str, str] | None = None,
    steps: int = STEPS,
    nearest: bool = False,
) -> DecisionRule:
    """Return the best rule with gaps within the targets that decides without the group.

    Parameters
    ----------
    federation
        The rows of all clients, with columns, labels of two classes, and groups.
    scores
        (n,) The model's probability of the positive class for each row of the data set.
    target
        The largest gap, by metric, such as ``{"sp": 0.02}``.
    benefit, cost
        The value of a right positive decision and the cost of a wrong one.
    attribute
        The name of the group column, for reports.
    label
        The name of the column of labels, for reports.
    digests
        The SHA-256 of each client's table, by its name. None: it is not recorded.
    steps
        The largest number of steps of the training of the group model.
    nearest
        Whether to return the nearest rule if none meets the targets, instead of raising an error.

    Returns
    -------
    DecisionRule
        The rule. `DecisionRule.decide` takes scores and ``features``, and no groups.
    """
    data = federation.dataset
    limits = read_limits("target", target)
    benefit = check_weight("benefit", benefit)
    cost = check_weight("cost", cost)
    if not limits:
        raise FedgftError("is missing: a gap, such as {'sp': 0.02}", field="target", kind="missing")
    if improper := [metric.name for metric in limits if not metric.proper()]:
        text = f"{improper[0]}: a group-blind rule takes sp, eop, eo, fpr or acc"
        raise FedgftError(text, field="target", kind="unsupported")
    _check(data, scores)
    given = federation
    federation = _keep_recorded(federation)
    rows = federation.rows
    groups = len(data.group_names)
    scores = np.asarray(scores, np.float64)
    weight, bias, pairs = _train_group_model(given, federation, scores, steps)
    model = _read_group_model(federation, weight, bias)
    known = _Rows(
        scores=scores[rows],
        labels=data.labels[rows],
        groups=data.groups[rows],
        pairs=pairs.reshape(-1, 2, groups),
        metrics=limits,
        benefit=benefit,
        cost=cost,
    )
    with threadpool_limits(1):
        costs, excess = known.search()
    if excess > 0 and not nearest:
        reached = ", ".join(f"{m.name} {v + excess:.4f}" for m, v in limits.items())
        text = f"no group-blind rule was found within it; the nearest reaches {reached}"
        raise FedgftError(text, field="target", kind="data")
    threshold = cost / (benefit + cost)
    before = _count_decisions(known, known.scores >= threshold, data, attribute)
    after = _count_decisions(known, known.apply(costs), data, attribute)
    targets = tuple(Target(metric, (0,), limit) for metric, limit in limits.items())
    problem = RuleProblem(after.counts, targets, benefit=benefit, cost=cost)
    by_group = find_rule(  # what it would cost with the group, to compare
        count_federation(federation, scores),
        limits,
        {},
        randomized=True,
        benefit=benefit,
        cost=cost,
        nearest=True,
    )
    expected = describe_outcome(problem, [(0,)], before, after)
    expected["accuracy"]["by_group"] = by_group.expected["accuracy"]["after"]
    return DecisionRule(
        classes=(data.classes[0], data.classes[1]),
        attributes=(),
        cells={(None, ()): Acceptance((threshold,))},
        group_model=replace(model, costs=costs),
        fitted={
            "date": date.today().isoformat(),
            "target": {metric.name: limit for metric, limit in limits.items()},
            "local": {},
            "groups": [attribute],
            "benefit": benefit,
            "cost": cost,
            "met": excess <= 0,
            "proven": False,
            "rows": float(len(rows)),
            "label": label,
            "sums": dict(digests or {}),
        },
        expected=expected,
    )


_trained: "WeakKeyDictionary[Federation, tuple[Any, ...]]" = WeakKeyDictionary()


def _train_group_model(
    given: Federation, recorded: Federation, scores: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, biases, and the probability of each label and group for each row.

    The model depends neither on metrics nor on targets. The last one of each federation is kept,
    because studies fit rules for many targets to the same scores.

    Parameters
    ----------
    given
        The federation that the user has passed.
    recorded
        The same without rows whose group is not recorded.
    scores
        (n,) The score of each row of the data set.
    steps
        The largest number of steps.
    """
    rows = recorded.rows
    key = (steps, sha256(scores[rows].tobytes()).digest())
    if _trained.get(given, (None,))[0] == key:
        return _trained[given][1]
    data = recorded.dataset
    groups = len(data.group_names)
    features = np.column_stack((recorded.scale_rows(rows), to_logit(scores[rows]) / MAX_LOGIT))
    labels = data.labels[rows] * groups + data.groups[rows]
    with threadpool_limits(1):  # many small products: threads would wait for each other
        found = train_softmax(features, labels, 2 * groups, steps=steps)
    if len(rows) <= MAX_KEPT_ROWS:
        _trained[given] = (key, found)
    return found


def fit_blind_rule_to_tables(
    paths: Sequence[Path],
    *,
    label: str,
    group: Sequence[str],
    score: str,
    target: Mapping[Any, float],
    positive: str | None = None,
    leave_out: Sequence[str] = (),
    benefit: float = 1.0,
    cost: float = 1.0,
    nearest: bool = False,
) -> DecisionRule:
    """Return the best group-blind rule for the scores in the tables of the clients.

    Parameters
    ----------
    paths
        A CSV or Parquet file for each client.
    label, group, score
        The columns with the true outcome, with the groups, and with the probability of the positive
        class.
    target
        The largest gap, by metric.
    positive
        The label that is positive; None: the alphabetically last.
    leave_out
        Columns that the rule must not read.
    benefit, cost, nearest
        As in `fit_blind_rule`.
    """
    given = list(paths) if len(paths) > 1 else paths[0]
    names = group[0] if len(group) == 1 else tuple(group)
    data = load(given, label=label, group=names, positive=positive, leave_out=tuple(leave_out))
    data, scores = _take_scores(data, score, str(paths[0]))
    for path in paths:
        column = read_frame(path)[score]  # `load` has filled in what is missing
        if (column.fill_nan(None) if column.dtype.is_float() else column).null_count():
            raise data_error(str(path), f"score column '{score}' must hold a number in every row")
    every = np.arange(len(data))
    federation = Federation(data, every, np.array([0, len(data)]), every[:0])
    return fit_blind_rule(
        standardize(federation),
        scores,
        target=target,
        benefit=benefit,
        cost=cost,
        attribute=" & ".join(group),
        label=label,
        digests={path.stem: sha256(path.read_bytes()).hexdigest() for path in paths},
        nearest=nearest,
    )


def _take_scores(data: Dataset, score: str, source: str) -> tuple[Dataset, np.ndarray]:
    """Return the data set without the column of scores, and the scores."""
    encoder = data.encoder
    assert encoder is not None  # `load` reads tables only
    found = [field for field in encoder.fields if field.name == score]
    if not found:
        known = ", ".join(field.name for field in encoder.fields[:12])
        raise data_error(source, f"no column '{score}' (`score`) among {known}")
    (field,) = found
    if not isinstance(field, Numeric) or field.indicator:
        problem = f"score column '{score}' must hold a number in every row"
        raise data_error(source, problem)
    at = data.columns.index(score)
    rest = [i for i in range(len(data.columns)) if i != at]
    if not rest:
        raise data_error(source, f"has no columns besides '{score}' for a group-blind rule to read")
    trimmed = replace(
        data,
        features=data.features[:, rest],
        columns=tuple(data.columns[i] for i in rest),
        encoder=Encoder(tuple(each for each in encoder.fields if each is not field)),
    )
    return trimmed, data.features[:, at].astype(np.float64)


def find_group_columns(data: Dataset) -> list[str]:
    """Return the features whose values divide the groups without overlap, such as ``sex=Male``.

    A blind rule must not read them.
    """
    known = data.groups >= 0
    groups = data.groups[known]
    found = []
    for i, name in enumerate(data.columns):
        values = data.features[known, i]
        if len(np.unique(values[:1000])) > len(data.group_names):
            continue
        _, codes = np.unique(values, return_inverse=True)
        occurs = np.zeros((codes.max(initial=0) + 1, len(data.group_names)), bool)
        occurs[codes, groups] = True
        reached = occurs[0]  # the groups that are linked to those of the first value
        for _ in occurs:
            reached = occurs[(occurs & reached).any(1)].any(0)
        if not reached[occurs.any(0)].all():
            found.append(name)
    return found


def _check(data: Dataset, scores: Any) -> None:
    """Raise a `FedgftError` for data that a blind rule cannot be fitted on."""
    if data.images:
        raise FedgftError("a group-blind rule needs a table, not images", kind="unsupported")
    if len(data.classes) != 2:
        text = f"a rule decides between two classes, these rows have {len(data.classes)}"
        raise FedgftError(text, kind="unsupported")
    values = np.asarray(scores)
    if values.shape != (len(data),) or values.dtype.kind not in "fiub":
        text = f"must be one probability per row, ({len(data)},), not of the shape {values.shape}"
        raise FedgftError(text, field="scores")
    if not ((values >= 0) & (values <= 1)).all():  # NaN is refused, too
        raise FedgftError("must be probabilities, from 0 to 1", field="scores", kind="data")
    if len(data.group_names) < 2:
        text = f"a rule compares groups, and there is one only, {printable(data.group_names[0])}"
        raise FedgftError(text, kind="data")
    if telling := find_group_columns(data):
        column = telling[0].partition("=")[0]
        text = (
            f"the column {column!r} tells the group of every row, and a group-blind rule must "
            "not read it: leave it out, or use thresholds by group"
        )
        raise FedgftError(text, kind="data")


def _keep_recorded(federation: Federation) -> Federation:
    """Return the federation of the training rows whose group is recorded."""
    known = federation.dataset.groups[federation.rows] >= 0
    if not known.any():
        raise FedgftError("no row has its group recorded", kind="data")
    kept = np.concatenate(([0], np.cumsum(known)))[federation.offsets]
    return replace(federation, rows=federation.rows[known], offsets=kept)


def train_softmax(
    features: np.ndarray, labels: np.ndarray, classes: int, *, steps: int = STEPS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train a linear softmax model on the rows of all clients by L-BFGS.

    Loss and gradient are sums over rows, so clients that send these two sums for each step get the
    model of the pooled rows; local training would drift apart, because clients differ in groups.

    Parameters
    ----------
    features
        (n, d), standardized.
    labels
        (n,): the class of each row.
    classes
        The number of classes.
    steps
        The largest number of steps.

    Returns
    -------
    weight, bias, probabilities
        (classes, d), (classes,) and (n, classes).
    """
    rows, width = features.shape
    at = np.arange(rows)

    def predict(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table = x.reshape(classes, width + 1)
        return table, softmax(features @ table[:, :-1].T + table[:, -1])

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        table, chance = predict(x)
        value = -np.log(np.maximum(chance[at, labels], 1e-300)).mean()
        chance[at, labels] -= 1.0
        slope = np.concatenate((chance.T @ features, chance.sum(0)[:, None]), 1) / rows
        slope[:, :-1] += RIDGE * table[:, :-1]
        return float(value + RIDGE / 2 * (table[:, :-1] ** 2).sum()), slope.ravel()

    optimize = import_module("scipy.optimize")  # slow to import
    shares = np.bincount(labels, minlength=classes) / rows
    start = np.zeros((classes, width + 1))
    start[:, -1] = np.log(np.maximum(shares, 1e-6))
    options = {"maxiter": steps, "ftol": 1e-9, "gtol": 1e-6}
    found = optimize.minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    table, chance = predict(found.x)
    return table[:, :-1], table[:, -1], chance


def _read_group_model(federation: Federation, weight: np.ndarray, bias: np.ndarray) -> GroupModel:
    """Return the trained model in units of the raw features, without costs."""
    data = federation.dataset
    mean, spread = get_raw_scaling(federation)
    raw = weight / np.append(spread, MAX_LOGIT)
    encoder = data.encoder or Encoder(tuple(Numeric(name, 0.0) for name in data.columns))
    return GroupModel(
        encoder=encoder,
        weight=raw,
        bias=bias - raw[:, :-1] @ mean,
        pairs=tuple((y, (name,)) for y in range(2) for name in data.group_names),
        costs=np.zeros(2 * len(data.group_names)),
    )


def _count_decisions(
    known: _Rows, accepted: np.ndarray, data: Dataset, attribute: str
) -> RuleOutcome:
    """Return the outcome of decisions, from counts by group, label and decision."""
    counts = np.zeros((1, len(data.group_names), 2, 2))
    np.add.at(counts[0], (known.groups, known.labels, accepted.astype(int)), 1.0)
    found = RuleCounts(
        spec=MeasurementSpec(data.classes, (attribute,)),
        reads="decision",
        sites=(ALL_SITES,),
        groups=tuple((name,) for name in data.group_names),
        counts=counts,
        decided=counts[..., 1],
        noise=None,
        shifts=None,
        digests={},
    )
    return RuleOutcome.of(found, {}, Acceptance())

"""The trade-off between accuracy and gap: every method over its whole range of strengths.

All strengths and replicates of a method are one batch of runs. What is chosen (the knee, or the
most accurate model within a target) is chosen on the federation's rows; test rows are only shown.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgft.engine.picking import SLACK
from fedgft.errors import FedgftError
from fedgft.experiments.references import fairlearn_fit, thresholds
from fedgft.experiments.rows import behind, interval, mean_of, mean_sd
from fedgft.experiments.shelf import Shelf
from fedgft.experiments.study import Point, Result, Study
from fedgft.federated.methods import SINGLE
from fedgft.metrics import Metric, NotEstimableWarning, Tally, stack
from fedgft.metrics.decisions import collapsed
from fedgft.metrics.intervals import floor

TRAINED = (*SINGLE, "lft", "fairfed", "fedgft", "fedgft-control")
BOUNDS = (0.001, 0.01, 0.03)  # of ExponentiatedGradient
WIDEST = 0.99  # a target is below one


@dataclass(frozen=True, eq=False)
class Spot:
    """One method at one strength; tallies are (replicate, ...)."""

    method: str
    strength: float | None
    federation: Tally
    test: Tally
    result: Result | None = None  # what was trained, where it was trained by us

    def values(self, metric: Metric, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy and gap of decisions, one a replicate, on `federation` or `test` rows."""
        tally: Tally = getattr(self, where)
        return tally.accuracy(), tally.gap(metric, "hard")

    def mean(self, metric: Metric, where: str) -> tuple[float, float]:
        """Each over the replicates that have it."""
        accuracy, gap = self.values(metric, where)
        return _mean(accuracy), _mean(gap)

    def complete(self, metric: Metric) -> bool:
        """Every replicate has both: else those that are missing might be the bad ones."""
        return all(np.isfinite(v).all() for v in self.values(metric, "federation"))

    def meets(self, metric: Metric, target: float) -> bool:
        """On average, on the federation's rows."""
        return self.mean(metric, "federation")[1] <= target + SLACK

    def collapsed(self) -> np.ndarray:
        """(replicate,): the model gives nearly everybody the same class."""
        return collapsed(self.federation)

    def nearest(self, metric: Metric, target: float | None) -> int:
        """The replicate that is handed over: the most accurate within the target, or else the
        fairest; without a target, the one whose gap is nearest to the mean. Collapsed models only
        where there are no others."""
        accuracy, gap = self.values(metric, "federation")
        if target is None:
            return int(np.nanargmin(np.abs(gap - np.nanmean(gap)) + self.collapsed()))
        within = (gap <= target + SLACK) & ~self.collapsed()
        if within.any():
            return int(np.argmax(np.where(within, accuracy, -np.inf)))
        return int(np.nanargmin(gap + self.collapsed()))


def strengths(
    study: Study, method: str, points: int, *, widest: float, target: float | None = None
) -> list[float]:
    """What is swept. Targets and tolerances reach from nothing to FedAvg's own gap, closer together
    near zero, the one that was asked for among them; lam and beta go over three powers of ten."""
    if method in ("fedgft-control", "thresholds"):
        grid = min(widest, WIDEST) * np.linspace(0, 1, points) ** 2
        if target is not None:
            grid[np.argmin(np.abs(grid - target))] = target
        least = SLACK if method == "thresholds" else 0.0  # equal to the last row is only "nobody"
        return np.sort(np.maximum(grid, least)).tolist()
    low, high = (0.1, 100.0) if study.protocol.strengths[method] == "beta" else (0.3, 300.0)
    return np.geomspace(low, high, points).round(3).tolist()


def sweep(
    study: Study, metric: Metric, alpha: float, methods: Sequence[str], *, points: int = 12,
    target: float | None = None,
) -> list[Spot]:  # fmt: skip
    """Every method's spots, FedAvg's first."""
    plain = _spots(study.sweep("fedavg", metric, [Point(alpha)]))
    widest, out = gap_of(plain[0], metric), [*plain]
    for method in methods:
        if method == "fedavg":
            continue
        if method == "lrw":
            out += _spots(study.sweep("lrw", metric, [Point(alpha)]))
            continue
        grid = strengths(study, method, points, widest=widest, target=target)
        if method == "thresholds":
            assert plain[0].result is not None
            found = thresholds(study, plain[0].result, grid)
            out += [Spot(method, t, *pair) for t, pair in zip(grid, found, strict=True)]
        else:
            out += _spots(study.sweep(method, metric, [Point(alpha, strength=s) for s in grid]))
    return out


def gap_of(plain: Spot, metric: Metric) -> float:
    """FedAvg's gap, up to which targets are swept; a tenth where there is none."""
    gap = plain.mean(metric, "federation")[1]
    return gap if np.isfinite(gap) and gap > 0 else 0.1


def pooled(study: Study, metric: Metric, alpha: float, *, points: int, widest: float) -> list[Spot]:
    """The same method on the same rows in one place: one client that holds everything, judged on
    the same test rows. In as many rounds it makes more steps, as whoever has all rows would."""
    settings = replace(study.protocol.settings, cohort=None, noise=0.0)
    plain = replace(study.protocol, settings=settings, base="fedavg", mu=None, server_lr=None)
    merged = [replace(f, offsets=f.offsets[[0, -1]], keys=f.keys[:1])
              for f in study.federations(alpha)]  # fmt: skip
    together = replace(study, clients=1, protocol=plain, _known={("federations", alpha): merged})
    grid = strengths(together, "fedgft-control", points, widest=widest)
    targets = [Point(alpha, strength=t) for t in grid]
    spots = _spots(together.sweep("fedgft-control", metric, targets))
    return [replace(spot, method="pooled") for spot in spots]


def fairlearn(
    study: Study, metric: Metric, alpha: float, shelf: Shelf, on_fit: Callable[[], None]
) -> list[Spot]:
    """Fairlearn's two methods on each replicate's pooled rows; `on_fit` is told after each fit."""
    out = []
    for name, bound in (*(("exponentiated-gradient", b) for b in BOUNDS),
                        ("threshold-optimizer", None)):  # fmt: skip
        each = []
        try:
            for federation in study.federations(alpha):
                each.append(fairlearn_fit(federation, metric, bound, shelf))
                on_fit()
        except FedgftError:
            raise
        except ValueError as error:  # a group with one label only, for example
            text = f"{name}: left out, Fairlearn cannot fit it ({error})"
            warnings.warn(text, NotEstimableWarning, stacklevel=2)
            continue
        clients, test = (stack([pair[i] for pair in each]) for i in (0, 1))
        out.append(Spot(name, bound, clients, test))
    return out


def spot_row(study: Study, metric: Metric, alpha: float | None, spot: Spot) -> dict[str, Any]:
    """As `fedgft compare` has them; null where a method has no scores or no strength."""
    decisions = spot.test.statistics(metric, "hard")
    out: dict[str, Any] = {
        "data": study.dataset.name, "alpha": alpha, "method": spot.method, "metric": metric.name,
        "protocol": study.protocol.name, "seeds": len(spot.test.count), "strength": spot.strength,
    }  # fmt: skip
    for name, tally in (("_federation", spot.federation), ("", spot.test)):
        out |= mean_sd("accuracy" + name, tally.accuracy())
    out |= mean_sd("gap_hard", spot.federation.gap(metric, "hard"))
    out |= mean_sd("gap_hard_test", spot.test.gap(metric, "hard"))
    out |= interval(metric, spot.test)
    out |= {"floor": mean_of(floor(metric, decisions))}
    out |= behind(study.dataset, metric, spot.federation, spot.test)
    out |= {"gap_soft": mean_of(spot.federation.gap(metric, "soft")),
            "gap_soft_test": mean_of(spot.test.gap(metric, "soft"))}  # fmt: skip
    return out


def pareto(spots: Sequence[Spot], metric: Metric) -> list[Spot]:
    """Those that no other beats in both, on the federation's rows; the smallest gap first.

    Gaps that chance alone would show are all alike: nobody pays accuracy for less than that.
    """
    known = [(s, *_told_apart(s, metric)) for s in spots if s.complete(metric)]
    known.sort(key=lambda item: (item[2], -item[1]))
    out, best = [], -np.inf
    for spot, accuracy, _ in known:
        if accuracy > best:
            out.append(spot)
            best = accuracy
    return out


def knee(spots: Sequence[Spot], metric: Metric) -> Spot | None:
    """Where giving up more gap stops buying accuracy: farthest above the line between the two
    ends of the frontier, both axes scaled to their range. None where there is no bend."""
    front = pareto(spots, metric)
    if len(front) < 3:
        return None
    accuracy, gap = np.array([_told_apart(s, metric) for s in front]).T
    x = (gap - gap[0]) / (gap[-1] - gap[0])
    y = (accuracy - accuracy[0]) / (accuracy[-1] - accuracy[0])
    best = int(np.argmax(y - x))
    return front[best] if y[best] - x[best] > 0 else None


def choose(spots: Sequence[Spot], metric: Metric, target: float | None) -> Spot | None:
    """The most accurate trained method within the target, or else nearest to it; without one the
    knee, or where nothing bends the fairest. On the federation's rows, means over replicates. What
    has collapsed in half of the replicates or more is chosen only where everything has."""
    known = [s for s in spots if s.method in TRAINED]
    trained = [s for s in known if s.collapsed().mean() < 0.5] or known
    front = pareto(trained, metric)
    if target is None:
        return knee(trained, metric) or (front[0] if front else None)
    return within(trained, metric, target) or (front[0] if front else None)


def within(spots: Sequence[Spot], metric: Metric, gap: float) -> Spot | None:
    """A method's most accurate strength with at most this gap, both on the federation's rows."""
    fair = [s for s in spots if s.complete(metric) and s.meets(metric, gap)]
    return max(fair, key=lambda s: s.mean(metric, "federation")[0], default=None)


def _told_apart(spot: Spot, metric: Metric) -> tuple[float, float]:
    """Accuracy, and the gap or what chance alone would show on these rows, if that is more."""
    accuracy, gap = spot.mean(metric, "federation")
    chance = _mean(np.asarray(floor(metric, spot.federation.statistics(metric, "hard"))))
    return accuracy, max(gap, chance) if np.isfinite(chance) else gap


def _spots(results: Sequence[Result]) -> list[Spot]:
    out = []
    for result in results:
        history = result.history
        assert history.federation is not None
        swept = result.method not in SINGLE
        strength = float(result.strength[0]) if swept else None
        out.append(Spot(result.method, strength, history.federation[-1], history.test[-1], result))
    return out


def _mean(values: np.ndarray) -> float:
    found = mean_of(values)
    return float("nan") if found is None else found

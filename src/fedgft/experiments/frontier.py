"""The trade-off between accuracy and gap: every method over its whole range of strengths.

All strengths and replicates of a method are one batch of runs. What is chosen (the knee, or the
most accurate model within a target) is chosen on the federation's rows; test rows are only shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fedgft.experiments.references import fairlearn_fit, thresholds
from fedgft.experiments.study import Point, Result, Study
from fedgft.metrics import Metric, Tally, stack
from fedgft.metrics.intervals import floor, gap_interval

TRAINED = ("fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control")
SWEPT = ("fairfed", "lft", "fedgft", "fedgft-control", "thresholds")
SINGLE = ("fedavg", "lrw")
BOUNDS = (0.001, 0.01, 0.03)  # of ExponentiatedGradient
WITHIN = 0.002  # of a target


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
        accuracy, gap = self.values(metric, where)
        return _mean(accuracy), _mean(gap)


def strengths(study: Study, method: str, points: int, *, widest: float) -> list[float]:
    """What is swept. Targets and tolerances reach from nothing to FedAvg's own gap, closer together
    near zero; lam and beta over three powers of ten around the protocol's."""
    if method in ("fedgft-control", "thresholds"):
        least = WITHIN if method == "thresholds" else 0.0  # equal to the last row is only "nobody"
        return np.maximum(widest * np.linspace(0, 1, points) ** 2, least).tolist()
    low, high = (0.1, 100.0) if study.protocol.strengths[method] == "beta" else (0.3, 300.0)
    return np.geomspace(low, high, points).round(3).tolist()


def sweep(
    study: Study, metric: Metric, alpha: float, methods: Sequence[str], *, points: int = 12
) -> list[Spot]:
    """Every method's spots, FedAvg's first."""
    plain = _spots(study.sweep("fedavg", metric, [Point(alpha)]))
    widest = plain[0].mean(metric, "federation")[1]
    widest = widest if np.isfinite(widest) and widest > 0 else 0.1
    out = [*plain]
    for method in methods:
        if method == "fedavg":
            continue
        if method == "lrw":
            out += _spots(study.sweep("lrw", metric, [Point(alpha)]))
            continue
        grid = strengths(study, method, points, widest=widest)
        if method == "thresholds":
            assert plain[0].result is not None
            found = thresholds(study, plain[0].result, grid)
            out += [Spot(method, t, *pair) for t, pair in zip(grid, found, strict=True)]
        else:
            out += _spots(study.sweep(method, metric, [Point(alpha, strength=s) for s in grid]))
    return out


def pooled(study: Study, metric: Metric, *, points: int, widest: float) -> list[Spot]:
    """The same method on the same rows in one place: one client that holds everything."""
    together = replace(study, clients=1, kind="iid", _known={})
    grid = strengths(together, "fedgft-control", points, widest=widest)
    spots = _spots(together.sweep("fedgft-control", metric, [Point(1.0, strength=t) for t in grid]))
    return [replace(spot, method="pooled") for spot in spots]


def fairlearn(study: Study, metric: Metric, alpha: float, on_fit: Any) -> list[Spot]:
    """Fairlearn's two methods on each replicate's pooled rows; `on_fit` is told after each fit."""
    out = []
    for name, bound in (*(("exponentiated-gradient", b) for b in BOUNDS),
                        ("threshold-optimizer", None)):  # fmt: skip
        each = []
        for federation in study.federations(alpha):
            each.append(fairlearn_fit(federation, metric, bound))
            on_fit()
        clients, test = (stack([pair[i] for pair in each]) for i in (0, 1))
        out.append(Spot(name, bound, clients, test))
    return out


def spot_row(study: Study, metric: Metric, alpha: float | None, spot: Spot) -> dict[str, Any]:
    """As `fedgft compare` has them; null where a method has no scores or no strength."""
    decisions = spot.test.statistics(metric, "hard")
    low, high = gap_interval(metric, decisions)
    out: dict[str, Any] = {
        "data": study.dataset.name, "alpha": alpha, "method": spot.method, "metric": metric.name,
        "protocol": study.protocol.name, "seeds": len(spot.test.count), "strength": spot.strength,
    }  # fmt: skip
    for name, tally in (("_federation", spot.federation), ("", spot.test)):
        out |= _both("accuracy" + name, tally.accuracy())
    out |= _both("gap_hard", spot.federation.gap(metric, "hard"))
    out |= _both("gap_hard_test", spot.test.gap(metric, "hard"))
    out |= {"gap_hard_test_low": _number(low), "gap_hard_test_high": _number(high),
            "floor": _number(floor(metric, decisions))}  # fmt: skip
    out |= {"gap_soft": _number(spot.federation.gap(metric, "soft")),
            "gap_soft_test": _number(spot.test.gap(metric, "soft"))}  # fmt: skip
    return out


def pareto(spots: Sequence[Spot], metric: Metric) -> list[Spot]:
    """Those that no other beats in both, on the federation's rows; the smallest gap first."""
    known = [(s, *s.mean(metric, "federation")) for s in spots]
    known = [(s, a, g) for s, a, g in known if np.isfinite(a) and np.isfinite(g)]
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
    accuracy, gap = np.array([s.mean(metric, "federation") for s in front]).T
    x = (gap - gap[0]) / (gap[-1] - gap[0])
    y = (accuracy - accuracy[0]) / (accuracy[-1] - accuracy[0])
    best = int(np.argmax(y - x))
    return front[best] if y[best] - x[best] > 0 else None


def choose(spots: Sequence[Spot], metric: Metric, target: float | None) -> Spot | None:
    """The most accurate trained model within the target, or else nearest to it; the knee where
    there is none. On the federation's rows."""
    trained = [s for s in spots if s.method in TRAINED]
    if target is None:
        return knee(trained, metric) or (pareto(trained, metric) or [None])[-1]
    front = pareto(trained, metric)
    within = [s for s in front if s.mean(metric, "federation")[1] <= target + WITHIN]
    return within[-1] if within else (front[0] if front else None)


def at_gap(spots: Sequence[Spot], metric: Metric, gap: float) -> float:
    """A method's held-out accuracy at a gap on the federation's rows, interpolated along its
    frontier; NaN beyond its ends (a smaller gap than it has reached is nobody's guess)."""
    front = pareto(spots, metric)
    points = [(s.mean(metric, "federation")[1], s.mean(metric, "test")[0]) for s in front]
    if points and gap >= points[-1][0]:
        return points[-1][1]
    for (g0, a0), (g1, a1) in pairwise(points):
        if g0 <= gap <= g1:
            return a0 + (a1 - a0) * (gap - g0) / (g1 - g0) if g1 > g0 else a1
    return float("nan")


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
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _number(values: np.ndarray) -> float | None:
    mean = _mean(np.asarray(values))
    return mean if np.isfinite(mean) else None


def _both(name: str, values: np.ndarray) -> dict[str, float | None]:
    known = values[np.isfinite(values)]
    spread = float(known.std(ddof=1)) if len(known) > 1 else None
    return {name: _number(values), f"{name}_sd": spread}

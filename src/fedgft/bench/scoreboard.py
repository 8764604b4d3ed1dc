"""The board: means over replicates, kept targets, ranks and hypervolumes of all cells.

Every number is of decisions about test rows; strengths were chosen on inner rows, per replicate and
target. A method keeps a target t if its mean gap, less 1.96 standard errors, is at most
sqrt(t^2 + f^2) + 0.003, where f is the mean noise floor: the gap of a fair model on as many rows.
Methods that keep a target are ranked by accuracy, in their league. Paired t-tests over replicates
compare each with the first, with Holm's correction for the number of tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedgft.bench.cell_training import ALL_METRICS, Cell
from fedgft.bench.choices import InnerRows, take_candidates
from fedgft.bench.entrants import LEAGUES, REFERENCE, TARGETS
from fedgft.bench.scores import FEWEST_LOCAL, Outcome, sums_of_decisions
from fedgft.metrics import Metric, get_metric

Z95 = 1.959963984540054
SLACK = 0.003  # of a mean gap above its target and the noise floor
POINTS_BELOW = 0.10  # accuracy of the reference point below FedAvg's
STEPS = 21  # targets of the curve that spans the hypervolume
LEVEL = 0.05  # of the corrected tests


@dataclass(frozen=True)
class Score:
    """One method at one target in one cell; fractions, None where not estimable.

    Parameters
    ----------
    track, metric, method, label, league, target
        Which one it is.
    accuracy, accuracy_low, accuracy_high
        Mean test accuracy with its 95% interval over replicates.
    gap, gap_low, gap_high
        The same of the test gap.
    floor
        The mean noise floor of the test rows.
    kept_share
        Share of replicates whose 95% interval of the test gap reaches down to the target.
    keeps
        Whether the method keeps the target.
    local_gap
        The mean of the largest gap at a site.
    unseen_gap
        The mean gap on the rows of a site that was left out of the training, at
        `UNSEEN_TARGET`.
    hypervolume
        See `measure_hypervolume`; the same for all targets.
    bytes_sent, seconds
        Per run.
    rank
        Among the methods of the league that keep the target; None if the method does not.
    p
        The corrected p-value of the difference in accuracy from the first; None for the first.
    reason
        Why the method does not offer the cell; empty if it does.
    """

    track: str
    metric: str
    method: str
    label: str
    league: str
    target: float
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    gap: float | None = None
    gap_low: float | None = None
    gap_high: float | None = None
    floor: float | None = None
    kept_share: float | None = None
    keeps: bool = False
    local_gap: float | None = None
    unseen_gap: float | None = None
    hypervolume: float | None = None
    bytes_sent: float | None = None
    seconds: float | None = None
    rank: int | None = None
    p: float | None = None
    reason: str = ""

    @property
    def is_tied(self) -> bool:
        """Whether the method is first, or cannot be told from the first."""
        return self.rank == 1 or (self.rank is not None and self.p is not None and self.p >= LEVEL)


def score_cells(cells: Sequence[Cell], metrics: dict[str, Sequence[str]]) -> list[Score]:
    """Return the scores of all cells at all targets, ranked.

    Parameters
    ----------
    cells
        The finished cells.
    metrics
        The metrics of each track; those of a method without strength are computed from one cell.
    """
    found = []
    for track, names in metrics.items():
        for name in names:
            metric = get_metric(name)
            mine = [c for c in cells if c.track == track and c.metric in (name, ALL_METRICS)]
            measured = [MeasuredCell(cell, metric) for cell in mine]
            for target in TARGETS:
                found += _score_column(measured, target)
    return found


@dataclass(frozen=True, eq=False)
class MeasuredCell:
    """A cell, measured by one metric."""

    cell: Cell
    metric: Metric

    @cached_property
    def inner(self) -> InnerRows:
        """What strengths are chosen by."""
        asked = self.cell.grid if self.cell.has_targets else None
        return InnerRows.of(self.outcome, self.metric, asked)

    @property
    def outcome(self) -> Outcome:
        """The counts (candidate, seed, ...) of a cell that is offered."""
        assert self.cell.outcome is not None
        return self.cell.outcome

    @cached_property
    def _test(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.outcome.accuracy()), np.asarray(self.outcome.gap(self.metric))

    def at(self, target: float) -> tuple[np.ndarray, np.ndarray]:
        """Return test accuracy and gap of the strengths chosen for a target, (seed,) each."""
        chosen = self.inner.choose(target)
        seeds = np.arange(len(chosen))
        accuracy, gap = self._test
        return accuracy[chosen, seeds], gap[chosen, seeds]

    def curve(self, targets: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return mean test gap and accuracy at each target, (target, 2)."""
        pairs = [self.at(float(target)) for target in targets]
        return np.array([(gap.mean(), accuracy.mean()) for accuracy, gap in pairs])


def find_reference(cells: Sequence[MeasuredCell]) -> MeasuredCell | None:
    """Return the cell of FedAvg, if there is one."""
    return next((each for each in cells if each.cell.method == REFERENCE), None)


def _score_column(cells: Sequence[MeasuredCell], target: float) -> list[Score]:
    """Return the scores of all methods for one track, metric and target, ranked by league."""
    plain = find_reference(cells)
    offered = [each for each in cells if each.cell.outcome is not None]
    accuracies = {each.cell.method: each.at(target)[0] for each in offered}
    scores = {each.cell.method: _score_cell(each, plain, target) for each in cells}
    found = []
    for league in LEAGUES:
        mine = {method: score for method, score in scores.items() if score.league == league}
        found += rank_scores(mine, accuracies)
    return found


def _score_cell(found: MeasuredCell, plain: MeasuredCell | None, target: float) -> Score:
    """Return the numbers of one method at one target, without its rank."""
    cell = found.cell
    metric = found.metric
    names = (cell.track, metric.name, cell.method, cell.label, cell.league, target)
    if cell.outcome is None:
        return Score(*names, reason=cell.reason)
    chosen = take_candidates(cell.outcome, found.inner.choose(target))
    accuracy, gap = found.at(target)
    noise = float(np.mean(chosen.floor(metric)))
    low, _ = chosen.interval(metric)
    values = {}
    for name, each in (("accuracy", accuracy), ("gap", gap)):
        ends = mean_interval(each)
        values |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    if values["gap_low"] is not None:
        values["gap_low"] = max(0.0, values["gap_low"])  # no gap is negative
    return Score(
        *names,
        **values,
        floor=noise if np.isfinite(noise) else None,
        kept_share=float(np.mean(low <= target)),
        keeps=keeps_target(gap, noise, target) and bool(np.isfinite(accuracy).all()),
        local_gap=_mean(np.asarray(chosen.local_gap(metric))),
        unseen_gap=_score_unseen(cell, metric),
        hypervolume=None if plain is None else measure_hypervolume(found, plain),
        bytes_sent=cell.bytes_sent,
        seconds=cell.seconds,
    )


def keeps_target(gap: np.ndarray, noise: float, target: float) -> bool:
    """Return whether the mean gap is at the target, up to sampling; see the module.

    Parameters
    ----------
    gap
        (seed,) test gaps. A replicate without a gap keeps nothing.
    noise
        The mean noise floor.
    target
        The target.
    """
    error = float(np.std(gap, ddof=1)) / np.sqrt(len(gap)) if len(gap) > 1 else 0.0
    return bool(np.mean(gap) - Z95 * error <= np.hypot(target, noise) + SLACK)


def mean_interval(values: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """Return the mean over replicates and its 95% interval by Student's t.

    None if a replicate has no value; a single replicate has no interval.
    """
    from scipy.special import stdtrit  # slow to import

    n = len(values)
    mean = float(np.mean(values))
    if not np.isfinite(mean):
        return None, None, None
    if n < 2:
        return mean, None, None
    half = float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(n))
    return mean, mean - half, mean + half


def rank_scores(scores: dict[str, Score], accuracies: dict[str, np.ndarray]) -> list[Score]:
    """Rank the methods that keep the target by accuracy, and test each against the first.

    Parameters
    ----------
    scores
        By method, of one track, metric, target and league.
    accuracies
        (seed,) test accuracies by method.

    Returns
    -------
    list
        The ranked methods in their order, then the others from the smallest gap on.
    """
    kept = [m for m, score in scores.items() if score.keeps and score.accuracy is not None]
    kept.sort(key=lambda method: -np.mean(accuracies[method]))
    tests = [compare_pairs(accuracies[kept[0]], accuracies[method]) for method in kept[1:]]
    corrected = [None, *correct_by_holm(tests)]
    found = [
        replace(scores[method], rank=place + 1, p=p)
        for place, (method, p) in enumerate(zip(kept, corrected, strict=False))
    ]
    rest = [score for method, score in scores.items() if method not in kept]
    return found + sorted(rest, key=lambda each: (each.gap is None, each.gap, each.method))


def compare_pairs(first: np.ndarray, second: np.ndarray) -> float:
    """Return the two-sided p-value of a paired t-test; 1 if there is one pair, or no difference.

    Equal differences in all pairs have the p-value 0.
    """
    from scipy.special import stdtr  # slow to import

    difference = first - second
    n = len(difference)
    mean = float(np.mean(difference))
    if n < 2 or mean == 0:
        return 1.0
    error = float(np.std(difference, ddof=1)) / np.sqrt(n)
    return 0.0 if error == 0 else float(2 * stdtr(n - 1, -abs(mean) / error))


def correct_by_holm(p: Sequence[float]) -> list[float]:
    """Return p-values with Holm's correction (1979) for the number of tests.

    The i-th smallest of m is multiplied by m - i + 1; none becomes smaller than one before it.
    """
    order = np.argsort(p, kind="stable")
    corrected = [0.0] * len(p)
    largest = 0.0
    for place, at in enumerate(order.tolist()):
        largest = max(largest, min(1.0, (len(p) - place) * p[at]))
        corrected[at] = largest
    return corrected


def measure_hypervolume(found: MeasuredCell, plain: MeasuredCell) -> float | None:
    """Return how much of the plane of gap and accuracy a method covers.

    The points are the mean test accuracy and gap at 21 targets from 0 to FedAvg's gap on inner
    rows. The area is that of all pairs that are no better than some point, up to FedAvg's gap and
    down to ten points below FedAvg's accuracy, in units of this rectangle: FedAvg itself covers
    nothing, and its accuracy without any gap would cover 1.

    Parameters
    ----------
    found
        The method.
    plain
        FedAvg on the same track, measured by the same metric.
    """
    accuracy, gap = plain.at(0.0)
    widest = float(gap.mean())
    least = float(accuracy.mean()) - POINTS_BELOW
    points = found.curve(np.linspace(0.0, float(np.mean(plain.inner.gap)), STEPS))
    area = dominated_area(points, widest, least) / (POINTS_BELOW * widest)
    return area if np.isfinite(area) else None


def dominated_area(points: np.ndarray, widest: float, least: float) -> float:
    """Return the area of all (gap, accuracy) that are no better than one of some points.

    Parameters
    ----------
    points
        (n, 2): gap and accuracy; points with NaN cover nothing.
    widest, least
        The largest gap and the smallest accuracy that count.
    """
    known = points[np.isfinite(points).all(axis=1)]
    known = known[(known[:, 0] < widest) & (known[:, 1] > least)]
    area = 0.0
    best = least
    for gap, accuracy in known[np.lexsort((-known[:, 1], known[:, 0]))].tolist():
        if accuracy > best:
            area += (accuracy - best) * (widest - gap)
            best = accuracy
    return area


def _score_unseen(cell: Cell, metric: Metric) -> float | None:
    """Return the mean gap on sites that were left out, where every group has enough rows."""
    if cell.unseen is None:
        return None
    sizes = cell.unseen[:, :, :-1].sum((1, 3))
    gaps = sums_of_decisions(cell.unseen).gap(metric, "hard")
    return _mean(gaps[(sizes >= FEWEST_LOCAL).all(1)])


def _mean(values: np.ndarray) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else None

"""Find the best decision rule within targets, from counts of scores.

Every candidate threshold of a cell (a group, or a group at a site) gives a number of true and of
false positives. Accuracy and the rates of the metrics (sp, eop, eo, fpr, acc) are linear in these
numbers, because the denominators do not depend on the decisions. So the best rule solves

    maximize    sum over cells, thresholds:  w[cell, t] (benefit TP[cell, t] - cost FP[cell, t])
    subject to  sum over t of w[cell, t] = 1,
                |rate[v, g] - rate[v, h]| <= target   for all conditions v and pairs of groups g, h

(and the same for the groups of each site, with local targets). A randomized rule may have any
w >= 0: a linear program. A fixed rule has one w = 1 per cell: a mixed-integer program. Both are
solved by HiGHS, which proves that no rule is better.

Decisions without scores are scores of 0 and 1. Their linear program is that of Hardt, Price and
Srebro (2016): mixtures of the model's decision, "always" and "never".

Accepting nobody, or everybody, makes all rates equal, but is not a solution: a rule must accept,
and must reject, at least a tenth of the smaller of the two shares today (of the two labels, if all
decisions are the same today).
"""

import ctypes
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from fedgft.auditing.thresholds import MIN_SHARE, count_above, search_group_thresholds
from fedgft.errors import FedgftError
from fedgft.formatting import join_names
from fedgft.metrics.metric import Metric
from fedgft.rules.counts import RuleCounts
from fedgft.rules.decision_rule import Acceptance
from fedgft.site_sums import Group

TIME_LIMIT = 60.0  # seconds for the search for fixed thresholds
OPTIMAL, INFEASIBLE = 0, 2  # results of SciPy's solver
TINY = 1e-9  # weights below it are rounding errors of the solver
TOLERANCE = 1e-7  # by which a gap may exceed its target, for the same reason
MAX_WHOLE = 50_000  # candidates of fixed thresholds that are tried all together
NEAR = (6, 12)  # bins from the thresholds of the randomized rule, where there are more
MORE_EXCESS = (0.0, 0.002, 0.01, 0.05, 0.2)  # of the targets, tried in turn
SAFETY = 2e-6  # subtracted from the targets if the solver's tolerance was too large


class Target(NamedTuple):
    """The largest gap to allow, between the groups by some attributes, over all rows or per site.

    `attributes` are positions in the attributes of the counts.
    """

    metric: Metric
    attributes: tuple[int, ...]
    limit: float
    is_local: bool = False


@dataclass(frozen=True, eq=False)
class FittedRule:
    """The solution: the step function of each cell.

    Parameters
    ----------
    acceptances
        By (position of the site or None, position of the group).
    excess
        By how much targets had to be raised to find it; 0 if it meets them.
    is_proven
        Whether the solver proved that no rule of this kind is better.
    """

    acceptances: dict[tuple[int | None, int], Acceptance]
    excess: float
    is_proven: bool


@dataclass(frozen=True, eq=False)
class RuleProblem:
    """What to optimize.

    Parameters
    ----------
    counts
        The counts, by site if `per_site` or if there are local targets.
    targets
        The limits of the gaps.
    per_site
        Whether each site has a rule of its own.
    is_random
        Whether a rule may decide by a coin.
    benefit, cost
        The value of a true positive, and the cost of a false positive. 1 and 1: accuracy.
    min_share
        The smallest share of all rows to accept, and to reject. None: a tenth of today's.
    time_limit
        Seconds for the search for fixed thresholds.
    """

    counts: RuleCounts
    targets: tuple[Target, ...]
    per_site: bool = False
    is_random: bool = False
    benefit: float = 1.0
    cost: float = 1.0
    min_share: float | None = None
    time_limit: float = TIME_LIMIT

    def solve(self) -> FittedRule:
        """Return the best rule, or the rule nearest to the targets if none meets them."""
        if improper := [t for t in self.targets if not t.metric.proper()]:
            return self._search_windows(improper[0])
        if self._has_one_window and (quick := self._search_one_window()) is not None:
            return quick
        program = _LinearProgram.of(self)
        if not self.is_random and len(program.cell) > MAX_WHOLE:
            return self._search_near(program)
        excess = 0.0
        found = program.maximize()
        if found.weights is None and found.is_final:
            excess = program.minimize_excess()
            found = replace(program, excess=excess).maximize()
        if found.weights is None:
            return self._search_near(program)
        return FittedRule(program.read(found.weights), excess, found.is_final)

    @property
    def _has_one_window(self) -> bool:
        """Whether all rates must lie in one window, whose place is quickly searched."""
        counts = self.counts
        if len(self.targets) != 1 or len(counts.sites) > 1 or len(counts.spec.attributes) > 1:
            return False
        if sum(None not in group for group in counts.groups) < 2:
            return False
        (target,) = self.targets
        is_plain = not (self.is_random or self.per_site or target.is_local)
        return is_plain and self.benefit == self.cost and len(target.metric.conditions(2)) == 1

    def _search_near(self, program: "_LinearProgram") -> FittedRule:
        """Return good fixed thresholds of very many cells, near those of the randomized rule.

        The randomized rule is found quickly, and few of its cells decide by a coin. The solver
        tries only thresholds near its own, so the rule is not proven best.
        """
        relaxed = _LinearProgram.of(replace(self, is_random=True))
        found = relaxed.maximize()
        least = 0.0
        if found.weights is None:
            least = relaxed.minimize_excess()
            found = replace(relaxed, excess=least).maximize()
        assert found.weights is not None  # a linear program reaches its own excess
        centers = relaxed.mean_positions(found.weights)
        distance = np.abs(program.threshold - centers[program.cell])
        for more, width in product(MORE_EXCESS, NEAR):
            nearby = replace(program, excess=least + more, is_tried=distance <= width)
            solution = nearby.maximize()
            if solution.weights is not None:
                return FittedRule(program.read(solution.weights), least + more, is_proven=False)
        text = "no fixed thresholds were found in time; try `randomized`"
        raise FedgftError(text, kind="data")

    def _search_windows(self, target: Target) -> FittedRule:
        """Return the best thresholds by group for one target; see `search_group_thresholds`.

        Of predictive parity they are found in no other way: it is not linear.
        """
        counts = self.counts
        simple = len(self.targets) == 1 and not self.per_site and not target.is_local
        if not simple or self.is_random or self.benefit != self.cost or len(counts.sites) > 1:
            text = (
                f"{target.metric.name} is a ratio of decisions, so no linear program finds its "
                "rule: give it alone, with fixed thresholds and without `local`, `per_site` or "
                "`benefit`"
            )
            raise FedgftError(text, field="target", kind="unsupported")
        share = self.min_share if self.min_share is not None else _least_share(counts)
        found, feasible = _find_thresholds(counts, target, min_share=share)
        excess = 0.0 if feasible else 1e-3  # found to within 0.1 points
        return FittedRule(found, excess, is_proven=True)

    def _search_one_window(self) -> FittedRule | None:
        """Return the best thresholds by group if a window contains their rates, or None.

        The result is also None if the best of them accept, or reject, too few rows.
        """
        counts = self.counts
        try:
            found, feasible = _find_thresholds(counts, self.targets[0], min_share=None)
        except FedgftError:  # a group without rows of the event: the program has a message
            return None
        table = np.maximum(counts.counts[0], 0.0).sum(1)  # (group, bin)
        edges = counts.thresholds[:-1]
        accepted = sum(float(table[g] @ rule(edges)) for (_, g), rule in found.items())
        total = sum(float(table[g].sum()) for _, g in found)
        share = self.min_share if self.min_share is not None else _least_share(counts)
        least = max(1.0, share * total) if share > 0 else 0.0
        if not feasible or not least <= accepted <= total - least:
            return None
        return FittedRule(found, 0.0, is_proven=True)


def _find_thresholds(
    counts: RuleCounts, target: Target, *, min_share: float | None
) -> tuple[dict[tuple[int | None, int], Acceptance], bool]:
    """Return the thresholds of `search_group_thresholds`, and whether they meet the target."""
    named = [g for g, group in enumerate(counts.groups) if None not in group]
    table = np.maximum(counts.counts[0], 0.0)  # (group, label, bin)
    rest = table.sum(0) - table[named].sum(0)
    best, feasible = search_group_thresholds(
        target.metric,
        np.concatenate((table[named], rest[None])).swapaxes(0, 1),
        target.limit,
        groups=[" & ".join(map(str, counts.groups[g])) for g in named],
        min_share=min_share,
    )
    edges = counts.thresholds
    found: dict[tuple[int | None, int], Acceptance] = {}
    for g, t in zip(named, best.tolist(), strict=True):
        above = count_above(table[g])  # (label, threshold)
        same = _find_distinct(*above)
        same = same[(above[:, same] == above[:, t, None]).all(0)]
        found[None, g] = _step(edges[int(same[0])])
    return found, feasible


def _least_share(counts: RuleCounts) -> float:
    """Return a tenth of the smaller of the shares that are accepted and rejected today.

    If everybody is decided alike today, the shares of the labels take their place.
    """
    total = max(1.0, counts.counts.sum())
    accepted = counts.decided.sum() / total
    if not 0 < accepted < 1:
        accepted = counts.counts[:, :, 1].sum() / total
    return MIN_SHARE * float(np.clip(min(accepted, 1 - accepted), 0.0, 0.5))


def _step(threshold: float) -> Acceptance:
    """Return the step function of one threshold; 0 means always, infinity means never."""
    if threshold <= 0 or np.isinf(threshold):
        return Acceptance((), (1.0 if threshold <= 0 else 0.0,))
    return Acceptance((float(threshold),), (0.0, 1.0))


class _Solution(NamedTuple):
    """The values of the variables, or None if none were found.

    `is_final`: whether they are proven best, or it is proven that there are none.
    """

    weights: np.ndarray | None
    is_final: bool


class _Row(NamedTuple):
    """One constraint: low <= sum of values * variables <= high."""

    variables: np.ndarray
    values: np.ndarray
    low: float
    high: float
    excess_low: float = 0.0  # by how much an excess of 1 lowers `low`
    excess_high: float = 0.0


@dataclass(frozen=True, eq=False)
class _LinearProgram:
    """The program in the form of HiGHS.

    The variables are the weights of candidate thresholds, then one lower end of each window of
    rates. `cell` and `threshold` say which cell (row of `cells`) and which candidate threshold a
    weight is of.
    """

    problem: RuleProblem
    cells: np.ndarray  # (cell, 2): position of the site, or -1, and of the group
    cell: np.ndarray
    threshold: np.ndarray
    gain: np.ndarray  # (variable,): the objective
    rows: tuple[_Row, ...]
    excess: float = 0.0
    is_tried: np.ndarray | None = None  # which candidates may be chosen; None: all

    @classmethod
    def of(cls, problem: RuleProblem) -> "_LinearProgram":
        """Write the problem down."""
        counts = problem.counts
        table = np.maximum(counts.counts, 0.0)
        named = np.array([g for g, group in enumerate(counts.groups) if None not in group])
        if not len(named):
            names = " and ".join(counts.spec.attributes)
            raise FedgftError(f"no row has {names} recorded", kind="data")
        sites = np.arange(len(counts.sites)) if problem.per_site else np.array([-1])
        cells = np.stack(np.meshgrid(sites, named, indexing="ij"), -1).reshape(-1, 2)
        if problem.per_site:
            cells = cells[table.sum((-1, -2))[cells[:, 0], cells[:, 1]] > 0]
            own = table[cells[:, 0], cells[:, 1]]
        else:
            own = table[:, cells[:, 1]].sum(0)
        above = count_above(own)  # (cell, label, threshold)
        is_planar = problem.per_site or len(counts.sites) == 1
        kept = [
            _find_hull(*each) if problem.is_random and is_planar else _find_distinct(*each)
            for each in above
        ]
        if not is_planar:  # sites see different points, so equal sums are not equal points
            everywhere = np.arange(above.shape[-1])
            kept = [everywhere for _ in kept]
        cell = np.repeat(np.arange(len(cells)), [len(each) for each in kept])
        threshold = np.concatenate(kept)
        true, false = above[cell, 1, threshold], above[cell, 0, threshold]
        builder = _RowBuilder(problem, cells, cell, threshold)
        builder.add_weights()
        builder.add_shares(true + false, own.sum())
        for target in problem.targets:
            builder.add_target(target)
        gain = problem.benefit * true - problem.cost * false
        gain = np.concatenate((gain, np.zeros(builder.windows)))
        return cls(problem, cells, cell, threshold, gain, tuple(builder.rows))

    def maximize(self) -> "_Solution":
        """Return the weights of the best rule."""
        scale = float(np.abs(self.gain).max()) or 1.0
        best: _Solution | None = None
        for safety in (0.0, SAFETY):
            found = self._run(-self.gain / scale, self.excess - safety)
            if found.weights is None:  # nor is there a solution within smaller targets
                return best if best and self.problem.is_random else found
            if self._largest_violation(found.weights) <= TOLERANCE:
                return found
            best = best or found
        # a fixed rule that breaks a target is none
        return best if best and self.problem.is_random else _Solution(None, is_final=True)

    def mean_positions(self, weights: np.ndarray) -> np.ndarray:
        """Return the mean position of the candidate thresholds of each cell, (cell,)."""
        mine = weights[: len(self.cell)]
        return np.bincount(self.cell, mine * self.threshold, minlength=len(self.cells))

    def minimize_excess(self) -> float:
        """Return by how much all targets must be raised before a rule exists."""
        size = len(self.gain)
        matrix, low, high = self._write(0.0)
        excess = np.array([[row.excess_low, row.excess_high] for row in self.rows])
        sparse = import_module("scipy.sparse")
        inf = np.inf
        # one more variable, the excess; each row is written twice, once per side
        lower = sparse.hstack([matrix, excess[:, :1]])
        upper = sparse.hstack([matrix, -excess[:, 1:]])
        both = sparse.vstack([lower, upper], format="csr")
        low = np.concatenate((low, np.full(len(low), -inf)))
        high = np.concatenate((np.full(len(high), inf), high))
        aim = np.append(np.zeros(size), 1.0)
        found = _solve(
            aim,
            both,
            (low, high),
            integers=np.append(self._integers(), 0),
            bounds=(np.append(self._lower_bounds(), 0.0), np.full(size + 1, 1.0)),
            limit=self.problem.time_limit,
        )
        if found.weights is None:
            text = "no thresholds were found that accept and reject enough rows"
            text += "" if self.problem.is_random else "; try `randomized`"
            raise FedgftError(text, kind="data")
        return float(max(found.weights[-1], 0.0)) + 2 * SAFETY

    def read(self, weights: np.ndarray) -> dict[tuple[int | None, int], Acceptance]:
        """Return the step function of each cell."""
        edges = self.problem.counts.thresholds
        found = {}
        for i, (site, group) in enumerate(self.cells.tolist()):
            mine = np.arange(*np.searchsorted(self.cell, [i, i + 1]))
            if self.problem.is_random:
                found[None if site < 0 else site, group] = _mix(
                    edges[self.threshold[mine]], weights[mine]
                )
            else:
                best = mine[np.argmax(weights[mine])]
                found[None if site < 0 else site, group] = _step(edges[self.threshold[best]])
        return found

    def _integers(self) -> np.ndarray:
        """Return 1 for each variable that must be a whole number."""
        is_weight = np.arange(len(self.gain)) < len(self.cell)
        return (is_weight & (not self.problem.is_random)).astype(int)

    def _lower_bounds(self) -> np.ndarray:
        is_weight = np.arange(len(self.gain)) < len(self.cell)
        return np.where(is_weight, 0.0, -1.0)

    def _upper_bounds(self) -> np.ndarray:
        upper = np.ones(len(self.gain))
        if self.is_tried is not None:
            upper[: len(self.cell)] = self.is_tried
        return upper

    def _write(self, excess: float) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the matrix of the constraints, and their low and high ends."""
        sparse = import_module("scipy.sparse")
        size = [len(row.variables) for row in self.rows]
        where = (
            np.repeat(np.arange(len(self.rows)), size),
            np.concatenate([row.variables for row in self.rows]),
        )
        values = np.concatenate([row.values for row in self.rows])
        matrix = sparse.csr_matrix((values, where), shape=(len(self.rows), len(self.gain)))
        low = np.array([row.low - excess * row.excess_low for row in self.rows])
        high = np.array([row.high + excess * row.excess_high for row in self.rows])
        return matrix, low, high

    def _run(self, aim: np.ndarray, excess: float) -> "_Solution":
        matrix, low, high = self._write(excess)
        positives = float(np.maximum(self.problem.counts.counts[:, :, 1], 0.0).sum())
        smaller = min(1.0, self.problem.cost / self.problem.benefit)  # in units of the benefit
        return _solve(
            aim,
            matrix,
            (low, high),
            integers=self._integers(),
            bounds=(self._lower_bounds(), self._upper_bounds()),
            limit=self.problem.time_limit,
            gap=max(1e-7, 0.5 * smaller / max(1.0, positives)),
        )

    def _largest_violation(self, weights: np.ndarray) -> float:
        """Return by how much the rounded weights break a constraint."""
        exact = weights.copy()
        if not self.problem.is_random:
            exact[: len(self.cell)] = np.round(exact[: len(self.cell)])
        matrix, low, high = self._write(self.excess)
        found = matrix @ exact
        return float(np.maximum(low - found, found - high).max(initial=0.0))


class _RowBuilder:
    """Collects the constraints of a program."""

    def __init__(
        self, problem: RuleProblem, cells: np.ndarray, cell: np.ndarray, threshold: np.ndarray
    ) -> None:
        self.problem = problem
        self.cells = cells
        self.cell = cell
        self.threshold = threshold
        self.windows = 0
        self.rows: list[_Row] = []
        self.table = np.maximum(problem.counts.counts, 0.0)
        self.above = count_above(self.table)  # (site, group, label, threshold)
        self.total = self.table.sum(-1)  # (site, group, label)
        self.accepted = problem.counts.accepted()
        starts = np.searchsorted(cell, np.arange(len(cells) + 1)).tolist()
        self.spans = {
            (None if site < 0 else site, group): span
            for (site, group), span in zip(cells.tolist(), pairwise(starts), strict=True)
        }

    def add_weights(self) -> None:
        """The weights of each cell add up to 1."""
        for first, last in self.spans.values():
            self.rows.append(_Row(np.arange(first, last), np.ones(last - first), 1.0, 1.0))

    def add_shares(self, accepted: np.ndarray, total: float) -> None:
        """Accept and reject at least the smallest share of all rows."""
        share = self.problem.min_share
        if share is None:
            share = _least_share(self.problem.counts)
        if share <= 0:
            return
        least = max(1.0, share * total) / total
        variables = np.arange(len(self.cell))
        self.rows.append(_Row(variables, accepted / total, least, 1 - least))

    def add_target(self, target: Target) -> None:
        """Keep the rates of all groups within the target, over all rows or at each site."""
        counts = self.problem.counts
        parts = [tuple(group[i] for i in target.attributes) for group in counts.groups]
        names = list(dict.fromkeys(part for part in parts if None not in part))
        member = np.array([names.index(part) if part in names else -1 for part in parts])
        if target.is_local:
            for site in range(len(counts.sites)):
                self._add_gap(target, names, member, site)
        else:
            self._add_gap(target, names, member, None)

    def _add_gap(
        self, target: Target, names: list[Group], member: np.ndarray, site: int | None
    ) -> None:
        sites = slice(None) if site is None else slice(site, site + 1)
        slope, offset = target.metric.affine(2)
        unit = slope + offset[..., None]  # (2, v, y, decision)
        total = self.total[sites].sum(0)  # (group, label)
        present = [i for i in range(len(names)) if total[member == i].sum() > 0]
        for v in range(unit.shape[1]):
            rates = []
            for i in present:
                rows = float((total[member == i] @ unit[1, v, :, 0]).sum())
                if rows > 0:
                    rates.append(self._rate(unit[0, v], np.flatnonzero(member == i), rows, site))
                elif site is None:
                    self._refuse_empty(target, names[i])
            if len(rates) >= 2:
                self._keep_together(rates, target.limit)

    def _refuse_empty(self, target: Target, group: Group) -> None:
        name = " & ".join(map(str, group))
        text = f"{target.metric.name} is not estimable: no row of its event in {name}"
        raise FedgftError(text, field="target", kind="data")

    def _rate(
        self, unit: np.ndarray, groups: np.ndarray, rows: float, site: int | None
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return a rate as variables, their values, and a constant.

        `unit` (y, decision) is what a row adds to the numerator.
        """
        sites = slice(None) if site is None else slice(site, site + 1)
        wanted = [None if not self.problem.per_site else site]
        if self.problem.per_site and site is None:
            wanted = list(range(len(self.problem.counts.sites)))
        spans = [self.spans[key] for key in product(wanted, groups.tolist()) if key in self.spans]
        variables = np.concatenate([np.arange(0), *(np.arange(*span) for span in spans)])
        place = self.cells[self.cell[variables]]
        threshold = self.threshold[variables]
        if self.problem.per_site:
            above = self.above[place[:, 0], place[:, 1], :, threshold]
            total = self.total[place[:, 0], place[:, 1]]
        else:
            above = self.above[sites].sum(0)[place[:, 1], :, threshold]
            total = self.total[sites].sum(0)[place[:, 1]]
        values = above @ unit[:, 1] + (total - above) @ unit[:, 0]
        constant = 0.0
        for g in groups:
            if None in self.problem.counts.groups[g]:  # one threshold for all of them
                yes = self.accepted[sites, g].sum(0)
                total = self.total[sites, g].sum(0)
                constant += float(yes @ unit[:, 1] + (total - yes) @ unit[:, 0])
        return variables, values / rows, constant / rows

    def _keep_together(
        self, rates: list[tuple[np.ndarray, np.ndarray, float]], limit: float
    ) -> None:
        """Keep rates within a window of this width."""
        if len(rates) == 2:
            (one, a, first), (two, b, second) = rates
            shift = first - second
            variables = np.concatenate((one, two))
            values = np.concatenate((a, -b))
            self.rows.append(_Row(variables, values, -limit - shift, limit - shift, 1.0, 1.0))
            return
        low_end = len(self.cell) + self.windows
        self.windows += 1
        for variables, values, constant in rates:
            row = (np.append(variables, low_end), np.append(values, -1.0))
            self.rows.append(_Row(*row, -constant, limit - constant, 0.0, 1.0))


def _solve(
    aim: np.ndarray,
    matrix: Any,
    ends: tuple[np.ndarray, np.ndarray],
    *,
    integers: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    limit: float,
    gap: float = 1e-6,
) -> "_Solution":
    """Minimize aim @ x by HiGHS."""
    optimize = import_module("scipy.optimize")  # slow to import
    with warnings.catch_warnings(), _divert_stdout() if integers.any() else nullcontext():
        warnings.simplefilter("ignore")
        found = optimize.milp(
            aim,
            constraints=optimize.LinearConstraint(matrix, *ends),
            integrality=integers,
            bounds=optimize.Bounds(*bounds),
            options={"time_limit": limit, "mip_rel_gap": gap} if integers.any() else {},
        )
    if found.x is None:
        return _Solution(None, is_final=found.status == INFEASIBLE)
    return _Solution(np.clip(found.x, -1.0, 1.0), is_final=found.status == OPTIMAL)


@contextmanager
def _divert_stdout() -> Iterator[None]:
    """Send what C code prints to stdout to stderr.

    HiGHS 1.12 prints the name of one of its functions, whatever its options (its issue 2783), into
    what may be the JSON of a command.
    """
    try:
        flush = ctypes.CDLL(None).fflush
        os.fstat(2)
        stdout = os.dup(1)
    except (OSError, TypeError, AttributeError):  # closed, or no C library of this kind
        yield
        return
    try:
        flush(None)
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _mix(thresholds: np.ndarray, weights: np.ndarray) -> Acceptance:
    """Return the step function of a mixture of thresholds; 0 means always, infinity never."""
    weights = np.where(weights > TINY, weights, 0.0)
    weights = weights / weights.sum()
    order = np.argsort(thresholds)
    inside = [i for i in order if weights[i] > 0 and 0 < thresholds[i] < np.inf]
    base = float(weights[thresholds <= 0].sum())
    steps = base + np.cumsum(weights[inside])
    if not (weights[np.isinf(thresholds)] > 0).any() and len(steps):
        steps[-1] = 1.0
    probabilities = np.clip(np.append(base, steps), 0.0, 1.0)
    return Acceptance(tuple(thresholds[inside].tolist()), tuple(probabilities.tolist()))


def _find_distinct(negatives: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Return one candidate for each set of accepted rows: the middle one of equal thresholds.

    Where all rows are accepted it is the first candidate, where none is the last.
    """
    changes = np.flatnonzero((np.diff(negatives) != 0) | (np.diff(positives) != 0)) + 1
    starts = np.concatenate(([0], changes))
    ends = np.append(changes, len(negatives))
    middles = (starts + ends - 1) // 2
    middles[0] = 0
    middles[-1] = len(negatives) - 1
    return middles if len(middles) > 1 else np.array([0, len(negatives) - 1])


def _find_hull(negatives: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Return the distinct candidates at the corners of the hull of (false, true) positives."""
    kept = _find_distinct(negatives, positives)[::-1]  # counts increase
    x, y = negatives[kept].tolist(), positives[kept].tolist()
    corners = set()
    for sign in (1, -1):  # the upper and the lower chain
        chain: list[int] = []
        for i in range(len(kept)):
            while len(chain) >= 2:
                a, b = chain[-2], chain[-1]
                turn = (x[b] - x[a]) * (y[i] - y[a]) - (y[b] - y[a]) * (x[i] - x[a])
                if sign * turn < 0:
                    break
                chain.pop()
            chain.append(i)
        corners |= set(chain)
    return np.sort(kept[sorted(corners)])


def describe_targets(targets: Sequence[Target], attributes: Sequence[str]) -> str:
    """Return the targets in words, such as ``sp <= 0.02 by sex``."""
    parts = []
    for target in targets:
        by = " & ".join(attributes[i] for i in target.attributes)
        where = " at every site" if target.is_local else ""
        parts.append(f"{target.metric.name} <= {target.limit:g} by {by}{where}")
    return join_names(parts)

"""Rules of prices: what LoGoFair and FedFACT share, whatever way they find the prices.

Let eta be the (calibrated) probability of the positive class, and let c_v(eta) be what accepting a
row adds to the numerator of condition v in expectation: 1 for statistical parity, eta for equal
opportunity, 1 - eta for false positives. Decisions that are Bayes-optimal with gaps within limits
accept a row of group a at site k if

    2 eta - 1 - sum over v: price[k, a, v] c_v(eta)  >=  0,

because each price is a multiplier of a limit divided by a share of rows. The left side is linear
in eta, so this is a threshold of the score, by group, or by site and group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError
from fedgft.metrics.metric import Metric
from fedgft.rules.adjustment import describe_outcome, expect_local_gaps
from fedgft.rules.beta_calibration import BetaCalibration
from fedgft.rules.counts import RowGroups, count_federation
from fedgft.rules.decision_rule import Acceptance, Cell, DecisionRule
from fedgft.rules.expect import RuleOutcome
from fedgft.rules.rule_problem import RuleProblem, Target
from fedgft.site_sums import Group

Limits = Mapping[Metric, float]
"The largest gap by metric."
TOLERANCE = 1e-9  # of a gap that is met


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The clients' rows whose group is recorded.

    Parameters
    ----------
    federation, scores, row_groups
        As in `fit_rule`.
    target, local
        The largest gaps over all rows and at every client, by metric.
    sites, groups
        (n,) The positions of each row's client and of its group.
    names
        The groups.
    """

    federation: Federation
    scores: np.ndarray
    row_groups: RowGroups
    target: Limits
    local: Limits
    sites: np.ndarray
    groups: np.ndarray
    names: tuple[Group, ...]

    @classmethod
    def of(
        cls,
        federation: Federation,
        scores: np.ndarray,
        *,
        target: Limits,
        local: Limits | None = None,
        row_groups: RowGroups | None = None,
        method: str,
    ) -> "ClientRows":
        """Return the rows; `method` is named in errors."""
        data = federation.dataset
        if row_groups is None:
            every = [*((name,) for name in data.group_names), (None,)]
            row_groups = (("group",), every, data.groups)
        _, groups, codes = row_groups
        place = np.full(len(groups), -1)
        named = [i for i, group in enumerate(groups) if None not in group]
        place[named] = np.arange(len(named))
        found = cls(
            federation=federation,
            scores=np.asarray(scores, np.float64),
            row_groups=row_groups,
            target=target,
            local=local or {},
            sites=np.repeat(np.arange(federation.num_clients), federation.sizes),
            groups=place[codes[federation.rows]],
            names=tuple(groups[i] for i in named),
        )
        found._check(method)
        return found

    def _check(self, method: str) -> None:
        """Raise a `FedgftError` for metrics that have no prices."""
        for metric in self.metrics:
            slope, offset = metric.affine(2)
            rejected = offset[0] + slope[0][..., 0]
            if not metric.proper() or rejected.any():
                text = f"{method} takes sp, eop, eo and fpr, not {metric.name}"
                raise FedgftError(text, field="target", kind="unsupported")
        for name, empty in zip(self.conditions, (self.shares.sum(0) <= 0).T, strict=True):
            if empty.any():
                group = " & ".join(map(str, self.names[int(np.argmax(empty))]))
                text = f"{name} is not estimable: no row of its event in {group}"
                raise FedgftError(text, field="target", kind="data")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics with a limit of either kind."""
        return tuple(dict.fromkeys((*self.target, *self.local)))

    @property
    def conditions(self) -> list[str]:
        """The metric of each condition."""
        return [metric.name for metric in self.metrics for _ in metric.affine(2)[0][0]]

    def list_limits(self, limits: Limits) -> np.ndarray:
        """Return the limit of each condition, (v,); infinity without one."""
        each = [limits.get(metric, np.inf) for metric in self.metrics]
        counts = [len(metric.affine(2)[0][0]) for metric in self.metrics]
        return np.repeat(np.array(each, float), counts)

    @property
    def num_sites(self) -> int:
        """The number of clients."""
        return self.federation.num_clients

    @cached_property
    def known(self) -> np.ndarray:
        """The positions of the rows whose group is recorded."""
        return np.flatnonzero(self.groups >= 0)

    @cached_property
    def units(self) -> np.ndarray:
        """What accepting a row of each label adds to the numerator, (v, y)."""
        found = []
        for metric in self.metrics:
            slope, offset = metric.affine(2)
            unit = slope[0] + offset[0][..., None]
            found.append(unit[..., 1] - unit[..., 0])
        return np.concatenate(found)

    @cached_property
    def shares(self) -> np.ndarray:
        """The share of rows in the event of each condition, (site, group, v)."""
        events = np.concatenate([metric.affine(2)[1][1] for metric in self.metrics])  # (v, y)
        cells = np.zeros((self.num_sites, len(self.names), 2))
        labels = self.federation.dataset.labels[self.federation.rows]
        at = (self.sites[self.known], self.groups[self.known], labels[self.known])
        np.add.at(cells, at, 1 / len(self.known))
        return cells @ events.T

    def calibrate(self, *, by_site: bool) -> dict[tuple[int | None, int], BetaCalibration]:
        """Return the Beta calibration of each group, or of each group at each site."""
        rows = self.federation.rows
        labels = self.federation.dataset.labels[rows]
        found = {}
        for site in range(self.num_sites) if by_site else (None,):
            for group in range(len(self.names)):
                mine = self.groups == group
                if site is not None:
                    mine &= self.sites == site
                fitted = BetaCalibration.fit(self.scores[rows[mine]], labels[mine])
                found[site, group] = fitted
        return found

    def apply(self, calibrations: Mapping[tuple[int | None, int], BetaCalibration]) -> np.ndarray:
        """Return the calibrated scores of the rows whose group is recorded."""
        scores = self.scores[self.federation.rows]
        found = np.empty(len(scores))
        for (site, group), calibration in calibrations.items():
            mine = self.groups == group
            if site is not None:
                mine &= self.sites == site
            found[mine] = calibration(scores[mine])
        return found[self.known]

    def gains(self, eta: np.ndarray) -> np.ndarray:
        """Return c_v(eta): what accepting each row adds to the numerators, (n, v)."""
        return np.outer(1 - eta, self.units[:, 0]) + np.outer(eta, self.units[:, 1])

    def find_thresholds(
        self,
        prices: np.ndarray,
        calibrations: Mapping[tuple[int | None, int], BetaCalibration] | None = None,
        *,
        by_site: bool,
    ) -> dict[tuple[int | None, int], Acceptance]:
        """Return the step function of each group, or of each group at each site.

        Parameters
        ----------
        prices
            (site, group, v); of the first site, if sites have no rule of their own.
        calibrations
            The calibration of each cell. None: scores are taken as they are.
        by_site
            Whether sites have rules of their own.
        """
        found: dict[tuple[int | None, int], Acceptance] = {}
        for site, group in np.ndindex(self.num_sites if by_site else 1, len(self.names)):
            price = prices[site, group]
            slope = 2 - float(price @ (self.units[:, 1] - self.units[:, 0]))
            offset = -1 - float(price @ self.units[:, 0])
            cell = (site if by_site else None, group)
            calibration = BetaCalibration() if calibrations is None else calibrations[cell]
            found[cell] = _find_step(slope, offset, calibration)
        return found

    def make_rule(self, acceptances: Mapping[tuple[int | None, int], Acceptance]) -> DecisionRule:
        """Return the rule with these step functions, and what it does on the clients' rows."""
        data = self.federation.dataset
        attributes, _, _ = self.row_groups
        per_site = any(site is not None for site, _ in acceptances)
        by_site = per_site or bool(self.local)
        decided = self.scores >= 0.5
        rows = self.federation.rows
        mine = decided[rows]
        for (site, group), acceptance in acceptances.items():
            chosen = self.groups == group
            if site is not None:
                chosen &= self.sites == site
            mine[chosen] = acceptance(self.scores[rows[chosen]]) >= 1
        before, after = (
            count_federation(
                self.federation,
                _spread(rows, values, len(data)),
                self.row_groups,
                by_site=by_site,
                decisions=True,
            )
            for values in (decided[rows], mine)
        )
        today, outcome = (RuleOutcome.of(each, {}, Acceptance()) for each in (before, after))
        view = tuple(range(len(attributes)))
        targets = [Target(m, view, limit) for m, limit in self.target.items()]
        targets += [Target(m, view, limit, is_local=True) for m, limit in self.local.items()]
        expected = describe_outcome(RuleProblem(after, tuple(targets)), [view], today, outcome)
        expected["local"] = expect_local_gaps(after, targets, today, outcome)
        cells: dict[Cell, Acceptance] = {
            (None if site is None else after.sites[site], self.names[group]): acceptance
            for (site, group), acceptance in acceptances.items()
        }
        return DecisionRule(
            classes=(data.classes[0], data.classes[1]),
            attributes=tuple(attributes),
            cells=cells,
            fitted={
                "date": date.today().isoformat(),
                "target": {metric.name: limit for metric, limit in self.target.items()},
                "local": {metric.name: limit for metric, limit in self.local.items()},
                "groups": [" & ".join(attributes)],
                "benefit": 1.0,
                "cost": 1.0,
                "met": _are_met([*expected["gaps"], *expected["local"]]),
                "proven": False,
                "rows": float(len(rows)),
                "label": "",
                "sums": {},
            },
            expected=expected,
        )


def _find_step(slope: float, offset: float, calibration: BetaCalibration) -> Acceptance:
    """Accept where offset + slope * calibrated score >= 0."""
    if slope == 0 or (calibration.a == 0 and calibration.b == 0):
        chance = float(calibration(np.array([0.5]))[0])
        return Acceptance((), (float(offset + slope * chance >= 0),))
    threshold = calibration.invert(-offset / slope)
    above, below = (1.0, 0.0) if slope > 0 else (0.0, 1.0)
    if threshold <= 0 or np.isinf(threshold):
        return Acceptance((), (above if threshold <= 0 else below,))
    return Acceptance((threshold,), (below, above))


def _spread(rows: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the values of some rows as an array over all rows."""
    found = np.zeros(size)
    found[rows] = values
    return found


def _are_met(gaps: Sequence[Mapping]) -> bool:
    limited = [gap for gap in gaps if gap["target"] is not None]
    return all((gap["after"] or 0.0) <= gap["target"] + TOLERANCE for gap in limited)


def divide(numbers: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return numbers / shares, and 0 where no row is."""
    numbers, shares = np.broadcast_arrays(numbers, shares)
    return np.divide(numbers, shares, out=np.zeros(shares.shape), where=shares > 0)

"""A fair decision rule at the end of a deployed run, from sums over the same channel.

After the last round the server asks every site for the histograms of the final model's scores on
its training rows, by label and group, and fits the best rule to them (`fedgft.adjust`). Then it
learns what the rule does on held-out rows: every site sends the counts of the rule's decisions.
With noise, the server applies the rule to the histograms in the sites' reports instead, which asks
for nothing more and spends no budget.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.flower.messages import DECISIONS, SCORES, Request, log, warn
from fedgft.flower.run_state import SIGMAS
from fedgft.flower.site_reports import FinalModel, SiteFile
from fedgft.flower.site_scores import RELEASES, RULE, scores_epsilon
from fedgft.formatting import join_names, one_line
from fedgft.metrics import CATALOG, check_one_threshold, check_over_all_rows, get_metric
from fedgft.privacy.noise import calibrate_noise
from fedgft.rules import Acceptance, DecisionRule, adjust
from fedgft.rules.adjustment import SHOWN_METRICS
from fedgft.rules.counts import RuleCounts, count_scores
from fedgft.rules.decision_rule import KEY_BYTES, Cell
from fedgft.rules.expect import RuleOutcome, describe_gap
from fedgft.site_sums import COUNT, NOISE, SLACK, Privacy, SiteSums
from fedgft.store import atomic_write, make_private_folder
from fedgft.sums import CategoryNames

RULE_FILE = "rule.json"
SCORES_FOLDER = "scores"
THRESHOLD = 0.5  # of the model's own decisions
FIELDS = {  # arguments of `adjust` -> what to write for them in a run
    "target": "adjust",
    "local": "adjust-local",
    "per_site": "adjust-per-site",
    "randomized": "adjust-randomized",
    "nearest": f"fedgft adjust {SCORES_FOLDER} --nearest",
}


@dataclass(frozen=True)
class RulePlan:
    """Which rule to fit at the end of a run.

    Parameters
    ----------
    target
        The largest gap over all rows, by metric.
    local
        The largest gap at every site, by metric.
    per_site
        Whether each site gets thresholds of its own.
    randomized
        Whether a coin may decide between thresholds.
    """

    target: Mapping[str, float]
    local: Mapping[str, float] = field(default_factory=dict)
    per_site: bool = False
    randomized: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "RulePlan | None":
        """Return the plan in a run's configuration, or None if it asks for no rule.

        Raises a `FedgftError` for a plan that cannot work, whatever the data are.
        """
        plan = cls(
            _read_gaps(config, "adjust"),
            _read_gaps(config, "adjust-local"),
            bool(config.get("adjust-per-site", False)),
            bool(config.get("adjust-randomized", False)),
        )
        if not plan.target and not plan.local:
            if plan.per_site or plan.randomized:
                name = "adjust_per_site" if plan.per_site else "adjust_randomized"
                text = "needs a target: `adjust` sp=0.02"
                raise FedgftError(text, field=name, kind="missing")
            return None
        problem = ""
        if config.get("secure"):
            problem = "needs each site's histograms of scores, and `secure` sums carry none"
        elif config.get("min-count") and not config.get("epsilon") and not plan.randomized:
            problem = (
                "needs histograms of scores, which min-count withholds: drop min-count, or change "
                "decisions by a coin with `adjust_randomized`"
            )
        elif not all(CATALOG[name].proper() for name in (*plan.target, *plan.local)) and (
            len(plan.target) != 1 or plan.local or plan.per_site or plan.randomized
        ):
            problem = "takes a ratio of decisions such as predictive-parity only alone"
        if problem:
            raise FedgftError(problem, field="adjust", kind="conflict")
        return plan

    def check_schema(self, names: CategoryNames) -> None:
        """Raise a `FedgftError` unless there are two classes, and groups to compare."""
        if len(names.classes) != 2:
            text = f"decides between two classes, and the labels have {len(names.classes)}"
            raise FedgftError(text, field="adjust", kind="unsupported")
        if len(names.groups) < 2:
            raise FedgftError("compares groups, and there is only one", field="adjust", kind="data")

    @property
    def by_site(self) -> bool:
        """Whether the sums of the sites must be kept apart."""
        return self.per_site or bool(self.local)


def rule_releases(rounds: int) -> int:
    """Return as how many releases the noisy scores count: a quarter of all of them."""
    return -(-(rounds + 1) // 3)


def _read_gaps(config: Mapping[str, Any], key: str) -> dict[str, float]:
    """Read gaps such as "sp=0.02, eop=0.05"."""
    name = key.replace("-", "_")
    gaps: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in str(config.get(key, "")).split(","))):
        metric_name, _, text = part.partition("=")
        try:
            metric = get_metric(metric_name.strip())
            metric = check_over_all_rows(check_one_threshold(metric))
        except FedgftError as error:
            raise FedgftError(f"{part}: {error.message}", field=name) from None
        try:
            gap = float(text)
        except ValueError:
            gap = np.nan
        if metric.parts:
            raise FedgftError(f"{part}: give one gap for each metric instead", field=name)
        if not 0 <= gap < 1:
            text = f"{one_line(part, 40)}: write METRIC=GAP with a gap from 0 to 1, as in sp=0.02"
            raise FedgftError(text, field=name)
        gaps[metric.name] = gap
    return gaps


# The end of a run


@dataclass(frozen=True, eq=False)
class RuleFitter:
    """Fits a rule to the scores of the final model, saves it, and measures it on held-out rows.

    Parameters
    ----------
    model
        The final model, and the channel to the sites.
    plan
        Which rule to fit.
    names
        The classes and groups of the federation.
    group
        The group columns of the schema.
    folder
        The run's folder.
    left_out
        Sites that take no part in the run.
    """

    model: FinalModel
    plan: RulePlan
    names: CategoryNames
    group: Sequence[str]
    folder: Path
    left_out: Sequence[str] = ()

    @property
    def attribute(self) -> str:
        """The name of the attribute in the sites' sums."""
        return " & ".join(self.group)

    def run(self, reports: Mapping[str, SiteFile]) -> dict[str, Any]:
        """Fit, save and measure the rule; return what history.json says about it.

        Parameters
        ----------
        reports
            Site -> its report on held-out rows.

        Returns
        -------
        dict
            The plan; "file" and "fitted_on"; "expected", the accuracy and the gaps on the training
            rows; "held_out", the same on held-out rows. Without a rule, "why" has the reason.
        """
        plan = self.plan
        found: dict[str, Any] = {
            "target": dict(plan.target),
            "local": dict(plan.local),
            "per_site": plan.per_site,
            "randomized": plan.randomized,
            "file": None,
        }
        try:
            files = self._collect_scores()
            rule = self._fit(files)
        except FedgftError as error:  # the model is kept even if there is no rule
            why = one_line(error.render(lambda name: FIELDS.get(name, name)), 400)
            warn(f"there is no decision rule: {why}")
            return found | {"why": why}
        _split_groups(rule, self.group).save(self.folder / RULE_FILE)
        rows = sum(file.sums.rows() for file in files.values())
        fitted_on = {"rows": "training", "count": rows, "sites": sorted(files)}
        found |= {
            "file": RULE_FILE,
            "reads": rule.reads,
            "fitted_on": fitted_on | {"missing": self._find_missing(files)},
            "expected": dict(rule.expected),
            "held_out": self._measure(rule, reports),
        }
        budget, state = self.model.strategy.budget, self.model.strategy.state
        if budget.epsilon is not None:
            spent = budget.spent(state.releases, state.starts)
            found |= {"epsilon": spent, "delta": budget.delta}
        return found

    # Scores on training rows

    def _collect_scores(self) -> dict[str, SiteFile]:
        """Return the sites' files of sums on training rows, by site; raise if there are none."""
        budget = self.model.strategy.budget
        releases = rule_releases(self.model.strategy.aggregator.rounds)
        extras: Request = {}
        if budget.epsilon is not None:
            extras = {RELEASES: releases}
            self.model.strategy.state.releases += releases
        files = self.model.ask(
            SCORES,
            "file of scores",
            make_extras=lambda node: extras,
            check=lambda node, site, sums: self._check_scores(node, site, sums, releases),
        )
        if not files:
            raise FedgftError("no site sent its scores", kind="network")
        if missing := self._find_missing(files):
            warn(f"the decision rule is fitted without {join_names(missing)}")
        place = make_private_folder(self.folder / SCORES_FOLDER)
        for number, (_, file) in enumerate(sorted(files.items())):
            with atomic_write(place / f"site-{number}.json", private=True) as part:
                part.write(file.text.encode())
        return files

    def _find_missing(self, files: Mapping[str, SiteFile]) -> list[str]:
        """Return the sites of this run that sent no usable file."""
        owners = self.model.strategy.aggregator.validator.owners
        return sorted(owners.keys() - files.keys() - set(self.left_out))

    def _check_scores(self, node: int, site: str, sums: SiteSums, releases: int) -> None:
        """Raise a `FedgftError` unless these can be the scores of the site's training rows."""
        validator = self.model.strategy.aggregator.validator
        name = validator.identity(node)
        if validator.owners.get(name) == node and site != name:
            text = f"now calls itself '{one_line(site, 100)}': a node has one name in a run"
            raise FedgftError(f"site '{name}' {text}")
        self._check_form(site, sums)
        spec = sums.require_spec()
        if not spec.scored or spec.threshold != THRESHOLD:
            raise FedgftError(f"site '{site}' sent no scores with the threshold {THRESHOLD:g}")
        ((_, tables),) = sums.sites.items()
        (privacy,) = tables.privacy or (Privacy(),)
        mechanism, variance, slack = self._find_noise(releases)
        if privacy.mechanism != mechanism or abs(privacy.variance - variance) > 1e-3 * variance:
            raise FedgftError(f"site '{site}': the noise on its scores is not the agreed one")
        declared = self.model.strategy.state.declared.get(name)
        if declared is None:
            text = "sent no counts in this run, which its scores could be compared with"
            raise FedgftError(f"site '{site}' {text}")
        self._compare(site, "scores", sums, declared, "in the rounds", slack=slack)

    def _find_noise(self, releases: int) -> tuple[str, float, float]:
        """Return name and variance of the noise on scores, and how wrong declared counts may be."""
        budget = self.model.strategy.budget
        noise = budget.noise("hard")
        if noise is None:
            return "none", 0.0, 0.5
        mechanism = calibrate_noise(scores_epsilon(budget, releases), budget.delta)
        return mechanism.name, mechanism.variance, 0.5 + SIGMAS * noise.count

    def _check_form(self, site: str, sums: SiteSums) -> None:
        """Raise a `FedgftError` unless classes and groups are those of the federation."""
        spec = sums.require_spec()
        if spec.classes != self.names.classes or spec.attributes != (self.attribute,):
            text = "its sums are of other labels or groups than the federation's"
            raise FedgftError(f"site '{site}': {text}", kind="conflict")
        for (group,) in sums.groups:
            if group is not None and group not in self.names.groups:
                name = one_line(group, 60)
                raise FedgftError(f"site '{site}': the federation has no group '{name}'")

    def _count(self, sums: SiteSums) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows by label and group (the last: not recorded), and their largest error."""
        shape = self.names.shape[:2]
        rows, slack = np.zeros(shape), np.zeros(shape)
        ((_, site),) = sums.sites.items()
        for (group,), table in site.tables.items():
            g = -1 if group is None else self.names.groups.index(group)
            rows[:, g] += table[..., COUNT].sum(1)
            slack[:, g] += table[..., SLACK].sum(1) + SIGMAS * np.sqrt(table[..., NOISE].sum(1))
        return rows, slack

    def _compare(
        self,
        site: str,
        what: str,
        sums: SiteSums,
        expected: np.ndarray,
        where: str,
        *,
        slack: float,
    ) -> None:
        """Raise a `FedgftError` if the rows by label and group differ from those sent before."""
        rows, error = self._count(sums)
        ((_, tables),) = sums.sites.items()
        least = tables.privacy[0].min_cell if tables.privacy else 0
        withheld = np.where(expected < least, least, 0)  # cells of which nothing was sent before
        difference = np.abs(rows - expected) - error - slack - withheld
        if difference.max() > 0:
            label, group = np.unravel_index(int(difference.argmax()), rows.shape)
            name = (*self.names.groups, "not recorded")[group]
            raise FedgftError(
                f"site '{site}': its {what} are of {rows[label, group]:.0f} rows with label "
                f"{self.names.classes[label]} and group {name}, and it counted "
                f"{expected[label, group]:.0f} {where}"
            )

    # The rule

    def _fit(self, files: Mapping[str, SiteFile]) -> DecisionRule:
        parts = {site: file.sums for site, file in sorted(files.items())}
        if withheld := [site for site, sums in parts.items() if not sums.histogram]:
            text = f"{join_names(withheld)} withheld the histograms of scores (min-count)"
            if not self.plan.randomized:
                text += ", and thresholds need them; `randomized` rules change decisions instead"
                raise FedgftError(text, kind="data")
            warn(f"{text}: the rule changes decisions by a coin")
        texts = {site: file.text.encode() for site, file in files.items()}
        rule = adjust(
            list(parts.values()),
            target=self.plan.target,
            local=self.plan.local,
            per_site=self.plan.per_site,
            randomized=self.plan.randomized,
            digests={site: hashlib.sha256(text).hexdigest() for site, text in texts.items()},
        )
        log.info("fedgft: %r", rule)
        return rule

    # The rule on held-out rows

    def _measure(
        self, rule: DecisionRule, reports: Mapping[str, SiteFile]
    ) -> dict[str, Any] | None:
        """Return accuracy and gaps of the rule on held-out rows; None if no site could tell."""
        if not reports:
            warn("the decision rule is not measured: no site sent sums of held-out rows")
            return None
        is_exact = self.model.strategy.budget.epsilon is None
        files = self._collect_decisions(rule, reports) if is_exact else dict(reports)
        if not files:
            warn("the decision rule is not measured: no site sent its decisions")
            return None
        try:
            counts = count_scores(
                [file.sums for _, file in sorted(files.items())],
                by_site=self.plan.by_site,
                decisions=is_exact or rule.reads == "decision",
            )
            if not is_exact and counts.reads != rule.reads:
                raise FedgftError("its scores on held-out rows are withheld")
            outcome = _apply(None if is_exact else rule, counts)
            return {
                "rows": outcome.counts.rows,
                "sites": sorted(files),
                "missing": self._find_missing(files),
                "measured": "decisions" if is_exact else "chances from the histograms of reports",
                **_describe(outcome, self.plan),
            }
        except FedgftError as error:
            warn(f"the decision rule is not measured: {one_line(error)}")
            return None

    def _collect_decisions(
        self, rule: DecisionRule, reports: Mapping[str, SiteFile]
    ) -> dict[str, SiteFile]:
        """Return the sites' sums of the rule's decisions on held-out rows, by site.

        A site receives only what it needs: the thresholds that apply there, and for a randomized
        rule the key of coins that are tossed for this measurement alone.
        """
        key = secrets.token_hex(KEY_BYTES) if rule.is_random else ""
        sites = {file.node: site for site, file in reports.items()}

        def make_extras(node: int) -> Request:
            cells = {
                (site, group): acceptance
                for (site, group), acceptance in rule.cells.items()
                if site is None or site == sites.get(node)
            }
            sent = replace(rule, cells=cells or rule.cells, fitted={}, expected={}, key=key)
            return {RULE: sent.to_json()}

        def check(node: int, site: str, sums: SiteSums) -> None:
            self._check_form(site, sums)
            if site not in reports or reports[site].node != node:
                raise FedgftError(f"site '{site}' sent no report before its decisions")
            self._check_decisions(site, sums, reports[site].sums)

        return self.model.ask(DECISIONS, "file of decisions", make_extras=make_extras, check=check)

    def _check_decisions(self, site: str, sums: SiteSums, report: SiteSums) -> None:
        """Raise a `FedgftError` unless the decisions are about the rows of the report."""
        ((_, tables),) = sums.sites.items()
        if sums.require_spec().scored or any(p.mechanism != "none" for p in tables.privacy):
            raise FedgftError(f"site '{site}' sent other sums than decisions")
        expected, error = self._count(report)
        slack = float(error.max()) + 0.5 + tables.prediction_missing
        self._compare(site, "decisions", sums, expected, "in its report", slack=slack)


def _apply(rule: DecisionRule | None, counts: RuleCounts) -> RuleOutcome:
    """Return what a rule does with the rows of these counts; None: the decisions as they are.

    Rows of a group that the rule does not know are left out.
    """
    if rule is None:
        return RuleOutcome.of(counts, {}, Acceptance((THRESHOLD,)))
    places: dict[tuple[int | None, int], Acceptance] = {}
    known = np.zeros(counts.counts.shape[:2], bool)
    for s, site in enumerate(counts.sites):
        for g, group in enumerate(counts.groups):
            acceptance = rule.cells.get((site if rule.per_site else None, group))
            known[s, g] = acceptance is not None or None in group
            if acceptance is not None:
                places[s, g] = acceptance
    kept = replace(counts, counts=counts.counts * known[..., None, None])
    return RuleOutcome.of(kept, places, rule.unrecorded)


def _describe(outcome: RuleOutcome, plan: RulePlan) -> dict[str, Any]:
    """Return accuracy, share of positive decisions and gaps, with 95% intervals."""
    rate, low, high = outcome.accuracy()
    gaps = []
    for name in dict.fromkeys((*plan.target, *plan.local, *SHOWN_METRICS)):
        found = describe_gap(outcome.rates(CATALOG[name], (0,))[1])
        gaps.append({"metric": name, "target": plan.target.get(name), **found})
    local = []
    for name, target in plan.local.items():
        sites = outcome.counts.sites
        by_site = {
            site: describe_gap(outcome.rates(CATALOG[name], (0,), site=s)[1])["gap"]
            for s, site in enumerate(sites)
        }
        estimable = {site: gap for site, gap in by_site.items() if gap is not None}
        worst = max(estimable, key=lambda site: estimable[site]) if estimable else None
        largest = None if worst is None else estimable[worst]
        local.append({"metric": name, "target": target, "gap": largest, "site": worst})
    return {
        "accuracy": {"rate": rate, "low": low, "high": high},
        "selected": outcome.selected(),
        "gaps": gaps,
        "local": local,
    }


def _split_groups(rule: DecisionRule, columns: Sequence[str]) -> DecisionRule:
    """Return a rule for intersections that reads the group columns one by one, if it can."""
    cells: dict[Cell, Acceptance] = {}
    for (site, (group,)), acceptance in rule.cells.items():
        parts = tuple(str(group).split(" & "))
        if len(parts) != len(columns):
            return rule
        cells[site, parts] = acceptance
    return replace(rule, attributes=tuple(columns), cells=cells)

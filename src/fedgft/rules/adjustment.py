"""`fedgft.adjust`: the best fair decision rule for a finished model, from sums of its scores."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.auditing.inputs import combine_sites
from fedgft.auditing.measurement import measure
from fedgft.errors import FedgftError
from fedgft.formatting import join_names, printable
from fedgft.metrics import CATALOG, Metric, check_one_threshold, check_over_all_rows, get_metric
from fedgft.rules.counts import RuleCounts, count_scores
from fedgft.rules.decision_rule import KEY_BYTES, Acceptance, Cell, DecisionRule, check_key
from fedgft.rules.expect import (
    NO_SHRINKAGE,
    RuleOutcome,
    Shrinkage,
    describe_gap,
    estimate_shrinkage,
)
from fedgft.rules.rule_problem import RuleProblem, Target, describe_targets
from fedgft.site_sums import SiteSums, Spellings
from fedgft.validation import check_instance, check_number, format_value

HINT = "measure() makes them, read_sums() reads them from a file"
MAX_WEIGHT = 1e12  # largest benefit and cost
MAX_SITES_APART = 500  # of more sites, gaps are listed only if they are limited
SHOWN_METRICS = ("sp", "eop", "eo")  # gaps that are listed besides those with a target

if TYPE_CHECKING:
    Sites = SiteSums | Iterable[SiteSums] | Mapping[str, Any]
else:  # `combine_sites` checks what it gets
    Sites = Any


def adjust(
    sums: Sites,
    *,
    target: Mapping[Any, float] | None = None,
    local: Mapping[Any, float] | None = None,
    groups: str | Sequence[str] = (),
    per_site: bool = False,
    randomized: bool = False,
    decisions: bool = False,
    benefit: float = 1.0,
    cost: float = 1.0,
    nearest: bool = False,
    key: str | None = None,
    digests: Mapping[str, str] | None = None,
) -> DecisionRule:
    """Return the best decision rule for a finished model whose gaps are within targets.

    The rule is the best of its kind: the most accurate one, or that of the largest benefit. It is
    found from sums alone; the scores stay at the sites.

    Parameters
    ----------
    sums
        The sums of all sites, with scores of two classes: a `SiteSums`, a list of them, or a
        mapping from the name of a site to (y_true, scores, sensitive_features). With `local` or
        `per_site`: one `SiteSums` per site.
    target
        The largest gap over all rows, by metric, such as ``{"sp": 0.02}``. None: only the gaps at
        the sites are limited.
    local
        The largest gap at every site, by metric. None: sites have no limit of their own.
    groups
        The group columns to compare: each of them alone by default. ``"race & sex"`` compares
        their combinations.
    per_site
        Whether each site gets thresholds of its own.
    randomized
        Whether a coin may decide between thresholds. It reaches targets that no fixed thresholds
        reach, and `decide` needs an identifier of each person.
    decisions
        Whether to change decisions instead of thresholds, as if there were no scores; only with
        `randomized`.
    benefit, cost
        The value of a right positive decision and the cost of a wrong one. Equal values, the
        default, give the most accurate rule.
    nearest
        Whether to return the rule nearest to the targets if no rule meets them, instead of raising
        an error.
    key
        The key of the coins, as hexadecimal text. By default it is drawn at random.
    digests
        The SHA-256 of each site's file. By default, digests of the counts.

    Returns
    -------
    DecisionRule
        The rule, with what to expect of it (`expected`).

    Examples
    --------
    >>> import fedgft
    >>> y = [1, 0, 1, 0, 1, 0, 1, 0]
    >>> scores = [0.9, 0.6, 0.7, 0.2, 0.6, 0.3, 0.4, 0.1]
    >>> site = fedgft.measure(y, scores, sensitive_features=list("ffffmmmm"), site="north")
    >>> rule = fedgft.adjust(site, target={"sp": 0.0})
    >>> rule.expected["accuracy"]["before"], rule.expected["accuracy"]["after"]
    (0.75, 1.0)
    """
    benefit = check_weight("benefit", benefit)
    cost = check_weight("cost", cost)
    given = {"target": target, "local": local}
    limits = {name: read_limits(name, each or {}) for name, each in given.items()}
    if not limits["target"] and not limits["local"]:
        raise FedgftError("is missing: a gap, such as {'sp': 0.02}", field="target", kind="missing")
    if decisions and not randomized:
        text = "changes decisions by a coin: give `randomized`, too"
        raise FedgftError(text, field="decisions", kind="missing")
    by_site = per_site or bool(limits["local"]) or _are_few_sites(sums)
    if key is not None:
        check_key(key)
    counts = count_scores(_read_sites(sums), by_site=by_site, decisions=decisions, digests=digests)
    if counts.reads == "decision" and not randomized:
        text = (
            "these sums have no histograms of scores, so a rule can only change decisions by a "
            "coin: give `randomized`, or measure again with `score` and without `min_cell`"
        )
        raise FedgftError(text, kind="data")
    return find_rule(
        counts,
        limits["target"],
        limits["local"],
        groups=groups,
        per_site=per_site,
        randomized=randomized,
        benefit=benefit,
        cost=cost,
        nearest=nearest,
        key=key,
    )


def find_rule(
    counts: RuleCounts,
    target: Mapping[Metric, float],
    local: Mapping[Metric, float],
    *,
    groups: str | Sequence[str] = (),
    per_site: bool = False,
    randomized: bool = False,
    benefit: float = 1.0,
    cost: float = 1.0,
    nearest: bool = False,
    key: str | None = None,
) -> DecisionRule:
    """Return the best rule for these counts; see `adjust`."""
    limits = {"target": target, "local": local}
    views, attributes = _read_groups(groups, counts.spec.attributes)
    counts = counts.with_attributes(attributes)
    targets = tuple(
        Target(metric, view, limit, is_local=name == "local")
        for name, each in limits.items()
        for metric, limit in each.items()
        for view in views
    )
    by_site = counts  # of one entry if sites are not kept apart
    if not per_site and not local:
        counts = counts.merged()
    _refuse_noise(counts, targets)
    problem = RuleProblem(
        counts, targets, per_site=per_site, is_random=randomized, benefit=benefit, cost=cost
    )
    fitted = problem.solve()
    unrecorded = Acceptance((counts.threshold,))
    outcome = RuleOutcome.of(counts, fitted.acceptances, unrecorded)
    if fitted.excess > 0 and not nearest:
        _refuse_targets(problem, outcome, is_proven=fitted.is_proven)
    shrinkage = estimate_shrinkage(problem, fitted)
    cells: dict[Cell, Acceptance] = {
        (None if s is None else counts.sites[s], counts.groups[g]): acceptance
        for (s, g), acceptance in fitted.acceptances.items()
    }
    is_random = any(each.is_random for each in cells.values())
    negative, positive = counts.spec.classes
    return DecisionRule(
        classes=(negative, positive),
        attributes=counts.spec.attributes,
        cells=cells,
        unrecorded=unrecorded,
        reads=counts.reads,
        key=(key or secrets.token_hex(KEY_BYTES)) if is_random else "",
        fitted={
            "date": date.today().isoformat(),
            "target": {metric.name: limit for metric, limit in limits["target"].items()},
            "local": {metric.name: limit for metric, limit in limits["local"].items()},
            "groups": [_name_view(view, attributes) for view in views],
            "benefit": benefit,
            "cost": cost,
            "met": fitted.excess == 0,
            "proven": fitted.is_proven,
            "rows": counts.rows,
            "label": counts.spec.label,
            "sums": dict(sorted(counts.digests.items())),
        },
        expected={
            **describe_outcome(problem, views, RuleOutcome.today(counts), outcome, shrinkage),
            "local": expect_local_gaps(
                by_site,
                targets,
                RuleOutcome.today(by_site),
                RuleOutcome.of(by_site, fitted.acceptances, unrecorded),
            ),
        },
    )


def describe_outcome(
    problem: RuleProblem,
    views: Sequence[tuple[int, ...]],
    before: RuleOutcome,
    outcome: RuleOutcome,
    shrinkage: Shrinkage = NO_SHRINKAGE,
) -> dict[str, Any]:
    """Return accuracy, positive decisions and gaps, before and after the rule.

    `after` is on the rows that the rule was fitted on; `new`, `low` and `high` are what to expect
    on new people.
    """
    counts = problem.counts
    accuracy, low, high = outcome.accuracy(shrinkage)
    found: dict[str, Any] = {
        "accuracy": {
            "before": before.accuracy()[0],
            "after": accuracy,
            "new": float(np.clip(accuracy - shrinkage.value, 0.0, 1.0)),
            "low": low,
            "high": high,
        },
        "selected": {"before": before.selected(), "after": outcome.selected()},
    }
    if problem.benefit != problem.cost:
        found["value"] = {
            name: each.value(problem.benefit, problem.cost)
            for name, each in (("before", before), ("after", outcome))
        }
    limits = {(t.metric.name, t.attributes, t.is_local): t.limit for t in problem.targets}
    shown = {t.metric.name: t.metric for t in problem.targets}
    shown |= {name: CATALOG[name] for name in SHOWN_METRICS if name not in shown}
    gaps = []
    for view in views:
        for name, metric in shown.items():
            _, rates = outcome.rates(metric, view)
            after = describe_gap(rates)
            gaps.append(
                {
                    "metric": name,
                    "groups": _name_view(view, counts.spec.attributes),
                    "target": limits.get((name, view, False)),
                    "before": describe_gap(before.rates(metric, view)[1])["gap"],
                    "after": after["gap"],
                    "low": after["low"],
                    "high": after["high"],
                }
            )
    found["gaps"] = gaps
    found["local"] = []
    found["exact"] = counts.shifts is None and counts.noise is None and not counts.has_withheld
    return found


def expect_local_gaps(
    counts: RuleCounts, targets: Sequence[Target], before: RuleOutcome, outcome: RuleOutcome
) -> list[dict[str, Any]]:
    """Return the largest gap of any site by metric, before and after, where sites are known.

    With noise on the counts, only metrics with a local target are listed.
    """
    limited = [target for target in targets if target.is_local]
    found = [_expect_local(counts, target, target.limit, before, outcome) for target in limited]
    if len(counts.sites) < 2 or counts.noise is not None:
        return found
    known = {(target.metric, target.attributes) for target in limited}
    free = [target for target in targets if (target.metric, target.attributes) not in known]
    return found + [_expect_local(counts, target, None, before, outcome) for target in free]


def _expect_local(
    counts: RuleCounts,
    target: Target,
    limit: float | None,
    before: RuleOutcome,
    outcome: RuleOutcome,
) -> dict[str, Any]:
    """Return the largest gap of any site, before and after."""
    gaps = np.full((2, len(counts.sites)), np.nan)
    for s in range(len(counts.sites)):
        for i, each in enumerate((before, outcome)):
            _, rates = each.rates(target.metric, target.attributes, site=s)
            gap = describe_gap(rates)["gap"]
            gaps[i, s] = np.nan if gap is None else gap
    known = ~np.isnan(gaps[1])
    worst = int(np.nanargmax(gaps[1])) if known.any() else None
    return {
        "metric": target.metric.name,
        "groups": _name_view(target.attributes, counts.spec.attributes),
        "target": limit,
        "before": None if np.isnan(gaps[0]).all() else float(np.nanmax(gaps[0])),
        "after": None if worst is None else float(gaps[1, worst]),
        "site": None if worst is None else counts.sites[worst],
        "sites": int(known.sum()),
        "not_estimable": [counts.sites[s] for s in np.flatnonzero(~known)],
    }


def _refuse_targets(problem: RuleProblem, outcome: RuleOutcome, *, is_proven: bool) -> None:
    """Raise a `FedgftError` that names the nearest gaps that a rule of this kind reaches."""
    counts = problem.counts
    reached = []
    for target in problem.targets:
        sites = range(len(counts.sites)) if target.is_local else (None,)
        gaps = [
            describe_gap(outcome.rates(target.metric, target.attributes, site=site)[1])["gap"]
            for site in sites
        ]
        gap = max((g for g in gaps if g is not None), default=0.0)
        reached.append(target._replace(limit=float(np.ceil(gap * 1e4) / 1e4)))
    kind = "randomized rule" if problem.is_random else "fixed thresholds"
    if problem.per_site:
        kind += " by site"
    names = counts.spec.attributes
    field = "local" if all(target.is_local for target in reached) else "target"
    ways = [f"raise `{field}`"]
    ways += [] if problem.is_random else ["try `randomized`"]
    if not problem.per_site and any(target.is_local for target in reached):
        ways.append("try `per_site`")
    ways.append("take the nearest rule with `nearest`")
    verb = "reaches" if problem.is_random else "reach"
    if not is_proven:
        verb = "was found to reach" if problem.is_random else "were found in time to reach"
    text = (
        f"no {kind} {verb} "
        f"{describe_targets(problem.targets, names)}; the nearest: "
        f"{describe_targets(reached, names)}. You may {', '.join(ways[:-1])}, or {ways[-1]}"
    )
    raise FedgftError(text, field=field, kind="data")


def _refuse_noise(counts: RuleCounts, targets: Sequence[Target]) -> None:
    """Raise a `FedgftError` if noise swallows the rows that a rate is computed from."""
    if counts.noise is None:
        return
    plain = RuleOutcome.of(counts, {}, Acceptance())
    for target in targets:
        sites = range(len(counts.sites)) if target.is_local else (None,)
        for site in sites:
            names, rates = plain.rates(target.metric, target.attributes, site=site)
            here = counts.noise if site is None else counts.noise[site : site + 1]
            noisy = {  # of other groups, this site has no row
                " & ".join(str(group[i]) for i in target.attributes)
                for group, variance in zip(counts.groups, here.sum((0, 2, 3)), strict=True)
                if variance > 0
            }
            bad = np.argwhere(~rates.valid & [name in noisy for name in names])
            if len(bad):
                where = "" if site is None else f" at site {printable(counts.sites[site])}"
                text = (
                    f"the noise swallows the rows of {target.metric.name} in group "
                    f"{printable(names[bad[0][1]])}{where}: measure with a larger `epsilon`, fewer "
                    "`bins`, or without noise"
                )
                raise FedgftError(text, kind="data")


def _are_few_sites(sums: Any) -> bool:
    """Return whether these are the sums of several named sites, few enough to keep them apart."""
    if not isinstance(sums, Sequence | Mapping) or not 2 <= len(sums) <= MAX_SITES_APART:
        return False
    if isinstance(sums, Mapping):
        return True
    parts = [part.sites for part in sums if isinstance(part, SiteSums)]
    return all(len(sites) == 1 and "" not in sites for sites in parts)


def _read_sites(sums: Any) -> Iterable[SiteSums]:
    """Return the sums, one per site where they were given so; of a generator, one at a time."""
    if isinstance(sums, Mapping):
        classes = combine_sites(sums).require_spec().classes  # all sites measured the same
        return [
            given.named(name)
            if isinstance(given, SiteSums)
            else combine_sites({name: _measure(name, given, classes)})
            for name, given in sums.items()
        ]
    single: Any = sums
    if isinstance(sums, str) or not isinstance(sums, Iterable):
        return [combine_sites(single)]  # raises the usual error unless these are sums
    spellings = Spellings(ignore_case=False)
    return (spellings.unify(check_instance("sums", part, SiteSums, HINT)) for part in sums)


def _measure(name: str, given: Any, classes: tuple[str, ...]) -> SiteSums:
    y_true, scores, features = given
    return measure(
        y_true, None, scores=scores, sensitive_features=features, site=name, classes=classes
    )


def read_limits(field: str, limits: Any) -> dict[Metric, float]:
    """Return the largest gaps by metric."""
    if not isinstance(limits, Mapping):
        text = f"must map metrics to gaps, as in {{'sp': 0.02}}, not {format_value(limits)}"
        raise FedgftError(text, field=field)
    found = {}
    for name, limit in limits.items():
        metric = check_over_all_rows(check_one_threshold(get_metric(name)))
        gap = check_number(field, limit)
        if not 0 <= gap < 1:
            raise FedgftError(f"{metric.name}={gap:g}: must be at least 0 and below 1", field=field)
        if metric.parts:
            text = f"{metric.name}: give one gap for each metric instead"
            raise FedgftError(text, field=field)
        found[metric] = gap
    return found


def check_weight(field: str, value: Any) -> float:
    """Return a benefit or a cost, or raise a `FedgftError`."""
    number = check_number(field, value)
    if not 0 < number <= MAX_WEIGHT:
        text = f"must be above 0 and at most {MAX_WEIGHT:g}, not {number:g}"
        raise FedgftError(text, field=field)
    return number


def _read_groups(
    groups: str | Sequence[str], known: Sequence[str]
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Return the combinations of attributes to compare, as positions, and their attributes."""
    given = [groups] if isinstance(groups, str) else groups
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        text = f"must name group columns, as in 'sex', not {format_value(groups)}"
        raise FedgftError(text, field="groups")
    views = [[part.strip() for part in name.split("&")] for name in given]
    views = views or [[name] for name in known]
    for name in (name for view in views for name in view):
        if name not in known:
            text = f"{name!r} is none of the group columns {join_names(list(known))}"
            raise FedgftError(text, field="groups")
    used = tuple(name for name in known if any(name in view for view in views))
    return [tuple(sorted(used.index(name) for name in set(view))) for view in views], used


def _name_view(view: Sequence[int], attributes: Sequence[str]) -> str:
    return " & ".join(attributes[i] for i in view)

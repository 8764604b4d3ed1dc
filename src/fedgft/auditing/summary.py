"""The result of an audit as values that JSON can represent.

The classes here name and explain every key of audit.json. Rates, gaps and limits are fractions.
None means that a value is not estimable, or that there are too few rows for an interval. The keys
of dictionaries are names of metrics, groups, classes or sites, as the comments say.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict
from uuid import uuid4

import numpy as np

from fedgft.auditing.between_sites import MetricEstimate, SiteGaps
from fedgft.auditing.conditional import ConditionalSummary
from fedgft.auditing.next_site import DEFAULT_CHANGE, NextSiteSummary, summarize_next_site
from fedgft.auditing.ranking import Ranking, summarize_ranking
from fedgft.auditing.rates import (
    LargestGap,
    Pool,
    Rates,
    View,
    estimate_difference,
    estimate_rates,
    estimate_ratio,
    find_largest_gap,
    find_reference_group,
)
from fedgft.auditing.score_distributions import ScoreDistributions, summarize_distributions
from fedgft.auditing.subgroup_scan import SHOWN, Scan, scan_subgroups
from fedgft.auditing.thresholds import Curves, GroupThresholds, compute_curves, sweep_thresholds
from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.metrics import Metric, get_metric
from fedgft.metrics.intervals import Interval
from fedgft.site_sums import Privacy
from fedgft.store import parse_json

FORMAT = "fedgft-audit-1"
COMPARED_KEYS = ("classes", "groups", "accuracy", "metrics", "attributes")  # `compare` needs these
SITE_KEYS = ("gap", "low", "high", "ratio", "contribution", "local", "pair_rates", "pair_shares")
SHORT_SITE_KEYS = ("gap", "contribution")  # in all views but the one by all attributes
ONE_LINE_KEYS = (
    "sites",
    "curves",
    "sweep",
    "distributions",
    "ranking",
)  # their entries take one line each in audit.json
Number = float | None


class GroupRate(TypedDict):
    """The rate of one group, its 95% interval, and the number of rows in its denominator."""

    rate: Number
    low: Number
    high: Number
    n: float


class GapInterval(TypedDict):
    """A gap and its 95% interval."""

    gap: Number
    low: Number
    high: Number


class GapSummary(GapInterval):
    """The largest gap and the smallest ratio between two groups, with 95% intervals."""

    ratio: Number
    ratio_low: Number
    ratio_high: Number


class ReferenceComparison(TypedDict):
    """One group against the reference group: the difference and the ratio of their rates."""

    difference: Number
    low: Number
    high: Number
    ratio: Number
    ratio_low: Number
    ratio_high: Number


class MetricSummary(GapSummary):
    """One metric over all sites.

    If a group has no rate, the gap over all groups is None, and `among_estimable` holds the gap
    among the other groups. `pair` holds the two groups that differ most; the group with the higher
    rate is first. `condition` is the condition of the metric under which they differ most, and
    `groups` holds the rates under this condition. `signed_gap` is the difference between the two
    groups of `pair`; its interval is for this pair alone.
    """

    among_estimable: GapSummary | None
    pair: list[str] | None
    condition: str
    groups: dict[str, GroupRate]
    conditions: NotRequired[dict[str, dict[str, GroupRate]]]  # by condition, if several
    reference: NotRequired[str]
    against_reference: NotRequired[dict[str, ReferenceComparison]]  # by group
    signed_gap: NotRequired[Number]
    signed_low: NotRequired[Number]
    signed_high: NotRequired[Number]


class SiteSummary(TypedDict):
    """One site. `n` is its number of rows; all other values are by metric.

    `gap`, `low` and `high` are the site's own largest gap and its limits, and `ratio` is its own
    smallest ratio. `accuracy` is the share of right decisions over all rows of the site, also those
    without a recorded group. `local` is the difference at the site between the two groups of the
    metric's `pair`. `contribution` is the amount that the site adds to the signed gap. `pair_rates`
    are the rates of the two groups of `pair` at the site, and `pair_shares` the shares of their
    rows that the site holds. Only the view by all attributes together has all of these; other
    views have `n`, `gap` and `contribution`.
    """

    n: float
    accuracy: NotRequired[GroupRate]
    gap: dict[str, Number]
    low: NotRequired[dict[str, Number]]
    high: NotRequired[dict[str, Number]]
    ratio: NotRequired[dict[str, Number]]
    contribution: dict[str, Number]
    local: NotRequired[dict[str, GapInterval]]
    pair_rates: NotRequired[dict[str, list[Number]]]
    pair_shares: NotRequired[dict[str, list[Number]]]


class ViewSummary(TypedDict):
    """All metrics in one view. Except for `sites`, each dictionary is by metric.

    `metrics` holds the gaps of decisions, and `scores` holds the gaps of mean scores (None without
    scores). `noise_floor` is the mean gap that a perfectly fair model shows on as many rows.
    `fedgft.auditing.between_sites.SiteGaps` explains the others; `tv` is its `total_variation`.
    """

    metrics: dict[str, MetricSummary]
    scores: dict[str, MetricSummary] | None
    heterogeneity: dict[str, Number]
    tv: dict[str, Number]
    bound: dict[str, Number]
    within: dict[str, GapInterval]
    noise_floor: NotRequired[dict[str, Number]]
    sites: dict[str, SiteSummary]  # by site


class Summary(ViewSummary):
    """A whole audit.

    The keys of `ViewSummary` are those of the view by all attributes together, and `groups` is the
    title of that view. `about` says who made the audit of what: see
    `fedgft.auditing.about.check_about`. `verdicts` is "within", "exceeds", "inconclusive" or "not
    estimable" for each metric, over all views, compared with its `tolerance`; `tolerance_stated`
    lists the metrics whose tolerance is not the default.
    """

    format: str
    about: dict[str, Any]
    tolerance: dict[str, float]
    tolerance_stated: list[str]
    verdicts: dict[str, str]
    # counted, weight (if rows have weights), not_recorded (no group), label_missing,
    # prediction_missing
    rows: dict[str, float]
    classes: list[str]
    groups: str
    threshold: Number
    interval: str  # how the intervals were made
    accuracy: GroupRate
    # by class and group: the area under the ROC curve (`auc`) +- `bin_error`, see `Curves`, and
    # the limits of its 95% interval (`low`, `high`)
    auc: dict[str, dict[str, dict[str, Number]]] | None
    curves: dict[str, dict[str, dict[str, list]]] | None
    sweep: dict[str, Any] | None  # see `Sweep`
    # by the title of a view and class; None without scores
    distributions: dict[str, dict[str, ScoreDistributions]] | None
    ranking: dict[str, dict[str, Ranking]] | None
    scan: Scan | None  # None with one attribute
    attributes: dict[str, ViewSummary]  # the other views, by title
    given: ConditionalSummary | None  # gaps within strata
    next_site: NotRequired[NextSiteSummary]  # what to expect at a site that did not take part
    adjusted: list[GroupThresholds]
    privacy: dict[str, Any]  # sites (by mechanism), approximate, largest_epsilon (of one row)
    warnings: list[str]


def views_of(summary: Summary) -> dict[str, ViewSummary]:
    """Return all views by title; the view by all attributes together is last."""
    return {**summary["attributes"], summary["groups"]: summary}


def estimable_gap(metric: MetricSummary) -> GapSummary | None:
    """Return the gap over all groups, or, if a group has no rate, the gap among the others.

    The result is None if fewer than two groups have a rate.
    """
    return metric["among_estimable"] if metric["gap"] is None else metric


def summarize(
    pool: Pool,
    views: Sequence[View],
    estimates: Sequence[Mapping[str, MetricEstimate]],
    *,
    references: Sequence[str],
    interval: str,
    given: ConditionalSummary | None,
    adjusted: list[GroupThresholds],
    warnings: list[str],
    about: Mapping[str, Any],
    tolerance: Mapping[str, float],
    stated: Sequence[str],
    largest_change: float = DEFAULT_CHANGE,
    scan: int = SHOWN,
) -> Summary:
    """Build the summary from the estimates of all views.

    Parameters
    ----------
    pool
        The sums of all sites.
    views, estimates
        The views, the one by all attributes together last, and the estimates of each by metric.
    references
        The reference groups, with which the others are compared: see `find_reference_group`.
    interval, given, adjusted, warnings
        How the intervals were computed, the gaps within strata, the thresholds by group, and the
        warnings for the reader.
    about, tolerance, stated
        Who made the audit of what, the largest acceptable gaps, and the metrics for which somebody
        stated one. The verdicts are left empty.
    largest_change
        The largest change of a site's share of the rows in the worst mix of sites.
    scan
        The number of subgroups that differ most to list.
    """
    *parts, main_part = (
        _summarize_view(view, each, pool.sites, references, full=view is views[-1])
        for view, each in zip(views, estimates, strict=True)
    )
    view = views[-1]
    curves: dict[str, list[Curves]] = {}
    if view.has_histograms:
        curves = {name: compute_curves(view, s) for s, name in enumerate(view.scored_classes)}
    sweep = sweep_thresholds(view)
    right = estimate_rates(get_metric("acc"), _merge_groups(view), "hard", by_site=True)[:, 0, 0]
    next_site = summarize_next_site(
        view, estimates[-1], right, pool.sites, largest_change=largest_change
    )
    ranking = {v.title: each for v in views if (each := summarize_ranking(v))}
    distances = {v.title: each for v in views if (each := summarize_distributions(v))}
    found = {
        "format": FORMAT,
        "about": dict(about),
        "tolerance": dict(tolerance),
        "tolerance_stated": list(stated),
        "verdicts": {},
        "rows": {
            "counted": as_count(pool.rows),
            **({"weight": pool.weight} if pool.spec.is_weighted else {}),
            "not_recorded": as_count(view.sums.count[..., -1].sum()),
            "label_missing": as_count(pool.label_missing),
            "prediction_missing": as_count(pool.prediction_missing),
        },
        "classes": pool.spec.classes,
        "groups": view.title,
        "threshold": pool.spec.threshold,
        "interval": interval,
        "accuracy": _summarize_accuracy(view),
        **main_part,
        "auc": _add_limits(_select_fields(curves, ("auc", "bin_error")), ranking.get(view.title)),
        "curves": _select_fields(curves, ("thresholds", "tpr", "fpr", "calibration")),
        "sweep": None if sweep is None else vars(sweep),
        "distributions": distances or None,
        "ranking": ranking or None,
        "scan": scan_subgroups(views, shown=scan),
        "attributes": {v.title: part for v, part in zip(views, parts, strict=False)},
        "given": given,
        "next_site": next_site,
        "adjusted": adjusted,
        "privacy": _summarize_privacy(pool),
        "warnings": warnings,
    }
    return to_plain(found)


def _summarize_view(
    view: View,
    estimates: Mapping[str, MetricEstimate],
    sites: Sequence[str],
    references: Sequence[str],
    *,
    full: bool,
) -> dict[str, Any]:
    """Return the keys of `ViewSummary` for one view, before `to_plain` prepares them for JSON.

    Parameters
    ----------
    view, estimates
        The groups, and the estimates by metric.
    sites
        The names of the sites.
    references
        The reference groups, with which the others are compared: see `find_reference_group`.
    full
        Whether each site gets all keys of `SiteSummary`.
    """
    reference = find_reference_group(view, references)
    scores = None
    if view.has_histograms:
        scores = {name: _summarize_scores(e.metric, view) for name, e in estimates.items()}
    gaps = {name: estimate.sites for name, estimate in estimates.items()}
    rows = view.sums.count[..., :-1].sum((1, 2))
    accuracy = _summarize_site_accuracy(view) if full else [{}] * len(sites)
    return {
        "metrics": {name: _summarize_estimate(e, reference) for name, e in estimates.items()},
        "scores": scores,
        "heterogeneity": {name: each.heterogeneity for name, each in gaps.items()},
        "tv": {name: each.total_variation for name, each in gaps.items()},
        "bound": {name: each.bound for name, each in gaps.items()},
        "within": {name: gap_interval(*each.within) for name, each in gaps.items()},
        "noise_floor": {name: estimate.noise_floor for name, estimate in estimates.items()},
        "sites": {
            site: {"n": as_count(rows[k]), **accuracy[k], **_summarize_site(gaps, k, full=full)}
            for k, site in enumerate(sites)
        },
    }


def _summarize_estimate(estimate: MetricEstimate, reference: int | None) -> dict[str, Any]:
    """Return the `MetricSummary` of one metric of decisions.

    Parameters
    ----------
    estimate
        The rates and the gap of the metric, over all sites and at each site.
    reference
        The position of the reference group, or None. The other groups are compared with it under
        the condition of the gap.
    """
    view = estimate.view
    out = _summarize_metric(estimate.metric, view, estimate.rates, estimate.limits, estimate.gap)
    if reference is not None:
        condition = estimate.gap.condition or 0
        out["reference"] = view.groups[reference]
        out["against_reference"] = {
            group: _compare_with_reference(estimate.rates, condition, g, reference)
            for g, group in enumerate(view.groups)
            if g != reference
        }
    signed = ("signed_gap", "signed_low", "signed_high")
    return out | dict(zip(signed, estimate.sites.signed, strict=True))


def _summarize_scores(metric: Metric, view: View) -> dict[str, Any]:
    """Return the `MetricSummary` of one metric of mean scores, without reference and sites."""
    rates = estimate_rates(metric, view, "soft")
    return _summarize_metric(metric, view, rates, rates.interval(), find_largest_gap(rates))


def _summarize_metric(
    metric: Metric, view: View, rates: Rates, limits: Interval, gap: LargestGap
) -> dict[str, Any]:
    """Return the keys of `MetricSummary` that decisions and scores have in common.

    Parameters
    ----------
    metric, view
        The metric and the groups.
    rates, limits
        The rates by condition and group, and their 95% limits.
    gap
        The largest gap between groups that have a rate.
    """
    numbers = {key: getattr(gap, key) for key in GapSummary.__annotations__}
    incomplete = bool(np.isnan(rates.rate).any())
    conditions = metric.condition_names(view.spec.classes)
    by_condition = {name: _group_rates(view, rates, limits, v) for v, name in enumerate(conditions)}
    condition = conditions[gap.condition or 0]
    out = {
        **(dict.fromkeys(numbers) if incomplete else numbers),
        "among_estimable": numbers if incomplete and gap.gap is not None else None,
        "pair": None if gap.pair is None else [view.groups[g] for g in gap.pair],
        "condition": condition,
        "groups": by_condition[condition],
    }
    return out | ({"conditions": by_condition} if len(conditions) > 1 else {})


def _group_rates(view: View, rates: Rates, limits: Interval, v: int) -> dict[str, dict[str, Any]]:
    """The rates of all groups under one condition."""
    low, high = limits
    return {
        group: {
            "rate": rates.rate[v, g],
            "low": low[v, g],
            "high": high[v, g],
            "n": as_count(rates.n[v, g]),
        }
        for g, group in enumerate(view.groups)
    }


def _compare_with_reference(rates: Rates, condition: int, g: int, reference: int) -> dict[str, Any]:
    """Compare group g with the reference group; the intervals are not simultaneous."""
    correlation = rates.correlation(g, reference)
    if rates.covariance is not None:
        correlation = correlation[condition]
    pair = (rates[condition, g], rates[condition, reference])
    values = (
        *estimate_difference(*pair, correlation=correlation),
        *estimate_ratio(*pair, correlation=correlation),
    )
    return dict(zip(ReferenceComparison.__annotations__, map(float, values), strict=True))


def _summarize_site(gaps: Mapping[str, SiteGaps], k: int, *, full: bool) -> dict[str, Any]:
    """Return the keys of `SiteSummary`, except `n`, for the site at position k.

    Parameters
    ----------
    gaps
        The gaps of all sites, by metric.
    k
        The position of the site.
    full
        Whether to include all details, not only gaps and contributions.
    """
    by_metric = {
        name: {
            **gap_interval(*(values[k] for values in each.largest)),
            "ratio": each.smallest_ratio[k],
            "contribution": each.contribution[k],
            "local": gap_interval(*(values[k] for values in each.local)),
            "pair_rates": _take(each.pair_rates, k),
            "pair_shares": _take(each.pair_shares, k),
        }
        for name, each in gaps.items()
    }
    keys = SITE_KEYS if full else SHORT_SITE_KEYS
    return {key: {name: found[key] for name, found in by_metric.items()} for key in keys}


def _take(values: np.ndarray | None, k: int) -> list[Number]:
    """Return the two numbers of the site at position k; None without a pair of groups."""
    return [None, None] if values is None else values[:, k].tolist()


def gap_interval(gap: Any, low: Any, high: Any) -> GapInterval:
    """The three numbers as a `GapInterval`."""
    return {"gap": gap, "low": low, "high": high}


def _select_fields(curves: Mapping[str, list[Curves]], names: Sequence[str]) -> dict | None:
    """Return these fields of the curves, by class and group; None if there are no curves."""
    by_class = {
        name: {c.group: {key: getattr(c, key) for key in names} for c in each}
        for name, each in curves.items()
    }
    return by_class or None


def _add_limits(areas: dict | None, ranking: Mapping[str, Ranking] | None) -> dict | None:
    """Return the areas by class and group with the limits of their intervals, if there are any."""
    for name, groups in (areas or {}).items():
        for group, area in groups.items():
            found = None if ranking is None else ranking[name]["areas"][group]
            area["low"] = None if found is None else found["low"]
            area["high"] = None if found is None else found["high"]
    return areas


def _summarize_accuracy(view: View) -> dict[str, Any]:
    """Return the share of right decisions over all rows, including rows that have no group."""
    everyone = _merge_groups(view)
    rates = estimate_rates(get_metric("acc"), everyone, "hard")
    return _group_rates(everyone, rates, rates.interval(), 0)["everyone"]


def _summarize_site_accuracy(view: View) -> list[dict[str, Any]]:
    """Return, for each site, the key `accuracy` of `SiteSummary`."""
    rates = estimate_rates(get_metric("acc"), _merge_groups(view), "hard", by_site=True)
    low, high = rates.interval()
    columns = (each[:, 0, 0].tolist() for each in (rates.rate, low, high, rates.n))
    return [
        {"accuracy": {"rate": rate, "low": low, "high": high, "n": as_count(n)}}
        for rate, low, high, n in zip(*columns, strict=True)
    ]


def _merge_groups(view: View) -> View:
    """Return the view with all rows in one group, including rows that have no group."""

    def merge(values: np.ndarray) -> np.ndarray:
        total = values.sum(2)
        return np.stack((total, np.zeros_like(total)), 2)  # one group, and rows of no group

    squares = view.squares
    if view.products is not None:  # what randomization moves between groups cancels out
        squares = view.products.sum(2)
    return replace(
        view,
        groups=("everyone",),
        sums=view.sums.map(merge),
        noise=merge(view.noise),
        slack=merge(view.slack),
        squares=None if squares is None else merge(squares),
        products=None,
    )


def _summarize_privacy(pool: Pool) -> dict[str, Any]:
    """Return the number of sites by mechanism, and the largest epsilon that a site spent.

    The epsilon of a site is the sum over its mechanisms.
    """
    sites = Counter(
        "min cell" if p.min_cell else p.mechanism
        for measures in pool.privacy
        for p in measures or (Privacy(),)
    )
    spent = [sum(p.epsilon for p in measures) for measures in pool.privacy]
    return {
        "sites": dict(sites),
        "approximate": pool.is_approximate,
        "largest_epsilon": max(spent, default=0.0) or None,
    }


def as_count(value: Any) -> float:
    """Return a number of rows, as an int if it is a whole number."""
    number = float(value)
    return int(number) if number == int(number) else number


def to_plain(value: Any) -> Any:
    """Convert a value to one that JSON can represent.

    Arrays become lists, numbers that are not finite become None, and texts are made safe to print.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): to_plain(item) for key, item in value.items()}
    return value


def to_json(summary: Summary) -> str:
    """Return the summary as indented JSON, with one line for each site and each curve.

    Names are not escaped to ASCII. The text contains no NaN and no infinity.
    """
    token = uuid4().hex  # marks the place of long parts; no name in the data contains it
    long_parts = []

    def take_out(view: Any) -> dict[str, Any]:
        out = dict(view)
        for key in ONE_LINE_KEYS:
            if out.get(key):
                lines = [f"{_one_line(name)}: {_one_line(x)}" for name, x in out[key].items()]
                out[key] = f"{token} {len(long_parts)}"
                long_parts.append("{\n    " + ",\n    ".join(lines) + "\n  }")
        return out

    short = take_out(summary)
    short["attributes"] = {title: take_out(v) for title, v in summary["attributes"].items()}
    text = json.dumps(short, indent=2, allow_nan=False, ensure_ascii=False)
    for i, part in enumerate(long_parts):
        text = text.replace(f'"{token} {i}"', part, 1)
    return text + "\n"


def _one_line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def read_summary(path: Path) -> Summary:
    """Read an audit.json that `fedgft audit --out` wrote.

    Names in the file are made safe to print. A file of another kind, or one that lacks a part that
    a comparison needs, raises an error of kind ``"file"``. The parts themselves are not checked.
    """
    try:
        found = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FedgftError(f"{path}: not a whole audit ({error})", kind="file") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FedgftError(f"{path}: not an audit that this version of fedgft wrote", kind="file")
    if missing := [name for name in COMPARED_KEYS if name not in found]:
        raise FedgftError(
            f"{path}: an audit that lacks a part ({missing[0]!r}); make it again", kind="file"
        )
    return to_plain(_rename_metric(found))


def _rename_metric(value: Any) -> Any:
    """Return the parts of an audit with today's name of the metric that 0.1.0 called "cal"."""
    if isinstance(value, list):
        return [_rename_metric(each) for each in value]
    if not isinstance(value, dict):
        return value
    by_metric = value.keys() >= {"sp", "eop", "eo", "cal", "acc", "fpr"}
    renamed = {
        "predictive-parity" if by_metric and key == "cal" else key: _rename_metric(part)
        for key, part in value.items()
    }
    if renamed.get("metric") == "cal":
        renamed["metric"] = "predictive-parity"
    return renamed

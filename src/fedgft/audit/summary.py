"""The result of an audit as values that JSON can hold. None: not estimable, or not claimed.

The classes here name and explain every key of audit.json. Rates, gaps and limits are fractions.
Dictionaries are by the name of a metric, group, class or site, as their comments say.
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

from fedgft.audit.between_sites import MetricEstimate, SiteGaps
from fedgft.audit.rates import (
    Gap,
    Pool,
    Rates,
    View,
    estimate_difference,
    estimate_rates,
    estimate_ratio,
    find_largest_gap,
    find_reference_group,
)
from fedgft.audit.thresholds import Curves, GroupThresholds, compute_curves, sweep_thresholds
from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.metrics import Metric, get_metric
from fedgft.metrics.decisions import condition_names
from fedgft.metrics.intervals import Limits
from fedgft.store import parse_json
from fedgft.sums import Privacy

FORMAT = "fedgft-audit-1"
REQUIRED = ("classes", "groups", "accuracy", "metrics", "attributes")  # to compare two audits
BRIEF = ("gap", "contribution")  # of a site, in views by single attributes
COMPACT = ("sites", "curves", "sweep")  # in JSON, one line for each of their entries
Number = float | None


class GroupRate(TypedDict):
    """The rate of one group, its 95% interval, and the rows it is taken from."""

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

    If a group has no rate, the gap over all groups is None and `among_estimable` has the gap
    between the other groups. `pair` are the two groups that differ most, the higher rate first,
    and `condition` the condition of the metric under which they do; `groups` are the rates under
    it. `signed_gap` is the difference between the pair, with an interval for this pair alone.
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
    """One site, each value by metric.

    `gap`, `low`, `high` and `ratio` are the site's own largest gap and smallest ratio; `local` is
    the difference there between the pair of the metric, and `contribution` what the site adds to
    the signed gap. Views by single attributes have `gap` and `contribution` only.
    """

    n: float
    gap: dict[str, Number]
    low: NotRequired[dict[str, Number]]
    high: NotRequired[dict[str, Number]]
    ratio: NotRequired[dict[str, Number]]
    contribution: dict[str, Number]
    local: NotRequired[dict[str, GapInterval]]


class ViewSummary(TypedDict):
    """All metrics by the groups of one attribute or of several together; each by metric.

    `metrics` are gaps of decisions, `scores` gaps of mean scores (None without scores); the others
    are explained in `fedgft.audit.between_sites.SiteGaps`.
    """

    metrics: dict[str, MetricSummary]
    scores: dict[str, MetricSummary] | None
    heterogeneity: dict[str, Number]
    tv: dict[str, Number]
    bound: dict[str, Number]
    within: dict[str, GapInterval]
    sites: dict[str, SiteSummary]  # by site


class Summary(ViewSummary):
    """A whole audit; its own view is the one by all attributes together, named `groups`."""

    format: str
    rows: dict[str, float]  # counted, not_recorded (no group), label_missing, prediction_missing
    classes: list[str]
    groups: str
    threshold: Number
    interval: str  # how the intervals were made
    accuracy: GroupRate
    # by class and group: the area under the ROC curve, uncertain by +- `bin_error`; see `Curves`
    auc: dict[str, dict[str, dict[str, Number]]] | None
    curves: dict[str, dict[str, dict[str, list]]] | None
    sweep: dict[str, Any] | None  # see `Sweep`
    attributes: dict[str, ViewSummary]  # the other views, by title
    adjusted: list[GroupThresholds]
    privacy: dict[str, Any]  # sites (by mechanism), approximate, largest_epsilon (of one row)
    warnings: list[str]


def views_of(summary: Summary) -> dict[str, ViewSummary]:
    """All views by title; the one by all attributes together comes last."""
    return {**summary["attributes"], summary["groups"]: summary}


def estimable_gap(metric: MetricSummary) -> GapSummary | None:
    """The gap over all groups; else among those that have a rate; None if fewer than two have."""
    return metric["among_estimable"] if metric["gap"] is None else metric


def summarize(
    pool: Pool,
    views: Sequence[View],
    estimates: Sequence[Mapping[str, MetricEstimate]],
    *,
    references: Sequence[str],
    interval: str,
    adjusted: list[GroupThresholds],
    warnings: list[str],
) -> Summary:
    """Put the estimates of all views together.

    Parameters
    ----------
    pool
        The sums of all sites.
    views, estimates
        The views, all attributes together last, and for each its estimates by metric.
    references
        The groups that others are compared with: see `find_reference_group`.
    interval, adjusted, warnings
        How intervals were made, thresholds by group, and sentences for the reader.
    """
    *parts, own = (
        _summarize_view(view, each, pool.sites, references, full=view is views[-1])
        for view, each in zip(views, estimates, strict=True)
    )
    view = views[-1]
    curves: dict[str, list[Curves]] = {}
    if view.has_histograms:
        curves = {name: compute_curves(view, s) for s, name in enumerate(view.scored_classes)}
    found = {
        "format": FORMAT,
        "rows": {
            "counted": as_count(pool.rows),
            "not_recorded": as_count(view.sums.count[..., -1].sum()),
            "label_missing": as_count(pool.label_missing),
            "prediction_missing": as_count(pool.prediction_missing),
        },
        "classes": pool.spec.classes,
        "groups": view.title,
        "threshold": pool.spec.threshold,
        "interval": interval,
        "accuracy": _summarize_accuracy(view),
        **own,
        "auc": {name: {c.group: c.area() for c in each} for name, each in curves.items()} or None,
        "curves": {n: {c.group: c.points() for c in each} for n, each in curves.items()} or None,
        "sweep": _summarize_sweep(view),
        "attributes": {v.title: part for v, part in zip(views, parts, strict=False)},
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
    """Every metric and every site, by the groups of one view; not yet values that JSON can hold.

    Parameters
    ----------
    view, estimates
        The groups, and the estimates by metric.
    sites
        The names of the sites.
    references
        The groups that others are compared with: see `find_reference_group`.
    full
        Whether the sites have all details of `SiteSummary`.
    """
    reference = find_reference_group(view, references)
    scores = None
    if view.has_histograms:
        scores = {name: _summarize_scores(e.metric, view) for name, e in estimates.items()}
    gaps = {name: estimate.sites for name, estimate in estimates.items()}
    rows = view.sums.count[..., :-1].sum((1, 2))
    return {
        "metrics": {name: _summarize_estimate(e, reference) for name, e in estimates.items()},
        "scores": scores,
        "heterogeneity": {name: each.heterogeneity for name, each in gaps.items()},
        "tv": {name: each.total_variation for name, each in gaps.items()},
        "bound": {name: each.bound for name, each in gaps.items()},
        "within": {name: gap_interval(*each.within) for name, each in gaps.items()},
        "sites": {
            site: {"n": as_count(rows[k]), **_summarize_site(gaps, k, full=full)}
            for k, site in enumerate(sites)
        },
    }


def _summarize_estimate(estimate: MetricEstimate, reference: int | None) -> dict[str, Any]:
    """One metric of decisions; see `MetricSummary`.

    Parameters
    ----------
    estimate
        Its rates, its gap, and the sites behind the gap.
    reference
        The position of the group to compare the others with, under the condition of the gap.
    """
    view = estimate.view
    out = _summarize_metric(estimate.metric, view, estimate.rates, estimate.limits, estimate.gap)
    if reference is not None:
        shown = estimate.rates[estimate.gap.condition or 0]
        out["reference"] = view.groups[reference]
        out["against_reference"] = {
            group: _compare_with_reference(shown[g], shown[reference])
            for g, group in enumerate(view.groups)
            if g != reference
        }
    signed = ("signed_gap", "signed_low", "signed_high")
    return out | dict(zip(signed, estimate.sites.signed, strict=True))


def _summarize_scores(metric: Metric, view: View) -> dict[str, Any]:
    """One metric of mean scores, without reference group and sites."""
    rates = estimate_rates(metric, view, "soft")
    return _summarize_metric(metric, view, rates, rates.interval(), find_largest_gap(rates))


def _summarize_metric(
    metric: Metric, view: View, rates: Rates, limits: Limits, gap: Gap
) -> dict[str, Any]:
    """The part of `MetricSummary` that decisions and scores have in common.

    Parameters
    ----------
    metric, view
        What was estimated, and for which groups.
    rates, limits
        The rates by condition and group, and their 95% limits.
    gap
        The largest gap between groups that have a rate.
    """
    numbers = {key: getattr(gap, key) for key in GapSummary.__annotations__}
    incomplete = bool(np.isnan(rates.rate).any())
    conditions = condition_names(metric, view.spec.classes)
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


def _group_rates(view: View, rates: Rates, limits: Limits, v: int) -> dict[str, dict[str, Any]]:
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


def _compare_with_reference(rates: Rates, reference: Rates) -> dict[str, Any]:
    """One group against the reference group; each interval holds for itself."""
    values = (*estimate_difference(rates, reference), *estimate_ratio(rates, reference))
    return dict(zip(ReferenceComparison.__annotations__, map(float, values), strict=True))


def _summarize_site(gaps: Mapping[str, SiteGaps], k: int, *, full: bool) -> dict[str, Any]:
    """The gaps of the site at position k, by metric: see `SiteSummary`.

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
            **gap_interval(*(values[k] for values in each.own)),
            "ratio": each.own_ratio[k],
            "contribution": each.contribution[k],
            "local": gap_interval(*(values[k] for values in each.local)),
        }
        for name, each in gaps.items()
    }
    keys = ("gap", "low", "high", "ratio", "contribution", "local") if full else BRIEF
    return {key: {name: found[key] for name, found in by_metric.items()} for key in keys}


def gap_interval(gap: Any, low: Any, high: Any) -> GapInterval:
    """The three numbers as a `GapInterval`."""
    return {"gap": gap, "low": low, "high": high}


def _summarize_sweep(view: View) -> dict[str, Any] | None:
    """Accuracy, gaps by metric and positive decisions by group, each a list over thresholds."""
    sweep = sweep_thresholds(view)
    if sweep is None:
        return None
    return vars(sweep) | {"selected": dict(zip(view.groups, sweep.selected.T, strict=True))}


def _summarize_accuracy(view: View) -> dict[str, Any]:
    """The share of right decisions over all rows, including those of no group."""

    def merge_groups(values: np.ndarray) -> np.ndarray:
        total = values.sum(2)
        return np.stack((total, np.zeros_like(total)), 2)  # one group, and rows of no group

    everyone = replace(
        view,
        groups=("everyone",),
        sums=view.sums.map(merge_groups),
        noise=merge_groups(view.noise),
        slack=merge_groups(view.slack),
    )
    rates = estimate_rates(get_metric("acc"), everyone, "hard")
    return _group_rates(everyone, rates, rates.interval(), 0)["everyone"]


def _summarize_privacy(pool: Pool) -> dict[str, Any]:
    """Count the sites by mechanism; epsilon adds up over the mechanisms of one site."""
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
    """A number of rows: an int where it is whole."""
    number = float(value)
    return int(number) if number == int(number) else number


def to_plain(value: Any) -> Any:
    """The value as JSON can hold it.

    Arrays become lists, numbers that are not finite None, and texts are made safe to print.
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
    """The summary as indented JSON, with one line for each site and each curve.

    Names are not escaped to ASCII, and there is no NaN or infinity in it.
    """
    token = uuid4().hex  # marks the place of long parts; no name in the data contains it
    long_parts = []

    def take_out(view: Any) -> dict[str, Any]:
        out = dict(view)
        for key in COMPACT:
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

    Names in the file are made safe to print. An error of kind ``"file"`` if it is no such file, or
    lacks a part that a comparison needs; the parts themselves are not checked.
    """
    try:
        found = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FedgftError(f"{path}: not a whole audit ({error})", kind="file") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FedgftError(f"{path}: not an audit that this version of fedgft wrote", kind="file")
    if missing := [name for name in REQUIRED if name not in found]:
        raise FedgftError(
            f"{path}: an audit that lacks a part ({missing[0]!r}); make it again", kind="file"
        )
    return to_plain(found)

"""Write the sentences of a report: warnings, verdicts, and which sites cause a gap."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedgft.auditing.between_sites import FEW_SITES, MetricEstimate
from fedgft.auditing.rates import Pool, View
from fedgft.auditing.summary import GapSummary, Summary, estimable_gap, views_of
from fedgft.errors import FedgftError
from fedgft.formatting import MAX_NAMES, Verdict, format_gap, format_points, join_names
from fedgft.metrics import CATALOG
from fedgft.metrics.catalog import resolve_name
from fedgft.metrics.intervals import FEW
from fedgft.validation import check_number, format_value

MIN_CONTRIBUTION = 0.0005  # a smaller contribution of a site is shown as 0.0 points
MAX_SITES = 40  # largest number of sites in a figure or table of a report
FOUR_FIFTHS = 0.8
RATIO_METRICS = ("sp", "eop")  # the metrics that the four-fifths rule is about
# Equalized odds is the larger of eop and fpr.
VERDICT_METRICS = ("sp", "eop", "fpr", "predictive-parity", "acc")
PHRASES = {  # "{whose}12.3% of women and 4.5% of men {verb}"
    "sp": ("", "are decided {positive}"),
    "eop": ("of those who are {positive}, ", "are decided so"),
    "fpr": ("of those who are not {positive}, ", "are decided so all the same"),
    "predictive-parity": ("of those decided {positive}, ", "really are"),
    "acc": ("", "are decided rightly"),
}


def list_warnings(
    pool: Pool,
    views: Sequence[View],
    estimates: Sequence[Mapping[str, MetricEstimate]],
    *,
    draws: int,
) -> Iterator[str]:
    """Yield the warnings that a reader should see before the numbers.

    Parameters
    ----------
    pool, views
        The sums of all sites, and the views of them; the view by all attributes together is last.
    estimates
        For each view, the estimates by metric.
    draws
        The number of bootstrap draws; 0 if there is no bootstrap.
    """
    yield from _warn_about_names(pool)
    yield from _warn_about_rows(pool, views)
    yield from _warn_about_spelling(pool)
    yield from _warn_about_privacy(pool, views[-1])
    if draws and len(pool.sites) < FEW_SITES:
        yield f"A bootstrap over only {len(pool.sites)} sites is rough, and so are the intervals."
    for by_metric in estimates:
        for estimate in by_metric.values():
            yield from _warn_about_groups(estimate)
            if estimate.gap.pair is not None:
                yield from _warn_about_sites(estimate, pool.sites)


def _warn_about_names(pool: Pool) -> Iterator[str]:
    """Warn about sums that came without the name of a site."""
    if pool.numbered:
        first = pool.numbered[0]
        last = pool.numbered[-1]
        called = first if first == last else f"{first} to {last}"
        yield (
            f"{len(pool.numbered)} of the sums came without the name of their site; each is taken "
            f"as a site of its own, called {called} in the order given: measure(..., site=...) "
            "names them"
        )


def _warn_about_rows(pool: Pool, views: Sequence[View]) -> Iterator[str]:
    """Warn about rows that the numbers do not include."""
    about = "about " if pool.is_approximate else ""
    attributes = pool.spec.attributes
    if views[-1].attributes != attributes:
        yield f"{' & '.join(attributes)}: no row has all of them recorded."
    for view in views:
        missing = float(view.sums.count[..., -1].sum())
        if missing > 0:
            yield (
                f"{view.title}: not recorded for {about}{missing:,.0f} of {pool.rows:,.0f} rows "
                f"({100 * missing / pool.rows:.1f}%); they are in no group."
            )
    for what, missing in (("label", pool.label_missing), ("prediction", pool.prediction_missing)):
        if missing > 0:
            yield f"{about}{missing:,.0f} row(s) without a {what} were not counted."
    if "" in pool.sites:
        yield "A site has no name: all rows measured without one count as one site."


def _warn_about_spelling(pool: Pool) -> Iterator[str]:
    """Warn about groups whose names differ only in case or blanks."""
    for i, attribute in enumerate(pool.spec.attributes):
        spellings: dict[str, list[str]] = {}
        for value in sorted({v for group in pool.groups if (v := group[i]) is not None}):
            spellings.setdefault("".join(value.casefold().split()), []).append(value)
        for names in spellings.values():
            if len(names) > 1:
                yield (
                    f"{attribute}: {' and '.join(map(repr, names))} differ only in case or blanks "
                    "but count as different groups; sites should agree on one spelling."
                )


def _warn_about_privacy(pool: Pool, view: View) -> Iterator[str]:
    """Warn about noise that sites added to their counts, and about counts that they suppressed."""
    noisy = [
        site
        for site, measures in zip(pool.sites, pool.privacy, strict=True)
        if any(p.mechanism != "none" for p in measures)
    ]
    if noisy:
        yield (
            f"Noise for privacy was added to the counts of {join_names(noisy)}; the intervals of "
            "rates and gaps are wider for it. TV, DH and the bound are inflated by it, and curves "
            "and group thresholds show it as it is; where it takes a rate out of [0, 1], the rate "
            "is cut off there and contributions no longer add up to the gap."
        )
    suppressed = sum(p.suppressed for measures in pool.privacy for p in measures)
    if suppressed:
        yield (
            f"{suppressed} small cell(s) were withheld; each is estimated by the middle of its "
            "range, and the intervals cover the whole range."
        )
    if view.spec.scored and not view.has_histograms:
        yield (
            "ROC, calibration, thresholds and gaps of scores are left out: sites that withhold "
            "small cells withhold their histograms too."
        )


def _warn_about_groups(estimate: MetricEstimate) -> Iterator[str]:
    """Warn about groups without a rate, and about groups with too few rows for an interval.

    A group has no rate if it has no row of the metric's event. It has no interval if it has fewer
    than 10 such rows, or if noise alone could explain the count.
    """
    view = estimate.view
    title = f"{estimate.metric.title} by {view.title}"
    unknown = np.isnan(estimate.rates.rate)
    empty = [view.groups[g] for g in np.flatnonzero(unknown.any(0))]
    if empty:
        yield (
            f"{title} is not estimable: no row to take a rate from in {join_names(empty)}. That is "
            "not the same as fair."
        )
    small = [view.groups[g] for g in np.flatnonzero((~unknown & ~estimate.rates.valid).any(0))]
    if small:
        rows = f"fewer than {FEW} rows"
        if view.noise.any() or view.slack.any():
            rows = f"perhaps fewer than {FEW} rows, or too few for the noise,"
        yield (
            f"{title}: {rows} of the event in {join_names(small)}; no interval is claimed for "
            "them, nor an upper limit for the largest gap."
        )


def _warn_about_sites(estimate: MetricEstimate, names: Sequence[str]) -> Iterator[str]:
    """Warn if the gap within sites differs from the gap over all sites (Simpson's paradox).

    Parameters
    ----------
    estimate
        A metric with a gap between two groups.
    names
        The names of the sites.

    Yields
    ------
    str
        One sentence if no site has both groups. Otherwise one sentence for each of these that is
        true: the gaps within sites and over all sites disagree; some sites have the opposite gap;
        some sites have a gap although there is none over all sites.
    """
    gap = estimate.gap
    sites = estimate.sites
    first, second = (estimate.view.groups[g] for g in gap.pair or ())
    over_all, low, high = (math.nan if x is None else x for x in (gap.gap, gap.low, gap.high))
    title = f"{estimate.metric.title} by {estimate.view.title}"
    if sites.total_variation > 1 - 1e-12:
        yield (
            f"{title}: no site has rows of both {first} and {second}, so no site can see the gap "
            f"of {format_points(over_all)} points between them."
        )
        return
    pair = f"{title}, {first} against {second}"
    disagreement = _describe_disagreement(estimate, low, high)
    if disagreement:
        yield (
            f"Simpson warning: {pair}: within sites the gap is {format_gap(*sites.within)}, over "
            f"all sites it is {format_gap(over_all, low, high)}: {disagreement}."
        )
    if low > 0 and (sites.direction < 0).any():
        at = join_names([names[int(k)] for k in np.flatnonzero(sites.direction < 0)])
        yield f"{pair}: the gap is the other way round, beyond chance, at {at}."
    if low <= 0 and sites.direction.any():
        at = join_names([names[int(k)] for k in np.flatnonzero(sites.direction)])
        yield f"{pair}: no gap beyond chance over all sites, but there is one at {at}."


def _describe_disagreement(estimate: MetricEstimate, low: float, high: float) -> str:
    """Describe how the gap within sites differs from the gap over all sites; "" if it does not.

    `low` and `high` are the limits of the gap over all sites. They are NaN if unknown. Comparisons
    with NaN are false, so the result is "" in that case.
    """
    within = estimate.sites.within
    if low > 0 and within.value < 0:
        return "the other way round"
    if low > 0 and within.low <= 0 and within.high < low:
        return "it cannot be seen within sites"
    if within.high < low or within.low > high:
        return "the two views differ by more than their intervals"
    return ""


def list_verdicts(summary: Summary) -> list[Verdict]:
    """Return one verdict per metric of `VERDICT_METRICS`: a sentence with gap, interval and rates.

    `passes` is True if there is no gap beyond chance, which does not prove that there is no gap. It
    is False if there is a gap beyond chance, by all attributes together or by one of them. It is
    None if a group has no rate or too few rows.
    """
    return [_judge_all_views(name, summary) for name in VERDICT_METRICS]


def _judge_all_views(name: str, summary: Summary) -> Verdict:
    """Return the verdict on one metric over all views.

    A gap beyond chance by a single attribute makes the verdict False, even if the verdict by all
    attributes together is uncertain.
    """
    verdict = _judge(name, summary)
    for title, view in summary["attributes"].items():
        numbers = estimable_gap(view["metrics"][name])
        if verdict.passes is not False and numbers is not None and (numbers["low"] or 0.0) > 0:
            text = f"{verdict.text} But by {title} alone there is a gap of {_gap_text(numbers)}."
            return Verdict(False, text)
    return verdict


def _judge(name: str, summary: Summary) -> Verdict:
    """Return the verdict on one metric, by all attributes together.

    The sentence states the rates of the two groups that differ most, their gap with its interval,
    and, for two classes, whether the ratio meets the four-fifths rule.
    """
    found = summary["metrics"][name]
    title = CATALOG[name].title.capitalize()
    numbers = estimable_gap(found)
    if numbers is None or found["pair"] is None:
        return Verdict(None, f"{title}: not estimable. That is not the same as fair.")
    whose, verb = (text.format(positive=f"“{summary['classes'][-1]}”") for text in PHRASES[name])
    if len(summary["classes"]) > 2:
        whose = ""
        verb = f"({found['condition']})"
    rates = [f"{format_points(found['groups'][g]['rate'])}% of {g}" for g in found["pair"]]
    text = f"{title}: {whose}{' and '.join(rates)} {verb}, a gap of {_gap_text(numbers)}"
    low = numbers["low"]
    high = numbers["high"]
    if low is None:
        return Verdict(None, f"{text}. Too few rows for an interval, so nothing can be claimed.")
    if found["gap"] is None:
        text += ", among the groups that have a rate at all"
    if high is None:
        text += f"; beyond chance it is at least {format_points(low)} points"
    if name in RATIO_METRICS and len(summary["classes"]) == 2:
        text += _judge_ratio(numbers)
    if low > 0:
        return Verdict(False, f"{text}.")
    if found["gap"] is None or high is None:
        end = "No gap beyond chance, but not all groups can be compared."
        return Verdict(None, f"{text}. {end}")
    end = f"No gap beyond chance, though it may be as large as {format_points(high)} points."
    return Verdict(True, f"{text}. {end}")


def _gap_text(numbers: GapSummary) -> str:
    """The gap in points with its interval."""
    assert numbers["gap"] is not None  # `estimable_gap` returns only summaries that have a gap
    return format_gap(numbers["gap"], numbers["low"], numbers["high"])


def _judge_ratio(numbers: GapSummary) -> str:
    """Return the end of a sentence that compares the ratio with 4/5; "" if it is not estimable."""
    ratio = numbers["ratio"]
    if ratio is None:
        return ""
    below = ratio < FOUR_FIFTHS
    limit = numbers["ratio_high"] if below else numbers["ratio_low"]
    certain = limit is not None and (limit < FOUR_FIFTHS) == below
    verb = "is below" if below else "meets"
    end = "" if certain else " (chance could explain it)"
    return f"; the ratio {ratio:.3f} {verb} four fifths{end}"


class Exceeded(NamedTuple):
    """A gap that is above its limit, or that cannot be judged."""

    metric: str
    reason: str  # a sentence whose subject is the metric


def check_limits(limits: Mapping[str, Any]) -> dict[str, float]:
    """Return limits of gaps by the short names of metrics, or raise a `FedgftError`."""
    if not limits:
        raise FedgftError("name at least one metric and its limit: check(sp=0.05)", kind="missing")
    found = {}
    for asked, limit in limits.items():
        name = resolve_name(asked)
        if name not in CATALOG:
            text = f"{format_value(asked)} is no metric; choose from {', '.join(CATALOG)}"
            raise FedgftError(text, field="metric")
        found[name] = check_number(name, limit)
        if not 0 <= found[name] < 1:
            raise FedgftError(f"`{name}` must be a gap, 0 or more and below 1, not {limit}")
    return found


def find_exceeded(summary: Summary, limits: Mapping[str, float]) -> list[Exceeded]:
    """Return the gaps whose interval lies above the limit.

    Every view counts: a gap between single attributes can be surer than one between
    intersections. A gap that is not estimable, or too few rows for an interval, does not pass.

    Parameters
    ----------
    summary
        The results of the audit.
    limits
        The largest gap to accept, by the short name of the metric.
    """
    exceeded = []
    for name, limit in limits.items():
        for title, view in views_of(summary).items():
            found = view["metrics"][name]
            numbers = estimable_gap(found)
            low = None if numbers is None else numbers["low"]
            if numbers is not None and low is not None and low > limit:
                gap = f"the gap is {numbers['gap']:.3g}"
                reason = f"by {title} is at least {low:.3g} (95%; {gap}), above {limit:g}"
                exceeded.append(Exceeded(name, reason))
            elif low is None or found["gap"] is None:
                reason = f"by {title} cannot be judged (not estimable): no pass at {limit:g}"
                exceeded.append(Exceeded(name, reason))
    return exceeded


def estimable_metrics(summary: Summary) -> list[str]:
    """Return the metrics of `VERDICT_METRICS` for which at least two groups have a rate."""
    return [name for name in VERDICT_METRICS if summary["metrics"][name]["pair"] is not None]


def leading_metric(summary: Summary) -> str:
    """Return the metric that ranks the sites: the first estimable one of `VERDICT_METRICS`."""
    return next(iter(estimable_metrics(summary)), VERDICT_METRICS[0])


def rank_sites(summary: Summary, metric: str) -> list[str]:
    """Return the names of all sites, in descending order of their contribution to the gap.

    The order uses the absolute contribution to the gap of `metric`. A contribution that is not
    estimable counts as 0. Sites with equal contributions keep their order.
    """

    def size(site: str) -> float:
        return -abs(summary["sites"][site]["contribution"][metric] or 0.0)

    return sorted(summary["sites"], key=size)


def describe_contributions(summary: Summary, metric: str) -> Iterator[str]:
    """Yield two sentences that say which sites cause the gap of a metric.

    Contributions add up to the signed gap. Sites that add less than 0.05 points are not named. If
    the gap or a contribution is not estimable, there are no sentences.
    """
    found = summary["metrics"][metric]
    amounts = {
        site: summary["sites"][site]["contribution"][metric] for site in rank_sites(summary, metric)
    }
    known = {site: amount for site, amount in amounts.items() if amount is not None}
    if found["pair"] is None or len(known) < len(amounts):
        return
    first, second = found["pair"]
    gap = f"in {CATALOG[metric].title} between {first} and {second}"
    more = {site: amount for site, amount in known.items() if amount >= MIN_CONTRIBUTION}
    less = {site: -amount for site, amount in known.items() if amount <= -MIN_CONTRIBUTION}
    if not more and not less:
        yield f"No site adds to the gap {gap}: each adds less than 0.05 points."
    else:
        parts = [_list_amounts(more, "adds", "add"), _list_amounts(less, "takes away", "take")]
        text = "; ".join(part for part in parts if part)
        yield f"Of the gap of {format_points(found.get('signed_gap'))} points {gap}, {text}."
    yield (
        "What a site adds is measured from the overall rate of the two groups: a site where both "
        "have that rate adds 0. Over all sites it adds up to the gap."
    )


def _list_amounts(amounts: Mapping[str, float], verb: str, plural: str) -> str:
    """Return ``north adds 12.3, south 4.5 and east 1.0 (2 more add less)``; "" if no sites."""
    if not amounts:
        return ""
    texts = [f"{site} {format_points(amount)}" for site, amount in amounts.items()][:MAX_NAMES]
    (first, amount), *_ = amounts.items()
    texts[0] = f"{first} {verb} {format_points(amount)}"
    text = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    rest = len(amounts) - len(texts)
    if not rest:
        return text
    return f"{text} ({rest} more {verb.split()[0] if rest == 1 else plural} less)"

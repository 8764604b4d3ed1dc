"""Write the sentences of a report: warnings, and how the sites add up to a gap."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedgft.auditing.between_sites import FEW_SITES, MetricEstimate
from fedgft.auditing.rates import Pool, View
from fedgft.auditing.summary import MetricSummary, SiteSummary, Summary
from fedgft.auditing.verdicts import VERDICT_METRICS, name_all, name_group, rate_name
from fedgft.formatting import MAX_NAMES, format_interval, format_percent, format_points, join_names
from fedgft.metrics import CATALOG
from fedgft.metrics.intervals import FEW
from fedgft.site_sums import SQUARES

MIN_CONTRIBUTION = 0.0005  # a smaller contribution of a site is shown as 0.0 points
MIN_PART = 0.004  # a smaller part of a contribution is not explained
REVERSED = "the other way round"  # a gap within sites with the sign opposite to the overall one
MAX_SITES = 40  # largest number of sites in a figure or table of a report
EVENTS = {  # the rows of a group that a metric is about
    "eop": " whose true outcome is “{positive}”",
    "fpr": " whose true outcome is not “{positive}”",
    "predictive-parity": " with the decision “{positive}”",
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
    yield from _explain_counts(pool)
    yield from _warn_about_privacy(pool, views[-1])
    if draws and len(pool.sites) < FEW_SITES:
        yield f"A bootstrap over only {len(pool.sites)} sites is rough, and so are the intervals."
    for by_metric in estimates:
        for name, estimate in by_metric.items():
            yield from _warn_about_groups(estimate)
            if estimate.gap.pair is not None and name in VERDICT_METRICS:
                yield from _warn_about_sites(estimate, pool.sites)
        yield from _warn_about_disagreement([by_metric[name] for name in VERDICT_METRICS])


def _warn_about_names(pool: Pool) -> Iterator[str]:
    """Warn about sums that came without the name of a site."""
    if pool.numbered:
        first = pool.numbered[0]
        last = pool.numbered[-1]
        called = first if first == last else f"{first} to {last}"
        yield (
            f"{len(pool.numbered)} of the sums do not name their site; each counts as a separate "
            f"site, called {called} in the order given: measure(..., site=...) names them"
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
                f"{view.title}: not recorded for {about}{missing:,.0f} of {pool.weight:,.0f} rows "
                f"({100 * missing / pool.weight:.1f}%); they are in no group."
            )
    for what, missing in (("label", pool.label_missing), ("prediction", pool.prediction_missing)):
        if missing > 0:
            yield f"{about}rows without a {what}, which were not counted: {missing:,.0f}."
    if "" in pool.sites:
        yield "A site has no name: all rows measured without one count as one site."


def _explain_counts(pool: Pool) -> Iterator[str]:
    """Say what the counts are if a row does not simply count once in one group."""
    spec = pool.spec
    if spec.weight:
        squares = float(pool.tables[..., SQUARES].sum())
        effective = pool.weight**2 / squares if squares > 0 else 0.0
        yield (
            f"Rows are weighted ({spec.weight}): numbers of rows in the tables are sums of "
            f"weights. For intervals, all rows are worth {effective:,.0f} rows of equal weight. "
            "They treat rows as drawn independently: rows of one cluster or stratum of a survey "
            "may be worth less or more."
        )
    if spec.randomized is not None:
        yield (
            "The recorded groups were randomized before they were stored (epsilon "
            f"{spec.randomized.epsilon:g}). Every number by group is corrected for it, and the "
            "intervals include what the randomization adds. Rates outside [0, 1] are set to 0 or 1."
        )
    if spec.proxy:
        yield (
            "The groups are not known: each row counts for every group with a probability. Such "
            "estimates are biased where decisions differ with the group among people of the same "
            "probabilities. If the group alone, and not what the probabilities are made from, "
            "changes decisions, the gap is understated (Chen et al. 2019). The intervals do not "
            "cover this bias."
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
            f"Noise for privacy was added to the counts of {join_names(noisy)}. It makes the "
            "intervals of rates and gaps wider, and TV, DH and the bound larger. Curves and group "
            "thresholds include it uncorrected. A rate that it moves out of [0, 1] is set to 0 or "
            "1, and contributions then do not add up to the gap."
        )
    suppressed = sum(p.suppressed for measures in pool.privacy for p in measures)
    if suppressed:
        yield (
            f"Withheld small cells: {suppressed}. The audit computes with the middle of the "
            "range of each, and the intervals cover the whole range."
        )
    if view.spec.scored and not view.has_histograms:
        yield (
            "ROC curves, calibration, thresholds and gaps of scores are left out, because sites "
            "that withhold small cells also withhold their histograms."
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
        have = "has" if len(empty) == 1 else "have"
        yield (
            f"{title} is not estimable: {join_names(empty)} {have} no rows for this rate. That "
            "does not mean that the model is fair."
        )
    small = [view.groups[g] for g in np.flatnonzero((~unknown & ~estimate.rates.valid).any(0))]
    if small:
        rows = f"fewer than {FEW} rows"
        if view.noise.any() or view.slack.any():
            rows = f"perhaps fewer than {FEW} rows, or too few for the noise,"
        yield (
            f"{title}: {rows} of the event in {join_names(small)}; their rates have no interval, "
            "and the largest gap has no upper limit."
        )


def _warn_about_sites(estimate: MetricEstimate, names: Sequence[str]) -> Iterator[str]:
    """Warn about sites whose gap contradicts the gap over all sites.

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
        true: some sites have the opposite gap; some sites have a gap although there is none over
        all sites.
    """
    gap = estimate.gap
    sites = estimate.sites
    first, second = (estimate.view.groups[g] for g in gap.pair or ())
    over_all, low, _ = (math.nan if x is None else x for x in (gap.gap, gap.low, gap.high))
    title = f"{estimate.metric.title} by {estimate.view.title}"
    if sites.total_variation > 1 - 1e-12:
        yield (
            f"{title}: no site has rows of both {first} and {second}, so no site can see the gap "
            f"of {format_points(over_all)} points between them."
        )
        return
    pair = f"{title}, {name_group(first)} against {name_group(second)}"
    start = pair[0].upper() + pair[1:]
    if low > 0 and (sites.direction < 0).any():
        at = join_names([names[int(k)] for k in np.flatnonzero(sites.direction < 0)])
        yield f"{start}: the gap is the other way round, beyond chance, at {at}."
    if low <= 0 and sites.direction.any():
        at = join_names([names[int(k)] for k in np.flatnonzero(sites.direction)])
        yield f"{start}: no gap beyond chance over all sites, but there is one at {at}."


def _warn_about_disagreement(estimates: Sequence[MetricEstimate]) -> Iterator[str]:
    """Warn if gaps within sites differ from those over all sites, once per kind of difference.

    It is Simpson's paradox if the two have opposite signs beyond chance. `estimates` are those of
    several metrics by one attribute.
    """
    found: dict[str, list[str]] = {}
    for estimate in estimates:
        gap = estimate.gap
        if gap.pair is None or estimate.sites.total_variation > 1 - 1e-12:
            continue
        over_all, low, high = (math.nan if x is None else x for x in (gap.gap, gap.low, gap.high))
        if disagreement := _describe_disagreement(estimate, low, high):
            first, second = (name_group(estimate.view.groups[g]) for g in gap.pair)
            within = estimate.sites.within
            found.setdefault(disagreement, []).append(
                f"{estimate.metric.title}, {first} minus {second}, is {format_points(over_all)} "
                f"({format_interval(low, high)}) overall and {format_points(within.value)} "
                f"({format_interval(within.low, within.high)}) within sites"
            )
    for disagreement, parts in found.items():
        reverses = disagreement == REVERSED
        start = "Simpson warning" if reverses else "Local and overall gaps differ"
        title = estimates[0].view.title
        yield f"{start} by {title}, in points (95% interval): {'; '.join(parts)}: {disagreement}."


def _describe_disagreement(estimate: MetricEstimate, low: float, high: float) -> str:
    """Describe how the gap within sites differs from the gap over all sites; "" if it does not.

    `low` and `high` are the limits of the gap over all sites. They are NaN if unknown. Comparisons
    with NaN are false, so the result is "" in that case.
    """
    within = estimate.sites.within
    if low > 0 and within.high < 0:
        return REVERSED
    if low > 0 and within.low <= 0 and within.high < low:
        return "it cannot be seen within sites"
    if within.high < low or within.low > high:
        return "the two views differ by more than their intervals"
    return ""


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
    first, second = map(name_group, found["pair"])
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


def explain_site(summary: Summary, metric: str, site: str) -> str:
    """Return in words why a site adds to the gap of a metric, or takes from it.

    The contribution p (r - rho) - q (s - rho) has two parts. With m the mean of the two rates r
    and s at the site, (p + q) / 2 times r - s is due to the site's own gap, and (p - q) (m - rho)
    to its mix of groups: it holds more of one group than of the other, at a rate that differs
    from the overall rate. The result is "" if a number is not estimable. The rate in the text is
    that of the rows of both groups at the site together.
    """
    found = summary["metrics"][metric]
    numbers = summary["sites"][site]
    parts = split_contribution(numbers, metric)
    rate = rate_at_site(summary, metric, site)
    if found["pair"] is None or parts is None or rate is None:
        return ""
    own, mix = parts
    rates = [rate for rate in numbers["pair_rates"][metric] if rate is not None]
    overall = _rate_of_pair(found)
    first, second = map(name_group, found["pair"])
    text = f"{site} holds {describe_shares(summary, metric, site)}."
    reasons = []
    if abs(mix) >= MIN_PART:
        both = " for the two groups" if len(found["groups"]) > 2 else ""
        where = "below" if rate < overall else "above"
        of_both = " of the two groups" if both else ""
        reason = f"its {rate_name(metric)} of {format_percent(rate)}{both} is {where} the overall "
        reason += f"{format_percent(overall)}{of_both}, so that this mix {_change_gap(mix)}"
        middle = sum(rates) / len(rates)  # it decides the sign of the part, not the rate above
        if (middle < overall) != (rate < overall):
            reason = f"this mix {_change_gap(mix)}"
        reasons.append(reason)
    if abs(own) >= MIN_PART:
        gap = format_points(abs(rates[0] - rates[1]))
        higher = first if rates[0] > rates[1] else second
        reasons.append(f"its own gap of {gap} points in favor of {higher} {_change_gap(own)}")
    if not reasons:
        return f"{text} It adds next to nothing to the gap."
    reason = "; ".join(reasons)
    return f"{text} {reason[0].upper()}{reason[1:]}."


def describe_shares(summary: Summary, metric: str, site: str) -> str:
    """Return ``41% of all men but 12% of all women``: what a site holds of the two groups."""
    shares = [share or 0.0 for share in summary["sites"][site]["pair_shares"][metric]]
    first, second = map(name_all, summary["metrics"][metric]["pair"] or ())
    low, high = sorted(shares)
    link = "but" if high > 2 * low else "and"
    event = EVENTS.get(metric, "").format(positive=summary["classes"][-1])
    return f"{100 * shares[0]:.0f}% of {first} {link} {100 * shares[1]:.0f}% of {second}{event}"


def rate_at_site(summary: Summary, metric: str, site: str) -> float | None:
    """Return the rate of the rows of both groups of the pair at a site; None if there are none."""
    found = summary["metrics"][metric]
    numbers = summary["sites"][site]
    hits = 0.0
    rows = 0.0
    pairs = zip(numbers["pair_rates"][metric], numbers["pair_shares"][metric], strict=True)
    for group, (rate, share) in zip(found["pair"] or (), pairs, strict=False):
        if rate is not None and share is not None:
            rows += share * found["groups"][group]["n"]
            hits += rate * share * found["groups"][group]["n"]
    return hits / rows if rows > 0 else None


def split_contribution(site: SiteSummary, metric: str) -> tuple[float, float] | None:
    """Return what a site adds by its own gap, and by its mix of groups: see `explain_site`.

    None if a number is not estimable.
    """
    amount = site["contribution"][metric]
    shares = [x for x in site.get("pair_shares", {}).get(metric, ()) if x is not None]
    rates = [x for x in site.get("pair_rates", {}).get(metric, ()) if x is not None]
    if amount is None or len(shares) < 2 or not rates:
        return None
    own = sum(shares) / 2 * (rates[0] - rates[1]) if len(rates) == 2 else 0.0
    return own, amount - own


def _rate_of_pair(found: MetricSummary) -> float:
    """Return the rate of the two groups of the pair together."""
    groups = [found["groups"][group] for group in found["pair"] or ()]
    rows = sum(group["n"] for group in groups)
    return sum((group["rate"] or 0.0) * group["n"] for group in groups) / rows if rows else 0.0


def _change_gap(amount: float) -> str:
    """Return ``adds 1.2 points to the gap``, or what it takes from the gap."""
    size = format_points(abs(amount))
    return f"adds {size} points to the gap" if amount > 0 else f"takes {size} points from the gap"


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

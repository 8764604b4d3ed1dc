"""What a reader must be told before the numbers: sentences, made from the numbers."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fedgft.audit.bootstrap import FEW_SITES
from fedgft.audit.locality import Locality
from fedgft.audit.rates import FEW, Gap, Rates
from fedgft.audit.sums import Sums
from fedgft.audit.views import Pool, View
from fedgft.metrics import Metric

SHOWN = 3  # names in a sentence; of the others, how many


def about_groups(metric: Metric, seen: View, rates: Rates) -> Iterator[str]:
    """Groups without a rate, and groups with too few rows for an interval."""
    empty = [seen.names[g] for g in np.flatnonzero(np.isnan(rates.rate).any(0))]
    if empty:
        yield (
            f"{metric.title} by {seen.title} is not estimable: no row to take a rate from in "
            f"{listed(empty)}. That is not the same as fair."
        )
    small = (~np.isnan(rates.rate) & ~rates.valid).any(0)
    few = [seen.names[g] for g in np.flatnonzero(small)]
    if few:
        least = f"fewer than {FEW} rows"
        if seen.noise.any() or seen.slack.any():
            least = f"perhaps fewer than {FEW} rows, or too few for the noise,"
        yield (
            f"{metric.title} by {seen.title}: {least} of the event in {listed(few)}; no interval "
            "is claimed for them, nor an upper limit for the largest gap."
        )


def about_sites(
    metric: Metric, seen: View, gap: Gap, where: Locality, sites: Sequence[str]
) -> Iterator[str]:
    """Simpson's paradox: the view from within the sites is not the view over all of them."""
    first, second = (seen.names[g] for g in gap.pair or ())
    over_all, *whole = (math.nan if x is None else x for x in (gap.gap, gap.low, gap.high))
    if where.total_variation > 1 - 1e-12:
        yield (
            f"{metric.title} by {seen.title}: no site has rows of both {first} and {second}, so no "
            f"site can see the gap of {points(over_all)} points between them."
        )
        return
    pair = f"{metric.title} by {seen.title}, {first} against {second}"
    how = _disagreement(where.within, whole)
    if how:
        yield (
            f"Simpson warning: {pair}: within sites the gap is {span(*where.within)}, over all "
            f"sites it is {span(over_all, *whole)}: {how}."
        )
    unlike = where.beyond < 0
    if whole[0] > 0 and unlike.any():
        names = listed([sites[int(k)] for k in np.flatnonzero(unlike)])
        yield f"{pair}: the gap is the other way round, beyond chance, at {names}."
    if whole[0] <= 0 and where.beyond.any():
        names = listed([sites[int(k)] for k in np.flatnonzero(where.beyond)])
        yield f"{pair}: no gap beyond chance over all sites, but there is one at {names}."


def _disagreement(inside: tuple[float, float, float], whole: Sequence[float]) -> str:
    """How the view from within the sites and the view over all of them part, if they do."""
    value, low, high = inside
    if whole[0] > 0 and value < 0:
        return "the other way round"
    if whole[0] > 0 and low <= 0 and high < whole[0]:
        return "nobody who stays within sites can see it"
    if high < whole[0] or low > whole[1]:
        return "the two views differ by more than their intervals"
    return ""


def about_rows(sums: Sums, pooled: Pool, seen: Sequence[View]) -> Iterator[str]:
    """Rows that are missing from the numbers, and names that may be one."""
    rows = sums.rows()
    about = "about " if any(site.privacy for site in sums.sites.values()) else ""
    if seen[-1].attributes != pooled.question.attributes:
        yield f"{' & '.join(pooled.question.attributes)}: no row has all of them recorded."
    for view in seen:
        lost = float(view.tally.count[..., -1].sum())
        if lost > 0:
            yield (
                f"{view.title}: not recorded for {about}{lost:,.0f} of {rows:,.0f} rows "
                f"({100 * lost / rows:.1f}%); they are in no group."
            )
    for what, missing in (
        ("label", sum(site.label_missing for site in sums.sites.values())),
        ("prediction", sum(site.prediction_missing for site in sums.sites.values())),
    ):
        if missing > 0:
            yield f"{about}{missing:,.0f} row(s) without a {what} were not counted."
    if "" in sums.sites:
        yield "A site has no name: all rows measured without one count as one site."
    yield from _look_alikes(pooled)


def about_privacy(sums: Sums, seen: View) -> Iterator[str]:
    """What was done to the numbers before they left their sites."""
    noisy = [n for n, s in sums.sites.items() if any(p.mechanism != "none" for p in s.privacy)]
    if noisy:
        yield (
            f"Noise for privacy was added to the counts of {listed(noisy)}; the intervals of rates "
            "and gaps are wider for it. TV, DH and the bound are inflated by it, and curves and "
            "group thresholds show it as it is; where it takes a rate out of [0, 1], the rate is "
            "cut off there and contributions no longer add up to the gap."
        )
    withheld = sum(p.suppressed for s in sums.sites.values() for p in s.privacy)
    if withheld:
        yield (
            f"{withheld} small cell(s) were withheld; each is read as the middle of what it may "
            "be, and the intervals reach as far as it could be off."
        )
    if seen.scored and not seen.complete:
        yield (
            "ROC, calibration, thresholds and gaps of scores are left out: sites that withhold "
            "small cells withhold their histograms too."
        )


def about_draws(draws: int, sites: int) -> Iterator[str]:
    if draws and sites < FEW_SITES:
        yield f"{sites} site(s) are few to draw again from: the intervals are rough."


def _look_alikes(pooled: Pool) -> Iterator[str]:
    """Names that a person would take for the same."""
    for i, attribute in enumerate(pooled.question.attributes):
        spelled: dict[str, list[str]] = {}
        for value in sorted({v for group in pooled.groups if (v := group[i]) is not None}):
            spelled.setdefault("".join(value.casefold().split()), []).append(value)
        for names in spelled.values():
            if len(names) > 1:
                yield (
                    f"{attribute}: {' and '.join(map(repr, names))} differ only in case or blanks "
                    "but count as different groups; sites should agree on one spelling."
                )


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def points(value: float | None, unknown: str = "–", sign: str = "") -> str:
    """A fraction as percentage points."""
    return unknown if value is None else f"{100 * value:{sign}z.1f}"  # z: no minus before 0.0


def span(value: float, low: float | None, high: float | None) -> str:
    """A gap in points with its interval."""
    if low is None or high is None or np.isnan(low) or np.isnan(high):
        return f"{points(value)} points"
    return f"{points(value)} points (95% interval {points(low)} to {points(high)})"

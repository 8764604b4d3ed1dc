"""What to expect at other sites, in words, as tables of a report, and as a row of its chart."""

from collections.abc import Iterator

from fedgft.auditing.next_site import ONE_SIDED, TWO_SIDED, Forecast
from fedgft.auditing.summary import Number, Summary
from fedgft.auditing.verdicts import VERDICT_METRICS, name_group
from fedgft.formatting import (
    DASH,
    Table,
    format_interval,
    format_percent,
    format_points,
    join_names,
)
from fedgft.metrics import CATALOG

UNSEEN_NOTE = (
    "The true gap of one more site of the same kind would be in the interval in 95 of 100 such "
    "audits. What it observes also varies by chance, with the number of its rows. A site of "
    "another kind can have any gap."
)
FREE_NOTE = (
    "Observed there: limits without assumptions about how sites vary, except that the next site is "
    "like these, of the gap that a site of a similar size would observe."
)
CHOSEN_NOTE = (
    "The two groups are those that are farthest apart at these sites together. Chosen among "
    "several because of their gap, they tend to be less far apart elsewhere."
)
MIX_NOTE = (
    "Worst mix: the largest overall gap if no site's share of the rows changes by more than {}% of "
    "what it is. The sites' own rates stay as they are; sampling error is not included."
)
OBSERVED = ("observed there, 95%", "largest observed there at most, 95%")
SMALL = 0.0005  # a smaller change is shown as 0.0 points


def answer_elsewhere(summary: Summary) -> str:
    """Return in words what to expect at other sites; "" if that is not estimable."""
    found = summary.get("next_site")
    name = _leading_forecast(summary)
    if found is None or name is None:
        return ""
    parts = [describe_forecast(summary, name)]
    accuracy = found["accuracy"]
    if accuracy["low"] is not None:
        limits = " and ".join(format_percent(accuracy[end]) for end in ("low", "high"))
        parts.append(f"Accuracy there would be expected between {limits}.")
    return " ".join([*parts, describe_mix(summary, name)]).strip()


def _leading_forecast(summary: Summary) -> str | None:
    """Return the first metric whose gap at other sites is estimable."""
    gaps = summary.get("next_site", {}).get("gaps", {})
    return next((n for n in VERDICT_METRICS if n in gaps and gaps[n]["low"] is not None), None)


def describe_forecast(summary: Summary, metric: str) -> str:
    """Return the sentence about the gap at a site that did not take part."""
    found = summary["next_site"]["gaps"][metric]
    first, second = map(name_group, summary["metrics"][metric]["pair"] or ("", ""))
    sign = "; below 0 the other way round" if (found["low"] or 0.0) < 0 else ""
    between = f"between {first} and {second} ({first} minus {second}{sign})"
    limits = " and ".join(format_points(found[end]) for end in ("low", "high"))
    return (
        f"At a site like these {found['sites']:,} that did not take part, the gap in "
        f"{CATALOG[metric].title} {between} would be expected between {limits} points (95%)."
    )


def describe_mix(summary: Summary, metric: str) -> str:
    """Return the sentence about the worst mix of today's sites; "" if there is none."""
    found = summary["next_site"]["worst_mix"][metric]
    if found is None or len(summary["sites"]) < 2:
        return ""
    change = f"{100 * summary['next_site']['largest_change']:.4g}%"
    start = f"If no site's share of the rows changed by more than {change}"
    first, second = map(name_group, found["pair"])
    today = summary["metrics"][metric]["pair"]
    who = "" if found["pair"] == today else f", between {first} and {second}"
    if found["gap"] - found["today"] < SMALL and not who:
        return f"{start}, the overall gap would stay at {format_points(found['gap'])} points."
    raised = [site for site, weight in found["weights"].items() if weight > 1 + 1e-6]
    more = f", with more rows of {join_names(raised)}" if raised else ""
    return (
        f"{start}, the overall gap could be {format_points(found['gap'])} points{who} instead of "
        f"{format_points(found['today'])}{more}."
    )


def list_next_site_tables(summary: Summary) -> Iterator[Table]:
    """Yield the tables of the gaps at other sites and of the worst mix of today's sites.

    There are none for a single site, nor for the summary of an earlier version.
    """
    found = summary.get("next_site")
    if found is None or len(summary["sites"]) < 2:
        return
    yield _forecast_table(summary)
    if any(found["worst_mix"].values()):
        yield _mix_table(summary)


def _forecast_table(summary: Summary) -> Table:
    """Return the table of the gaps at a site that did not take part, in points."""
    gaps = summary["next_site"]["gaps"]
    accuracy = summary["next_site"]["accuracy"]
    rows = []
    reasons: dict[str, list[str]] = {}
    for name, found in gaps.items():
        pair = " minus ".join(map(name_group, summary["metrics"][name]["pair"] or ())) or DASH
        title = CATALOG[name].title
        rows.append((title, pair, f"{found['sites']:,}", *_forecast_cells(found)))
        if found["reason"]:
            reasons.setdefault(found["reason"], []).append(title)
    free = any(found["observed_limit"] is not None for found in gaps.values())
    header = ("metric", "gap", "sites", "next site, 95%", "average of the sites")
    header += ("spread of the sites", *(OBSERVED if free else ()))
    notes = [describe_forecast(summary, name)] if (name := _leading_forecast(summary)) else []
    if accuracy["low"] is not None:
        limits = " to ".join(format_percent(accuracy[end]) for end in ("low", "high"))
        mean = format_percent(accuracy["mean"])
        notes.append(f"Accuracy: {mean} on average of the sites, at the next site {limits} (95%).")
    notes += [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]
    left_out = max((found["left_out"] for found in gaps.values() if not found["reason"]), default=0)
    if left_out:
        notes.append(
            f"Up to {left_out:,} sites are left out of a row: they have fewer than 10 rows of a "
            "group, or withhold counts that matter."
        )
    if len(summary["metrics"]["acc"]["groups"]) > 2:
        notes.append(CHOSEN_NOTE)
    notes += [UNSEEN_NOTE] if _leading_forecast(summary) else []
    notes += [FREE_NOTE] if free else []
    most = max(found["sites"] for found in gaps.values())
    if most < TWO_SIDED:
        needed = f"{TWO_SIDED} sites" + f" ({ONE_SIDED} for a single limit)" * (most < ONE_SIDED)
        notes.append(f"Limits without such assumptions need {needed}, there are {most:,}.")
    cells = tuple(row[: len(header)] for row in rows)
    return Table("At a site that did not take part, points", header, cells, 2, tuple(notes))


def _forecast_cells(found: Forecast) -> tuple[str, ...]:
    """Return the limits at the next site, the mean, the spread, and the limits of observations."""
    if found["low"] is None:
        return ("not estimable", DASH, DASH, DASH, DASH)
    limit = found["observed_limit"]  # of the largest gap between any two groups
    return (
        format_interval(found["low"], found["high"]),
        _value_cell(found["mean"], found["mean_low"], found["mean_high"]),
        _value_cell(found["spread"], found["spread_low"], found["spread_high"]),
        format_interval(found["observed_low"], found["observed_high"]),
        format_points(limit),
    )


def _value_cell(value: Number, low: Number, high: Number) -> str:
    """Return ``12.3 (9.8 to 15.4)``, in points."""
    return f"{format_points(value)} ({format_interval(low, high)})"


def _mix_table(summary: Summary) -> Table:
    """Return the table of the worst mix of today's sites, in points."""
    rows = []
    for name, found in summary["next_site"]["worst_mix"].items():
        if found is None:
            continue
        raised = [site for site, weight in found["weights"].items() if weight > 1 + 1e-6]
        lowered = [site for site, weight in found["weights"].items() if weight < 1 - 1e-6]
        pair = " minus ".join(map(name_group, found["pair"]))
        numbers = (format_points(found["today"]), format_points(found["gap"]))
        rows.append((CATALOG[name].title, pair, *numbers, _list(raised), _list(lowered)))
    header = ("metric", "gap", "today", "worst mix", "more of", "less of")
    change = f"{100 * summary['next_site']['largest_change']:.4g}"
    notes = (MIX_NOTE.format(change),)
    return Table("Worst mix of today's sites, points", header, tuple(rows), 2, notes)


def _list(sites: list[str]) -> str:
    """Return the first names, and how many there are in all if there are more."""
    return join_names(sites) if sites else DASH

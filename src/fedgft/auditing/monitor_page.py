"""The page of a `Monitor`: its sentences, tables and charts."""

import datetime
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fedgft.auditing.tables_and_charts import choose_columns
from fedgft.auditing.verdicts import rate_name
from fedgft.formatting import (
    DASH,
    Figure,
    Report,
    Table,
    Verdict,
    format_count,
    format_gap,
    format_interval,
    format_points,
    group_colors,
)
from fedgft.metrics import CATALOG

if TYPE_CHECKING:
    from fedgft.auditing.gap_history import GapChange, PeriodGap
    from fedgft.auditing.monitoring import Monitor

MAX_ON_TERMINAL = 12  # periods, the last ones
SHORT_CHANGE_COLUMNS = ("metric", "from", "why", "before", "after", "change", "interval")
MAX_PARTS = 12  # sites in the table of a change
SMALL_PART = 0.2  # of a change: a site that adds less is not named in the sentence
LEGEND = (
    "✗ an alarm, a gap above its limit, or a gap that became larger",
    "✓ a gap below its limit, or one that became smaller",
    "· nothing can be claimed: the band contains the limit, or no limit was named",
)
DEFINITIONS = (
    ("Gap", "the difference between the rates of the two groups that differ most, in points."),
    (
        "95% interval",
        "of one period: it contains the true gap of that period in 95 of 100 periods. Looking at "
        "many periods, some intervals miss.",
    ),
    (
        "Band",
        "of the average gap since the last change. With 95% probability it contains that average "
        "after every period, however often one looks. So it may be watched, and an alarm may be "
        "raised as soon as it leaves a limit.",
    ),
    (
        "Change",
        "the data show that the difference between two groups is not what it was. In a history "
        "without changes, the probability that any is found is at most 5%, for all metrics and "
        "periods together. The interval of its size holds at every look, too.",
    ),
    (
        "Own rates, mix",
        "a site moves the gap by the rates of the groups there, or by having a larger or smaller "
        "part of a group's rows. All parts add up to the change exactly (Kitagawa).",
    ),
)
LIMITS = (
    "Periods are taken as independent samples. If the same people are measured in several periods, "
    "the band of the average is too narrow, and changes are found later than they could be.",
    "The band is about the average since the last change, not about each period. A change that is "
    "not found yet is part of the average.",
    "Band and changes rest on the normal approximation. A group with fewer than 10 rows in a "
    "period is left out of that period.",
    "A change is not a cause: the page says which group and site moved, not why.",
    "Each new version of the model begins a new regime, with its own 5% for false alarms.",
)


def write_monitor_lead(found: "Monitor") -> str:
    """Return the headline: the alarms, or how large the gap is."""
    if found.alarms:
        more = len(found.alarms) - 1
        also = f" And {format_count(more, 'more alarm')}, below." if more else ""
        return f"Alarm in {found.alarms[0].period}. {found.alarms[0].text}.{also}"
    last = found.periods[-1]
    name = found.metrics[0]
    return f"No alarm in {last.label}. {_describe_state(name, last.gaps[name])}."


def _describe_state(name: str, gap: "PeriodGap") -> str:
    """Return the gap of a period and its average, in a sentence without its full stop."""
    title = CATALOG[name].title.capitalize()
    if gap.gap is None:
        return f"{title}: the gap of the last period is not estimable"
    pair = f" between {gap.pair[0]} and {gap.pair[1]}" if gap.pair else ""
    text = f"{title}: {format_gap(gap.gap, gap.low, gap.high)}{pair} in the last period"
    if gap.average is None:
        return text
    band = format_interval(gap.band_low, gap.band_high)
    return f"{text}; on average {format_points(gap.average)} since {gap.since} (band {band})"


def list_monitor_verdicts(found: "Monitor") -> list[Verdict]:
    """Return the alarms after the first, the state of each metric, and its changes."""
    out = [Verdict(False, f"Alarm: {alarm.text}.", "exceeds") for alarm in found.alarms[1:]]
    last = found.periods[-1]
    for name in found.metrics:
        gap = last.gaps[name]
        limit = found.limits.get(name)
        passes = None
        text = _describe_state(name, gap)
        if limit is not None and gap.band_low is not None:
            passes = False if gap.band_low > limit else None
            if gap.band_high is not None and gap.band_high <= limit:
                passes = True
            where = {False: "above", True: "below", None: "around"}[passes]
            text += f": the band is {where} the limit of {format_points(limit)}"
        out.append(Verdict(passes, f"{text}."))
    out += [_judge_change(change) for change in found.changes]
    if not found.changes and len(found.periods) > 1:
        out.append(Verdict(None, "No change was found."))
    return out


def _judge_change(change: "GapChange") -> Verdict:
    """Return a change in sentences: how large, when it was found, and what moved it."""
    first, second = change.pair
    when = f"From {change.period}" if change.kind == "found" else f"New model in {change.period}"
    size = (
        f"{format_points(change.before)} → {format_points(change.after)} points, a change of "
        f"{format_points(change.change, sign='+')} "
        f"({format_interval(change.low, change.high, sign='+')})"
    )
    text = f"{when}: {CATALOG[change.metric].title}, {first} minus {second}: {size}"
    if change.direction == "not clear":
        return Verdict(None, f"{text}: chance could explain it.")
    found_in = "" if change.found_in == change.period else f" It was found in {change.found_in}."
    passes = change.direction == "smaller"
    return Verdict(
        passes, f"{text}: the gap is {change.direction}.{found_in} {_describe_parts(change)}"
    )


def _describe_parts(change: "GapChange") -> str:
    """Return which group and which sites moved the gap."""
    (first, one), (second, other) = change.groups.items()
    rate = rate_name(change.metric)
    groups = (
        f"The {rate} of {first} moved it by {format_points(one, sign='+')}, that of {second} by "
        f"{format_points(other, sign='+')}."
    )
    large = [
        f"{name or 'no name'} {format_points(part.total, sign='+')}"
        for name, part in _rank_sites(change)
        if abs(part.total) >= SMALL_PART * abs(change.change)
    ]
    if len(change.sites) < 2 or not large:
        return groups
    return f"{groups} Sites: {', '.join(large[:MAX_PARTS])}."


def _rank_sites(change: "GapChange") -> list[tuple[str, Any]]:
    """Return the sites and what they added, the largest first."""
    return sorted(change.sites.items(), key=lambda item: -abs(item[1].total))


# Tables


def list_monitor_tables(found: "Monitor", *, short: bool = False) -> Iterator[Table]:
    """Yield the tables of the report, or a `short` selection for a terminal."""
    for name in found.metrics:
        yield _gap_table(found, name, MAX_ON_TERMINAL if short else len(found.periods))
    if found.changes:
        table = _change_table(found)
        yield choose_columns(table, SHORT_CHANGE_COLUMNS) if short else table
    for change in found.changes:
        if change.direction != "not clear" or not short:
            yield _part_table(change)
    if not short:
        yield from (_rate_table(found, name) for name in found.metrics)
        yield _site_table(found)


def _gap_table(found: "Monitor", name: str, most: int) -> Table:
    """Return the table of one metric over time, in points."""
    header = ("period", "model", "rows", "gap", "95% interval", "since", "average", "band")
    rows = []
    for period in found.periods[-most:]:
        gap = period.gaps[name]
        own = (format_points(gap.gap, unknown="not estimable"), format_interval(gap.low, gap.high))
        band = (format_points(gap.average), format_interval(gap.band_low, gap.band_high))
        count = f"{period.rows:,.0f}"
        rows.append((period.label, period.version or DASH, count, *own, gap.since, *band))
    title = f"{CATALOG[name].title.capitalize()} over time by {found.groups}, points"
    notes = []
    if len(found.periods) > most:
        notes.append(f"The last {most} of {len(found.periods)} periods.")
    return Table(title, header, tuple(rows), 2, tuple(notes))


def _change_table(found: "Monitor") -> Table:
    """Return the table of all changes, in points."""
    header = ("metric", "from", "why", "groups", "between", "found in", "before", "after")
    header += ("change", "interval")
    rows = tuple(
        (
            CATALOG[change.metric].title,
            change.period,
            "new model" if change.kind == "model version" else "found",
            " minus ".join(change.pair),
            change.period
            if change.earliest == change.latest
            else f"{change.earliest} and {change.latest}",
            change.found_in or DASH,
            format_points(change.before),
            format_points(change.after),
            format_points(change.change, sign="+"),
            format_interval(change.low, change.high, sign="+"),
        )
        for change in found.changes
    )
    notes = (
        "Between: the first period after the change, with 95% of the evidence. The interval holds "
        "at every look, and for all possible changes together.",
    )
    return Table("Changes, points", header, rows, 6, notes)


def _part_table(change: "GapChange") -> Table:
    """Return the table of what moved the difference between two groups, in points."""
    ranked = _rank_sites(change)
    rows = [
        (name or "(no name)", *(format_points(x, sign="+") for x in (p.own, p.mix, p.total)))
        for name, p in ranked[:MAX_PARTS]
    ]
    rest = ranked[MAX_PARTS:]
    if rest:
        sums = (sum(getattr(p, key) for _, p in rest) for key in ("own", "mix", "total"))
        rows.append((f"{len(rest):,} other sites", *(format_points(x, sign="+") for x in sums)))
    total = format_points(change.change, sign="+")
    rows.append(("all sites", *_sum_parts(change), total))
    (first, one), (second, other) = change.groups.items()
    note = (
        f"By group: {first} {format_points(one, sign='+')}, {second} "
        f"{format_points(other, sign='+')}. Numbers are rounded; sums can be off by 0.1."
    )
    title = f"What moved {CATALOG[change.metric].title} from {change.period} on, points"
    return Table(title, ("site", "own rates", "mix", "together"), tuple(rows), 1, (note,))


def _sum_parts(change: "GapChange") -> tuple[str, str]:
    """Return what the rates, and the mix, of all sites added."""
    parts = change.sites.values()
    own = sum(part.own for part in parts)
    return format_points(own, sign="+"), format_points(sum(p.mix for p in parts), sign="+")


def _rate_table(found: "Monitor", name: str) -> Table:
    """Return the table of the rates of the groups over time, in percent."""
    groups = list(dict.fromkeys(g for period in found.periods for g in period.gaps[name].rates))
    rows = tuple(
        (
            period.label,
            *(format_points(period.gaps[name].rates.get(g), unknown=DASH) for g in groups),
        )
        for period in found.periods
    )
    title = f"{rate_name(name).capitalize()} over time by {found.groups}, percent"
    return Table(title, ("period", *groups), rows, 1)


def _site_table(found: "Monitor") -> Table:
    """Return the table of the sites of each period."""
    rows = tuple(
        (
            period.label,
            f"{len(period.sites):,}",
            ", ".join(period.appeared) or DASH,
            ", ".join(period.left) or DASH,
        )
        for period in found.periods
    )
    return Table("Sites over time", ("period", "sites", "new", "missing"), rows, 1)


# Charts


def draw_monitor(found: "Monitor") -> list[Figure]:
    """Return the figures: the gap over time, and the rates of the groups."""
    return [
        _make_figure(
            "gap-over-time",
            "The gap over time",
            "Dots: the gap of each period, with its 95% interval. Band: the average since the last "
            "change, valid at every look, as it was known after each period. Upright lines: "
            "changes that were found (solid) and new models (dashed). Level line: the limit.",
            _draw_gaps(found),
        ),
        _make_figure(
            "rates-over-time",
            "Every group over time",
            "The rate of every group over all sites, by period.",
            _draw_rates(found),
        ),
    ]


def _make_figure(kind: str, title: str, caption: str, spec: dict[str, Any]) -> Figure:
    return Figure(kind, title, caption, {"description": f"{title}. {caption}"} | spec)


def _fill_menu(kind: str, found: "Monitor", titles: Sequence[str]) -> dict[str, Any]:
    """Return a chart of templates/charts.json with a menu of the metrics."""
    charts = json.loads(files("fedgft").joinpath("templates/charts.json").read_text("utf-8"))
    spec = charts[kind] | {"config": charts["config"]}
    menu, title, *_ = spec["params"]
    menu["value"] = found.metrics[0]
    menu["bind"] |= {"options": list(found.metrics), "labels": list(titles)}
    by_metric = dict(zip(found.metrics, titles, strict=True))
    title["expr"] = f"{json.dumps(by_metric)}[metric]"
    return spec


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _draw_gaps(found: "Monitor") -> dict[str, Any]:
    """Return the chart of the gap over time, in points."""
    titles = [CATALOG[name].title.capitalize() for name in found.metrics]
    spec = _fill_menu("gap-over-time", found, titles)
    dates = {period.label: period.date.isoformat() for period in found.periods}
    rows = []
    for period in found.periods:
        for name, gap in period.gaps.items():
            row: dict[str, Any] = {"metric": name, "period": period.label}
            row["date"] = dates[period.label]
            row |= {"version": period.version, "since": gap.since, "n": period.rows}
            for key in ("gap", "low", "high", "average", "band_low", "band_high"):
                row[key] = _percent(getattr(gap, key))
            rows.append(row)
    marks = [
        {
            "metric": change.metric,
            "date": _find_middle(found, change),
            "kind": change.kind,
            "text": _mark_text(found, change),
        }
        for change in found.changes
    ]
    limits = [{"metric": name, "limit": 100 * limit} for name, limit in found.limits.items()]
    spec["datasets"] = {"gaps": rows, "changes": marks, "limits": limits}
    return spec


def _find_middle(found: "Monitor", change: "GapChange") -> str:
    """Return the time in the middle between the last period before a change and the first after."""
    at = next(t for t, period in enumerate(found.periods) if period.label == change.period)
    before, after = found.periods[at - 1].date, found.periods[at].date
    start = datetime.datetime.combine(before, datetime.time(), datetime.UTC)
    return (start + (after - before) / 2).isoformat()


def _mark_text(found: "Monitor", change: "GapChange") -> str:
    """Return the label of an upright line."""
    if change.kind == "found":
        return format_points(change.change, sign="+")
    version = next(p.version for p in found.periods if p.label == change.period)
    return f"model {version}"


def _draw_rates(found: "Monitor") -> dict[str, Any]:
    """Return the chart of the groups' rates over time, in percent."""
    titles = [rate_name(name).capitalize() for name in found.metrics]
    spec = _fill_menu("rates-over-time", found, titles)
    rows = [
        {
            "metric": name,
            "period": period.label,
            "date": period.date.isoformat(),
            "group": group,
            "rate": _percent(rate),
            "n": gap.rows[group],
        }
        for period in found.periods
        for name, gap in period.gaps.items()
        for group, rate in gap.rates.items()
    ]
    colors = group_colors(dict.fromkeys(row["group"] for row in rows))
    spec["data"] = {"values": rows}
    for layer in spec["layer"]:
        layer["encoding"]["color"]["scale"] = {
            "domain": list(colors),
            "range": list(colors.values()),
        }
    return spec


# The report


def make_monitor_report(found: "Monitor") -> Report:
    """Return the report of a monitor, without figures."""
    last = found.periods[-1]
    sites = list(dict.fromkeys(site for period in found.periods for site in period.sites))
    versions = list(dict.fromkeys(period.version for period in found.periods if period.version))
    limits = [f"{CATALOG[n].title} {format_points(x)} points" for n, x in found.limits.items()]
    highest = {name: last.gaps[name].band_high for name in found.limits}
    below = highest and all(
        high is not None and high <= found.limits[name] for name, high in highest.items()
    )
    span = " to ".join(dict.fromkeys((found.periods[0].label, last.label)))
    return Report(
        mark="<!-- fedgft monitor -->",
        title="Fairness over time",
        lead=write_monitor_lead(found),
        scope=f"{format_count(len(found.periods), 'period')}, {span}, of "
        f"{format_count(len(sites), 'site')}, groups by {found.groups}.",
        byline=f"{span} · {format_count(len(found.periods), 'period')}",
        state="exceeds" if found.alarms else "within" if below else "",
        facts_title="About this history",
        limits_title="What this page can and cannot tell you",
        without_figures="The tables below hold all of their numbers.",
        facts=[
            ("Periods", f"{len(found.periods):,}: {span}"),
            ("Rows", f"{sum(period.rows for period in found.periods):,.0f}"),
            ("Sites", f"{len(sites):,}: {', '.join(s or '(no name)' for s in sites[:12])}"),
            ("Groups", f"by {found.groups}"),
            ("Model versions", ", ".join(versions) or "not stated"),
            ("Limits", ", ".join(limits) or "none named"),
        ],
        verdicts=list_monitor_verdicts(found),
        legend=LEGEND,
        warnings=found.warnings,
        tables=list(list_monitor_tables(found)),
        definitions=DEFINITIONS,
        limits=LIMITS,
        foot="Band: asymptotic confidence sequence (Waudby-Smith and others 2024); changes: "
        "mixture likelihood ratios and Ville's inequality; 95% throughout.",
    )

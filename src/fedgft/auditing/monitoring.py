"""`monitor` follows the gaps of a model over time, from the dated files of its sites: a `Monitor`.

The gap of each period has its own 95% interval. Beside it is the anytime-valid band of the average
gap since the last change, which may be looked at after every period, and the changes that were
found: `fedgft.auditing.change_points` explains both. `fedgft.auditing.gap_changes` explains which
group and which site moved the gap.
"""

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedgft.auditing.change_points import LEVEL
from fedgft.auditing.dated_files import (
    FolderReader,
    PeriodKind,
    PeriodSums,
    check_since,
    group_periods,
)
from fedgft.auditing.gap_history import GapChange, MetricHistory, PeriodGap, trace_metric
from fedgft.auditing.monitor_frames import make_monitor_frame
from fedgft.auditing.monitor_page import (
    draw_monitor,
    list_monitor_tables,
    list_monitor_verdicts,
    make_monitor_report,
    write_monitor_lead,
)
from fedgft.auditing.notebook import describe, render_in_notebook
from fedgft.auditing.prometheus import list_gauges, write_gauges
from fedgft.auditing.rates import Pool, View, list_views, pool_sites
from fedgft.auditing.report_files import save_report
from fedgft.auditing.summary import as_count, to_plain
from fedgft.auditing.verdicts import check_gaps
from fedgft.errors import FedgftError
from fedgft.formatting import Report, Table, Verdict, format_interval, format_points, join_names
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.catalog import resolve_name
from fedgft.site_sums import COUNT, ROWS, SiteSums
from fedgft.validation import check_choice, check_name_list, format_value

if TYPE_CHECKING:
    Source = str | Path | Iterable[SiteSums]
else:  # `monitor` checks what it gets
    Source = Any

MONITOR_FORMAT = "fedgft-monitor-1"
DEFAULT_METRICS = ("sp", "eop")
PERIODS = ("date", "week", "month", "quarter", "year")
AlarmKind = Literal["limit", "change", "model version", "not estimable"]


@dataclass(frozen=True)
class Period:
    """One period.

    Parameters
    ----------
    label, date
        Its name, and the last date of its files.
    version
        The version of the model; "" if no file has stated one so far.
    new_version
        Whether the version is another one than that of the period before.
    rows
        The rows of all sites.
    sites
        The rows of each site.
    appeared, left
        Sites that the period before did not have, and those that only that one had.
    gaps
        The gap of each metric by its short name.
    """

    label: str
    date: datetime.date
    version: str
    new_version: bool
    rows: float
    sites: dict[str, float]
    appeared: tuple[str, ...]
    left: tuple[str, ...]
    gaps: dict[str, PeriodGap]


@dataclass(frozen=True)
class Alarm:
    """A reason to look.

    Parameters
    ----------
    metric
        The short name of the metric.
    kind
        ``"limit"``: the whole band lies above the limit. ``"change"``: the gap became larger.
        ``"model version"``: it became larger with a new version. ``"not estimable"``: there is a
        limit, and no band.
    period
        The period after which the alarm was raised.
    text
        The alarm in a sentence.
    """

    metric: str
    kind: AlarmKind
    period: str
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class Monitor:
    """The result of `monitor`: periods, changes and alarms as objects, frames and reports.

    Parameters
    ----------
    groups
        The column or columns whose groups are compared, such as ``"race & sex"``.
    metrics
        The short names of the metrics.
    periods
        The periods in order, each with its gaps.
    changes
        The changes of all metrics: those that were found, and those with a new version.
    alarms
        The alarms of the last period, or since the date that `monitor` got.
    limits
        The limits of gaps by the short name of the metric.
    warnings
        Sentences that a reader should see before the numbers.
    """

    groups: str
    metrics: tuple[str, ...]
    periods: list[Period]
    changes: list[GapChange]
    alarms: list[Alarm]
    limits: dict[str, float]
    warnings: list[str]

    def __repr__(self) -> str:
        return describe(self.lead(), self.verdict())

    def _repr_html_(self) -> str:
        return render_in_notebook(replace(self.report(), tables=self.tables()))

    def lead(self) -> str:
        """Return the headline: the alarms, or how large the gap is."""
        return write_monitor_lead(self)

    def verdict(self) -> list[Verdict]:
        """Return the alarms, the state of each metric, and its changes, in sentences."""
        return list_monitor_verdicts(self)

    def tables(self) -> list[Table]:
        """Return the tables for a terminal; the report has more tables."""
        return list(list_monitor_tables(self, short=True))

    def report(self, *, figures: bool = False) -> Report:
        """Return the whole report, with figures if `figures` is True, which takes longer."""
        report = make_monitor_report(self)
        return replace(report, figures=draw_monitor(self)) if figures else report

    def to_dict(self) -> dict[str, Any]:
        """All results as values that JSON can hold."""
        return to_plain(
            {
                "format": MONITOR_FORMAT,
                "groups": self.groups,
                "metrics": self.metrics,
                "limits": self.limits,
                "alarms": [asdict(alarm) for alarm in self.alarms],
                "changes": [_change_to_dict(change) for change in self.changes],
                "periods": [
                    asdict(period) | {"date": period.date.isoformat()} for period in self.periods
                ],
                "warnings": self.warnings,
            }
        )

    def to_json(self) -> str:
        """The text of monitor.json."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """The text of monitor.md."""
        return self.report().to_markdown()

    def to_html(self) -> str:
        """The text of monitor.html: one page that needs no network and no other file."""
        return self.report(figures=True).to_html()

    def to_prometheus(self) -> str:
        """The text of metrics.prom, for the textfile collector of Prometheus' node exporter."""
        return write_gauges(list_gauges(self))

    def to_frame(self, table: str = "gaps", *, library: str = "polars") -> Any:
        """Return a tidy frame.

        Parameters
        ----------
        table
            ``"gaps"``: one row per metric and period. ``"rates"``: one row per metric, period and
            group. ``"changes"``: one row per change. ``"sites"``: one row per period and site.
        library
            ``"polars"`` or ``"pandas"``.
        """
        return make_monitor_frame(self, table, library)

    def save(self, folder: str | Path) -> list[Path]:
        """Write monitor.html, monitor.md, monitor.json and metrics.prom; return their paths.

        The files are written together or not at all. Those of an earlier run are replaced.

        Parameters
        ----------
        folder
            It is created if needed.
        """
        return save_report(self, folder, "monitor")


def monitor(
    source: Source,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    by: str | None = None,
    period: PeriodKind = "date",
    fail_above: Mapping[str, float] | None = None,
    since: str | datetime.date | None = None,
    ignore_case: bool = False,
    on_file: Callable[[int, int], None] | None = None,
) -> Monitor:
    """Follow the gaps of a model over time, from the dated sums of its sites.

    Parameters
    ----------
    source
        A folder with the files of the sites, in any folders inside it; or the sums of one site and
        date each, from `measure(..., date="2026-01-31")`.
    metrics
        The short names of the metrics to follow. In a history without changes, the probability
        that any change is found for any of them is at most 5%, however often one looks.
    by
        The column, or the combination of columns as in ``"race & sex"``, whose groups are
        compared. None: all columns together.
    period
        ``"date"``: files of the same date are one period. ``"week"``, ``"month"``, ``"quarter"``
        or ``"year"``: files of the same week, and so on.
    fail_above
        The largest gaps to accept, such as ``{"sp": 0.05}``. The alarm is raised when the whole
        band lies above the limit. None: no limits.
    since
        Alarms that were raised on this date or later count. None: those of the last period.
    ignore_case
        Merge names of groups and classes that differ only in case or spaces.
    on_file
        Called after each file with the number of files read, and of all files. None: nothing.

    Returns
    -------
    Monitor
        The periods, changes and alarms, as objects, frames and reports.

    Examples
    --------
    >>> import fedgft
    >>> from fedgft.auditing import monitor
    >>> rows = ([1, 0] * 40, [1, 0, 1, 1] * 20)
    >>> sites = [
    ...     fedgft.measure(*rows, sensitive_features=list("fm") * 40, site="north", date=date)
    ...     for date in ("2026-01-31", "2026-02-28")
    ... ]
    >>> found = monitor(sites)
    >>> [each.label for each in found.periods], found.periods[-1].gaps["sp"].gap
    (['2026-01-31', '2026-02-28'], 0.5)
    """
    names = _check_metrics(metrics)
    check_choice("period", period, PERIODS)
    if fail_above is not None and not isinstance(fail_above, Mapping):
        text = f"must be like {{'sp': 0.05}}, not {format_value(fail_above)}"
        raise FedgftError(text, field="fail_above")
    limits = check_gaps(fail_above or {}, field="fail_above")
    names += tuple(name for name in limits if name not in names)
    first_day = check_since(since)
    reader = FolderReader(datetime.date.today())
    if isinstance(source, str | Path):
        files = reader.read(source, on_file)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        files = reader.take(source)
    else:
        text = f"must be a folder, or a list of the sums of sites, not {format_value(source)}"
        raise FedgftError(text, field="source")
    if not files:
        raise FedgftError("`source` is empty: give the sums of at least one site", kind="missing")
    parts, notes = group_periods(files, period, ignore_case=ignore_case)
    return _follow(parts, names, by, limits, first_day, [*reader.notes(), *notes])


def _check_metrics(metrics: Any) -> tuple[str, ...]:
    """Return the short names of metrics, each once."""
    names = check_name_list("metrics", metrics, least=1)
    found = tuple(dict.fromkeys(map(resolve_name, names)))
    for name in found:
        check_choice("metrics", name, tuple(CATALOG))
    return found


def _follow(
    parts: Sequence[PeriodSums],
    metrics: tuple[str, ...],
    by: str | None,
    limits: dict[str, float],
    since: datetime.date | None,
    notes: list[str],
) -> Monitor:
    """Compute everything from the sums of each period."""
    pools, all_views = zip(*map(_pool_period, parts), strict=True)
    title, views = _choose_views(all_views, by)
    sites = [pool.sites for pool in pools]
    labels = [part.label for part in parts]
    versions = [part.version for part in parts]
    new = [t for t in range(1, len(parts)) if versions[t - 1] not in ("", versions[t])]
    level = LEVEL / len(metrics)
    histories = {
        name: trace_metric(get_metric(name), views, sites, labels, new, level=level)
        for name in metrics
    }
    rows = [
        pool.tables[..., ROWS if pool.spec.counts_rows else COUNT].sum((1, 2, 3)) for pool in pools
    ]
    periods = [
        Period(
            part.label,
            part.date,
            part.version,
            t in new,
            as_count(rows[t].sum()),
            {name: as_count(n) for name, n in zip(sites[t], rows[t], strict=True)},
            tuple(s for s in sites[t] if t and s not in sites[t - 1]),
            tuple(s for s in sites[t - 1] if t and s not in sites[t]),
            {name: history.gaps[t] for name, history in histories.items()},
        )
        for t, part in enumerate(parts)
    ]
    changes = [change for history in histories.values() for change in history.changes]
    alarms = list(_list_alarms(periods, histories, limits, since))
    warnings = [*_list_warnings(periods, title), *notes]
    return Monitor(title, metrics, periods, changes, alarms, limits, warnings)


def _pool_period(part: PeriodSums) -> tuple[Pool, tuple[View, ...]]:
    """Return the sums of a period as arrays, and its views; errors name the period."""
    try:
        pool = pool_sites(part.sums)
        return pool, list_views(pool)
    except FedgftError as error:
        raise FedgftError(f"{part.label}: {error}", kind=error.kind) from None


def _choose_views(
    views: Sequence[tuple[View, ...]], by: str | None
) -> tuple[str, list[View | None]]:
    """Return the title of the groups to compare, and the view of each period; None: it has none."""
    titles = list(dict.fromkeys(view.title for each in views for view in each))
    title = max(titles, key=lambda text: text.count(" & ")) if by is None else by
    check_choice("by", title, titles)
    return title, [next((v for v in each if v.title == title), None) for each in views]


def _list_alarms(
    periods: Sequence[Period],
    histories: Mapping[str, MetricHistory],
    limits: Mapping[str, float],
    since: datetime.date | None,
) -> Iterator[Alarm]:
    """Yield the alarms that were raised in the last period, or on the date `since` or later."""
    start = periods[-1].date if since is None else since
    recent = {period.label for period in periods if period.date >= start}
    for name, history in histories.items():
        limit = limits.get(name)
        gap = history.gaps[-1]
        if limit is not None and periods[-1].label in recent:
            title = CATALOG[name].title.capitalize()
            if gap.band_low is None:
                text = f"{title}: there is a limit, and no band: a group has too few rows"
                yield Alarm(name, "not estimable", periods[-1].label, text)
            elif gap.band_low > limit:
                text = f"{title}: the average gap since {gap.since} is at least "
                text += (
                    f"{100 * gap.band_low:.1f} points, above the limit of {100 * limit:g} points"
                )
                yield Alarm(name, "limit", periods[-1].label, text)
        for change in history.changes:
            if change.direction == "larger" and change.found_in in recent:
                kind: AlarmKind = "change" if change.kind == "found" else "model version"
                yield Alarm(name, kind, change.found_in or "", _describe_growth(change))


def _describe_growth(change: GapChange) -> str:
    """Return what a change that raises an alarm is, in a sentence."""
    first, second = change.pair
    title = CATALOG[change.metric].title.capitalize()
    when = "from" if change.kind == "found" else "with the new model, from"
    before, after = (format_points(x) for x in (change.before, change.after))
    interval = format_interval(change.low, change.high, sign="+")
    return (
        f"{title}: {when} {change.period} on, the gap between {first} and {second} is larger: "
        f"{before} before, {after} points after (change {interval})"
    )


def _list_warnings(periods: Sequence[Period], title: str) -> Iterator[str]:
    """Yield what a reader should know before the numbers."""
    if len(periods) == 1:
        yield "There is one period: changes can be found from the second on."
    for period in periods:
        if period.appeared:
            yield f"{period.label}: {join_names(period.appeared)} appeared."
        if period.left:
            verb = "is" if len(period.left) == 1 else "are"
            yield f"{period.label}: {join_names(period.left)} {verb} missing."
    lacking = [p.label for p in periods if all(gap.gap is None for gap in p.gaps.values())]
    if lacking:
        yield f"No gap by {title} is estimable in {join_names(lacking)}."
    if not any(period.version for period in periods):
        yield "The files state no version of the model."


def _change_to_dict(change: GapChange) -> dict[str, Any]:
    """Return a change as a dictionary, with what each site added."""
    sites = {name: part._asdict() | {"total": part.total} for name, part in change.sites.items()}
    return asdict(replace(change, sites={})) | {"sites": sites}

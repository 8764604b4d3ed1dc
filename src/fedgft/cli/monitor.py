"""`fedgft monitor`: the gaps of a model over time, from the dated files of its sites."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fedgft.cli.audit import EXIT_EXCEEDED, parse_limits, publish_report
from fedgft.cli.console import bar, say
from fedgft.cli.options import Flag, Place, Some, require, require_values, split_columns
from fedgft.errors import FedgftError, LazyModule

# Loaded when the command runs, so that help is printed at once.
monitoring = LazyModule("fedgft.auditing.monitoring")
report_files = LazyModule("fedgft.auditing.report_files")


def monitor(
    folder: Place | None = None,
    *,
    metrics: Annotated[list[str] | None, Some] = None,
    by: str | None = None,
    period: Literal["date", "week", "month", "quarter", "year"] = "date",
    fail_above: Annotated[list[str] | None, Some] = None,
    since: str | None = None,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
    wide: Annotated[bool, Flag] = False,
    ignore_case: Annotated[bool, Flag] = False,
) -> None:
    """Follow gaps over time from dated files of sites; an alarm ends with exit code 3.

    Every period has its gap with a 95% interval, and a band of the average gap since the last
    change, which holds however often you look. Run it after every period, for example by cron.

    Parameters
    ----------
    folder
        Folder with the files that `fedgft measure --date` wrote, in any folders inside. Required.
    metrics
        Metrics to follow [default: sp eop].
    by
        Column whose groups are compared, or several, such as "race & sex" [default: all together].
    period
        Files of the same date, week, month, quarter or year are one period.
    fail_above
        Raise an alarm if the whole band of a gap lies above a limit, such as sp=0.05.
    since
        Count alarms that were raised on this date or later [default: those of the last period].
    out
        Folder for monitor.html, monitor.md, monitor.json and metrics.prom (for Prometheus). Those
        of an earlier run are replaced.
    json
        Print only the results, as JSON.
    wide
        Print all tables and periods [default: those that matter most].
    ignore_case
        Merge names that differ only in case or spaces, such as "Man" and "man".

    Examples
    --------
    fedgft monitor sums/ --out page
    fedgft monitor sums/ --fail-above sp=0.05 --metrics sp eop fpr
    fedgft monitor sums/ --period month --since 2026-01-01
    """
    require_values(metrics=metrics, fail_above=fail_above)
    if folder is None:
        text = "`folder` is missing: the folder with the dated files of the sites"
        raise FedgftError(text, kind="missing")
    names = split_columns(metrics or ())
    require(names or metrics is None, "`metrics` needs a value", kind="missing")
    limits = parse_limits("fail_above", fail_above or ())
    if out is not None:
        report_files.check_report_folder(Path(out), "monitor", field="out")
    with bar() as progress:
        found = monitoring.monitor(
            folder,
            metrics=names or monitoring.DEFAULT_METRICS,
            by=by,
            period=period,
            fail_above=limits,
            since=since,
            ignore_case=ignore_case,
            on_file=lambda done, total: progress.fetch("reading files", done, total),
        )
    try:
        publish_report(found, out, "monitor", json=json, wide=wide, overwrite=True)
    finally:  # also where the reader of the output has closed the pipe
        for alarm in found.alarms:
            say(f"alarm in {alarm.period}: {alarm.text}")
        if found.alarms:
            raise SystemExit(EXIT_EXCEEDED)

"""`fedgft audit`: from the files of all sites to one account of fairness."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedgft.audit import Audit
from fedgft.audit import audit as audit_sums
from fedgft.audit.comparison import compare as compare_summaries
from fedgft.audit.site_file import find_site_files, gather, is_report
from fedgft.audit.summary import Summary, read_summary, views_of
from fedgft.cli.console import Bar, bar, say, wrote
from fedgft.cli.parameters import Flag, Place, Some, Whole, require_values
from fedgft.cli.report_files import Kind, check_report_folder, print_report, write_report
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.store import expand_user, open_folder

EXIT_EXCEEDED = 3  # the exit code of a gap above a limit
MIN_DRAWS = 100


def audit(
    *files: Place,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
    reference_groups: Annotated[list[str] | None, Some] = None,
    fail_above: Annotated[list[str] | None, Some] = None,
    adjust: Annotated[list[str] | None, Some] = None,
    bootstrap: Whole = 0,
    compare: Annotated[tuple[Place, Place] | None, Parameter(negative="")] = None,
) -> None:
    """Put sites' sums together: global and local gaps with intervals, who drives them, a report.

    For example: fedgft audit site-*.json --out report --fail-above sp=0.05

    Parameters
    ----------
    files
        Files that `fedgft measure` wrote, or folders of them.
    out
        A folder for report.html, report.md and audit.json.
    json
        Print the audit as JSON, and nothing else, to stdout.
    reference_groups
        Compare every group with these: White, or race=White sex=Male.
    fail_above
        Exit with code 3 if a gap is above a limit beyond chance: sp=0.05.
    adjust
        Look for thresholds by group that bring a gap down: sp=0.02.
    bootstrap
        Intervals from so many draws of sites instead of rows, such as 2000.
    compare
        Two folders, old and new, of site files or of reports: the change of every gap.
    """
    require_values(fail_above=fail_above, adjust=adjust, reference_groups=reference_groups)
    limits = _parse_limits("fail_above", fail_above or ())
    targets = _parse_limits("adjust", adjust or ())
    if bootstrap != 0 and bootstrap < MIN_DRAWS:
        raise FedgftError(f"`bootstrap` {bootstrap}: needs at least {MIN_DRAWS} draws")
    folder = None if out is None else expand_user(out)
    if compare is not None:
        if files or limits or targets or bootstrap or reference_groups:
            raise FedgftError(
                "`compare` takes two folders, --out and --json, and nothing else", kind="conflict"
            )
        _compare(compare, folder, json=json)
        return
    if folder is not None:
        check_report_folder(folder, "audit")
    with bar() as progress:
        sums = _read_sums(files, progress)
    report = audit_sums(
        sums, reference_groups=reference_groups or (), bootstrap=bootstrap, adjust_to=targets
    )
    exceeded = _find_exceeded(report, limits)
    try:
        _publish(report, folder, "audit", json=json)
    finally:  # also where the reader of the output has closed the pipe
        for text in exceeded:
            say(f"`fail_above`: {text}")
        if exceeded:
            raise SystemExit(EXIT_EXCEEDED)


def _publish(report: Any, folder: Path | None, kind: Kind, *, json: bool) -> None:
    """Write an audit or a comparison to a folder, if one is named, and print it."""
    if folder is not None:
        with open_folder(folder):
            wrote(write_report(folder, report, kind))
    if not json:
        print_report(report)
        return
    try:
        sys.stdout.write(report.to_json())
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_sums(files: Sequence[Path], progress: Bar) -> Any:
    paths = find_site_files(files)
    return gather(paths, lambda done: progress.fetch("reading sites", done, len(paths)))


def _parse_limits(field: str, items: Sequence[str]) -> dict[str, float]:
    """Read METRIC=GAP, as in sp=0.05; return the gaps by metric."""
    limits = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip()
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if not equals or name not in CATALOG:
            known = ", ".join(CATALOG)
            raise FedgftError(f"`{field}` {item}: write METRIC=GAP, such as sp=0.05, of {known}")
        if not 0 <= limit < 1:
            raise FedgftError(f"`{field}` {item}: the gap must be a number, 0 or more and below 1")
        if name in limits:
            raise FedgftError(f"`{field}` {item}: {name} is given twice")
        limits[name] = limit
    return limits


def _find_exceeded(report: Audit, limits: dict[str, float]) -> list[str]:
    """Return a sentence for every gap whose interval lies above its limit.

    Every view counts: a gap between single attributes can be surer than one between
    intersections. A gap that is not estimable, or too few rows for an interval, does not pass.
    """
    summary = report.to_dict()
    exceeded = []
    for name, limit in limits.items():
        for title, view in views_of(summary).items():
            found = view["metrics"][name]
            numbers = found if found["gap"] is not None else found["among_estimable"] or {}
            low = numbers.get("low")
            if low is not None and low > limit:
                exceeded.append(f"{name} by {title} is at least {low:.3g} (95%), above {limit:g}")
            elif low is None or found["gap"] is None:
                exceeded.append(f"{name} by {title} cannot be judged (not estimable): no pass")
    return exceeded


def _compare(folders: tuple[Path, Path], folder: Path | None, *, json: bool) -> None:
    if folder is not None:
        check_report_folder(folder, "comparison")
    with bar() as progress:
        old, new = (_read_summary(expand_user(each), progress) for each in folders)
    _publish(compare_summaries(old, new), folder, "comparison", json=json)


def _read_summary(folder: Path, progress: Bar) -> Summary:
    """Return the summary in a report, or of the audit of a folder of site files."""
    report = folder / "audit.json" if folder.is_dir() else folder
    if report.is_file() and is_report(report):
        return read_summary(report)
    return audit_sums(_read_sums([folder], progress)).to_dict()

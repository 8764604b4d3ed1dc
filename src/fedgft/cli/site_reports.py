"""Site files and reports: what `measure` and `audit` read, check, write and print.

These two commands import this module when they run: it loads NumPy and polars.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedgft.audit import SiteSums, audit, read_sums
from fedgft.audit.measurement import read_header
from fedgft.audit.report import compare
from fedgft.audit.site_file import (
    MIN_BIN,
    MIN_SUM_ROWS,
    count_revealed,
    find_site_files,
    gather,
    is_report,
)
from fedgft.audit.summary import Summary, read_summary, views_of
from fedgft.cli.console import Bar, bar, discard_stdout, note, out, print_signs, print_table, wrote
from fedgft.cli.options import require
from fedgft.data.table import split_group_columns
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.store import atomic_write, open_folder, refuse_link, stage_files
from fedgft.sums import COUNT, Privacy

Kind = Literal["audit", "comparison"]

# Reports


def report_names(kind: Kind) -> tuple[str, str, str]:
    """Return the names of the files of a report: HTML, Markdown and JSON."""
    return "report.html", "report.md", f"{kind}.json"


def check_report_folder(folder: Path, kind: Kind, *, field: str = "out") -> None:
    """Raise a `FedgftError` if the report would replace files that are not of an earlier one.

    Parameters
    ----------
    folder
        It need not exist.
    kind
        An audit does not replace a comparison, nor the other way round.
    field
        The option that names the folder.
    """
    mark = f"<!-- fedgft {kind} -->"
    starts = (f"<!doctype html>\n{mark}", mark, f'{{\n  "format": "fedgft-{kind}')
    for name, start in zip(report_names(kind), starts, strict=True):
        path = folder / name
        refuse_link(path, f"`{field}`")
        is_ours = path.is_file() and path.read_bytes().startswith(start.encode())
        require(
            is_ours or not path.exists(),
            f"`{field}` {folder}: a {name} is there that is not ours; name another folder",
            kind="file",
        )


def write_report(folder: Path, report: Any, kind: Kind) -> list[Path]:
    """Write the files of an `Audit` or a `Comparison`, all or none; return their paths."""
    texts = (report.to_html(), report.to_markdown(), report.to_json())
    with stage_files(folder) as stage:
        for name, text in zip(report_names(kind), texts, strict=True):
            with atomic_write(stage / name) as part:
                part.write(text.encode())
    return [folder / name for name in report_names(kind)]


def print_report(report: Any) -> None:
    """Print the findings of an `Audit` or a `Comparison`, and the tables behind them."""
    summary = report.to_dict()
    out.print(report.lead(), markup=False, highlight=False, emoji=False)
    print_signs(report.verdict())
    out.print()
    for table in report.tables():
        print_table(table)
    for text in summary["warnings"]:
        note(text)
    if "interval" in summary:
        note(f"95% intervals: {summary['interval']}")


def publish_report(report: Any, folder: Path | None, kind: Kind, *, json: bool) -> None:
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
        discard_stdout()


# Audits


def parse_limits(field: str, items: Sequence[str]) -> dict[str, float]:
    """Read METRIC=GAP, as in sp=0.05; return the gaps by metric."""
    limits: dict[str, float] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip()
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        known = ", ".join(CATALOG)
        is_pair = equals and name in CATALOG
        require(is_pair, f"`{field}` {item}: write METRIC=GAP, such as sp=0.05, of {known}")
        is_gap = 0 <= limit < 1
        require(is_gap, f"`{field}` {item}: the gap must be a number, 0 or more and below 1")
        require(name not in limits, f"`{field}` {item}: {name} is given twice")
        limits[name] = limit
    return limits


def find_exceeded(summary: Summary, limits: dict[str, float]) -> list[str]:
    """Return a sentence for every gap whose interval lies above its limit.

    Every view counts: a gap between single attributes can be surer than one between
    intersections. A gap that is not estimable, or too few rows for an interval, does not pass.
    """
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


def read_sites(files: Sequence[Path], progress: Bar) -> SiteSums:
    """Return the sums of all sites in the files and folders."""
    paths = find_site_files(files)
    return gather(paths, lambda done: progress.fetch("reading sites", done, len(paths)))


def compare_folders(folders: tuple[Path, Path], folder: Path | None, *, json: bool) -> None:
    """Compare two folders, old and new; write the comparison to `folder` and print it."""
    if folder is not None:
        check_report_folder(folder, "comparison")
    with bar() as progress:
        old, new = (_read_summary(each, progress) for each in folders)
    publish_report(compare(old, new), folder, "comparison", json=json)


def _read_summary(folder: Path, progress: Bar) -> Summary:
    """Return the summary in a report, or of the audit of a folder of site files."""
    report = folder / "audit.json" if folder.is_dir() else folder
    if report.is_file() and is_report(report):
        return read_summary(report)
    return audit(read_sites([folder], progress)).to_dict()


# Sites


def parse_groups(
    path: Path, items: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the columns of groups, and the values of those columns that list them.

    `race=White,Black` is a column with its values, `race,sex` is two columns.
    """
    known = read_header(path)
    columns = []
    values = {}
    for item in items:
        name, equals, listed = item.partition("=")
        if equals and item not in known:
            columns.append(name)
            values[name] = tuple(value.strip() for value in listed.split(",") if value.strip())
            require(values[name], f"`group` {item}: lists no values")
        else:
            columns += split_group_columns(item, known)
    return tuple(columns), values


def site_file_name(site: str) -> str:
    """Return the name of a site's file: that of the site, without what file names cannot hold."""
    name = re.sub(r"[^\w.-]+", "-", site).strip(".-")
    return f"{name or 'site'}.json"


def check_site_file(path: Path, site: str) -> None:
    """Raise a `FedgftError` if the file exists and is not the earlier file of the same site."""
    require(not path.is_dir(), f"`out` {path}: is a folder; name a file in it", kind="file")
    refuse_link(path, "`out`")
    has_folder = path.parent.is_dir()
    require(has_folder, f"`out` {path}: there is no folder {path.parent}", kind="file")
    if not path.exists():
        return
    require(path.is_file(), f"`out` {path}: is no plain file; --json prints the sums", kind="file")
    try:
        (found,) = read_sums(path).sites
    except FedgftError:
        text = f"`out` {path}: exists and holds no sums of ours; name another file"
        raise FedgftError(text, kind="file") from None
    text = f"`out` {path}: holds the sums of site '{found}'; name another file"
    require(found == site, text, kind="file")


def check_site_report(folder: Path, sums: Path | None) -> None:
    """Raise a `FedgftError` if the report would replace foreign files, or the sums."""
    check_report_folder(folder, "audit", field="report")
    if sums is None:
        raise FedgftError("`report` and --json: one of the two", kind="conflict")
    written = [folder, *(folder / name for name in report_names("audit"))]
    is_apart = sums.absolute() not in [path.absolute() for path in written]
    require(is_apart, f"`report` {folder}: the sums go to {sums}; name another folder")


def describe_rows(sums: SiteSums, name: str) -> list[str]:
    """Return notes about the rows that were counted: groups, classes, missing values, privacy."""
    site = sums.sites[name]
    classes = sums.require_spec().classes
    notes = [f"{name}: {sums.rows():,.0f} rows in {len(site.tables)} group(s)"]
    if len(classes) == 2:
        notes.append(f"the positive class is '{classes[1]}' (--positive names another)")
    else:
        notes.append(f"classes, in the order of the score columns: {', '.join(classes)}")
    for what, missing in (("label", site.label_missing), ("prediction", site.prediction_missing)):
        if missing > 0:
            number = "a few" if missing != int(missing) or site.privacy else f"{missing:,.0f}"
            notes.append(f"{number} row(s) without a {what} are counted apart")
    unknown = sum(t[..., COUNT].sum() for g, t in site.tables.items() if None in g)
    if unknown > 0:
        notes.append(f"a group is not recorded for {unknown:,.0f} row(s)")
    return notes + [text for privacy in site.privacy for text in _describe_privacy(privacy)]


def describe_disclosure(sums: SiteSums, min_bin: int) -> list[str]:
    """Return notes about how many counts of the file are of few people."""
    (site,) = sums.sites.values()
    if site.privacy:  # described with the rows
        return []
    found = count_revealed(sums, min_bin=min_bin)
    small = found["cells_below_10"]
    advice = f" (--min-cell {MIN_SUM_ROWS} withholds these, --epsilon adds noise)" if small else ""
    notes = [
        f"the file shows {found['cells']} count(s) of people by group, label and decision; {small} "
        f"of them are of fewer than {MIN_SUM_ROWS} people{advice}"
    ]
    few = found["score_counts_below_5"]
    if few:
        protection = (
            f"; {few} of them are of fewer than {MIN_BIN} people, whose scores can be read off "
            f"(--min-bin {MIN_BIN} puts them together)"
        )
    else:
        protection = f", each of at least {max(min_bin, MIN_BIN)} people: no single score"
    if sums.require_spec().scored:
        shown = f"it shows {found['score_counts']} count(s) of people with scores in some range"
        notes.append(shown + protection)
    return notes


def _describe_privacy(privacy: Privacy) -> list[str]:
    """Return notes about what protects people in the file, and what does not."""
    if privacy.min_cell:
        largest = privacy.min_cell - 1
        return [f"{privacy.suppressed} cell(s) of 1 to {largest} rows are withheld"]
    notes = [
        f"{privacy.mechanism} noise of scale {privacy.scale:.3g} is on every count: epsilon "
        f"{privacy.epsilon:g}, delta {privacy.delta:g} for one row; measuring again spends it again"
    ]
    if privacy.names != "declared":
        notes.append(
            "the names of groups and classes come from the data and are not protected: list them "
            "(--group race=A,B --classes no yes)"
        )
    return notes

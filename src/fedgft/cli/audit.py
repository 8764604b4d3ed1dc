"""`fedgft measure`: the sums of one site; `fedgft audit`: the fairness over all sites."""

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import fedgft
from fedgft.cli.console import (
    Bar,
    bar,
    discard_stdout,
    note,
    out,
    print_signs,
    print_table,
    say,
    wrote,
)
from fedgft.cli.options import Flag, Place, Some, Whole, require, require_values
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import printable
from fedgft.settings import MAX_COUNT
from fedgft.store import open_folder, refuse_link

if TYPE_CHECKING:
    from fedgft.auditing.report_files import ReportKind
    from fedgft.auditing.summary import Summary
    from fedgft.site_sums import Privacy, SiteSums

# Loaded when a command runs, so that help is printed at once.
measurement = LazyModule("fedgft.auditing.measurement")
comparison = LazyModule("fedgft.auditing.comparison")
report_files = LazyModule("fedgft.auditing.report_files")
site_file = LazyModule("fedgft.auditing.site_file")
summaries = LazyModule("fedgft.auditing.summary")
site_sums = LazyModule("fedgft.site_sums")
tables = LazyModule("fedgft.data.table")
verdicts = LazyModule("fedgft.auditing.verdicts")

EXIT_EXCEEDED = 3  # the exit code of a gap above a limit
MIN_DRAWS = 100  # of a bootstrap
FILE_WIDTH = 10_000  # characters per line of a table, where no terminal limits them


def measure(
    predictions: Place,
    /,
    *,
    label: str,
    group: Annotated[list[str], Parameter(negative="")],
    score: Annotated[list[str], Parameter(negative="")] | None = None,
    decision: str | None = None,
    threshold: float = 0.5,
    name: str | None = None,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    positive: str | None = None,
    classes: Annotated[list[str] | None, Some] = None,
    bins: Whole | None = None,
    min_bin: Whole = 5,
    min_cell: Whole = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    ignore_case: Annotated[bool, Flag] = False,
    report: Place | None = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Count the predictions of one site. The result is a file of sums; rows stay at the site.

    Parameters
    ----------
    predictions
        A CSV or Parquet file with one row per person. Large files are read in batches.
    label
        The column with the true outcome.
    group
        A column with groups; repeat it for intersections. race=White,Black lists the values.
    score
        The column with the probability of the positive class; with more than two classes one column
        per class, in their order.
    decision
        The column with the decision; needed if the decision does not follow from the score.
    threshold
        Scores of at least this value are positive decisions.
    name
        Name of the site [default: the name of the file].
    out
        File for the sums [default: NAME.json].
    positive
        The positive one of two labels [default: the last in sorted order].
    classes
        All possible labels, in order; needed if this site lacks some.
    bins
        Number of bins of the score histograms [default: 100; 20 with --epsilon].
    min_bin
        Join bins of the histograms until each has this many rows; 1 keeps every bin.
    min_cell
        Withhold counts of fewer rows than this, such as 10.
    epsilon
        Add noise for differential privacy with this budget.
    delta
        With --epsilon: use discrete Gaussian noise with this delta, not discrete Laplace.
    ignore_case
        Merge names that differ only in case or spaces, such as "Man" and "man".
    report
        Folder for a report on this site alone, as `fedgft audit` writes it.
    json
        Print the sums to stdout; write a file only if --out names one.

    Examples
    --------
    fedgft measure predictions.csv --label y --group race --group sex --score p
    fedgft measure predictions.csv --label y --group sex --score p --report report
    fedgft measure predictions.parquet --label y --group sex --score p --epsilon 1
    """
    require_values(classes=classes)
    for field, value, least in (("min_bin", min_bin, 1), ("min_cell", min_cell, 0)):
        require(value >= least, f"`{field}` {value}: must be at least {least}")
        require(value <= MAX_COUNT, f"`{field}` {value}: must be at most {MAX_COUNT:,}")
    columns, values = parse_groups(predictions, group)
    site = predictions.stem if name is None else name
    is_text = site.strip() and site == site.encode("utf-8", "replace").decode("utf-8")
    require(is_text, f"`name` {printable(site)!r}: must be proper text, and not empty")
    path = out or (None if json else Path(site_file_name(site)))
    if path is not None:
        check_site_file(path, site)
    if report is not None:
        check_site_report(report, path)
    with nullcontext() if report is None else open_folder(report, "`report`"):
        with bar() as progress:
            sums = fedgft.auditing.measure_file(
                predictions,
                label=label,
                group=columns,
                score=score or (),
                decision=decision,
                site=site,
                threshold=threshold,
                bins=bins,
                classes=classes or (),
                positive=positive,
                values=values,
                min_cell=min_cell,
                epsilon=epsilon,
                delta=delta,
                ignore_case=ignore_case,
                on_rows=progress.rows,
            )
        # The report is about the numbers in the file, where sums are rounded.
        content = sums.to_json(min_bin=min_bin)
        made = (
            None
            if report is None
            else fedgft.audit(
                fedgft.SiteSums.from_json(content, source=site),
                about={"files": {path.name: sha256(content.encode()).hexdigest()}} if path else {},
            )
        )
        for line in (*sums.notes, *describe_rows(sums, site)):
            note(line)
        for line in describe_disclosure(sums, min_bin):
            note(line)
        if path is not None:
            wrote([fedgft.auditing.write_sums(sums, path, min_bin=min_bin)])
        if report is not None:
            wrote(report_files.write_report(made, report, "audit", field="report"))
            print_report(made)
    if json:
        sys.stdout.write(content)


def audit(
    *files: Place,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
    wide: Annotated[bool, Flag] = False,
    reference_groups: Annotated[list[str] | None, Some] = None,
    fail_above: Annotated[list[str] | None, Some] = None,
    adjust: Annotated[list[str] | None, Some] = None,
    bootstrap: Whole = 0,
    ignore_case: Annotated[bool, Flag] = False,
    compare: Annotated[tuple[Place, Place] | None, Parameter(negative="")] = None,
    tolerance: Annotated[list[str] | None, Some] = None,
    title: str | None = None,
    model_name: str | None = None,
    model_version: str | None = None,
    prepared_by: str | None = None,
    purpose: str | None = None,
    outcome: str | None = None,
) -> None:
    """Combine the sums of all sites: gaps with intervals, the share of each site, a report.

    For example: fedgft audit site-*.json --out report --fail-above sp=0.05

    Parameters
    ----------
    files
        Files that `fedgft measure` wrote, or folders of them.
    out
        Folder for report.html, report.md and audit.json.
    json
        Print the audit to stdout as JSON, and nothing else.
    wide
        Print all tables and columns; without it, those that matter most in 80 characters.
    reference_groups
        Compare every group with this one: White, or race=White sex=Male.
    fail_above
        Exit with code 3 if a gap exceeds a limit by more than chance: sp=0.05. Without --tolerance,
        these limits are the tolerances of the report, too.
    adjust
        Find one threshold per group that reduces a gap to a target: sp=0.02.
    bootstrap
        Compute intervals from this many random draws of sites (not rows), such as 2000.
    ignore_case
        Merge names that differ only in case or spaces, such as "Man" and "man".
    compare
        Compare two folders of site files or reports, old and new: the change of each gap.
    tolerance
        Largest acceptable gap, for all metrics or by metric: 0.02, 2% or sp=0.02,eop=0.05
        [default: 0.05, that is 5 points].
    title
        Title of the report [default: Fairness audit].
    model_name
        Name of the audited model.
    model_version
        Version of the audited model.
    prepared_by
        Person or office that prepared the report.
    purpose
        Purpose of the audit.
    outcome
        What a positive decision is called, such as approved.

    Examples
    --------
    fedgft audit north.json south.json east.json --out report
    fedgft audit sums/ --fail-above sp=0.05 eop=0.1
    fedgft audit sums/ --tolerance sp=2% --outcome approved --out report
    """
    require_values(
        fail_above=fail_above, adjust=adjust, reference_groups=reference_groups, tolerance=tolerance
    )
    limits = parse_limits("fail_above", fail_above or ())
    targets = parse_limits("adjust", adjust or ())
    is_enough = bootstrap == 0 or bootstrap >= MIN_DRAWS
    require(is_enough, f"`bootstrap` {bootstrap}: needs at least {MIN_DRAWS} draws")
    about = {
        "title": title,
        "model": model_name,
        "version": model_version,
        "prepared_by": prepared_by,
        "purpose": purpose,
        "outcome": outcome,
    }
    if compare is not None:
        named = any(text is not None for text in about.values())
        if files or limits or targets or bootstrap or reference_groups or tolerance or named:
            raise FedgftError(
                "`compare` takes two folders, --out and --json, and nothing else", kind="conflict"
            )
        compare_folders(compare, out, json=json, wide=wide, ignore_case=ignore_case)
        return
    if out is not None:
        report_files.check_report_folder(out, "audit", field="out")
    with bar() as progress:
        sums = read_sites(files, progress, ignore_case=ignore_case)
    report = fedgft.audit(
        sums,
        reference_groups=reference_groups or (),
        bootstrap=bootstrap,
        adjust_to=targets,
        tolerance=parse_tolerance(tolerance or ()) or limits,
        about=about | {"files": site_file.find_site_files(files)},
    )
    exceeded = verdicts.find_exceeded(report.to_dict(), limits)
    try:
        publish_report(report, out, "audit", json=json, wide=wide)
    finally:  # also where the reader of the output has closed the pipe
        for each in exceeded:
            say(f"`fail_above`: {each.metric} {each.reason}")
        if exceeded:
            raise SystemExit(EXIT_EXCEEDED)


# Reports


def print_report(report: Any, *, wide: bool = False) -> None:
    """Print the findings of an `Audit` or a `Comparison`, and the tables behind them.

    Parameters
    ----------
    report
        The `Audit` or `Comparison`.
    wide
        Whether to print all tables and columns of the report. A line is as long as the terminal is
        wide, and as long as it has to be in a file or a pipe.
    """
    summary = report.to_dict()
    out.print(report.lead(), markup=False, highlight=False, emoji=False)
    print_signs(report.verdict())
    out.print()
    for table in report.report().tables if wide else report.tables():
        print_table(table, width=FILE_WIDTH if wide and not out.is_terminal else None)
    for text in summary["warnings"]:
        note(text)
    if "interval" in summary:
        note(f"95% intervals: {summary['interval']}")
    if not wide:
        note("--wide prints all tables and columns")


def publish_report(
    report: Any, folder: Path | None, kind: "ReportKind", *, json: bool, wide: bool
) -> None:
    """Write an audit or a comparison to a folder, if one is named, and print it."""
    if folder is not None:
        wrote(report_files.save_report(report, folder, kind, field="out"))
    if not json:
        print_report(report, wide=wide)
        return
    try:
        sys.stdout.write(report.to_json())
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


# Audits


def parse_tolerance(items: Sequence[str]) -> dict[str, float] | float:
    """Read the tolerance: one gap for all metrics, or METRIC=GAP; several with commas or spaces."""
    parts = [part.strip() for item in items for part in item.split(",") if part.strip()]
    if len(parts) == 1 and "=" not in parts[0]:
        return parse_gap("tolerance", parts[0], parts[0])
    return parse_limits("tolerance", parts)


def parse_gap(field: str, item: str, text: str) -> float:
    """Read a gap: 0.02 or 2%."""
    number = text.strip().removesuffix("%")
    try:
        gap = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        gap = -1.0
    is_gap = 0 <= gap < 1
    example = "such as 0.02 or 2%"
    require(is_gap, f"`{field}` {item}: the gap must be 0 or more and below 1, {example}")
    return gap


def parse_limits(field: str, items: Sequence[str]) -> dict[str, float]:
    """Read METRIC=GAP, as in sp=0.05; return the gaps by metric."""
    limits: dict[str, float] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = fedgft.metrics.catalog.resolve_name(name)
        known = ", ".join(fedgft.metrics.CATALOG)
        is_pair = equals and name in fedgft.metrics.CATALOG
        require(is_pair, f"`{field}` {item}: write METRIC=GAP, such as sp=0.05, of {known}")
        require(name not in limits, f"`{field}` {item}: {name} is given twice")
        limits[name] = parse_gap(field, item, value)
    return limits


def read_sites(files: Sequence[Path], progress: Bar, *, ignore_case: bool) -> "SiteSums":
    """Return the sums of all sites in the files and folders."""
    paths = site_file.find_site_files(files)

    def show(done: int) -> None:
        progress.fetch("reading sites", done, len(paths))

    return site_file.gather(paths, show, ignore_case=ignore_case)


def compare_folders(
    folders: tuple[Path, Path], folder: Path | None, *, json: bool, wide: bool, ignore_case: bool
) -> None:
    """Compare two folders, old and new; write the comparison to `folder` and print it."""
    if folder is not None:
        report_files.check_report_folder(folder, "comparison", field="out")
    with bar() as progress:
        old, new = (_read_summary(each, progress, ignore_case=ignore_case) for each in folders)
    publish_report(comparison.compare(old, new), folder, "comparison", json=json, wide=wide)


def _read_summary(folder: Path, progress: Bar, *, ignore_case: bool) -> "Summary":
    """Return the summary in a report, or of the audit of a folder of site files."""
    report = folder / "audit.json" if folder.is_dir() else folder
    if report.is_file() and site_file.is_report(report):
        return summaries.read_summary(report)
    return fedgft.audit(read_sites([folder], progress, ignore_case=ignore_case)).to_dict()


# Sites


def parse_groups(
    path: Path, items: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the columns of groups, and the values of those columns that list them.

    `race=White,Black` is a column with its values, `race,sex` is two columns.
    """
    known = measurement.read_header(path)
    columns = []
    values = {}
    for item in items:
        name, equals, listed = item.partition("=")
        if equals and item not in known:
            columns.append(name)
            values[name] = tuple(value.strip() for value in listed.split(",") if value.strip())
            require(values[name], f"`group` {item}: lists no values")
        else:
            columns += tables.split_group_columns(item, known)
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
    require(
        path.is_file(), f"`out` {path}: is not a regular file; --json prints the sums", kind="file"
    )
    try:
        (found,) = fedgft.auditing.read_sums(path).sites
    except FedgftError:
        text = f"`out` {path}: exists and is not a file of sums; name another file"
        raise FedgftError(text, kind="file") from None
    text = f"`out` {path}: holds the sums of site '{found}'; name another file"
    require(found == site, text, kind="file")


def check_site_report(folder: Path, sums: Path | None) -> None:
    """Raise a `FedgftError` if the report would replace foreign files, or the sums."""
    report_files.check_report_folder(folder, "audit", field="report")
    if sums is None:
        raise FedgftError("`report` and --json exclude each other: give one", kind="conflict")
    written = [folder, *(folder / name for name in report_files.report_names("audit"))]
    is_apart = sums.absolute() not in [path.absolute() for path in written]
    require(is_apart, f"`report` {folder}: the sums go to {sums}; name another folder")


def describe_rows(sums: "SiteSums", name: str) -> list[str]:
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
            notes.append(f"{number} row(s) without a {what} are counted separately")
    unknown = sum(t[..., site_sums.COUNT].sum() for g, t in site.tables.items() if None in g)
    if unknown > 0:
        notes.append(f"a group is not recorded for {unknown:,.0f} row(s)")
    return notes + [text for privacy in site.privacy for text in _describe_privacy(privacy)]


def describe_disclosure(sums: "SiteSums", min_bin: int) -> list[str]:
    """Return notes about how many counts of the file are of few people."""
    (site,) = sums.sites.values()
    if site.privacy:  # described with the rows
        return []
    found = site_file.count_revealed(sums, min_bin=min_bin)
    small = found["cells_below_10"]
    advice = (
        f" (--min-cell {site_sums.MIN_SUM_ROWS} withholds these, --epsilon adds noise)"
        if small
        else ""
    )
    notes = [
        f"the file shows {found['cells']} count(s) of people by group, label and decision; {small} "
        f"of them are of fewer than {site_sums.MIN_SUM_ROWS} people{advice}"
    ]
    few = found["score_counts_below_5"]
    if few:
        protection = (
            f"; {few} of them are of fewer than {site_sums.MIN_BIN} people, whose scores can be "
            f"read off (--min-bin {site_sums.MIN_BIN} joins them)"
        )
    else:
        protection = f", each of at least {max(min_bin, site_sums.MIN_BIN)} people: no single score"
    if sums.require_spec().scored:
        shown = f"it shows {found['score_counts']} count(s) of people with scores in some range"
        notes.append(shown + protection)
    return notes


def _describe_privacy(privacy: "Privacy") -> list[str]:
    """Return notes about what protects people in the file, and what does not."""
    if privacy.min_cell:
        largest = privacy.min_cell - 1
        return [f"{privacy.suppressed} cell(s) of 1 to {largest} rows are withheld"]
    notes = [
        f"{privacy.mechanism} noise of scale {privacy.scale:.3g} is on every count: epsilon "
        f"{privacy.epsilon:g}, delta {privacy.delta:g} for one row; measuring again spends the "
        "same budget again"
    ]
    if privacy.names != "declared":
        notes.append(
            "the names of groups and classes come from the data and are not protected: list them "
            "(--group race=A,B --classes no yes)"
        )
    return notes

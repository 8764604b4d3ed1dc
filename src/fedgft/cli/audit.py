"""`fedgft measure`: the sums of one site; `fedgft audit`: one account of all sites' fairness."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import fedgft
from fedgft.cli.console import bar, note, say, wrote
from fedgft.cli.options import Flag, Place, Some, Whole, require, require_values
from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.settings import MAX_COUNT
from fedgft.store import open_folder

EXIT_EXCEEDED = 3  # the exit code of a gap above a limit
MIN_DRAWS = 100


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
    report: Place | None = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Count a site's predictions. The file that comes out holds sums; no row leaves the site.

    Parameters
    ----------
    predictions
        CSV or Parquet, one row a person; it is read in batches.
    label
        The column with what is true.
    group
        A column with a group; give it again for intersections. race=White,Black lists the values.
    score
        The column with P(positive), in [0, 1]; with more classes once for each, in their order.
    decision
        The column with the decision, where it does not follow from the score.
    threshold
        A score of at least this much is a positive decision.
    name
        The site's name [default: the file's].
    out
        Where to write the sums [default: NAME.json].
    positive
        Which of two labels is the positive one [default: the last in sorted order].
    classes
        All labels there can be, in order, where a site may lack some.
    bins
        Bins of the score histograms [default: 100; 20 with --epsilon].
    min_bin
        Put bins of the histograms together until each has this many rows; 1 shows every bin.
    min_cell
        Withhold counts of fewer rows than this, such as 10.
    epsilon
        Add noise for differential privacy with this budget.
    delta
        With --epsilon: discrete Gaussian noise at this delta instead of discrete Laplace.
    report
        A folder for a report on this site alone: what `fedgft audit` says of it.
    json
        Print the sums to stdout, and write no file unless --out names one.

    Examples
    --------
    fedgft measure predictions.csv --label y --group race --group sex --score p
    fedgft measure predictions.csv --label y --group sex --score p --report report
    fedgft measure predictions.parquet --label y --group sex --score p --epsilon 1
    """
    from fedgft.audit.site_file import from_json, to_json
    from fedgft.cli import site_reports

    require_values(classes=classes)
    for field, value, least in (("min_bin", min_bin, 1), ("min_cell", min_cell, 0)):
        require(value >= least, f"`{field}` {value}: must be at least {least}")
        require(value <= MAX_COUNT, f"`{field}` {value}: must be at most {MAX_COUNT:,}")
    columns, values = site_reports.parse_groups(predictions, group)
    site = predictions.stem if name is None else name
    is_text = site.strip() and site == site.encode("utf-8", "replace").decode("utf-8")
    require(is_text, f"`name` {printable(site)!r}: must be proper text, and not empty")
    path = out or (None if json else Path(site_reports.site_file_name(site)))
    if path is not None:
        site_reports.check_site_file(path, site)
    if report is not None:
        site_reports.check_site_report(report, path)
    with nullcontext() if report is None else open_folder(report, "`report`"):
        with bar() as progress:
            sums = fedgft.audit.measure_file(
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
                on_rows=progress.rows,
            )
        # The report is about the numbers in the file, where sums are rounded.
        content = to_json(sums, min_bin=min_bin)
        made = None if report is None else fedgft.audit.audit(from_json(content, source=site))
        for line in site_reports.describe_rows(sums, site):
            note(line)
        for line in site_reports.describe_disclosure(sums, min_bin):
            note(line)
        if path is not None:
            wrote([fedgft.audit.write_sums(sums, path, min_bin=min_bin)])
        if report is not None:
            wrote(site_reports.write_report(report, made, "audit"))
            site_reports.print_report(made)
    if json:
        sys.stdout.write(content)


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

    Examples
    --------
    fedgft audit north.json south.json east.json --out report
    fedgft audit sums/ --fail-above sp=0.05 eop=0.1
    """
    from fedgft.cli import site_reports

    require_values(fail_above=fail_above, adjust=adjust, reference_groups=reference_groups)
    limits = site_reports.parse_limits("fail_above", fail_above or ())
    targets = site_reports.parse_limits("adjust", adjust or ())
    is_enough = bootstrap == 0 or bootstrap >= MIN_DRAWS
    require(is_enough, f"`bootstrap` {bootstrap}: needs at least {MIN_DRAWS} draws")
    if compare is not None:
        if files or limits or targets or bootstrap or reference_groups:
            text = "`compare` takes two folders, --out and --json, and nothing else"
            raise FedgftError(text, kind="conflict")
        site_reports.compare_folders(compare, out, json=json)
        return
    if out is not None:
        site_reports.check_report_folder(out, "audit")
    with bar() as progress:
        sums = site_reports.read_sites(files, progress)
    report = fedgft.audit.audit(
        sums, reference_groups=reference_groups or (), bootstrap=bootstrap, adjust_to=targets
    )
    exceeded = site_reports.find_exceeded(report.to_dict(), limits)
    try:
        site_reports.publish_report(report, out, "audit", json=json)
    finally:  # also where the reader of the output has closed the pipe
        for text in exceeded:
            say(f"`fail_above`: {text}")
        if exceeded:
            raise SystemExit(EXIT_EXCEEDED)

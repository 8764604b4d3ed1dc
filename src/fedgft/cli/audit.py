"""`fedgft audit`: from the files of all sites to one account of fairness."""

from typing import Annotated

from cyclopts import Parameter

from fedgft.cli.console import bar, say
from fedgft.cli.options import Flag, Place, Some, Whole, require, require_values
from fedgft.errors import FedgftError

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
    from fedgft.audit import audit as audit_sums
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
    report = audit_sums(
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

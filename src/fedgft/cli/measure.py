"""`fedgft measure`: the sums of one site, from its table of predictions."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedgft.cli.console import bar, note, wrote
from fedgft.cli.options import Flag, Place, Some, Whole, require, require_values
from fedgft.formatting import printable
from fedgft.settings import MAX_COUNT
from fedgft.store import open_folder


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
    """
    from fedgft.audit import audit, measure_file, write_sums
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
            sums = measure_file(
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
        made = None if report is None else audit(from_json(content, source=site))
        for line in site_reports.describe_rows(sums, site):
            note(line)
        for line in site_reports.describe_disclosure(sums, min_bin):
            note(line)
        if path is not None:
            wrote([write_sums(sums, path, min_bin=min_bin)])
        if report is not None:
            wrote(site_reports.write_report(report, made, "audit"))
            site_reports.print_report(made)
    if json:
        sys.stdout.write(content)

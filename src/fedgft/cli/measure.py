"""`fedgft measure`: the sums of one site, from its table of predictions."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedgft.audit import SiteSums, audit, measure_file, read_sums, write_sums
from fedgft.audit.measurement import read_header
from fedgft.audit.site_file import MIN_BIN, MIN_SUM_ROWS, count_revealed, from_json, to_json
from fedgft.cli.console import bar, note, wrote
from fedgft.cli.parameters import Flag, Place, Some, Whole, require_values
from fedgft.cli.report_files import check_report_folder, print_report, report_names, write_report
from fedgft.data.table import split_group_columns
from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.settings import MAX_COUNT
from fedgft.store import expand_user, open_folder, refuse_link
from fedgft.sums import COUNT, Privacy


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
    require_values(classes=classes)
    for field, value, least in (("min_bin", min_bin, 1), ("min_cell", min_cell, 0)):
        if value < least:
            raise FedgftError(f"`{field}` {value}: must be at least {least}")
        if value > MAX_COUNT:
            raise FedgftError(f"`{field}` {value}: must be at most {MAX_COUNT:,}")
    source = expand_user(predictions)
    columns, values = _parse_groups(source, group)
    site = source.stem if name is None else name
    if not site.strip() or site != site.encode("utf-8", "replace").decode("utf-8"):
        raise FedgftError(f"`name` {printable(site)!r}: must be proper text, and not empty")
    path = expand_user(out) if out else None if json else Path(f"{_file_name(site)}.json")
    if path is not None:
        _check_output(path, site)
    folder = None if report is None else expand_user(report)
    if folder is not None:
        _check_report(folder, path)
    with nullcontext() if folder is None else open_folder(folder, "`report`"):
        with bar() as progress:
            sums = measure_file(
                source,
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
        made = None if folder is None else audit(from_json(content, source=site))
        for line in [*_describe_rows(sums, site), *_describe_disclosure(sums, min_bin)]:
            note(line)
        if path is not None:
            wrote([write_sums(sums, path, min_bin=min_bin)])
        if made is not None and folder is not None:
            wrote(write_report(folder, made, "audit"))
            print_report(made)
    if json:
        sys.stdout.write(content)


def _check_report(folder: Path, sums: Path | None) -> None:
    """Raise a `FedgftError` if the report would replace foreign files, or the sums."""
    check_report_folder(folder, "audit", field="report")
    if sums is None:
        raise FedgftError("`report` and --json: one of the two", kind="conflict")
    written = [folder, *(folder / name for name in report_names("audit"))]
    if sums.absolute() in [path.absolute() for path in written]:
        raise FedgftError(f"`report` {folder}: the sums go to {sums}; name another folder")


def _parse_groups(
    path: Path, items: list[str]
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
            if not values[name]:
                raise FedgftError(f"`group` {item}: lists no values")
        else:
            columns += split_group_columns(item, known)
    return tuple(columns), values


def _file_name(site: str) -> str:
    return re.sub(r"[^\w.-]+", "-", site).strip(".-") or "site"


def _check_output(path: Path, site: str) -> None:
    """Raise a `FedgftError` if the file exists and is not the earlier file of the same site."""
    if path.is_dir():
        raise FedgftError(f"`out` {path}: is a folder; name a file in it", kind="file")
    refuse_link(path, "`out`")
    if not path.parent.is_dir():
        raise FedgftError(f"`out` {path}: there is no folder {path.parent}", kind="file")
    if not path.exists():
        return
    if not path.is_file():
        raise FedgftError(f"`out` {path}: is no plain file; --json prints the sums", kind="file")
    try:
        (found,) = read_sums(path).sites
    except FedgftError:
        raise FedgftError(
            f"`out` {path}: exists and holds no sums of ours; name another file", kind="file"
        ) from None
    if found != site:
        raise FedgftError(
            f"`out` {path}: holds the sums of site '{found}'; name another file", kind="file"
        )


def _describe_rows(sums: SiteSums, name: str) -> list[str]:
    """Return notes about the rows that were counted: groups, classes, missing values, privacy."""
    site = sums.sites[name]
    question = sums.spec
    notes = [f"{name}: {sums.rows():,.0f} rows in {len(site.tables)} group(s)"]
    if question is not None and len(question.classes) == 2:
        notes.append(f"the positive class is '{question.classes[1]}' (--positive names another)")
    elif question is not None:
        notes.append(f"classes, in the order of the score columns: {', '.join(question.classes)}")
    for what, missing in (("label", site.label_missing), ("prediction", site.prediction_missing)):
        if missing > 0:
            number = "a few" if missing != int(missing) or site.privacy else f"{missing:,.0f}"
            notes.append(f"{number} row(s) without a {what} are counted apart")
    unknown = sum(t[..., COUNT].sum() for g, t in site.tables.items() if None in g)
    if unknown > 0:
        notes.append(f"a group is not recorded for {unknown:,.0f} row(s)")
    notes += [text for how in site.privacy for text in _describe_privacy(how)]
    return notes


def _describe_disclosure(sums: SiteSums, min_bin: int) -> list[str]:
    """Return notes about how many counts of the file are of few people."""
    (site,) = sums.sites.values()
    if site.privacy:  # described with the rows
        return []
    found = count_revealed(sums, min_bin=min_bin)
    small = found["cells_below_10"]
    notes = [
        f"the file shows {found['cells']} count(s) of people by group, label and decision; {small} "
        f"of them are of fewer than {MIN_SUM_ROWS} people"
        + (f" (--min-cell {MIN_SUM_ROWS} withholds these, --epsilon adds noise)" if small else "")
    ]
    shown = f"it shows {found['score_counts']} count(s) of people with scores in some range"
    few = found["score_counts_below_5"]
    if sums.require_spec().scored and few:
        notes.append(
            f"{shown}; {few} of them are of fewer than {MIN_BIN} people, whose scores can be read "
            f"off (--min-bin {MIN_BIN} puts them together)"
        )
    elif sums.require_spec().scored:
        notes.append(f"{shown}, each of at least {max(min_bin, MIN_BIN)} people: no single score")
    return notes


def _describe_privacy(how: Privacy) -> list[str]:
    """Return notes about what protects people in the file, and what does not."""
    if how.min_cell:
        return [f"{how.suppressed} cell(s) of 1 to {how.min_cell - 1} rows are withheld"]
    notes = [
        f"{how.mechanism} noise of scale {how.scale:.3g} is on every count: epsilon "
        f"{how.epsilon:g}, delta {how.delta:g} for one row; measuring again spends it again"
    ]
    if how.names != "declared":
        notes.append(
            "the names of groups and classes come from the data and are not protected: list them "
            "(--group race=A,B --classes no yes)"
        )
    return notes

"""`fedgft measure`: the sums of one site, from its table of predictions."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fedgft.cli.console import note, wrote
from fedgft.cli.names import Flag, Place, Some, Whole
from fedgft.cli.progress import bar
from fedgft.errors import FedgftError
from fedgft.files import expanded, open_folder, refuse_link
from fedgft.layout import printable

if TYPE_CHECKING:
    from fedgft.audit import Sums
    from fedgft.audit.sums import Privacy


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
    import sys

    from fedgft.audit import measure_file
    from fedgft.audit.sitefile import to_json

    if classes == []:
        raise FedgftError("--classes needs values")
    if min_bin < 1:
        raise FedgftError(f"--min-bin {min_bin}: must be at least 1")
    source = expanded(predictions)
    columns, values = _groups(source, group)
    site = source.stem if name is None else name
    if not site.strip() or site != site.encode("utf-8", "replace").decode("utf-8"):
        raise FedgftError(f"--name {printable(site)!r}: must be proper text, and not empty")
    place = expanded(out) if out else None if json else Path(f"{_as_file(site)}.json")
    if place is not None:
        _check_place(place, site)
    folder = None if report is None else expanded(report)
    if folder is not None:
        _check_report(folder, place)
    with nullcontext() if folder is None else open_folder(folder, "--report"):
        with bar() as progress:
            sums = measure_file(
                source, label=label, group=columns, score=score or (), decision=decision,
                site=site, threshold=threshold, bins=bins, classes=classes or (),
                positive=positive, values=values, min_cell=min_cell, epsilon=epsilon, delta=delta,
                on_rows=progress.rows,
            )  # fmt: skip
        _put(sums, site, place, folder, min_bin)
    if json:
        sys.stdout.write(to_json(sums, min_bin=min_bin))


def _put(sums: "Sums", site: str, place: Path | None, folder: Path | None, min_bin: int) -> None:
    from fedgft.audit import audit, write_sums
    from fedgft.audit.sitefile import from_json, to_json
    from fedgft.cli.audit import show, write

    # Of what others will read: sums are rounded in the file.
    made = None if folder is None else audit(from_json(to_json(sums, min_bin=min_bin), source=site))
    for said in [*_notes(sums, site), *_revealed(sums, min_bin)]:
        note(said)
    if place is not None:
        wrote([write_sums(sums, place, min_bin=min_bin)])
    if made is not None and folder is not None:
        wrote(write(folder, made, "audit"))
        show(made)


def _check_report(folder: Path, sums: Path | None) -> None:
    """Nobody's own files are overwritten, nor the sums themselves."""
    from fedgft.cli.audit import check_place, names

    check_place(folder, "audit", "--report")
    if sums is None:
        raise FedgftError("--report and --json: one of the two")
    written = [folder, *(folder / name for name in names("audit"))]
    if sums.absolute() in [path.absolute() for path in written]:
        raise FedgftError(f"--report {folder}: the sums go to {sums}; name another folder")


def _groups(path: Path, asked: list[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Columns, and the values of those that list them: `race=White,Black`; `race,sex` is two."""
    from fedgft.audit.counting import header
    from fedgft.data.roles import group_columns

    known, columns, values = header(path), [], {}
    for item in asked:
        name, equals, listed = item.partition("=")
        if equals and item not in known:
            columns.append(name)
            values[name] = tuple(value.strip() for value in listed.split(",") if value.strip())
            if not values[name]:
                raise FedgftError(f"--group {item}: lists no values")
        else:
            columns += group_columns(item, known)
    return tuple(columns), values


def _as_file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "site"


def _check_place(path: Path, site: str) -> None:
    """Only the sums of the same site are written over."""
    from fedgft.audit import read_sums

    if path.is_dir():
        raise FedgftError(f"--out {path}: is a folder; name a file in it")
    refuse_link(path, "--out")
    if not path.parent.is_dir():
        raise FedgftError(f"--out {path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_file():
        raise FedgftError(f"--out {path}: is no plain file; --json prints the sums")
    try:
        (held,) = read_sums(path).sites
    except FedgftError:
        raise FedgftError(
            f"--out {path}: exists and holds no sums of ours; name another file"
        ) from None
    if held != site:
        raise FedgftError(f"--out {path}: holds the sums of site '{held}'; name another file")


def _notes(sums: "Sums", name: str) -> list[str]:
    from fedgft.audit.sums import COUNT

    site, question = sums.sites[name], sums.question
    said = [f"{name}: {sums.rows():,.0f} rows in {len(site.tables)} group(s)"]
    if question is not None and len(question.classes) == 2:
        said.append(f"the positive class is '{question.classes[1]}' (--positive names another)")
    elif question is not None:
        said.append(f"classes, in the order of the score columns: {', '.join(question.classes)}")
    for what, missing in (("label", site.label_missing), ("prediction", site.prediction_missing)):
        if missing > 0:
            number = "a few" if missing != int(missing) or site.privacy else f"{missing:,.0f}"
            said.append(f"{number} row(s) without a {what} are counted apart")
    unknown = sum(t[..., COUNT].sum() for g, t in site.tables.items() if None in g)
    if unknown > 0:
        said.append(f"a group is not recorded for {unknown:,.0f} row(s)")
    said += [text for how in site.privacy for text in _about(how)]
    return said


def _revealed(sums: "Sums", min_bin: int) -> list[str]:
    """What the file says about few people, in plain words."""
    from fedgft.audit.sitefile import FEW, MIN_BIN, revealed

    (site,) = sums.sites.values()
    if site.privacy:  # said there
        return []
    found = revealed(sums, min_bin=min_bin)
    small = found["cells_below_10"]
    said = [
        f"the file shows {found['cells']} count(s) of people by group, label and decision; {small} "
        f"of them are of fewer than {FEW} people"
        + (f" (--min-cell {FEW} withholds these, --epsilon adds noise)" if small else "")
    ]
    shown = f"it shows {found['score_counts']} count(s) of people with scores in some range"
    few = found["score_counts_below_5"]
    if sums.asked.scored and few:
        said.append(
            f"{shown}; {few} of them are of fewer than {MIN_BIN} people, whose scores can be read "
            f"off (--min-bin {MIN_BIN} puts them together)"
        )
    elif sums.asked.scored:
        said.append(f"{shown}, each of at least {max(min_bin, MIN_BIN)} people: no single score")
    return said


def _about(how: "Privacy") -> list[str]:
    """What was done to protect people, and what was not."""
    if how.min_cell:
        return [f"{how.suppressed} cell(s) of 1 to {how.min_cell - 1} rows are withheld"]
    said = [
        f"{how.mechanism} noise of scale {how.scale:.3g} is on every count: epsilon "
        f"{how.epsilon:g}, delta {how.delta:g} for one row; measuring again spends it again"
    ]
    if how.names != "declared":
        said.append(
            "the names of groups and classes come from the data and are not protected: list them "
            "(--group race=A,B --classes no yes)"
        )
    return said

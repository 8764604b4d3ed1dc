"""`fedgft audit`: from the files of all sites to one account of fairness."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import note, out, print_table, say, wrote
from fedgft.cli.names import Flag, Place, Some, Whole
from fedgft.cli.progress import bar
from fedgft.errors import FedgftError
from fedgft.files import expanded, refuse_link

if TYPE_CHECKING:
    from fedgft.audit import Audit

EXCEEDED = 3


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
    for option, given in (("--fail-above", fail_above), ("--adjust", adjust),
                          ("--reference-groups", reference_groups)):  # fmt: skip
        if given == []:  # a variable that was empty: no gate is not what was asked for
            raise FedgftError(f"{option} needs a value")
    limits, targets = _limits(fail_above, "--fail-above"), _limits(adjust, "--adjust")
    if bootstrap < 0 or 0 < bootstrap < 100:
        raise FedgftError(f"--bootstrap {bootstrap}: needs at least 100 draws")
    place = None if out is None else expanded(out)
    if compare is not None:
        if files or limits or targets or bootstrap or reference_groups:
            raise FedgftError("--compare takes two folders, --out and --json, and nothing else")
        _compare(compare, place, json=json)
        return
    from fedgft.audit import audit as audited

    if place is not None:
        check_place(place, "audit")
    with bar() as progress:
        sums = _read(files, progress)
    made = audited(
        sums, reference_groups=reference_groups or (), bootstrap=bootstrap, adjust_to=targets
    )
    failed = _failed(made, limits)
    try:
        _put(made, place, "audit", json=json)
    finally:  # whoever stopped reading our output still gets the gate's answer
        for text in failed:
            say(f"--fail-above: {text}")
        if failed:
            raise SystemExit(EXCEEDED)


def _put(made: Any, place: Path | None, kind: str, *, json: bool) -> None:
    """An audit or a comparison into a folder, if one is named, and onto stdout."""
    if place is not None:
        from fedgft.files import open_folder

        with open_folder(place):
            wrote(write(place, made, kind))
    if not json:
        show(made)
        return
    try:
        sys.stdout.write(made.to_json())
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read(files: Sequence[Path], progress: Any) -> Any:
    from fedgft.audit.gathering import gather, site_files

    found = site_files(files)
    return gather(found, lambda n: progress.fetch("reading sites", n, len(found)))


def _limits(asked: list[str] | None, option: str) -> dict[str, float]:
    """`sp=0.05` and so on."""
    from fedgft.metrics import CATALOG

    out = {}
    for item in asked or ():
        name, equals, value = item.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if not equals or name.strip() not in CATALOG:
            known = ", ".join(CATALOG)
            raise FedgftError(f"{option} {item}: write METRIC=GAP, such as sp=0.05, of {known}")
        if not 0 <= limit < 1:
            raise FedgftError(f"{option} {item}: the gap must be a number, 0 or more and below 1")
        if name.strip() in out:
            raise FedgftError(f"{option} {item}: {name.strip()} is given twice")
        out[name.strip()] = limit
    return out


def check_place(folder: Path, kind: str, option: str = "--out") -> None:
    """Nobody's own files are overwritten, nor an audit by a comparison."""
    starts = (f"<!doctype html>\n<!-- fedgft {kind} -->", f"<!-- fedgft {kind} -->",
              f'{{\n  "format": "fedgft-{kind}')  # fmt: skip
    for name, start in zip(names(kind), starts, strict=True):
        path = folder / name
        refuse_link(path, option)
        if path.exists() and not (path.is_file() and path.read_bytes().startswith(start.encode())):
            raise FedgftError(
                f"{option} {folder}: a {name} is there that is not ours; name another folder"
            )


def names(kind: str) -> tuple[str, str, str]:
    return "report.html", "report.md", f"{kind}.json"


def write(folder: Path, made: Any, kind: str) -> list[Path]:
    from fedgft.files import staged, whole

    texts = (made.to_html(), made.to_markdown(), made.to_json())
    with staged(folder) as place:
        for name, text in zip(names(kind), texts, strict=True):
            with whole(place / name) as part:
                part.write_text(text, "utf-8")
    return [folder / name for name in names(kind)]


def show(made: Any) -> None:
    """Of an audit or a comparison: what comes out, and the tables it rests on."""
    summary = made.to_dict()
    out.print(made.lead(), markup=False, highlight=False, emoji=False)
    _signed(made.verdict())
    for table in made.tables():
        print_table(table)
    for text in summary["warnings"]:
        note(text)
    if "interval" in summary:
        note(f"95% intervals: {summary['interval']}")


def _signed(said: list[tuple[bool | None, str]]) -> None:
    from rich.text import Text

    from fedgft.audit.text import SIGNS

    colours = {True: "green", False: "red", None: "dim"}
    for good, text in said:
        out.print(Text(f" {SIGNS[good]} ", style=colours[good]).append(text, style="default"))
    out.print()


def _failed(made: "Audit", limits: dict[str, float]) -> list[str]:
    """Every view counts: a gap between single attributes can be surer than one between cells.

    A group without a rate, or too few rows for any interval, is no pass: nobody can say.
    """
    from fedgft.audit.plain import views_of

    summary, failed = made.to_dict(), []
    for name, limit in limits.items():
        for title, look in views_of(summary).items():
            found = look["metrics"][name]
            numbers = found if found["gap"] is not None else found["among_estimable"] or {}
            low = numbers.get("low")
            if low is not None and low > limit:
                failed.append(f"{name} by {title} is at least {low:.3g} (95%), above {limit:g}")
            elif low is None or found["gap"] is None:
                failed.append(f"{name} by {title} cannot be judged (not estimable): no pass")
    return failed


def _compare(folders: tuple[Path, Path], place: Path | None, *, json: bool) -> None:
    from fedgft.audit.change import compare

    if place is not None:
        check_place(place, "comparison")
    with bar() as progress:
        old, new = (_summary(expanded(folder), progress) for folder in folders)
    _put(compare(old, new), place, "comparison", json=json)


def _summary(folder: Path, progress: Any) -> dict[str, Any]:
    """Of a report's folder what it says; of a folder of site files, their audit."""
    from fedgft.audit import audit as audited
    from fedgft.audit.gathering import is_report
    from fedgft.audit.summary import read_summary

    report = folder / "audit.json" if folder.is_dir() else folder
    if report.is_file() and is_report(report):
        return read_summary(report)
    return audited(_read([folder], progress)).to_dict()

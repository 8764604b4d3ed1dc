"""`fedgft audit`: from the files of all sites to one account of fairness."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import bar, note, out, print_table, wrote
from fedgft.cli.options import Flag, Many
from fedgft.types import FedgftError

if TYPE_CHECKING:
    from fedgft.audit import Audit

EXCEEDED = 3
REPORT = ("report.html", "report.md", "audit.json")


def audit(
    *files: Path,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
    reference_groups: Annotated[list[str] | None, Many] = None,
    fail_above: Annotated[list[str] | None, Many] = None,
    adjust: Annotated[list[str] | None, Many] = None,
    bootstrap: int = 0,
    compare: tuple[Path, Path] | None = None,
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
    limits, targets = _limits(fail_above, "--fail-above"), _limits(adjust, "--adjust")
    if bootstrap < 0 or 0 < bootstrap < 100:
        raise FedgftError(f"--bootstrap {bootstrap}: needs at least 100 draws")
    place = None if out is None else out.expanduser()
    if compare is not None:
        if files or limits or targets:
            raise FedgftError("--compare takes two folders and no other files, limits or targets")
        _compare(compare, place, json=json)
        return
    from fedgft.audit import audit as audited
    from fedgft.files import open_folder

    if place is not None:
        _check_place(place)
    with bar() as progress:
        sums = _read(files, progress)
    made = audited(
        sums, reference_groups=reference_groups or (), bootstrap=bootstrap, adjust_to=targets
    )
    if place is not None:
        with open_folder(place):
            wrote(_write(place, made))
    if json:
        sys.stdout.write(made.to_json())
    else:
        _show(made)
    _gate(made, limits)


def _read(files: Sequence[Path], progress: Any) -> Any:
    from fedgft.audit.gathering import gather, site_files

    found = site_files(files)
    return gather(found, lambda n: progress.fetch("reading sites", n, len(found)))


def _limits(asked: list[str] | None, option: str) -> dict[str, float]:
    """`sp=0.05` and so on."""
    from fedgft.metrics import get_metric

    out = {}
    for item in asked or ():
        name, equals, value = item.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if not equals or not 0 <= limit < 1:
            raise FedgftError(f"{option} {item}: write it as METRIC=GAP, such as sp=0.05")
        out[get_metric(name.strip()).name] = limit
    return out


def _check_place(folder: Path) -> None:
    """Nobody's own files are overwritten."""
    starts = {"report.html": "<!doctype html>\n<!-- fedgft audit -->", "report.md": "# Fairness ",
              "audit.json": '{\n  "format": "fedgft-'}  # fmt: skip
    for name, start in starts.items():
        path = folder / name
        if path.exists() and not (path.is_file() and path.read_bytes().startswith(start.encode())):
            raise FedgftError(
                f"--out {folder}: holds a {name} that is not ours; name another folder"
            )


def _write(folder: Path, made: Any) -> list[Path]:
    from fedgft.files import whole

    texts = (made.to_html(), made.to_markdown(), made.to_json())
    written = []
    for name, text in zip(REPORT, texts, strict=True):
        with whole(folder / name) as part:
            part.write_text(text, "utf-8")
        written.append(folder / name)
    return written


def _show(made: "Audit") -> None:
    from fedgft.audit.tabulated import few_tables
    from fedgft.audit.text import about
    from fedgft.audit.verdict import verdict

    summary = made.to_dict()
    out.print(about(summary), markup=False, highlight=False)
    _signed(verdict(summary))
    for table in few_tables(summary):
        print_table(table)
    for text in made.warnings:
        note(text)


def _signed(said: list[tuple[bool | None, str]]) -> None:
    from rich.text import Text

    from fedgft.audit.text import SIGNS

    colours = {True: "green", False: "red", None: "dim"}
    for good, text in said:
        out.print(Text(f" {SIGNS[good]} ", style=colours[good]).append(text, style="default"))
    out.print()


def _gate(made: "Audit", limits: dict[str, float]) -> None:
    """Every view counts: a gap between single attributes can be surer than one between cells."""
    from fedgft.audit.plain import views_of

    summary, failed = made.to_dict(), []
    for name, limit in limits.items():
        for title, look in views_of(summary).items():
            found = look["metrics"][name]
            numbers = found if found["gap"] is not None else found["among_estimable"] or {}
            low = numbers.get("low")
            if low is None and title == summary["groups"]:
                failed.append(
                    f"{name} by {title} cannot be judged (not estimable), which is no pass"
                )
            elif low is not None and low > limit:
                failed.append(f"{name} by {title} is at least {low:.3g} (95%), above {limit:g}")
    for text in failed:
        note(f"--fail-above: {text}")
    if failed:
        raise SystemExit(EXCEEDED)


def _compare(folders: tuple[Path, Path], place: Path | None, *, json: bool) -> None:
    from fedgft.audit.change import compare
    from fedgft.files import open_folder

    with bar() as progress:
        old, new = (_summary(folder.expanduser(), progress) for folder in folders)
    found = compare(old, new)
    if place is not None:
        _check_place(place)
        with open_folder(place):
            wrote(_write(place, found))
    if json:
        sys.stdout.write(found.to_json())
        return
    _signed(found.verdict())
    for table in found.tables():
        print_table(table)
    for text in found.to_dict()["warnings"]:
        note(text)


def _summary(folder: Path, progress: Any) -> dict[str, Any]:
    """Of a report's folder what it says; of a folder of site files, their audit."""
    from fedgft.audit import audit as audited
    from fedgft.audit.summary import read_summary

    report = folder / "audit.json" if folder.is_dir() else folder
    if report.name == "audit.json" and report.is_file():
        return read_summary(report)
    return audited(_read([folder], progress)).to_dict()

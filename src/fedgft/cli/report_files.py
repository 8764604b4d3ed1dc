"""Reports of audits and comparisons: the files in a folder, and what is printed of them."""

from pathlib import Path
from typing import Any, Literal

from fedgft.cli.console import note, out, print_signs, print_table
from fedgft.errors import FedgftError
from fedgft.store import atomic_write, refuse_link, stage_files

Kind = Literal["audit", "comparison"]


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
    starts = (
        f"<!doctype html>\n<!-- fedgft {kind} -->",
        f"<!-- fedgft {kind} -->",
        f'{{\n  "format": "fedgft-{kind}',
    )
    for name, start in zip(report_names(kind), starts, strict=True):
        path = folder / name
        refuse_link(path, f"`{field}`")
        if path.exists() and not (path.is_file() and path.read_bytes().startswith(start.encode())):
            raise FedgftError(
                f"`{field}` {folder}: a {name} is there that is not ours; name another folder",
                kind="file",
            )


def write_report(folder: Path, report: Any, kind: Kind) -> list[Path]:
    """Write the files of an `Audit` or a `Comparison`, all or none; return their paths."""
    texts = (report.to_html(), report.to_markdown(), report.to_json())
    with stage_files(folder) as stage:
        for name, text in zip(report_names(kind), texts, strict=True):
            with atomic_write(stage / name) as part:
                part.write_text(text, "utf-8")
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

"""Write the report of an audit or of a comparison to a folder: a page, a text and the numbers."""

from pathlib import Path
from typing import Any, Literal

from fedgft.errors import FedgftError
from fedgft.store import atomic_write, expand_user, open_folder, refuse_link, stage_files

ReportKind = Literal["audit", "comparison", "monitor"]

PROMETHEUS_START = "# HELP fedgft_"


def report_names(kind: ReportKind) -> tuple[str, ...]:
    """Return the names of the files of a report: HTML, Markdown and JSON; `metrics.prom` last."""
    if kind == "monitor":
        return "monitor.html", "monitor.md", "monitor.json", "metrics.prom"
    return "report.html", "report.md", f"{kind}.json"


def _write_texts(report: Any, kind: ReportKind) -> tuple[str, ...]:
    """Return the texts of the files of a report, in the order of `report_names`."""
    texts = (report.to_html(), report.to_markdown(), report.to_json())
    return (*texts, report.to_prometheus()) if kind == "monitor" else texts


def save_report(
    report: Any,
    folder: str | Path,
    kind: ReportKind,
    *,
    field: str = "folder",
    overwrite: bool = True,
) -> list[Path]:
    """Write the files of an `Audit` or a `Comparison`, all or none; return their paths.

    Parameters
    ----------
    report
        Anything with `to_html`, `to_markdown` and `to_json`.
    folder
        It is created if needed. Only files of an earlier report of the same kind are replaced.
    kind
        What the report is.
    field
        The argument or option that names the folder, for error messages.
    overwrite
        Whether an earlier report is replaced. If not, a report with other content is an error.
    """
    place = expand_user(folder)
    refuse_link(place, f"`{field}`")
    check_report_folder(place, kind, field=field)
    with open_folder(place, f"`{field}`"):
        return write_report(report, place, kind, field=field, overwrite=overwrite)


def check_report_folder(folder: Path, kind: ReportKind, *, field: str) -> None:
    """Raise a `FedgftError` if the report would replace files that are not of an earlier one.

    Parameters
    ----------
    folder
        It need not exist.
    kind
        An audit does not replace a comparison, nor the other way round.
    field
        The argument or option that names the folder, for error messages.
    """
    mark = f"<!-- fedgft {kind} -->"
    starts = (f"<!doctype html>\n{mark}", mark, f'{{\n  "format": "fedgft-{kind}', PROMETHEUS_START)
    for name, start in zip(report_names(kind), starts, strict=False):
        path = folder / name
        refuse_link(path, f"`{field}`")
        is_ours = path.is_file() and path.read_bytes().startswith(start.encode())
        if path.exists() and not is_ours:
            text = f"`{field}` {folder}: a {name} is there that is not ours; name another folder"
            raise FedgftError(text, kind="file")


def write_report(
    report: Any, folder: Path, kind: ReportKind, *, field: str, overwrite: bool = True
) -> list[Path]:
    """Write the files of a report to a folder that the caller has locked and checked.

    See `save_report` for the parameters.
    """
    texts = _write_texts(report, kind)
    for name, text in zip(report_names(kind), texts, strict=True):
        path = folder / name
        if not overwrite and path.exists() and path.read_bytes() != text.encode():
            problem = f"holds another report ({name} differs); name another folder"
            text = f"`{field}` {folder}: {problem}, or replace it with `overwrite`"
            raise FedgftError(text, kind="file")
    with stage_files(folder, f"`{field}`") as stage:
        for name, text in zip(report_names(kind), texts, strict=True):
            with atomic_write(stage / name) as part:
                part.write(text.encode())
    return [folder / name for name in report_names(kind)]

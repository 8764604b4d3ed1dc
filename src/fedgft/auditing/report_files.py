"""Write the report of an audit or of a comparison to a folder: a page, a text and the numbers.

The forms of an audit (`fedgft.auditing.forms`) are files of the same three kinds.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedgft.errors import FedgftError
from fedgft.store import atomic_write, expand_user, open_folder, refuse_link, stage_files

ReportKind = Literal["audit", "comparison", "monitor"]
FormName = Literal["ll144", "ai-act", "model-card"]
WITH_HEADER = ("model-card",)  # forms whose Markdown begins with a header in YAML
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


def form_names(name: FormName) -> tuple[str, str, str]:
    """Return the names of the files of a form: HTML, Markdown and JSON."""
    return f"{name}.html", f"{name}.md", f"{name}.json"


def write_starts(name: ReportKind | FormName) -> tuple[str, ...]:
    """Return how the files of a report or form begin: HTML, Markdown, JSON and `metrics.prom`."""
    mark = f"<!-- fedgft {name} -->"
    markdown = f"---\n# fedgft {name}\n" if name in WITH_HEADER else mark
    starts = (f"<!doctype html>\n{mark}", markdown, f'{{\n  "format": "fedgft-{name}')
    return (*starts, PROMETHEUS_START) if name == "monitor" else starts


def save_report(
    report: Any,
    folder: str | Path,
    kind: ReportKind,
    *,
    field: str = "folder",
    overwrite: bool = True,
    forms: Sequence[Any] = (),
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
    forms
        Forms of the audit (`fedgft.auditing.forms.Form`), whose files are written beside it.
    """
    place = expand_user(folder)
    refuse_link(place, f"`{field}`")
    check_report_folder(place, kind, field=field, forms=[form.name for form in forms])
    with open_folder(place, f"`{field}`"):
        return write_report(report, place, kind, field=field, overwrite=overwrite, forms=forms)


def save_form(form: Any, folder: str | Path, *, overwrite: bool = True) -> list[Path]:
    """Write the three files of a form, all or none; return their paths. See `save_report`."""
    place = expand_user(folder)
    refuse_link(place, "`folder`")
    _check_files(place, form.name, form_names(form.name), field="folder")
    with open_folder(place, "`folder`"):
        return _write_files(_write_form(form), place, field="folder", overwrite=overwrite)


def check_report_folder(
    folder: Path, kind: ReportKind, *, field: str, forms: Sequence[FormName] = ()
) -> None:
    """Raise a `FedgftError` if the report would replace files that are not of an earlier one.

    Parameters
    ----------
    folder
        It need not exist.
    kind
        An audit does not replace a comparison, nor the other way round.
    field
        The argument or option that names the folder, for error messages.
    forms
        The forms that are written beside the report.
    """
    _check_files(folder, kind, report_names(kind), field=field)
    for form in forms:
        _check_files(folder, form, form_names(form), field=field)


def _check_files(
    folder: Path, written: ReportKind | FormName, names: Sequence[str], *, field: str
) -> None:
    """Raise a `FedgftError` if one of the names is taken by a file that begins otherwise."""
    for name, start in zip(names, write_starts(written), strict=True):
        path = folder / name
        refuse_link(path, f"`{field}`")
        is_ours = path.is_file() and path.read_bytes().startswith(start.encode())
        if path.exists() and not is_ours:
            text = f"`{field}` {folder}: a {name} is there that is not ours; name another folder"
            raise FedgftError(text, kind="file")


def write_report(
    report: Any,
    folder: Path,
    kind: ReportKind,
    *,
    field: str,
    overwrite: bool = True,
    forms: Sequence[Any] = (),
) -> list[Path]:
    """Write the files of a report to a folder that the caller has locked and checked.

    See `save_report` for the parameters.
    """
    texts = dict(zip(report_names(kind), _write_texts(report, kind), strict=True))
    for form in forms:
        texts.update(_write_form(form))
    return _write_files(texts, folder, field=field, overwrite=overwrite)


def _write_form(form: Any) -> dict[str, str]:
    """Return the texts of a form's files by name."""
    made = (form.to_html(), form.to_markdown(), form.to_json())
    return dict(zip(form_names(form.name), made, strict=True))


def _write_files(
    texts: Mapping[str, str], folder: Path, *, field: str, overwrite: bool
) -> list[Path]:
    """Write all texts to files of these names, or none; return their paths."""
    for name in () if overwrite else _list_changes(texts, folder):
        problem = f"holds another report ({name} differs); name another folder"
        text = f"`{field}` {folder}: {problem}, or replace it with `overwrite`"
        raise FedgftError(text, kind="file")
    with stage_files(folder, f"`{field}`") as stage:
        for name, text in texts.items():
            with atomic_write(stage / name) as part:
                part.write(text.encode())
    return [folder / name for name in texts]


def _list_changes(texts: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield the names of existing files with another content than the new one."""
    for name, text in texts.items():
        path = folder / name
        if path.exists() and path.read_bytes() != text.encode():
            yield name

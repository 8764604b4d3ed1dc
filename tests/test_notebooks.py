"""The notebooks of examples/ run in a Jupyter kernel, and their jobs are as short as announced."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
LINES = {  # the largest number of lines of the cell with the tag "job"
    "fit_and_predict": 6,
    "audit_models": 5,
    "audit_files": 4,
    "own_loop": 12,
    "simulate": 8,
}


def run(name: str, folder: Path) -> str:
    """Run the notebook in an empty folder; return what its cells print and show, as text."""
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs]
    assert not any(each.get("name") == "stderr" for each in outputs), texts
    return "\n".join(texts)


def test_every_notebook_is_listed():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(LINES)
    listed = re.findall(r"notebooks/(\w+)\.ipynb", (FOLDER.parent / "README.md").read_text())
    assert set(listed) == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_the_job_is_short_and_the_notebook_has_its_outputs(name):
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    (job,) = [cell for cell in book.cells if "job" in cell.metadata.get("tags", ())]
    assert len(job.source.splitlines()) <= LINES[name]
    assert all(len(line) <= 100 for line in job.source.splitlines())
    assert any(cell.get("outputs") for cell in book.cells)


def test_fit_and_predict(tmp_path):
    text = run("fit_and_predict", tmp_path)
    gap = dict(re.findall(r"^(.+): accuracy 0\.\d+, gap (0\.\d+)", text, re.MULTILINE))
    assert float(gap["FedAvg"]) > 0.2 and float(gap["target 0.02"]) < 0.05
    assert "# Model card" in text


def test_audit_models(tmp_path):
    text = run("audit_models", tmp_path)
    assert "Local and overall gaps differ: statistical parity by sex" in text


def test_audit_files(tmp_path):
    text = run("audit_files", tmp_path)
    assert re.search(r"sp by sex is at least \d+\.\d points .* above 5 points", text)
    assert (tmp_path / "report" / "report.html").exists()


def test_own_loop(tmp_path):
    text = run("own_loop", tmp_path)
    assert "within the target of 2.0" in text


def test_simulate(tmp_path):
    assert "within the target of 2.0" in run("simulate", tmp_path)

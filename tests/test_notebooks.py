"""The notebooks of examples/ run in a Jupyter kernel, and their jobs are as short as announced."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
LINES = {  # the largest number of lines of the cell with the tag "job"
    "audit_across_sites": 5,
    "fair_model": 5,
    "simulator_to_deployment": 8,
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
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert outputs and not any(output.output_type == "error" for output in outputs)


def test_audit_across_sites(tmp_path):
    text = run("audit_across_sites", tmp_path)
    overall = float(re.search(r"over all banks: (0\.\d+)", text)[1])
    within = float(re.search(r"within banks: (-?0\.\d+)", text)[1])
    assert overall > 0.1 and abs(within) < 0.03
    assert re.search(r"sp by sex is at least .* above 5 points", text)
    assert (tmp_path / "report" / "report.html").exists()


def test_fair_model(tmp_path):
    text = run("fair_model", tmp_path)
    gap = dict(re.findall(r"^(.+): accuracy 0\.\d+, gap (0\.\d+)", text, re.MULTILINE))
    assert float(gap["FedAvg"]) > 0.06 and float(gap["target 0.02"]) < 0.04
    assert "# Model card" in text


def test_simulator_to_deployment(tmp_path):
    text = run("simulator_to_deployment", tmp_path)
    assert "within the target of 2.0" in text
    assert "status: finished" in text and "held-out gap" in text
    assert (tmp_path / "deployed" / "model.safetensors").exists()

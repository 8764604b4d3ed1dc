"""The wheel and the source archive, built without a network."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPOILT = (
    "__pycache__",
    ".pyc",
    ".nbi",
    ".nbc",
    ".hypothesis",
    ".pytest_cache",
    ".ruff_cache",
    ".import_linter_cache",
    ".coverage",
    "/cells/",
)


def build(root: Path, out: Path, target: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=root)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The source archive as whoever downloads it has it."""
    archive = build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        assert len(set(file.getnames())) == len(file.getnames())
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


GENERATED = ("docs/api/", "docs/cli/")  # by docs/reference.py; not under version control


def files(folder: Path) -> set[str]:
    """Below it, links followed, caches aside."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for link in (path for path in folder.rglob("*") if path.is_symlink()):
        found |= {str((link / name).relative_to(folder)) for name in files(link.resolve())}
    return {name for name in found if not any(part in name for part in SPOILT)}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    about = f"fedgft-{PROJECT['version']}.dist-info/"
    held = {name for name in wheel.namelist() if not name.startswith(about)}
    assert held == {f"fedgft/{name}" for name in files(ROOT / "src" / "fedgft")}
    for name in (
        "py.typed",
        "templates/audit.html",
        "paper/published/table1.csv",
        "templates/flower/pyproject.toml",
        "templates/flower/fairapp/task.py",
    ):
        assert f"fedgft/{name}" in held
    assert f"{about}licenses/LICENSE" in wheel.namelist()


def test_the_wheel_says_what_it_is_and_needs(wheel):
    about = f"fedgft-{PROJECT['version']}.dist-info"
    said = message_from_string(wheel.read(f"{about}/METADATA").decode())
    assert (said["Name"], said["Version"]) == ("fedgft", PROJECT["version"])
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    bare = [need for need in said.get_all("Requires-Dist") if "extra ==" not in need]
    assert len(bare) == len(PROJECT["dependencies"])
    assert "fedgft = fedgft.cli:main" in wheel.read(f"{about}/entry_points.txt").decode()
    assert wheel.read(f"{about}/WHEEL").decode().count("Tag: py3-none-any") == 1


def test_the_source_archive_gives_the_same_wheel(unpacked, wheel, tmp_path):
    again = zipfile.ZipFile(build(unpacked, tmp_path, "wheel"))
    assert {n: again.read(n) for n in again.namelist()} == {
        n: wheel.read(n) for n in wheel.namelist()
    }


def test_the_source_archive_holds_what_its_tests_read(unpacked):
    """All that is not private to this checkout, as it is here, and no cache."""
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert not [name for name in held if any(part in name for part in SPOILT)]
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "hardening"):
        here = {f"{folder}/{name}" for name in files(ROOT / folder)}
        assert {name for name in here if not name.startswith(GENERATED)} <= held
    tables = [p for p in (ROOT / "results").rglob("*") if p.suffix in (".md", ".svg", ".jsonl")]
    assert tables and {str(path.relative_to(ROOT)) for path in tables} <= held
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, fedgft; dir(fedgft); print(sorted(m.split('.')[0] for m in sys.modules))"
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    for heavy in ("torch", "numba", "polars", "matplotlib", "numpy", "jaxtyping", "cyclopts"):
        assert f"'{heavy}'" not in loaded


def test_every_public_name_can_be_had():
    import fedgft

    assert all(getattr(fedgft, name) is not None for name in fedgft.__all__)


def test_every_extra_is_explained():
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in PROJECT["optional-dependencies"]:
        assert f"| `{extra}` |" in page

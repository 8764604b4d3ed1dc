"""Every public name explains itself: types, parameters, results, and examples that run."""

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fedgft

ROOT = Path(__file__).parents[1]
NAMES = fedgft.__all__
OPTIONAL = {"Penalty": "torch", "price_objective": "xgboost"}  # names, and the package they need
RETURNED = (
    "Audit",
    "DecisionRule",
    "FairModel",
    "Federation",
    "History",
    "SiteSums",
)  # functions make these
PACKAGES = {"algorithms", "data", "engine", "metrics", "study", "theory"}
every_name = pytest.mark.parametrize("name", NAMES)


def find(name: str) -> Any:
    """The public object; skips the test where its optional package is missing."""
    if name in OPTIONAL and find_spec(OPTIONAL[name]) is None:
        pytest.skip(f"fedgft.{name} needs {OPTIONAL[name]}, which is not installed")
    return getattr(fedgft, name)


def read_sections(doc: str) -> dict[str, str]:
    """The sections of a docstring by title; the text before the first is the section ""."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def read_entries(section: str) -> dict[str, str]:
    """The descriptions in a section by name; "a, b" describes both."""
    entries = {}
    for found in re.finditer(r"^(\S.*)\n((?:(?:    .*)?\n)*(?:    .*)?)", section, re.MULTILINE):
        text = " ".join(found[2].split())
        entries |= {name.strip(" *"): text for name in found[1].split(",")}
    return entries


def parameters(item: Any) -> list[inspect.Parameter]:
    """The parameters that a caller gives; those of an exception without its own are none."""
    if isinstance(item, type) and issubclass(item, Exception) and "__init__" not in vars(item):
        return []
    return list(inspect.signature(item).parameters.values())


def test_the_readers_of_docstrings_find_what_is_there():
    doc = """One.

    Parameters
    ----------
    a, b
        Both.
        More.
    *c
        Rest.

    Returns
    -------
    int
        It.
    """
    sections = read_sections(doc)
    assert list(sections) == ["", "Parameters", "Returns"]
    both = "Both. More."
    assert read_entries(sections["Parameters"]) == {"a": both, "b": both, "c": "Rest."}


@every_name
def test_the_first_line_is_one_sentence(name):
    text, *rest = find(name).__doc__.splitlines()
    assert text.endswith(".") and ". " not in text and len(text) < 100
    assert not rest or not rest[0].strip()


@every_name
def test_every_parameter_is_typed_and_explained(name):
    item = find(name)
    described = read_entries(read_sections(item.__doc__).get("Parameters", ""))
    wanted = parameters(item)
    assert [p.name for p in wanted if p.name not in described] == []
    assert [n for n in described if n not in {p.name for p in wanted}] == []
    untyped = [p.name for p in wanted if p.annotation is inspect.Parameter.empty]
    assert untyped == []


@every_name
def test_what_none_means_is_stated(name):
    item = find(name)
    described = read_entries(read_sections(item.__doc__).get("Parameters", ""))
    unclear = [
        p.name
        for p in parameters(item)
        if p.default is None and not re.search(r"\bNone\b|[Dd]efault", described.get(p.name, ""))
    ]
    assert unclear == []


@every_name
def test_functions_document_what_they_return(name):
    item = find(name)
    if isinstance(item, type):
        pytest.skip("a class")
    assert "Returns" in read_sections(item.__doc__)


@every_name
def test_methods_have_docstrings(name):
    item = find(name)
    if not isinstance(item, type):
        pytest.skip("not a class")
    own = {key: value for key, value in vars(item).items() if not key.startswith("_")}
    callables = {
        key: v for key, v in own.items() if inspect.isroutine(v) or isinstance(v, property)
    }
    assert [key for key in callables if not inspect.getdoc(getattr(item, key))] == []


def examples_of(name: str) -> doctest.DocTest:
    text = read_sections(find(name).__doc__).get("Examples", "")
    return doctest.DocTestParser().get_doctest(text, {}, name, name, 0)


@every_name
def test_examples_run_and_use_public_names_only(name):
    """An example imports what it needs, so that it can be pasted into a new session."""
    examples = examples_of(name)
    source = "".join(example.source for example in examples.examples)
    assert f"fedgft.{find(name).__name__}" in source or (name in RETURNED and source)
    assert "from fedgft" not in source
    used = set(re.findall(r"\bfedgft\.(\w+)", source))
    assert used <= {*NAMES, *PACKAGES}
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedgft.TargetMissedWarning)
        doctest.DocTestRunner(verbose=False).run(examples, out=found.append)
    assert not found, "".join(found)


def read_stub() -> tuple[dict[str, str], list[str]]:
    """The modules of the names that the stub imports, and its `__all__`."""
    tree = ast.parse((ROOT / "src" / "fedgft" / "__init__.pyi").read_text())
    modules = {}
    listed: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            modules |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    return modules, listed


def test_the_stub_and_the_lazy_table_agree():
    modules, listed = read_stub()
    lazy = {name: f"fedgft.{module}" for name, module in fedgft._MODULES.items()}
    packages = dict.fromkeys(fedgft._PACKAGES, "fedgft")
    assert modules == lazy | packages
    assert sorted(listed) == sorted(NAMES) and len(set(NAMES)) == len(NAMES) == 34


@pytest.mark.slow
def test_type_checkers_know_every_name(tmp_path):
    pytest.importorskip("pyrefly")
    lines = ["from typing import reveal_type", "import fedgft"]
    lines += [f"reveal_type(fedgft.{name})" for name in NAMES]
    lines += ["fedgft.simulat", "fedgft.Settings(rouds=3)"]
    (tmp_path / "reveal.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pyrefly", "check", "reveal.py", "--preset", "default"]
    options = ["--python-interpreter-path", sys.executable, "--output-format", "json"]
    search = ["--search-path", str(ROOT / "src")]
    done = subprocess.run(
        [*command, *options, *search], capture_output=True, text=True, cwd=tmp_path
    )
    found = json.loads(done.stdout)["errors"]
    revealed = [e["description"] for e in found if e["name"] == "reveal-type"]
    assert len(revealed) == len(NAMES)
    types = dict(
        zip(NAMES, (text.removeprefix("revealed type: ") for text in revealed), strict=True)
    )
    assert [name for name, kind in types.items() if kind in ("Any", "Unknown", "type[Any]")] == []
    assert types["Settings"] == "type[Settings]" and types["simulate"].endswith("-> History")
    wrong = {e["line"]: e["name"] for e in found if e["name"] != "reveal-type"}
    assert set(wrong) == {len(lines) - 1, len(lines)}  # the two misspelled names are errors

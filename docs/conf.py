"""Configuration of Sphinx: `make docs` writes the site to site/, without a network.

The source folder is the repository, so that pages link to results and examples as they do on a
code host. Two pages are completed when the site is built: docs/commands.md from the command line,
docs/python.md from the docstrings of the public names.
"""

import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

project = "fedgft"
author = "The fedgft authors"
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "*.md",
    "docs/**",
    "results/**.md",
    "examples/**.md",
    "hardening/*.md",
    "benchmarks/*.md",
]
exclude_patterns = ["**/.*", "CHANGELOG.md", "src", "tests", "site"]
html_theme = "furo"
html_title = "fedgft"
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
suppress_warnings = ["myst.header", "myst.strikethrough", "toc.not_included"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
default_role = "code"  # docstrings write `name`

TASKS = {  # every name of `fedgft`, in the order in which docs/python.md explains them
    "Train and predict": ("FairClassifier", "FairModel", "load_model"),
    "Load data": ("load", "Dataset"),
    "Simulate a federation": (
        "partition",
        "standardize",
        "simulate",
        "Settings",
        "History",
        "Federation",
    ),
    "Measure the gap of predictions": (
        "statistical_parity_difference",
        "demographic_parity_difference",
        "equal_opportunity_difference",
        "equalized_odds_difference",
        "false_positive_rate_difference",
        "predictive_parity_difference",
        "accuracy_parity_difference",
    ),
    "Audit across sites": ("measure", "measure_file", "read_sums", "SiteSums", "audit", "Audit"),
    "Train in your own loop": ("Penalty",),
    "Metrics": ("get_metric", "Metric"),
    "Errors and warnings": ("FedgftError", "NotEstimableWarning", "TargetMissedWarning"),
}
PACKAGES = ("metrics", "algorithms", "engine", "data", "auditing", "study", "theory", "flower")
PAGES = {
    "Start": ("install",),
    "How to": (
        "audit",
        "train",
        "target",
        "deployment",
        "private",
        "images",
        "metric",
        "algorithm",
        "side-by-side",
    ),
    "Background": (
        "idea",
        "simulator",
        "speed",
        "threat-model",
        "paper-vs-code",
        "unsupported",
        "faq",
    ),
    "Reference": ("commands", "python"),
}


def list_pages() -> str:
    """The table of contents, appended to the first page."""
    parts = []
    for title, names in PAGES.items():
        parts.append(
            f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"
        )
    return "\n".join(parts)


def describe_commands() -> str:
    """Every command and option, in Markdown."""
    app = import_module("fedgft.cli.app").app
    return app.generate_docs(output_format="markdown", heading_level=2)


def describe_names() -> str:
    """Every public name with its docstring: those of `fedgft` by task, then each package."""
    package = import_module("fedgft")
    lines = []
    seen = set()
    for title, names in TASKS.items():
        lines.append(f"## {title}\n\n```{{eval-rst}}")
        for name in names:
            value = getattr(package, name)
            seen.add(find_home(value))
            lines += list_directive(f"fedgft.{name}", value)
        lines.append("```\n")
    for short in PACKAGES:
        package = import_module(f"fedgft.{short}")
        lines.append(f"## {package.__name__}\n\n```{{eval-rst}}")
        for name in sorted(package.__all__, key=str.casefold):
            value = getattr(package, name)
            home = find_home(value)
            if callable(value) and home.startswith("fedgft.") and home not in seen:
                seen.add(home)
                lines += list_directive(f"{package.__name__}.{name}", value)
        lines.append("```\n")
    return "\n".join(lines)


def find_home(value: Any) -> str:
    """The module and the name under which a class or function was defined."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def list_directive(path: str, value: Any) -> list[str]:
    """The lines that insert the docstring of a class or function."""
    if isinstance(value, type):
        # methods that scikit-learn adds, whose docstrings refer to its own pages
        added = [name for name in dir(value) if re.fullmatch(r"set_\w+_request", name)]
        excluded = [f"   :exclude-members: {', '.join(added)}"] if added else []
        return [f".. autoclass:: {path}", "   :members:", *excluded, ""]
    return [f".. autofunction:: {path}", ""]


ADDED = {
    "docs/index": list_pages,
    "docs/commands": describe_commands,
    "docs/python": describe_names,
}


def complete_page(app: Any, name: str, source: list[str]) -> None:
    """Append what is generated to the pages in `ADDED`."""
    if name in ADDED:
        source[0] += "\n\n" + ADDED[name]()


def escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write |x| for absolute values, which reStructuredText would substitute."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def copy_files(app: Any, error: Exception | None) -> None:
    """Write the front page of the folder and copy the figures of results/ beside their pages."""
    if error is None:
        out = Path(app.outdir)
        target = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (out / "index.html").write_text(target, "utf-8")
        for figure in (ROOT / "results").rglob("*.svg"):
            place = out / figure.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(figure, place)


def setup(app: Any) -> None:
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("build-finished", copy_files)

"""Configuration of Sphinx: `make docs` writes the site to site/, without a network.

The source folder is the repository, so that pages link to results and examples as they do on a
code host. The pages of the reference are generated from docstrings and from the command line
(docs/reference.py). Notebooks are pages, too. Mathematics becomes MathML, which browsers show
without scripts.
"""

import json
import re
import shutil
import sys
import tomllib
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from myst_parser.sphinx_ import Parser

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

import reference  # noqa: E402

project = "fedgft"
author = "The fedgft authors"
copyright = "the fedgft authors, Apache License 2.0"
release = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
version = release
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
include_patterns = [
    "*.md",
    "docs/**.md",
    "results/**.md",
    "examples/**.md",
    "examples/notebooks/*.ipynb",
    "hardening/*.md",
    "benchmarks/*.md",
]
exclude_patterns = ["**/.*", "src", "tests", "site"]
html_theme = "furo"
html_title = f"fedgft {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # scripts cannot read other pages that were opened from a file
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div.highlight-sh pre, div.highlight-python pre, div.doctest pre"
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough", "dollarmath"]
suppress_warnings = ["myst.header", "myst.strikethrough", "toc.not_included"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
default_role = "code"  # docstrings write `name`

MENU = {
    "Tutorial": ("tutorial", "/examples/README"),
    "How-to": (
        "install",
        "audit",
        "weights",
        "monitoring",
        "next-site",
        "forms",
        "score-distributions",
        "databases",
        "regression",
        "rules",
        "train",
        "trees",
        "own-loop",
        "xgboost",
        "target",
        "deployment",
        "private",
        "images",
        "metric",
        "algorithm",
    ),
    "Explanation": ("idea", "methods", "simulator", "others", "threat-model", "unsupported", "faq"),
    "Reference": (
        "commands",
        "python",
        "data-sets",
        "bench",
        "tracks",
        "audit-reference",
        "train-reference",
    ),
    "Results": ("speed", "paper-vs-code", "/results/README"),
    "Project": ("/CHANGELOG", "/CONTRIBUTING", "/hardening/README", "/benchmarks/README"),
}


def list_menu() -> str:
    """The table of contents, appended to the first page."""
    parts = []
    for title, names in MENU.items():
        pages = "\n".join(names)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n")
    return "\n".join(parts)


def list_results() -> str:
    """The menu of the results: every page of results/."""
    folder = ROOT / "results"
    pages = [page.relative_to(folder).as_posix() for page in sorted(folder.rglob("*.md"))]
    pages = [page.removesuffix(".md") for page in pages if page != "README.md"]
    return "\n".join(reference.list_tree(pages))


def list_notebooks() -> str:
    """The menu of the gallery: the notebooks and the app for Flower."""
    books = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
    pages = [f"notebooks/{book.stem}" for book in books]
    return "\n".join(reference.list_tree([*pages, "flower/README"]))


ADDED = {
    "docs/index": list_menu,
    "docs/commands": reference.list_help,
    "docs/python": reference.list_names,
    "results/README": list_results,
    "examples/README": list_notebooks,
}


def complete_page(app: Any, name: str, source: list[str]) -> None:
    """Append what is generated to the pages in `ADDED`."""
    if name == "docs/python":
        source[0] = reference.link_names(source[0])
    if name in ADDED:
        source[0] += "\n\n" + ADDED[name]()


def escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write |x| for absolute values, which reStructuredText would substitute."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


class NotebookParser(Parser):
    """Reads a notebook as Markdown: its text, its code, and the text and pictures that it shows."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: Any) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            is_code = cell["cell_type"] == "code"
            parts.append(f"```python\n{text}\n```" if is_code else text)
            parts += filter(None, map(show_output, cell.get("outputs", ())))
        super().parse("\n\n".join(parts), document)


def show_output(output: dict[str, Any]) -> str:
    """What a cell prints or draws, in Markdown; pages have no room for other kinds of output."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Output of the cell](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""


def to_mathml(text: str, display: str) -> str:
    """The formula as MathML; browsers align cells by style only."""
    found = convert(text, display=display)
    return re.sub(r'columnalign="(\w+)"', r'style="text-align: \1"', found)


def render_inline(self: Any, node: Any) -> None:
    """Write a formula in a line of text as MathML."""
    self.body.append(to_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def render_block(self: Any, node: Any) -> None:
    """Write a formula of its own as MathML, with the number that its \\tag names."""
    text = node.astext()
    found = re.search(r"\\tag\{(.+?)\}", text)
    formula = to_mathml(text.replace(found[0], "") if found else text, "block")
    number = f'<span class="equation-number">({escape(found[1])})</span>' if found else ""
    self.body.append(f'<div class="equation">{formula}{number}</div>\n')
    raise nodes.SkipNode


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
    reference.write_pages()
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    app.add_html_math_renderer("mathml", (render_inline, None), (render_block, None))
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("build-finished", copy_files)

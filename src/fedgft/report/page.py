"""All sections on one page: a single HTML file that needs no network and no other file.

Text is escaped by the template; figures are embedded as images, so nothing in them can run.
"""

from base64 import b64encode
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fedgft.experiments.paper import NAMES
from fedgft.experiments.store import whole
from fedgft.report.section import SIGNS, Section, read
from fedgft.report.tables import MARK

PAPER = (
    'Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: '
    'Beyond Local Fairness"'
)


def write_page(folder: Path) -> list[Path]:
    """`index.html` of all sections in the folder, and `README.md`, which lists them."""
    found = [s for name in NAMES if (s := read(folder / f"{name}.json")) and _drawn(s, folder)]
    out = []
    for name, text in (("index.html", html(found, folder)), ("README.md", contents(found))):
        with whole(folder / name) as part:
            part.write_text(text, "utf-8")
        out.append(folder / name)
    return out


def _drawn(section: Section, folder: Path) -> bool:
    """All its figures are there; otherwise it waits until it is made again."""
    return all((folder / "figures" / f"{name}.svg").exists() for name, _ in section.figures)


def html(sections: Sequence[Section], folder: Path) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedgft.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html").render(
        sections=sections, signs=SIGNS, mark=MARK, paper=PAPER, version=version("fedgft"),
        picture=lambda name: _embedded(folder / "figures" / f"{name}.svg"),
    )  # fmt: skip


def contents(sections: Sequence[Section]) -> str:
    lines = [
        "# The paper, reproduced", "",
        f"{PAPER}. Every number here comes out of `fedgft reproduce`; `make results` makes all of "
        "it anew.", "",
        "| experiment | claims checked | hold | do not |", "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    for section in sections:
        holds = [f.holds for f in section.findings if f.holds is not None]
        lines.append(f"| [{section.title}]({section.name}.md) | {len(holds)} | {holds.count(True)} "
                     f"| {holds.count(False)} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _embedded(path: Path) -> str:
    return "data:image/svg+xml;base64," + b64encode(path.read_bytes()).decode("ascii")

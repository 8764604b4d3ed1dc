"""All sections on one page: a single HTML file that needs no network and no other file.

Text is escaped by the template; figures are embedded as images, so nothing in them can run.
"""

from base64 import b64encode
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fedgft.errors import FedgftError
from fedgft.experiments.paper import NAMES
from fedgft.files import whole
from fedgft.layout import SIGNS, escape_markdown, render, unescape_markdown
from fedgft.report.section import Section, read
from fedgft.report.tables import MARK

TITLE = "# The paper, reproduced"
HTML = "<!doctype html>\n<!-- fedgft reproduce -->"
PAPER = (
    'Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: '
    'Beyond Local Fairness"'
)


def check_place(folder: Path) -> None:
    """Nobody's own README or page is overwritten."""
    for name, start in (("README.md", TITLE), ("index.html", HTML)):
        path = folder / name
        if path.is_file() and not path.read_bytes().startswith(start.encode()):
            raise FedgftError(
                f"--out {folder}: holds a {name} that is not ours; name another folder"
            )


def write_page(folder: Path) -> list[Path]:
    """`index.html` of all sections in the folder, and `README.md`, which lists them."""
    found = [s for name in NAMES if (s := read(folder / f"{name}.json")) and _drawn(s, folder)]
    out = []
    for name, text in (("index.html", html(found, folder)), ("README.md", contents(folder))):
        with whole(folder / name) as part:
            part.write_text(text, "utf-8")
        out.append(folder / name)
    return out


def _drawn(section: Section, folder: Path) -> bool:
    """All its figures are there; otherwise it waits until it is made again."""
    return all((folder / "figures" / f"{name}.svg").exists() for name, _ in section.figures)


def html(sections: Sequence[Section], folder: Path) -> str:
    return render(
        "reproduction.html", sections=sections, signs=SIGNS, mark=MARK, paper=PAPER,
        version=version("fedgft"),
        picture=lambda name: _embedded(folder / "figures" / f"{name}.svg"),
    )  # fmt: skip


def contents(folder: Path) -> str:
    """A list of the Markdown pages that are there, read from the pages themselves."""
    lines = [
        TITLE, "",
        f"{PAPER}. Every number in these pages comes out of `fedgft reproduce`.", "",
        "| experiment | claims checked | hold | do not |", "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    total = [0, 0]
    for name in NAMES:
        page = folder / f"{name}.md"
        if page.is_file():
            title, *text = page.read_text("utf-8", "replace").splitlines() or [name]
            good, bad = (sum(line.startswith(f"- {SIGNS[is_so]} ") for line in text)
                         for is_so in (True, False))  # fmt: skip
            shown = escape_markdown(unescape_markdown(title.removeprefix("# ")))  # anybody's file
            link = f"[{shown}]({name}.md)"
            lines.append(f"| {link} | {good + bad} | {good} | {bad} |")
            total = [total[0] + good, total[1] + bad]
    lines.append(f"| all | {sum(total)} | {total[0]} | {total[1]} |")
    return "\n".join(lines) + "\n"


def _embedded(path: Path) -> str:
    return "data:image/svg+xml;base64," + b64encode(path.read_bytes()).decode("ascii")

"""Build the documentation: `python docs/build.py`, or `make docs`. The site is in site/.

Pages are the Markdown files of this folder, in the order of NAV. What they link to in the
repository comes along: Markdown as further pages, anything else as it is. Links are checked; a
broken one ends the build and is named. Nothing is fetched, and no page asks for anything outside.
"""

import posixpath
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import pairwise
from pathlib import Path, PurePosixPath

import reference
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

HERE = Path(__file__).parent
ROOT = HERE.parent
NAV = {
    "": ("index", "install"),
    "How to": (
        "audit", "train", "target", "deployment", "private", "images", "metric", "algorithm",
    ),
    "Background": ("idea", "simulator", "threat-model", "paper-vs-code", "faq"),
    "Reference": ("commands", "python"),
}  # fmt: skip
GENERATED = {"commands": reference.commands, "python": reference.sections}
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|//", re.IGNORECASE)  # another place: not checked


class BrokenSite(Exception):
    """All that is wrong with the pages, a line each."""


@dataclass
class Page:
    source: str  # in the repository, as in docs/idea.md
    title: str = ""
    html: str = ""
    headings: list[tuple[str, str]] = field(default_factory=list)  # of the second level: id, text
    links: list[tuple[str, str, str]] = field(default_factory=list)  # as written, file, anchor

    @property
    def place(self) -> str:
        """In the site."""
        return place(self.source)

    @property
    def anchors(self) -> set[str]:
        return {unescape(found) for found in re.findall(r'\bid="([^"]*)"', self.html)}


def place(source: str) -> str:
    """Where a file of the repository goes: docs/ is the root of the site."""
    path = PurePosixPath(source)
    path = path.relative_to("docs") if path.parts[0] == "docs" else path
    return str(path.with_suffix(".html") if path.suffix == ".md" else path)


def slug(text: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def flat(token: Token) -> str:
    return "".join(child.content for child in token.children or () if child.content)


class Site:
    """Pages and files by their source in the repository; `mistakes` names page and link."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.pages, self.files = root, dict[str, Page](), set[str]()
        self.mistakes: list[str] = []
        self.markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
        self.markdown.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
        self.markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
        self.templates = Environment(
            loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self.templates.filters["code"] = reference.inline

    def read(self, sources: Sequence[str]) -> None:
        """These pages, and all that can be reached from them."""
        waiting = list(sources)
        while waiting:
            source = waiting.pop(0)
            if source in self.pages:
                continue
            page = self.pages[source] = self._page(source)
            for _, target, _ in page.links:
                if target.endswith(".md"):
                    waiting.append(target)
                else:
                    self.files.add(target)

    def _page(self, source: str) -> Page:
        page = Page(source)
        tokens = self.markdown.parse((self.root / source).read_text("utf-8"))
        self._headings(page, tokens)
        for token in (child for each in tokens for child in each.children or ()):
            for name in ("href", "src"):
                if name in token.attrs:
                    token.attrs[name] = self._link(page, str(token.attrs[name]))
        page.html = self.markdown.renderer.render(tokens, self.markdown.options, {})
        made = GENERATED.get(Path(source).stem) if source.startswith("docs/") else None
        if made is not None:
            content = made()
            page.headings += [(part.anchor, part.name) for part in content]
            template = self.templates.get_template(f"{Path(source).stem}.html.j2")
            page.html += template.render(content=content)
        return page

    @staticmethod
    def _headings(page: Page, tokens: Sequence[Token]) -> None:
        seen: Counter[str] = Counter()
        for opening, inline in pairwise(tokens):
            if opening.type != "heading_open":
                continue
            text = flat(inline)
            name = slug(text)
            opening.attrs["id"] = f"{name}-{seen[name]}" if seen[name] else name
            seen[name] += 1
            page.title = page.title or text
            if opening.tag == "h2":
                page.headings.append((str(opening.attrs["id"]), text))

    def _link(self, page: Page, link: str) -> str:
        """The same link, between places of the site."""
        if ELSEWHERE.match(link):
            return link
        path, _, anchor = link.partition("#")
        folder = posixpath.dirname(page.source)
        target = posixpath.normpath(posixpath.join(folder, path)) if path else page.source
        if (self.root / target).is_dir() and (self.root / target / "README.md").is_file():
            target = posixpath.normpath(posixpath.join(target, "README.md"))
        if target.startswith("..") or not (self.root / target).is_file():
            self.mistakes.append(f"{page.source}: {link}: there is no such file")
            return link
        page.links.append((link, target, anchor))
        way = posixpath.relpath(place(target), posixpath.dirname(page.place) or ".")
        return f"{way}#{anchor}" if anchor else way

    def check(self) -> None:
        """Every anchor that a page links to is on the page it names."""
        for page in self.pages.values():
            for link, target, anchor in page.links:
                there = self.pages[target].anchors if target in self.pages else ()
                if anchor and anchor not in there:
                    self.mistakes.append(f"{page.source}: {link}: there is no such heading")
        if self.mistakes:
            raise BrokenSite("\n".join(self.mistakes))

    def write(self, out: Path) -> None:
        template = self.templates.get_template("page.html.j2")
        order = [self.pages[f"docs/{name}.md"] for names in NAV.values() for name in names]
        for page in self.pages.values():
            up = posixpath.relpath(".", posixpath.dirname(page.place) or ".")
            at = order.index(page) + 1 if page in order else len(order)
            after = order[at : at + 1]
            text = template.render(page=page, up=up, nav=list(self._menu()), next=after)
            (out / page.place).parent.mkdir(parents=True, exist_ok=True)
            (out / page.place).write_text(text, "utf-8")
        for name in (*self.files, "docs/style.css"):
            (out / place(name)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / name, out / place(name))

    def _menu(self) -> Iterator[tuple[str, list[Page]]]:
        for title, names in NAV.items():
            yield title, [self.pages[f"docs/{name}.md"] for name in names]


def build(out: Path, root: Path = ROOT) -> Site:
    """Write the site into a folder, which is made anew; with a broken link, nothing is."""
    listed = [f"docs/{name}.md" for names in NAV.values() for name in names]
    site = Site(root)
    for path in sorted((root / "docs").glob("*.md")):
        if f"docs/{path.name}" not in listed:
            site.mistakes.append(f"docs/{path.name}: NAV in docs/build.py does not list this page")
    site.read([*listed, "README.md"])
    site.check()
    shutil.rmtree(out, ignore_errors=True)
    site.write(out)
    return site


def main(arguments: Sequence[str]) -> int:
    out = Path(arguments[0]) if arguments else ROOT / "site"
    if out.exists() and not (out / "style.css").is_file():
        print(f"{out}: exists and is no site of ours; name another folder", file=sys.stderr)
        return 2
    try:
        site = build(out)
    except BrokenSite as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(site.pages)} pages: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

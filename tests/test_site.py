"""The documentation as a site: it builds without a network, and its reference is complete."""

import re
import socket
import sys
from functools import cache
from html import unescape
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

import fedgft
from fedgft.cli.commands import app

ROOT = Path(__file__).parents[1]
PUBLIC = ("metrics", "federated", "engine", "audit", "flower", "theory", "data", "experiments")


@pytest.fixture(scope="module")
def builder():
    """docs/build.py, which is a script and no part of the package."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield import_module("build")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def site(builder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *about: pytest.fail(f"a network: {about}"))
        out = tmp_path_factory.mktemp("docs") / "site"
        builder.build(out)
    return out


def text_of(path):
    return unescape(path.read_text("utf-8"))


class Links(HTMLParser):
    """All that a page asks for or leads to, and all its anchors."""

    def __init__(self, page):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors.add(found.get("id"))
        self.links += [(tag, found[name]) for name in ("href", "src") if name in found]


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert len(pages) >= 30
    inside = 0
    for page, found in pages.items():
        for tag, link in found.links:
            if re.match("https?:", link):
                assert tag == "a", f"{page.name} asks for {link}"
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or anchor in pages[target].anchors, f"{page.name}: {link}"
            inside += 1
    assert inside > 500
    assert not re.search(r"@import|url\(", (site / "style.css").read_text())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[x](nowhere.md)", "docs/faq.md: nowhere.md: there is no such file"),
        ("[x](../../outside.md)", "docs/faq.md: ../../outside.md: there is no such file"),
        ("[x](idea.md#nothing)", "docs/faq.md: idea.md#nothing: there is no such heading"),
        ("[x](#nothing)", "docs/faq.md: #nothing: there is no such heading"),
        ("![x](none.png)", "docs/faq.md: none.png: there is no such file"),
    ],
)
def test_a_broken_link_is_named(builder, tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(builder, "NAV", {"": ("faq", "idea")})
    monkeypatch.setattr(builder, "GENERATED", {})
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/faq.md", "docs/idea.md"):
        (tmp_path / name).write_text(f"# A page\n\n{text if 'faq' in name else ''}\n")
    with pytest.raises(builder.BrokenSite) as caught:
        builder.build(tmp_path / "site", tmp_path)
    assert str(caught.value) == said
    assert not (tmp_path / "site").exists()


def test_a_page_that_the_menu_lacks_is_named(builder, tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "NAV", {"": ("idea",)})
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/new.md", "docs/idea.md"):
        (tmp_path / name).write_text("# A page\n")
    with pytest.raises(builder.BrokenSite, match=r"new\.md"):
        builder.build(tmp_path / "site", tmp_path)


def test_text_is_escaped(builder, tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "NAV", {"": ("idea",)})
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A page\n")
    (tmp_path / "docs" / "style.css").write_text("")
    (tmp_path / "docs" / "idea.md").write_text(
        "# <b>A</b> & `<i>`\n\n<script>alert(1)</script> `a < b`\n"
    )
    builder.build(tmp_path / "site", tmp_path)
    html = (tmp_path / "site" / "idea.html").read_text()
    assert not re.search("<script|<b>|<i>", html) and "a &lt; b" in html
    assert builder.reference.inline("`a<b` & <c>") == "<code>a&lt;b</code> &amp; &lt;c&gt;"


def names():
    packages = (fedgft, *(import_module(f"fedgft.{name}") for name in PUBLIC))
    return [(package, name) for package in packages for name in package.__all__]


def test_every_public_name_is_told(builder, site):
    anchors = Links(site / "python.html").anchors
    assert len(names()) > 140
    missing = [
        f"{package.__name__}.{name}"
        for package, name in names()
        if f"{package.__name__}.{name}" not in anchors
        or not builder.reference.doc(package, name, getattr(package, name)).strip()
    ]
    assert not missing, f"not in the reference, or without a docstring: {missing}"


def test_a_name_without_a_docstring_is_seen(builder):
    from dataclasses import make_dataclass

    doc = builder.reference.doc
    assert doc(fedgft, "Made", make_dataclass("Made", [("x", int)])) == ""
    assert doc(fedgft, "nothing", lambda: None) == ""
    assert doc(fedgft, "no_such_constant", {}) == ""
    assert doc(fedgft, "CATALOG", fedgft.CATALOG).startswith("The metrics")


@cache
def arguments():
    """Of every command, those of `data` and `deploy` too: (command, argument)."""
    shared = app.meta.assemble_argument_collection(parse_docstring=True)
    waiting, found = [("fedgft", app)], [("fedgft", each) for each in shared if each.show]
    while waiting:
        path, each = waiting.pop()
        waiting += [(f"{path} {name}", each[name]) for name in each if not name.startswith("-")]
        if each.default_command is not None:
            listed = each.assemble_argument_collection(parse_docstring=True)
            found += [(path, argument) for argument in listed if argument.show]
    return found


def test_every_option_of_every_command_is_told_and_has_help(site):
    html = (site / "commands.html").read_text("utf-8")
    parts = dict(re.findall(r'<h2 id="[^"]*">([^<]*)</h2>(.*?)</section>', html, re.DOTALL))
    assert len(parts) == len({path for path, _ in arguments()}) >= 12
    assert len(arguments()) > 200
    for path, argument in arguments():
        (about,) = re.findall(
            rf"<dt [^>]*><code>{re.escape(', '.join(argument.names))}</code>.*?<dd>(.*?)</dd>",
            parts[path], re.DOTALL,
        )  # fmt: skip
        assert re.sub("<.*?>", "", about).strip(), f"{path}: {argument.names[0]} has no help"
        assert (argument.parameter.help or "").strip()


def test_defaults_and_choices_are_told(site):
    text = re.sub(r"<.*?>", "", text_of(site / "commands.html"))
    for line in (
        "--threshold default: 0.5",
        "--size default: 64",  # from its help
        "--data default: adult compas",
        "--sites required",
        "One of: dirichlet, iid, pure, column.",
    ):
        assert line in text

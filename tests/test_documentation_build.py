"""The documentation builds without warnings and without a network, and lists every name."""

import re
import shutil
import subprocess
import sys
from html import unescape
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType

import pytest

import fedgft
from fedgft.cli.app import app

pytestmark = pytest.mark.slow
pytest.importorskip("sphinx")
ROOT = Path(__file__).parents[1]
PACKAGES = ("metrics", "algorithms", "engine", "auditing", "flower", "theory", "data", "study")
NO_NETWORK = """
import socket, sys
socket.socket.connect = lambda *about: sys.exit(f"the build asks the network for {about}")
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a broken link or a docstring that is not read is a failure."""
    out = tmp_path_factory.mktemp("docs") / "site"
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    command = [sys.executable, "-c", NO_NETWORK, *options, str(ROOT), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def read(site, name):
    return unescape((site / f"{name}.html").read_text("utf-8"))


def test_every_public_name_has_a_page_with_types_and_guides(site):
    names = [name for name in fedgft.__all__ if callable(getattr(fedgft, name))]
    landing = read(site, "docs/python")
    for name in names:
        found = re.search(rf'href="(api/{name}(-class)?)\.html"', landing, re.IGNORECASE)
        assert found, name
        page = read(site, f"docs/{found[1]}")
        assert f">{name}<" in page and "See also:" in page
        value = getattr(fedgft, name)
        if isinstance(value, FunctionType):
            parts = ("Parameters", "Returns", "Return type", "Examples")
            assert not [part for part in parts if part not in page], name


def test_every_public_name_of_the_packages_has_an_entry(site):
    pages = "".join(path.read_text("utf-8") for path in (site / "docs" / "api").glob("*.html"))
    names = []
    for package in (fedgft, *(import_module(f"fedgft.{name}") for name in PACKAGES)):
        names += [
            (package, name)
            for name in package.__all__
            if isinstance(getattr(package, name), type | FunctionType)
        ]
    assert len(names) > 100
    undocumented = [name for package, name in names if not getattr(package, name).__doc__]
    missing = [name for _, name in names if f">{name}<" not in pages]
    assert not undocumented and not missing


def test_every_option_is_on_the_page_of_its_command(site):
    landing = read(site, "docs/commands")
    for name, command in list_commands(app):
        stem = name.removeprefix("fedgft ").replace(" ", "-")
        assert f'href="cli/{stem}.html"' in landing
        page = read(site, f"docs/cli/{stem}")
        for argument in command.assemble_argument_collection():
            for option in argument.names:
                assert option == "*" or option in page, f"{name} {option}"


def list_commands(group, path="fedgft"):
    """Yield the path and the app of every command below `group`."""
    for name in group:
        if name.startswith("-"):
            continue
        command = group[name]
        if command.default_command is not None:
            yield f"{path} {name}", command
        else:
            yield from list_commands(command, f"{path} {name}")


def test_pages_load_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        text = path.read_text("utf-8")
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text):
            assert not re.search(r'\b(src|href|data)="(https?:)?//', tag), f"{path.name}: {tag}"
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", path.read_text("utf-8")), path.name


def test_pages_have_menu_version_search_and_next(site):
    page = read(site, "docs/index")
    for caption in ("Tutorial", "How-to", "Explanation", "Reference", "Results", "Project"):
        assert f'<span class="caption-text">{caption}</span>' in page
    assert f"fedgft {version('fedgft')}" in page
    assert 'class="theme-toggle"' in page and 'placeholder="Search"' in page
    for link in ("../CHANGELOG", "../examples/README", "../results/README"):
        assert f'href="{link}.html"' in page
    inner = read(site, "docs/train")
    assert 'class="next-page"' in inner and 'class="prev-page"' in inner
    assert "copybutton.js" in inner and 'class="highlight-sh' in inner


def test_formulas_are_mathematics_with_visible_numbers(site):
    page = read(site, "docs/idea")
    assert page.count("<math ") > 50
    numbers = re.findall(r'class="equation-number">\((\d+)\)<', page)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)] and len(numbers) >= 2
    text = re.sub(r"<[^>]+>", "", page)
    assert "\\frac" not in text and "$$" not in text


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as run:
        yield run.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


CUT_OFF = """() => [...document.querySelectorAll('.equation-number')].filter(number => {
  number.scrollIntoView({block: 'center', inline: 'nearest', behavior: 'instant'});
  if (window.innerWidth > 1000) number.parentElement.scrollLeft = 0;  // no scrolling on a desk
  const box = number.getBoundingClientRect();
  const ends = [box.left + 1, box.right - 1];
  const y = box.top + box.height / 2;
  return !ends.every(x => number.contains(document.elementFromPoint(x, y)));
}).map(number => number.textContent)"""


@pytest.mark.parametrize("width", [1280, 390])
def test_no_number_of_an_equation_is_cut_off(site, browser, width):
    """D12: numbers lay outside of what the page shows, so that "by (1)" referred to nothing."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((site / "docs" / "idea.html").as_uri())
    assert page.locator(".equation-number").count() >= 2
    cut_off = page.evaluate(CUT_OFF)
    page.close()
    assert cut_off == []


def test_no_built_page_says_that_it_is_empty(site):
    """D11: the pages of commands and names said "until then it is empty", also when built."""
    for name in ("commands", "python"):
        page = read(site, f"docs/{name}")
        assert "until then" not in page and "is empty" not in page
        assert page.count('class="reference internal"') > 30


def test_search_finds_pages_without_a_network(site, browser):
    asked = []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: asked.append(str(error)))
    page.goto(f"{(site / 'search.html').as_uri()}?q=noise+floor")
    page.locator("ul.search li a", has_text="mathematics").first.wait_for(timeout=20_000)
    page.close()
    assert [each for each in asked if not each.startswith(("file:", "data:"))] == []

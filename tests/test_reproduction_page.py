"""The page of the reproduction in a real browser: complete, and readable on a phone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]

# What the page looks like from inside, left in its title for `--dump-dom` to show.
PROBE = """<script>addEventListener("load", () => {
  const pictures = [...document.querySelectorAll("img[data-figure]")];
  document.title = JSON.stringify({
    figures: pictures.map(i => [i.dataset.figure, i.complete && i.naturalWidth > 0]),
    sections: [...document.querySelectorAll("main > section")].map(s => s.id),
    links: [...document.querySelectorAll("nav a")].every(a => document.querySelector(a.hash)),
    outside: [...document.querySelectorAll("[src], link[href]")]
      .map(e => e.getAttribute("src") || e.getAttribute("href"))
      .filter(u => !u.startsWith("data:")),
    fits: document.documentElement.scrollWidth <= innerWidth,
    width: innerWidth,
  });
});</script></body>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compas) -> Path:
    out = tmp_path_factory.mktemp("results")
    command = [
        sys.executable,
        "-m",
        "fedgft",
        "reproduce",
        "table1",
        "pure",
        "simpson",
        "--data",
        "compas",
        "--seeds",
        "2",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return out


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """The document after it has loaded, and whatever was said on its console."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'profile'}",
        "--virtual-time-budget=10000",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def look(folder: Path, work: Path, *, width: int) -> tuple[dict, list[str]]:
    page = work / "page.html"
    page.write_text((folder / "index.html").read_text().replace("</body>", PROBE))
    # a window is never narrower than 500 pixels, so a phone is a frame in it
    frame = work / "frame.html"
    frame.write_text(
        f'<iframe src="page.html" width="{width}" height="800" onload="setTimeout(() => '
        'document.title = frames[0].document.title, 500)"></iframe>'
    )
    dom, said = browse(frame, "--allow-file-access-from-files", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None, dom[:500]
    return json.loads(title[1].replace("&amp;", "&")), said


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_is_complete_and_fits(folder: Path, tmp_path: Path, width: int):
    seen, said = look(folder, tmp_path, width=width)
    assert said == []
    assert seen["width"] == width and seen["fits"]
    assert seen["sections"] == ["table1", "pure", "simpson"] and seen["links"]
    assert seen["outside"] == []
    drawn = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert {name for name, _ in seen["figures"]} == drawn
    assert all(shown for _, shown in seen["figures"])


def test_a_broken_page_would_be_noticed(folder: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    page = (folder / "index.html").read_text()
    page = re.sub(r'base64,[^"]{200}', "base64,AAAA", page, count=1)
    (broken / "index.html").write_text(page.replace("<main>", "<main><script>nothing()</script>"))
    seen, said = look(broken, tmp_path, width=390)
    assert any("nothing is not defined" in line for line in said)
    assert sum(not shown for _, shown in seen["figures"]) == 1


def test_it_can_be_printed(folder: Path, tmp_path: Path):
    pdf = tmp_path / "page.pdf"
    browse(folder / "index.html", f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().count(b"/Type /Page\n") >= 3

"""Draw the pictures of the docs: `make pictures`, or `python docs/pictures.py`.

The commands of the guides run on the sample tables in an empty folder. Chromium without a window
opens the report; its first screen and its threshold explorer become pictures. What `fedgft audit`
prints becomes a drawing of a terminal, and the figures of `fedgft train` and `fedgft frontier` are
copied. Everything goes to docs/pictures.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
LARGEST = 150_000  # bytes of one picture
MEASURE = "--label repaid --group sex --score probability"
AUDIT = "audit north.json south.json east.json --outcome approved"
ABOUT = ("--title", "Loan approvals")


def run(folder: Path, *arguments: str, colors: bool = False) -> str:
    """Run a command of fedgft in the folder, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}
    if colors:
        environment |= {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "fedgft", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"fedgft {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def save(picture: bytes, name: str, *, width: int | None = None) -> None:
    """Write a PNG with 256 colors, which keeps text sharp and files small."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    if width and image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.LANCZOS)
    place = PICTURES / f"{name}.png"
    image.quantize(256, dither=Image.Dither.NONE).save(place, optimize=True)
    if place.stat().st_size > LARGEST:
        raise SystemExit(f"{place.name} has {place.stat().st_size:,} bytes: crop or shrink it")


def draw_terminal(text: str, title: str, name: str, *, lines: int) -> None:
    """Write the first lines of a colored output as a terminal in SVG, without foreign fonts."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(text.splitlines()[:lines])))
    drawing = console.export_svg(title=title)
    drawing = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"<!--.*?-->", "", drawing).replace("Fira Code", "ui-monospace")
    drawing = "\n".join(line.rstrip() for line in drawing.splitlines()) + "\n"
    (PICTURES / f"{name}.svg").write_text(drawing, "utf-8")


def photograph(browser: Any, report: Path) -> None:
    """Write the pictures of the report: the first screen and the threshold explorer."""
    page = browser.new_page(viewport={"width": 1100, "height": 800})
    page.goto(report.as_uri())
    page.wait_for_function(
        "[...document.querySelectorAll('[data-chart]')].every(c => c.dataset.drawn === 'yes')"
    )
    save(page.screenshot(), "report")
    heading = page.get_by_role("heading", name=re.compile("threshold", re.IGNORECASE)).first
    section = heading.locator("xpath=ancestor::*[self::section or self::figure or self::div][1]")
    place = (section if section.count() else heading).bounding_box()
    area = {"x": 0, "y": place["y"], "width": 1100, "height": min(place["height"], 700)}
    save(page.screenshot(full_page=True, clip=area), "explorer")
    page.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "data", "get", "loans")
        for bank in ("north", "south", "east"):
            run(folder, "measure", f"{bank}.csv", *MEASURE.split())
        audit = run(folder, *AUDIT.split(), *ABOUT, "--out", "report", colors=True)
        draw_terminal(audit, f"fedgft {AUDIT}", "terminal", lines=16)
        roles = ["loans.csv", "--label", "repaid", "--group", "sex", "--client", "bank"]
        run(folder, "train", *roles, "--target", "0.02")
        run(folder, "frontier", *roles, "--target", "0.02", "--points", "6")
        for source, picture in (
            ("fedgft-train/rounds.png", "train"),
            ("fedgft-train/before-after.png", "before-after"),
            ("fedgft-frontier/frontier.png", "frontier"),
        ):
            save((folder / source).read_bytes(), picture, width=1100)
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            photograph(browser, folder / "report" / "report.html")
            browser.close()


if __name__ == "__main__":
    main()

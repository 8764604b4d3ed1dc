"""Docs cannot drift: every Python block runs, every command in a shell block is one we have."""

import re
import shlex
from pathlib import Path

import pytest

from fedgft.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for text in re.findall(
            rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            found.append((page.name, text))
    return found


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks_run(page, code):
    exec(compile(code, page, "exec"), {})


def commands() -> list[str]:
    lines = [line for _, text in blocks("sh") for line in text.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("fedgft ")]


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    parsed = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
    assert callable(parsed[0])


def test_there_is_something_to_test():
    assert len(blocks("python")) >= 5
    assert len(commands()) >= 6

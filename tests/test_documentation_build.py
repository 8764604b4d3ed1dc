"""The documentation builds without warnings and without a network, and lists every name."""

import subprocess
import sys
from html import unescape
from importlib import import_module
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


def test_every_public_name_has_an_entry_and_a_docstring(site):
    page = unescape((site / "docs" / "python.html").read_text("utf-8"))
    names = []
    for package in (fedgft, *(import_module(f"fedgft.{name}") for name in PACKAGES)):
        names += [
            (package, name)
            for name in package.__all__
            if isinstance(getattr(package, name), type | FunctionType)
        ]
    assert len(names) > 100
    undocumented = [name for package, name in names if not getattr(package, name).__doc__]
    missing = [name for _, name in names if f">{name}<" not in page]
    assert not undocumented and not missing


def test_every_option_is_listed(site):
    page = unescape((site / "docs" / "commands.html").read_text("utf-8"))
    for name, command in list_commands(app):
        for argument in command.assemble_argument_collection():
            for option in argument.names:
                assert option in page, f"{name} {option}"


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
        for marker in ('src="http', 'rel="stylesheet" href="http', "@import"):
            assert marker not in text, f"{path.name}: {marker}"

"""Invalid input of every kind gives one line, exit code 2, and no files.

This is a sample; `hardening/bad_inputs.py` tries all cases, with limits on time and memory.
"""

import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from fedgft.cli.app import app
from fedgft.cli.options import read_path, read_whole_number

sys.path.append(str(Path(__file__).parents[1] / "hardening"))

from bad_cases import Case, cases, stock_sums, stock_tables
from bad_inputs import Outcome, called, contents, prepare, printed

EVERY = 22
# without a model, which would have to be trained first
QUICK = [c for c in cases() if not c.powerless and "safetensors" not in f"{c.shown} {[*c.files]}"]


@pytest.fixture(scope="module")
def pantry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("good") / "files"
    stock_tables(place)
    stock_sums(place)
    return place


@pytest.mark.parametrize("case", QUICK[::EVERY], ids=lambda case: f"{case.shown} {case.about}")
def test_one_line_says_what_is_wrong(case: Case, pantry: Path, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "case"
    prepare(case, folder, pantry)
    before = contents(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    capsys.readouterr()
    code = called(case)
    said = capsys.readouterr()
    outcome = Outcome(code, said.out, said.err, 0.0, before, contents(folder))
    assert not outcome.faults(case), said.err


def test_the_page_names_no_folder_of_the_machine(tmp_path):
    folder = tmp_path / "case-7"
    folder.with_suffix(".err").write_text(f"--out {folder}/there: no; in {folder}: nothing\n")
    assert printed(folder, ".err") == "--out FOLDER/there: no; in FOLDER: nothing\n"


def options() -> list[Any]:
    """Of every command; those of one command alone have the same types."""
    found = []
    waiting = [app]
    while waiting:
        command = waiting.pop()
        waiting += [command[name] for name in command if not name.startswith("-")]
        if command.default_command is not None:
            found += command.assemble_argument_collection()
    return found


@pytest.mark.parametrize(("kind", "converter"), [(int, read_whole_number), (Path, read_path)])
def test_no_command_has_a_way_of_its_own_to_read_numbers_and_paths(kind, converter):
    """A fraction is not cut, and an empty name is not the folder that we are in."""
    mine = [a for a in options() if a.hint is kind or kind in get_args(a.hint)]
    mine = [a for a in mine if a.name != "FILES"]  # of audit; its case is in the table
    assert len(mine) > 10
    assert [a.name for a in mine if a.parameter.converter is not converter] == []

"""The runner that caches finished work, and the command that reproduces the paper."""

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import fedgft.study.cache as cache_module
from fedgft.cli.reproduce import Name
from fedgft.data.generated import synthetic
from fedgft.errors import FedgftError
from fedgft.paper.cells import EXPERIMENTS, NAMES, Cell
from fedgft.paper.runner import Runner, make_batches
from fedgft.paper.section import Section, SectionResult, _stamp, read_section
from fedgft.store import exclusive_lock
from fedgft.study.cache import ResultCache, code_hash, data_hash, key_of
from fedgft.study.results import CURVES
from test_cli import FIELDS, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning"),
]


def small(name: str):
    return replace(synthetic(rows=600, features=3, seed=len(name)), name=name)


def runner(folder: Path, **options) -> Runner:
    return Runner(small, ResultCache(folder), **options)


CELLS = [
    Cell("compas", "heldout", "sp", seeds=2, method=m, alpha=a)
    for m in ("fedavg", "fairfed", "fedgft")
    for a in (0.5, 5.0)
]


# --- the runner


def test_a_cached_record_equals_the_trained_one(tmp_path):
    first = runner(tmp_path).records(CELLS)

    def never(what: str, amount: int) -> None:
        raise AssertionError(f"trained again: {what}")

    again = runner(tmp_path, on_progress=never)
    assert again.work(CELLS) == 0
    for a, b in zip(first, again.records(CELLS), strict=True):
        assert (a.cell, a.row, a.chosen, a.notes) == (b.cell, b.row, b.chosen, b.notes)
        for name in CURVES:
            np.testing.assert_array_equal(a.curves[name], b.curves[name])


def test_the_progress_bar_counts_all_work(tmp_path):
    done: list[tuple[str, int]] = []
    busy = runner(tmp_path, on_progress=lambda *said: done.append(said))
    both = [*CELLS, *(replace(c, metric="eop") for c in CELLS)]
    expected = busy.work(both)
    busy.records(both)
    beyond = "learning rate 0."  # a rate beyond the edge of the grid comes on top of the bar
    assert sum(amount for what, amount in done if beyond not in what) == expected > 0


def test_a_cell_does_not_depend_on_the_others_in_its_batch(tmp_path):
    alone_ = runner(tmp_path / "a")
    among = runner(tmp_path / "b").records(CELLS)
    for cell, record in zip(CELLS, among, strict=True):
        (one,) = alone_.records([cell])
        for name in CURVES:
            np.testing.assert_array_equal(one.curves[name], record.curves[name])


def test_hyper_parameters_share_a_batch():
    cells = EXPERIMENTS["lambda"].cells("compas", "paper", seeds=20)
    assert [len(b) for b in make_batches(cells)] == [4, 4]  # four λ of 20 replicates, twice
    many = [replace(cells[0], lam=float(i + 1), seeds=20) for i in range(12)]
    assert [len(b) for b in make_batches(many)] == [5, 5, 2]  # 100 runs at most
    mixed = [c for c in CELLS] + [replace(c, epochs=2) for c in CELLS]
    assert sorted(map(len, make_batches(mixed))) == [2] * 6
    assert {c for b in make_batches(mixed) for c in b} == set(mixed)


def test_the_key_is_over_spec_data_and_code(monkeypatch):
    data = small("compas")
    cell = CELLS[0]
    key = key_of(cell, None, data)
    assert key_of(cell, None, small("compas")) == key
    assert key_of(replace(cell, alpha=0.6), None, data) != key
    features = data.features.copy()
    features[7, 0] += 1e-3
    assert key_of(cell, None, replace(data, features=features)) != key
    monkeypatch.setattr(cache_module, "code_hash", lambda: "another engine")
    assert key_of(cell, None, data) != key


def test_a_data_set_that_was_hashed_is_not_kept():
    data = small("compas")
    data_hash(data)
    kept = weakref.ref(data)
    del data
    gc.collect()
    assert kept() is None


def test_pages_are_stamped_with_the_code_that_lays_them_out(monkeypatch):
    made = SectionResult(Section("a", "b", "c", "d", "e", (), (), (), (), ()), [], {})
    read = Path.read_bytes
    before = _stamp(made)
    assert _stamp(made) == before
    for name in ("formatting.py", "section.py"):
        with monkeypatch.context() as patch:
            more = lambda path, name=name: read(path) + b"#" * (path.name == name)  # noqa: E731
            patch.setattr(Path, "read_bytes", more)
            assert _stamp(made) != before, name


def test_the_code_hash_sees_the_engine_and_not_the_report(monkeypatch, tmp_path):
    import shutil

    root = Path(cache_module.fedgft.__file__).parent
    copy = tmp_path / "fedgft"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache_module.fedgft, "__file__", str(copy / "__init__.py"))
    fresh = code_hash.__wrapped__
    before = fresh()
    assert before == code_hash()
    (copy / "study" / "figures.py").write_text("# drawn differently\n")
    assert fresh() == before
    (copy / "engine" / "plan.py").write_text("# counted differently\n")
    assert fresh() != before


def test_every_hashed_source_exists():
    """A file that moves must keep its place in the list, or its code no longer counts."""
    root = Path(cache_module.fedgft.__file__).parent
    for name in cache_module.HASHED_SOURCES:
        assert (root / name).is_file() or list((root / name).rglob("*.py")), name


BROKEN = [
    "",
    "{",
    "[]",
    '{"key": "other"}',
    '{"key": "KEY"}',
    "[" * 100_000,
    '{"key": "KEY", "row": {}, "rounds": [1], "curves": 3}',
    '{KEPT, "rounds": [1]}',
    '{KEPT, "row": {"accuracy": NaN}}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_cannot_be_read_is_computed_again(tmp_path, text):
    busy = runner(tmp_path)
    (expected,) = busy.records(CELLS[:1])
    (file,) = tmp_path.glob("*.json")
    file.write_text(text.replace("KEY", file.stem).replace("KEPT", file.read_text()[1:-1]))
    (found,) = runner(tmp_path).records(CELLS[:1])
    assert {**found.row, "seconds": 0} == {**expected.row, "seconds": 0}
    assert json.loads(file.read_text())["key"] == file.stem


def test_two_runs_do_not_share_a_folder(tmp_path):
    with (
        exclusive_lock(tmp_path / "cells"),
        pytest.raises(FedgftError, match="another run is writing there"),
        exclusive_lock(tmp_path / "cells"),
    ):
        pass
    ours = tmp_path / ".table1.md.part"
    theirs = tmp_path / "deep" / ".film.part"
    theirs.parent.mkdir()
    for file in (ours, theirs, tmp_path / ".download.part"):
        file.write_text("half")
    with exclusive_lock(tmp_path / "cells"):
        assert not ours.exists()
        assert theirs.exists() and (tmp_path / ".download.part").exists()


def test_only_open_hyperparameters_are_reported_as_chosen(tmp_path):
    open_ = CELLS[4]
    fixed = replace(CELLS[4], lam=10.0, lr=0.01)
    first, second = runner(tmp_path).records([open_, fixed])
    assert [text.split(": ")[1].split()[0] for text in first.chosen] == ["learning", "lam"]
    assert second.chosen == ()


def test_failed_selections_are_kept_in_the_notes(tmp_path):
    few = Runner(
        lambda name: replace(synthetic(rows=40, features=2), name=name), ResultCache(tmp_path)
    )
    cells = [replace(CELLS[4], alpha=alpha, metric="eop") for alpha in (0.5, 5.0)]
    for cell, record in zip(cells, few.records(cells), strict=True):
        said = [note for note in record.notes if "too small to choose" in note]
        assert said and all(f"alpha {cell.alpha:g}:" in note for note in said)


# --- the command


def test_the_command_names_every_experiment():
    assert get_args(Name) == (*NAMES, "all")


def test_reproduce_writes_everything_and_prints_only_json(capsys, tmp_path, compas):
    command = ("reproduce", "pure", "simpson", "--data", "compas", "--seeds", 2, "--out", tmp_path)
    code, out, err = run(capsys, *command, "--json")
    rows = json.loads(out)
    assert code == 0 and "wrote" in err
    trained = [r for r in rows if r["experiment"] == "pure"]
    assert len(trained) == 2 * 2 * len(EXPERIMENTS["pure"].variants)
    for row in trained:
        assert {
            *FIELDS,
            "published_accuracy",
            "published_accuracy_bracket",
            "published_gap",
            "published_gap_bracket",
        } <= set(row)
    (simpson,) = [r for r in rows if r.get("example") == "simpson"]
    assert simpson["gap"] == pytest.approx(0.48)
    for name in (
        "index.html",
        "README.md",
        "pure.md",
        "pure.parquet",
        "simpson.md",
        "figures/simpson.svg",
        "figures/simpson.png",
        "figures/pure-compas-heldout.svg",
    ):
        assert (tmp_path / name).stat().st_size > 0
    text = (tmp_path / "pure.md").read_text()
    for name in re.findall(r"\]\((figures/.*?)\)", text):
        assert (tmp_path / name).exists()
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.svg")}
    code, again, _ = run(capsys, *command, "--json")
    assert again == out  # nothing was trained, and nothing drawn
    assert {p: p.stat().st_mtime_ns for p in files} == files
    simpson = tmp_path / "simpson.md"
    before = simpson.read_text()
    simpson.write_text("from another branch")  # and then a figure is lost, too
    (tmp_path / "figures" / "pure-compas-heldout.svg").unlink()
    run(capsys, "reproduce", "simpson", "--out", tmp_path)
    assert simpson.read_text() == before
    assert 'id="pure"' not in (tmp_path / "index.html").read_text()
    run(capsys, *command)
    assert 'id="pure"' in (tmp_path / "index.html").read_text()


def test_one_experiment_is_shown_with_its_tables(capsys, tmp_path):
    code, out, _ = run(capsys, "reproduce", "simpson", "--out", tmp_path)
    assert code == 0
    assert "SP is 0.00 in each department and 0.48 overall" in out
    assert "both together" in out and "26 of 100 (26%)" in out
    page = (tmp_path / "index.html").read_text()
    assert page.count("<section") == 1 and "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name an experiment: table1"),
        (("table2",), "table2"),
        (("table1", "--data", "celeba"), "--images must name the folder"),
        (("table1", "--seeds", "0"), "--seeds must be at least 1"),
        (("table1", "--protocol", "mine"), "mine"),
        (("table1", "--protocol"), "--protocol needs a value"),
        (("table1", "--data"), "--data needs a value"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(capsys, tmp_path, arguments, says):
    code, out, err = run(capsys, "reproduce", *arguments, "--out", tmp_path / "new")
    assert code == 2 and out == "" and says in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["README.md", "index.html"])
def test_files_of_the_user_are_not_overwritten(capsys, tmp_path, name):
    (tmp_path / name).write_text("my project")
    code, _, err = run(capsys, "reproduce", "simpson", "--out", tmp_path)
    assert code == 2 and f"holds a {name} that is not ours" in err
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_pages_made_elsewhere_stay_listed(capsys, tmp_path):
    """In a fresh clone the Markdown of all experiments is there, and nothing else of them."""
    (tmp_path / "table1.md").write_text("# Table 1: all of it\n\n- ✓ So.\n- ✗ Not so.\n- · Hm.\n")
    run(capsys, "reproduce", "simpson", "--out", tmp_path)
    listed = (tmp_path / "README.md").read_text()
    assert "| [Table 1: all of it](table1.md) | 2 | 1 | 1 |" in listed and "simpson.md" in listed


def test_a_damaged_section_is_left_out(capsys, tmp_path):
    run(capsys, "reproduce", "simpson", "--out", tmp_path)
    section = tmp_path / "simpson.json"
    good = section.read_text()
    for bad in (good.replace('"stubs": 1', '"stubs": "x"'), good[:-5], "[" * 100_000):
        section.write_text(bad)
        assert read_section(section) is None
    assert run(capsys, "reproduce", "simpson", "--out", tmp_path)[0] == 0
    assert section.read_text() == good

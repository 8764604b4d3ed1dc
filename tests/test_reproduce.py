"""The paper as data, the runner that keeps what is done, and what is said about it."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedgft.experiments.shelf as shelf_module
from fedgft.data import load
from fedgft.data.synthetic import synthetic
from fedgft.experiments.paper import DATA, EXPERIMENTS, FOUR, NAMES
from fedgft.experiments.published import differs, labelled, near, published
from fedgft.experiments.run import CURVES, Record, Runner, batches
from fedgft.experiments.shelf import Shelf, alone, code_hash, key_of
from fedgft.experiments.spec import Cell
from fedgft.report.claims import CLAIMS
from fedgft.report.claims.table import prices
from fedgft.report.page import html
from fedgft.report.section import Section, markdown
from fedgft.report.tables import MARK, Table, against_published, decisions
from fedgft.types import FedgftError
from test_cli import FIELDS, run

pytestmark = pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "src" / "fedgft" / "experiments" / "published"


@pytest.fixture(scope="module")
def compas():
    try:
        return load("compas")
    except FedgftError as error:
        pytest.skip(f"COMPAS cannot be had: {error}")


def small(name: str):
    return replace(synthetic(rows=600, features=3, seed=len(name)), name=name)


def runner(folder: Path, **options) -> Runner:
    return Runner(small, Shelf(folder), **options)


CELLS = [
    Cell("compas", "heldout", "sp", seeds=2, method=m, alpha=a)
    for m in ("fedavg", "fairfed", "fedgft") for a in (0.5, 5.0)
]  # fmt: skip


# --- experiments are data


def test_every_experiment_has_its_cells_its_claims_and_a_place_on_the_page():
    for name, experiment in EXPERIMENTS.items():
        cells = experiment.cells("compas", "paper", seeds=3)
        assert len(set(cells)) == len(cells) == 2 * len(experiment.variants)
        assert name in NAMES and name in CLAIMS
        assert {c.seeds for c in cells} == {3}
        for field in experiment.varied:
            assert len({getattr(c, field) for c in cells}) > 1


def test_table_1_has_72_published_numbers_in_the_two_tables_we_run():
    found = 0
    for data in DATA:
        for cell in EXPERIMENTS["table1"].cells(data, "paper", seeds=20):
            known = published("table1", cell)
            found += sum(known[f"published_{what}"] is not None for what in ("accuracy", "gap"))
            assert (known["published_gap"] is None) == (cell.method not in FOUR)
            assert published("table1", replace(cell, protocol="heldout"))["published_gap"] is None
    assert found == 72


@pytest.mark.parametrize(("name", "numbers"), [("penalty", 36), ("pure", 15)])
def test_the_other_tables_are_compas_alone(name, numbers):
    """Of the penalty's table each l1 number is there twice: for both values of λ."""
    for data, expected in (("compas", numbers), ("adult", 0)):
        known = [published(name, c) for c in EXPERIMENTS[name].cells(data, "paper", seeds=20)]
        values = [k[f"published_{what}"] for k in known for what in ("accuracy", "gap")]
        assert sum(v is not None for v in values) == expected


def test_published_numbers_are_those_of_the_file():
    line = next(r for r in csv.DictReader((TABLES / "table1.csv").read_text().splitlines())
                if (r["dataset"], r["alpha"], r["method"]) == ("adult", "5", "fedgft"))  # fmt: skip
    cell = Cell("adult", "paper", "eop", method="fedgft", alpha=5.0)
    known = published("table1", cell)
    assert known["published_gap"] == pytest.approx(float(line["eop"]) / 100)
    assert known["published_gap_bracket"] == pytest.approx(float(line["eop_se"]) / 100)
    assert known["published_accuracy"] is None  # the accuracy column is that of the SP runs
    with_sp = published("table1", replace(cell, metric="sp"))
    assert with_sp["published_accuracy"] == pytest.approx(float(line["accuracy"]) / 100)


def test_near_and_differs():
    row = {"published_gap": 0.05, "published_gap_bracket": 0.002}
    assert near(row, "gap", 0.0599) and differs(row, "gap", 0.0599)  # one point, five brackets
    assert not near(row, "gap", 0.0601)
    assert not differs(row, "gap", 0.0539)
    assert differs(row, "gap", 0.0541)
    assert not near(row, "gap", None) and not differs(row, "gap", None)


# --- the runner


def test_a_record_from_the_shelf_is_the_one_that_was_trained(tmp_path):
    first = runner(tmp_path).records(CELLS)

    def never(what: str, amount: int) -> None:
        raise AssertionError(f"trained again: {what}")

    again = runner(tmp_path, on_progress=never)
    assert again.work(CELLS) == 0
    for a, b in zip(first, again.records(CELLS), strict=True):
        assert (a.cell, a.row, a.chosen, a.notes) == (b.cell, b.row, b.chosen, b.notes)
        for name in CURVES:
            np.testing.assert_array_equal(a.curves[name], b.curves[name])


def test_work_is_what_the_progress_bar_sees(tmp_path):
    done: list[int] = []
    busy = runner(tmp_path, on_progress=lambda what, amount: done.append(amount))
    both = [*CELLS, *(replace(c, metric="eop") for c in CELLS)]
    expected = busy.work(both)
    busy.records(both)
    assert sum(done) == expected > 0


def test_a_cell_does_not_depend_on_the_others_in_its_batch(tmp_path):
    alone_, among = runner(tmp_path / "a"), runner(tmp_path / "b").records(CELLS)
    for cell, record in zip(CELLS, among, strict=True):
        (one,) = alone_.records([cell])
        for name in CURVES:
            np.testing.assert_array_equal(one.curves[name], record.curves[name])


def test_hyper_parameters_share_a_batch():
    cells = EXPERIMENTS["lambda"].cells("compas", "paper", seeds=20)
    assert [len(b) for b in batches(cells)] == [4, 4]  # four λ of 20 replicates, twice
    many = [replace(cells[0], lam=float(i + 1), seeds=20) for i in range(12)]
    assert [len(b) for b in batches(many)] == [5, 5, 2]  # 100 runs at most
    mixed = [c for c in CELLS] + [replace(c, epochs=2) for c in CELLS]
    assert sorted(map(len, batches(mixed))) == [2] * 6
    assert {c for b in batches(mixed) for c in b} == set(mixed)


def test_the_key_is_over_spec_data_and_code(monkeypatch):
    data, cell = small("compas"), CELLS[0]
    key = key_of(cell, None, data)
    assert key_of(cell, None, small("compas")) == key
    assert key_of(replace(cell, alpha=0.6), None, data) != key
    features = data.features.copy()
    features[7, 0] += 1e-3
    assert key_of(cell, None, replace(data, features=features)) != key
    monkeypatch.setattr(shelf_module, "code_hash", lambda: "another engine")
    assert key_of(cell, None, data) != key


def test_the_code_hash_sees_the_engine_and_not_the_report(monkeypatch, tmp_path):
    import shutil

    root = Path(shelf_module.fedgft.__file__).parent
    copy = tmp_path / "fedgft"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(shelf_module.fedgft, "__file__", str(copy / "__init__.py"))
    fresh = code_hash.__wrapped__
    before = fresh()
    assert before == code_hash()
    (copy / "report" / "figures.py").write_text("# drawn differently\n")
    assert fresh() == before
    (copy / "engine" / "vector.py").write_text("# counted differently\n")
    assert fresh() != before


BROKEN = ["", "{", "[]", '{"key": "other"}', '{"key": "KEY"}',
          '{"key": "KEY", "row": {}, "rounds": [1], "curves": 3}']  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_what_cannot_be_read_is_computed_again(tmp_path, text):
    busy = runner(tmp_path)
    (expected,) = busy.records(CELLS[:1])
    (file,) = tmp_path.glob("*.json")
    file.write_text(text.replace("KEY", file.stem))
    (found,) = runner(tmp_path).records(CELLS[:1])
    assert {**found.row, "seconds": 0} == {**expected.row, "seconds": 0}
    assert json.loads(file.read_text())["key"] == file.stem


def test_two_runs_do_not_share_a_folder(tmp_path):
    with (
        alone(tmp_path / "cells"),
        pytest.raises(FedgftError, match="another run is writing there"),
        alone(tmp_path / "cells"),
    ):
        pass
    (tmp_path / ".table1.md.part").write_text("half")
    with alone(tmp_path / "cells"):
        assert not list(tmp_path.rglob("*.part"))


# --- what is said


def test_table_1_on_compas_under_the_papers_protocol(compas, tmp_path):
    """All 36 numbers of COMPAS near, all 9 of FedGFT, and the smallest gap in all 6 cells."""
    busy = Runner(lambda name: compas, Shelf(tmp_path))
    experiment = EXPERIMENTS["table1"]
    records = labelled("table1", busy.records(experiment.cells("compas", "paper", seeds=20)))
    said = list(CLAIMS["table1"](records))
    assert said[0].text.startswith("36 of 36 published numbers")
    assert said[1].text.startswith("9 of 9 published numbers of FedGFT")
    ranking = next(f for f in said if "smallest gap" in f.text)
    assert ranking.holds and "6 of 6 cells" in ranking.text
    assert "EOP of FairFed" not in ranking.text
    assert MARK not in str(against_published(experiment, records).rows)
    for price in prices(records):  # by hand: the same replicates, paired
        where = price.record.cell.alpha, price.record.cell.metric
        mine = [r for r in records if (r.cell.alpha, r.cell.metric) == where]
        finals = {r.cell.method: r.curves["accuracy"][-1] for r in mine}
        assert finals[price.best].mean() == max(finals[m].mean() for m in FOUR)
        apart = finals[price.best] - finals["fedgft"]
        assert price.behind == pytest.approx(apart.mean())
        assert price.errors == pytest.approx(2 * apart.std(ddof=1) / np.sqrt(20))


def altered(record: Record, **fields) -> Record:
    return replace(record, row={**record.row, **fields})


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Table 1 on a small population: real records, quickly."""
    experiment = EXPERIMENTS["table1"]
    made = runner(tmp_path_factory.mktemp("shelf"))
    return experiment, labelled(
        "table1", made.records(experiment.cells("compas", "paper", seeds=2))
    )


def test_a_number_that_is_far_off_is_marked_and_named(quick):
    experiment, records = quick
    at = records[0].row["published_accuracy"]
    fine = [altered(r, accuracy=r.row["published_accuracy"] or at, gap_soft=r.row["published_gap"])
            for r in records]  # fmt: skip
    assert MARK not in str(against_published(experiment, fine).rows)
    assert next(iter(CLAIMS["table1"](fine))).holds
    far = [altered(fine[0], accuracy=at - 0.9), *fine[1:]]
    assert str(against_published(experiment, far).rows).count(MARK) == 1
    said = next(iter(CLAIMS["table1"](far)))
    assert said.holds is False
    assert "35 of 36" in said.text and "accuracy, COMPAS, alpha 0.5, SP, FedAvg" in said.text


def test_a_gap_that_is_not_estimable_is_a_dash_and_never_the_smallest(quick):
    experiment, records = quick
    lost = {"gap_soft": None, "gap_soft_sd": None, "gap_hard_test": None, "gap_hard_test_sd": None,
            "gap_hard_test_low": None, "gap_hard_test_high": None, "floor": None}  # fmt: skip
    gone = [altered(r, **lost) if r.cell.method == "fedgft" else r for r in records]
    table = decisions(experiment, gone)
    assert all("–" in row for row in table.rows if row[1] == "FedGFT")
    ranking = next(f for f in CLAIMS["table1"](gone) if "smallest gap" in f.text)
    assert ranking.holds is False and "FedGFT not estimable" in ranking.text


def test_text_is_escaped_wherever_it_goes(tmp_path):
    bad = '<script>alert("x")</script> | & [b]'
    table = Table(bad, ("a", bad), (("1", bad),), 1, (bad,))
    section = Section("table1", bad, bad, bad, bad, (), (table,), (), (bad,), (bad,))
    page = html([section], tmp_path)
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert re.search(r"\| 1 \| .*\\\| & \[b\] \|", markdown(section))


# --- the command


def test_reproduce_writes_everything_and_prints_only_json(capsys, tmp_path, compas):
    command = ("reproduce", "pure", "simpson", "--data", "compas", "--seeds", 2, "--out", tmp_path)
    code, out, err = run(capsys, *command, "--json")
    rows = json.loads(out)
    assert code == 0 and "wrote" in err
    trained = [r for r in rows if r["experiment"] == "pure"]
    assert len(trained) == 2 * 2 * len(EXPERIMENTS["pure"].variants)
    for row in trained:
        assert {*FIELDS, "published_accuracy", "published_accuracy_bracket", "published_gap",
                "published_gap_bracket"} <= set(row)  # fmt: skip
    (simpson,) = [r for r in rows if r.get("example") == "simpson"]
    assert simpson["gap"] == pytest.approx(0.48)
    for name in ("index.html", "README.md", "pure.md", "pure.parquet", "simpson.md",
                 "figures/simpson.svg", "figures/simpson.png",
                 "figures/pure-compas-heldout.svg"):  # fmt: skip
        assert (tmp_path / name).stat().st_size > 0
    text = (tmp_path / "pure.md").read_text()
    for name in re.findall(r"\]\((figures/.*?)\)", text):
        assert (tmp_path / name).exists()
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.svg")}
    code, again, _ = run(capsys, *command, "--json")
    assert again == out  # nothing was trained, and nothing drawn
    assert {p: p.stat().st_mtime_ns for p in files} == files


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
        (("table1", "--data", "celeba"), "images have to be supplied"),
        (("table1", "--seeds", "0"), "--seeds must be at least 1"),
        (("table1", "--protocol", "mine"), "mine"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(capsys, tmp_path, arguments, says):
    code, out, err = run(capsys, "reproduce", *arguments, "--out", tmp_path / "new")
    assert code == 2 and out == "" and says in err
    assert not (tmp_path / "new").exists()

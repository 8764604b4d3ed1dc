"""Passes over the data and objects in memory do not grow with the load.

benchmarks/load.py measures seconds; tests do not.
"""

import weakref
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.auditing import audit, measure, write_sums
from fedgft.auditing import site_file as gathering
from fedgft.auditing.measurement import read_batches
from fedgft.auditing.measurement_task import Measurement
from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.engine.plan import index_rows, sample_cohort
from fedgft.flower.messages import most_common
from fedgft.metrics import CATALOG
from fedgft.study import Study, client_rows, get_protocol
from fedgft.sums import Sums


def test_a_client_more_costs_no_pass_over_all_clients(monkeypatch):
    calls = []
    rows = Sums.rows
    monkeypatch.setattr(Sums, "rows", lambda tally: calls.append(1) or rows(tally))

    def counted(clients: int) -> int:
        study = Study(synthetic(rows=600, seed=3), get_protocol("paper"), [0], clients=clients)
        result = study.run(0.5, "fedavg", CATALOG["sp"])
        calls.clear()
        assert len(client_rows(study, result)) == clients
        return len(calls)

    assert counted(3) == counted(30)


def test_keys_of_a_cohort_are_read_by_the_cohort_alone():
    """Of every replicate, whose clients may have other names; a round does not look at the rest."""
    made = [
        partition(synthetic(rows=400, seed=1), "iid", test_share=0, clients=40, seed=seed)
        for seed in (0, 1)
    ]
    made = [
        type(f)(made[0].dataset, f.rows, f.offsets, f.test, keys=_Watched.of(40, first))
        for f, first in zip(made, (0, 500), strict=True)
    ]
    cohort = sample_cohort(made, 3, "uniform", seeds=np.array([4, 5], np.uint64), round=0)
    _Watched.read = 0
    keys = index_rows(made).keys(cohort)
    assert keys.tolist() == (cohort.client + 500 * cohort.run).tolist()
    assert _Watched.read == 2 * 3


class _Watched(np.ndarray):
    """Counts what is taken out of it."""

    read = 0

    @classmethod
    def of(cls, size: int, first: int) -> "_Watched":
        return np.arange(first, first + size, dtype=np.uint64).view(cls)

    def __array_finalize__(self, other) -> None:
        if isinstance(other, _Watched):  # a part of it, or a copy
            _Watched.read += self.size


def test_sites_are_read_one_at_a_time(tmp_path, monkeypatch):
    for k in range(6):
        sums = measure(
            [1, 0] * 20,
            np.linspace(0.1, 0.9, 40),
            sensitive_features=list("ab") * 20,
            site=f"site {k}",
            bins=100 if k < 3 else 20,
        )
        write_sums(sums, tmp_path / f"{k}.json")
    alive: weakref.WeakSet = weakref.WeakSet()
    read = gathering.read_sums

    def watched(file: Path):
        assert len(alive) <= 2  # this one's predecessor, and the one that is being added
        sums = read(file)
        alive.add(sums)
        return sums

    monkeypatch.setattr(gathering, "read_sums", watched)
    total = gathering.gather(gathering.find_site_files([tmp_path]))
    assert len(total.sites) == 6 and total.require_spec().bins == 20
    assert sum(counts.sum() for counts in total.histogram.values()) == 6 * 40


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_is_measured_in_pieces(tmp_path, monkeypatch, ending: str):
    monkeypatch.setattr("fedgft.auditing.measurement.BATCH_ROWS", 1000)
    frame = pl.DataFrame({"y": [0, 1] * 5000, "g": ["a", "b"] * 5000, "p": [0.3, 0.6] * 5000})
    file = tmp_path / f"big.{ending}"
    frame.write_csv(file) if ending == "csv" else frame.write_parquet(file)
    heights = [batch.height for batch in read_batches(file, Measurement("f", "y", ("g",), ("p",)))]
    assert sum(heights) == 10_000
    assert max(heights) <= 1000


def test_thousands_of_replies_are_counted_in_one_pass():
    class Form:
        compared = 0

        def __init__(self, kind: int) -> None:
            self.kind = kind

        def __hash__(self) -> int:
            return hash(self.kind)

        def __eq__(self, other: object) -> bool:
            Form.compared += 1
            return isinstance(other, Form) and self.kind == other.kind

    forms = [Form(i % 3) for i in range(301)]
    assert most_common(forms) is forms[0]
    assert Form.compared <= 2 * len(forms)  # a look and a change each; by pairs it is 90,000
    assert most_common([]) == ()


@pytest.mark.slow
def test_figures_of_many_sites_and_classes_say_what_they_leave_out():
    rng = np.random.default_rng(0)
    classes = list("abcdefgh")
    sites = [
        measure(
            classes * 3,
            rng.dirichlet(np.ones(8), 24),
            sensitive_features=list("fm") * 12,
            site=f"s{k}",
            classes=classes,
            bins=10,
        )
        for k in range(45)
    ]
    found = {figure.name: figure for figure in audit(sites).report(figures=True).figures}
    rows = found["forest"].spec["data"]["values"]
    assert len({row["name"] for row in rows}) == 40 + 2  # and all of them together, and another
    assert "the 40 that move the gap most, of 45 sites" in found["forest"].caption
    assert "the first 6 of 8 classes" in found["roc"].caption and "roc5" in found
    few = {figure.name: figure for figure in audit(sites[:40]).report(figures=True).figures}
    assert "Shown" not in few["forest"].caption

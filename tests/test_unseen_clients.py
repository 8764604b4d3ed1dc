"""Leaving a client out: nothing of it reaches the training, and all its rows judge the model."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from scipy import stats

from fedgft.data.dataset import Dataset, standardize
from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.engine import simulate
from fedgft.errors import FedgftError
from fedgft.metrics import get_metric
from fedgft.metrics.intervals import floor
from fedgft.study import (
    Study,
    compare_methods,
    get_protocol,
    measure_unseen_clients,
    summarize_unseen_clients,
    unseen_clients,
)
from fedgft.study.unseen_clients import leave_out, make_unseen_table, measure_gaps
from fedgft.sums import Sums
from test_cli import run

pytestmark = pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
SP = get_metric("sp")
EO = get_metric("eo")


def make_data(clients: int = 3, rows: int = 900, seed: int = 0) -> Dataset:
    """Rows of named clients that differ in size and in how the features depend on the group."""
    base = synthetic(rows=rows, seed=seed)
    rng = np.random.default_rng(seed)
    shares = np.arange(1.0, clients + 1)
    owner = rng.choice(clients, rows, p=shares / shares.sum())
    features = base.features + 0.4 * owner[:, None] * base.groups[:, None]
    names = tuple(f"client {k}" for k in range(clients))
    return replace(base, features=features, clients=owner, client_names=names)


def make_study(data: Dataset, seeds: int = 2, kind: str = "column", **changes) -> Study:
    base = get_protocol("heldout")
    settings = replace(base.settings, rounds=4)
    changes = {"lr": (0.02,), "lam": (10.0,), "round_factors": (), "more_lr": ()} | changes
    protocol = replace(base, settings=settings, **changes)
    return Study(data, protocol, range(seeds), clients=3, kind=kind)


@pytest.mark.parametrize("kind", ["column", "dirichlet"])
def test_the_client_has_no_training_rows_and_all_its_rows_are_test_rows(kind):
    data = make_data()
    federation = partition(data, kind, clients=3, alpha=0.5, seed=1)
    for k in range(3):
        part = leave_out(federation, k)
        assert part.num_clients == 2 and part.keys.tolist() == [i for i in range(3) if i != k]
        assert not set(part.rows.tolist()) & set(part.test.tolist())
        for new, old in enumerate(i for i in range(3) if i != k):
            assert part.client(new).tolist() == federation.client(old).tolist()
        own = federation.client(k)
        if kind == "column":  # also its held-out rows
            own = np.flatnonzero(data.clients == k)
        assert part.test.tolist() == sorted(own.tolist())


@pytest.mark.parametrize("method", ["fedavg", "fedgft"])
def test_a_batch_equals_one_training_per_client(method):
    """The reference trains one federation after the other, each scaled by its own rows."""
    study = make_study(make_data())
    rows = measure_unseen_clients(study, [method], [SP], [0.5])
    assert len(rows) == 6
    algorithm = study.protocol.algorithm(method, SP, np.array([10.0]))
    settings = replace(study.protocol.settings, eval_every=0)
    for row in rows:
        seed = row["seed"]
        k = study.dataset.client_names.index(row["client"])
        own = study.dataset.clients == k
        federation = partition(study.dataset, "column", seed=seed)
        part = standardize(leave_out(federation, k))
        others = study.dataset.features[part.rows].astype(float)
        np.testing.assert_allclose(part.mean, others.mean(0), atol=1e-5)
        sums = simulate(part, "logistic", algorithm, settings, seeds=[seed], lr=0.02).test[-1]
        assert row["rows"] == own.sum() and row["trained"]
        assert row["accuracy"] == pytest.approx(float(sums.accuracy()[0]), abs=1e-9)
        assert row["gap"] == pytest.approx(float(sums.gap(SP, "hard")[0]), abs=1e-9)
        statistics = sums.statistics(SP, "hard")
        assert row["floor"] == pytest.approx(float(floor(SP, statistics)[0]))


def test_nothing_of_the_client_reaches_its_training():
    """Neither the learning rate, the strength nor the model of the others change with its rows."""
    data = make_data()
    changed = {}
    for name in ("as it is", "scrambled"):
        if name == "scrambled":
            own = np.flatnonzero(data.clients == 2)
            moved = np.random.default_rng(3).permutation(own)
            labels = data.labels.copy()
            labels[own] = 1 - data.labels[own]
            features = data.features.copy()
            features[own] = data.features[moved]  # the mean and the spread of all rows stay
            data = replace(data, labels=labels, features=features)
        study = make_study(data, lr=(0.005, 0.05), lam=(1.0, 50.0))
        rows = measure_unseen_clients(study, ["fedgft"], [SP], [0.5])
        changed[name] = [(r["accuracy"], r["gap"]) for r in rows if r["client"] == "client 2"]
        changed[name + " others"] = [r["accuracy"] for r in rows if r["client"] != "client 2"]
        others = unseen_clients._leave_out(study, [SP], 0.5)  # the models themselves
        result = others.run(0.5, "fedgft", SP)
        changed[name + " model"] = result.history.params[2::3]
        changed[name + " chosen"] = (result.lr[2::3], result.strength[2::3])
    np.testing.assert_allclose(
        changed["scrambled model"], changed["as it is model"], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(changed["scrambled chosen"], changed["as it is chosen"])
    assert changed["scrambled"] != changed["as it is"]
    assert changed["scrambled others"] != changed["as it is others"]  # they train on its rows


def test_the_columns_are_means_over_clients_with_t_intervals():
    study = make_study(make_data(4), seeds=2)
    found = compare_methods(study, ["fedavg", "fedgft"], [SP], [0.5], leave_one_client_out=True)
    plain = compare_methods(make_study(make_data(4), seeds=2), ["fedavg", "fedgft"], [SP], [0.5])
    for row, same in zip(found.rows, plain.rows, strict=True):
        without = {k: v for k, v in row.items() if not k.startswith("unseen") and k != "seconds"}
        assert without == {k: v for k, v in same.items() if k != "seconds"}
        mine = [r for r in found.unseen if r["method"] == row["method"]]
        by_seed = [[r for r in mine if r["seed"] == seed] for seed in range(2)]
        for name, column in (("accuracy", "accuracy"), ("gap", "gap")):
            values = np.array([[r[name] for r in line] for line in by_seed])
            half = stats.t.ppf(0.975, 3) * values.std(1, ddof=1) / 2
            low = np.maximum(values.mean(1) - half, 0.0).mean()
            high = np.minimum(values.mean(1) + half, 1.0).mean()
            assert row[f"unseen_{column}"] == pytest.approx(values.mean())
            assert row[f"unseen_{column}_low"] == pytest.approx(low)
            assert row[f"unseen_{column}_high"] == pytest.approx(high)
        gaps = np.array([[r["gap"] for r in line] for line in by_seed])
        assert row["unseen_gap_largest"] == pytest.approx(gaps.max(1).mean())
        assert (row["unseen_clients"], row["unseen_not_estimable"]) == (4, 0)
    table = make_unseen_table(found.rows)
    assert [cells[0] for cells in table.rows] == ["FedAvg", "FedGFT"]
    assert "mean of 4 clients" in table.title


def test_a_client_that_lacks_a_group_has_accuracy_and_no_gap():
    data = make_data(4)
    groups = data.groups.copy()
    groups[data.clients == 0] = 1
    study = make_study(replace(data, groups=groups))
    rows = measure_unseen_clients(study, ["fedavg"], [SP], [0.5])
    alone = [row for row in rows if row["client"] == "client 0"]
    assert all(row["gap"] is None and row["floor"] is None for row in alone)
    assert all(row["accuracy"] is not None and row["trained"] for row in alone)
    (columns,) = summarize_unseen_clients(rows).values()
    assert columns["unseen_not_estimable"] == 1 and columns["unseen_not_trained"] == 0
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    assert columns["unseen_gap"] == pytest.approx(np.mean(gaps)) and len(gaps) == 6
    assert make_unseen_table([rows[0] | columns]).rows[0][-1] == "1"


def test_a_client_with_all_rows_of_a_group_cannot_be_left_out():
    data = make_data(3)
    groups = np.where(data.clients == 1, data.groups, 1)
    study = make_study(replace(data, groups=groups))
    rows = measure_unseen_clients(study, ["fedavg"], [SP], [0.5])
    assert [row["trained"] for row in rows] == [True, False, True] * 2
    (columns,) = summarize_unseen_clients(rows).values()
    assert columns["unseen_not_trained"] == 1 and columns["unseen_not_estimable"] == 3
    assert columns["unseen_gap"] is None and columns["unseen_accuracy"] is not None
    everyone = replace(data, groups=np.where(data.clients == 1, 0, 1), clients=data.clients % 2)
    everyone = replace(everyone, client_names=("a", "b"))
    two = make_study(replace(everyone, groups=everyone.clients))
    with pytest.raises(FedgftError, match="without any one client") as caught:
        measure_unseen_clients(two, ["fedavg"], [SP], [0.5])
    assert caught.value.field == "leave_one_client_out"


def test_gaps_are_those_of_groups_with_ten_rows():
    """Of three groups, one has too few rows; equalized odds needs both conditions."""
    decision = np.zeros((3, 2, 4, 2))  # (run, label, group and no group, decision)
    decision[:, :, 0] = (15, 15)
    decision[:, :, 1] = (24, 6)
    decision[:, :, 2] = (0, 4)
    decision[1, 0, 1] = (2, 2)
    decision[2, :, 1] = (1, 1)
    sums = Sums(decision.sum(-1), np.full_like(decision, np.nan), decision)
    gaps, floors = measure_gaps(EO, sums)
    assert gaps[0] == pytest.approx(0.3) and np.isfinite(floors[0])
    assert np.isnan(gaps[1:]).all() and np.isnan(floors[1:]).all()
    gaps, _ = measure_gaps(SP, sums)
    assert gaps[:2].tolist() == [pytest.approx(0.3), pytest.approx(0.5 - 8 / 34)]
    assert np.isnan(gaps[2])


def test_rules_and_simulated_clients():
    study = make_study(make_data(), kind="dirichlet", target=(0.02,))
    rows = measure_unseen_clients(study, ["fedavg", "thresholds"], [SP], [0.5, 100])
    assert len(rows) == 2 * 2 * 2 * 3
    by_method = summarize_unseen_clients(rows)
    assert set(by_method) == {(a, m, "sp") for a in (0.5, 100) for m in ("fedavg", "thresholds")}
    assert all(row["client"] in "012" for row in rows)


def test_numbers_of_clients_that_cannot_be_left_out():
    one = replace(make_data(), clients=np.zeros(900, int), client_names=("all",))
    with pytest.raises(FedgftError) as caught:
        measure_unseen_clients(make_study(one), ["fedavg"], [SP], [0.5])
    assert caught.value.field == "leave_one_client_out"
    many = Study(make_data(), get_protocol("heldout"), range(1), clients=101, kind="iid")
    with pytest.raises(FedgftError, match="there are 101"):
        measure_unseen_clients(many, ["fedavg"], [SP], [0.5])
    study = make_study(make_data())
    settings = replace(study.protocol.settings, cohort=3)
    study = make_study(make_data())
    object.__setattr__(study, "protocol", replace(study.protocol, settings=settings))
    with pytest.raises(FedgftError) as caught:
        measure_unseen_clients(study, ["fedavg"], [SP], [0.5])
    assert caught.value.field == "cohort"


def test_the_command_adds_columns_a_table_and_a_file(capsys, tmp_path):
    data = make_data()
    frame = pl.DataFrame(
        {f"x{i}": data.features[:, i] for i in range(3)}
        | {"label": data.labels, "sex": data.groups, "bank": data.clients}
    )
    frame.write_csv(tmp_path / "rows.csv")
    how = ["--label", "label", "--group", "sex", "--client", "bank", "--seeds", "2"]
    how += ["--rounds", "3", "--lr", "0.02", "--methods", "fedavg", "--leave-one-client-out"]
    folder = tmp_path / "out"
    code, out, _ = run(capsys, "compare", tmp_path / "rows.csv", *how, "--out", folder, "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["unseen_clients"] == 3 and 0 < row["unseen_accuracy"] < 1
    assert len(pl.read_parquet(folder / "unseen.parquet")) == 6
    again = [each for each in how if each != "--leave-one-client-out"]
    code, _, err = run(capsys, "compare", tmp_path / "rows.csv", *again, "--out", folder)
    assert code == 2 and "--leave-one-client-out" in err
    code, out, _ = run(capsys, "compare", tmp_path / "rows.csv", *how)
    assert code == 0 and "at a client that did not take part, mean of 3 clients" in out
    code, _, err = run(capsys, "compare", "--data", "synthetic", "--clients", "200", *how[6:])
    assert code == 2 and "--leave-one-client-out needs 2 to 100 clients" in err

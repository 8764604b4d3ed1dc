"""Trees that sites grow together on Flower: they are those of the simulator, bit for bit."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedMedian

import fedgft
from fedgft.data.dataset import Federation, get_raw_scaling, standardize
from fedgft.data.partition import partition
from fedgft.data.schema import Schema
from fedgft.engine import Settings, simulate
from fedgft.engine.trees import rows as binned_rows
from fedgft.engine.trees.bins import LARGEST
from fedgft.errors import FedgftError
from fedgft.fair_model import load_model
from fedgft.flower import Budget, Site
from fedgft.flower.client import client_site, list_levels
from fedgft.flower.histogram_strategy import GrowingFedGFT, MeasuredTrees, append_trees
from fedgft.flower.histogram_trees import (
    CELLS,
    HISTOGRAMS,
    Cells,
    SiteForest,
    empty_forest,
    pack_forest,
    read_forest,
)
from fedgft.forest import Forest
from fedgft.models import Trees
from in_process_grid import InProcessGrid, app_of, grid_of, options
from test_flower_trees import federation, run_app, run_config, write_tables
from tree_tables import draw_table

SETTINGS = {"lr": 0.3, "max-depth": 3, "bins": 40, "min-child-weight": 0.5}
ROUNDS = 6


def cells_of(made: Federation) -> Cells:
    data = made.dataset
    scaling = get_raw_scaling(standardize(made))
    schema = Schema("y", ("a",), data.classes, data.group_names, data.encoder, *scaling)
    return Cells.of(schema)


def strategy_of(made: Federation, kind=MeasuredTrees, **more):
    return kind(FedAvg(**options()), channel="query", limits=None, cells=cells_of(made), **more)


def train(made: Federation, strategy, rounds: int = ROUNDS, grid=None, **settings) -> np.ndarray:
    """Grow trees in one process; return the vector of the final forest."""
    data = made.dataset
    start = empty_forest(list_levels(data), len(data.classes))
    config = ConfigRecord({**SETTINGS, **settings})
    grid = grid or grid_of(made, "trees")
    return strategy.start(grid, start, rounds, train_config=config).arrays["forest"].numpy()


def simulated(made: Federation, bins, monkeypatch, *, method="fedavg", rounds=ROUNDS, **more):
    """The forest of the simulator on the same rows and with the same bins."""
    monkeypatch.setattr(binned_rows, "agree_on_bins", lambda *_, **__: bins)
    model = Trees(max_depth=more.pop("max_depth", 3), min_child_weight=0.5, folds=0)
    settings = Settings(rounds=rounds, eval_every=0, threads=1)
    return simulate(made, model, method, settings, lr=0.3, **more).params[0]


def several_classes() -> Federation:
    return partition(draw_table(classes=3, groups=3), clients=3, alpha=1.0, seed=1)


# The same trees


def test_the_trees_are_those_of_the_simulator(monkeypatch) -> None:
    made = federation()
    ours = strategy_of(made)
    found = train(made, ours)
    expected = simulated(made, ours._bins, monkeypatch)
    np.testing.assert_array_equal(found, expected)
    forest = Forest.from_vector(found)
    assert len(forest) == ROUNDS and forest.categories.any() and forest.missing_left.any()
    assert max(map(len, ours._bins.upper)) > 30


@pytest.mark.parametrize("metric", ["sp", "eo"])
def test_prices_make_the_same_trees(metric: str, monkeypatch) -> None:
    made = federation()
    ours = strategy_of(made, GrowingFedGFT, metric=metric, target=0.02)
    found = train(made, ours, 10)
    options_ = {"method": "fedgft-control", "metric": metric, "target": 0.02, "rounds": 10}
    np.testing.assert_array_equal(found, simulated(made, ours._bins, monkeypatch, **options_))
    assert not np.array_equal(found, train(made, strategy_of(made), 10))
    assert len(ours.history) == 11 and ours.measured["target"] == 0.02


def test_the_penalty_of_the_paper_and_several_classes(monkeypatch) -> None:
    made = several_classes()
    ours = strategy_of(made, GrowingFedGFT, lam=5.0)
    found = train(made, ours, 4)
    expected = simulated(made, ours._bins, monkeypatch, method="fedgft", lam=5.0, rounds=4)
    np.testing.assert_array_equal(found, expected)
    assert len(Forest.from_vector(found).base) == 3


def test_clients_and_their_order_do_not_matter() -> None:
    made = federation(clients=4)
    expected = train(made, strategy_of(made))
    sites = [client_site(made, k, "trees") for k in (2, 0, 3, 1)]
    found = train(made, strategy_of(made), grid=InProcessGrid([app_of(site) for site in sites]))
    np.testing.assert_array_equal(found, expected)
    rows = tuple(np.concatenate(parts) for parts in zip(*(s.rows for s in sites), strict=True))
    whole = replace_rows(sites[0], rows, "whole")
    cells = cells_of(made)
    one = FedAvg(**options(min_train_nodes=1, min_available_nodes=1))
    alone = MeasuredTrees(one, channel="query", limits=None, cells=cells)
    found = train(made, alone, grid=InProcessGrid([app_of(whole)]))
    np.testing.assert_array_equal(found, expected)


def replace_rows(site: Site, rows, name: str) -> Site:
    model = SiteForest(site.model.levels, site.model.classes)
    return replace(site, model=model, rows=rows, name=name)


def test_poor_tables_take_part(monkeypatch) -> None:
    """One row, one class, a column without values, no groups: the trees of all their rows."""
    made = federation(clients=2)
    base = client_site(made, 0, "trees")
    x, y, a = base.rows
    hidden = x.copy()
    hidden[:, 0] = np.nan
    tables = {
        "usual": (x, y, a),
        "one row": (x[:1], y[:1], a[:1]),
        "one class": (x[y == 1], y[y == 1], a[y == 1]),
        "missing": (hidden, y, a),
        "no groups": (x, y, np.full_like(a, -1)),
    }
    sites = [replace_rows(base, rows, name) for name, rows in tables.items()]
    ours = strategy_of(made)
    found = train(made, ours, grid=InProcessGrid([app_of(site) for site in sites]))
    rows = tuple(np.concatenate(parts) for parts in zip(*tables.values(), strict=True))
    data = replace_features(made, rows)
    expected = simulated(data, ours._bins, monkeypatch)
    np.testing.assert_array_equal(found, expected)
    assert ours.history[-1]["clients"] == 5


def replace_features(made: Federation, rows) -> Federation:
    """One client with these columns, encoded again."""
    x, y, a = rows
    town = np.array(made.dataset.encoder.fields[2].levels)[x[:, 2].astype(int)]
    number = pl.Series(x[:, 0].astype(np.float64)).fill_nan(None)
    frame = pl.DataFrame({"x": number, "g": x[:, 1].astype(np.float64), "town": town})
    features, _ = made.dataset.encoder.encode(frame)
    data = replace(made.dataset, features=features, labels=y, groups=a)
    every = np.arange(len(y))
    return Federation(data, every, np.array([0, len(y)]), every[:0])


def test_one_message_per_level_and_one_for_sums() -> None:
    made = federation()
    grid = grid_of(made, "trees")
    train(made, strategy_of(made, final=False), 2, grid=grid)
    assert dict(grid.messages) == {f"query.{HISTOGRAMS}": 3 * (1 + 2 * 3), "query.fedgft": 3 * 2}


# Bins


def test_bins_are_unions_of_cells_with_enough_rows() -> None:
    made = federation()
    ours = strategy_of(made)
    train(made, ours, 1, **{"bins": 12, "min-bin-rows": 30})
    sites = [client_site(made, k, "trees") for k in range(3)]
    x = np.concatenate([site.rows[0] for site in sites])
    cells = cells_of(made)
    counts = sum(cells.count(site.rows[0]) for site in sites)
    np.testing.assert_array_equal(counts, cells.count(x))
    assert len(counts) == 2 * CELLS + 6
    for f, edges in enumerate(ours._bins.upper[:2]):
        known = x[~np.isnan(x[:, f]), f]
        rows = np.diff(np.searchsorted(np.sort(known), edges, side="right"), prepend=0)
        assert len(edges) <= 12 and rows.min() >= 30 and rows.sum() == len(known)


def test_cells_of_extreme_columns() -> None:
    low = np.array([-5.0, 1e30, -5e38])
    cells = Cells(low, np.array([10 / CELLS, 1e-3, 1e39 / CELLS]), (0, 0, 0))
    x = np.array([[1e20, 1e30, 3e38], [-1e20, np.nan, -3e38], [0.0, 2e30, 0.0]], np.float32)
    counts = cells.count(x)
    assert counts.sum() == 8 and counts[0] == 1 and counts[CELLS - 1] == 1
    bins = cells.place_bins(counts, most=255, least_rows=1)
    codes = np.empty((3, 3), np.uint8)
    bins.encode(x, np.arange(3), codes, 1)
    assert codes[0].tolist() == [2, 0, 1] and codes[2].tolist() == [2, 0, 1]


def test_rows_beyond_the_counted_ones_are_in_the_last_bin_of_numbers() -> None:
    """Trees and forests agree on them, also where a split sends all known numbers to the left."""
    cells = Cells(np.zeros(1), np.full(1, 0.1), (0,))
    counts = cells.count(np.array([[0.05], [0.25], [0.15]], np.float32))
    bins = cells.place_bins(counts, most=255, least_rows=1)
    assert bins.upper[0].tolist() == [0.1, 0.2, LARGEST]


def test_sums_of_scores_are_exact() -> None:
    made = federation()
    site = client_site(made, 0, "trees")
    site.load(as_record(grown_vector()))
    assert not np.any(site.tally(site.rows).score * 2**30 % 1)


# Privacy


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"budget": Budget(1.0, releases=9)}, "epsilon"),
        ({"budget": Budget(min_count=5)}, "min_count"),
        ({"secure": True}, "secure"),
        ({"channel": "train"}, "channel"),
        ({"strategy": FedMedian(**options())}, "strategy"),
    ],
)
def test_a_run_with_protection_is_refused(change: dict, field: str) -> None:
    made = federation()
    terms = {"strategy": FedAvg(**options()), "channel": "query", "cells": cells_of(made)} | change
    with pytest.raises(FedgftError) as wrong:
        MeasuredTrees(**terms)
    assert wrong.value.field == field and "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    "limit", [{"min-count": 5}, {"secure": True}, {"max-epsilon": 1.0}, {"max-epsilon": np.nan}]
)
def test_a_site_with_limits_sends_no_histograms(limit: dict, caplog) -> None:
    made = federation()
    sites = [client_site(made, k, "trees") for k in range(3)]
    grid = InProcessGrid([app_of(site) for site in sites], [{}, {}, limit])
    with caplog.at_level("WARNING", "flwr"):
        found = train(made, strategy_of(made), 2, grid=grid)
    assert "node 102 failed: site 'site-2'" in caplog.text
    assert grid.messages[f"query.{HISTOGRAMS}"] == 3 + 2 * 2 * 3  # it is not asked again
    pair = InProcessGrid([app_of(site) for site in sites[:2]])
    np.testing.assert_array_equal(found, train(made, strategy_of(made), 2, grid=pair))
    everyone = InProcessGrid([app_of(site) for site in sites], [limit] * 3)
    with pytest.raises(FedgftError, match="no site counted") as wrong:
        train(made, strategy_of(made), 2, grid=everyone)
    assert "\n" not in str(wrong.value)


# Hostile replies


def change(name: str, make, *, after: int = 0):
    """A site whose arrays of this name are changed from message number `after` on."""

    def app(site: Site):
        inner = app_of(site)
        seen = [0]

        def handle(message, context):
            reply = inner(message, context)
            arrays = reply.content.array_records.get("arrays", {})
            if name in arrays:
                seen[0] += 1
                if seen[0] > after:
                    values = make(arrays[name].numpy().copy())
                    reply.content["arrays"] = ArrayRecord({**arrays, name: values})
            return reply

        return handle

    return app


def put(index, value):
    def make(values):
        values[index] = value
        return Array(values)

    return make


def unreadable(values):
    broken = Array(values)
    broken.data = b"no array"
    return broken


HOSTILE = {
    "another shape": lambda v: Array(v[:, :-1].copy()),
    "floats": lambda v: Array(v.astype(np.float64)),
    "bytes that are no array": unreadable,
    "a negative hessian": put((0, 0, 1), -1),
    "too large a hessian": put((0, 0, 1), 2**60),
    "too large a gradient": put((0, 0, 0), -(2**63)),
    "gradients without rows": lambda v: Array(np.where([True, False], v + 2**40, v)),
    "columns that differ": put((0, 0), [1, 2**17]),
    "much more than its rows": lambda v: Array(v * 2**20),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("after", [0, 1])
def test_a_tree_grows_without_a_site_that_lies(name: str, after: int, caplog) -> None:
    """Also if the site lies only about the second level: its rows leave the root, too."""
    made = federation()
    sites = [client_site(made, k, "trees") for k in range(3)]
    last = change("histograms", HOSTILE[name], after=after)(sites[2])
    grid = InProcessGrid([app_of(sites[0]), app_of(sites[1]), last])
    ours = strategy_of(made)
    with caplog.at_level("WARNING", "flwr"):
        found = train(made, ours, 1, grid=grid)
    assert "site 'site-2' is left out of this round" in caplog.text
    expected = grow_alone(made, sites[:2], ours)
    np.testing.assert_array_equal(found, expected)


def grow_alone(made: Federation, sites: list[Site], like) -> np.ndarray:
    """One tree of these sites' rows, with the bins and the base of another run."""
    grid = InProcessGrid([app_of(site) for site in sites])
    ours = strategy_of(made)
    first = np.concatenate(([0, 1, 0, 3, 1], [0, 0, 1], Forest.from_vector(base_of(like)).base))
    ours._bins = like._bins
    config = ConfigRecord(SETTINGS)
    return ours.start(grid, as_record(first), 1, train_config=config).arrays["forest"].numpy()


def base_of(strategy) -> np.ndarray:
    return strategy._sent["forest"].numpy()


def as_record(vector: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"forest": Array(np.asarray(vector, np.float64))})


def test_a_child_cannot_hold_more_than_its_parent(caplog) -> None:
    made = federation()
    sites = [client_site(made, k, "trees") for k in range(3)]
    last = change("histograms", lambda v: Array(v * 3), after=1)(sites[2])
    with caplog.at_level("WARNING", "flwr"):
        train(made, strategy_of(made), 1, grid=InProcessGrid([*map(app_of, sites[:2]), last]))
    assert "more than those of its parent" in caplog.text


COUNTS = {
    "negative": put(0, -1),
    "more than its rows": put(slice(0, 9), 10**6),
    "too large": put(0, 2**62),
    "another shape": lambda v: Array(v[:-1].copy()),
}


@pytest.mark.parametrize("name", COUNTS)
def test_false_counts_are_left_out_of_the_bins(name: str, caplog) -> None:
    made = federation()
    sites = [client_site(made, k, "trees") for k in range(3)]
    last = change("cells", COUNTS[name])(sites[2])
    grid = InProcessGrid([*map(app_of, sites[:2]), last])
    ours = strategy_of(made)
    with caplog.at_level("WARNING", "flwr"):
        train(made, ours, 1, grid=grid)
    assert "site 'site-2'" in caplog.text or "node 102 is left out" in caplog.text
    other = strategy_of(made)
    train(made, other, 1, grid=InProcessGrid([*map(app_of, sites[:2])]))
    np.testing.assert_array_equal(ours._bins.upper[0], other._bins.upper[0])


def test_a_site_that_does_not_answer_misses_one_tree(caplog) -> None:
    made = federation()
    grid = grid_of(made, "trees")
    lost = []

    def lose(node, message):
        is_sum = message.content.config_records["config"].get("fedgft.stage") == "sum"
        if node == 101 and is_sum and len(lost) < 1:
            lost.append(node)
            return True
        return False

    grid.lose = lose
    ours = strategy_of(made)
    found = train(made, ours, 3, grid=grid)
    assert len(Forest.from_vector(found)) == 3 and ours.history[-1]["clients"] == 3
    assert grid.messages[f"query.{HISTOGRAMS}"] == 3 * (1 + 3 * 3) + 3 - 3
    assert not np.array_equal(found, train(made, strategy_of(made), 3))


def test_no_site_left_is_told() -> None:
    made = federation()
    grid = grid_of(made, "trees")
    stage = "fedgft.stage"
    grid.lose = lambda _, m: m.content.config_records["config"].get(stage) == "sum"
    with pytest.raises(FedgftError, match="no new model in 3 rounds"):
        train(made, strategy_of(made), 5, grid=grid)


# Hostile forests and requests


def grown_vector() -> np.ndarray:
    made = federation()
    return train(made, strategy_of(made), 2)


def test_a_forest_that_is_damaged_is_refused_or_harmless() -> None:
    """Whatever numbers a server sends, the site walks within its arrays."""
    rng = np.random.default_rng(0)
    vector = grown_vector()
    model = SiteForest((0, 0, 6))
    x = np.array([[0.0, 1.0, 1.0], [np.nan] * 3, [1e30, -1e30, 99.0]], np.float32)
    wild = [np.nan, np.inf, -1.0, 0.5, 2.0**31, 2.0**62, -(2.0**63), 1e308, 3.0, 7.0, 1.0]
    read = 0
    for i in range(1500):
        data = vector.copy()
        places = rng.integers(0, 5 if i % 3 == 0 else len(data), rng.integers(1, 3))
        data[places] = rng.choice(wild, len(places))
        data = data[: rng.integers(0, len(data))] if i % 5 == 0 else data
        try:
            model.load(as_record(data))
            assert np.isfinite(model.predict(x)).all()
            read += 1
        except FedgftError as error:
            assert error.kind == "data" and "\n" not in str(error)
    assert 50 < read < 1400


@pytest.mark.parametrize(
    "make",
    [
        lambda v: ArrayRecord({"forest": Array(v.astype(np.float32))}),
        lambda v: ArrayRecord({"weight": Array(v)}),
        lambda v: ArrayRecord({"forest": Array(v.reshape(1, -1))}),
        lambda v: ArrayRecord({"forest": unreadable(v)}),
        lambda v: ArrayRecord({"forest": Array(np.zeros(0))}),
        lambda v: as_record([2**31, 2**31, 2**31, 3, 1]),
        lambda v: as_record(np.append(v, 0.0)),
    ],
)
def test_what_is_no_forest_is_refused(make) -> None:
    site = Site(SiteForest((0, 0, 6)), rows=(np.zeros((1, 3)), np.zeros(1, int), np.zeros(1, int)))
    with pytest.raises(FedgftError, match="site 'unnamed'") as wrong:
        site.load(make(grown_vector()))
    assert wrong.value.kind == "data"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("left", np.array([9, 0, 0], np.int32)),
        ("left", np.array([0, 1, 0], np.int32)),
        ("feature", np.array([7, 0, 0], np.int32)),
        ("nodes", np.array([5])),
        ("nodes", np.array([1, 1])),
        ("nodes", np.array([0.5])),
        ("goes-left", np.zeros((3, 4), np.uint8)),
        ("sizes", np.array([300, 0, 0])),
        ("upper", np.array([np.nan])),
        ("level-bins", np.full(6, 999)),
        ("forest", np.zeros(3)),
        ("forest", np.zeros(3, np.uint8)),
        ("forest", np.frombuffer(zlib.compress(b"12345"), np.uint8)),
        ("forest", np.frombuffer(zlib.compress(np.full(9, 2.0**30).tobytes()), np.uint8)),
    ],
)
def test_a_site_refuses_requests_that_fit_nothing(name: str, value: np.ndarray) -> None:
    made = federation()
    grid = grid_of(made, "trees")
    seen = []
    send = InProcessGrid.send_and_receive

    def tamper(messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            if message.content.config_records["config"].get("fedgft.stage") == "sum":
                arrays = message.content["arrays"]
                small = {
                    "feature": Array(np.zeros(3, np.int32)),
                    "left": Array(np.array([1, 0, 0], np.int32)),
                    "goes-left": Array(np.zeros((3, 32), np.uint8)),
                    "nodes": Array(np.array([1, 2])),
                }
                message.content["arrays"] = ArrayRecord({**arrays, **small, name: Array(value)})
        replies = send(grid, messages, timeout=timeout)
        seen.extend(reply for reply in replies if reply.has_error())
        return replies

    grid.send_and_receive = tamper
    with pytest.raises(FedgftError, match="no round gave a new model"):
        train(made, strategy_of(made), 1, grid=grid)
    assert len(seen) == 3 and all("FedgftError" in reply.error.reason for reply in seen)


def test_a_site_that_is_asked_to_train_refuses() -> None:
    made = federation()
    ours = fedgft.flower.MeasuredStrategy(FedAvg(**options()), "sp")
    with pytest.raises(FedgftError, match="grows in queries"):
        ours.start(grid_of(made, "trees"), empty_forest(list_levels(made.dataset)), 3)


def test_forests_of_several_sizes_are_appended() -> None:
    forest = read_forest(empty_forest((0, 40)), (0, 40), 2)
    tree = {
        "feature": np.array([1, -1, -1]),
        "left": np.array([1, 0, 0]),
        "value": np.array([0.0, 1.0, 2.0]),
        "categories": np.array([[0, 4], [0, 0], [0, 0]], np.uint32),
        **{name: np.zeros(3) for name in ("threshold", "missing_left", "gain", "cover")},
    }
    first = append_trees(forest, [tree])
    last = append_trees(first, [tree | {"categories": np.zeros((3, 0), np.uint32)}])
    assert last.categories.shape == (2, 3, 2)
    found = read_forest(pack_forest(last), (0, 40), 2)
    assert found.margins(np.array([[0.0, 34.0]])).tolist() == [[3.0]]


# Whole runs


def test_a_killed_server_continues_with_the_same_trees(tmp_path) -> None:
    made = federation()
    expected = train(made, strategy_of(made, GrowingFedGFT, target=0.0), 6)
    file = tmp_path / "checkpoint.safetensors"

    class Killed(Exception):
        pass

    def kill(row):
        if row["round"] == 4:
            raise Killed

    terms = {"target": 0.0, "checkpoint": file}
    with pytest.raises(Killed):
        train(made, strategy_of(made, GrowingFedGFT, on_round=kill, **terms), 6)
    again = strategy_of(made, GrowingFedGFT, **terms)
    np.testing.assert_array_equal(train(made, again, 6), expected)
    assert again.state.starts == 2


def trees_config(out, **more) -> dict:
    settings = {"model": "trees", "strategy": "FedAvg", "max-depth": 3, "rounds": 3}
    return run_config(out, **settings | more)


def test_a_run_on_tables_writes_a_model_that_predicts(tmp_path) -> None:
    nodes = write_tables(tmp_path)
    out = tmp_path / "run"
    run_app(trees_config(out), nodes, FedAvg(**options()))
    held = json.loads((out / "history.json").read_text())
    assert held["sites"] == ["east", "north", "south"] and held["held_out"]["rows"]["counted"] > 200
    model = load_model(out / "model.safetensors")
    assert model.about["model"] == "trees" and model.about["trees"]["max_depth"] == 3
    table = pl.read_csv(nodes[0]["data"])
    assert (model.predict(table) == table["ok"].cast(str).to_numpy()).mean() > 0.6
    assert model.importances()["x"] > 0.2 and "boosted-trees" in model.card()
    assert len(model.forest) <= 3 and (out / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bins": 1}, "bins"),
        ({"min-bin-rows": 0}, "min_bin_rows"),
        ({"max-depth": 13}, "max_depth"),
        ({"lr": 1.5}, "lr"),
        ({"method": "fairfed"}, "method"),
        ({"min-count": 5}, "min_count"),
    ],
)
def test_wrong_settings_are_refused(change: dict, field: str, tmp_path) -> None:
    nodes = write_tables(tmp_path)
    with pytest.raises(FedgftError) as wrong:
        run_app(trees_config(tmp_path / "run", **change), nodes, FedAvg(**options()))
    assert wrong.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--base", "fedadam"], "base"),
        (["--channel", "train"], "channel"),
        (["--method", "fairfed"], "method"),
        (["--epsilon", "1"], "epsilon"),
        (["--set", "min-count=5"], "set"),
        (["--set", "secure=true"], "set"),
        (["--set", "epochs=3"], "set"),
        (["--set", "local-trees=3"], "set"),
        (["--set", "max-depth=99"], "set"),
    ],
)
def test_the_command_refuses_what_does_not_fit(arguments, field, tmp_path, monkeypatch, capsys):
    from fedgft.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "local", "--model", "trees", "--out", "run", *arguments])
    assert ended.value.code == 2 and f"--{field}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_deployed_run_equals_the_one_in_process(tmp_path) -> None:
    """Three sites as processes, with TLS and keys: the same trees, bit for bit."""
    nodes = write_tables(tmp_path)
    schema = tmp_path / "first" / "schema.json"
    settings = {"test-share": 0.0, "max-depth": 2, "rounds": 2}
    run_app(trees_config(tmp_path / "first", **settings), nodes, FedAvg(**options()))
    files = [node["data"] for node in nodes]
    command = [sys.executable, "-m", "fedgft", "deploy", "local", "--model", "trees", "--json"]
    command += ["--sites", "3", "--rounds", "2", "--label", "ok", "--group", "sex"]
    command += ["--set", "test-share=0.0", "max-depth=2", f"schema={schema}"]
    command += ["--data", *files, "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert row["status"] == "finished:completed" and row["sites"] == 3
    forests = [
        load_model(tmp_path / name / "model.safetensors").forest.to_vector()
        for name in ("first", "run")
    ]
    np.testing.assert_array_equal(forests[0], forests[1])

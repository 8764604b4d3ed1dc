"""Boosted trees on Flower: they equal a plain loop over XGBoost, and nothing hostile is read."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import xgboost
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.serverapp import strategy as flower

from fedgft.algorithms.controller import Controller, Loop
from fedgft.data.dataset import Dataset
from fedgft.data.encode import Encoder
from fedgft.data.partition import partition
from fedgft.errors import FedgftError
from fedgft.fair_model import load_model
from fedgft.flower import Budget, FairFed, FedGFT, MeasuredStrategy, Site
from fedgft.flower.boosted_trees import BoostedTrees, assign_folds, tally_unseen
from fedgft.flower.boosters import ARRAY, Booster, empty_booster, largest_leaf, scale_leaves
from fedgft.flower.client import client_site, list_levels, read_rows
from fedgft.flower.client_app import make_client_app
from fedgft.flower.server_app import serve
from fedgft.metrics import get_metric
from fedgft.privacy.policy import SitePolicy
from fedgft.sums import Sums
from in_process_grid import InProcessGrid, app_of, grid_of, options

APP = Path(__file__).parents[1] / "examples" / "flower" / "pyproject.toml"
CONFIG = {"lr": 0.3, "max-depth": 3, "seed": 0}
ROUNDS = 8
TOWNS = ("a", "b", "c", "d", "e", "f")


def people(rows: int = 900) -> Dataset:
    """A table with a number that is often missing, a town of six, and an unfair label."""
    rng = np.random.default_rng(3)
    group = (rng.random(rows) < 0.4).astype(int)
    x = rng.normal(size=rows) + 0.6 * group
    town = rng.integers(0, 6, rows)
    labels = (x + 0.5 * (town % 2) + rng.normal(size=rows) > 0.4).astype(int)
    shown = [
        None if hidden else value
        for hidden, value in zip(rng.random(rows) < 0.2, x.round(2), strict=True)
    ]
    frame = pl.DataFrame({"x": pl.Series(shown, dtype=pl.Float64), "g": group.astype(float)})
    frame = frame.with_columns(town=pl.Series([TOWNS[i] for i in town]))
    encoder = Encoder.fit(frame, frame.columns, indicators=True)
    features, _ = encoder.encode(frame)
    names = {"columns": encoder.columns, "group_names": ("f", "m")}
    return Dataset("people", features, labels, group, encoder=encoder, **names)


def federation(clients: int = 3, alpha: float = 1.0):
    return partition(people(), clients=clients, alpha=alpha, seed=1)


def bagging() -> flower.FedXgbBagging:
    return flower.FedXgbBagging(**options())


def cyclic() -> flower.FedXgbCyclic:
    return flower.FedXgbCyclic(fraction_evaluate=0.0)


def train(made, strategy, rounds: int = ROUNDS, grid=None, **config) -> Booster:
    grid = grid or grid_of(made, "xgboost")
    start = empty_booster(list_levels(made.dataset))
    settings = ConfigRecord({**CONFIG, "rounds": rounds, **config})
    result = strategy.start(grid, start, rounds, train_config=settings)
    return Booster.from_arrays(result.arrays, source="the model")


def margins(made, booster: Booster, rows: np.ndarray) -> np.ndarray:
    model = BoostedTrees(list_levels(made.dataset))
    model.load(booster.to_arrays())
    return model.margins(read_rows(made, rows, "xgboost")[0])


def gap_of(made, booster: Booster) -> float:
    rows = made.rows
    site = client_site(made, 0, "xgboost")
    site.load(booster.to_arrays())
    return float(site.tally(read_rows(made, rows, "xgboost")).gap("sp", "hard"))


# The same trees as a plain loop


def reference(made, rounds: int, *, metric=None, target=0.0, repeats=1) -> np.ndarray:
    """The logits of all clients' rows, by a loop over `xgboost.Booster.boost`, channel "query"."""
    data = made.dataset
    parts = [made.client(k) for k in range(made.num_clients)]
    fields = data.encoder.to_fields(data.features)
    kinds = ["c" if count else "q" for count in data.encoder.level_counts]
    table = lambda rows: xgboost.DMatrix(  # noqa: E731
        fields[rows], feature_types=kinds, enable_categorical=True
    )
    tables = [table(rows) for rows in parts]
    positive = (data.labels[made.rows].sum() + 1) / (len(made.rows) + 2)
    f = [np.full(len(rows), np.log(positive / (1 - positive))) for rows in parts]
    share = np.array([len(rows) for rows in parts]) / len(made.rows)
    prices = np.zeros((2, 2))
    if metric is not None:
        controller = Controller(metric, target)
        left = 0.7**repeats
        state = controller.init(1, Loop(1, 0.6, left, 4.0))._replace(speed=1 - left)
    params = {"eta": 0.3, "max_depth": 3, "tree_method": "hist", "base_score": 0.0}
    for _ in range(rounds):
        if metric is not None:
            sums = []
            for rows, logits in zip(parts, f, strict=True):
                p = 1 / (1 + np.exp(-logits))
                y, a = data.labels[rows], data.groups[rows]
                sums.append(Sums.of(np.stack((1 - p, p), 1), y, a, num_groups=2))
            total = sum(sums[1:], start=sums[0])
            mean = total.statistics(metric, "hard") / total.rows()
            state = controller.steer(state, mean[None])
            found = controller.price(state, run=np.zeros(1, int), classes=2)
            if not isinstance(found, float):
                prices = (found[0][..., 1] - found[0][..., 0])[:, :2]
        grown = []
        for rows, logits, matrix in zip(parts, f, tables, strict=True):
            y, a = data.labels[rows], data.groups[rows]
            own = logits.copy()
            trees = []
            for _ in range(repeats):
                p = 1 / (1 + np.exp(-own))
                booster = xgboost.Booster(params, [matrix])
                gradient = p - y + prices[y, a] * p * (1 - p)
                booster.boost(matrix, iteration=0, grad=gradient, hess=p * (1 - p))
                own += booster.predict(matrix, output_margin=True)
                trees.append(booster)
            grown.append(trees)
        for weight, trees in zip(share, grown, strict=True):
            for booster in trees:
                for k, matrix in enumerate(tables):
                    f[k] = f[k] + weight * booster.predict(matrix, output_margin=True)
    return np.concatenate(f)


def of_clients(made, booster: Booster) -> np.ndarray:
    return np.concatenate([margins(made, booster, made.client(k)) for k in range(made.num_clients)])


@pytest.mark.parametrize("repeats", [1, 3])
def test_bagging_is_a_weighted_mean_of_the_clients_trees(repeats: int) -> None:
    made = federation()
    found = train(made, MeasuredStrategy(bagging(), "sp", limits=None), **{"local-trees": repeats})
    assert len(found.trees) == 3 * repeats * ROUNDS
    expected = reference(made, ROUNDS, repeats=repeats)
    np.testing.assert_allclose(of_clients(made, found), expected, atol=2e-5)


@pytest.mark.parametrize("metric", ["sp", "eop"])
def test_prices_enter_the_gradient(metric: str) -> None:
    made = federation()
    ours = FedGFT(bagging(), metric, target=0.0, channel="query", pick=0.0, limits=None)
    found = train(made, ours)
    expected = reference(made, ROUNDS, metric=get_metric(metric))
    np.testing.assert_allclose(of_clients(made, found), expected, atol=2e-5)
    assert np.abs(expected - reference(made, ROUNDS)).max() > 0.1


def test_one_client_is_xgboost_itself() -> None:
    made = federation(clients=1)
    bare = flower.FedXgbBagging(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    found = train(made, MeasuredStrategy(bare, "sp"))
    data = made.dataset
    fields = data.encoder.to_fields(data.features[made.rows])
    kinds = ["c" if count else "q" for count in data.encoder.level_counts]
    table = xgboost.DMatrix(
        fields, data.labels[made.rows], feature_types=kinds, enable_categorical=True
    )
    base = (data.labels[made.rows].sum() + 1) / (len(made.rows) + 2)
    params = {"eta": 0.3, "max_depth": 3, "tree_method": "hist", "base_score": base}
    theirs = xgboost.train(params | {"objective": "binary:logistic"}, table, ROUNDS)
    expected = theirs.predict(table, output_margin=True)
    np.testing.assert_allclose(margins(made, found, made.rows), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("strategy", "channel"),
    [(bagging, "train"), (bagging, "query"), (bagging, "evaluate"), (cyclic, "query")],
)
def test_the_gap_falls(strategy, channel: str) -> None:
    made = federation(alpha=1.0 if strategy is bagging else 100.0)  # cyclic: a client per tree
    share = {"fraction_evaluate": 1.0} if channel == "evaluate" else {}
    inner = flower.FedXgbBagging(**options(**share)) if share else strategy()
    plain = gap_of(made, train(made, MeasuredStrategy(strategy(), "sp", channel="query"), 15))
    fair = gap_of(made, train(made, FedGFT(inner, "sp", target=0.0, channel=channel), 15))
    assert fair < plain / 3, (plain, fair)


def test_fairfed_weighs_trees() -> None:
    made = federation()
    ours = FairFed(bagging(), "sp", beta=5.0, reweigh=True)
    train(made, ours, 3)
    assert len(set(ours.state.client_weights.values())) == 3


def test_one_message_per_client_and_round_after_the_first() -> None:
    """Round 1 asks for sums first, because the base needs the share of the second class."""
    made = federation()
    grid = grid_of(made, "xgboost")
    train(made, FedGFT(bagging(), target=0.0, final=False), grid=grid)
    assert dict(grid.messages) == {"query.fedgft": 3, "train": 3 * ROUNDS}


def test_cyclic_asks_all_clients_for_sums() -> None:
    with pytest.raises(FedgftError, match="query") as wrong:
        FedGFT(cyclic(), target=0.0)
    assert wrong.value.field == "channel"
    made = federation()
    ours = FedGFT(cyclic(), target=0.0, channel="query")
    found = train(made, ours, 4)
    assert {row["clients"] for row in ours.history} == {3} and len(found.trees) <= 4


def test_a_wrapper_that_averages_is_refused() -> None:
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(bagging(), 0.1, 1.0, 3)
    with pytest.raises(FedgftError, match="wrapped directly"):
        FedGFT(wrapped, target=0.0)


def test_the_initial_model_must_be_a_booster() -> None:
    made = federation()
    start = ArrayRecord({ARRAY: Array(np.zeros(0, np.uint8))})  # Flower's own example starts so
    with pytest.raises(FedgftError, match="empty_booster") as wrong:
        FedGFT(bagging(), target=0.0).start(grid_of(made, "xgboost"), start, 1)
    assert wrong.value.field == "initial_arrays"


def test_a_killed_server_continues_with_the_same_model(tmp_path) -> None:
    made = federation()
    expected = train(made, FedGFT(bagging(), target=0.0))
    file = tmp_path / "checkpoint.safetensors"

    class Killed(Exception):
        pass

    def kill(row):
        if row["round"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(made, FedGFT(bagging(), target=0.0, checkpoint=file, on_round=kill))
    again = FedGFT(bagging(), target=0.0, checkpoint=file)
    found = train(made, again)
    assert again.state.starts == 2
    np.testing.assert_array_equal(of_clients(made, found), of_clients(made, expected))


# What a message reveals


def test_messages_hold_no_sums_of_rows() -> None:
    made = federation()
    found = train(made, MeasuredStrategy(bagging(), "sp"), 2)
    for tree in found.trees:
        inner = np.array(tree["left_children"]) >= 0
        assert not any(tree["sum_hessian"]) and not np.array(tree["base_weights"])[inner].any()


def test_a_leaf_has_as_many_rows_as_the_site_requires() -> None:
    """A row adds at most 1/4 to the weight of a leaf, so min-count / 4 is required of it."""
    made = federation()
    sites = [client_site(made, k, "xgboost") for k in range(3)]
    config = {"min-count": 40}
    grid = InProcessGrid([app_of(site) for site in sites], [config] * 3)
    seen = []
    boost = BoostedTrees.boost

    def note(self, rows, *args, **kwargs):
        loss = boost(self, rows, *args, **kwargs)
        text = Booster(self.levels).grown(self.new_trees).to_json().encode()
        kinds = {"feature_types": self.types, "enable_categorical": True}
        table = xgboost.DMatrix(rows[0], **kinds)
        leaves = xgboost.Booster(model_file=bytearray(text)).predict(table, pred_leaf=True)
        seen.append(np.unique(leaves, return_counts=True)[1].min())
        return loss

    BoostedTrees.boost = note
    try:
        train(made, MeasuredStrategy(bagging(), "sp"), 3, grid=grid, **{"max-depth": 6})
    finally:
        BoostedTrees.boost = boost
    assert len(seen) == 9 and min(seen) >= 40


def test_noise_and_secure_sums_work_with_trees() -> None:
    pytest.importorskip("opendp")
    made = federation()
    noisy = FedGFT(bagging(), target=0.0, budget=Budget(5.0, releases=4), channel="query")
    train(made, noisy, 3, **{"rotating-folds": 5})
    assert all("epsilon" in row for row in noisy.history) and len(noisy.history) == 4
    secure = FedGFT(bagging(), target=0.0, secure=True, channel="query")
    found = train(made, secure, 3)
    assert found.base == pytest.approx(made.dataset.labels[made.rows].mean(), abs=2e-3)


def test_the_sums_of_the_first_round_count_for_the_budget() -> None:
    made = federation()
    inner = flower.FedXgbBagging(**options(fraction_evaluate=1.0))
    ours = FedGFT(inner, target=0.0, channel="evaluate", budget=Budget(5.0, releases=3))
    with pytest.raises(FedgftError, match="releases=4"):
        train(made, ours, 3)


# Folds


def test_folds_are_even_and_leave_counts_as_they_are() -> None:
    made = federation()
    site = client_site(made, 0, "xgboost")
    _, y, a = site.rows
    fold = assign_folds(y, a, 5, 1)
    for label in (0, 1):
        for group in (0, 1):
            sizes = np.bincount(fold[(y == label) & (a == group)], minlength=5)
            assert sizes.max() - sizes.min() <= 1
    booster = train(made, MeasuredStrategy(bagging(), "sp"), 3, **{"rotating-folds": 5})
    site.load(booster.to_arrays())
    context = grid_of(made, "xgboost").contexts[100]
    exact = site.tally(site.rows)
    policy = SitePolicy(context, "a", {"rounds-done": 3})
    found = tally_unseen(site, exact, policy, {"rotating-folds": 5, "seed": 0})
    np.testing.assert_array_equal(found.count, exact.count)
    found.check("site")
    assert np.abs(found.score - exact.score).max() > 0.1
    for other, config in (({"rounds-done": 0}, {"rotating-folds": 5}), ({"rounds-done": 3}, {})):
        same = tally_unseen(site, exact, SitePolicy(context, "a", other), config)
        np.testing.assert_array_equal(same.score, exact.score)


def test_a_tree_does_not_see_the_fold_that_sets_the_next_prices(monkeypatch) -> None:
    fitted, counted = [], []
    boost = BoostedTrees.boost
    tally = Site.tally

    def note(self, rows, *args, **kwargs):
        fitted.append({row.tobytes() for row in rows[0]})
        return boost(self, rows, *args, **kwargs)

    def count(self, rows):
        counted.append({row.tobytes() for row in rows[0]})
        return tally(self, rows)

    monkeypatch.setattr(BoostedTrees, "boost", note)
    rng = np.random.default_rng(0)  # no two rows alike
    rows = (rng.normal(size=(600, 2)), rng.integers(0, 2, 600), rng.integers(0, 2, 600))
    rows = (rows[0].astype(np.float32), *rows[1:])
    monkeypatch.setattr(Site, "tally", count)
    site = lambda: Site(BoostedTrees((0, 0)), rows=rows, name="a")  # noqa: E731
    bare = flower.FedXgbBagging(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    settings = ConfigRecord({**CONFIG, "rotating-folds": 4})
    grid = InProcessGrid([app_of(site())])
    FedGFT(bare, target=0.0, channel="query").start(
        grid, empty_booster((0, 0)), 3, train_config=settings
    )
    parts = [each for each in counted if len(each) < 600]
    assert all(440 < len(each) < 460 for each in fitted) and len(parts) == 3
    for trees, unseen in zip(fitted, parts, strict=True):
        assert not trees & unseen and len(trees | unseen) == 600


# Hostile replies


def grown(levels=(0, 0, 6)) -> dict:
    """A small valid booster, as JSON."""
    rng = np.random.default_rng(0)
    x = np.stack((rng.normal(size=200), rng.normal(size=200), rng.integers(0, 6, 200)), 1)
    model = BoostedTrees(levels)
    y = ((x[:, 0] > 0) ^ (x[:, 2] > 2)).astype(int)

    class Penalty:
        price = np.zeros((2, 3, 2))
        weights = None

    model.boost((x, y, np.zeros(200, int)), Penalty, {"max-depth": 3})
    assert any(tree["categories"] for tree in model.new_trees)
    return json.loads(Booster(tuple(levels)).grown(model.new_trees).to_json())


def tree_of(model: dict) -> dict:
    return model["learner"]["gradient_booster"]["model"]["trees"][0]


def put(name: str, index: int, value):
    def change(model: dict) -> None:
        tree_of(model)[name][index] = value

    return change


def leaf_of(value: float):
    def change(model: dict) -> None:
        tree = tree_of(model)
        tree["split_conditions"][tree["left_children"].index(-1)] = value

    return change


def copies(count: int):
    def change(model: dict) -> None:
        inner = model["learner"]["gradient_booster"]["model"]
        inner["trees"] *= count
        inner["tree_info"] = [0] * count
        inner["iteration_indptr"] = [0, count]

    return change


def deep(model: dict) -> None:
    tree = tree_of(model)
    size = 9
    left = [i + 1 if i % 2 == 0 and i < size - 1 else -1 for i in range(size)]
    right = [i + 2 if i % 2 == 0 and i < size - 1 else -1 for i in range(size)]
    parents = [2**31 - 1] + [i - 1 if i % 2 else i - 2 for i in range(1, size)]
    tree |= {"left_children": left, "right_children": right, "parents": parents}
    for name in ("base_weights", "loss_changes", "split_conditions", "sum_hessian"):
        tree[name] = [0.0] * size
    for name in ("default_left", "split_indices", "split_type"):
        tree[name] = [0] * size
    tree |= {name: [] for name in tree if name.startswith("categories")}


BAD = {
    "a leaf that is NaN": leaf_of(float("nan")),
    "a leaf that is infinite": leaf_of(float("inf")),
    "a leaf that decides everything": leaf_of(1e6),
    "a leaf that is a text": lambda m: put("split_conditions", 0, "1")(m),
    "a child that there is not": put("left_children", 0, 10_000),
    "a child that is its own parent": put("left_children", 0, 0),
    "a column that there is not": put("split_indices", 0, 99),
    "a negative column": put("split_indices", 0, -1),
    "a number that is a category": put("split_type", 0, 1 - tree_of(grown())["split_type"][0]),
    "a category that there is not": put("categories", 0, 77),
    "sets of categories that lie": put("categories_sizes", 0, 10**9),
    "lists of different lengths": lambda m: tree_of(m)["default_left"].pop(),
    "too many trees": copies(50),
    "a tree that is too deep": deep,
    "no trees": copies(0),
    "other columns": lambda m: m["learner"]["attributes"].update({"fedgft.levels": "[0,0,7]"}),
    "other types": lambda m: m["learner"].update(feature_types=["q", "q", "q"]),
    "another objective": lambda m: m["learner"]["objective"].update(name="reg:squarederror"),
    "linear functions": lambda m: m["learner"]["gradient_booster"].update(name="gblinear"),
    "a missing part": lambda m: m["learner"].pop("gradient_booster"),
    "another class": lambda m: m["learner"]["gradient_booster"]["model"].update(tree_info=[1]),
    "a base that is no probability": lambda m: m["learner"]["learner_model_param"].update(
        base_score="2"
    ),
}


def encode(model: dict) -> np.ndarray:
    return np.frombuffer(json.dumps(model).encode(), np.uint8)


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_valid_booster_is_refused(name: str) -> None:
    model = grown()
    terms = {"source": "it", "levels": (0, 0, 6), "max_trees": 2, "max_depth": 3}
    Booster.from_arrays(ArrayRecord({ARRAY: Array(encode(model))}), **terms)
    BAD[name](model)
    with pytest.raises(FedgftError) as wrong:
        found = Booster.from_arrays(ArrayRecord({ARRAY: Array(encode(model))}), **terms)
        if not found.trees:
            raise FedgftError("no trees", kind="data")
    assert wrong.value.kind == "data" and "\n" not in str(wrong.value)


def test_every_single_change_is_refused_or_harmless() -> None:
    """XGBoost is only given what it reads without harm, whatever number was changed."""
    rng = np.random.default_rng(0)
    text = json.dumps(grown()).encode()
    model = BoostedTrees((0, 0, 6))
    x = np.array([[0.0, 0.0, 1.0], [np.nan, np.nan, np.nan]], np.float32)
    read = 0
    for _ in range(400):
        data = np.frombuffer(text, np.uint8).copy()
        data[rng.integers(0, len(data), 2)] = rng.integers(32, 126, 2)
        try:
            model.load(ArrayRecord({ARRAY: Array(data)}))
            assert np.isfinite(model.margins(x)).all()
            read += 1
        except FedgftError:
            pass
    assert read < 400


def reply_with(make):
    """A client whose reply has another model: `make` gets the booster that it would send."""

    def app(site: Site):
        inner = app_of(site)

        def handle(message, context):
            reply = inner(message, context)
            if message.metadata.message_type == "train":
                reply.content["arrays"] = make(reply.content["arrays"])
            return reply

        return handle

    return app


def pickled(arrays):
    import pickle

    return ArrayRecord({ARRAY: Array(np.frombuffer(pickle.dumps({"a": 1}), np.uint8))})


def doubled(arrays):
    return ArrayRecord({ARRAY: arrays[ARRAY], "1": arrays[ARRAY]})


def as_numbers(arrays):
    return ArrayRecord({"weight": Array(np.zeros((2, 3), np.float32))})


def damaged(arrays):
    data = arrays[ARRAY].numpy()
    return ArrayRecord({ARRAY: Array(data[: len(data) // 2].copy())})


def unreadable(arrays):
    broken = Array(np.zeros(3, np.uint8))
    broken.data = b"no array"
    return ArrayRecord({ARRAY: broken})


@pytest.mark.parametrize("make", [pickled, doubled, as_numbers, damaged, unreadable])
def test_a_hostile_reply_is_left_out_and_the_run_continues(make, caplog) -> None:
    made = federation()
    sites = [client_site(made, k, "xgboost") for k in range(3)]
    apps = [app_of(sites[0]), app_of(sites[1]), reply_with(make)(sites[2])]
    with caplog.at_level("WARNING", "flwr"):
        found = train(made, FedGFT(bagging(), target=0.0), 3, grid=InProcessGrid(apps))
    assert len(found.trees) == 6
    assert "site 'site-2' is left out of this round" in caplog.text
    assert np.isfinite(of_clients(made, found)).all()


def test_larger_leaves_than_the_others_are_shortened(caplog) -> None:
    made = federation()
    sites = [client_site(made, k, "xgboost") for k in range(3)]

    def louder(arrays):
        sent = Booster.from_arrays(arrays, source="it")
        return Booster(sent.levels, sent.base).grown(scale_leaves(sent.trees, 20)).to_arrays()

    apps = [app_of(sites[0]), app_of(sites[1]), reply_with(louder)(sites[2])]
    with caplog.at_level("WARNING", "flwr"):
        found = train(made, MeasuredStrategy(bagging(), "sp"), 1, grid=InProcessGrid(apps))
    assert "larger leaves" in caplog.text
    weights = [len(made.client(k)) / len(made.rows) for k in range(3)]
    sizes = [largest_leaf([t]) / w for t, w in zip(found.trees, weights, strict=True)]
    assert sizes[2] < 5.01 * max(sizes[:2])


def test_a_site_refuses_a_damaged_booster() -> None:
    site = client_site(federation(), 0, "xgboost")
    for make in (pickled, doubled, as_numbers, damaged, unreadable):
        with pytest.raises(FedgftError, match="site 'site-0'") as wrong:
            site.load(make(empty_booster(site.model.levels)))
        assert wrong.value.kind == "data"


# Poor data


def test_tiny_and_one_sided_clients_train() -> None:
    """One row, one class, only missing values: each takes part."""
    made = federation(clients=2)
    levels = list_levels(made.dataset)
    x, y, a = client_site(made, 0, "xgboost").rows
    missing = np.full_like(x, np.nan)
    kinds = {"classes": made.dataset.classes, "groups": made.dataset.group_names}
    tables = {
        "usual": (x, y, a),
        "one row": (x[:1], y[:1], a[:1]),
        "one class": (x[y == 1], y[y == 1], a[y == 1]),
        "missing": (missing, y, a),
        "no groups": (x, y, np.full_like(a, -1)),
    }
    sites = [
        Site(BoostedTrees(levels), rows=rows, name=name, **kinds) for name, rows in tables.items()
    ]
    grid = InProcessGrid([app_of(site) for site in sites])
    for config in ({}, {"rotating-folds": 3}):
        ours = FedGFT(bagging(), "eop", target=0.0, pick=0.0)
        found = train(made, ours, 4, grid=grid, **config)
        assert len(found.trees) == 4 * 5 and ours.history[-1]["clients"] == 5
        assert np.isfinite(of_clients(made, found)).all()
        grid.new_run()


def test_more_than_two_classes_are_refused() -> None:
    from fedgft.flower.client import make_model

    with pytest.raises(FedgftError, match="two classes") as wrong:
        make_model("xgboost", features=3, classes=3, levels=(0, 0, 0))
    assert wrong.value.field == "model"


def test_rows_must_be_arrays_with_the_columns_of_the_trees() -> None:
    made = federation()
    x, y, a = client_site(made, 0, "xgboost").rows
    kinds = {"classes": made.dataset.classes, "groups": made.dataset.group_names}
    narrow = Site(BoostedTrees((0, 0, 6)), rows=(x[:, :2], y, a), name="narrow", **kinds)
    loader = Site(BoostedTrees((0, 0, 6)), rows=[(x, y, a)], name="loader", **kinds)
    for site, text in ((narrow, "columns"), (loader, "arrays")):
        with pytest.raises(FedgftError, match=text):
            train(
                made, MeasuredStrategy(bagging(), "sp"), 1, grid=InProcessGrid([app_of(site)] * 2)
            )


# A whole run


def write_tables(folder: Path, names=("north", "south", "east"), rows: int = 300) -> list[dict]:
    rng = np.random.default_rng(0)
    sites = []
    for name in names:
        group = rng.choice(["f", "m"], rows)
        x = rng.normal(size=rows).round(3)
        ok = (x + (group == "m") + rng.normal(size=rows) > 0.5).astype(int)
        shown = [
            None if hidden else value
            for hidden, value in zip(rng.random(rows) < 0.1, x, strict=True)
        ]
        town = rng.choice(["Bonn", "Ulm"], rows)
        frame = pl.DataFrame({"x": pl.Series(shown, dtype=pl.Float64), "town": town})
        frame = frame.with_columns(sex=pl.Series(group), ok=pl.Series(ok))
        if name == "east":  # a category that only this site has
            frame = frame.with_columns(town=pl.Series(rng.choice(["Bonn", "Rome"], rows)))
        frame.write_csv(folder / f"{name}.csv")
        sites.append({"site": name, "data": str(folder / f"{name}.csv")})
    return sites


def run_config(out: Path, **more) -> dict:
    config = tomllib.loads(APP.read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"data": "csv", "label": "ok", "group": "sex", "sites": 3, "rounds": 4}
    config |= {"model": "xgboost", "strategy": "FedXgbBagging", "out": str(out)}
    return config | more


def run_app(config: dict, nodes: list[dict], strategy=None) -> None:
    grid = InProcessGrid([make_client_app()] * len(nodes), nodes)
    for context in grid.contexts.values():
        context.run_config = config
    server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    serve(grid, server, strategy or bagging())


def test_a_run_on_tables_writes_a_model_that_predicts(tmp_path) -> None:
    nodes = write_tables(tmp_path)
    run_app(run_config(tmp_path / "run"), nodes)
    out = tmp_path / "run"
    held = json.loads((out / "history.json").read_text())
    assert held["sites"] == ["east", "north", "south"] and held["held_out"]["rows"]["counted"] > 200
    assert not (out / "model.safetensors").exists() and (out / "report.html").exists()
    model = load_model(out / "model.json")
    table = pl.read_csv(nodes[0]["data"])
    scores = model.predict_proba(table)
    theirs = xgboost.Booster(model_file=out / "model.json")
    features, _ = model.encoder.encode(table)
    kinds = ["c" if count else "q" for count in model.encoder.level_counts]
    matrix = xgboost.DMatrix(
        model.encoder.to_fields(features), feature_types=kinds, enable_categorical=True
    )
    np.testing.assert_allclose(scores[:, 1], theirs.predict(matrix), atol=1e-6)
    assert model.importances()["x"] > 0.2
    with pytest.warns(UserWarning, match="not among"):
        model.predict(table.with_columns(town=pl.lit("Oslo")))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"strategy": "FedAvg"}, "strategy"),
        ({"model": "logistic"}, "strategy"),
        ({"max-depth": 0}, "max_depth"),
        ({"local-trees": 1000}, "local_trees"),
        ({"rotating-folds": -1}, "rotating_folds"),
        ({"lr": 1.5}, "lr"),
    ],
)
def test_wrong_settings_are_refused(change: dict, field: str, tmp_path) -> None:
    config = run_config(tmp_path / "run", **change)
    nodes = write_tables(tmp_path)
    strategy = getattr(flower, config["strategy"])(**options())
    with pytest.raises(FedgftError) as wrong:
        run_app(config, nodes, strategy)
    assert wrong.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--model", "xgboost", "--base", "fedavg"], "base"),
        (["--base", "fedxgbbagging"], "base"),
        (["--model", "xgboost", "--base", "fedxgbcyclic", "--channel", "train"], "channel"),
        (["--model", "xgboost", "--set", "epochs=3"], "set"),
        (["--set", "max-depth=3"], "set"),
        (["--model", "xgboost", "--set", "max-depth=99"], "set"),
    ],
)
def test_the_command_refuses_what_does_not_fit(arguments, field, tmp_path, monkeypatch, capsys):
    from fedgft.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "local", "--out", "run", *arguments])
    assert ended.value.code == 2 and f"--{field}" in capsys.readouterr().err


WITHOUT_XGBOOST = """
import sys
sys.modules["xgboost"] = None
from fedgft.cli import main
main(["deploy", "local", "--model", "xgboost"])
"""


def test_without_xgboost_one_line_names_the_extra(tmp_path, monkeypatch) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_XGBOOST], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2 and "pip install 'fedgft[xgboost]'" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(FedgftError) as wrong:
        BoostedTrees((0,))
    assert wrong.value.kind == "extra"


@pytest.mark.slow
def test_a_deployed_run_equals_the_one_in_process(tmp_path) -> None:
    """Three sites as processes, with TLS and keys: the same trees as from the in-process grid."""
    nodes = write_tables(tmp_path)
    schema = tmp_path / "first" / "schema.json"
    run_app(run_config(tmp_path / "first", **{"test-share": 0.0, "rounds": 2}), nodes)
    files = [node["data"] for node in nodes]
    command = [sys.executable, "-m", "fedgft", "deploy", "local", "--model", "xgboost", "--json"]
    command += ["--rounds", "2", "--label", "ok", "--group", "sex", "--data", *files]
    command += ["--set", "test-share=0.0", f"schema={schema}", "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert row["status"] == "finished:completed" and row["sites"] == 3
    table = pl.concat([pl.read_csv(file) for file in files]).filter(pl.col("town") != "Rome")
    in_process, deployed = (
        load_model(tmp_path / name / "model.json").predict_proba(table) for name in ("first", "run")
    )
    np.testing.assert_allclose(deployed, in_process, atol=1e-6)
    histories = [
        json.loads((tmp_path / name / "history.json").read_text())["history"]
        for name in ("first", "run")
    ]
    gaps = [[each["gap_soft"] for each in history] for history in histories]
    np.testing.assert_allclose(gaps[0], gaps[1], atol=1e-9)

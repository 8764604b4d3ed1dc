"""Federated trees are the trees of the pooled rows, and those of a plain reference booster."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import xgboost

from fedgft.algorithms import Algorithm, Cohort, fedavg, fedgft, fedgft_control, get_method
from fedgft.algorithms.objectives import Objective
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine import History, predict_proba
from fedgft.engine.plan import index_rows
from fedgft.engine.state import Snapshot
from fedgft.engine.trees.rows import BinnedRows, read_fields
from fedgft.forest import Forest
from fedgft.metrics import CATALOG, Metric
from fedgft.models import Trees
from fedgft.study.cache import Checkpoints
from fedgft.sums import Sums
from reference_trees import Rule, boost
from small_federation import reordered
from tree_tables import dealt, draw_table, grow, numbers_only, pooled

SP = CATALOG["sp"]
EOP = CATALOG["eop"]
TABLE = draw_table(seed=1)
WHOLE = pooled(TABLE)
KINDS = {
    "plain": (fedavg(), {}),
    "three folds": (fedavg(), {"folds": 3}),
    "sp": (fedgft_control(SP, 0.0), {}),
    "sp, three folds": (fedgft_control(SP, 0.0), {"folds": 3}),
    "eop": (fedgft_control(EOP, 0.02), {}),
    "eop, three folds": (fedgft_control(EOP, 0.02), {"folds": 3}),
    "half of the rows": (fedgft_control(SP, 0.0), {"subsample": 0.5, "folds": 2}),
    "leaves": (fedgft(SP, 5.0), {"max_leaves": 6, "max_depth": 8}),
}


def same(one: History, two: History) -> None:
    """The same bits of the model, and the same sums over all clients and over test rows."""
    np.testing.assert_array_equal(one.params, two.params)
    for name in ("federation", "test"):
        for mine, theirs in zip(getattr(one, name).arrays, getattr(two, name).arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def forest(history: History, run: int = 0) -> Forest:
    return Forest.from_vector(history.params[run])


def margins(history: History, data: Dataset, run: int = 0) -> np.ndarray:
    return forest(history, run).margins(read_fields(data))


# One client, many clients


@pytest.mark.parametrize("kind", KINDS)
def test_many_clients_in_any_order_grow_the_trees_of_the_pooled_rows(kind: str) -> None:
    algorithm, model = KINDS[kind]
    alone = grow(WHOLE, algorithm, model=model)
    assert len(forest(alone)) > 2
    for clients, alpha in ((2, 0.1), (7, 100.0), (100, 0.1), (100, 100.0)):
        made = dealt(WHOLE, clients, alpha=alpha)
        same(alone, grow(made, algorithm, model=model))
    order = np.random.default_rng(0).permutation(made.num_clients).tolist()
    same(alone, grow(reordered(made, order), algorithm, model=model))


def test_prices_change_the_trees() -> None:
    """Otherwise the test above would compare plain trees with plain trees."""
    plain = grow(WHOLE, fedavg())
    for kind in ("sp", "eop", "leaves"):
        assert not np.array_equal(plain.params, grow(WHOLE, KINDS[kind][0]).params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sp", "eop, three folds", "half of the rows", "leaves"])
def test_the_number_of_threads_does_not_change_a_digit(kind: str) -> None:
    algorithm, model = KINDS[kind]
    made = dealt(pooled(draw_table(20_000, seed=2)), 5, alpha=1.0)
    model = {"max_depth": 6, **model}
    one, *others = (grow(made, algorithm, rounds=3, threads=n, model=model) for n in (1, 2, 3))
    for other in others:
        same(one, other)


@pytest.mark.parametrize("kind", ["plain", "sp, three folds", "half of the rows"])
def test_runs_that_train_together_equal_each_alone(kind: str) -> None:
    algorithm, model = KINDS[kind]
    other = replace(WHOLE, rows=WHOLE.rows[:300], offsets=np.array([0, 300]))
    made = [WHOLE, other, WHOLE]
    together = grow(made, algorithm, model=model, seeds=[0, 1, 2], threads=2)
    for run, seed in enumerate((0, 1, 2)):
        alone = grow(made[run], algorithm, model=model, seeds=seed)
        width = alone.params.shape[1]
        np.testing.assert_array_equal(together.params[run, :width], alone.params[0])
        assert not together.params[run, width:].any()
        np.testing.assert_array_equal(together.test.score[:, run], alone.test.score[:, 0])


def test_the_seed_draws_folds_and_subsamples() -> None:
    for model in ({"subsample": 0.5}, {"folds": 3}):
        algorithm = fedgft_control(SP, 0.0)
        one, two = (grow(WHOLE, algorithm, model=model, seeds=seed) for seed in (0, 1))
        assert not np.array_equal(one.params, two.params)


PLAIN_PYTHON = """
import sys, warnings
sys.modules["numba"] = None
warnings.simplefilter("ignore")
from tree_tables import draw_table, grow, pooled
options = {"metric": "sp", "rounds": 3, "model": {"folds": 2}}
print(grow(pooled(draw_table(80)), "fedgft-control", **options).params.tobytes().hex())
"""


@pytest.mark.slow
def test_without_numba_the_same_trees_grow() -> None:
    options = {"metric": "sp", "rounds": 3, "model": {"folds": 2}}
    expected = grow(pooled(draw_table(80)), "fedgft-control", **options).params
    command = [sys.executable, "-c", PLAIN_PYTHON]
    folder = Path(__file__).parent
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert found.stdout.strip() == expected.tobytes().hex()


# A reference that knows no histograms

REFERENCES = {
    "two classes": ({}, Rule()),
    "three classes": ({"classes": 3}, Rule()),
    "other settings": ({}, Rule(4, 0.3, 2.5, 3.0, 0.2)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_trees_are_those_of_a_plain_booster(name: str) -> None:
    """Gradients are rounded to 2^-17, so the value of a leaf, a mean, is off by less than 1e-5."""
    table, rule = REFERENCES[name]
    data = draw_table(150, seed=3, **table)
    whole = pooled(data)
    history = grow(dealt(whole, 4, alpha=0.5), rounds=5, model=vars(rule))
    fields = read_fields(data).astype(np.float64)
    assert np.isnan(fields[:, 1]).any() and np.isnan(fields[:, 2]).any()
    fitted = np.isin(np.arange(len(data)), whole.rows)
    categorical = np.array(data.encoder.are_categorical)
    expected = boost(fields, categorical, data.labels, fitted, rule, trees=5, lr=0.3)
    found = forest(history)
    features = [sorted(row[row >= 0].tolist()) for row in found.feature]
    assert features == expected.splits
    assert any(1 in splits for splits in features) and any(2 in splits for splits in features)
    np.testing.assert_allclose(margins(history, data), expected.margins, atol=1e-4)


@dataclass(frozen=True)
class FixedPrices:
    """Prices of the second class by label and group, which nothing changes."""

    by_cell: tuple[tuple[float, ...], ...]
    metric: Metric = SP

    def init(self, runs: int) -> None:
        return None

    def update(self, state: None, cohort: Cohort, received: Sums) -> None:
        return None

    def price(self, state: None, *, run: np.ndarray, classes: int) -> np.ndarray:
        cells = np.array(self.by_cell)  # (label, group), the last group is "not recorded"
        each = np.stack((0 * cells, cells), axis=-1)
        return np.broadcast_to(each, (len(run), *each.shape))


def test_the_price_of_a_row_enters_its_gradient() -> None:
    data = draw_table(150, seed=4)
    whole = pooled(data)
    cells = ((0.5, -1.0, 0.0), (1.25, -0.25, 0.0))
    algorithm = Algorithm(objective=Objective(penalties=(FixedPrices(cells),)))
    history = grow(whole, algorithm, rounds=4)
    fitted = np.isin(np.arange(len(data)), whole.rows)
    price = np.array(cells)[data.labels, data.groups]
    fields = read_fields(data).astype(np.float64)
    categorical = np.array(data.encoder.are_categorical)
    options = {"trees": 4, "lr": 0.3, "price": price}
    expected = boost(fields, categorical, data.labels, fitted, Rule(), **options)
    np.testing.assert_allclose(margins(history, data), expected.margins, atol=1e-4)


def test_one_tree_is_that_of_xgboost() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 4)).round(1)
    labels = (x[:, 0] * x[:, 1] + x[:, 2] + rng.logistic(0, 0.5, 500) > 0).astype(np.int64)
    data = numbers_only(x, labels, rng.integers(0, 2, 500))
    model = {"max_depth": 5, "l2": 1.5, "min_child_weight": 2.0}
    history = grow(pooled(data, 500), rounds=1, lr=1.0, model=model)
    ours = margins(history, data)[:, 0]
    base = forest(history).base[0]
    options = {
        "objective": "binary:logistic",
        "eta": 1.0,
        "max_depth": 5,
        "reg_lambda": 1.5,
        "min_child_weight": 2.0,
        "base_score": float(1 / (1 + np.exp(-base))),
        "nthread": 1,
    }
    for method in ("hist", "exact"):
        matrix = xgboost.DMatrix(x, labels)
        booster = xgboost.train(options | {"tree_method": method}, matrix, 1)
        table = booster.get_dump()[0]
        theirs = booster.predict(matrix, output_margin=True)
        assert len(np.unique(ours)) == table.count("leaf") > 8
        features = [int(part.split("<")[0]) for part in table.split("[f")[1:]]
        inner = forest(history).feature[0]
        assert sorted(features) == sorted(inner[inner >= 0].tolist())
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


# Laws


@pytest.mark.parametrize(("classes", "lr"), [(2, 0.1), (2, 1.0), (3, 0.3), (3, 1.0)])
def test_without_prices_the_loss_falls_with_every_tree(classes: int, lr: float) -> None:
    data = draw_table(seed=5, classes=classes)
    whole = pooled(data)
    params = []
    options = {"on_model": lambda done, found: params.append(found[0]), "every": 1}
    grow(whole, rounds=12, lr=lr, **options)
    loss = []
    for each in params:
        probs = predict_proba(whole, Trees(), each, whole.rows)
        loss.append(-np.log(probs[np.arange(len(whole.rows)), data.labels[whole.rows]]).mean())
    assert (np.diff(loss) < 0).all()
    assert loss[0] == pytest.approx(np.log(classes), rel=0.1)


def test_without_a_price_every_method_grows_plain_trees() -> None:
    made = dealt(WHOLE, 5, alpha=0.5)
    plain = grow(made, fedavg())
    for method in (fedgft(SP, 0.0), get_method("lft", SP, 0.0)):
        same(plain, grow(made, method))
    first = grow(made, fedgft_control(SP, 0.0), rounds=1)  # the first model sets no price
    same(grow(made, fedavg(), rounds=1), first)
    same(plain, grow(made, fedgft_control(SP, 0.9, pick=0.0)))  # no gap is above the target


def test_twice_the_rows_of_half_the_weight_change_nothing() -> None:
    """As many labels of each kind, so that both start from the same margin."""
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    x = rng.standard_normal((200, 3)).round(2) + 0.7 * labels[:, None]
    data = numbers_only(x, labels, rng.integers(0, 2, 200))
    whole = pooled(data, 200)
    twice = replace(whole, rows=np.repeat(whole.rows, 2), offsets=np.array([0, 400]))
    light = Algorithm(objective=Objective(row_weights=lambda count: np.full(count.shape, 0.5)))
    found = grow(twice, light)
    np.testing.assert_array_equal(found.params, grow(whole, fedavg()).params)
    assert not np.array_equal(found.params, grow(whole, light).params)  # l2 and least weight bind


def continuous(rows: int = 400) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 5))
    labels = (x[:, 0] + x[:, 1] * x[:, 2] + rng.logistic(0, 0.7, rows) > 0).astype(np.int64)
    return numbers_only(x, labels, rng.integers(0, 2, rows))


SOLID = {"min_child_weight": 4.0}  # no leaves of few rows, which several columns divide alike


def test_the_order_of_columns_does_not_matter() -> None:
    data = continuous()
    order = np.array([3, 1, 4, 0, 2])
    other = replace(data, features=data.features[:, order])
    one, two = (grow(pooled(each), "fedgft-control", model=SOLID) for each in (data, other))
    np.testing.assert_array_equal(margins(one, data), margins(two, other))
    np.testing.assert_array_equal(forest(one).importances()[order], forest(two).importances())


def test_maps_that_keep_the_order_of_values_do_not_matter() -> None:
    """Thresholds are values of training rows, so test rows stay on their side, too."""
    data = continuous()
    mapped = data.features.copy()
    mapped[:, 0] = np.exp(mapped[:, 0])
    mapped[:, 1] = mapped[:, 1] ** 3 + 100
    mapped[:, 2] = np.arctan(mapped[:, 2])
    other = replace(data, features=mapped)
    one, two = (grow(pooled(each), "fedgft-control", model=SOLID) for each in (data, other))
    np.testing.assert_array_equal(margins(one, data), margins(two, other))


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("metric", ["sp", "eop"])
def test_the_names_of_groups_do_not_matter(groups: int, metric: str) -> None:
    data = draw_table(seed=6, groups=groups)
    other = replace(data, groups=(data.groups + 1) % groups)
    one, two = (grow(pooled(each), fedgft_control(metric, 0.0), rounds=8) for each in (data, other))
    np.testing.assert_array_equal(one.params, two.params)


# Rows that a model has not seen


def test_folds_are_counted_by_models_that_have_not_seen_them() -> None:
    """By hand: the reference leaves out a fold, and decides about its rows."""
    data = draw_table(120, seed=7)
    whole = pooled(data)
    history = grow(dealt(whole, 3, alpha=1.0), rounds=4, model={"folds": 3}, seeds=9)
    index = index_rows([whole])
    fold = BinnedRows(index, Trees(folds=3), np.array([9], np.uint64), 1).folds
    assert sorted(set(fold.tolist())) == [0, 1, 2]
    fields = read_fields(data).astype(np.float64)
    training = np.isin(np.arange(len(data)), whole.rows)
    categorical = np.array(data.encoder.are_categorical)
    options = {"trees": 4, "lr": 0.3, "base_rows": training}
    logits = np.empty(len(whole.rows))
    for k in range(3):
        fitted = np.zeros(len(data), bool)
        fitted[whole.rows[fold != k]] = True
        made = boost(fields, categorical, data.labels, fitted, Rule(), **options)
        logits[fold == k] = made.margins[whole.rows[fold == k], 0]
    positive = 1 / (1 + np.exp(-logits))
    expected = count(data, whole.rows, positive)
    np.testing.assert_array_equal(history.federation[-1, 0].decision, expected.decision)
    np.testing.assert_allclose(history.federation[-1, 0].score, expected.score, atol=1e-3)
    seen = grow(whole, rounds=4)
    assert seen.federation[-1].accuracy() > history.federation[-1].accuracy()
    np.testing.assert_array_equal(seen.test.decision, history.test.decision)


def count(data: Dataset, rows: np.ndarray, positive: np.ndarray) -> Sums:
    probs = np.stack((1 - positive, positive), axis=1)
    return Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))


@pytest.mark.parametrize("classes", [2, 3])
def test_sums_are_those_of_the_predictions_of_the_model(classes: int) -> None:
    data = draw_table(seed=8, classes=classes)
    made = dealt(pooled(data), 4, alpha=0.5)
    history = grow(made, fedgft_control(SP, 0.0), rounds=10)
    model = history.model()
    for name, rows in (("federation", made.rows), ("test", made.test)):
        probs = predict_proba(made, Trees(), history.params[0], rows)
        np.testing.assert_array_equal(probs, model.predict_proba(data.features[rows]))
        known = {"num_groups": len(data.group_names)}
        expected = Sums.of(probs, data.labels[rows], data.groups[rows], **known)
        found = getattr(history, name)[-1, 0]
        np.testing.assert_array_equal(found.count, expected.count)
        np.testing.assert_array_equal(found.decision, expected.decision)
        np.testing.assert_allclose(found.score, expected.score, atol=1e-5)
    each = history.after.map(lambda array: array[0].sum(0))
    np.testing.assert_array_equal(each.decision, history.federation[-1, 0].decision)


def overfitted(runs: int, training: int = 3000, test: int = 5000) -> list[Federation]:
    """Tables of noise, mostly: deep trees learn the labels of their rows by heart."""
    rng = np.random.default_rng(0)
    rows = runs * (training + test)
    group = (rng.random(rows) < 0.2).astype(np.int64)
    x = rng.standard_normal((rows, 12))
    score = 1.2 * x[:, 0] - 1.5 * group + rng.logistic(0, 1.0, rows)
    data = numbers_only(np.column_stack((x, group)), (score > 0).astype(np.int64), group)
    whole = pooled(data, training)
    starts = np.arange(runs) * (training + test)
    return [replace(whole, rows=whole.rows + s, test=whole.test[:test] + s) for s in starts]


@pytest.mark.slow
def test_folds_close_the_gap_on_rows_that_are_not_trained_on() -> None:
    """Steered by training rows, the controller sees no gap of deep trees where there is one."""
    made = overfitted(4)
    test = {}
    seen = {}
    for folds in (0, 3):
        model = {"max_depth": 8, "folds": folds}
        options = {"metric": "eop", "target": 0.0, "rounds": 60, "lr": 0.2, "model": model}
        history = grow(made, "fedgft-control", **options)
        test[folds] = history.test[-1].gap(EOP, "hard")
        seen[folds] = history.federation[-1].gap(EOP, "hard")
    assert (seen[0] < 0.01).all() and (test[0] > 0.2).all()
    assert (test[3] < test[0]).all() and test[3].mean() < 0.6 * test[0].mean()
    assert abs(seen[3].mean() - test[3].mean()) < 0.1  # out of fold, the gap is not hidden


# Interrupted runs


def copied(snapshot: Snapshot) -> Snapshot:
    """Its arrays are the run's own, and go on changing."""
    return replace(snapshot, arrays={n: a.copy() for n, a in snapshot.arrays.items()})


CHECKED = {
    "a target": ("sp, three folds", {}),
    "subsample": ("half of the rows", {}),
    "late sums": ("eop", {"lag": True}),
    "noise": ("leaves", {"noise": 2.0}),
    "some clients": ("sp", {"cohort": 3}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_resumed_run_ends_with_the_same_bits(name: str) -> None:
    kind, settings = CHECKED[name]
    algorithm, model = KINDS[kind]
    made = [dealt(WHOLE, 5, alpha=1.0), dealt(WHOLE, 5, alpha=1.0, seed=1)]
    options = {"model": model, "settings": settings, "every": 2, "seeds": [3, 4]}
    kept: dict[int, Snapshot] = {}

    def keep(done: int, take) -> None:
        kept[done] = copied(take())

    whole = grow(made, algorithm, **options, on_state=keep)
    assert sorted(kept) == [1, 2, 3, 4, 5]
    for snapshot in kept.values():
        same(whole, grow(made, algorithm, **options, resume=snapshot))


def test_the_best_model_before_an_interruption_is_kept() -> None:
    """In this run the best model has fewer trees than the model after the interruption."""
    kept: list[Snapshot] = []
    options = {"model": {"folds": 2}, "rounds": 12, "lr": 0.5}
    made = pooled(draw_table(seed=2))

    def keep(done: int, take) -> None:
        if done == 11:
            kept.append(copied(take()))

    whole = grow(made, fedgft_control(EOP, 0.0), **options, on_state=keep)
    assert len(forest(whole)) < 11
    same(whole, grow(made, fedgft_control(EOP, 0.0), **options, resume=kept[0]))


def test_a_checkpoint_on_disk_continues_with_the_same_bits(tmp_path) -> None:
    algorithm, model = KINDS["sp, three folds"]
    folder = Checkpoints(tmp_path / "c", every=4)
    put = lambda done, take: folder.put("key", done, take)  # noqa: E731
    whole = grow(WHOLE, algorithm, model=model, on_state=put)
    found = Checkpoints(tmp_path / "c", resume=True).get("key")
    assert found is not None and found.round == 4
    same(whole, grow(WHOLE, algorithm, model=model, resume=found))

"""Which methods, settings and tables trees take, and which they refuse with the setting's name."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import fedgft
from fedgft.algorithms import fedavg, fedgft_control, get_method, with_base
from fedgft.algorithms.weightings import FairFed
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine import History, simulate
from fedgft.engine.trees.bins import Bins, agree_on_bins, count_values, place_edges
from fedgft.engine.trees.rows import read_fields
from fedgft.errors import FedgftError
from fedgft.forest import Forest
from fedgft.metrics import CATALOG
from fedgft.models import MAX_DEPTH, Trees
from synthetic_images import draw_images
from tree_tables import dealt, draw_table, grow, numbers_only, pooled

SP = CATALOG["sp"]
TABLE = draw_table(seed=11)
MADE = dealt(pooled(TABLE), 6, alpha=0.5)


def forest(history: History, run: int = 0) -> Forest:
    found = Forest.from_vector(history.params[run])
    found.check()  # no NaN, and every walk ends
    return found


def refused(field: str, call, *arguments, **options) -> FedgftError:
    with pytest.raises(FedgftError) as caught:
        call(*arguments, **options)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    return caught.value


# Methods


@pytest.mark.parametrize("metric", ["sp", "eop", "eo", "fpr"])
@pytest.mark.parametrize("name", ["fedgft", "fedgft-control"])
def test_global_prices_narrow_the_global_gap(name: str, metric: str) -> None:
    method = get_method(name, CATALOG[metric], 0.0 if name == "fedgft-control" else 20.0)
    plain = grow(MADE, rounds=20)
    found = grow(MADE, method, rounds=20)
    kind = "hard" if name == "fedgft-control" else "soft"
    gaps = [each.federation[-1].gap(metric, kind)[0] for each in (plain, found)]
    assert len(forest(found)) > 5
    assert gaps[1] < gaps[0]


def test_local_prices_narrow_the_gaps_of_clients() -> None:
    plain, found = (grow(MADE, get_method("lft", SP, lam), rounds=20) for lam in (0.0, 20.0))
    gaps = [np.nanmean(each.after[0].gap(SP, "soft")) for each in (plain, found)]
    assert gaps[1] < gaps[0]


def test_local_reweighing_weighs_the_rows_of_each_client() -> None:
    """Its weights are those of the cells of a client, so partitions of the rows differ."""
    lrw = get_method("lrw", SP, 0.0)
    one, two = (grow(made, lrw, rounds=10) for made in (MADE, pooled(TABLE)))
    assert not np.array_equal(one.params, two.params)
    assert not np.array_equal(one.params, grow(MADE, rounds=10).params)
    assert len(forest(one)) == 10


def test_fairfed_weighs_clients_by_their_gaps() -> None:
    found = grow(MADE, get_method("fairfed", SP, 5.0), rounds=10)
    none = grow(MADE, get_method("fairfed", SP, 0.0), rounds=10)
    assert len(forest(found)) == 10
    assert not np.array_equal(found.params, none.params)


@pytest.mark.parametrize(
    "base", ["fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "fedyogi"]
)
def test_bases_that_change_local_training_are_refused(base: str) -> None:
    refused("model", grow, MADE, with_base(fedavg(), base))
    refused("model", grow, MADE, "fedgft-control", base=base)


def test_weights_that_follow_from_locally_trained_models_are_refused() -> None:
    exp = get_method("fairfed", SP, 1.0, rule="exp")
    assert isinstance(exp.weighting, FairFed) and exp.weighting.sees == "trained"
    refused("model", grow, MADE, exp)


def test_what_trees_cannot_start_from_or_read_is_refused() -> None:
    assert refused("init", grow, MADE, init=np.zeros(3)).kind == "unsupported"
    images = fedgft.partition(draw_images(40, 16), clients=3, seed=0)
    assert refused("model", simulate, images, "trees", "fedavg", rounds=1).kind == "unsupported"
    scaled = replace(MADE, dataset=TABLE.standardized())
    assert refused("federations", grow, scaled).kind == "conflict"
    refused("model", simulate, MADE, Trees, "fedavg", rounds=1)  # the class itself


def test_a_standardized_federation_grows_the_same_trees() -> None:
    """Its dataset holds the columns as they are; only networks receive scaled ones."""
    scaled = fedgft.standardize(MADE)
    np.testing.assert_array_equal(grow(scaled).params, grow(MADE).params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_depth", value) for value in (0, MAX_DEPTH + 1, True)),
        *(("max_leaves", value) for value in (1, 2**MAX_DEPTH + 1)),
        *(("bins", value) for value in (1, 256)),
        *(("min_bin_rows", value) for value in (0, -1)),
        *(("folds", value) for value in (1, -1, 101)),
        *(("l2", value) for value in (-1e-9, float("nan"), float("inf"))),
        *(("min_child_weight", value) for value in (-1, float("nan"))),
        *(("category_l2", value) for value in (-1, float("inf"))),
        *(("category_smoothing", value) for value in (-1, float("nan"))),
        *(("subsample", value) for value in (0, 1.1, -0.5, float("nan"))),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value) -> None:
    refused(field, Trees, **{field: value})


@pytest.mark.slow
def test_the_ends_of_all_ranges_train() -> None:
    """The smallest and the largest values, together where they can be."""
    extremes = (
        {"max_depth": 1, "bins": 2, "subsample": 0.01, "min_bin_rows": 10_000},
        {"max_depth": MAX_DEPTH, "l2": 0.0, "min_child_weight": 0.0, "category_smoothing": 0.0},
        {"max_leaves": 2, "max_depth": MAX_DEPTH, "l2": 1e6},
        {"folds": 100, "max_depth": 1},
        {"min_child_weight": 1e9},
    )
    for model in extremes:
        forest(grow(MADE, fedgft_control(SP, 0.0), rounds=3, model=model))
    stumps = forest(grow(MADE, rounds=3, model=extremes[0]))
    assert (stumps.feature[:, 1:] < 0).all()
    pairs = forest(grow(MADE, rounds=3, model=extremes[2]))
    assert ((pairs.feature >= 0).sum(1) == 1).all()
    nothing = forest(grow(MADE, rounds=3, model=extremes[4]))
    assert (nothing.feature < 0).all()


@pytest.mark.parametrize("leaves", [2, 5, 9])
def test_no_tree_has_more_leaves_or_levels_than_asked_for(leaves: int) -> None:
    found = forest(grow(MADE, rounds=4, model={"max_leaves": leaves, "max_depth": 4}))
    assert ((found.feature >= 0).sum(1) == leaves - 1).all()
    depth = np.zeros(found.feature.shape, int)
    for tree, node in zip(*np.nonzero(found.feature >= 0), strict=True):
        depth[tree, found.left[tree, node] + np.arange(2)] = depth[tree, node] + 1
    assert depth.max() <= 4


# Tables


def labels_of(x: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (x + rng.logistic(0, 0.4, len(x)) > 0).astype(np.int64)
    return labels, rng.integers(0, 2, len(x))


def trained(made: Federation, **options) -> History:
    """Grow with a target, and check that nothing is NaN."""
    found = grow(made, fedgft_control(SP, 0.0), rounds=8, **options)
    forest(found)
    for sums in (found.federation, found.test):
        assert all(np.isfinite(array).all() for array in sums.arrays)
    probs = found.model().predict_proba(made.dataset.features)
    assert np.isfinite(probs).all()
    return found


def test_columns_of_more_values_than_bins() -> None:
    x = np.random.default_rng(0).standard_normal((5000, 2))
    data = numbers_only(x, *labels_of(x[:, 0]))
    for bins in (2, 16, 255):
        found = trained(pooled(data), model={"bins": bins})
        thresholds = np.unique(forest(found).threshold[forest(found).feature == 0])
        assert 1 <= len(thresholds) <= bins - 1
        assert np.isin(thresholds, x[:3500, 0]).all()


def test_bins_hold_about_as_many_rows_each_and_heavy_values_alone() -> None:
    rng = np.random.default_rng(0)
    column = np.where(rng.random(10_000) < 0.4, 0.0, rng.exponential(1.0, 10_000))
    values, counts = count_values(column)
    assert counts.sum() == 10_000 and (np.diff(values) > 0).all()
    edges = place_edges(values, counts, most=50)
    rows = np.histogram(column, np.concatenate(([-1.0], edges + 1e-12)))[0]
    assert len(edges) <= 50 and edges[-1] == column.max() and edges[0] == 0.0
    assert rows[0] == counts[0] and rows[1:].max() <= 2 * rows[1:-1].min()
    least = place_edges(values, counts, most=50, least_rows=1000)
    assert np.histogram(column, np.concatenate(([-1.0], least + 1e-12)))[0].min() >= 1000


def test_bins_follow_from_the_counts_of_all_clients() -> None:
    """One value twice as often is another table, wherever its rows are."""
    rng = np.random.default_rng(0)
    column = rng.standard_normal(3000).round(2)
    shuffled = rng.permutation(3000)
    parts = [agree_on_bins(column[:, None], rows, [0]) for rows in (np.arange(3000), shuffled)]
    np.testing.assert_array_equal(parts[0].upper[0], parts[1].upper[0])


def test_constant_columns_are_never_asked_about() -> None:
    x = np.random.default_rng(0).standard_normal((400, 3))
    x[:, 1] = 7.0
    found = trained(pooled(numbers_only(x, *labels_of(x[:, 0]))))
    assert forest(found).importances()[1] == 0
    x[:] = 7.0  # nothing to ask at all
    found = trained(pooled(numbers_only(x, *labels_of(np.arange(400) - 200.0))))
    assert not forest(found).importances().any()


def test_values_of_any_size() -> None:
    """Neighbors of float32 at its end, and at zero."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 3))
    sizes = x * np.array([1e30, 1e-30, 1.0])
    plain, huge = (pooled(numbers_only(each, *labels_of(x[:, 0]))) for each in (x, sizes))
    found = trained(huge)
    pairs = ((found, huge), (trained(plain), plain))
    logits = [forest(each).margins(made.dataset.features) for each, made in pairs]
    np.testing.assert_array_equal(*logits)
    small = sizes.astype(np.float32)
    trained(pooled(numbers_only(small, *labels_of(x[:, 0]))))


def test_numbers_that_are_missing_at_one_client_or_everywhere() -> None:
    """The column z of the table is NaN where its second feature says so."""
    data = draw_table(seed=12)
    at = [data.columns.index(name) for name in ("z", "z=(missing)")]
    features = data.features.copy()
    made = dealt(pooled(data), 4, alpha=5.0)
    features[np.ix_(made.client(0), at)] = [0.0, 1.0]
    one = replace(made, dataset=replace(data, features=features))
    assert np.isnan(read_fields(one.dataset)[made.client(0), 2]).all()
    assert forest(trained(one)).importances()[2] > 0
    features = features.copy()
    features[:, at] = [0.0, 1.0]
    nowhere = replace(made, dataset=replace(data, features=features))
    assert forest(trained(nowhere)).importances()[2] == 0
    single = data.features.copy()  # in one training row
    single[:, at[1]] = 0.0
    single[made.rows[0], at] = [0.0, 1.0]
    trained(replace(made, dataset=replace(data, features=single)))
    filled = data.features.copy()  # nothing is missing in training, but in the test rows
    filled[made.rows, at[1]] = 0.0
    trained(replace(made, dataset=replace(data, features=filled)))


def test_categories_that_training_rows_do_not_have() -> None:
    """They go the way of missing values, which is that of most rows where there were none."""
    data = draw_table(seed=13)
    unseen = np.isnan(read_fields(data)[:, 1])
    made = pooled(data)
    assert unseen[made.test].any() and not unseen[made.rows].any()
    found = trained(made)
    assert forest(found).importances()[1] > 0
    fields = read_fields(data)[made.test].astype(np.float64)
    beyond = fields.copy()
    beyond[:, 1] = 4000.0  # no such level
    negative = fields.copy()
    negative[:, 1] = -1.0
    for each in (beyond, negative):
        assert np.isfinite(forest(found).margins(each)).all()
    missing = fields.copy()
    missing[:, 1] = np.nan
    np.testing.assert_array_equal(forest(found).margins(missing), forest(found).margins(negative))


def test_more_levels_than_bins_share_the_last_one() -> None:
    """The rarest levels are one category; the frequent ones are told apart."""
    rng = np.random.default_rng(0)
    level = np.where(rng.random(4000) < 0.5, rng.integers(0, 3, 4000), rng.integers(3, 40, 4000))
    fields = level[:, None].astype(np.float32)
    bins = agree_on_bins(fields, np.arange(4000), [40], most=10)
    assert bins.sizes.tolist() == [11]
    assert len(set(bins.level_bins[0][:3].tolist())) == 3
    assert np.bincount(bins.level_bins[0])[-1] == 40 - 9
    codes = np.empty((1, 4000), np.uint8)
    bins.encode(fields, np.arange(4000), codes, 1)
    np.testing.assert_array_equal(codes[0], bins.level_bins[0][level])
    odd = np.array([[np.nan], [-1.0], [40.0]], np.float32)
    codes = np.empty((1, 3), np.uint8)
    bins.encode(odd, np.arange(3), codes, 1)
    assert codes.tolist() == [[10, 10, 10]]  # the bin of missing values
    trained(pooled(draw_table(seed=14)), model={"bins": 3})


def test_bins_of_columns_without_values() -> None:
    bins = agree_on_bins(np.full((5, 2), np.nan, np.float32), np.arange(5), [0, 3])
    assert isinstance(bins, Bins) and bins.sizes.tolist() == [1, 4]
    codes = np.empty((2, 5), np.uint8)
    bins.encode(np.array([[1.0, 2.0]] * 5, np.float32), np.arange(5), codes, 1)
    assert codes[:, 0].tolist() == [0, 2]


# Clients


def test_clients_of_one_row_without_rows_and_of_one_class() -> None:
    data = draw_table(seed=15)
    order = np.lexsort((np.arange(420), data.labels[:420]))
    cuts = np.array([0, 0, 1, 2, 150, 150, 150, 419, 420])
    made = Federation(data, np.arange(420)[order], cuts, np.arange(420, 600))
    assert (made.sizes == 0).sum() == 3 and (made.sizes == 1).sum() == 3
    assert len(set(data.labels[made.client(3)])) == 1
    for name in ("fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control"):
        strength = {"fairfed": 1.0, "lft": 10.0, "fedgft": 10.0}.get(name, 0.0)
        forest(grow(made, get_method(name, SP, strength), rounds=3))
    one = replace(made, offsets=np.array([0, 420]), keys=np.empty(0, np.uint64))
    np.testing.assert_array_equal(trained(made).params, trained(one).params)


def test_hardly_any_rows() -> None:
    data = draw_table(40, seed=16)
    rows = np.arange(40)
    for count in (0, 1, 2):
        made = Federation(data, rows[:count], np.array([0, count]), rows[20:])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = grow(made, fedgft_control(SP, 0.0), rounds=3, model={"folds": 2})
        assert np.isfinite(found.model().predict_proba(data.features)).all()


def test_one_class_everywhere_gives_its_share() -> None:
    data = draw_table(200, seed=17)
    made = pooled(replace(data, labels=np.ones_like(data.labels)))
    probs = grow(made, rounds=5).model().predict_proba(data.features)
    assert (probs[:, 1] > 0.99).all()


def test_rows_without_a_recorded_group() -> None:
    data = draw_table(seed=18)
    groups = np.where(np.arange(600) % 4 == 0, -1, data.groups)
    trained(pooled(replace(data, groups=groups)))


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["sp", "eop"])
def test_three_classes(metric: str) -> None:
    """Softmax: the probabilities are right on average, and the controller lowers the gap."""
    data: Dataset = draw_table(3000, seed=19, classes=3)
    made = dealt(pooled(data), 5, alpha=0.5)
    plain = grow(made, rounds=20)
    probs = plain.model().predict_proba(data.features[made.test])
    np.testing.assert_allclose(probs.sum(1), 1)
    assert plain.test[-1].accuracy()[0] > 0.6
    assert np.abs(probs.mean(0) - np.bincount(data.labels[made.test]) / len(made.test)).max() < 0.03
    fair = grow(made, fedgft_control(metric, 0.0), rounds=40, lr=0.1)
    gaps = [each.federation[-1].gap(metric, "hard")[0] for each in (plain, fair)]
    assert gaps[1] < 0.4 * gaps[0]


def test_settings_of_a_simulation_hold_for_trees() -> None:
    some = grow(MADE, rounds=4, settings={"cohort": 2, "sampling": "size"})
    assert not np.array_equal(some.params, grow(MADE, rounds=4).params)
    late = grow(MADE, fedgft_control(SP, 0.0), settings={"lag": True})
    assert not np.array_equal(late.params, grow(MADE, fedgft_control(SP, 0.0)).params)
    test = grow(MADE, settings={"eval_on": "test"})
    assert test.federation is None and test.test is not None
    default = simulate(MADE, Trees(max_depth=2, folds=0), "fedavg", seeds=0)
    assert default.executor == "trees" and default.rounds[-1] == 100

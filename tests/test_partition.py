"""Laws of every partition: each row once, no empty client, one seed gives one partition."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from fedgft.cli import main
from fedgft.data import Dataset
from fedgft.data.dataset import standardize
from fedgft.data.generated import synthetic
from fedgft.data.partition import KINDS, PARTITION_STREAM, inner_split, make_rng, partition
from fedgft.errors import FedgftError
from fedgft.study import Study, get_protocol


def people(n, *, groups=2, seed=0, unrecorded=False, test=None):
    rng = np.random.default_rng(seed)
    return Dataset(
        name="people",
        features=np.zeros((n, 1), np.float32),
        labels=rng.integers(2, size=n),
        groups=rng.integers(-1 if unrecorded else 0, groups, size=n),
        columns=("x",),
        group_names=tuple(str(g) for g in range(groups)),
        clients=rng.integers(3, size=n),
        client_names=("a", "b", "c"),
        test=test,
    )


cuts = st.fixed_dictionaries(
    {
        "n": st.integers(6, 200),
        "groups": st.integers(1, 3),
        "seed": st.integers(0, 99),
        "alpha": st.sampled_from([1e-300, 0.01, 0.5, 100, 1e300]),
        "test": st.sampled_from(["overlap", "disjoint"]),
        "crowd": st.floats(0, 1),
    }
)


def cut_up(draw, kind):
    """The data set drawn and its federation, from few clients to nearly one a row."""
    data = people(draw["n"], groups=draw["groups"], seed=draw["seed"], unrecorded=True)
    fewest = len(np.unique(data.groups))
    most = max(fewest, draw["n"] // 2)
    return data, partition(
        data,
        kind,
        clients=fewest + int(draw["crowd"] * (most - fewest)),
        alpha=draw["alpha"],
        seed=draw["seed"],
        protocol_test=draw["test"],
    )


def same(one, two):
    return all(
        np.array_equal(getattr(one, f), getattr(two, f)) for f in ("rows", "offsets", "test")
    )


@given(cuts, st.sampled_from(KINDS))
def test_every_row_has_one_owner_and_nobody_is_empty(draw, kind):
    data, made = cut_up(draw, kind)
    rows = np.arange(len(data))
    if draw["test"] == "disjoint":
        rows = np.setdiff1d(rows, made.test)
    np.testing.assert_array_equal(np.sort(made.rows), rows)
    assert len(made.test) == round(0.3 * len(data))
    assert made.offsets[0] == 0
    assert made.sizes.sum() == len(rows) == made.offsets[-1]
    assert made.sizes.min() >= 1
    assert made.rows.dtype == made.test.dtype == np.int32
    assert same(made, cut_up(draw, kind)[1])


@given(cuts)
def test_pure_clients_hold_one_group(draw):
    data, made = cut_up(draw, "pure")
    held = [np.unique(data.groups[made.client(k)]) for k in range(made.num_clients)]
    assert all(len(groups) == 1 for groups in held)
    assert set(np.concatenate(held)) == set(data.groups[made.rows])


@given(cuts, st.sampled_from(KINDS), st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_inner_split_holds_out_a_share_of_every_client(draw, kind, share):
    _, outer = cut_up(draw, kind)
    inner = inner_split(outer, share=share, seed=1)
    assert inner.num_clients == outer.num_clients
    held = set(inner.test.tolist())
    for k in range(outer.num_clients):
        before = outer.client(k)
        after = inner.client(k)
        expected = 0 if len(before) < 4 else int(share * len(before))
        assert len(before) - len(after) == expected
        assert set(before.tolist()) - set(after.tolist()) <= held
        assert [row for row in before.tolist() if row not in held] == after.tolist()
    assert len(inner.test) + len(inner.rows) == len(outer.rows)
    np.testing.assert_array_equal(inner.keys, outer.keys)


def test_dirichlet_follows_alpha():
    data = people(20_000)

    def unevenness(alpha):
        made = partition(data, "dirichlet", test_share=0, clients=10, alpha=alpha, seed=1)
        rates = [data.groups[made.client(k)].mean() for k in range(10)]
        return np.std(rates)

    spread = [unevenness(alpha) for alpha in (0.1, 5, 1e6)]
    assert spread[0] > 0.2 > 0.05 > spread[2]
    assert spread[0] > spread[1] > spread[2]
    even = partition(data, "dirichlet", test_share=0, clients=10, alpha=1e12, seed=1)
    assert np.ptp(even.sizes) <= 8  # four cells, each cut within one row at either end


def test_dirichlet_cells_include_rows_without_a_group():
    data = people(3000, unrecorded=True)
    made = partition(data, "dirichlet", test_share=0, clients=5, alpha=1e9, seed=0)
    absent = [(data.groups[made.client(k)] == -1).mean() for k in range(5)]
    assert np.ptp(absent) < 0.02


def count_rows(data, made, codes):
    """(clients, codes) Number of rows of each client with each code; `codes` is per row."""
    counts = [
        np.bincount(codes[made.client(k)], minlength=codes.max() + 1)
        for k in range(made.num_clients)
    ]
    return np.stack(counts)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5, 100])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("unrecorded", [False, True])
def test_dirichlet_group_counts_are_the_drawn_shares_of_every_group(alpha, seed, unrecorded):
    data = people(40_000, groups=3, seed=seed, unrecorded=unrecorded)
    made = partition(data, "dirichlet-group", test_share=0, clients=5, alpha=alpha, seed=seed)
    rng = make_rng(seed, PARTITION_STREAM)
    rng.permutation(len(data))  # the shuffle of the rows comes first
    groups = np.unique(data.groups)
    counts = count_rows(data, made, data.groups - groups[0])
    repaired = (counts.sum(axis=1) == 1).sum()  # an empty client gets one row of another
    for index, total in enumerate(counts.sum(axis=0)):
        wanted = rng.dirichlet(np.full(5, float(alpha))) * total
        assert (abs(counts[:, index] - wanted) < 1 + repaired).all()


def test_dirichlet_group_rounds_by_largest_remainders():
    data = replace(people(10), groups=np.zeros(10, int))
    for seed in range(50):
        made = partition(data, "dirichlet-group", test_share=0, clients=3, alpha=9.0, seed=seed)
        rng = make_rng(seed, PARTITION_STREAM)
        rng.permutation(10)
        wanted = rng.dirichlet(np.full(3, 9.0)) * 10
        up = np.argsort(-(wanted % 1))[: 10 - int(np.floor(wanted).sum())]
        expected = np.floor(wanted) + np.isin(np.arange(3), up)
        if expected.min() > 0:
            np.testing.assert_array_equal(made.sizes, expected)


def test_labels_do_not_depend_on_the_client_given_the_group():
    """The p-values of exact independence are uniform; with shares by label they are 0."""
    data = synthetic(rows=60_000, features=2, seed=4)
    values = {"dirichlet": [], "dirichlet-group": []}
    for kind, found in values.items():
        for seed in range(20):
            made = partition(data, kind, test_share=0, clients=5, alpha=2.0, seed=seed)
            cells = count_rows(data, made, data.groups * 2 + data.labels)
            for group in range(2):
                table = cells[:, 2 * group : 2 * group + 2]
                found.append(chi2_contingency(table[table.sum(axis=1) > 50]).pvalue)
    assert min(values["dirichlet-group"]) > 0.05 / 40 / 5
    assert 0.3 < np.mean(values["dirichlet-group"]) < 0.7
    assert max(values["dirichlet"]) < 1e-6


def test_dirichlet_group_follows_alpha():
    data = people(20_000)

    def unevenness(alpha):
        made = partition(data, "dirichlet-group", test_share=0, clients=10, alpha=alpha, seed=1)
        return np.std([data.groups[made.client(k)].mean() for k in range(10)])

    spread = [unevenness(alpha) for alpha in (0.1, 5, 1e6)]
    assert spread[0] > 0.2 > 0.05 > spread[2]
    assert spread[0] > spread[1] > spread[2]
    even = partition(data, "dirichlet-group", test_share=0, clients=10, alpha=1e12, seed=1)
    shares = count_rows(data, even, data.groups) / np.bincount(data.groups)
    np.testing.assert_allclose(shares, 0.1, atol=2e-4)


def test_dirichlet_group_depends_on_the_seed_and_not_on_the_labels():
    data = people(2000)

    def cut(dataset, seed):
        return partition(dataset, "dirichlet-group", clients=5, alpha=0.5, seed=seed)

    assert same(cut(data, 3), cut(data, 3))
    assert same(cut(data, 3), cut(replace(data, labels=1 - data.labels), 3))
    assert not same(cut(data, 3), cut(data, 4))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5, 100])
@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_label_counts_are_the_drawn_shares_of_every_label(alpha, seed):
    data = people(40_000, groups=3, seed=seed, unrecorded=True)
    made = partition(data, "dirichlet-label", test_share=0, clients=5, alpha=alpha, seed=seed)
    rng = make_rng(seed, PARTITION_STREAM)
    rng.permutation(len(data))  # the shuffle of the rows comes first
    counts = count_rows(data, made, data.labels)
    repaired = (counts.sum(axis=1) == 1).sum()  # an empty client gets one row of another
    for label, total in enumerate(counts.sum(axis=0)):
        wanted = rng.dirichlet(np.full(5, float(alpha))) * total
        assert (abs(counts[:, label] - wanted) < 1 + repaired).all()


def test_groups_do_not_depend_on_the_client_given_the_label():
    """The p-values of exact independence are uniform; with shares by group and label they are 0."""
    data = synthetic(rows=60_000, features=2, seed=4)
    values = {"dirichlet": [], "dirichlet-label": []}
    for kind, found in values.items():
        for seed in range(20):
            made = partition(data, kind, test_share=0, clients=5, alpha=2.0, seed=seed)
            cells = count_rows(data, made, data.labels * 2 + data.groups)
            for label in range(2):
                table = cells[:, 2 * label : 2 * label + 2]
                found.append(chi2_contingency(table[table.sum(axis=1) > 50]).pvalue)
    assert min(values["dirichlet-label"]) > 0.05 / 40 / 5
    assert 0.3 < np.mean(values["dirichlet-label"]) < 0.7
    assert max(values["dirichlet"]) < 1e-6


def test_dirichlet_label_ignores_the_groups():
    data = people(2000)
    cut = {"kind": "dirichlet-label", "clients": 5, "seed": 3}
    assert same(partition(data, **cut), partition(replace(data, groups=1 - data.groups), **cut))
    assert not same(partition(data, **cut), partition(data, **{**cut, "seed": 4}))


def divide(weights, total):
    """`total` rows in proportion to the weights, the largest remainders rounded up."""
    wanted = [total * weight / sum(weights) for weight in weights]
    counts = [int(number) for number in wanted]
    order = sorted(range(len(weights)), key=lambda k: counts[k] - wanted[k])
    for k in order[: total - sum(counts)]:
        counts[k] += 1
    return counts


def draw_gammas(seed, rows, clients):
    rng = make_rng(seed, PARTITION_STREAM)
    rng.permutation(rows)  # the shuffle of the rows comes first
    return (0.2 + 0.6 * rng.random(clients)).tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clients", [2, 5, 20])
def test_hetero_counts_are_those_of_the_definition(seed, clients):
    """FedFACT's two groups and two labels, written out."""
    data = people(3001, seed=seed)
    made = partition(data, "hetero", test_share=0, clients=clients, seed=seed)
    gammas = draw_gammas(seed, len(data), clients)
    for group in (0, 1):
        for label in (0, 1):
            is_cell = (data.groups == group) & (data.labels == label)
            weights = gammas if group == label else [1 - gamma for gamma in gammas]
            found = [int(is_cell[made.client(k)].sum()) for k in range(clients)]
            assert found == divide(weights, int(is_cell.sum()))


@pytest.mark.parametrize(
    ("groups", "classes", "alike"),
    [
        (3, 2, {(0, 0), (1, 1), (2, 0)}),
        (2, 3, {(0, 0), (1, 1), (0, 2)}),
        (3, 3, {(0, 0), (1, 1), (2, 2)}),
        (4, 3, {(0, 0), (1, 1), (2, 2), (3, 0)}),
        (1, 2, {(0, 0), (0, 1)}),
    ],
)
def test_hetero_of_more_groups_or_classes(groups, classes, alike):
    """Rows without a group are divided evenly."""
    rng = np.random.default_rng(1)
    names = tuple(map(str, range(classes)))
    labels = rng.integers(classes, size=4000)
    data = replace(people(4000, groups=groups, unrecorded=True), labels=labels, classes=names)
    made = partition(data, "hetero", test_share=0, clients=4, seed=7)
    gammas = draw_gammas(7, 4000, 4)
    for group in range(groups):
        for label in range(classes):
            is_cell = (data.groups == group) & (data.labels == label)
            agrees = (group, label) in alike
            weights = [gamma if agrees else 1 - gamma for gamma in gammas]
            found = [int(is_cell[made.client(k)].sum()) for k in range(4)]
            assert found == divide(weights, int(is_cell.sum()))
    absent = [int((data.groups[made.client(k)] == -1).sum()) for k in range(4)]
    assert max(absent) - min(absent) <= 1


def test_hetero_depends_on_the_seed_and_not_on_alpha():
    data = people(2000)
    cut = {"kind": "hetero", "clients": 5}
    assert same(partition(data, **cut, alpha=0.1), partition(data, **cut, alpha=9))
    assert not same(partition(data, **cut), partition(data, **cut, seed=1))
    study = Study(data, get_protocol("heldout"), [3], clients=5, kind="hetero")
    assert study.concentration(0.5) is None
    assert same(study.federations(0.5)[0], partition(data, **cut, seed=3))


# SHA-256 of rows and offsets before there were other partitions: a changed draw would change every
# published number.
DRAWN = {
    "dirichlet": "fc05bc5c2fc8a76391ea4e75cc83d628aaccd2e0a38b3bde1fdc0ff6c63f3321",
    "dirichlet-group": "2215d7d3fd51dc86cb7ddf366ef87268eecbf62222d816645961c26809b18f12",
    "iid": "2dd5a9959ecc341b6375a8471aa423459a1a19c6fe1c7be581342a82cf405de3",
    "pure": "d69c7826b836add58ab0bc617f9f783e47f8f544c0ec584ee6eaf3fdfd713350",
    "column": "3937aec7aa5dd205498803080d08f346509248b1540ed779ebbe7c35ea65ecd9",
}


@pytest.mark.parametrize("kind", DRAWN)
def test_older_partitions_have_not_changed(kind):
    made = partition(people(400, groups=3, unrecorded=True), kind, clients=4, alpha=0.5, seed=11)
    assert hashlib.sha256(made.rows.tobytes() + made.offsets.tobytes()).hexdigest() == DRAWN[kind]


def test_a_study_deals_every_replicate_by_dirichlet_group():
    data = synthetic(rows=900, features=2, seed=0)
    study = Study(data, get_protocol("heldout"), range(7, 10), clients=4, kind="dirichlet-group")
    for seed, made in zip(study.seeds, study.federations(0.5), strict=True):
        alone = partition(data, "dirichlet-group", clients=4, alpha=0.5, seed=seed)
        assert same(made, alone)
    assert study.concentration(0.5) == 0.5
    assert study.describe_federation(0.5) == "4 simulated clients, alpha 0.5"


def test_the_command_line_deals_by_dirichlet_group(tmp_path: Path):
    """Several alphas are allowed, and each is a row of the table."""
    words = "compare --data synthetic --methods fedavg --metrics sp --partition dirichlet-group"
    quick = "--alpha 0.5 5 --clients 5 --seeds 2 --rounds 2 --lr 0.01 --out"
    try:
        main([*words.split(), *quick.split(), str(tmp_path / "out")])
    except SystemExit as stop:
        assert not stop.code
    rows = pl.read_parquet(tmp_path / "out" / "rows.parquet")
    assert sorted(set(rows["alpha"])) == [0.5, 5]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "column"])
@pytest.mark.parametrize("clients", [2, 9, 35])
def test_the_number_of_clients_is_the_one_asked_for(kind, clients):
    assert partition(people(50), kind, clients=clients, alpha=0.05).num_clients == clients


def test_iid_sizes_differ_by_one_at_most():
    made = partition(people(101), "iid", clients=7, test_share=0)
    assert np.ptp(made.sizes) == 1
    assert len(made.test) == 0


def test_pure_gives_clients_in_turn():
    data = people(1000, groups=3)
    made = partition(data, "pure", test_share=0, clients=7, alpha=1.0, seed=0)
    assert [int(data.groups[made.client(k)][0]) for k in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_pure_passes_over_a_group_with_too_few_rows():
    data = people(100)
    data.groups[:] = 0
    data.groups[:2] = 1
    made = partition(data, "pure", test_share=0, clients=9, alpha=1.0, seed=0)
    ones = [k for k in range(9) if data.groups[made.client(k)][0] == 1]
    assert ones == [1, 3]


def test_a_column_keeps_all_its_clients_in_their_places():
    data = people(60)
    made = partition(replace(data, test=data.clients == 1), "column")
    assert made.keys.tolist() == [0, 1, 2]
    assert made.sizes[1] == 0
    for k in (0, 2):
        assert set(data.clients[made.client(k)]) == {k}


def villages(sizes):
    """One client a size."""
    names = tuple(f"v{k}" for k in range(len(sizes)))
    clients = np.repeat(np.arange(len(sizes)), sizes)
    return replace(people(len(clients)), clients=clients, client_names=names)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [[1] * 12, [1] * 12 + [30], [2] * 9, [5, 1, 1]])
def test_no_client_of_a_column_gives_its_last_row(sizes, seed):
    made = partition(villages(sizes), "column", seed=seed, test_share=0.5)
    assert made.num_clients == len(sizes)
    assert made.sizes.min() >= 1
    assert made.sizes[np.array(sizes) == 1].tolist() == [1] * sizes.count(1)
    assert len(made.test) == min(round(0.5 * sum(sizes)), sum(sizes) - len(sizes))
    np.testing.assert_array_equal(
        np.sort(np.concatenate((made.rows, made.test))), np.arange(sum(sizes))
    )
    assert len(partition(villages(sizes), "column", seed=seed, protocol_test="overlap").test) > 0


def test_the_users_split_may_leave_a_client_without_training_rows():
    data = villages([4, 3, 5])
    made = partition(replace(data, test=data.clients == 1), "column")
    assert made.sizes.tolist() == [4, 0, 5]
    assert made.keys.tolist() == [0, 1, 2]
    scaled = standardize(made)
    assert np.isfinite(scaled.mean).all()
    assert inner_split(scaled, seed=0).num_clients == 3


@pytest.mark.parametrize("test", ["overlap", "disjoint"])
def test_the_users_own_test_rows(test):
    mask = np.arange(50) % 5 == 0
    made = partition(people(50, test=mask), clients=3, protocol_test=test)
    np.testing.assert_array_equal(made.test, np.flatnonzero(mask))
    assert len(made.rows) == (50 if test == "overlap" else 40)


def test_test_rows_do_not_depend_on_the_cut():
    data = people(100)  # of three large clients, so that the column's exception does not arise
    made = [partition(data, kind, clients=4, alpha=a, seed=5) for kind in KINDS for a in (0.1, 9)]
    assert all(np.array_equal(made[0].test, other.test) for other in made)
    other = partition(data, clients=4, seed=6)
    assert not np.array_equal(made[0].test, other.test)


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-group", "dirichlet-label", "hetero"])
def test_as_many_clients_as_rows(kind):
    made = partition(people(100_000), kind, test_share=0, clients=100_000, alpha=0.5, seed=0)
    assert (made.sizes == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"kind": "dirichlet-group", "alpha": 0.0}, "alpha must be above 0"),
        ({"kind": "dirichlet-group", "alpha": -1.0}, "alpha"),
        ({"kind": "dirichlet-group", "alpha": float("nan")}, "alpha"),
        ({"kind": "dirichlet-label", "alpha": 0.0}, "alpha must be above 0"),
        ({"kind": "hetero", "clients": 15}, r"15 clients cannot share 14 rows"),
        ({"kind": "dirichlet-group", "clients": 15}, r"15 clients cannot share 14 rows"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"clients": 15}, r"clients: 15 clients cannot share 14 rows"),
        ({"kind": "pure", "clients": 1}, "clients: 1 cannot hold 2 groups"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"test_share": 1.0}, "test_share must be below 1"),
        ({"test_share": -0.1}, "test_share"),
    ],
)
def test_one_line_errors(options, message):
    with pytest.raises(FedgftError, match=message) as caught:
        partition(people(20), **options)
    assert "\n" not in str(caught.value)


def test_a_client_column_is_needed():
    with pytest.raises(FedgftError, match=r"no client column is named \(client\)"):
        partition(replace(people(20), clients=None), "column")

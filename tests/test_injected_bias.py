"""Injected bias: which rows are dropped or flipped, how many, and that nothing else changes."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgft
from fedgft.data import inject_bias
from fedgft.data.dataset import Dataset, standardize
from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.errors import FedgftError

DATA = synthetic(rows=900, features=2, groups=3, seed=5)
FEDERATION = partition(DATA, clients=4, alpha=2.0, seed=1)

injections = st.fixed_dictionaries(
    {
        "share": st.floats(0, 1),
        "clients": st.none() | st.lists(st.integers(0, 3), min_size=1),
        "group": st.none() | st.integers(0, 2),
        "label": st.none() | st.integers(0, 1),
        "seed": st.integers(0, 99),
    }
)


def match(draw, k):
    """The rows of client k that may change, row by row."""
    if draw["clients"] is not None and k not in draw["clients"]:
        return []
    return [
        row
        for row in FEDERATION.client(k).tolist()
        if draw["group"] in (None, DATA.groups[row]) and draw["label"] in (None, DATA.labels[row])
    ]


def inject(kind, draw):
    """The result, or None where a client would be emptied."""
    try:
        return inject_bias(FEDERATION, kind, **draw)
    except FedgftError as error:
        assert error.field == "share" and draw["share"] > 0.9
        return None


@given(injections)
def test_dropped_rows_are_the_share_of_the_matching_rows(draw):
    made = inject("drop", draw)
    if made is None:
        return
    total = 0
    for k in range(4):
        before = FEDERATION.client(k).tolist()
        after = made.client(k).tolist()
        gone = [row for row in before if row not in set(after)]
        matching = match(draw, k)
        assert set(gone) <= set(matching)
        assert abs(len(gone) - draw["share"] * len(matching)) <= 0.5
        assert after == [row for row in before if row not in set(gone)]  # in the same order
        assert after
        total += len(gone)
    np.testing.assert_array_equal(made.test, FEDERATION.test)
    np.testing.assert_array_equal(made.dataset.labels, DATA.labels)
    np.testing.assert_array_equal(made.keys, FEDERATION.keys)
    assert f"injected bias: {total:,} row" in made.dataset.notes[-1]
    again = inject("drop", draw)
    np.testing.assert_array_equal(made.rows, again.rows)


@given(injections)
def test_flipped_labels_are_the_share_of_the_matching_rows(draw):
    labels = DATA.labels.copy()
    made = inject_bias(FEDERATION, "flip", **draw)
    changed = np.flatnonzero(made.dataset.labels != labels).tolist()
    np.testing.assert_array_equal(DATA.labels, labels)  # the original keeps its labels
    total = 0
    for k in range(4):
        matching = match(draw, k)
        flipped = set(FEDERATION.client(k).tolist()) & set(changed)
        assert flipped <= set(matching)
        assert abs(len(flipped) - draw["share"] * len(matching)) <= 0.5
        total += len(flipped)
    assert total == len(changed)  # no test row, and no row without a client
    assert set(made.dataset.labels[changed] + labels[changed]) <= {1}
    np.testing.assert_array_equal(made.rows, FEDERATION.rows)
    np.testing.assert_array_equal(made.test, FEDERATION.test)
    assert f"injected bias: {total:,} row" in made.dataset.notes[-1]
    again = inject_bias(FEDERATION, "flip", **draw)
    np.testing.assert_array_equal(made.dataset.labels, again.dataset.labels)


def test_a_client_does_not_depend_on_the_others():
    """With all clients or alone: the same rows of client 2."""
    alone = inject_bias(FEDERATION, "drop", share=0.4, clients=[2], seed=3)
    every = inject_bias(FEDERATION, "drop", share=0.4, seed=3)
    np.testing.assert_array_equal(alone.client(2), every.client(2))
    other = inject_bias(FEDERATION, "drop", share=0.4, clients=[2], seed=4)
    assert not np.array_equal(alone.client(2), other.client(2))
    first = {FEDERATION.client(k).tolist().index(every.client(k)[0]) for k in range(4)}
    assert len(first) > 1  # the clients' draws differ, too


def test_names_are_those_of_the_data():
    loans = partition(fedgft.load("loans"), "column", seed=0)
    named = {"clients": ["east"], "group": "woman", "label": "no"}
    numbers = {"clients": [0], "group": 1, "label": 0}
    for kind in ("drop", "flip"):
        one, two = (inject_bias(loans, kind, share=0.3, **how) for how in (named, numbers))
        np.testing.assert_array_equal(one.rows, two.rows)
        np.testing.assert_array_equal(one.dataset.labels, two.dataset.labels)
        assert "at 1 client (group 'woman', label 'no')" in one.dataset.notes[-1]
    dealt = partition(fedgft.load("loans"), clients=5, seed=0)  # the clients are not the banks
    with pytest.raises(FedgftError, match="there is no 'east'"):
        inject_bias(dealt, "drop", share=0.3, clients=["east"])


def test_scaling_is_dropped_with_rows_and_kept_with_labels():
    scaled = standardize(FEDERATION)
    assert inject_bias(scaled, "drop", share=0.1).mean is None
    flipped = inject_bias(scaled, "flip", share=0.1)
    np.testing.assert_array_equal(flipped.mean, scaled.mean)


def test_injections_add_up():
    """Two injections at different clients; each has its note."""
    one = inject_bias(FEDERATION, "flip", share=0.5, clients=[0], label=1)
    two = inject_bias(one, "drop", share=0.5, clients=[1], group=0)
    assert len(two.dataset.notes) == len(DATA.notes) + 2
    np.testing.assert_array_equal(two.dataset.labels, one.dataset.labels)
    np.testing.assert_array_equal(two.client(0), FEDERATION.client(0))


def test_a_repeated_row_is_one_row():
    """A row that occurs several times in a federation changes as one."""
    times = np.arange(900)[FEDERATION.rows] % 3 + 1
    offsets = np.concatenate(([0], np.cumsum(times)))[FEDERATION.offsets]
    repeated = replace(FEDERATION, rows=np.repeat(FEDERATION.rows, times), offsets=offsets)
    made = inject_bias(repeated, "drop", share=0.5, clients=[1])
    gone = np.setdiff1d(repeated.client(1), made.client(1))
    assert len(gone) == int(len(np.unique(repeated.client(1))) / 2 + 0.5)


def test_features_are_not_copied():
    tracemalloc.start()
    wide = Dataset("wide", np.zeros((1000, 2000)), np.arange(1000) % 2, np.arange(1000) // 2 % 2,
                   tuple(map(str, range(2000))))  # fmt: skip
    cut = partition(wide, clients=2, seed=0)
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    made = inject_bias(cut, "flip", share=0.5)
    peak = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert made.dataset.features is wide.features and peak < 1 << 20


def test_flipped_labels_raise_the_gap_on_the_clients_rows():
    """What it is for: positive labels of one group flipped at all clients."""
    made = inject_bias(FEDERATION, "flip", share=0.8, group=2, label=1, seed=0)
    rows = made.rows

    def rates(labels):
        return [labels[rows][DATA.groups[rows] == g].mean() for g in range(3)]

    before, after = rates(DATA.labels), rates(made.dataset.labels)
    assert after[:2] == before[:2]
    assert after[2] == pytest.approx(0.2 * before[2], abs=0.01)


@pytest.mark.parametrize(
    ("changes", "field", "kind"),
    [
        ({"share": 1.5}, "share", "invalid"),
        ({"share": -0.1}, "share", "invalid"),
        ({"share": float("nan")}, "share", "invalid"),
        ({"clients": []}, "clients", "invalid"),
        ({"clients": [4]}, "clients", "invalid"),
        ({"clients": [-1]}, "clients", "invalid"),
        ({"clients": ["north"]}, "clients", "invalid"),
        ({"group": "3"}, "group", "invalid"),
        ({"group": 3}, "group", "invalid"),
        ({"label": "yes"}, "label", "invalid"),
        ({"seed": -1}, "seed", "invalid"),
        ({"kind": "drop", "share": 1.0}, "share", "invalid"),
    ],
)
def test_what_is_refused_is_named(changes, field, kind):
    how = {"kind": "flip", "share": 0.5, **changes}
    with pytest.raises(FedgftError) as caught:
        inject_bias(FEDERATION, how.pop("kind"), **how)
    assert (caught.value.field, caught.value.kind) == (field, kind)
    assert "\n" not in str(caught.value)


def test_no_matching_row_is_an_error():
    data = replace(DATA, group_names=(*DATA.group_names, "absent"))
    with pytest.raises(FedgftError, match="no training row with group 'absent' at 4 clients"):
        inject_bias(partition(data, clients=4), "drop", share=0.5, group="absent")


def test_flips_need_two_classes_and_rows_of_one_client():
    classes = replace(DATA, labels=np.arange(900) % 3, classes=("a", "b", "c"))
    with pytest.raises(FedgftError) as caught:
        inject_bias(partition(classes, clients=4), "flip", share=0.5)
    assert caught.value.kind == "unsupported"
    overlap = partition(DATA, clients=4, protocol_test="overlap")
    with pytest.raises(FedgftError) as caught:
        inject_bias(overlap, "flip", share=0.5)
    assert caught.value.kind == "conflict"
    assert len(inject_bias(overlap, "drop", share=0.5).rows) < len(overlap.rows)

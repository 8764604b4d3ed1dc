"""Python calls that are wrong, or look wrong: a correct result, or an error with the reason."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import nn

from fedgft import Penalty
from fedgft.algorithms import fedavg
from fedgft.auditing import audit, measure, merge
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.data.table import load_table
from fedgft.engine import Settings, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, functions
from fedgft.models import MLP, get_model
from fedgft.sums import Sums

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
Y, A = RNG.integers(2, size=(2, 400))
MADE = partition(synthetic(rows=400, features=3), clients=3)
SHORT = Settings(rounds=1)


def test_an_error_is_a_value_error_and_is_not_taken_for_one_of_the_readers(tmp_path):
    """What a reader says of a file is not said twice."""
    assert issubclass(FedgftError, ValueError)
    (tmp_path / "t.csv").write_text("y,g\n0,a\n1,b\n")
    with pytest.raises(FedgftError, match=r"^[^:]*t.csv: no column 'x'"):
        load_table(tmp_path / "t.csv", label="x", group="g")
    from fedgft.auditing.report import compare

    one = audit(measure(Y, Y, sensitive_features=A)).to_dict()
    with pytest.raises(FedgftError, match=r"^compare: groups differ"):
        compare(one, one | {"groups": "others"})


# -- Penalty and Sums ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", [{"lam": 1.0}, {"target": 0.02}], ids=["lam", "target"])
def test_sums_are_counted_in_float64_whatever_the_logits_are(dtype, how):
    """In bf16 25,094 rows were counted as 24,960, and in fp16 300,000 rows were infinitely many."""
    rng = np.random.default_rng(1)
    rows = 100_000
    y, a = torch.as_tensor(rng.integers(2, size=(2, rows)))
    logits = torch.as_tensor(rng.standard_normal((rows, 2))).to(dtype)
    message = Penalty("eop", **how).statistics(logits, y, a)
    numerator, events = message[1:].reshape(2, 2)
    assert message[0] == rows
    assert events.tolist() == [int(((y == 1) & (a == g)).sum()) for g in (0, 1)]
    score = torch.softmax(logits.double(), 1)[:, 1].numpy()
    if "target" in how:
        score = 1.0 * (score > 0.5)
    expected = [score[(y.numpy() == 1) & (a.numpy() == g)].sum() for g in (0, 1)]
    np.testing.assert_allclose(numerator, expected, rtol=1e-12)


def test_the_loss_of_half_precision_logits_is_that_of_single_precision():
    y = torch.as_tensor(Y)
    a = torch.as_tensor(A)
    logits = torch.as_tensor(RNG.standard_normal((400, 2))).half()
    penalty = Penalty("sp", 50.0)
    penalty.update(penalty.statistics(logits.float(), y, a))
    half = penalty(logits, y, a)
    single = penalty(logits.float(), y, a)
    assert half.dtype == torch.float32 and half == single


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_scores_are_refused(bad):
    probs = np.full((4, 2), 0.5)
    probs[2, 1] = bad
    with pytest.raises(FedgftError, match="probs"):
        Sums.of(probs, Y[:4], A[:4], num_groups=2)
    logits = torch.as_tensor(probs)
    for penalty in (Penalty("sp", 1.0), Penalty("sp", target=0.1)):
        with pytest.raises(FedgftError, match="logits"):
            penalty.statistics(logits, Y[:4], A[:4])
    score = np.array([0.2, bad, 0.4, 0.9])
    with pytest.raises(FedgftError, match="y_pred"):
        functions.statistical_parity_difference(
            [0, 1, 0, 1], score, sensitive_features=list("aabb")
        )
    with pytest.raises(FedgftError, match=r"scores|y_pred"):
        measure([0, 1, 0, 1], score, sensitive_features=list("aabb"))
    with pytest.raises(FedgftError, match="scores"):
        measure([0, 1, 0, 1], [0, 1, 1, 1], scores=score, sensitive_features=list("aabb"))


LOGITS = torch.zeros(4, 2)
HALF = [0, 1, 0, 1]
WRONG = {
    "group beyond": (LOGITS, HALF, [0, 1, 2, 0], "a", "the index 2; there are 2 groups"),
    "group below": (LOGITS, HALF, [0, -2, 1, 0], "a", "the index -2"),
    "label beyond": (LOGITS, [0, 1, 2, 1], HALF, "y", "the index 2; there are 2 classes"),
    "label beyond one logit": (LOGITS[:, 0], [0, 1, 2, 1], HALF, "y", "the index 2"),
    "label below": (LOGITS, [0, 1, -1, 1], HALF, "y", "the index -1"),
    "fractions": (LOGITS, [0, 0.5, 1, 1], HALF, "y", "must hold indices.*not 0.5"),
    "NaN labels": (LOGITS, [0, np.nan, 1, 1], HALF, "y", "must hold indices.*not nan"),
    "text labels": (LOGITS, list("abab"), HALF, "y", "must hold indices"),
    "fractional groups": (LOGITS, HALF, [0, 0.5, 1, 1], "a", "must hold indices.*not 0.5"),
    "strings": (LOGITS, HALF, list("abab"), "a", "penalty.fit"),
    "two columns": (LOGITS, HALF, np.zeros((4, 2), int), "a", "shape"),
    "three axes": (LOGITS[None], HALF, HALF, "logits", "shape"),
    "no column": (LOGITS[:, :0], HALF, HALF, "logits", "shape"),
    "whole logits": (LOGITS.long(), HALF, HALF, "logits", "floating-point"),
    "short labels": (LOGITS, [0, 1, 0], HALF, "y", r"shape \(3,\), not \(4,\)"),
    "short groups": (LOGITS, HALF, [0, 1, 0], "a", r"shape \(3,\), not \(4,\)"),
    "a list": ([[0.0, 1.0]], [0], [0], "logits", "must be a torch tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_penalty_names_what_is_wrong(case):
    logits, y, a, field, said = WRONG[case]
    penalty = Penalty("sp", 1.0)
    penalty.update(penalty.statistics(torch.zeros(4, 2), HALF, [0, 0, 1, 1]))
    for call in (penalty.statistics, penalty):
        with pytest.raises(FedgftError, match=f"^{field} .*{said}") as raised:
            call(logits, y, a)
        assert raised.value.field == field and "\n" not in str(raised.value)


UNFIT = {
    "an unknown metric": ({"metric": "spp"}, "metric"),
    "neither": ({"lam": None}, "lam"),
    "both": ({"target": 0.1}, "lam"),
    "negative lam": ({"lam": -1.0}, "lam"),
    "infinite lam": ({"lam": np.inf}, "lam"),
    "negative target": ({"lam": None, "target": -0.1}, "target"),
    "a target of one": ({"lam": None, "target": 1.0}, "target"),
    "an unknown J": ({"penalty": "l3"}, "penalty"),
    "no round": ({"rounds": 0}, "rounds"),
    "a name twice": ({"groups": ["f", "m", "f"]}, "groups"),
    "a number twice": ({"groups": [1, 2, 1.0]}, "groups"),
    "one name": ({"groups": ["f"]}, "groups"),
    "no name": ({"groups": []}, "groups"),
    "one group": ({"groups": 1}, "groups"),
    "a missing name": ({"groups": ["f", None]}, "groups"),
    "the code of missing groups": ({"groups": [-1, 1]}, "groups"),
    "fractions": ({"groups": [0.5, 1.5]}, "groups"),
    "a text": ({"groups": "fm"}, "groups"),
    "names without an order": ({"groups": {"f", "m"}}, "groups"),
    "too many": ({"groups": 100_001}, "groups"),
    "too many names": ({"groups": range(100_001)}, "groups"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_penalty_that_means_nothing_is_refused(case):
    given, field = UNFIT[case]
    with pytest.raises(FedgftError) as raised:
        Penalty(**{"metric": "sp", "lam": 1.0} | given)
    assert raised.value.field == field and "\n" not in str(raised.value)


NAMES = ["f", "m"]
NO_GROUPS = {
    "one group only": (["f", "f", None], "one group only, 'f'"),
    "missing values only": ([None, None], "all are missing"),
    "no row": ([], "all are missing"),
    "fractions": ([0.5, 1.5], "fractions"),
    "a measurement": (np.arange(201), "201 different values"),
    "columns of different lengths": ({"a": NAMES, "b": NAMES * 2}, "different lengths: 2, 4"),
    "names that could be joined in two ways": (
        {"a": ["x & y", "x"], "b": ["z", "y & z"]},
        "rename the value",
    ),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "must hold text"),
    "lists": ([["f"], ["f", "m"]], "must hold text"),
    "a text": ("f", "one value per row"),
    "None": (None, "one value per row"),
    "no column": ({}, "no column"),
}


@pytest.mark.parametrize("case", NO_GROUPS)
def test_columns_without_groups_are_refused(case):
    given, said = NO_GROUPS[case]
    with pytest.raises(FedgftError, match=said) as raised:
        Penalty("sp", 1.0).fit(given)
    assert raised.value.field == "sensitive_features" and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["f", "x"], "holds 'x', which is none of the groups 'f', 'm'"),
        ([0, 2], "the index 2"),
        ([True, False], "'True'"),
        ({"sex": NAMES, "age": NAMES}, "has 2 columns"),
    ],
)
def test_a_value_that_is_no_group_is_named(given, said):
    penalty = Penalty("sp", 1.0).fit(NAMES)
    with pytest.raises(FedgftError, match=said) as raised:
        penalty.encode(given)
    assert raised.value.field == "sensitive_features"
    for call in (penalty.statistics, penalty):
        with pytest.raises(FedgftError, match=f"^a .*{said}") as raised:
            call(LOGITS[:2], [0, 1], given)
        assert raised.value.field == "a"


def test_groups_are_stated_once():
    with pytest.raises(FedgftError, match="groups is 3, and sensitive_features holds 2") as raised:
        Penalty("sp", 1.0, groups=3).fit(NAMES)
    assert (raised.value.field, raised.value.kind) == ("groups", "conflict")
    with pytest.raises(FedgftError, match="do not call fit") as raised:
        Penalty("sp", 1.0, groups=NAMES).fit(NAMES)
    assert (raised.value.field, raised.value.kind) == ("groups", "conflict")


MESSAGES = {
    "of three groups": np.ones(7),
    "of four groups": np.ones(9),
    "of two lengths": [np.ones(5), np.ones(7)],
    "none": [],
    "rows alone": np.ones(1),
    "a number": 1.0,
    "text": "message",
    "three axes": np.ones((1, 1, 5)),
    "NaN": np.array([1.0, np.nan, 0, 1, 1]),
}


@pytest.mark.parametrize("case", MESSAGES)
@pytest.mark.parametrize("how", [{"lam": 1.0}, {"target": 0.02}], ids=["lam", "target"])
def test_messages_that_are_not_those_of_the_groups_are_refused(case, how):
    penalty = Penalty("sp", **how)
    with pytest.raises(FedgftError) as raised:
        penalty.update(MESSAGES[case])
    assert raised.value.field == "statistics" and "\n" not in str(raised.value)
    assert penalty.v is None and penalty.report is None


@pytest.mark.parametrize("how", [{"lam": 1.0}, {"target": 0.02}], ids=["lam", "target"])
def test_the_number_of_classes_does_not_change(how):
    penalty = Penalty("sp", **how)
    two = penalty.statistics(LOGITS, HALF, [0, 0, 1, 1])
    three = penalty.statistics(torch.zeros(4, 3), HALF, [0, 0, 1, 1])
    for _ in range(2):
        penalty.update(two)
    with pytest.raises(FedgftError, match="number of classes") as raised:
        penalty.update(three)
    assert raised.value.field == "statistics"
    with pytest.raises(FedgftError, match="have 3 classes") as raised:
        penalty(torch.zeros(4, 3), HALF, HALF)
    assert raised.value.field == "logits"


def test_penalty_takes_whole_numbers_of_any_type_and_batches_without_rows():
    penalty = Penalty("sp", 1.0)
    expected = None
    logits = torch.as_tensor(RNG.standard_normal((400, 2)))
    for kind in (np.int64, np.int32, np.uint8, np.float32, bool):
        found = penalty.statistics(logits, Y.astype(kind), torch.as_tensor(A.astype(kind)))
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)
    labels = (Y.tolist(), pd.Series(Y), pl.Series(Y), torch.as_tensor(Y).half(), Y[:, None])
    for y in (*labels, pd.Series(Y == 1), pd.Series(Y, dtype="Int64")):
        np.testing.assert_array_equal(penalty.statistics(logits.numpy(), y, A), expected)
    penalty.update(expected)
    empty = torch.zeros(0, 2, requires_grad=True)
    loss = penalty(empty, Y[:0], A[:0])
    loss.backward()
    assert loss.item() == 0.0 and penalty.statistics(empty, Y[:0], A[:0]).sum() == 0.0


# -- Dataset, Federation, partition --------------------------------------------------------------

GOOD = {
    "name": "small",
    "features": RNG.standard_normal((400, 3)).astype(np.float32),
    "labels": Y,
    "groups": A,
    "columns": ("x", "y", "z"),
    "clients": Y + A,
    "client_names": ("a", "b", "c"),
}


def swapped(values, at, value):
    out = np.array(values)
    out[at] = value
    return out


BAD_FIELDS = {
    "group beyond the names": {"groups": swapped(A, 5, 2)},
    "group far beyond": {"groups": swapped(A, 5, 100_000_000)},
    "group below -1": {"groups": swapped(A, 5, -2)},
    "label beyond the classes": {"labels": swapped(Y, 5, 2)},
    "label below": {"labels": swapped(Y, 5, -1)},
    "client beyond the names": {"clients": swapped(Y, 5, 3)},
    "fewer labels": {"labels": Y[:-1]},
    "fewer groups": {"groups": A[:-1]},
    "text as groups": {"groups": A.astype(str)},
    "fractions as labels": {"labels": Y + 0.5},
    "NaN as groups": {"groups": swapped(1.0 * A, 5, np.nan)},
    "NaN features": {"features": swapped(GOOD["features"], (3, 1), np.nan)},
    "infinite features": {"features": swapped(GOOD["features"], (3, 1), np.inf)},
    "text features": {"features": GOOD["features"].astype(str)},
    "one axis": {"features": GOOD["features"][:, 0]},
    "columns for others": {"columns": ("x",)},
    "one class": {"classes": ("0",)},
    "one class twice": {"classes": ("0", "0")},
    "row numbers as test": {"test": np.arange(400)},
    "short test": {"test": np.ones(3, bool)},
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_data_set_checks_itself(case):
    (field,) = BAD_FIELDS[case]
    with pytest.raises(FedgftError, match=f"^{field}"):
        Dataset(**GOOD | BAD_FIELDS[case])
    with pytest.raises(FedgftError, match=f"^{field}"):
        replace(Dataset(**GOOD), **BAD_FIELDS[case])


def test_whole_numbers_of_any_type_are_indices():
    for kind in (np.int32, np.uint8, np.float64):
        made = Dataset(**GOOD | {"labels": Y.astype(kind), "groups": A.astype(kind)})
        assert made.labels.dtype == made.groups.dtype == np.int64
        np.testing.assert_array_equal(made.labels, Y)
        np.testing.assert_array_equal(made.groups, A)


def test_what_was_a_segmentation_fault_is_an_error():
    script = (
        "import numpy as np\nfrom fedgft.data.dataset import Dataset, Federation\n"
        "data = Dataset('d', np.zeros((4, 1), np.float32), np.zeros(4, int), "
        "np.array([0, 1, 0, 100_000_000]), ('x',))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("fedgft.errors.FedgftError: groups")


def test_a_federation_checks_itself():
    data = MADE.dataset
    rows = np.arange(400)
    wrong = {
        "rows": (rows + 1, np.array([0, 400]), rows[:0]),
        "test": (rows, np.array([0, 400]), np.array([-1])),
        "offsets must run": (rows, np.array([0, 399]), rows[:0]),
        "offsets must not fall": (rows, np.array([0, 300, 200, 400]), rows[:0]),
    }
    for said, parts in wrong.items():
        with pytest.raises(FedgftError, match=said):
            Federation(data, *parts)
    with pytest.raises(FedgftError, match="keys"):
        Federation(data, rows, np.array([0, 400]), rows[:0], keys=np.arange(2, dtype=np.uint64))


def test_sequences_are_not_standardized():
    data = Dataset("s", RNG.standard_normal((40, 5, 3)), Y[:40], A[:40], ())
    with pytest.raises(FedgftError, match="3 axes"):
        standardize(partition(data, clients=2))


# -- simulate and Settings -----------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x), x


class Lookup(nn.Module):
    """Column 3 is the group, 0 or 1; standardized it is -1 or so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 2)

    def forward(self, x):
        return self.table(x[:, 3].long())


def trained(model, settings=SHORT):
    return simulate([MADE], model, fedavg(), settings, seeds=[0])


WRONG_CALLS = """
import json
import numpy as np
import fedgft
from fedgft.algorithms import Algorithm, fedavg
from fedgft.models import MLP

data = fedgft.load("synthetic")
made = fedgft.partition(data, clients=3)
base = {"federations": made, "algorithm": "fedavg", "rounds": 1}
calls = {
    "a data set": {"federations": data},
    "a list of data sets": {"federations": [data]},
    "no federation": {"federations": []},
    "nothing": {"federations": None},
    "seeds for one list": {"federations": [made], "seeds": [0, 1]},
    "one seed for two": {"federations": [made, made]},
    "a negative seed": {"seeds": -1},
    "a text as seed": {"seeds": "0"},
    "no method": {"algorithm": "fedsgd"},
    "a function": {"algorithm": fedavg},
    "a class": {"algorithm": Algorithm},
    "a metric beside an Algorithm": {"algorithm": fedavg(), "metric": "sp"},
    "a base beside an Algorithm": {"algorithm": fedavg(), "base": "scaffold"},
    "no metric": {"metric": "fairness"},
    "a number as metric": {"metric": 3},
    "a target for fedavg": {"target": 0.1},
    "lam for a target": {"algorithm": "fedgft-control", "lam": 3},
    "a target above 1": {"algorithm": "fedgft-control", "target": 2},
    "a negative lam": {"algorithm": "fedgft", "lam": -1},
    "a text as beta": {"algorithm": "fairfed", "beta": "1"},
    "no base": {"base": "fedsgd"},
    "rounds beside settings": {"settings": fedgft.Settings()},
    "a dictionary": {"settings": {"rounds": 1}, "rounds": None},
    "no rounds": {"rounds": 0},
    "half a round": {"rounds": 0.5},
    "no model": {"model": "forest"},
    "a number as model": {"model": 3},
    "a class as model": {"model": MLP},
    "a text as lr": {"lr": "fast"},
    "NaN as lr": {"lr": float("nan")},
    "two lr for one run": {"lr": np.array([0.1, 0.2])},
    "a text as init": {"init": "zeros"},
    "NaN as init": {"init": np.full(20, np.nan)},
}
found = {}
for name, change in calls.items():
    try:
        fedgft.simulate(**base | change)
        found[name] = None
    except fedgft.FedgftError as error:
        found[name] = (error.field, error.kind, str(error))
print(json.dumps(found))
"""
FIELDS = {
    "federations": ("a data set", "a list of data sets", "no federation", "nothing"),
    "seeds": ("seeds for one list", "one seed for two", "a negative seed", "a text as seed"),
    "algorithm": ("no method", "a function", "a class"),
    "metric": ("a metric beside an Algorithm", "no metric", "a number as metric"),
    "base": ("a base beside an Algorithm", "no base"),
    "target": ("a target for fedavg", "a target above 1"),
    "lam": ("lam for a target", "a negative lam"),
    "beta": ("a text as beta",),
    "rounds": ("rounds beside settings", "no rounds", "half a round"),
    "settings": ("a dictionary",),
    "model": ("no model", "a number as model", "a class as model"),
    "lr": ("a text as lr", "NaN as lr", "two lr for one run"),
    "init": ("a text as init", "NaN as init"),
}
CONFLICTS = ("beside an Algorithm", "beside settings", "a target for fedavg", "lam for a target")


@pytest.fixture(scope="module")
def wrong_calls():
    """The errors of all calls, from a process without the tests' own checks of types."""
    command = [sys.executable, "-c", WRONG_CALLS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("field", "call"), [(f, c) for f, calls in FIELDS.items() for c in calls])
def test_a_wrong_call_of_simulate_names_the_argument(field, call, wrong_calls):
    named, kind, text = wrong_calls[call]
    assert named == field and field in text and "--" not in text and "\n" not in text
    conflict = any(words in call for words in CONFLICTS)
    assert kind == ("conflict" if conflict else "invalid")


def test_every_wrong_call_of_simulate_is_judged(wrong_calls):
    assert sorted(wrong_calls) == sorted(call for calls in FIELDS.values() for call in calls)


MADE_TALLY = Sums.of(np.eye(2)[Y], Y, A, num_groups=2)


def test_outputs_and_indices_that_a_module_cannot_have_are_named():
    with pytest.raises(FedgftError, match="model must give one tensor"):
        trained(Pair)
    with pytest.raises(FedgftError, match="model must make an"):
        trained(lambda: 3)
    for made in (standardize(MADE), replace(MADE, mean=np.full(4, -2.0), spread=np.ones(4))):
        with pytest.raises(FedgftError, match=r"out of range|embedding"):
            simulate([made], Lookup, fedavg(), SHORT, seeds=[0])


def test_a_tally_takes_a_metric_by_name():
    for name, metric in CATALOG.items():
        assert MADE_TALLY.gap(name, "hard") == MADE_TALLY.gap(metric, "hard")


# -- pandas, sites, thresholds -------------------------------------------------------------------

FRAME = pd.DataFrame({"y": Y, "d": RNG.integers(2, size=400), "g": np.where(A, "m", "f")})
OTHER = FRAME.set_index(np.arange(1000, 1400))
GAP = functions.equal_opportunity_difference


@pytest.mark.parametrize(
    "call",
    [
        lambda y, d, g: GAP(y, d, sensitive_features=g),
        lambda y, d, g: audit(measure(y, d, sensitive_features=g)).to_dict()["metrics"]["eop"][
            "gap"
        ],
    ],
    ids=["function", "measure"],
)
def test_rows_in_another_order_are_refused_and_arrays_go_by_position(call):
    """A shuffled Series gave an accuracy of 0.506 in place of 0.731, without a word."""
    expected = call(Y, FRAME.d.to_numpy(), FRAME.g.to_numpy())
    shuffled = FRAME.sample(frac=1, random_state=0)
    for y, d, g in ((FRAME.y, shuffled.d, FRAME.g), (FRAME.y, FRAME.d, shuffled[["g"]])):
        with pytest.raises(FedgftError, match="in another order"):
            call(y, d, g)
    with pytest.raises(FedgftError, match="another pandas index than"):
        call(OTHER.y, FRAME.set_index(np.arange(400) - 7).d, OTHER.g)
    kept = [
        (FRAME.y, FRAME.d, FRAME.g),
        (OTHER.y, OTHER.d, OTHER.g),
        (shuffled.y, shuffled.d, shuffled.g),
        (OTHER.y, pd.Series(FRAME.d.to_numpy()), OTHER.g),  # predictions in a new Series
        (OTHER.y, FRAME.d.tolist(), OTHER.g.to_numpy()),
    ]
    for y, d, g in kept:
        assert call(y, d, g) == pytest.approx(expected, abs=1e-12)


def test_sites_without_a_name_are_numbered():
    cut = [slice(i * 100, (i + 1) * 100) for i in range(4)]
    parts = [measure(Y[c], FRAME.d[c].to_numpy(), sensitive_features=A[c]) for c in cut]
    named = measure(Y, FRAME.d, sensitive_features=A, site="site 2")
    told = audit(parts).to_dict()
    assert list(told["sites"]) == ["site 1", "site 2", "site 3", "site 4"]
    assert any("site 1" in text and "site=" in text for text in told["warnings"])
    pairs = merge([parts[0] + parts[1], parts[2] + parts[3]])
    assert list(pairs.sites) == list(told["sites"])
    for name, c in zip(pairs.sites, cut, strict=True):
        assert sum(t[..., 0].sum() for t in pairs.sites[name].tables.values()) == 100, (name, c)
    assert list((named + parts[0] + parts[1]).sites) == ["site 2", "site 1", "site 3"]
    assert list(parts[0].sites) == [""]  # one alone is the whole audit
    assert not any("site=" in text for text in audit([named]).to_dict()["warnings"])


@pytest.mark.parametrize("metric", ["sp", "eop", "eo", "fpr"])
def test_thresholds_that_decide_all_alike_are_not_feasible(metric):
    rng = np.random.default_rng(3)
    group = rng.integers(2, size=4000)
    y = (rng.random(4000) < 0.35 + 0.2 * group).astype(int)
    p = 1 / (
        1 + np.exp(-(1.5 * (2 * y - 1) * rng.random(4000) + 0.3 * group + rng.normal(size=4000)))
    )
    made = audit(measure(y, p, sensitive_features=group, site="n"), adjust_to={metric: 0.0})
    (found,) = made.to_dict()["adjusted"]
    decided = p >= np.array([found["thresholds"]["0"], found["thresholds"]["1"]])[group]
    assert 0.02 < decided.mean() < 0.98
    assert not found["feasible"] and "accept" in found["reason"]
    assert found["gap"] < 0.02 and found["accuracy"] > 0.55
    easy = audit(measure(y, p, sensitive_features=group, site="n"), adjust_to={metric: 0.1})
    (found,) = easy.to_dict()["adjusted"]
    assert found["feasible"] and found["reason"] == ""


# -- the executor --------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.core = kind(2, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.core(x.reshape(-1, 2, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.layer(x.reshape(-1, 2, 2)).mean(1))


@pytest.mark.parametrize(
    ("model", "batch", "executor"),
    [
        (lambda: Recurrent(nn.LSTM), 256, "sequential"),
        (lambda: Recurrent(nn.GRU), 32, "sequential"),
        (Attention, 256, "sequential"),
        (Attention, 32, "stacked"),
        (MLP((300, 300)), 32, "sequential"),
        (get_model("mlp"), 256, "stacked"),
        ("logistic", 256, "fused"),
    ],
    ids=["LSTM", "GRU", "attention", "attention, small batches", "wide", "mlp", "logistic"],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_auto_takes_what_is_faster_for_the_module(model, batch, executor):
    """By the kind of its layers (benchmarks/modules.py has the seconds), never by a clock."""
    found = trained(model, Settings(rounds=1, batch_size=batch, threads=1))
    assert found.executor == executor
    if executor == "sequential" and batch == 32 and not isinstance(model, MLP):
        asked = Settings(rounds=1, batch_size=batch, threads=1, executor="stacked")
        assert trained(model, asked).executor == "stacked"

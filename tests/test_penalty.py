"""The penalty in a training loop of the user, and its table of prices."""

import copy
import doctest
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedgft import Penalty
from fedgft.algorithms import SLOPES, LinearizedPenalty, fedgft, own_loop
from fedgft.data.table import Roles, from_frame
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, Metric, get_metric, price
from small_federation import clients, federation, run, several

every_metric = pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
POWERS = {"l1": lambda gap: gap, "l2": lambda gap: gap**2, "half": lambda gap: gap**2 / 2}


def rows(made) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everybody's rows: scores that depend on a leaf, labels, groups."""
    data = made.dataset
    pooled = made.rows
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(pooled), len(data.classes), dtype=torch.float64, generator=generator)
    return (
        logits.requires_grad_(),
        torch.tensor(data.labels[pooled]),
        torch.tensor(data.groups[pooled]),
    )


def send(penalty: Penalty, made, logits, y, a) -> float:
    """Each client's message from its own rows; the server adds them up."""
    cuts = zip(made.offsets, made.offsets[1:], strict=False)
    return penalty.update(sum(penalty.statistics(logits[i:j], y[i:j], a[i:j]) for i, j in cuts))


def gap(metric: Metric, logits, y, a) -> torch.Tensor:
    """F on pooled rows, differentiable."""
    known = a >= 0
    groups = torch.nn.functional.one_hot(a[known]).double()
    labels = torch.nn.functional.one_hot(y[known], logits.shape[1]).double()
    table = metric.statistics(logits[known].softmax(-1), labels, groups).sum(0)
    rates = table[0] / table[1]
    return (rates.amax(-1) - rates.amin(-1)).amax()


@pytest.mark.parametrize("power", POWERS)
@every_metric
def test_its_gradient_is_that_of_the_global_gap(metric: Metric, power: str) -> None:
    """lam J(F) over everybody's rows, although each call sees one client's (Theorem 5.1)."""
    assert POWERS.keys() == SLOPES.keys()
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty(metric, 3.0, penalty=power)
    assert send(penalty, made, logits, y, a) == pytest.approx(gap(metric, logits, y, a).item())
    (expected,) = torch.autograd.grad(3.0 * POWERS[power](gap(metric, logits, y, a)), logits)
    cuts = list(zip(made.offsets, made.offsets[1:], strict=False))
    whole = made.offsets[-1]
    parts = [penalty(logits[i:j], y[i:j], a[i:j]) * (j - i) / whole for i, j in cuts]
    (found,) = torch.autograd.grad(sum(parts), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@every_metric
def test_more_groups_and_classes(metric: Metric) -> None:
    made = several(groups=3, classes=3)
    logits, y, a = rows(made)
    penalty = Penalty(metric, 2.0, groups=3, penalty="l2")
    send(penalty, made, logits, y, a)
    (expected,) = torch.autograd.grad(2.0 * gap(metric, logits, y, a) ** 2, logits)
    (found,) = torch.autograd.grad(penalty(logits, y, a), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@every_metric
def test_the_simulator_minimizes_the_same(metric: Metric) -> None:
    """One full-batch step of the engine against the loop with one line more."""
    from small_federation import SGD, module

    made = several()
    found = run(made, fedgft(metric, 4.0), rounds=1, batch_size=64, optimizer=SGD)
    # both with their default J
    model = module(made)
    penalty = Penalty(metric, 4.0)
    held = clients(made)
    penalty.update(sum(penalty.statistics(model(c.x), c.y, c.a) for c in held))
    for c in held:
        logits = model(c.x)
        loss = cross_entropy(logits, c.y) + penalty(logits, c.y, c.a)
        (loss * len(c.y) / made.offsets[-1]).backward()
    stepped = torch.cat([(p - 0.05 * p.grad).flatten() for p in model.parameters()])
    np.testing.assert_allclose(found.params[0], stepped.detach().numpy(), rtol=0, atol=1e-12)


def test_a_metric_that_is_not_affine_works_here_only() -> None:
    """Squared scores: sums of scores cannot carry them, so the simulator says no."""
    squared = Metric(
        "sq",
        "squared",
        lambda p, y: p[:, 1:] ** 2,
        lambda p, y: 1 + 0 * y[:, :1],
        lambda classes: ("all",),
    )
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty(squared, 3.0, penalty="l2")
    send(penalty, made, logits, y, a)
    (expected,) = torch.autograd.grad(3.0 * gap(squared, logits, y, a) ** 2, logits)
    (found,) = torch.autograd.grad(penalty(logits, y, a), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    with pytest.raises(FedgftError, match="not affine"):
        run(made, fedgft(squared, 1.0))


def test_zero_before_the_first_update_and_without_lam() -> None:
    made = federation()
    logits, y, a = rows(made)
    fresh = Penalty("sp", 3.0)
    off = Penalty("sp", 0.0)
    send(off, made, logits, y, a)
    for penalty in (fresh, off):
        value = penalty(logits, y, a)
        assert value.item() == 0.0
        assert not torch.autograd.grad(value, logits)[0].any()


def test_rows_without_a_group_cost_nothing_and_messages_are_detached() -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("eop", 3.0)
    send(penalty, made, logits, y, a)
    (found,) = torch.autograd.grad(penalty(logits, y, a), logits)
    assert (a == -1).any() and not found[a == -1].any() and not found[y == 0].any()
    message = penalty.statistics(logits, y, a)
    assert isinstance(message, np.ndarray) and message[0] == len(y) and message.shape == (5,)


def test_a_round_without_a_group_keeps_the_last_constants() -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("sp", 3.0)
    only = a == 0
    assert np.isnan(penalty.update(penalty.statistics(logits[only], y[only], a[only])))
    assert penalty(logits, y, a).item() == 0.0
    send(penalty, made, logits, y, a)
    before = penalty(logits, y, a).item()
    penalty.update(penalty.statistics(logits[only], y[only], a[only]))
    assert penalty(logits, y, a).item() == before != 0.0


def test_float32_logits_stay_float32() -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("sp", 3.0)
    send(penalty, made, logits, y, a)
    assert penalty(logits.float(), y, a).dtype == torch.float32


@every_metric
def test_price_is_the_derivative_of_the_statistics(metric: Metric) -> None:
    """lam <v, d statistics / d score> for a row of each label and group, by autograd."""
    v = np.random.default_rng(0).standard_normal((2, len(metric.conditions(2)), 2))
    table = price(metric, v, 2)
    for y in (0, 1):
        for a in (0, 1):
            probs = torch.tensor([[0.3, 0.7]], dtype=torch.float64, requires_grad=True)
            hot = torch.eye(2, dtype=torch.float64)
            one = metric.statistics(probs, hot[y][None], hot[a][None])[0]
            (slope,) = torch.autograd.grad((one * torch.tensor(v)).sum(), probs)
            np.testing.assert_allclose(table[y, a], slope[0].numpy(), atol=1e-12)
    assert not table[:, 2].any()
    per_run = LinearizedPenalty(metric, np.array([2.0, 0.0])).price(
        np.stack((v, v)), run=np.array([0, 1]), classes=2
    )
    np.testing.assert_allclose(per_run[0], 2 * table)
    assert not per_run[1].any()


# -- names of groups ------------------------------------------------------------------------------

LOGITS = torch.tensor([[0.0, 1.0], [0.0, -0.5], [0.0, 2.0], [0.0, -1.0], [0.0, 0.3]])
OTHER = 0.3 * LOGITS.flip(1)  # at the measured logits themselves the loss is about 0
LABELS = [0, 1, 1, 0, 1]
CODES = [0, 1, 0, 1, -1]
NAN = float("nan")


def columns(first, second) -> list:
    """The groups 0, 1, 0, 1 and a missing one, in every kind of column."""
    values = [first, second, first, second, None]
    kinds = [values, tuple(values), np.array(values, dtype=object), {"g": values}]
    kinds += [pd.Series(values), pd.Series(values).astype("category"), pd.DataFrame({"g": values})]
    kinds += [pl.Series(values), pl.DataFrame({"g": values}), np.array([values], dtype=object).T]
    kinds += [np.ma.array([first, second, first, second, second], mask=[0, 0, 0, 0, 1])]
    return kinds


def numbers(first: int, second: int) -> list:
    values = np.array([first, second, first, second, -1])
    floats = np.where(values == -1, NAN, values)
    kinds = [values, values.tolist(), values.astype(np.int16), torch.tensor(values)]
    kinds += [floats, floats.tolist(), torch.tensor(floats), pl.Series(values)]
    kinds += [pd.Series(floats), pd.Series(floats).astype("Int64")]
    if second < 256:
        kinds += [torch.tensor(floats).bfloat16()]
    return kinds


COLUMNS = {
    "text": (columns("f", "m"), ("f", "m"), CODES),
    "truth": (columns(False, True), ("False", "True"), CODES),
    "numbers": (columns(1, 2) + numbers(1, 2), ("1", "2"), [1, 2, 1, 2, -1]),
    "indices": (columns(0, 1) + numbers(0, 1), ("0", "1"), CODES),
    "years": (
        columns(1999, 2024) + numbers(1999, 2024),
        ("1999", "2024"),
        [1999, 2024, 1999, 2024, -1],
    ),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_groups_are_read_from_columns_of_every_kind(kind: str) -> None:
    """The same statistics and loss as with codes, in whatever type the groups are."""
    given, names, codes = COLUMNS[kind]
    plain = Penalty("eo", 2.0)
    message = plain.statistics(LOGITS, LABELS, CODES)
    plain.update(message)
    loss = plain(OTHER, LABELS, CODES)
    assert abs(loss.item()) > 1e-3
    for column in given:
        penalty = Penalty("eo", 2.0).fit(column)
        assert penalty.group_names == names and penalty.groups == 2
        encoded = penalty.encode(column)
        assert encoded.dtype == torch.int64 and encoded.tolist() == codes
        for a in (column, encoded, encoded.tolist(), given[0]):
            np.testing.assert_array_equal(penalty.statistics(LOGITS, LABELS, a), message)
            penalty.update(message)
            assert penalty(OTHER, LABELS, a) == loss
        assert penalty.encode(encoded).tolist() == codes


def test_names_up_front_are_in_the_order_that_was_given() -> None:
    """As in a federation, where a client may lack a group."""
    penalty = Penalty("sp", 1.0, groups=["m", "f"])
    swapped = penalty.statistics(LOGITS, LABELS, ["f", "m", "f", "m", None])
    plain = Penalty("sp", 1.0).statistics(LOGITS, LABELS, CODES)
    np.testing.assert_array_equal(swapped[1:].reshape(2, 2), plain[1:].reshape(2, 2)[:, ::-1])
    assert penalty.statistics(LOGITS[:1], [0], ["f"])[3:].tolist() == [0, 1]
    assert Penalty("sp", 1.0, groups=[30, 10]).encode([10, 30, -1]).tolist() == [10, 30, -1]
    assert Penalty("sp", 1.0, groups=np.array(["f", "m"])).encode(["m"]).tolist() == [1]


def test_several_columns_are_intersections() -> None:
    """Their names are those of the library's other tables, by an independent reader."""
    frame = pd.DataFrame(
        {
            "sex": ["f", "m", "f", "m", None],
            "age": ["under 40", "under 40", "40 or more", "under 40", "under 40"],
        }
    )
    names = ("f & 40 or more", "f & under 40", "m & under 40")
    codes = [1, 2, 0, 2, -1]
    data = from_frame(
        frame.assign(y=LABELS), "t", roles=Roles("y", ("sex", "age"), keep_group=True)
    )
    assert (data.group_names, data.groups.tolist()) == (names, codes)
    penalty = Penalty("sp", 1.0).fit(frame)
    assert penalty.group_names == names
    missing = frame.astype(object).where(frame.notna(), None)
    same = [frame, frame[["age", "sex"]], frame.to_numpy(), missing.to_dict("list")]
    for given in (*same, pl.DataFrame(missing.to_dict("list"))):
        assert penalty.encode(given).tolist() == codes
    assert penalty.encode(["m & under 40", None]).tolist() == [2, -1]
    assert Penalty("sp", 1.0, groups=names).encode(frame).tolist() == codes
    tensor = torch.tensor([[0, 1], [1, 1], [0, -1], [1, 0]])
    assert Penalty("sp", 1.0).fit(tensor).encode(tensor).tolist() == [0, 2, -1, 1]
    with pytest.raises(FedgftError, match="'m & 40 or more'"):
        penalty.encode({"sex": ["m"], "age": ["40 or more"]})


def test_fit_again_starts_anew() -> None:
    penalty = Penalty("sp", target=0.1, rounds=3).fit(["f", "m"])
    for _ in range(2):
        penalty.update(penalty.statistics(LOGITS, LABELS, CODES))
    assert penalty.v is not None
    penalty.fit(["a", "b", "c"])
    assert penalty.v is None and penalty.report is None and penalty.groups == 3
    penalty.update(penalty.statistics(LOGITS, LABELS, ["a", "b", "c", "a", "b"]))


def test_integer_codes_need_no_table_reader() -> None:
    script = (
        "import sys\n"
        "for name in ('polars', 'narwhals', 'pandas'):\n    sys.modules[name] = None\n"
        "import torch, fedgft\n"
        "penalty = fedgft.Penalty('sp', 1.0)\n"
        "penalty.update([penalty.statistics(torch.zeros(2, 2), [0, 1], [0, 1])])\n"
        "print(float(penalty(torch.zeros(2, 2), [0, 1], [0, 1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.0\n"), done.stderr


# -- labels, logits, messages ---------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"lam": 3.0}, {"target": 0.02}], ids=["lam", "target"])
@every_metric
def test_one_logit_is_the_two_column_form(metric: Metric, how: dict) -> None:
    """Shapes (n,) and (n, 1): the same sums, loss and gradients; labels as BCE has them."""
    made = federation()
    both, y, a = rows(made)
    score = (both[:, 1] - both[:, 0]).detach()
    two, one, column = (Penalty(metric, **how) for _ in range(3))
    wide = torch.stack((0 * score, score), 1).requires_grad_()
    flat = score.clone().requires_grad_()
    tall = score[:, None].clone().requires_grad_()
    for _ in range(2):
        message = two.statistics(wide, y, a)
        np.testing.assert_array_equal(one.statistics(flat, y.double(), a), message)
        np.testing.assert_array_equal(column.statistics(tall, y[:, None].float(), a), message)
        assert two.update(message) == one.update(message) == column.update(message)
    sigmoid = (torch.sigmoid(score) if "lam" in how else 1.0 * (score > 0)).numpy()
    p = sigmoid[a.numpy() == 1]
    if metric.name == "sp":  # a formula of its own: the sum of sigmoids, or of decisions
        assert message[2] == pytest.approx(p.sum(), rel=1e-12)
    loss = two(wide, y, a)
    (expected,) = torch.autograd.grad(loss, wide)
    for penalty, logits in ((one, flat), (column, tall)):
        found = penalty(logits, y == 1, a)
        assert found == loss
        (gradient,) = torch.autograd.grad(found, logits)
        torch.testing.assert_close(gradient.ravel(), expected[:, 1], rtol=0, atol=1e-16)
    if "lam" in how:
        assert expected.any()


def test_messages_are_added_up() -> None:
    """A sum, a list, a generator, the rows of an array, tensors: one update."""
    made = federation()
    logits, y, a = rows(made)
    one = Penalty("eop", 1.0)
    cuts = zip(made.offsets, made.offsets[1:], strict=False)
    parts = [one.statistics(logits[i:j], y[i:j], a[i:j]) for i, j in cuts]
    gap = one.update(sum(parts))
    for given in (parts, iter(parts), tuple(parts), np.stack(parts), torch.tensor(sum(parts))):
        other = Penalty("eop", 1.0)
        assert other.update(given) == pytest.approx(gap, abs=1e-15)
        np.testing.assert_allclose(other.v, one.v, rtol=1e-14)
    before = one.v
    assert np.isnan(one.update([one.statistics(logits[:0], y[:0], a[:0])]))
    np.testing.assert_array_equal(one.v, before)


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sp", "eop", "eo"])
@pytest.mark.parametrize("classes", [1, 3])
def test_finite_differences(name: str, classes: int) -> None:
    """Three classes or one logit, three groups, some of them missing."""
    generator = torch.Generator().manual_seed(1)
    shape = (40, 3) if classes == 3 else (40,)
    logits = torch.randn(shape, dtype=torch.float64, generator=generator)
    y = torch.randint(3 if classes == 3 else 2, (40,), generator=generator)
    a = torch.randint(-1, 3, (40,), generator=generator)
    assert (a == -1).any()
    penalty = Penalty(name, 5.0, groups=3)
    penalty.update(penalty.statistics(logits, y, a))
    assert torch.autograd.gradcheck(lambda z: penalty(z, y, a), logits.clone().requires_grad_())
    step = 1e-6
    logits = logits.requires_grad_()
    (slope,) = torch.autograd.grad(penalty(logits, y, a), logits)
    direction = torch.randn(shape, dtype=torch.float64, generator=generator)

    def squared(z: torch.Tensor) -> float:  # lam J(F), by the sums of a second penalty
        return 5.0 * Penalty(name, 1.0, groups=3).update(penalty.statistics(z, y, a)) ** 2 / 2

    ends = [squared(logits.detach() + sign * step * direction) for sign in (1, -1)]
    assert (slope * direction).sum().item() == pytest.approx(
        (ends[0] - ends[1]) / (2 * step), rel=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_gradients_and_a_single_precision_loss(dtype) -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("sp", 20.0)
    half = logits.detach().to(dtype).requires_grad_()
    assert penalty(half, y, a).dtype == torch.float32  # before the first update, too
    penalty.update(penalty.statistics(-half, y, a))
    exact = half.detach().double().requires_grad_()
    loss = penalty(half, y, a)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(penalty(exact, y, a).item(), rel=1e-5)
    assert abs(loss.item()) > 1e-3
    (found,) = torch.autograd.grad(loss, half)
    (expected,) = torch.autograd.grad(penalty(exact, y, a), exact)
    assert found.dtype == dtype and found.any()
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("metric", ["eo", "a product"])
def test_autocast_does_not_reach_the_sums(metric: str) -> None:
    """Also not in a metric with a matrix product, which autocast would compute in bf16."""
    product = Metric("p", "product", lambda p, y: p @ p.new_tensor([[0.1], [0.9]]))
    made = federation()
    _, y, a = rows(made)
    x = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0)) + a[:, None]
    model = torch.nn.Linear(3, 2)
    torch.nn.init.ones_(model.weight[1])
    penalty = Penalty(product if metric == "a product" else metric, 20.0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        assert logits.dtype == torch.bfloat16
        message = penalty.statistics(-logits, y, a)
        penalty.update(message)
        loss = penalty(logits, y, a)
    assert loss.dtype == torch.float32 and abs(loss.item()) > 1e-3
    np.testing.assert_array_equal(penalty.statistics(-logits, y, a), message)
    assert penalty(logits, y, a) == loss
    loss.backward()
    assert model.weight.grad.any()


def test_a_first_call_in_inference_mode_does_not_stop_training() -> None:
    penalty = Penalty("sp", 1.0, groups=[1, 2])
    penalty.update(penalty.statistics(LOGITS, LABELS, [1, 2, 1, 2, -1]))
    with torch.inference_mode():
        value = penalty(OTHER, LABELS, [1, 2, 1, 2, -1])
    logits = OTHER.clone().requires_grad_()
    loss = penalty(logits, LABELS, [1, 2, 1, 2, -1])
    loss.backward()
    assert loss == value and logits.grad.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("names", [None, ["f", "m"], [10, 20]], ids=["codes", "text", "numbers"])
@pytest.mark.parametrize("shape", [(500, 3), (500,)])
def test_a_batch_on_a_gpu_stays_there_and_does_not_wait(names, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    y = torch.randint(2, (500,), generator=generator)
    a = torch.randint(-1, 2, (500,), generator=generator)
    if names == [10, 20]:
        a = torch.where(a < 0, a, 10 * (a + 1))
    penalty = Penalty("eo", 3.0, groups=names or 2)
    message = penalty.statistics(-logits, y, a)
    there = [logits.cuda().requires_grad_(), y.cuda(), a.cuda()]
    np.testing.assert_allclose(penalty.statistics(-there[0], *there[1:]), message, rtol=1e-6)
    penalty.update(message)
    expected = penalty(logits, y, a)
    penalty(*there)  # copies the prices
    wrong = torch.full_like(there[2], 7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = penalty(*there)
        loss.backward()
        bad = penalty(there[0], there[1], wrong), penalty(there[0], wrong, there[2])
        with torch.autocast("cuda", torch.bfloat16):
            half = penalty(there[0].bfloat16(), *there[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.is_cuda and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert there[0].grad.is_cuda and there[0].grad.any()
    assert all(torch.isnan(b) for b in bad) and half.dtype == torch.float32
    for y_, a_, field in ((there[1], wrong, "a"), (wrong, there[2], "y")):
        with pytest.raises(FedgftError, match="7") as raised:
            penalty.statistics(there[0], y_, a_)
        assert raised.value.field == field
    assert copy.deepcopy(penalty)(*there) == loss
    assert penalty.encode(there[2]).is_cuda


# -- copies and checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("metric", [*CATALOG, "sp+0.5*eop"])
def test_metrics_are_copied_and_pickled(metric: str) -> None:
    found = get_metric(metric)
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert again == found and hash(again) == hash(found)
        assert again.conditions(3) == found.conditions(3)


@pytest.mark.parametrize(
    "how", [{"lam": 3.0}, {"target": 0.02, "rounds": 5}], ids=["lam", "target"]
)
def test_a_penalty_is_copied_and_pickled(how: dict) -> None:
    a = ["f", "m", "f", "m", None]
    model = torch.nn.Linear(2, 2)
    penalty = Penalty("sp+0.5*eop", **how).fit(a)
    for _ in range(3):
        penalty.update(penalty.statistics(LOGITS, LABELS, a))
    penalty(LOGITS, LABELS, a)
    if "target" in how:
        penalty.damp(model)
    stream = io.BytesIO()
    torch.save(penalty, stream)
    stream.seek(0)
    copies = [copy.deepcopy(penalty), pickle.loads(pickle.dumps(penalty))]
    copies.append(torch.load(stream, weights_only=False))
    message = penalty.statistics(-LOGITS, LABELS, a)
    losses = {float(p(OTHER, LABELS, a)) for p in (penalty, *copies)}
    assert len(losses) == 1 and abs(min(losses)) > 1e-3
    before = penalty.v.copy()
    gap = copies[0].update(message)
    np.testing.assert_array_equal(penalty.v, before)  # a copy of its own
    for p in (penalty, *copies[1:]):
        assert p.update(message) == gap
        np.testing.assert_array_equal(p.v, copies[0].v)
        assert p.group_names == ("f", "m")


def test_a_checkpoint_holds_the_names_and_is_safe_to_load() -> None:
    """`state_dict` goes through `torch.save` and `torch.load(weights_only=True)`."""
    model = torch.nn.Linear(2, 2)
    a = ["f", "m", "f", "m", None]

    def make(groups) -> Penalty:
        return Penalty("sp", target=0.02, rounds=4, groups=groups)

    named = make(["f", "m"])
    plain = make(None)
    named.damp(model)
    for _ in range(3):
        named.update(named.statistics(LOGITS, LABELS, a))
        plain.update(plain.statistics(LOGITS, LABELS, CODES))
    stream = io.BytesIO()
    torch.save(named.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    assert state["groups"] == ["f", "m"] and "groups" not in plain.state_dict()
    resumed = make(["f", "m"])
    resumed.load_state_dict(state)
    assert resumed(OTHER, LABELS, a) == named(OTHER, LABELS, a) != 0
    make(2).load_state_dict(plain.state_dict())
    wrong = [(make(["m", "f"]), state), (make(["f", "x"]), state), (make(None), state)]
    wrong += [(make(["f", "m"]), plain.state_dict()), (make(3), plain.state_dict())]
    for penalty, other in (*wrong, (make(None), {"v": None})):
        with pytest.raises(FedgftError) as raised:
            penalty.load_state_dict(other)
        assert raised.value.field == "state" and penalty.v is None


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(own_loop).failed == 0


def test_without_torch_one_line_names_the_extra() -> None:
    script = "import sys\nsys.modules['torch'] = None\nimport fedgft\nfedgft.Penalty('sp', 1.0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith("fedgft.Penalty needs PyTorch: pip install 'fedgft[torch]'")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_loop_of_the_documentation_is_short_and_reaches_its_target(seed: int) -> None:
    """At most twelve lines from tensors to a model within a point of the target."""
    page = Path(__file__).parents[1] / "docs" / "own-loop.md"
    (code,) = re.findall(r"```python\n([^`]*torch.manual_seed\(0\).*?)```", page.read_text(), re.S)
    loop = code[code.index("penalty = ") : code.index("\n\npenalty.update")]
    assert len(loop.splitlines()) <= 12
    held: dict = {}
    exec(code.replace("manual_seed(0)", f"manual_seed({seed})"), held)
    decided = np.concatenate([held["model"](x).argmax(1) for x, _, _ in held["clients"]])
    rates = [decided[held["sex"] == name].mean() for name in ("f", "m")]
    assert abs(rates[0] - rates[1]) <= 0.02 + 0.01 < 0.2 < rates[0]
    right = (decided == held["data"].labels).mean()
    assert right > 0.75


def test_columns_in_another_order_are_refused():
    penalty = Penalty("sp", lam=1.0, groups=["f", "m"])
    y = pd.Series([0, 1, 1])
    a = pd.Series(["f", "m", "f"], index=[2, 0, 1])
    with pytest.raises(FedgftError) as caught:
        penalty.statistics(torch.zeros(3, 2), y, a)
    assert caught.value.field == "a"

"""Local targets: every client's own gap is kept within a target, beside the gap of all clients."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fedgft
from fedgft.algorithms import Algorithm, fedgft_control
from fedgft.algorithms.controller import ControlReport, Loop
from fedgft.algorithms.local_control import LocalController, largest_local_gap
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.engine import History, Settings, simulate
from fedgft.engine.select_best import score_models
from fedgft.engine.state import Snapshot
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.models import Trees
from fedgft.study import Study, get_protocol
from fedgft.study.cache import Checkpoints
from fedgft.study.results import describe_training
from fedgft.study.training import compare_methods, state_target
from fedgft.sums import Sums
from small_federation import CLIENTS, federation

SP = CATALOG["sp"]
ROWS = 2500
TARGET = 0.02
LOCAL = 0.05


def opposite(clients: int = 4, *, changed: int | None = None) -> Federation:
    """Clients with opposite gaps: group 1 has the larger x0 at even clients, else the smaller.

    The labels follow x0, x1 and x2, so a fair model of each client does without x0. `changed`
    names a client whose rows are others.
    """
    parts = []
    for client in range(clients):
        rng = np.random.default_rng(client + 100 * (client == changed))
        group = rng.integers(0, 2, ROWS)
        x = rng.standard_normal((ROWS, 4))
        x[:, 0] += (1 - 2 * (client % 2)) * (group - 0.5)
        label = x[:, :3].sum(1) + rng.logistic(size=ROWS) > 0
        parts.append((x, label.astype(np.int64), group))
    x, label, group = (np.concatenate(each) for each in zip(*parts, strict=True))
    data = Dataset("opposite", x, label, group, tuple("abcd"), ("0", "1"), ("0", "1"))
    rows = np.arange(len(x), dtype=np.int32)
    return Federation(data, rows, np.arange(clients + 1) * ROWS, rows[::10])


OPPOSITE = standardize(opposite())


def train(
    algorithm: Algorithm,
    made: Federation = OPPOSITE,
    *,
    model="logistic",
    lr: float = 0.02,
    on_state=None,
    resume=None,
    **options,
) -> History:
    settings = Settings(**({"rounds": 50} | options))
    how = {"seeds": [0], "lr": lr, "on_state": on_state, "resume": resume}
    return simulate([made], model, algorithm, settings, **how)


def same(one: History, two: History) -> None:
    np.testing.assert_array_equal(one.params, two.params)
    for name in ("test", "federation", "before", "after"):
        for mine, theirs in zip(getattr(one, name).arrays, getattr(two, name).arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)


class Keep:
    """Keeps a snapshot of every round."""

    def __init__(self) -> None:
        self.snapshots: dict[int, Snapshot] = {}

    def __call__(self, done: int, take) -> None:
        made = take()  # its arrays are the run's own, and go on changing
        arrays = {name: array.copy() for name, array in made.arrays.items()}
        self.snapshots[done] = replace(made, arrays=arrays)

    def prices(self, done: int) -> np.ndarray:
        """The clients' own prices after a round, (client, v, g)."""
        (local,) = self.snapshots[done].tree["of"][0]["of"]["local"]["of"]
        control = local["of"]["control"]["of"]
        return self.snapshots[done].arrays[control["prices"]["of"]]


@pytest.mark.parametrize("options", [{}, {"lag": True}, {"cohort": 2}, {"noise": 5.0}])
@pytest.mark.parametrize("executor", ["fused", "stacked", "sequential"])
def test_a_local_target_that_no_client_exceeds_changes_no_bit(executor: str, options: dict) -> None:
    chosen = {"executor": executor, "rounds": 4, **options}
    without = train(fedgft_control(SP, TARGET), **chosen)
    same(without, train(fedgft_control(SP, TARGET, local_target=None), **chosen))
    within = train(fedgft_control(SP, TARGET, local_target=0.99), **chosen)
    same(without, within)
    assert without.control.local_target is None and without.control.local_gap is None
    np.testing.assert_array_equal(without.control.gaps, within.control.gaps)


@pytest.mark.parametrize("options", [{}, {"lag": True}, {"schedule": "constant"}])
def test_local_and_global_target_are_met_together(options: dict) -> None:
    without = train(fedgft_control(SP, TARGET), **options)
    assert without.federation[-1].gap(SP, "hard")[0] <= TARGET + 0.003
    assert largest_local_gap(SP, without.after, "hard")[0] > 4 * LOCAL
    found = train(fedgft_control(SP, TARGET, local_target=LOCAL), **options)
    assert found.federation[-1].gap(SP, "hard")[0] <= TARGET + 0.003
    assert largest_local_gap(SP, found.after, "hard")[0] <= LOCAL + 0.004
    assert found.federation[-1].accuracy()[0] > without.federation[-1].accuracy()[0] - 0.08
    np.testing.assert_array_equal(found.control.local_gap, found.after.gap(SP, "hard").max(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eo", "sp+0.5*eop"])
def test_every_metric_can_have_a_local_target(name: str) -> None:
    metric = fedgft.get_metric(name)
    gaps = {}
    for local in (None, 0.06):
        history = train(fedgft_control(metric, TARGET, local_target=local))
        gaps[local] = largest_local_gap(metric, history.after, "hard")[0]
    assert gaps[None] > 0.15
    assert gaps[0.06] < 0.075


@pytest.mark.parametrize("executor", ["stacked", "sequential"])
def test_executors_agree(executor: str) -> None:
    method = fedgft_control(SP, TARGET, local_target=LOCAL, pick=0.0)
    options = {"rounds": 4, "precision": "fp64", "batch_size": 512}
    fused = train(method, executor="fused", **options)
    other = train(method, executor=executor, **options)
    np.testing.assert_allclose(other.params, fused.params, rtol=0, atol=1e-9)


def test_trees_take_local_targets() -> None:
    trees = Trees(max_depth=3, folds=0)
    gaps = []
    for local in (None, LOCAL):
        method = fedgft_control(SP, TARGET, local_target=local)
        history = train(method, model=trees, rounds=60, lr=0.1)
        gaps.append(largest_local_gap(SP, history.after, "hard")[0])
    assert gaps[0] > 4 * LOCAL
    assert gaps[1] < 1.5 * LOCAL


def test_a_run_has_the_local_target_that_is_its_own() -> None:
    both = [OPPOSITE] * 2
    settings = Settings(rounds=6)
    targets = np.array([0.99, LOCAL])
    together = simulate(
        both, "logistic", fedgft_control(SP, TARGET, local_target=targets), settings, seeds=[0, 0]
    )
    for run, target in enumerate(targets):
        method = fedgft_control(SP, TARGET, local_target=target)
        alone = simulate(OPPOSITE, "logistic", method, settings)
        np.testing.assert_array_equal(together.params[run], alone.params[0])
    assert together.part(np.array([1])).control.local_target == [LOCAL]


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_local_price_depends_on_the_clients_own_rows_only(noise: float) -> None:
    """With a learning rate of 0 the global model stays, whatever the other clients do."""
    method = fedgft_control(SP, TARGET, local_target=LOCAL)
    prices = []
    for changed in (None, 2):
        keep = Keep()
        start = np.array([0.0] * 4 + [1.0, 1.0, 1.0, 0.0] + [0.0, 0.0])
        simulate(
            opposite(changed=changed),
            "logistic",
            method,
            Settings(rounds=4, noise=noise),
            lr=0.0,
            init=start,
            on_state=keep,
        )
        assert not keep.prices(1).any()  # the first model has not been trained
        prices.append(keep.prices(3))
    others = [0, 1, 3]
    assert (np.abs(prices[0]).max((1, 2)) > 0).all()
    np.testing.assert_array_equal(prices[0][others], prices[1][others])
    assert (prices[0][2] != prices[1][2]).all()
    signs = np.sign(prices[0][:, 0, 1])  # the group that is selected more often pays
    np.testing.assert_array_equal(signs, [1, -1, 1, -1])


def test_a_client_without_a_local_gap_has_no_local_price() -> None:
    made = federation()
    keep = Keep()
    history = train(
        fedgft_control(SP, TARGET, local_target=0.0), made, rounds=6, batch_size=8, on_state=keep
    )
    lacks = np.isnan(history.after.gap(SP, "hard")[0])
    assert lacks.sum() == 3 and len(lacks) == len(CLIENTS)
    prices = np.abs(keep.prices(5)).max((1, 2))
    assert not prices[lacks].any() and prices[~lacks].any()
    assert np.isfinite(history.control.local_gap).all()


def test_prices_follow_gaps_and_end_at_their_limit() -> None:
    """A gap that does not respond raises the price to a limit; one within the target lowers it."""
    rule = LocalController(SP, LOCAL)
    cohort = fedgft.engine.plan.full_cohort([OPPOSITE])

    def sums(rate: float) -> Sums:
        count = np.zeros((4, 2, 3))
        count[..., :2] = 100
        positive = count * np.array([0.5, 0.5 + rate, 0.0])
        decisions = np.stack((count - positive, positive), -1)
        return Sums(count, decisions, decisions)

    state = rule.init(1, 4, Loop())
    largest = []
    for gap in [0.3] * 200 + [0.0] * 200:
        state = rule.update(state, cohort, sums(gap))
        largest.append(np.abs(state.control.prices).max())
    assert largest[0] == 0 and largest[2] > largest[1] > 0
    assert largest[199] == largest[150] > 8 and largest[-1] == 0
    price = rule.price(state, cohort, classes=2)
    assert price.shape == (4, 2, 3, 2) and not price.any()


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("options", [{"executor": "fused"}, {"executor": "stacked"}, {"cohort": 2}])
def test_a_resumed_run_ends_with_the_same_bits(after: int, options: dict) -> None:
    method = fedgft_control(SP, TARGET, local_target=LOCAL)
    keep = Keep()
    chosen = {"rounds": 6, **options}
    whole = train(method, **chosen, on_state=keep)
    again = train(method, **chosen, resume=keep.snapshots[after])
    same(whole, again)
    np.testing.assert_array_equal(whole.control.gaps, again.control.gaps)


@pytest.mark.parametrize("model", ["logistic", Trees(max_depth=2, folds=2)])
def test_a_checkpoint_holds_the_local_prices(model, tmp_path) -> None:
    method = fedgft_control(SP, TARGET, local_target=LOCAL)
    files = Checkpoints(tmp_path, every=3)
    options = {"model": model, "rounds": 5}
    whole = train(method, **options, on_state=lambda done, take: files.put("run", done, take))
    found = Checkpoints(tmp_path, resume=True).get("run")
    assert found.round == 3
    same(whole, train(method, **options, resume=found))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"local_target": -0.1}, "at least 0 and below 1"),
        ({"local_target": 1.0}, "at least 0 and below 1"),
        ({"local_target": float("nan")}, "at least 0 and below 1"),
        ({"local_target": np.array([0.1, 0.2])}, "one per run"),
        ({"local_target": 0.1, "algorithm": "fedavg"}, "is for fedgft-control"),
        ({"local_target": 0.1, "algorithm": "lft"}, "is for fedgft-control"),
        ({"local_target": 0.1, "algorithm": "fedgft"}, "is for fedgft-control"),
        ({"local_target": 0.1, "algorithm": fedgft_control(SP)}, "has its own already"),
    ],
)
def test_bad_arguments_are_errors_of_one_line(arguments: dict, text: str) -> None:
    with pytest.raises(FedgftError, match=text) as error:
        fedgft.simulate(OPPOSITE, rounds=2, **arguments)
    assert error.value.field == "local_target"
    assert str(error.value).startswith("local_target ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("train", "--local-target", "-0.1"), "must be at least 0"),
        (("train", "--local-target", "1"), "must be below 1"),
        (("train", "--local-target", "nan"), "must be a number"),
        (("train", "--local-target", "0.1", "--method", "lft"), "is for fedgft-control"),
        (("compare", "--local-target", "0.1", "--methods", "lrw"), "is for fedgft-control"),
        (("frontier", "--local-target", "0.1"), "frontier compares the gaps of all rows"),
    ],
)
def test_bad_options_are_errors_of_one_line(given: tuple, text: str, capsys) -> None:
    from fedgft.cli import main

    with pytest.raises(SystemExit) as stop:
        main([*given, "--data", "synthetic"])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("fedgft: --local-target") and text in said[0]


def test_the_best_model_meets_both_targets() -> None:
    """Of two models with the same gap, the one within the local target is better."""
    count = np.zeros((1, 2, 2, 3))
    count[..., :2] = 50.0

    def model(rates: list[list[float]], right: float) -> tuple[Sums, Sums]:
        positive = np.zeros_like(count)
        positive[0, :, 0, :2] = 50 * (np.array(rates) - right)
        positive[0, :, 1, :2] = 50 * (np.array(rates) + right)
        decisions = np.stack((count - positive, positive), -1)
        clients = Sums(count, decisions, decisions)
        return clients.sum(1), clients

    objective = fedgft_control(SP, 0.0, local_target=LOCAL).objective
    opposed = score_models(objective, *model([[0.6, 0.4], [0.4, 0.6]], 0.2))
    fair = score_models(objective, *model([[0.5, 0.52], [0.52, 0.5]], 0.1))
    assert fair > opposed
    without = fedgft_control(SP, 0.0).objective
    assert score_models(without, *model([[0.6, 0.4], [0.4, 0.6]], 0.2)) > fair


def test_a_missed_local_target_is_reported() -> None:
    gaps = np.array([[0.01, 0.01], [0.01, 0.01], [0.01, 0.01]])
    report = ControlReport(np.full(3, 0.02), gaps[:, -1], gaps)
    assert report.reached.all()
    local = replace(report, local_target=np.full(3, 0.05), local_gap=np.array([0.052, 0.2, np.nan]))
    assert local.reached.tolist() == [True, False, True]
    text = local.reason(1)
    assert "20.0 points, above the local target of 5.0: try a larger local target" in text
    assert "local_target (now 0.05)" in local.warning()
    part = local.part(np.array([1]))
    mixed = part.with_runs(np.array([0]), local.part(np.array([0])))
    assert mixed.reached.tolist() == [True] and mixed.local_gap.tolist() == [0.052]


def test_rows_have_the_largest_local_gap() -> None:
    protocol = get_protocol("heldout")
    settings = replace(protocol.settings, rounds=30)
    fixed = replace(
        protocol, settings=settings, lr=(0.02,), round_factors=(), target=(TARGET,), own_test=False
    )
    dataset = OPPOSITE.dataset
    dataset = replace(dataset, clients=np.repeat(np.arange(4), ROWS), client_names=tuple("abcd"))
    limited = Study(dataset, replace(fixed, local_target=LOCAL), range(2), kind="column")
    rows = compare_methods(limited, ["fedavg", "fedgft-control"], [SP], [0.5]).rows
    assert rows[0]["local_gap"] > 4 * LOCAL and rows[0]["local_target"] is None
    assert rows[1]["local_gap"] < LOCAL + 0.01 and rows[1]["local_target"] == LOCAL
    assert "5.0 points on the rows of each client: " in state_target(rows[1], rows[0])
    json.dumps(rows, allow_nan=False)
    about = describe_training(limited, limited.run(0.5, "fedgft-control", SP), 0)
    assert about["local_target"] == LOCAL and about["local_gap"] > 0
    plain = Study(dataset, fixed, range(1), kind="column")
    (row,) = compare_methods(plain, ["fedgft-control"], [SP], [0.5]).rows
    assert "local_gap" not in row and "local_target" not in row

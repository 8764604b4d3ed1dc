"""Faults between organizations: clients that fail, lie, drop out or use other names."""

import logging
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import strategy as flower

from fedgft.errors import FedgftError
from fedgft.flower import FairFed, FedGFT, MeasuredStrategy
from fedgft.flower.client import client_site
from fedgft.flower.client import flatten_arrays as flat
from fedgft.flower.messages import pack_sums
from fedgft.flower.run_state import check_sums
from fedgft.metrics import CATALOG
from fedgft.metrics.robust_aggregation import share_limit
from fedgft.sums import CategoryNames, Sums
from in_process_grid import InProcessGrid, app_of, biased, grid_of, options, start_of, train_config

pytestmark = pytest.mark.slow

SP = CATALOG["sp"]


@pytest.fixture
def said(caplog):
    """What the log names, as one text."""
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.WARNING, "flwr")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def wrapped(made, change, which=2):
    """A grid where one client's replies go through `change` before they leave."""
    grid = grid_of(made)
    node = 100 + which
    honest = grid.apps[node]

    def app(message, context):
        return change(honest(message, context), message)

    grid.apps[node] = app
    return grid


def run(grid, made, strategy=None, rounds=3, **config):
    strategy = strategy or FedGFT(flower.FedAvg(**options()), lam=5.0)
    result = strategy.start(grid, start_of(made), rounds, train_config=train_config(**config))
    return result, strategy


def gap_without(made, client):
    """The first model's gap over all clients but one, and that one's share of the rows."""
    tallies = []
    for k in range(made.num_clients):
        site = client_site(made, k, "logistic")
        site.load(start_of(made))
        tallies.append(site.tally(site.rows))
    rest = sum(tallies[1:], start=tallies[0])
    others = [t for k, t in enumerate(tallies) if k != client]
    without = sum(others[1:], start=others[0])
    return float(rest.gap(SP, "soft")), float(without.gap(SP, "soft"))


def test_a_client_that_raises_is_left_out(said) -> None:
    made = biased()

    def broken(message, context):
        raise RuntimeError("disk on fire")

    grid = grid_of(made)
    grid.apps[102] = broken
    _, strategy = run(grid, made)
    assert [row["clients"] for row in strategy.history] == [2, 2, 2, 2]
    assert "node 102 failed: disk on fire" in said()


POISON = {
    "nan": lambda r: r.update(score=[float("nan")] * 12),
    "infinite": lambda r: r.update(count=[float("inf")] * 6),
    "negative": lambda r: r.update(count=[-5.0, *r["count"][1:]]),
    "huge": lambda r: r.update(score=[1e9] * 12, decision=[1e9] * 12, count=[1e9] * 6),
    "huge numerators": lambda r: r.update(score=[10 * v for v in r["score"]]),
    "short": lambda r: r.update(score=r["score"][:5]),
    "long": lambda r: r.update(count=r["count"] * 2),
    "text": lambda r: r.update(score=["a"] * 12),
    "fractions of rows": lambda r: r.update(count=[n + 0.5 for n in r["count"]]),
    "not adding up": lambda r: r.update(decision=[0.0] * 12),
    "no names": lambda r: r.pop("groups"),
    "one group": lambda r: r.update(groups=["0"]),
    "other groups": lambda r: r.update(groups=["m", "f"]),
    "an old version": lambda r: r.update(version=0),
    "no version": lambda r: r.pop("version"),
}


@pytest.mark.parametrize("channel", ["train", "query"])
@pytest.mark.parametrize("kind", POISON)
def test_impossible_statistics_are_left_out(kind: str, channel: str, said) -> None:
    """The gap is then that of the others: it moves by no more than an honest client's absence."""
    made = biased()

    def poison(reply, message):
        if "fedgft" in reply.content:
            POISON[kind](reply.content["fedgft"])
        return reply

    ours = FedGFT(flower.FedAvg(**options()), lam=5.0, channel=channel)
    run(wrapped(made, poison), made, ours)
    everybody, others = gap_without(made, 2)
    assert ours.history[0]["clients"] == 2
    assert ours.history[0]["gap_soft"] == pytest.approx(others, abs=1e-9)
    assert ours.history[0]["gap_soft"] != pytest.approx(everybody, abs=1e-9)
    assert "site-2" in said()


def test_a_client_cannot_claim_all_rows(said) -> None:
    """Huge and consistent, with as many examples: cut down to its largest allowed share."""
    made = biased()
    factor = 1e6

    def boast(reply, message):
        if "fedgft" in reply.content:
            record = reply.content["fedgft"]
            for key in ("count", "score", "decision"):
                record[key] = [factor * value for value in record[key]]
            record["score"] = [float(v) for v in record["score"]]
            reply.content["metrics"]["num-examples"] = int(factor * 1000)
        return reply

    ours = FedGFT(flower.FedMedian(**options()), lam=5.0, max_share=0.5, final=False)
    run(wrapped(made, boast), made, ours, 1)
    own = client_site(made, 2, "logistic")
    own.load(start_of(made))
    mine = own.tally(own.rows)
    others = sum(
        (_tally(made, k) for k in (0, 1)),
        start=Sums(*[0 * t for t in (mine.count, mine.score, mine.decision)]),
    )
    share = float(others.rows() / mine.rows())
    expected = others + mine.map(lambda t: t * share)
    assert ours.history[0]["gap_soft"] == pytest.approx(float(expected.gap(SP, "soft")), abs=1e-6)
    assert "claims 100% of all rows, and counts as" in said()


def _tally(made, k):
    site = client_site(made, k, "logistic")
    site.load(start_of(made))
    return site.tally(site.rows)


@pytest.mark.parametrize("rows", [[10, 10, 1, 1, 1], [100, 1, 1], [5, 5, 5], [9, 1], [0, 0, 7]])
@pytest.mark.parametrize("most", [0.3, 0.5, 0.9])
def test_no_share_is_above_the_cap(rows: list, most: float) -> None:
    limit = share_limit(rows, most)
    sizes = np.minimum(rows, limit)
    assert limit > 0
    if most >= 1 / np.count_nonzero(rows):
        assert sizes.max() <= most * sizes.sum() + 1e-9
    else:  # too few sites for such a share: they all count alike
        assert len(set(sizes[sizes > 0])) == 1


def test_shares_below_the_cap_are_left_alone() -> None:
    assert share_limit([1, 2, 3], 0.9) >= 3
    assert share_limit([6, 12, 18], 0.4) == pytest.approx(0.4 / 0.6 * 18)
    assert share_limit([7], 0.4) == np.inf  # alone, it is everybody


UPDATES = {
    "another shape": (lambda c: c.update(arrays=_arrays(weight=(2, 3), bias=(2,))), "shape"),
    "other tensors": (lambda c: c.update(arrays=_arrays(w=(2, 5), bias=(2,))), "tensors"),
    "nan": (lambda c: c.update(arrays=_arrays(np.nan, weight=(2, 5), bias=(2,))), "not finite"),
    "no metrics": (lambda c: c.pop("metrics"), "one MetricRecord, not 0"),
    "negative rows": (lambda c: c["metrics"].update({"num-examples": -3}), "no number of rows"),
    "infinite rows": (lambda c: c["metrics"].update({"num-examples": float("inf")}), "no number"),
    "list of rows": (lambda c: c["metrics"].update({"num-examples": [1, 2]}), "no number"),
    "other metrics": (lambda c: c["metrics"].update({"auc": 0.5}), "the metrics auc"),
    "garbage": (lambda c: c.update(arrays=_spoiled(data=b"junk")), "cannot be read"),
    "another kind": (lambda c: c.update(arrays=_spoiled(stype="pickle")), "cannot be read"),
    "another size": (lambda c: c.update(arrays=_spoiled(shape=(2, 5))), "shape"),
    "lists": (lambda c: c["metrics"].update(train_loss=[1.0, 2.0]), "another form"),
    "two models": (lambda c: c.update(more=_arrays(weight=(2, 5))), "one ArrayRecord"),
}


def _arrays(fill=0.0, **shapes):
    from flwr.app import Array

    return ArrayRecord({n: Array(np.full(s, fill, np.float32)) for n, s in shapes.items()})


def _spoiled(**change):
    """An array whose label is right and whose bytes are not."""
    from flwr.app import Array

    wide = Array(np.zeros((7, 9), np.float32))
    told = {"dtype": "float32", "shape": (2, 5), "stype": wide.stype, "data": wide.data} | change
    return ArrayRecord({"weight": Array(**told), "bias": Array(np.zeros(2, np.float32))})


@pytest.mark.parametrize("kind", UPDATES)
def test_updates_that_cannot_be_averaged_are_left_out(kind: str, said) -> None:
    made = biased()
    change, says = UPDATES[kind]

    def spoil(reply, message):
        if message.metadata.message_type == "train":
            change(reply.content)
        return reply

    result, _ = run(wrapped(made, spoil), made)
    assert np.isfinite(flat(result.arrays)).all()
    assert "is left out of this round" in said() and says in said()


def test_all_clients_failing_is_an_error_and_soon() -> None:
    made = biased()

    def broken(message, context):
        raise RuntimeError("no data here")

    grid = InProcessGrid([broken] * 3)
    for channel in ("train", "query"):
        with pytest.raises(FedgftError, match="no data here"):
            run(grid, made, FedGFT(flower.FedAvg(**options()), lam=1.0, channel=channel), 20)
    grid.messages.clear()
    with pytest.raises(FedgftError, match="channel 'train': no data here"):
        run(grid, made, MeasuredStrategy(flower.FedAvg(**options())), 20)
    assert grid.messages["train"] == 9
    with pytest.raises(FedgftError, match="no round gave a new model"):
        run(grid, made, MeasuredStrategy(flower.FedAvg(**options())), 1)


def test_training_that_fails_while_statistics_come() -> None:
    made = biased()
    grid = grid_of(biased())
    for node, app in list(grid.apps.items()):

        def lazy(message, context, app=app):
            if message.metadata.message_type == "train":
                raise RuntimeError("no GPU")
            return app(message, context)

        grid.apps[node] = lazy
    with pytest.raises(FedgftError, match="no new model in 3 rounds in a row: no GPU"):
        run(grid, made, FedGFT(flower.FedAvg(**options()), lam=1.0, channel="query"), 20)
    assert grid.messages["train"] == 9


def test_all_clients_failing_for_a_while_is_survived() -> None:
    made = biased()
    grid = grid_of(biased())
    sick = {"rounds": {2, 3}}
    for node, app in list(grid.apps.items()):

        def flaky(message, context, app=app):
            if message.content["config"]["server-round"] in sick["rounds"]:
                raise RuntimeError("network")
            return app(message, context)

        grid.apps[node] = flaky
    _, ours = run(grid, made, rounds=5)
    assert [row["round"] for row in ours.history] == [0, 3, 4, 5]


def test_nodes_that_never_connect() -> None:
    """The engine's own sampling would wait for ever."""
    made = biased()
    ours = FedGFT(flower.FedAvg(**options(min_available_nodes=9)), lam=1.0, node_timeout=1.5)
    began = time.monotonic()
    with pytest.raises(FedgftError, match=r"connected nodes after 1.5 s: 3, fewer"):
        run(grid_of(made), made, ours)
    assert time.monotonic() - began < 10


def test_nodes_that_leave() -> None:
    """Fewer than the strategy needs in round 2: an error that says so, not a silence."""
    made = biased()
    grid = grid_of(made)

    def leave(node, message):
        grid.gone |= {101, 102}
        return False

    grid.lose = leave
    ours = FedGFT(flower.FedAvg(**options(min_train_nodes=3)), lam=1.0, node_timeout=1.2)
    with pytest.raises(FedgftError, match=r"connected nodes after .* s: 1, fewer"):
        run(grid, made, ours)


@pytest.mark.parametrize("how", [{"lam": 3.0}, {"target": 0.0}])
def test_an_empty_group_keeps_the_last_constants(how: dict) -> None:
    """The client that alone has a group goes away: no constants from half of the people."""
    from small_federation import federation

    made = federation([(40, (0,), (0, 1)), (30, (0,), (0, 1)), (35, (0, 1), (0, 1))])
    grid = grid_of(made)
    gone = {"from": 4}
    for node, app in list(grid.apps.items()):

        def leaving(message, context, app=app, node=node):
            if node == 102 and message.content["config"]["server-round"] >= gone["from"]:
                raise RuntimeError("gone")
            return app(message, context)

        grid.apps[node] = leaving
    ours = FedGFT(flower.FedAvg(**options()), channel="query", final=False, **how)
    prices = []  # of a target there is none before the second model
    ours.on_round = lambda row: prices.append(ours.aggregator.price)
    run(grid, made, ours, 5)
    assert [row["gap_soft"] is None for row in ours.history] == [False] * 3 + [True] * 2
    np.testing.assert_array_equal(prices[2], prices[3])
    np.testing.assert_array_equal(prices[3], prices[4])
    assert np.abs(prices[1]).max() > 0 and not np.array_equal(prices[1], prices[2])


EVALUATIONS = {
    "no metrics": lambda c: c.pop("metrics"),
    "a list": lambda c: c["metrics"].update(accuracy=[0.5, 0.5]),
    "a list of rows": lambda c: c["metrics"].update({"num-examples": [1]}),
    "others": lambda c: c["metrics"].update(auc=0.5),
}


@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluations_that_cannot_be_averaged_are_left_out(kind: str, said) -> None:
    made = biased()

    def spoil(reply, message):
        if message.metadata.message_type == "evaluate":
            EVALUATIONS[kind](reply.content)
        return reply

    strategy = FedGFT(flower.FedAvg(**options(fraction_evaluate=1.0)), lam=1.0)
    result, _ = run(wrapped(made, spoil), made, strategy)
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3}
    assert "is left out of this round" in said()


def test_another_key_for_weights_is_no_number_of_rows() -> None:
    made = biased()

    def weigh(reply, message):
        if "metrics" in reply.content:
            reply.content["metrics"]["weight"] = 1.0
        return reply

    grid = grid_of(made)
    for node, app in list(grid.apps.items()):
        grid.apps[node] = lambda m, c, app=app: weigh(app(m, c), m)
    strategy = FedGFT(flower.FedAvg(**options(weighted_by_key="weight")), lam=1.0)
    assert len(run(grid, made, strategy)[1].history) == 4


@pytest.mark.parametrize("name", ["FedMedian", "Krum", "QFedAvg"])
def test_fairfed_needs_a_strategy_with_weights(name: str) -> None:
    extra = {"client_learning_rate": 0.1} if name == "QFedAvg" else {}
    with pytest.raises(FedgftError, match=f"{name} uses none"):
        FairFed(getattr(flower, name)(**options(), **extra))


# Sites and a server that do not understand each other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.__setitem__("fedgft.version", 2), "uses version 2"),
        (lambda c: c.__setitem__("fedgft.groups", ["x", "y"]), "site 'site-2' has the groups 0, 1"),
        (lambda c: c.__setitem__("fedgft.price", [0.0]), "price must hold 12 numbers, not 1"),
    ],
)
def test_a_server_of_another_kind_is_named_at_the_site(change, says: str, said) -> None:
    made = biased()
    grid = grid_of(made)
    honest = grid.apps[102]

    def odd(message, context):
        change(message.content["config"])
        return honest(message, context)

    grid.apps[102] = odd
    ours = FedGFT(flower.FedAvg(**options()), lam=3.0, channel="query")
    run(grid, made, ours)
    assert says in said()


def test_a_site_with_another_model_is_named(said) -> None:
    """One site has a column more: its own error, and the run of the others."""
    from fedgft.data.generated import synthetic
    from fedgft.data.partition import partition

    made = biased()
    wide = partition(synthetic(rows=600, features=5, gap=0.4), clients=3, alpha=1.0, seed=1)
    grid = grid_of(made)
    grid.apps[102] = app_of(client_site(wide, 0, "logistic", name="wide"))
    _, ours = run(grid, made)
    assert ours.history[-1]["clients"] == 2
    assert "site 'wide': the model it received has 'weight' (2, 5), its own (2, 6)" in said()


def test_named_groups_bind_every_site(said) -> None:
    made = biased()
    ours = FedGFT(flower.FedAvg(**options()), lam=3.0, classes=("0", "1"), groups=("f", "m"))
    with pytest.raises(FedgftError, match="the federation has f, m, in this order"):
        run(grid_of(made), made, ours)
    assert "rename them at the site" in said()


def test_sums_are_read_back_as_they_were_sent() -> None:
    from fedgft.flower.messages import unpack_sums

    made = biased()
    tally = _tally(made, 0)
    names = CategoryNames.of(2, 2)
    site, sent_names, found = unpack_sums(pack_sums(tally, names, site="north"), node="node 1")
    assert site == "north"
    assert sent_names == names
    for mine, theirs in zip(found.arrays, tally.arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    check_sums(found, site="north", examples=float(tally.rows()))
    with pytest.raises(FedgftError, match="claim"):
        check_sums(found, site="north", examples=float(tally.rows()) - 1)
    for junk in (MetricRecord({"a": 1.0}), ConfigRecord({}), ConfigRecord({"version": "1"})):
        with pytest.raises(FedgftError):
            unpack_sums(junk, node="node 1")


# The server restarted


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedAvgM"])
@pytest.mark.parametrize("how", [{"lam": 5.0}, {"target": 0.02}])
def test_a_restarted_server_goes_on_with_the_same_constants(name, how, tmp_path) -> None:
    made = biased()
    file = tmp_path / "checkpoint.safetensors"
    extra = {"FedAdam": {"eta": 0.1}, "FedAvgM": {"server_momentum": 0.9}}.get(name, {})

    def fresh(checkpoint=None):
        inner = getattr(flower, name)(**options(), **extra)
        return FedGFT(inner, "sp", channel="query", checkpoint=checkpoint, **how)

    undisturbed = fresh()
    expected = run(grid_of(made), made, undisturbed, 6)[0]

    class Killed(Exception): ...

    first = fresh(file)
    grid = grid_of(made)

    def kill(node, message):
        if message.metadata.message_type == "train" and first.state.rounds_done == 3:
            raise Killed
        return False

    grid.lose = kill
    with pytest.raises(Killed):
        run(grid, made, first, 6)
    second = fresh(file)
    found = run(grid_of(made), made, second, 6)[0]
    np.testing.assert_array_equal(flat(found.arrays), flat(expected.arrays))
    assert [row["round"] for row in second.history] == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(second.aggregator.price, undisturbed.aggregator.price)
    assert not [f for f in tmp_path.iterdir() if f.name.endswith(".part")]


def test_fairfed_is_restarted_with_its_weights(tmp_path) -> None:
    made = biased()
    file = tmp_path / "checkpoint.safetensors"
    expected = run(grid_of(made), made, FairFed(flower.FedAvg(**options()), beta=2.0), 4)[0]
    run(grid_of(made), made, FairFed(flower.FedAvg(**options()), beta=2.0, checkpoint=file), 2)
    again = FairFed(flower.FedAvg(**options()), beta=2.0, checkpoint=file)
    np.testing.assert_array_equal(
        flat(run(grid_of(made), made, again, 4)[0].arrays), flat(expected.arrays)
    )


def test_channel_evaluate_is_restarted_exactly(tmp_path) -> None:
    made = biased()
    file = tmp_path / "c.safetensors"

    def fresh(**how):
        inner = flower.FedAvg(**options(fraction_evaluate=1.0))
        return FedGFT(inner, lam=5.0, channel="evaluate", **how)

    class Killed(Exception): ...

    expected = run(grid_of(made), made, fresh(), 5)[0]
    first = fresh(checkpoint=file)
    grid = grid_of(made)

    def kill(node, message):  # after the third round's training, before anybody was heard
        if message.metadata.message_type == "evaluate" and first.state.rounds_done == 3:
            raise Killed
        return False

    grid.lose = kill
    with pytest.raises(Killed):
        run(grid, made, first, 5)
    found, again = run(grid_of(made), made, fresh(checkpoint=file), 5)
    np.testing.assert_array_equal(flat(found.arrays), flat(expected.arrays))
    assert [row["round"] for row in again.history] == [1, 2, 3, 4, 5]


def test_numbers_without_an_axis_survive_a_checkpoint(tmp_path) -> None:
    """BatchNorm counts its batches in one."""
    import torch

    made = biased()
    file = tmp_path / "c.safetensors"
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    first = ArrayRecord(model.state_dict())
    from fedgft.flower import Site

    def grid():
        sites = []
        for k in range(3):
            other = client_site(made, k, "logistic")
            net = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
            sites.append(Site(net, rows=other.rows, name=f"s{k}"))
        return InProcessGrid([app_of(site) for site in sites])

    for rounds in (1, 2):
        ours = FedGFT(flower.FedAvg(**options()), lam=1.0, checkpoint=file)
        result = ours.start(grid(), first, rounds, train_config=train_config())
    assert (
        ours.state.rounds_done == 2 and result.arrays["0.num_batches_tracked"].numpy().shape == ()
    )


def test_a_run_that_lacks_only_its_end_is_finished(tmp_path) -> None:
    """Stopped between the last round and the report: the model is measured as any other."""
    made = biased()
    file = tmp_path / "c.safetensors"
    first = FedGFT(flower.FedAvg(**options()), lam=1.0, checkpoint=file, final=False)
    run(grid_of(made), made, first)
    again = FedGFT(flower.FedAvg(**options()), lam=1.0, checkpoint=file)
    grid = grid_of(made)
    seen = []
    grid.lose = lambda node, message: bool(seen.append(dict(message.content["config"])))
    run(grid, made, again)
    assert [row["round"] for row in again.history] == [0, 1, 2, 3]
    assert grid.messages == {"query.fedgft": 3}
    assert all(config["lr"] == 0.01 for config in seen)  # clients are told as always


def test_a_checkpoint_of_something_else_is_refused(tmp_path) -> None:
    made = biased()
    file = tmp_path / "c.safetensors"
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(FedgftError, match="not a whole checkpoint"):
        run(grid_of(made), made, FedGFT(flower.FedAvg(**options()), lam=1.0, checkpoint=file))
    file.unlink()
    run(grid_of(made), made, FedGFT(flower.FedAvg(**options()), lam=1.0, checkpoint=file))
    for other in (
        {"metric": "eo", "lam": 1.0},
        {"lam": 2.0},
        {"target": 0.0},
        {"lam": 1.0, "spread": "variance"},
        {"lam": 1.0, "penalty": "l2"},
    ):
        with pytest.raises(FedgftError, match="of another run"):
            run(grid_of(made), made, FedGFT(flower.FedAvg(**options()), checkpoint=file, **other))
    with pytest.raises(FedgftError, match="of another run"):
        run(grid_of(made), made, FedGFT(flower.FedAdam(**options()), lam=1.0, checkpoint=file))
    fair = tmp_path / "f.safetensors"
    run(grid_of(made), made, FairFed(flower.FedAvg(**options()), checkpoint=fair))
    for other in ({"beta": 2.0}, {"reweigh": False}):
        with pytest.raises(FedgftError, match="of another run"):
            run(grid_of(made), made, FairFed(flower.FedAvg(**options()), checkpoint=fair, **other))
    wide = start_of(made, "mlp")
    with pytest.raises(FedgftError, match="another model"):
        FedGFT(flower.FedAvg(**options()), lam=1.0, checkpoint=file).start(
            grid_of(made, "mlp"), wide, 5
        )


def test_a_message_without_a_model_is_refused() -> None:
    made = biased()
    site = client_site(made, 0, "logistic")
    from flwr.app import RecordDict

    message = Message(RecordDict({"config": ConfigRecord()}), dst_node_id=1, message_type="train")
    with pytest.raises(FedgftError, match="holds 0 models"):
        app_of(site)(message, grid_of(made).contexts[100])

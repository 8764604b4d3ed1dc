"""Clients that report false but valid sums, through the real strategy."""

import logging

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.errors import FedgftError
from fedgft.flower import FedGFT, MeasuredStrategy
from fedgft.flower.client import client_site
from fedgft.flower.client import flatten_arrays as flat
from fedgft.metrics.robust_aggregation import SiteLimits
from in_process_grid import app_of, gap_of, grid_of, options, start_of, train_config

pytestmark = pytest.mark.slow


@pytest.fixture
def said(caplog):
    """What the log names, as one text."""
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.WARNING, "flwr")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def federation(clients=6, alpha=100.0):
    return partition(
        synthetic(rows=2400, features=4, gap=0.4), clients=clients, alpha=alpha, seed=1
    )


def lying(made, change, which=2):
    """A grid where the replies of one client go through `change(content, message)`."""
    grid = grid_of(made)
    honest = grid.apps[100 + which]

    def app(message, context):
        reply = honest(message, context)
        change(reply.content, message)
        return reply

    grid.apps[100 + which] = app
    return grid


def run(grid, made, strategy=None, rounds=3):
    strategy = strategy or FedGFT(flower.FedAvg(**options()), lam=5.0, channel="query")
    result = strategy.start(grid, start_of(made), rounds, train_config=train_config())
    return result, strategy


def claim(record, count, accepted=0):
    """Rows as claimed; one group is accepted, everybody else refused."""
    table = np.zeros((*count.shape, 2))
    table[..., 0] = count
    table[:, accepted] = table[:, accepted, ::-1]
    values = [float(v) for v in table.ravel()]
    record.update(count=[float(n) for n in count.ravel()], score=values, decision=values)


def minority_only(content, message):
    """All of my rows are of group 0, have label 1 and are accepted."""
    if "fedgft" in content:
        count = np.zeros((2, 3))
        count[1, 0] = sum(content["fedgft"]["count"])
        claim(content["fedgft"], count)


def test_a_false_report_is_named_and_has_little_influence(said) -> None:
    made = federation()
    far = {}
    for limits in (None, SiteLimits()):
        ours = MeasuredStrategy(flower.FedAvg(**options()), channel="query", limits=limits)
        result, _ = run(lying(made, minority_only), made, ours, 4)
        truth = gap_of(made, flat(result.arrays), kind="hard")
        far[limits] = abs(ours.history[-1]["gap_hard"] - truth)
    assert far[None] > 0.1
    row = ours.history[-1]
    own = 0.03  # what its true rows, which it does not tell of, are worth
    assert far[SiteLimits()] < min(far[None], row["leverage"]["site-2"] + own)
    assert list(row["clipped"]) == ["site-2"] and row["clipped"]["site-2"] > 0.02
    assert set(row["leverage"]) == {f"site-{k}" for k in range(6)}
    assert 0 < row["leverage"]["site-2"] <= 0.2
    assert "site 'site-2' is held to the limits" in said()
    assert said().count("is held to the limits") == 1  # the history has every round


def test_honest_sums_are_added_up_as_they_are() -> None:
    made = federation()
    plain, ours = (
        MeasuredStrategy(flower.FedAvg(**options()), channel="query", limits=limits)
        for limits in (None, SiteLimits())
    )
    one, two = (run(grid_of(made), made, s)[0] for s in (plain, ours))
    np.testing.assert_array_equal(flat(one.arrays), flat(two.arrays))
    assert [r["gap_hard"] for r in plain.history] == [r["gap_hard"] for r in ours.history]
    assert all(row["clipped"] == {} for row in ours.history)


@pytest.mark.parametrize("channel", ["train", "query"])
def test_counts_are_declared_once(channel: str, said) -> None:
    made = federation(4)
    asked = []

    def later(content, message):
        if "fedgft" in content:
            asked.append(1)
            if len(asked) == 3:
                minority_only(content, message)

    ours = MeasuredStrategy(flower.FedAvg(**options()), channel=channel, final=False)
    run(lying(made, later), made, ours, 4)
    assert [row["clients"] for row in ours.history] == [4, 4, 3, 4]
    assert "site 'site-2': its counts changed" in said() and "were declared before" in said()


def test_a_restarted_server_remembers_what_was_declared(tmp_path, said) -> None:
    made = federation(4)
    file = tmp_path / "c.safetensors"
    how = {"channel": "query", "checkpoint": file, "final": False}
    run(grid_of(made), made, MeasuredStrategy(flower.FedAvg(**options()), **how), 1)
    again = MeasuredStrategy(flower.FedAvg(**options()), **how)
    run(lying(made, minority_only), made, again, 2)
    assert [row["clients"] for row in again.history] == [4, 3]
    assert "site 'site-2': its counts changed" in said()


def test_counts_that_were_agreed_on(said) -> None:
    made = federation(4)
    counts = {f"site-{k}": client_site(made, k, "logistic").counts() for k in range(4)}
    short = {site: table[:, :-1] for site, table in counts.items()}  # all groups are recorded
    for agreed in (counts, short):
        ours = MeasuredStrategy(flower.FedAvg(**options()), channel="query", counts=agreed)
        run(lying(made, minority_only), made, ours, 1)
        assert [row["clients"] for row in ours.history] == [3, 3]
    assert "were agreed on" in said()
    for wrong in ({"a": "x"}, {"a": [1, 2]}, {"a": [[-1.0]]}):
        with pytest.raises(FedgftError, match="counts of site 'a'"):
            MeasuredStrategy(flower.FedAvg(**options()), counts=wrong)


def test_a_name_belongs_to_the_node_that_used_it_first(said) -> None:
    """Node 103 takes the name of node 101 in the second round: 101 stays, 103 is out."""
    made = federation(4)
    grid = grid_of(federation(4))
    impostor = app_of(client_site(made, 3, "logistic", name="site-1"))
    honest = grid.apps[103]
    seen = []

    def app(message, context):
        seen.append(message.metadata.message_type)
        return (honest if len(seen) < 3 else impostor)(message, context)

    grid.apps[103] = app
    ours = MeasuredStrategy(flower.FedAvg(**options()), channel="query", final=False)
    run(grid, made, ours, 3)
    assert [row["clients"] for row in ours.history] == [4, 3, 3]
    assert "site-1" in ours.history[-1]["leverage"]
    assert "node 103 calls itself 'site-1', the name of node 101" in said()
    assert "node 103 is left out of this round" in said()  # its update, too


def test_sites_without_a_name_are_told_apart() -> None:
    made = federation(3)
    grid = grid_of(federation(3))
    for k in range(3):
        grid.apps[100 + k] = app_of(client_site(made, k, "logistic", name="unnamed"))
    ours = MeasuredStrategy(flower.FedAvg(**options()), channel="query")
    run(grid, made, ours, 2)
    assert [row["clients"] for row in ours.history] == [3, 3, 3]
    assert len(ours.history[-1]["leverage"]) == 3


def result_of(made, change=None, **how):
    grid = grid_of(made) if change is None else lying(made, change)
    return flat(
        run(grid, made, MeasuredStrategy(flower.FedAvg(**options()), channel="query", **how))[
            0
        ].arrays
    )


def test_a_weight_is_no_more_than_the_declared_rows(said) -> None:
    made = federation()

    def boast(content, message):
        if "metrics" in content:
            content["metrics"]["num-examples"] = 10**12

    np.testing.assert_allclose(result_of(made, boast), result_of(made), atol=1e-6)
    assert "site 'site-2' trains on more rows than it declared" in said()


def test_a_share_of_the_average_is_limited(said) -> None:
    """It declares as many rows as it claims, so its share is what is limited: 3 of 10."""
    made = federation(10)

    def boast(content, message):
        if "metrics" in content:
            content["metrics"]["num-examples"] = 10**9
        if "fedgft" in content:
            for key in ("count", "score", "decision"):
                content["fedgft"][key] = [1e6 * v for v in content["fedgft"][key]]

    run(lying(made, boast), made, MeasuredStrategy(flower.FedAvg(**options()), channel="query"), 2)
    assert "site 'site-2' has too large a share of the average (max_share)" in said()
    assert "it claims 100% of all rows, and counts as" in said()


def test_a_long_update_is_shortened(said) -> None:
    made = federation()

    def shout(content, message):
        if message.metadata.message_type == "train":
            long = {name: a.numpy() * np.float32(1e20) for name, a in content["arrays"].items()}
            content["arrays"] = ArrayRecord({name: Array(values) for name, values in long.items()})

    assert np.abs(result_of(made, shout)).max() < 10
    assert "site 'site-2' sends a much longer update than the others" in said()
    assert np.abs(result_of(made, shout, limits=None)).max() > 1e10


@pytest.mark.parametrize("dtype", ["complex64", "int8", "bool"])
def test_another_kind_of_numbers_is_refused(dtype: str, said) -> None:
    made = federation(4)

    def other(content, message):
        if message.metadata.message_type == "train":
            content["arrays"] = ArrayRecord(
                {name: Array(a.numpy().astype(dtype)) for name, a in content["arrays"].items()}
            )

    result, _ = run(lying(made, other), made, rounds=1)
    assert np.isfinite(flat(result.arrays)).all()
    assert f"has dtype {dtype}, not float32" in said()


def test_a_description_under_the_name_of_another_node_is_left_out(said) -> None:
    from flwr.app import ConfigRecord

    from fedgft.flower.server_app import read_descriptions as _descriptions

    records = {
        node: ConfigRecord({"version": 1, "site": "north", "description": f'{{"rows": {node}}}'})
        for node in (7, 5)
    }
    found, owners = _descriptions(records)
    assert found == {"north": {"rows": 5}} and owners == {"north": 5}
    assert "node 7 is left out: it calls itself 'north', the name of node 5" in said()


def test_a_site_may_pin_its_schema(tmp_path) -> None:
    from flwr.app import Context, RecordDict

    from fedgft.data.encode import Encoder, Numeric
    from fedgft.data.schema import Schema
    from fedgft.flower.client_app import table_site
    from fedgft.models import get_model

    file = tmp_path / "north.csv"
    file.write_text("age,sex,ok\n" + "30,f,0\n40,m,1\n50,f,1\n" * 4)
    encoder = Encoder((Numeric("age", 0.0),))
    schema = Schema("ok", ("sex",), ("0", "1"), ("f", "m"), encoder, np.zeros(1), np.ones(1))

    def site(**more):
        node = {"data": str(file), **more}
        context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
        return table_site(context, schema, get_model("logistic"))

    assert site().name == site(**{"schema-hash": schema.fingerprint()}).name == "north"
    with pytest.raises(FedgftError, match="takes part with the schema 00ff only"):
        site(**{"schema-hash": "00ff"})

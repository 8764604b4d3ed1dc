"""FedGFT on Flower in one process: it equals the simulator and works with every strategy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from torch.nn.functional import cross_entropy

from fedgft.algorithms import Adaptive, fairfed, fedavg, fedgft, fedgft_control, with_base
from fedgft.errors import FedgftError
from fedgft.flower import FairFed, FedGFT, MeasuredStrategy, Site, penalty_of, register, statistics
from fedgft.flower.client import client_site
from fedgft.flower.client import flatten_arrays as flat
from fedgft.metrics import CATALOG, get_metric
from in_process_grid import (
    LR,
    InProcessGrid,
    app_of,
    biased,
    gap_of,
    grid_of,
    options,
    simulated,
    start_of,
    train_config,
)

pytestmark = pytest.mark.slow

SP = CATALOG["sp"]
ROUNDS = 5
CLOSE = {"rtol": 0, "atol": 1e-5}
FLOWER_ADAM = Adaptive(lr=0.1, convention="flower")


def trained(made, strategy, rounds=ROUNDS, grid=None, **config):
    grid = grid or grid_of(made)
    return flat(
        strategy.start(grid, start_of(made), rounds, train_config=train_config(**config)).arrays
    )


# The same federation, the same seeds, the same parameters

MOMENTS = {"FedYogi": {"beta_1": 0.9, "beta_2": 0.99}}
OURS = {"FedAdagrad": {"first": 0.0}}  # Flower's has no first moment

SERVERS = {
    "FedAvg": (lambda: flower.FedAvg(**options()), lambda made: made),
    "FedAdam": (
        lambda: flower.FedAdam(eta=0.1, **options()),
        lambda algorithm: replace(algorithm, server=FLOWER_ADAM),
    ),
}


@pytest.mark.parametrize("name", ["FedYogi", "FedAdagrad"])
def test_the_other_adaptive_servers_equal_flowers(name: str) -> None:
    made = biased()
    ours = Adaptive(rule=name[3:].lower(), lr=0.1, convention="flower")
    bare = getattr(flower, name)(eta=0.1, **options(), **MOMENTS.get(name, {}))
    algorithm = replace(fedavg(), server=replace(ours, **OURS.get(name, {})))
    np.testing.assert_allclose(trained(made, bare), simulated(made, algorithm, ROUNDS), **CLOSE)


@pytest.mark.parametrize("server", SERVERS)
def test_the_bare_strategy_equals_the_simulator(server: str) -> None:
    made = biased()
    (strategy, on) = SERVERS[server]
    expected = simulated(made, on(fedavg()), ROUNDS)
    np.testing.assert_allclose(trained(made, strategy()), expected, **CLOSE)
    measured = MeasuredStrategy(strategy(), channel="train")
    np.testing.assert_allclose(trained(made, measured), expected, **CLOSE)
    assert [row["round"] for row in measured.history] == list(range(ROUNDS + 1))


@pytest.mark.parametrize("channel", ["query", "train"])
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("how", [{"lam": 5.0}, {"lam": 2.0, "penalty": "l1"}, {"target": 0.02}])
def test_fedgft_equals_the_simulator(server: str, channel: str, how: dict) -> None:
    """In channel "train" the constants are a round old, and the simulator's are with `lag`."""
    made = biased()
    (strategy, on) = SERVERS[server]
    loop = {"pick": 0.0, "damp": False} if "target" in how else {}
    ours = FedGFT(strategy(), "sp", channel=channel, **how, **loop)
    algorithm = fedgft_control(SP, **how, **loop) if "target" in how else fedgft(SP, **how)
    expected = simulated(made, on(algorithm), ROUNDS, lag=channel == "train")
    np.testing.assert_allclose(trained(made, ours), expected, **CLOSE)
    assert not np.allclose(expected, simulated(made, on(fedavg()), ROUNDS), atol=1e-3)


@pytest.mark.parametrize("rule", ["subtract", "authors", "exp"])
def test_fairfed_equals_the_simulator(rule: str) -> None:
    made = biased()
    ours = FairFed(flower.FedAvg(**options()), "sp", beta=2.0, rule=rule)
    expected = simulated(made, fairfed(SP, 2.0, rule=rule), ROUNDS)
    np.testing.assert_allclose(trained(made, ours), expected, **CLOSE)


def test_fedprox_pulls_back_as_in_the_simulator() -> None:
    """Flower's FedProx only sends mu: without the client's term it is FedAvg under another name."""
    made = biased()
    ours = FedGFT(flower.FedProx(proximal_mu=2.0, **options()), "sp", lam=5.0, channel="query")
    expected = simulated(made, with_base(fedgft(SP, 5.0), "fedprox", mu=2.0), ROUNDS)
    np.testing.assert_allclose(trained(made, ours), expected, **CLOSE)


def test_a_module_with_buffers_and_a_schedule() -> None:
    made = biased()
    model = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(made.dataset.features.shape[1], 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    )
    grid = grid_of(made, model)
    ours = FedGFT(flower.FedAvg(**options()), "sp", lam=5.0, channel="query")
    config = train_config(schedule="cosine", rounds=ROUNDS)
    found = flat(ours.start(grid, start_of(made, model), ROUNDS, train_config=config).arrays)
    from fedgft.engine import Settings, simulate

    settings = Settings(state="reset", rounds=ROUNDS, batch_size=64, schedule="cosine")
    expected = simulate([made], model, fedgft(SP, 5.0), settings, seeds=[7], lr=LR).params[0]
    np.testing.assert_allclose(found, expected, **CLOSE)


# Every strategy, made fair

STRATEGIES = {
    "FedAvg": {},
    "FedAvgM": {"server_learning_rate": 1.0, "server_momentum": 0.5},
    "FedProx": {"proximal_mu": 0.1},
    "FedAdam": {"eta": 0.1},
    "FedYogi": {"eta": 0.1},
    "FedAdagrad": {"eta": 0.1},
    "FedMedian": {},
    "FedTrimmedAvg": {"beta": 0.34},
    "Krum": {"num_malicious_nodes": 0},
    "MultiKrum": {"num_malicious_nodes": 0, "num_nodes_to_select": 2},
    "QFedAvg": {"q": 0.1, "client_learning_rate": 1.0},
}


HARDER = {"batch-size": 256}


def iid():
    from fedgft.data.generated import synthetic
    from fedgft.data.partition import partition

    return partition(synthetic(rows=3000, features=4, gap=0.5), "iid", clients=3, seed=1)


CHANNELS = [(name, "query") for name in STRATEGIES]
CHANNELS += [(name, c) for name in ("FedAvg", "FedAdam", "Krum") for c in ("train", "evaluate")]


@pytest.mark.parametrize("name, channel", CHANNELS)
def test_every_strategy_composes(name: str, channel: str) -> None:
    """Three clients, ten rounds: the gap falls at least threefold against the bare strategy."""
    made = iid()
    kind = getattr(flower, name)
    share = {"fraction_evaluate": 1.0} if channel == "evaluate" else {}
    strategy = lambda: kind(**options(**share), **STRATEGIES[name])  # noqa: E731
    bare = gap_of(made, trained(made, strategy(), 10, **HARDER))
    fair = FedGFT(strategy(), "sp", lam=20.0, channel=channel)
    found = gap_of(made, trained(made, fair, 10, **HARDER))
    assert found < bare / 3, (bare, found)
    assert fair.history[-1]["gap_soft"] == pytest.approx(found, abs=1e-6)


def test_inside_it_flowers_differential_privacy_works() -> None:
    made = iid()
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(**options()), noise_multiplier=0.001, clipping_norm=5.0, num_sampled_clients=3
    )
    bare = gap_of(made, trained(made, flower.FedAvg(**options()), 10, **HARDER))
    found = gap_of(made, trained(made, FedGFT(wrapped, "sp", lam=20.0), 10, **HARDER))
    assert found < bare / 3


def test_it_refuses_to_sit_inside_an_accounting_wrapper() -> None:
    from flwr.serverapp import PrivacyAccountant, PrivacyConfig

    class Accountant(PrivacyAccountant):
        def __init__(self) -> None:
            self._config = PrivacyConfig(
                delta=1e-5, population_size=3, sampling_method="no-amplification"
            )

        config = property(lambda self: self._config)
        num_releases = 0

        def compose(self, event): ...
        def get_privacy_spent(self): ...
        def would_exceed(self, event): ...
        def state_dict(self): ...
        def load_state_dict(self, state): ...
        def reset(self): ...

    fair = FedGFT(flower.FedAvg(**options()), lam=1.0)
    with pytest.raises((ValueError, TypeError)):
        flower.DifferentialPrivacyServerSideFixedClipping(
            fair, 1.0, 1.0, 3, accountant=Accountant()
        )


# Messages


def test_one_message_per_client_and_round_in_channel_train() -> None:
    made = biased()
    grid = grid_of(made)
    trained(made, FedGFT(flower.FedAvg(**options()), lam=1.0, final=False), grid=grid)
    assert dict(grid.messages) == {"train": 3 * ROUNDS}
    grid = grid_of(made)
    trained(
        made, FedGFT(flower.FedAvg(**options()), lam=1.0, channel="query", final=False), grid=grid
    )
    assert dict(grid.messages) == {"train": 3 * ROUNDS, "query.fedgft": 3 * ROUNDS}


def test_evaluate_is_exact_but_for_round_one() -> None:
    """The sums after a round describe the model that the next one begins with."""
    made = biased()
    query = FedGFT(flower.FedAvg(**options()), lam=3.0, channel="query")
    trained(made, query)
    evaluate = FedGFT(flower.FedAvg(**options(fraction_evaluate=1.0)), lam=3.0, channel="evaluate")
    grid = grid_of(made)
    trained(made, evaluate, grid=grid)
    assert dict(grid.messages) == {"train": 3 * ROUNDS, "evaluate": 3 * ROUNDS}
    assert [row["round"] for row in evaluate.history] == [1, 2, 3, 4, 5]
    assert [row["round"] for row in query.history] == [0, 1, 2, 3, 4, 5]
    assert evaluate.history[0]["gap_soft"] != query.history[1]["gap_soft"]  # round 1 was unpriced


def test_the_strategy_sees_none_of_our_records() -> None:
    made = biased()
    seen = []

    class Curious(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            seen.extend(sorted(reply.content) for reply in replies)
            return flower.FedAvg.aggregate_train(self, server_round, replies)

    trained(made, FairFed(Curious(**options()), rule="exp"), 1)
    assert seen == [["arrays", "metrics"]] * 3


def test_metrics_of_the_run_carry_the_gaps() -> None:
    made = biased()
    ours = FedGFT(flower.FedAvg(**options()), lam=1.0, channel="query")
    result = ours.start(grid_of(made), start_of(made), 2, train_config=train_config())
    held = result.train_metrics_clientapp[2]
    assert held["fedgft.gap-soft"] == ours.history[1]["gap_soft"]
    assert "train_loss" in held


def test_the_best_of_the_last_models_is_handed_over() -> None:
    """As in the simulator: for a target, by accuracy and gap on everybody's sums."""
    made = biased()
    ours = FedGFT(flower.FedAvg(**options()), target=0.0, channel="query", damp=False)
    params = trained(made, ours, 10, lr=0.1)
    assert ours.measured in ours.history[5:]  # of the last 60% of the rounds
    worth = lambda r: r["accuracy"] - 2 * max(r["gap_hard"] - 0.002, 0)  # noqa: E731
    assert worth(ours.measured) == max(map(worth, ours.history[5:])) > worth(ours.history[-1])
    assert ours.measured["gap_hard"] == pytest.approx(gap_of(made, params, kind="hard"), abs=1e-9)


# Several groups and classes; rows of batches; own training


def test_several_groups_and_classes() -> None:
    from small_federation import several

    made = several(groups=3, classes=3)
    ours = FedGFT(flower.FedAvg(**options()), "eo", lam=2.0, channel="query")
    params = trained(made, ours, 2)
    expected = simulated(made, fedgft(get_metric("eo"), 2.0), 2)
    np.testing.assert_allclose(params, expected, **CLOSE)


def test_a_user_brings_a_loader_and_a_training_step() -> None:
    """Ten lines for who has an app already; the same model as with our own training."""
    made = biased()
    data = made.dataset

    def site(k):
        rows = made.client(k)
        columns = [torch.tensor(c[rows]) for c in (data.features, data.labels, data.groups)]
        table = torch.utils.data.TensorDataset(*columns)
        loader = torch.utils.data.DataLoader(table, batch_size=len(rows))

        def train(model, penalty, config):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for x, y, a in loader:
                optimizer.zero_grad()
                logits = model(x)
                (cross_entropy(logits, y) + penalty(logits, y, a)).backward()
                optimizer.step()

        return Site(torch.nn.Linear(5, 2), rows=loader, read=tuple, train=train, name=f"s{k}")

    ours = FedGFT(flower.FedAvg(**options()), "sp", lam=5.0, channel="query")
    grid = InProcessGrid([app_of(site(k)) for k in range(3)])
    found = trained(made, ours, 3, grid=grid)
    plain = FedGFT(flower.FedAvg(**options()), "sp", lam=5.0, channel="query")
    config = {"optimizer": "sgd", "lr": 0.5, "batch-size": 10_000}
    np.testing.assert_allclose(found, trained(made, plain, 3, **config), **CLOSE)


class Counted(list):
    """Batches, and how often somebody read through them."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return list.__iter__(self)


@pytest.mark.parametrize(("channel", "passes"), [("train", 2), ("query", 3)])
def test_a_loader_is_not_read_more_often_than_needed(channel: str, passes: int) -> None:
    """Once for sums and once for training; to count rows alone only where no sums come along."""
    made = biased()
    sites = []
    for k in range(made.num_clients):
        sites.append(client_site(made, k, "logistic"))
        sites[-1].rows = Counted([sites[-1].rows])
    ours = FedGFT(flower.FedAvg(**options()), lam=1.0, channel=channel, final=False)
    trained(made, ours, 2, grid=InProcessGrid([app_of(site) for site in sites]))
    assert [site.rows.passes for site in sites] == [2 * passes] * 3


def test_the_penalty_line_alone_in_a_handler_of_ones_own() -> None:
    made = biased()
    data = made.dataset

    def app_for(k):
        app = ClientApp()
        rows = made.client(k)
        x, y, a = (torch.tensor(c[rows]) for c in (data.features, data.labels, data.groups))

        @app.train()
        def train(message, context):
            model = torch.nn.Linear(5, 2)
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            sums = statistics(message, context, Site(model, rows=(x, y, a), name=f"s{k}"))
            penalty = penalty_of(message, model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            logits = model(x)
            (cross_entropy(logits, y) + penalty(logits, y, a)).backward()
            optimizer.step()
            from flwr.app import ArrayRecord

            return Message(
                RecordDict(
                    {
                        "arrays": ArrayRecord(model.state_dict()),
                        "fedgft": sums,
                        "metrics": MetricRecord({"num-examples": len(y)}),
                    }
                ),
                reply_to=message,
            )

        return app

    ours = FedGFT(flower.FedAvg(**options()), "sp", lam=5.0, final=False)
    found = trained(made, ours, 3, grid=InProcessGrid([app_for(k) for k in range(3)]))
    plain = FedGFT(flower.FedAvg(**options()), "sp", lam=5.0, final=False)
    config = {"optimizer": "sgd", "lr": 0.5, "batch-size": 10_000}
    np.testing.assert_allclose(found, trained(made, plain, 3, **config), **CLOSE)


def test_mods_go_on_training_alone() -> None:
    from flwr.clientapp.mod import fixedclipping_mod

    made = biased()
    from fedgft.flower.client import client_site

    sites = [client_site(made, k, "logistic") for k in range(3)]
    apps = [register(ClientApp(), lambda m, c, s=s: s, mods=[fixedclipping_mod]) for s in sites]
    inner = flower.DifferentialPrivacyClientSideFixedClipping(
        flower.FedAvg(**options()), noise_multiplier=0.001, clipping_norm=0.5, num_sampled_clients=3
    )
    ours = FedGFT(inner, lam=1.0, channel="query")
    trained(made, ours, 2, grid=InProcessGrid(apps))
    assert len(ours.history) == 3


# Mistakes


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: FedGFT(s), "either lam or target"),
        (lambda s: FedGFT(s, lam=1.0, target=0.1), "either lam or target"),
        (lambda s: FedGFT(s, "nonsense", lam=1.0), "nonsense"),
        (lambda s: FedGFT(s, lam=-1.0), "lam must be"),
        (lambda s: FedGFT(s, lam=1.0, channel="post"), "channel 'post'"),
        (lambda s: FedGFT(s, lam=1.0, max_share=0.0), "max_share"),
        (lambda s: FedGFT(s, lam=1.0, secure=True), "channel='query'"),
        (lambda s: FedGFT(s, lam=1.0, groups=2), "name both"),
        (lambda s: FedGFT(object(), lam=1.0), "use one of flwr.serverapp"),
        (lambda s: FairFed(s, channel="evaluate"), "'train' or 'query'"),
        (lambda s: Site(None, rows=(), groups=["a", "a"]), "two different names"),
    ],
)
def test_mistakes_are_named(make, says: str) -> None:
    with pytest.raises(FedgftError, match=says):
        make(flower.FedAvg(**options()))


@pytest.mark.parametrize(
    ("channel", "share", "says"),
    [("evaluate", {}, "fraction_evaluate"), ("train", {"fraction_train": 0.0}, "fraction_train")],
)
def test_a_channel_that_can_never_carry_statistics(channel: str, share: dict, says: str) -> None:
    ours = FedGFT(flower.FedAvg(**options(**share)), lam=1.0, channel=channel)
    with pytest.raises(FedgftError, match=says):
        trained(biased(), ours)


def test_clients_without_fedgft_are_tolerated() -> None:
    """Somebody else's app: it trains, but sends no statistics."""
    made = biased()
    apps = []
    for ours in grid_of(made).apps.values():
        app = ClientApp()

        @app.train()
        def train(message, context, ours=ours):
            reply = ours(message, context)
            reply.content.pop("fedgft", None)
            return reply

        apps.append(app)
    for channel in ("train", "query"):
        with pytest.raises(FedgftError, match=f"no client sent statistics.*'{channel}'"):
            trained(
                made,
                FedGFT(flower.FedAvg(**options()), lam=1.0, channel=channel),
                grid=InProcessGrid(apps),
            )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", "x"),
        ("schedule", "x"),
        ("batch-size", 0),
        ("epochs", -3),
        ("lr", -1.0),
        ("weight-decay", -0.1),
    ],
)
def test_settings_of_training_are_named(key: str, value) -> None:
    """Whoever sends them; a site would have stumbled over them somewhere within."""
    made = biased()
    with pytest.raises(FedgftError, match=key.replace("-", "_")):
        trained(made, FedGFT(flower.FedAvg(**options()), lam=1.0), **{key: value})


WITHOUT_TORCH = """
import json, sys, tomllib
sys.modules["torch"] = None  # an import of it fails
import numpy as np, polars as pl
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from fedgft.flower.client_app import make_client_app
from fedgft.flower.server_app import serve
from in_process_grid import InProcessGrid, options

app, folder = sys.argv[1:]
rng = np.random.default_rng(0)
sites = []
for name in ("north", "south"):
    x, sex = rng.normal(size=300), rng.choice(["f", "m"], 300)
    ok = rng.choice(["no", "maybe", "yes"], 300)  # three classes
    pl.DataFrame({"x": x, "sex": sex, "ok": ok}).write_csv(f"{folder}/{name}.csv")
    sites.append({"site": name, "data": f"{folder}/{name}.csv"})
with open(app, "rb") as file:
    config = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
config |= {"data": "csv", "label": "ok", "group": "sex", "sites": 2, "rounds": 2}
config |= {"out": f"{folder}/run", **json.loads(METHOD)}
grid = InProcessGrid([make_client_app()] * 2, sites)
server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
for context in grid.contexts.values():
    context.run_config = config
serve(grid, server, FedAvg(**options()))
"""


@pytest.mark.parametrize(
    ("method", "note"),
    [
        ({"method": "fedgft", "lam": 2.0}, ""),
        ({"method": "fedgft-control", "target": 0.05}, ""),
        ({"method": "fedgft", "target": 0.05}, "runs fedgft-control"),
    ],
)
def test_a_linear_model_is_deployed_without_torch(tmp_path, method: dict, note: str) -> None:
    """Server, clients and report; of `fedgft` without lam, version 0.1 made the controller."""
    import json
    import subprocess
    import sys
    from pathlib import Path

    here = Path(__file__).parent
    script = WITHOUT_TORCH.replace("METHOD", repr(json.dumps(method)))
    app = here.parent / "examples" / "flower" / "pyproject.toml"
    subprocess.run([sys.executable, "-c", script, app, tmp_path], cwd=here, check=True)
    held = json.loads((tmp_path / "run" / "history.json").read_text())
    assert len(held["history"]) == 3 and held["held_out"]["rows"]["counted"] > 100
    assert ("target" in held["history"][-1]) == ("target" in method)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert note in (tmp_path / "run" / "progress.jsonl").read_text()


def test_the_report_of_a_run_names_the_group_the_label_and_the_target(tmp_path) -> None:
    """D10: reports of deployed runs on a public data set said "groups by group"."""
    import json
    import tomllib
    from pathlib import Path

    from flwr.app import Context

    from fedgft.flower.client_app import make_client_app
    from fedgft.flower.server_app import serve

    file = Path(__file__).parents[1] / "examples" / "flower" / "pyproject.toml"
    config = tomllib.loads(file.read_text())["tool"]["flwr"]["app"]["config"]
    out = tmp_path / "run"
    config |= {"data": "loans", "group": "", "sites": 2, "out": str(out), "rounds": 1}
    config |= {"method": "fedgft-control", "metric": "sp", "target": 0.03}
    nodes = [{"site": f"s{k}", "partition-id": k, "num-partitions": 2} for k in range(2)]
    grid = InProcessGrid([make_client_app()] * 2, nodes)
    for context in grid.contexts.values():
        context.run_config = config
    server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    serve(grid, server, flower.FedAvg(**options()))
    audit = json.loads((out / "audit.json").read_text())
    assert audit["groups"] == "sex" and audit["about"]["label"] == "repaid"
    assert audit["tolerance"]["sp"] == 0.03 and audit["tolerance_stated"] == ["sp"]
    assert sorted(audit["about"]["files"]) == ["site-0.json", "site-1.json"]
    for name in ("report.md", "report.html"):
        text = (out / name).read_text()
        assert "Gaps by sex" in text and "by group" not in text.split("Definitions")[0].lower()


def test_a_whole_run_on_tables(tmp_path) -> None:
    """The app's own two halves, in one process: three files, one with a column too few."""
    import tomllib
    from pathlib import Path

    import polars as pl
    from flwr.app import Context

    from fedgft.fair_model import load_model
    from fedgft.flower.client_app import _choose_test_rows, make_client_app
    from fedgft.flower.server_app import serve

    rng = np.random.default_rng(0)
    sites = []
    for name in ("north", "south", "east", "odd"):
        group = rng.choice(["f", "m"], 400)
        x = rng.normal(size=400).round(3)
        ok = (x + (group == "m") + rng.normal(size=400) > 0.5).astype(int)
        frame = pl.DataFrame({"x": x, "sex": group, "job": rng.choice(["a", "b"], 400), "ok": ok})
        frame = frame.drop("job") if name == "odd" else frame
        frame.write_csv(tmp_path / f"{name}.csv")
        sites.append({"site": name, "data": str(tmp_path / f"{name}.csv")})
    file = Path(__file__).parents[1] / "examples" / "flower" / "pyproject.toml"
    config = tomllib.loads(file.read_text())["tool"]["flwr"]["app"]["config"]
    out = tmp_path / "run"
    config |= {"data": "csv", "label": "ok", "group": "sex", "sites": 4, "out": str(out)}
    app = make_client_app()
    grid = InProcessGrid([app] * 4, sites)
    for context in grid.contexts.values():
        context.run_config = config
    server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    for key, value in (("batch-size", 0), ("test-share", 7.0), ("model", "x"), ("beta", "1")):
        server.run_config = {**config, key: value}
        with pytest.raises(FedgftError) as wrong:
            serve(grid, server, flower.FedAvg(**options()))
        assert wrong.value.field == key.replace("-", "_") and f"{value}"[:1] in str(wrong.value)
    assert not grid.messages  # nobody was troubled with it
    server.run_config = config
    serve(grid, server, flower.FedAvg(**options()))
    import json

    told = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    assert any(
        "'odd' cannot take part: it has no column 'job'" in row.get("note", "") for row in told
    )
    held = json.loads((out / "history.json").read_text())
    assert held["sites"] == ["east", "north", "south"]
    rows = [row for row in held["history"] if row["round"] == 5]
    kept = []  # the scaling is that of training rows alone
    for name, context in zip(("north", "south", "east"), grid.contexts.values(), strict=False):
        file = tmp_path / f"{name}.csv"
        frame = pl.read_csv(file)
        kept.append(frame.filter(~_choose_test_rows(frame, file, context))["x"].to_numpy())
    trained = sum(map(len, kept))
    assert 3 * 400 * 0.6 < trained < 3 * 400 * 0.8
    assert rows[0]["clients"] == 3 and rows[0]["rows"] == trained
    assert held["held_out"]["rows"]["counted"] == 3 * 400 - trained
    schema = json.loads((out / "schema.json").read_text())
    assert schema["mean"][0] == pytest.approx(np.concatenate(kept).mean(), abs=1e-6)
    table, _ = load_model(out / "model.safetensors").add_predictions(
        pl.read_csv(tmp_path / "north.csv"), source="north"
    )
    assert table["score"].is_between(0, 1).all()
    with pytest.raises(FedgftError, match="holds a finished run already"):
        serve(grid, server, flower.FedAvg(**options()))
    again = {**config, "out": str(tmp_path / "again"), "schema": str(out / "schema.json")}
    for context in (*grid.contexts.values(), server):
        context.run_config = again
    grid.messages.clear()
    serve(grid, server, flower.FedAvg(**options()))
    assert "query.fedgft_describe" not in grid.messages

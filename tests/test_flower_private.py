"""Private statistics: noise with an account, small cells, and sums that nobody sees apart."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import strategy as flower

from fedgft.errors import FedgftError
from fedgft.flower import Budget, FairFed, FedGFT, shield
from fedgft.flower.checks import Noise, check_report
from fedgft.flower.masks import mask_of
from fedgft.flower.private import epsilon_of, gap_error, noised, total_rho, without_small
from fedgft.flower.sites import client_site, flat
from fedgft.flower.tables import DESCRIBE
from fedgft.flower.terms import query
from fedgft.flower.wire import VERSION, Names, Report
from fedgft.metrics import CATALOG, Tally, get_metric
from grid import InProcess, biased, gap_of, grid_of, options, start_of, train_config

SP = CATALOG["sp"]


def run(strategy, made, grid=None, rounds=3):
    grid = grid or grid_of(made)
    return strategy.start(grid, start_of(made), rounds, train_config=train_config()), grid


def fair(**how):
    return FedGFT(flower.FedAvg(**options()), lam=1.0, **how)


def tally_of(made, k=0):
    site = client_site(made, k, "logistic")
    site.load(start_of(made))
    return site.tally(site.rows)


# The account


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-6), (0.3, 1e-5), (8.0, 1e-9)])
def test_the_budget_is_what_zcdp_allows(epsilon: float, delta: float) -> None:
    """At least the textbook's rho, eps = rho + 2 sqrt(rho log(1/delta)) (Bun & Steinke 2016), at
    most what is needed; OpenDP's conversion is a little better."""
    log = math.log(1 / delta)
    textbook = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
    assert textbook <= total_rho(epsilon, delta) * (1 + 1e-9) <= 2 * textbook
    assert epsilon_of(total_rho(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-3)


def test_releases_add_up_to_the_budget() -> None:
    budget = Budget(1.0, 1e-6, releases=20)
    noise = budget.noise("soft")
    rho = 1 / (2 * noise.count**2) + 20 / (2 * noise.value**2)
    assert rho == pytest.approx(total_rho(1.0, 1e-6))
    spent = [budget.spent(n) for n in range(21)]
    assert spent[0] == 0 and spent[20] == pytest.approx(1.0, rel=1e-3)
    assert all(a < b for a, b in pairwise(spent))
    assert Budget().noise("soft") is None and Budget().spent(5) is None


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_noise_has_the_spread_it_declares(kind: str) -> None:
    exact = tally_of(biased())
    noise = Noise(kind, count=3.0, value=2.0)
    draws = [noised(exact, noise, None) for _ in range(400)]
    table, true = ("score", exact.score) if kind == "soft" else ("decision", exact.decision)
    values = np.stack([getattr(draw, table) for draw in draws])
    counts = np.stack([draw.count for draw in draws])
    assert (counts - exact.count).std() == pytest.approx(3.0, rel=0.1)
    assert (values[..., 1] - true[..., 1]).std() == pytest.approx(2.0, rel=0.1)
    np.testing.assert_allclose(values.sum(-1), counts, atol=1e-6)  # the first class follows
    other = draws[0].decision if kind == "soft" else draws[0].score
    assert np.isnan(other).all()  # is not sent
    again = noised(exact, noise, draws[0].count)
    np.testing.assert_array_equal(again.count, draws[0].count)  # released once


@pytest.mark.parametrize("metric", ["sp", "eop", "eo", "acc", "fpr"])
def test_the_error_of_the_gap_is_that_of_many_draws(metric: str) -> None:
    made, metric = biased(rows=6000), get_metric(metric)
    exact = [tally_of(made, k) for k in range(3)]
    noise = Noise("soft", count=4.0, value=3.0)
    total = sum(exact[1:], start=exact[0])
    gaps = []
    for _ in range(300):
        sums = [noised(t, noise, None) for t in exact]
        statistics = sum(t.statistics(metric, "soft") for t in sums)
        rates = metric.rates(statistics)
        condition, high, low = metric.worst(total.statistics(metric, "soft"))
        gaps.append(rates[condition, high] - rates[condition, low])
    assert gap_error(metric, total, noise, 3) == pytest.approx(np.std(gaps), rel=0.15)


def test_a_run_keeps_count_and_reports_it() -> None:
    made = biased(rows=6000)
    ours = FedGFT(flower.FedAvg(**options()), lam=5.0, budget=Budget(2.0, 1e-6, releases=4))
    run(ours, made)
    assert [round(row["epsilon"], 3) for row in ours.history][-1] == pytest.approx(2.0, rel=1e-3)
    for row in ours.history:
        assert row["gap_error"] > 0 and row["delta"] == 1e-6
        assert row["gap_hard"] is None and row["accuracy"] is None  # not sent, so not known
    target = FedGFT(flower.FedAvg(**options()), target=0.0, budget=Budget(2.0, 1e-6, releases=4))
    run(target, made)
    assert all(row["gap_soft"] is None and row["accuracy"] is not None for row in target.history)


def test_a_site_does_not_answer_beyond_its_budget() -> None:
    """The server may ask as often as it likes; the site counts by itself."""
    made = biased()
    budget = Budget(1.0, releases=2)
    ours = FedGFT(flower.FedAvg(**options()), lam=5.0, budget=budget, channel="query")
    with pytest.raises(FedgftError, match="and 4 rounds need 5"):
        run(ours, made, rounds=4)
    ours.hearing.check_budget = lambda rounds: None
    _, grid = run(ours, made, rounds=4)
    assert len(ours.history) == 2  # the constants stay as they are afterwards
    assert all(int(c.state["fedgft.private"]["released"]) == 2 for c in grid.contexts.values())


def test_no_other_number_leaves_a_site_with_noise() -> None:
    made = biased()
    grid = grid_of(made)
    replies = []
    for node, app in list(grid.apps.items()):

        def listen(message, context, app=app):
            replies.append(app(message, context))
            return replies[-1]

        grid.apps[node] = listen
    budget = Budget(1.0, releases=4)
    run(FedGFT(flower.FedAvg(**options(fraction_evaluate=1.0)), lam=1.0, budget=budget), made, grid)
    for reply in replies:
        assert set(reply.content) <= {"arrays", "metrics", "fedgft"}
        if "metrics" in reply.content:
            assert set(reply.content["metrics"]) == {"num-examples"}


def test_a_site_sets_limits_that_no_server_can_lift() -> None:
    made = biased()
    grid = grid_of(made)
    for context in grid.contexts.values():
        context.node_config["max-epsilon"] = 0.5
    for budget, says in (
        (Budget(), "offers no noise"),
        (Budget(1.0, releases=9), "offers epsilon 1"),
        (Budget(0.5, 0.01, releases=9), "max-delta"),
    ):
        with pytest.raises(FedgftError, match=says):
            run(fair(budget=budget), made, grid)
    run(
        fair(budget=Budget(0.5, 1e-6, releases=9)),
        made,
        grid,
    )


def test_a_server_cannot_change_the_terms() -> None:
    made = biased()
    grid = grid_of(made)
    run(fair(budget=Budget(1.0, releases=9)), made, grid)
    with pytest.raises(FedgftError, match="changed the privacy budget"):
        run(fair(budget=Budget(1.0, releases=99)), made, grid)


def test_declared_noise_widens_the_checks_and_undeclared_noise_does_not() -> None:
    made = biased(rows=6000)
    noise = Noise("soft", count=20.0, value=20.0)
    names = Names.of(2, 2)
    for _ in range(20):
        report = Report("north", names, noised(tally_of(made), noise, None))
        check_report(report, examples=float(tally_of(made).rows()), noise=noise)
        with pytest.raises(FedgftError):
            check_report(report, examples=None)
    wild = report.tally.map(lambda table: table * 50)
    with pytest.raises(FedgftError):
        check_report(Report("north", names, wild), examples=4000.0, noise=noise)


def test_small_cells_are_not_reported() -> None:
    count = np.array([[3.0, 30.0, 0.0], [12.0, 9.0, 0.0]])
    tally = Tally(count, count[..., None] * [0.4, 0.6], count[..., None] * [1.0, 0.0])
    kept = without_small(tally, 10)
    np.testing.assert_array_equal(kept.count, [[0, 30, 0], [12, 0, 0]])
    assert kept.score[0, 0].sum() == 0 and kept.decision[1, 1].sum() == 0
    made = biased()
    ours = fair(budget=Budget(min_count=60), channel="query")
    run(ours, made, rounds=1)
    least = sum(int(n) for k in range(3) for n in tally_of(made, k).count.ravel() if n >= 60)
    assert ours.history[0]["rows"] == least < sum(made.sizes)


# Secure sums


def test_the_secure_sum_is_the_plain_sum() -> None:
    made = biased(clients=5)
    plain = FedGFT(flower.FedAvg(**options()), lam=5.0, channel="query")
    secret = FedGFT(flower.FedAvg(**options()), lam=5.0, channel="query", secure=True)
    expected, found = run(plain, made)[0], run(secret, made)[0]
    for a, b in zip(plain.history, secret.history, strict=True):
        assert b["rows"] == a["rows"] and b["clients"] == a["clients"] == 5
        assert b["gap_soft"] == pytest.approx(a["gap_soft"], abs=1e-6)
        assert b["gap_hard"] == a["gap_hard"] and b["accuracy"] == a["accuracy"]
    np.testing.assert_allclose(flat(found.arrays), flat(expected.arrays), atol=1e-5)


@pytest.mark.parametrize("clients", [3, 5])
@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "unmask"])
def test_one_lost_client_is_survived(stage: str, clients: int) -> None:
    """Lost before it sent its masked sums, it is left out; lost after, it still counts."""
    made = biased(clients=clients)
    grid = grid_of(made)
    grid.lose = lambda node, message: (
        node == 101 and message.content["config"].get("fedgft.secure.stage") == stage
    )
    ours = FedGFT(
        flower.FedAvg(**options()), lam=5.0, channel="query", secure=True, final=False, patience=1
    )
    if clients == 3 and stage in ("keys", "shares"):
        with pytest.raises(FedgftError, match="and 3 are needed"):
            run(ours, made, grid, 1)
        return
    run(ours, made, grid, 1)
    counted = range(clients) if stage == "unmask" else [k for k in range(clients) if k != 1]
    total = [tally_of(made, k) for k in counted]
    expected = sum(total[1:], start=total[0])
    assert ours.history[0]["rows"] == expected.rows()
    assert ours.history[0]["gap_soft"] == pytest.approx(float(expected.gap(SP, "soft")), abs=1e-4)


def test_what_the_server_sees_of_one_client_looks_random() -> None:
    """Its sums, masked, twice: nothing in common, and nothing like the sums."""
    made = biased()
    grid = grid_of(made)
    seen = []
    for node, app in list(grid.apps.items()):

        def listen(message, context, app=app, node=node):
            reply = app(message, context)
            if node == 100 and "masked" in reply.content.get("fedgft", {}):
                seen.append(np.frombuffer(reply.content["fedgft"]["masked"], np.uint64))
            return reply

        grid.apps[node] = listen
    ours = FedGFT(flower.FedAvg(**options()), lam=0.0, channel="query", secure=True, final=False)
    run(ours, made, grid, 8)
    bits = np.unpackbits(np.stack(seen).view(np.uint8))
    assert len(seen) == 8 and abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5
    assert len(np.unique(np.concatenate(seen))) == sum(map(len, seen))


def secure(**how):
    return fair(channel="query", secure=True, patience=1, **how)


def tamper(grid, stage, change) -> None:
    """A server that changes what it hands on at one stage."""

    def hand_on(node, message):
        config = message.content["config"]
        if config.get("fedgft.secure.stage") == stage:
            held = ConfigRecord({**config})
            change(node, held)
            message.content["config"] = held
        return False

    grid.lose = hand_on


GREEDY = {
    "lost and alive": ("unmask", lambda n, c: c.update({"fedgft.lost": [100]}), "contradict"),
    "nobody is left": ("unmask", lambda n, c: c.update(
        {"fedgft.alive": [100], "fedgft.lost": [101, 102]}), "too few"),
    "out of turn": ("shares", lambda n, c: c.update({"fedgft.secure.stage": "masked"}), "turn"),
    "one client thrice": ("masked", lambda n, c: c.update({"fedgft.nodes": [n, n, n]}), "twice"),
    "without the client": ("masked", lambda n, c: c.update(
        {"fedgft.nodes": [m for m in (100, 101, 102) if m != n]}), "too few"),
    "its own share": ("masked", lambda n, c: c.update(
        {f"fedgft.from.{m}": c[f"fedgft.from.{n}"] for m in (100, 101, 102)}), "opened|else"),
    "its own key for all": ("shares", lambda n, c: c.update(
        {f"fedgft.mask.{m}": c[f"fedgft.mask.{n}"] for m in (100, 101, 102)}), "same key"),
    "another key for it": ("shares", lambda n, c: c.update(
        {f"fedgft.mask.{n}": c[f"fedgft.mask.{201 - n if n < 102 else 100}"],
         f"fedgft.mask.{201 - n if n < 102 else 100}": c[f"fedgft.mask.{n}"]}), "another key"),
    "a low threshold": ("shares", lambda n, c: c.update({"fedgft.threshold": 1}), "majority"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GREEDY)
def test_a_greedy_server_gets_nothing(kind: str) -> None:
    """Whatever it changes of what it hands on: an error at the client, and no share of anybody."""
    stage, change, says = GREEDY[kind]
    made = biased()
    grid = grid_of(made)
    tamper(grid, stage, change)
    with pytest.raises(FedgftError, match=says):
        run(secure(), made, grid, 1)


def test_shares_reflected_to_their_sender_are_refused() -> None:
    """The attack by which a server would learn all shares of one client's seed."""
    made = biased()
    grid = grid_of(made)
    sent = {}
    for node, app in list(grid.apps.items()):

        def listen(message, context, app=app, node=node):
            reply = app(message, context)
            told = reply.content.get("fedgft", {})
            sent.update({(node, key): told[key] for key in told if key.startswith("to.")})
            return reply

        grid.apps[node] = listen

    def reflect(node, config) -> None:
        if node == 100:
            for other in (101, 102):
                config[f"fedgft.from.{other}"] = sent[100, f"to.{other}"]

    tamper(grid, "masked", reflect)
    ours = secure(final=False)
    run(ours, made, grid, 1)  # the others go on without it
    assert ours.history[0]["clients"] == 2


MALFORMED = {
    "keys": [lambda r: r.pop("talk"), lambda r: r.update(mask=b"junk"), lambda r: r.pop("groups"),
             lambda r: r.update(groups=["q", "r"]), lambda r: r.update(talk=7)],
    "shares": [lambda r: r.clear(), lambda r: r.update({"to.100": "text"})],
    "masked": [lambda r: r.update(masked=b"abc"), lambda r: r.update(masked=10**9),
               lambda r: r.clear()],
    "unmask": [lambda r: r.clear(), lambda r: r.update({"share.100": 3})],
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "which"), [(s, i) for s, c in MALFORMED.items() for i in range(len(c))]
)
def test_a_malformed_reply_costs_its_sender_only(stage: str, which: int) -> None:
    made = biased(clients=5)
    grid = grid_of(made)
    honest = grid.apps[100]

    def liar(message, context):
        reply = honest(message, context)
        if message.content["config"].get("fedgft.secure.stage") == stage:
            MALFORMED[stage][which](reply.content["fedgft"])
        return reply

    grid.apps[100] = liar
    ours = secure(final=False)
    run(ours, made, grid, 1)
    assert ours.history[0]["clients"] == (5 if stage == "unmask" else 4)


def test_a_site_can_insist_on_secure_sums() -> None:
    """No plain question, no evaluation and no report gets anything out of it."""
    made = biased()
    grid = grid_of(made)
    for context in grid.contexts.values():
        context.node_config["secure"] = True
    run(secure(), made, grid, 2)
    for channel in ("query", "train"):
        with pytest.raises(FedgftError, match="secure sums only"):
            run(fair(channel=channel, patience=1), made, grid, 1)


def test_masks_depend_on_every_bit_of_the_key() -> None:
    key = bytes(range(32))
    other = bytes([*key[:-1], key[-1] ^ 1])
    assert not np.array_equal(mask_of(key, 50), mask_of(other, 50))
    np.testing.assert_array_equal(mask_of(key, 50), mask_of(key, 50))


def test_secure_sums_fail_later_and_the_constants_stay() -> None:
    made = biased()
    grid = grid_of(made)
    ours = fair(channel="query", secure=True, final=False)
    grid.lose = lambda node, message: (
        ours.done >= 1 and node == 101 and "fedgft.secure.stage" in message.content["config"]
    )
    run(ours, made, grid, 3)
    assert len(ours.history) == 1


def test_what_does_not_go_together_is_refused() -> None:
    strategy = flower.FedAvg(**options())
    with pytest.raises(FedgftError, match="choose one"):
        FedGFT(strategy, lam=1.0, channel="query", secure=True, budget=Budget(1.0))
    for how in ({"secure": True, "channel": "query"}, {"budget": Budget(1.0)}):
        with pytest.raises(FedgftError, match="every client's own sums"):
            FairFed(strategy, **how)
    for wrong in ({"delta": 0.0, "epsilon": 1.0}, {"releases": 0}, {"min_count": -1}):
        with pytest.raises(FedgftError):
            Budget(**wrong)


def test_private_training_is_still_fair() -> None:
    made = biased(clients=5, rows=20_000)
    bare = gap_of(made, flat(run(flower.FedAvg(**options()), made, rounds=10)[0].arrays))
    budget = Budget(2.0, 1e-6, releases=11)
    ours = FedGFT(flower.FedAvg(**options()), lam=5.0, budget=budget)
    found = gap_of(made, flat(run(ours, made, rounds=10)[0].arrays))
    assert found < bare / 2, (bare, found)


# What else leaves a site


def test_the_number_of_examples_gives_nothing_away() -> None:
    """Beside noise it follows from the noisy counts; beside withheld cells, from those that are
    sent: the true number would tell what they hide."""
    made = biased(rows=6000)
    for budget in (Budget(1.0, releases=9), Budget(min_count=300)):
        grid, seen = grid_of(made), []
        for node, app in list(grid.apps.items()):

            def listen(message, context, app=app, seen=seen):
                reply = app(message, context)
                seen.append(reply.content)
                return reply

            grid.apps[node] = listen
        run(fair(budget=budget, final=False), made, grid, 2)
        told = [content["metrics"]["num-examples"] for content in seen]
        sums = [sum(content["fedgft"]["count"]) for content in seen]
        assert told == [max(1, round(total)) for total in sums]
        true = [number in made.sizes for number in told]  # noise may hit one by chance
        assert sum(true) <= len(true) // 2, told


def test_a_ledger_holds_over_all_runs(tmp_path) -> None:
    made, file = biased(), tmp_path / "ledger.json"
    settings = {"max-epsilon": 1.2, "max-delta": 1e-6, "ledger": str(file)}

    def attempt(epsilon):
        grid = grid_of(made)  # a new run: the engine's state is empty
        grid.contexts[101].node_config.update(settings)
        ours = fair(budget=Budget(epsilon, 1e-6, releases=3), final=False)
        run(ours, made, grid, 3)
        return ours.history[-1]["clients"]

    assert attempt(1.0) == 3
    spent = json.loads(file.read_text())
    assert spent["rho"] == pytest.approx(total_rho(1.0, 1e-6)) and spent["epsilon"] < 1.01
    assert attempt(1.0) == 2  # in its second run the site stops answering
    assert json.loads(file.read_text())["epsilon"] <= 1.2 * (1 + 1e-6)
    file.write_text("junk")
    assert attempt(0.1) == 2


def context_of(**node) -> Context:
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})


def test_runs_that_enter_a_ledger_at_once_take_turns(tmp_path, monkeypatch) -> None:
    """Each finds what the others have spent, however long it thinks about it."""

    def slow(rho: float, delta: float) -> float:
        time.sleep(0.05)
        return epsilon_of(rho, delta)

    monkeypatch.setattr(shield, "epsilon_of", slow)
    file = tmp_path / "ledger.json"
    context = context_of(**{"max-epsilon": 5.0, "ledger": str(file)})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: shield.enter(context, "north", 0.01), range(4)))
    assert json.loads(file.read_text())["rho"] == pytest.approx(0.04)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]
    with pytest.raises(FedgftError, match="above its max-epsilon, 5"):
        shield.enter(context, "north", 10.0)
    assert json.loads(file.read_text())["rho"] == pytest.approx(0.04)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"ledger": "ledger.json"}, "'ledger' counts up to max-epsilon, which is not set"),
        ({"max-epsilon": math.nan}, "max-epsilon is nan: write a positive number"),
        ({"max-epsilon": math.inf}, "max-epsilon is inf: write a positive number"),
        ({"max-epsilon": 0}, "max-epsilon is 0: write a positive number"),
        ({"max-epsilon": "low", "ledger": "l"}, "max-epsilon is low: write a positive number"),
        ({"max-epsilon": 1.0, "max-delta": math.nan}, "max-delta is nan: write a positive number"),
        ({"max-epsilon": 1.0, "max-delta": 1}, "max-delta is 1: write a positive number below 1"),
    ],
)
def test_a_limit_that_holds_nothing_back_is_refused(node: dict, says: str) -> None:
    """Whether the server asks for noise or not: nothing leaves the site, and it is told why."""
    made = biased()
    grid = grid_of(made)
    for context in grid.contexts.values():
        context.node_config = dict(node)
    for budget in (Budget(), Budget(1.0, releases=9)):
        with pytest.raises(FedgftError, match=says):
            run(fair(budget=budget), made, grid)


def test_a_description_keeps_the_sites_own_silence(tmp_path) -> None:
    """Of fewer rows than its min-count a site says nothing, also where it describes its table."""
    from fedgft.flower.running import client

    people = {"x": [*map(float, range(112))], "sex": ["f"] * 12 + ["m"] * 100, "ok": [0, 1] * 56}
    pl.DataFrame(people).write_csv(tmp_path / "north.csv")
    config = {"label": "ok", "group": "sex", "split": "", "leave-out": "", "test-share": 0.0}

    def said(run_config: dict, **node) -> list[str]:
        grid = InProcess([client()], [{"data": str(tmp_path / "north.csv"), **node}])
        grid.contexts[100].run_config = config | run_config
        asked = query(None, ConfigRecord(), {"version": VERSION}, 100, f"query.{DESCRIBE}")
        (reply,) = grid.send_and_receive([asked])
        return json.loads(reply.content["fedgft"]["description"])["groups"]

    assert said({}) == ["f", "m"]
    assert said({}, **{"min-count": 20}) == ["m"]
    assert said({"min-count": 20}) == ["m"]
    assert said({}, **{"min-count": 3}) == ["f", "m"]  # never less than the usual ten


def test_the_server_counts_what_it_asked_for(tmp_path) -> None:
    """Also what it did not get, and the counts that sites draw anew after a restart."""
    made, file = biased(), tmp_path / "c.safetensors"
    budget = Budget(1.0, 1e-6, releases=9)
    first = fair(budget=budget, checkpoint=file, final=False)
    grid = grid_of(made)
    grid.lose = lambda node, message: first.done == 1
    run(first, made, grid, 3)
    assert first.hearing.released == 3 and len(first.history) == 2
    again = fair(budget=budget, checkpoint=file, final=False)
    run(again, made, rounds=4)
    assert again.history[-1]["epsilon"] == pytest.approx(budget.spent(4, 2))
    assert budget.spent(4, 2) > budget.spent(4)

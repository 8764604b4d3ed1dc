"""Private statistics: noise with an account, small cells, and secure sums."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.serverapp import strategy as flower

from fedgft.errors import FedgftError
from fedgft.flower import Budget, FairFed, FedGFT
from fedgft.flower.client import client_site, flatten_arrays
from fedgft.flower.client_app import DESCRIBE
from fedgft.flower.messages import REPORT, VERSION, make_query, make_request
from fedgft.flower.run_state import check_sums
from fedgft.metrics import CATALOG, get_metric
from fedgft.privacy.ledger import open_ledger, read_ledger, read_salt
from fedgft.privacy.noise import Noise, drop_small_cells, epsilon_of, total_rho
from fedgft.privacy.policy import SitePolicy
from fedgft.sums import Sums
from in_process_grid import (
    InProcessGrid,
    app_of,
    biased,
    gap_of,
    grid_of,
    options,
    start_of,
    train_config,
)

pytestmark = pytest.mark.slow

SP = CATALOG["sp"]


def run(strategy, made, grid=None, rounds=3):
    grid = grid or grid_of(made)
    return strategy.start(grid, start_of(made), rounds, train_config=train_config()), grid


def fair(**how):
    return FedGFT(flower.FedAvg(**options()), lam=1.0, **how)


def ledger_of(context, site=""):
    return read_ledger(context, site)


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
    draws = [noise.add(exact, None) for _ in range(400)]
    table, true = ("score", exact.score) if kind == "soft" else ("decision", exact.decision)
    values = np.stack([getattr(draw, table) for draw in draws])
    counts = np.stack([draw.count for draw in draws])
    assert (counts - exact.count).std() == pytest.approx(3.0, rel=0.1)
    assert (values[..., 1] - true[..., 1]).std() == pytest.approx(2.0, rel=0.1)
    np.testing.assert_allclose(values.sum(-1), counts, atol=1e-6)  # the first class follows
    other = draws[0].decision if kind == "soft" else draws[0].score
    assert np.isnan(other).all()  # is not sent
    again = noise.add(exact, draws[0].count)
    np.testing.assert_array_equal(again.count, draws[0].count)  # released once


@pytest.mark.parametrize("metric", ["sp", "eop", "eo", "acc", "fpr"])
def test_the_error_of_the_gap_is_that_of_many_draws(metric: str) -> None:
    made = biased(rows=6000)
    metric = get_metric(metric)
    exact = [tally_of(made, k) for k in range(3)]
    noise = Noise("soft", count=4.0, value=3.0)
    total = sum(exact[1:], start=exact[0])
    gaps = []
    for _ in range(300):
        sums = [noise.add(t, None) for t in exact]
        statistics = sum(t.statistics(metric, "soft") for t in sums)
        rates = metric.rates(statistics)
        condition, high, low = metric.worst(total.statistics(metric, "soft"))
        gaps.append(rates[condition, high] - rates[condition, low])
    assert noise.gap_error(metric, total, 3) == pytest.approx(np.std(gaps), rel=0.15)


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
    ours.aggregator.check_budget = lambda rounds: None
    _, grid = run(ours, made, rounds=4)
    assert len(ours.history) == 2  # the constants stay as they are afterwards
    for context in grid.contexts.values():
        (record,) = ledger_of(context).runs.values()
        assert record.released == 2


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
    run(fair(budget=Budget(0.5, 1e-6, releases=9)), made, grid)


def test_a_server_cannot_change_the_terms() -> None:
    made = biased()
    grid = grid_of(made)
    run(fair(budget=Budget(1.0, releases=9)), made, grid)
    with pytest.raises(FedgftError, match="changed the privacy budget"):
        run(fair(budget=Budget(1.0, releases=99)), made, grid)


def test_declared_noise_widens_the_checks_and_undeclared_noise_does_not() -> None:
    made = biased(rows=6000)
    noise = Noise("soft", count=20.0, value=20.0)
    for _ in range(20):
        noisy = noise.add(tally_of(made), None)
        check_sums(noisy, site="north", examples=float(tally_of(made).rows()), noise=noise)
        with pytest.raises(FedgftError):
            check_sums(noisy, site="north", examples=None)
    wild = noisy.map(lambda table: table * 50)
    with pytest.raises(FedgftError):
        check_sums(wild, site="north", examples=4000.0, noise=noise)


def test_small_cells_are_not_reported() -> None:
    count = np.array([[3.0, 30.0, 0.0], [12.0, 9.0, 0.0]])
    tally = Sums(count, count[..., None] * [0.4, 0.6], count[..., None] * [1.0, 0.0])
    kept = drop_small_cells(tally, 10)
    np.testing.assert_array_equal(kept.count, [[0, 30, 0], [12, 0, 0]])
    assert kept.score[0, 0].sum() == 0 and kept.decision[1, 1].sum() == 0
    made = biased()
    ours = fair(budget=Budget(min_count=60), channel="query")
    run(ours, made, rounds=1)
    least = sum(int(n) for k in range(3) for n in tally_of(made, k).count.ravel() if n >= 60)
    assert ours.history[0]["rows"] == least < sum(made.sizes)


def test_what_does_not_go_together_is_refused() -> None:
    strategy = flower.FedAvg(**options())
    with pytest.raises(FedgftError, match="need no min_count"):
        FedGFT(strategy, lam=1.0, channel="query", secure=True, budget=Budget(1.0, min_count=5))
    for how in ({"secure": True, "channel": "query"}, {"budget": Budget(1.0)}):
        with pytest.raises(FedgftError, match="every client's own sums"):
            FairFed(strategy, **how)
    for wrong in ({"delta": 0.0, "epsilon": 1.0}, {"releases": 0}, {"min_count": -1}):
        with pytest.raises(FedgftError):
            Budget(**wrong)


def test_private_training_is_still_fair() -> None:
    made = biased(clients=5, rows=20_000)
    bare = gap_of(made, flatten_arrays(run(flower.FedAvg(**options()), made, rounds=10)[0].arrays))
    budget = Budget(2.0, 1e-6, releases=11)
    ours = FedGFT(flower.FedAvg(**options()), lam=5.0, budget=budget)
    found = gap_of(made, flatten_arrays(run(ours, made, rounds=10)[0].arrays))
    assert found < bare / 2, (bare, found)


# What else leaves a site


def test_the_number_of_examples_gives_nothing_away() -> None:
    """Beside noise it follows from the noisy counts; beside withheld cells, from those that are
    sent: the true number would tell what they hide."""
    made = biased(rows=6000)
    for budget in (Budget(1.0, releases=9), Budget(min_count=300)):
        grid = grid_of(made)
        seen = []
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
    made = biased()
    file = tmp_path / "ledger.json"
    settings = {"max-epsilon": 1.2, "max-delta": 1e-6, "ledger": str(file)}
    runs = count(1)

    def attempt(epsilon):
        grid = grid_of(made)
        for context in grid.contexts.values():
            context.run_id = next(runs)
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


def question(grid, arrays, budget, node=100, kind="soft"):
    """One question about a model; the record that comes back, or the site's error."""
    request = make_request(None, None, statistics="received", privacy=budget.to_request(kind))
    (reply,) = grid.send_and_receive([make_query(arrays, ConfigRecord(), request, node)])
    if reply.has_error():
        raise FedgftError(reply.error.reason)
    return reply.content["fedgft"]


def moved(arrays, step):
    """The same model, moved by a step."""
    return ArrayRecord({name: Array(a.numpy() + np.float32(step)) for name, a in arrays.items()})


def test_a_restarted_site_sends_the_same_numbers_again() -> None:
    """Its process ends after it answered; the server asks again about the same model, and then
    about another. The account is that of two releases and one of the counts."""
    made = biased()
    budget = Budget(1.0, releases=2)
    grid = grid_of(made)
    first = start_of(made)
    sent = question(grid, first, budget)
    grid.restart(100)
    again = question(grid, first, budget)
    assert again["count"] == sent["count"] and again["score"] == sent["score"]
    grid.restart(100)
    other = question(grid, moved(first, 0.5), budget)
    assert other["count"] == sent["count"] and other["score"] != sent["score"]
    ledger = ledger_of(grid.contexts[100])
    assert ledger.rho == pytest.approx(budget.rho(2)) == pytest.approx(total_rho(1.0, 1e-6))
    grid.restart(100)
    with pytest.raises(FedgftError, match="is spent; it sends no more"):
        question(grid, moved(first, 1.0), budget)
    assert question(grid, first, budget)["score"] == sent["score"]  # costs nothing
    grid.new_run()
    assert question(grid, first, budget)["count"] != sent["count"]  # on the account of the new run
    assert ledger_of(grid.contexts[100]).rho == pytest.approx(budget.rho(3, counts=2))


def test_what_a_site_remembers_is_for_its_owner_alone(tmp_path) -> None:
    made = biased()
    grid = grid_of(made)
    grid.contexts[100].node_config["ledger"] = str(tmp_path / "ledger.json")
    grid.contexts[100].node_config["max-epsilon"] = 2.0
    for node in (100, 101):
        question(grid, start_of(made), Budget(1.0), node)
        read_salt(grid.contexts[node], "site")
    files = [tmp_path / "ledger.json", *Path(grid.folder).rglob("*")]
    assert {file.name for file in files} == {"ledger.json", "salt", "100", "101"}
    for file in files:
        assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600), file


def test_a_ledger_of_the_first_version_is_read(tmp_path) -> None:
    file = tmp_path / "ledger.json"
    file.write_text(json.dumps({"rho": 0.01, "epsilon": 0.5, "delta": 1e-6}))
    made = biased()
    grid = grid_of(made)
    grid.contexts[100].node_config |= {"ledger": str(file), "max-epsilon": 1.0, "max-delta": 1e-6}
    question(grid, start_of(made), Budget(0.5, 1e-6))
    assert json.loads(file.read_text())["rho"] == pytest.approx(0.01 + total_rho(0.5, 1e-6))


def test_a_noisy_report_is_sent_once_a_run_over_restarts() -> None:
    made = biased(rows=3000)
    grid = grid_of(made)
    arrays = start_of(made)
    site = client_site(made, 0, "logistic")
    site.held_out = site.rows
    grid.apps[100] = app_of(site)

    def report(model):
        request = make_request(
            None, None, statistics="none", privacy=Budget(1.0).to_request("hard")
        )
        asked = make_query(model, ConfigRecord(), request, 100, kind=f"query.{REPORT}")
        (reply,) = grid.send_and_receive([asked])
        if reply.has_error():
            raise FedgftError(reply.error.reason)
        return reply.content["fedgft"]["sums"]

    sent = report(arrays)
    grid.restart(100)
    assert report(arrays) == sent
    with pytest.raises(FedgftError, match="budget of its report is spent"):
        report(moved(arrays, 0.1))
    assert ledger_of(grid.contexts[100]).rho == pytest.approx(total_rho(1.0, 1e-6))


def test_runs_that_enter_a_ledger_at_once_take_turns(tmp_path, monkeypatch) -> None:
    """Each finds what the others have spent, however long it thinks about it."""

    def slow(rho: float, delta: float) -> float:
        time.sleep(0.05)
        return epsilon_of(rho, delta)

    def enter(rho: float) -> None:
        with open_ledger(context, "north") as ledger:
            SitePolicy(context, "north").charge(ledger, rho)

    monkeypatch.setattr("fedgft.privacy.policy.epsilon_of", slow)
    file = tmp_path / "ledger.json"
    context = context_of(**{"max-epsilon": 5.0, "ledger": str(file)})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: enter(0.01), range(4)))
    assert json.loads(file.read_text())["rho"] == pytest.approx(0.04)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]
    with pytest.raises(FedgftError, match="above its max-epsilon, 5"):
        enter(10.0)
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
    from fedgft.flower.client_app import make_client_app

    people = {"x": [*map(float, range(112))], "sex": ["f"] * 12 + ["m"] * 100, "ok": [0, 1] * 56}
    pl.DataFrame(people).write_csv(tmp_path / "north.csv")
    config = {"label": "ok", "group": "sex", "split": "", "leave-out": "", "test-share": 0.0}

    def said(run_config: dict, **node) -> list[str]:
        grid = InProcessGrid([make_client_app()], [{"data": str(tmp_path / "north.csv"), **node}])
        grid.contexts[100].run_config = config | run_config
        asked = make_query(None, ConfigRecord(), {"version": VERSION}, 100, f"query.{DESCRIBE}")
        (reply,) = grid.send_and_receive([asked])
        return json.loads(reply.content["fedgft"]["description"])["groups"]

    assert said({}) == ["f", "m"]
    assert said({}, **{"min-count": 20}) == ["m"]
    assert said({"min-count": 20}) == ["m"]
    assert said({}, **{"min-count": 3}) == ["f", "m"]  # never less than the usual ten


def test_the_server_counts_what_it_asked_for(tmp_path) -> None:
    """Also what it did not get, and the counts that sites draw anew after a restart."""
    made = biased()
    file = tmp_path / "c.safetensors"
    budget = Budget(1.0, 1e-6, releases=9)
    first = fair(budget=budget, checkpoint=file, final=False)
    grid = grid_of(made)
    grid.lose = lambda node, message: first.state.rounds_done == 1
    run(first, made, grid, 3)
    assert first.state.releases == 3 and len(first.history) == 2
    again = fair(budget=budget, checkpoint=file, final=False)
    run(again, made, rounds=4)
    assert again.history[-1]["epsilon"] == pytest.approx(budget.spent(4, 2))
    assert budget.spent(4, 2) > budget.spent(4)

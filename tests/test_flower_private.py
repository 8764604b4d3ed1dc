"""Private statistics: noise with an account, small cells, and sums that nobody sees apart."""

import math
from itertools import pairwise

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower

from fedgft.flower import Budget, FairFed, FedGFT
from fedgft.flower.checks import Noise, check_report
from fedgft.flower.masks import mask_of
from fedgft.flower.private import epsilon_of, gap_error, noised, total_rho, without_small
from fedgft.flower.sites import client_site, flat
from fedgft.flower.wire import Names, Report
from fedgft.metrics import CATALOG, Tally, get_metric
from fedgft.types import FedgftError
from grid import biased, gap_of, grid_of, options, start_of, train_config

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
    ours = FedGFT(flower.FedAvg(**options()), lam=5.0, channel="query", secure=True, final=False)
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


def test_a_client_never_gives_both_shares_of_another() -> None:
    """A server that calls a client lost and alive would open its sums."""
    made = biased()
    grid = grid_of(made)

    def greedy(node, message):
        config = message.content["config"]
        if config.get("fedgft.secure.stage") == "unmask":
            message.content["config"] = ConfigRecord({**config, "fedgft.lost": [100]})
        return False

    grid.lose = greedy
    ours = fair(channel="query", secure=True)
    with pytest.raises(FedgftError, match="contradict each other"):
        run(ours, made, grid, 1)


def test_stages_out_of_turn_are_refused() -> None:
    made = biased()
    grid = grid_of(made)

    def skip(node, message):
        config = message.content["config"]
        if config.get("fedgft.secure.stage") == "shares":
            message.content["config"] = ConfigRecord({**config, "fedgft.secure.stage": "masked"})
        return False

    grid.lose = skip
    with pytest.raises(FedgftError, match="out of turn"):
        run(fair(channel="query", secure=True), made, grid, 1)


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

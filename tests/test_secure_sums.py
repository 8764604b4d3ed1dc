"""Secure sums: the total is correct, and only the total of the whole cohort is revealed."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower

from fedgft.deploy.init import create_node_key
from fedgft.errors import FedgftError
from fedgft.flower import Budget, FedGFT
from fedgft.flower.client import client_site, flatten_arrays
from fedgft.flower.messages import make_request
from fedgft.flower.secure_sums import (
    SecureCohort,
    SecureSum,
    encode_private_key,
    encode_public_key,
    expand_mask,
    mask_numbers,
)
from fedgft.metrics import CATALOG
from fedgft.privacy.ledger import read_ledger
from fedgft.privacy.noise import honest_clients, total_rho
from in_process_grid import app_of, biased, grid_of, options, start_of, train_config

pytestmark = pytest.mark.slow

SP = CATALOG["sp"]


def run(strategy, made, grid=None, rounds=3):
    grid = grid or grid_of(made)
    return strategy.start(grid, start_of(made), rounds, train_config=train_config()), grid


def secure(**how):
    chosen = {"lam": 1.0, "channel": "query", "secure": True, "patience": 1, **how}
    return FedGFT(flower.FedAvg(**options()), **chosen)


def tally_of(made, k=0, arrays=None):
    site = client_site(made, k, "logistic")
    site.load(arrays or start_of(made))
    return site.tally(site.rows)


def asked(grid, arrays, nodes, cohort=None, budget=None, **how):
    """One sum, as the server asks for it."""
    budget = budget or Budget()
    told = budget.to_request("soft") | {"secure": 1.0}
    request = make_request(None, None, statistics="received", privacy=told)
    one = SecureSum(grid, arrays, request, ConfigRecord(), 60.0, budget.noise("soft"), **how)
    return one.ask(nodes, cohort or SecureCohort())


def moved(arrays, step):
    return ArrayRecord({name: Array(a.numpy() + np.float32(step)) for name, a in arrays.items()})


def records_of(grid, node):
    context = grid.contexts[node]
    return list(read_ledger(context, "").runs.values())


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


# The total


def test_the_secure_sum_is_the_plain_sum() -> None:
    made = biased(clients=5)
    plain = FedGFT(flower.FedAvg(**options()), lam=5.0, channel="query")
    expected = run(plain, made)[0]
    found = run(secret := secure(lam=5.0), made)[0]
    for a, b in zip(plain.history, secret.history, strict=True):
        assert b["rows"] == a["rows"] and b["clients"] == a["clients"] == 5
        assert b["gap_soft"] == pytest.approx(a["gap_soft"], abs=1e-6)
        assert b["gap_hard"] == a["gap_hard"] and b["accuracy"] == a["accuracy"]
    np.testing.assert_allclose(
        flatten_arrays(found.arrays), flatten_arrays(expected.arrays), atol=1e-5
    )


def test_what_the_server_sees_of_one_client_looks_random() -> None:
    """Its sums, masked, eight times: nothing in common, and nothing like the sums."""
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
    run(secure(lam=0.0, final=False), made, grid, 8)
    assert [len(vector) for vector in seen] == [6 + 24, *[24] * 7]  # counts once
    every = np.concatenate(seen)
    bits = np.unpackbits(every.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5
    assert len(np.unique(every)) == len(every)


def test_masks_cancel_only_over_the_whole_cohort() -> None:
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(4)]
    publics = [encode_public_key(key.public_key()) for key in keys]
    numbers = np.arange(20).reshape(4, 5) - 7
    hidden = [
        mask_numbers(
            numbers[i],
            encode_private_key(keys[i]),
            publics[i],
            [p for p in publics if p != publics[i]],
        )
        for i in range(4)
    ]
    total = np.sum(hidden, axis=0, dtype=np.uint64).view(np.int64)
    np.testing.assert_array_equal(total, numbers.sum(0))
    for left in range(4):
        part = [h for i, h in enumerate(hidden) if i != left]
        some = np.sum(part, axis=0, dtype=np.uint64).view(np.int64)
        assert (np.abs(some) > 2**40).all()


def test_masks_depend_on_every_bit_of_the_key() -> None:
    key = bytes(range(32))
    other = bytes([*key[:-1], key[-1] ^ 1])
    assert not np.array_equal(expand_mask(key, 50), expand_mask(other, 50))
    np.testing.assert_array_equal(expand_mask(key, 50), expand_mask(key, 50))


# The cohort


@pytest.mark.parametrize("stage", ["keys", "masked"])
def test_a_round_without_a_site_has_no_sum_and_the_next_has_one(stage: str) -> None:
    """The first attack of F5: counts of four less counts of three are one site's. There is no sum
    of three, whatever the server does with the messages that it has."""
    made = biased(clients=4)
    grid = grid_of(made)
    ours = secure(final=False)
    grid.lose = lambda node, message: (
        ours.state.rounds_done == 1
        and node == 103
        and message.content["config"].get("fedgft.secure.stage") == stage
    )
    run(ours, made, grid, 3)
    assert [row["round"] for row in ours.history] == [0, 2]
    assert {(row["clients"], row["rows"]) for row in ours.history} == {(4, sum(made.sizes))}


def test_a_smaller_cohort_after_a_larger_one_is_refused() -> None:
    """The second attack of F5: the same model twice, of four sites and then of three."""
    made = biased(clients=4)
    grid = grid_of(made)
    arrays = start_of(made)
    total, cohort = asked(grid, arrays, [100, 101, 102, 103])
    assert len(cohort.rows) == 4 and total.rows() == sum(made.sizes)
    for model in (arrays, moved(arrays, 1e-4)):
        with pytest.raises(FedgftError, match="other sites than those of its first sum"):
            asked(grid, model, [100, 101, 102])
    grid.restart(100, 101, 102, 103)
    with pytest.raises(FedgftError, match="other sites than those of its first sum"):
        asked(grid, arrays, [100, 101, 102])
    grid.new_run()
    with pytest.raises(FedgftError, match="without site-3"):
        asked(grid, arrays, [100, 101, 102])
    again, _ = asked(grid, arrays, [100, 101, 102, 103])  # of all four it is the same again
    np.testing.assert_array_equal(again.decision, total.decision)


def test_sites_refuse_to_sum_over_different_models() -> None:
    """A server that gives the others a model with known answers would be left with one site's."""
    made = biased(clients=4)
    grid = grid_of(made)
    arrays = start_of(made)

    def other(node, message):
        if message.content["config"].get("fedgft.secure.stage") == "masked" and node != 100:
            message.content["arrays"] = moved(arrays, 100.0)
        return False

    grid.lose = other
    with pytest.raises(FedgftError, match="not the one that all sites signed for"):
        asked(grid, arrays, [100, 101, 102, 103])


def test_other_clients_than_those_that_train_are_asked_too() -> None:
    """A strategy that samples clients must not make the totals differ by who was drawn."""
    made = biased(clients=5)
    sampled = options(fraction_train=0.5)
    ours = FedGFT(flower.FedAvg(**sampled), lam=1.0, channel="query", secure=True)
    run(ours, made, rounds=3)
    assert [row["clients"] for row in ours.history] == [5] * 4


def test_secure_sums_need_three_sites() -> None:
    made = biased(clients=3)
    grid = grid_of(made)
    grid.gone = {102}
    with pytest.raises(FedgftError, match="and 3 are needed"):
        run(secure(), made, grid, 1)


# Keys


def with_peers(grid, folder, sites=None):
    """Every node has its own key, and the public keys of all sites."""
    folder.mkdir(exist_ok=True)
    for k, node in enumerate(grid.contexts):
        create_node_key(folder, f"site-{k}")
        told = {"key": str(folder / f"site-{k}.key"), "peers": str(folder)}
        grid.contexts[node].node_config |= told
    return grid


def test_sites_that_know_the_other_sites_keys(tmp_path, caplog) -> None:
    """No warning, the right total, and no file of its own about the cohort."""
    made = biased(clients=4)
    grid = with_peers(grid_of(made), tmp_path / "keys")
    with caplog.at_level(logging.WARNING, "flwr"):
        total, _ = asked(grid, start_of(made), [100, 101, 102, 103])
    assert total.rows() == sum(made.sizes)
    assert "no public keys of the other sites" not in caplog.text
    with pytest.raises(FedgftError, match="other sites than those of its folder of peers: without"):
        asked(grid, start_of(made), [100, 101, 102])


def test_missing_keys_of_other_sites_are_reported(caplog) -> None:
    made = biased()
    with caplog.at_level(logging.WARNING, "flwr"):
        _, grid = run(secure(), made, rounds=2)
    lines = [r.getMessage() for r in caplog.records if "no public keys" in r.getMessage()]
    assert len(lines) == 3 and len(set(lines)) == 3  # each site, once
    grid.restart(*grid.contexts)
    caplog.clear()
    run(secure(), made, grid, rounds=1)
    assert "no public keys of the other sites" not in caplog.text


def test_a_client_of_the_servers_own_is_refused(tmp_path) -> None:
    """It would know one mask of every pair; with enough of them, a site's sums."""
    made = biased(clients=4)
    grid = with_peers(grid_of(made), tmp_path / "keys")
    (tmp_path / "keys" / "site-3.pub").unlink()  # the others do not know it
    with pytest.raises(FedgftError, match="with site-3"):
        asked(grid, start_of(made), [100, 101, 102, 103])
    total, _ = asked(grid, start_of(made), [100, 101, 102])
    assert total.rows() == sum(made.sizes[:3])


def edited(change):
    """Changes the list of members that the server hands on to node 100."""

    def edit(node, config) -> None:
        if node == 100:
            members = json.loads(config["fedgft.secure.cohort"])
            config["fedgft.secure.cohort"] = json.dumps(change(members) or members)

    return edit


def fresh_key() -> str:
    return encode_public_key(ec.generate_private_key(ec.SECP384R1()).public_key())


FORGED = {
    "a mask key of the server's": (lambda m: m[1].update(mask=fresh_key()), "not signed by it"),
    "an identity of the server's": (lambda m: m[1].update(identity=fresh_key()), "not signed"),
    "no signature": (lambda m: m[1].update(signature=""), "not signed by it"),
    "a signature of another's": (
        lambda m: m[1].update(signature=m[2]["signature"]),
        "not signed by it",
    ),
    "other rows": (lambda m: m[1].update(rows=1), "not signed by it"),
    "another name": (lambda m: m[1].update(site="north"), "not signed by it"),
    "its own key exchanged": (
        lambda m: m[0].update(mask=m[1]["mask"]) or m[1].update(mask=fresh_key()),
        "not signed",
    ),
    "one client twice": (lambda m: [m[0], m[1], m[1]], "same key"),
    "without the client": (lambda m: [*m[1:], dict(m[1])], "same key|another key"),
    "two clients": (lambda m: m[:2], "3 to 1000 clients"),
    "no list": (lambda m: {"a": 1}, "3 to 1000 clients"),
    "no keys": (lambda m: [{}, {}, {}], "keys are missing"),
    "junk keys": (lambda m: m[1].update(mask="zz"), "not signed"),
    "a million rows too many": (lambda m: m[1].update(rows=10**15), "cannot be"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_messages_forged_by_the_server_are_refused(kind: str) -> None:
    change, says = FORGED[kind]
    made = biased()
    grid = grid_of(made)
    tamper(grid, "masked", edited(change))
    with pytest.raises(FedgftError, match=says):
        asked(grid, start_of(made), [100, 101, 102])
    assert not any(record.answers for record in records_of(grid, 100))  # nothing was released


def test_keys_of_another_sum_are_refused() -> None:
    """Of another model, or of another run: replayed signatures are about something else."""
    made = biased()
    grid = grid_of(made)
    arrays = start_of(made)
    old: dict[str, str] = {}

    def keep(node, config) -> None:
        old.setdefault("cohort", config["fedgft.secure.cohort"])

    tamper(grid, "masked", keep)
    asked(grid, arrays, [100, 101, 102])

    def replay(members):
        return [members[0], *json.loads(old["cohort"])[1:]]

    tamper(grid, "masked", edited(replay))
    with pytest.raises(FedgftError, match="not signed by it for this sum"):
        asked(grid, moved(arrays, 0.1), [100, 101, 102])
    grid.new_run()
    with pytest.raises(FedgftError, match="not signed by it for this sum"):
        asked(grid, arrays, [100, 101, 102])


def test_masked_without_keys_is_out_of_turn() -> None:
    made = biased()
    grid = grid_of(made)
    tamper(grid, "keys", lambda n, c: c.update({"fedgft.secure.stage": "masked"}))
    with pytest.raises(FedgftError, match="out of turn"):
        asked(grid, start_of(made), [100, 101, 102])
    grid = grid_of(made)
    tamper(grid, "masked", lambda n, c: grid.restart(100))
    with pytest.raises(FedgftError, match="out of turn"):  # its key ended with its process
        asked(grid, start_of(made), [100, 101, 102])


# What one client can do


def one_cell(table):
    return 1e11 * (np.arange(table.size) == 0).reshape(table.shape)


LIES = {
    "a billion rows": (lambda t: t.map(lambda x: x * 1e8), "clients declared"),
    "1e11 rows in one cell": (lambda t: t.map(lambda x: x + one_cell(x)), "clients declared"),
    "rows taken from the others": (lambda t: t.map(lambda x: x - 1e4), "clients declared"),
    "more accepted than there are": (
        lambda t: replace(t, decision=t.decision + 1e5),
        "exceed its counts",
    ),
    "fewer than none accepted": (lambda t: replace(t, decision=t.decision - 1e5), "are negative"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_client_cannot_claim_more_than_it_declared(kind: str) -> None:
    """The sum fails, and the constants stay as they are."""
    made = biased(clients=4)
    grid = grid_of(made)
    liar = client_site(made, 0, "logistic")
    honest_tally = liar.tally
    lie, says = LIES[kind]
    liar.tally = lambda rows: lie(honest_tally(rows))
    grid.apps[100] = app_of(liar)
    with pytest.raises(FedgftError, match=says):
        asked(grid, start_of(made), list(grid.apps))


def test_rows_are_declared_once_and_bounded() -> None:
    made = biased(clients=4)
    grid = grid_of(made)
    arrays = start_of(made)
    _, cohort = asked(grid, arrays, list(grid.apps))
    (record,) = records_of(grid, 100)
    assert record.rows == made.sizes[0] == cohort.rows[100]
    changed = SecureCohort({**cohort.rows, 100: 7}, cohort.names, cohort.counts)
    with pytest.raises(FedgftError, match="and declared 7 before"):
        asked(grid, arrays, list(grid.apps), changed)
    with pytest.raises(FedgftError, match="more than max_share"):
        asked(grid_of(made), arrays, list(grid.apps), max_share=0.1)


MALFORMED = {
    "keys": [
        lambda r: r.pop("mask"),
        lambda r: r.update(mask=b"junk"),
        lambda r: r.pop("groups"),
        lambda r: r.update(groups=["q", "r"]),
        lambda r: r.update(rows=7.5),
        lambda r: r.update(mask="ff" * 10),
    ],
    "masked": [
        lambda r: r.update(masked=b"abc"),
        lambda r: r.update(masked=10**9),
        lambda r: r.clear(),
    ],
}


@pytest.mark.parametrize(
    ("stage", "which"), [(s, i) for s, c in MALFORMED.items() for i in range(len(c))]
)
def test_a_malformed_reply_is_an_error_of_one_line(stage: str, which: int) -> None:
    """Before the first sum its sender is left out; afterwards there is no sum without it."""
    made = biased(clients=5)
    grid = grid_of(made)
    plain = grid.apps[100]

    def liar(message, context):
        reply = plain(message, context)
        if message.content["config"].get("fedgft.secure.stage") == stage:
            MALFORMED[stage][which](reply.content["fedgft"])
        return reply

    grid.apps[100] = liar
    if stage == "keys":
        _, cohort = asked(grid, start_of(made), list(grid.apps))
        assert len(cohort.rows) == 4
        return
    with pytest.raises(FedgftError, match=r"another length|no sum without"):
        asked(grid, start_of(made), list(grid.apps))


def test_a_site_can_insist_on_secure_sums() -> None:
    """No plain question, no evaluation and no report gets anything out of it."""
    made = biased()
    grid = grid_of(made)
    for context in grid.contexts.values():
        context.node_config["secure"] = True
    run(secure(), made, grid, 2)
    for channel in ("query", "train"):
        with pytest.raises(FedgftError, match="secure sums only"):
            run(secure(channel=channel, secure=False), made, grid, 1)


def test_withheld_cells_are_withheld_before_the_sum() -> None:
    made = biased()
    counts = [client_site(made, k, "logistic").counts() for k in range(3)]
    least = int(max(table[table > 0].min() for table in counts)) + 1
    total, cohort = asked(
        grid_of(made),
        start_of(made),
        [100, 101, 102],
        budget=Budget(min_count=least),
        withheld=True,
    )
    expected = sum(np.where(table >= least, table, 0) for table in counts)
    np.testing.assert_array_equal(total.count, expected)
    assert sum(cohort.rows.values()) == expected.sum() < sum(made.sizes)


# With noise


def test_the_total_has_the_noise_of_the_account_or_more() -> None:
    """Each client adds a share; those of the honest ones alone make up the account's noise."""
    made = biased(clients=4)
    budget = Budget(1.0, 1e-6, releases=400)
    arrays = start_of(made)
    noise = budget.noise("soft")
    grid = grid_of(made)
    exact = sum(tally_of(made, k).score[..., 1] for k in range(4))
    drawn = []
    cohort = SecureCohort()
    for i in range(12):  # models that are nearly the same, but not the same
        total, cohort = asked(grid, moved(arrays, i * 1e-6), list(grid.apps), cohort, budget)
        drawn.append(total.score[..., 1] - exact)
    share = noise.share(4)
    assert honest_clients(4) == 3 and share.value * 3**0.5 == pytest.approx(noise.value, rel=1e-4)
    assert np.std(drawn) == pytest.approx(share.value * 2, rel=0.3)  # of 72 numbers
    true = sum(client_site(made, k, "logistic").counts() for k in range(4))
    assert 0 < np.abs(cohort.counts - true).max() < 5 * share.count * 2
    (record,) = records_of(grid, 100)
    assert record.released == 12 and record.rows != made.sizes[0]


def test_noise_and_secure_sums_train_together_and_keep_account() -> None:
    """The same epsilon as noise without secure sums, and less noise on the gap."""
    made = biased(clients=5, rows=6000)
    budget = Budget(1.0, 1e-6, releases=3)
    ours = secure(lam=5.0, budget=budget)
    _, grid = run(ours, made, rounds=2)
    last = ours.history[-1]
    assert last["epsilon"] == pytest.approx(1.0, rel=1e-3) and last["clients"] == 5
    assert ours.aggregator.noise == budget.noise("soft").share(5)
    for context in grid.contexts.values():
        spent = read_ledger(context, "").rho
        assert spent == pytest.approx(total_rho(1.0, 1e-6))
    alone = secure(lam=5.0, budget=budget, secure=False)
    run(alone, made, rounds=2)
    assert ours.history[0]["gap_error"] < 0.75 * alone.history[0]["gap_error"]


def test_a_restarted_site_adds_the_same_share_again() -> None:
    made = biased()
    budget = Budget(1.0, 1e-6, releases=2)
    grid = grid_of(made)
    arrays = start_of(made)
    first, _ = asked(grid, arrays, list(grid.apps), budget=budget)
    grid.restart(*grid.apps)
    again, cohort = asked(grid, arrays, list(grid.apps), budget=budget)
    np.testing.assert_array_equal(first.score, again.score)
    np.testing.assert_array_equal(first.count, again.count)
    asked(grid, moved(arrays, 0.1), list(grid.apps), cohort, budget)
    grid.restart(*grid.apps)
    with pytest.raises(FedgftError, match="is spent"):
        asked(grid, moved(arrays, 0.2), list(grid.apps), cohort, budget)


def test_the_number_of_examples_is_noisy_beside_noisy_secure_sums() -> None:
    made = biased(rows=6000)
    grid = grid_of(made)
    seen = {}
    for node, app in list(grid.apps.items()):

        def listen(message, context, app=app, node=node):
            reply = app(message, context)
            if "metrics" in reply.content:
                seen.setdefault(node, set()).add(reply.content["metrics"]["num-examples"])
            return reply

        grid.apps[node] = listen
    ours = secure(budget=Budget(1.0, releases=9), final=False)
    run(ours, made, grid, 2)
    declared = {node: {rows} for node, rows in ours.aggregator.cohort.rows.items()}
    assert seen == declared  # one number, the same everywhere
    true = dict(zip(grid.apps, made.sizes, strict=True))
    assert sum(declared[node] == {true[node]} for node in true) <= 1

"""Published methods against their formulas, written out as loops over rows."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize

from fedgft.algorithms import Objective, get_method
from fedgft.algorithms.afl import WorstClient
from fedgft.algorithms.agnostic_fair import BoundaryCovariance
from fedgft.algorithms.bounded_group_loss import BoundedGroupLoss
from fedgft.algorithms.fade import CancelingWeights
from fedgft.algorithms.fairgrad import ErrorWeights
from fedgft.algorithms.fairtrade import squared_deviations
from fedgft.algorithms.fedfact import DualAscent
from fedgft.algorithms.fedfb import FairBatchWeights
from fedgft.algorithms.fedminmax import FLOOR, MinimaxGroups
from fedgft.algorithms.ffalm import LossParity
from fedgft.algorithms.puffle import LocalMomentum
from fedgft.algorithms.qffl import PowerOfLosses
from fedgft.algorithms.servers import IterateAverage
from fedgft.algorithms.weightings import FedNova, LocalResults
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from given_reports import Rows, draw_rows, draw_scores, follow

CLOSE = {"rtol": 0, "atol": 1e-11}
two_or_three = pytest.mark.parametrize("groups", [2, 3])


def entropies(rows: Rows, probs: np.ndarray) -> np.ndarray:
    return np.array([-np.log(probs[i, rows.y[i]]) for i in range(len(rows))])


def known_rows(rows: Rows) -> int:
    return sum(1 for a in rows.a if a >= 0)


def nearest_in_simplex(point: list[float], total: float = 1.0, least: float = 0.0) -> list[float]:
    """The nearest point with coordinates of at least `least` and this sum, by bisection."""
    low, high = min(point) - total - 1, max(point) + total + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if sum(max(x - middle, least) for x in point) > total else (low, middle)
        )
    return [max(x - high, least) for x in point]


def assert_unchanged(terms, rows: Rows) -> None:
    """The loss is plain cross-entropy."""
    np.testing.assert_allclose(terms.weights, 1.0, **CLOSE)
    assert np.all(np.asarray(terms.price) == 0.0)
    own = np.eye(rows.classes)[None, :, None]
    assert terms.labels is None or (terms.labels == own).all()
    assert terms.curve is None


# FedFB


@two_or_three
def test_fedfb_for_statistical_parity(groups: int) -> None:
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    found = follow(FairBatchWeights(CATALOG["sp"], 0.8), rows, scores)
    assert_unchanged(found[0], rows)
    n = known_rows(rows)
    size = [rows.number(a=z) for z in range(groups)]
    w = {(y, z): size[z] / n for y in (0, 1) for z in range(groups)}
    for t in (1, 2, 3):
        losses = entropies(rows, scores[t])
        total = {
            (y, z): rows.mean(losses, y=y, a=z) * rows.number(y=y, a=z)
            for y in (0, 1)
            for z in range(groups)
        }

        def proxy(z: int, total=total) -> float:
            return (total[1, z] - total[0, z] + rows.number(y=0, a=z)) / size[z]

        moves = [0.8 / np.sqrt(t) * (proxy(0) - proxy(z)) for z in range(groups)]
        moves[0] = -sum(moves[1:])
        for z in range(groups):
            w[0, z] = min(max(w[0, z] + moves[z], 0), 2 * size[z] / n)
            w[1, z] = 2 * size[z] / n - w[0, z]
        for y, z in product((0, 1), range(groups)):
            np.testing.assert_allclose(found[t].weights[:, y, z], n * w[y, z] / size[z], **CLOSE)
        assert (found[t].weights[:, :, -1] == 1).all()


@two_or_three
@pytest.mark.parametrize(("metric", "labels"), [("eop", (1,)), ("eo", (0, 1))])
@pytest.mark.parametrize("alpha", [0.1, 3.0])
def test_fedfb_by_label(metric: str, labels: tuple, groups: int, alpha: float) -> None:
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    found = follow(FairBatchWeights(CATALOG[metric], alpha), rows, scores)
    assert_unchanged(found[0], rows)
    n = known_rows(rows)
    cells = list(product((0, 1), range(groups)))
    m = {(y, z): rows.number(y=y, a=z) for y, z in cells}
    w = {cell: m[cell] / n for cell in cells}
    for t in (1, 2, 3):
        losses = entropies(rows, scores[t])
        for y in labels:
            mean = [rows.mean(losses, y=y, a=z) for z in range(groups)]
            moves = [alpha / np.sqrt(t) * (mean[z] - mean[0]) for z in range(groups)]
            moves[0] = -sum(moves[1:])
            most = sum(m[y, z] for z in range(groups)) / n
            for z in range(groups):
                w[y, z] = min(max(w[y, z] + moves[z], 0), most)
        for y, z in cells:
            np.testing.assert_allclose(found[t].weights[:, y, z], n * w[y, z] / m[y, z], **CLOSE)
    if alpha > 1:  # the bounds were needed
        assert min(w.values()) == 0


# FairGrad and FedFACT: multipliers of the rates of decisions


def conditions(metric: str) -> list[int | None]:
    """The label that the rows of each condition must have; None: any."""
    return {"sp": [None], "eop": [1], "eo": [0, 1]}[metric]


def gaps_from_pooled(rows: Rows, positive: np.ndarray, metric: str) -> dict:
    """Rate of each group minus that of all rows with a group; `positive` holds decisions."""
    found = {}
    for v, label in enumerate(conditions(metric)):
        event = [i for i in range(len(rows)) if label in (None, rows.y[i]) and rows.a[i] >= 0]
        overall = sum(positive[i] for i in event) / len(event)
        for z in range(rows.groups):
            of_group = [i for i in event if rows.a[i] == z]
            found[v, z] = sum(positive[i] for i in of_group) / len(of_group) - overall
    return found


def cost_of_decision(rows: Rows, force: dict, metric: str, y: int, z: int) -> float:
    """n d<force, gaps> / d(decision of one row): the gaps are linear in decisions."""
    nothing = np.zeros(len(rows))
    one = nothing.copy()
    one[next(i for i in range(len(rows)) if rows.y[i] == y and rows.a[i] == z)] = 1.0
    before, after = (gaps_from_pooled(rows, each, metric) for each in (nothing, one))
    return len(rows) * sum(force[key] * (after[key] - before[key]) for key in force)


def decide(probs: np.ndarray) -> np.ndarray:
    return np.array([1.0 if p[1] > p[0] else 0.0 for p in probs])


@two_or_three
@pytest.mark.parametrize("metric", ["sp", "eop", "eo"])
def test_fairgrad(metric: str, groups: int) -> None:
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    eta, eps = 0.7, 0.01
    found = follow(ErrorWeights(CATALOG[metric], eta, slack=eps), rows, scores)
    assert_unchanged(found[0], rows)
    up = {(v, z): 0.0 for v in range(len(conditions(metric))) for z in range(groups)}
    down = dict(up)
    for t in (1, 2, 3):
        gaps = gaps_from_pooled(rows, decide(scores[t]), metric)
        for key in up:
            up[key] = max(0.0, up[key] + eta * (gaps[key] - eps))
            down[key] = max(0.0, down[key] - eta * (gaps[key] + eps))
        force = {key: up[key] - down[key] for key in up}
        for y, z in product((0, 1), range(groups)):
            cost = cost_of_decision(rows, force, metric, y, z)
            wrong = cost if y == 0 else -cost  # a wrong decision about label 1 is a zero
            np.testing.assert_allclose(found[t].weights[:, y, z], 1 + wrong, **CLOSE)
        assert found[t].labels is None


@two_or_three
@pytest.mark.parametrize("metric", ["sp", "eop", "eo"])
@pytest.mark.parametrize(("eta", "most"), [(0.5, 5.0), (8.0, 0.6)])
def test_fedfact(metric: str, groups: int, eta: float, most: float) -> None:
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    xi = 0.01
    rule = DualAscent(CATALOG[metric], 2 * xi, rate=eta, most=most)
    found = follow(rule, rows, scores)
    assert_unchanged(found[0], rows)
    keys = list(product((1, -1), range(len(conditions(metric))), range(groups)))
    multipliers = dict.fromkeys(keys, 0.0)
    for t in (1, 2, 3):
        gaps = gaps_from_pooled(rows, decide(scores[t]), metric)
        raised = [max(multipliers[s, v, z] + eta * (s * gaps[v, z] - xi), 0.0) for s, v, z in keys]
        if sum(raised) > most:
            raised = nearest_in_simplex(raised, most)
        multipliers = dict(zip(keys, raised, strict=True))
        force = {key: multipliers[1, *key] - multipliers[-1, *key] for key in gaps}
        matrix = {}
        for y, z in product((0, 1), range(groups)):
            cost = cost_of_decision(rows, force, metric, y, z)
            matrix[y, z] = [1.0 * (y == 0), (y == 1) - cost]
        matrix |= {(y, -1): [1.0 - y, 1.0 * y] for y in (0, 1)}
        low = min(min(row) for row in matrix.values())
        kappa = 1e-5 - low if low < 0 else 0.0
        for (y, z), row in matrix.items():
            mine = found[t].weights[:, y, z, None] * found[t].labels[:, y, z]
            np.testing.assert_allclose(mine, np.tile([m + kappa for m in row], (3, 1)), **CLOSE)
    if most < 1:  # the ball was needed
        assert sum(multipliers.values()) == pytest.approx(most)


@pytest.mark.parametrize("metric", CATALOG)
def test_fedfact_with_three_classes(metric: str) -> None:
    """Costs follow from moving the decision of one row, whatever the metric."""
    rows = draw_rows(2, 3)
    scores = draw_scores(rows)
    rule = DualAscent(CATALOG[metric], 0.0, rate=0.05, most=np.inf)
    state = rule.init(rows.count)
    for probs in scores:
        state = rule.update(state, rows.cohort, rows.report(probs))
    up, down = state[0][:, 0]
    decided = np.eye(3)[scores[-1].argmax(1)]
    onehot = np.eye(3)[rows.y]
    chosen = CATALOG[metric]

    def lagrangian(decisions: np.ndarray) -> float:
        statistics = chosen.statistics(decisions, onehot, np.eye(3)[rows.a, :2]).mean(0)
        pooled = statistics.sum(-1)
        rates = statistics[0] / statistics[1]
        apart = rates - (pooled[0] / pooled[1])[:, None]
        return float(((up - down) * apart).sum())

    terms = rule.terms(state, rows.cohort)
    matrix = terms.weights[..., None] * terms.labels
    for y, z in product(range(3), range(2)):
        row = next(i for i in range(len(rows)) if rows.y[i] == y and rows.a[i] == z)
        costs = []
        for j in range(3):
            step = np.zeros_like(decided)
            step[row, j] = 1e-6
            slope = (lagrangian(decided + step) - lagrangian(decided - step)) / 2e-6
            costs.append(len(rows) * slope)
        expected = np.eye(3)[y] - costs
        shift = matrix[0, y, z] - expected
        np.testing.assert_allclose(shift, shift[0], rtol=0, atol=1e-7)


# AgnosticFair


@two_or_three
@pytest.mark.parametrize(("metric", "labels"), [("sp", (0, 1)), ("eop", (1,))])
def test_agnostic_fair(metric: str, labels: tuple, groups: int) -> None:
    """The labels move by the derivative of n lam sum cov^2 with respect to a row's logit."""
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    found = follow(BoundaryCovariance(CATALOG[metric], 1.7), rows, scores)
    event = [i for i in range(len(rows)) if rows.y[i] in labels and rows.a[i] >= 0]

    def penalty(logits: np.ndarray) -> float:
        total = 0.0
        for g in range(groups):
            share = sum(rows.a[i] == g for i in event) / len(event)
            total += (sum(((rows.a[i] == g) - share) * logits[i] for i in event) / len(event)) ** 2
        return 1.7 * total

    for probs, terms in zip(scores, found, strict=True):
        logits = np.log(probs[:, 1] / probs[:, 0])
        for i in range(len(rows)):
            step = np.zeros(len(rows))
            step[i] = 1e-3
            slope = (penalty(logits + step) - penalty(logits - step)) / 2e-3  # exact: a square
            label = terms.labels[rows.client[i], rows.y[i], rows.a[i]]
            expected = [1 - rows.y[i] + len(rows) * slope, rows.y[i] - len(rows) * slope]
            np.testing.assert_allclose(label, expected, rtol=0, atol=1e-9)


# Methods of each client's own rows: FFALM, PUFFLE, FairTrade


@pytest.mark.parametrize("missing", [False, True])
def test_ffalm(missing: bool) -> None:
    rows = draw_rows(missing=missing)
    scores = draw_scores(rows)
    found = follow(LossParity(0.9, rate=0.4, growth=1.05), rows, scores)
    assert_unchanged(found[0], rows)
    lam = 0.0
    beta, eta = 0.9, 0.4 * 0.9
    for t in (1, 2, 3):
        losses = entropies(rows, scores[t])
        lacking = [missing and k == 2 for k in range(3)]
        apart = [
            0.0
            if lacking[k]
            else rows.mean(losses, client=k, a=0) - rows.mean(losses, client=k, a=1)
            for k in range(3)
        ]
        lam += eta * sum(rows.number(client=k) / len(rows) * apart[k] for k in range(3))
        for k, y in product(range(3), (0, 1)):
            force = 0.0 if lacking[k] else lam + beta * apart[k]
            for z, sign in ((0, 1), (1, -1)):
                share = max(rows.number(client=k, a=z), 1) / rows.number(client=k)
                expected = 1 + sign * force / share
                np.testing.assert_allclose(found[t].weights[k, y, z], expected, **CLOSE)
            assert found[t].weights[k, y, -1] == 1
        beta, eta = beta * 1.05, eta / 1.05


@two_or_three
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("metric", ["sp", "eop"])
def test_puffle(metric: str, missing: bool, groups: int) -> None:
    rows = draw_rows(groups, missing=missing)
    scores = draw_scores(rows, 6)
    target, alpha, momentum = 0.05, 0.4, 0.5
    rule = LocalMomentum(CATALOG[metric], target, alpha=alpha, momentum=momentum)
    found = follow(rule, rows, scores)
    assert_unchanged(found[0], rows)
    (label,) = conditions(metric)

    def rate(score: np.ndarray, z: int, client: int | None) -> float | None:
        chosen = [
            score[i]
            for i in range(len(rows))
            if rows.a[i] == z and label in (None, rows.y[i]) and client in (None, rows.client[i])
        ]
        return sum(chosen) / len(chosen) if chosen else None

    def gap(score: np.ndarray, client: int, overall: list[float]) -> float:
        own = [rate(score, z, client) for z in range(groups)]
        filled = [o if r is None else r for r, o in zip(own, overall, strict=True)]
        return max(filled) - min(filled)

    lam: list[float] = []
    velocity = [0.0] * 3
    for t in range(1, 6):
        score = scores[t][:, 1]
        overall = [rate(score, z, None) for z in range(groups)]
        gaps = [gap(score, k, overall) for k in range(3)]
        if t == 1:
            lam = [max(g - target, 0) / (1 - target) for g in gaps]
        else:
            for k in range(3):
                velocity[k] = momentum * velocity[k] + target - gaps[k]
                lam[k] = min(max(lam[k] - alpha * velocity[k], 0.0), 1.0)
        for i in range(0, len(rows), 7):
            k, y, z = rows.client[i], rows.y[i], rows.a[i]
            np.testing.assert_allclose(found[t].weights[k, y, z], 1 - lam[k], **CLOSE)
            step = np.zeros(len(rows))
            step[i] = 1e-6
            slope = (gap(score + step, k, overall) - gap(score - step, k, overall)) / 2e-6
            price = found[t].price[k, y, z]
            expected = lam[k] * rows.number(client=k) * slope
            np.testing.assert_allclose(price[1] - price[0], expected, rtol=0, atol=1e-7)


@two_or_three
def test_fairtrade(groups: int) -> None:
    """Each client's price is the derivative of lam sum_g (m_g - m)^2 on its own rows."""
    rows = draw_rows(groups)
    probs = draw_scores(rows)[0]
    rule = squared_deviations(CATALOG["sp"], 3.0)
    report = rows.report(probs)
    price = Objective(local_penalties=(rule,)).local_price(
        report.sums, run=np.zeros(3, np.int64), classes=2
    )

    def penalty(score: np.ndarray, k: int) -> float:
        mine = [i for i in range(len(rows)) if rows.client[i] == k and rows.a[i] >= 0]
        overall = sum(score[i] for i in mine) / len(mine)
        total = 0.0
        for z in range(groups):
            of_group = [score[i] for i in mine if rows.a[i] == z]
            total += (sum(of_group) / len(of_group) - overall) ** 2
        return 3.0 * total

    score = probs[:, 1]
    for i in range(len(rows)):
        k, y, z = rows.client[i], rows.y[i], rows.a[i]
        step = np.zeros(len(rows))
        step[i] = 1e-3
        slope = (penalty(score + step, k) - penalty(score - step, k)) / 2e-3
        found = price[k, y, z, 1] - price[k, y, z, 0]
        np.testing.assert_allclose(found, rows.number(client=k) * slope, rtol=0, atol=1e-9)


# Losses of groups: FedMinMax and bounded group loss


@two_or_three
@pytest.mark.parametrize("eta", [0.05, 30.0])
def test_fedminmax(groups: int, eta: float) -> None:
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    found = follow(MinimaxGroups(eta), rows, scores)
    np.testing.assert_allclose(found[0].weights, 1.0, **CLOSE)
    rho = [rows.number(a=z) / known_rows(rows) for z in range(groups)]
    mu = rho
    for t in (1, 2, 3):
        losses = entropies(rows, scores[t])
        raised = [mu[z] + eta * rows.mean(losses, a=z) for z in range(groups)]
        mu = nearest_in_simplex(raised, 1.0, least=1e-3)
        for y, z in product((0, 1), range(groups)):
            np.testing.assert_allclose(found[t].weights[:, y, z], mu[z] / rho[z], **CLOSE)
        assert (found[t].weights[:, :, -1] == 1).all()
    if eta > 1:  # the floor was needed
        assert min(mu) == FLOOR


@two_or_three
def test_bounded_group_loss(groups: int) -> None:
    rows = draw_rows(groups)
    scores = draw_scores(rows)
    rule = BoundedGroupLoss(0.4, most=1.5, rate=0.7)
    found = follow(rule, rows, scores)
    assert_unchanged(found[0], rows)
    theta = [0.0] * groups
    for t in (1, 2, 3):
        losses = entropies(rows, scores[t])
        theta = [theta[z] + 0.7 * (rows.mean(losses, a=z) - 0.4) for z in range(groups)]
        total = 1 + sum(np.exp(theta[z]) for z in range(groups))
        for y, z in product((0, 1), range(groups)):
            share = rows.number(a=z) / len(rows)
            expected = 1 + 1.5 * np.exp(theta[z]) / total / share
            np.testing.assert_allclose(found[t].weights[:, y, z], expected, **CLOSE)


# Weights of clients: AFL, q-FFL, FADE


def weigh(rule, rows: Rows, losses: list, *, moves=None, reports: list | None = None) -> list:
    """The coefficients of the clients in each round."""
    cohort = rows.cohort
    sizes = np.array([[rows.number(client=k) for k in range(3)]])
    state = rule.init(sizes)
    found = []
    for t, each in enumerate(losses):
        sums = None if reports is None else reports[t].sums
        local = LocalResults(sums, None, np.ones(3), np.array(each), moves)
        weights, state = rule.coefficients(state, cohort, local)
        found.append(weights)
    return found


def test_afl() -> None:
    rows = draw_rows()
    losses = [[0.9, 0.4, 0.6], [0.8, 0.5, 0.3], [2.0, 0.1, 0.2], [0.1, 0.1, 5.0]]
    found = weigh(WorstClient(0.4), rows, losses)
    weights = [1 / 3] * 3
    np.testing.assert_allclose(found[0], weights, **CLOSE)
    for t in (1, 2, 3):
        weights = nearest_in_simplex([w + 0.4 * f for w, f in zip(weights, losses[t], strict=True)])
        np.testing.assert_allclose(found[t], weights, **CLOSE)
    assert min(weights) == 0


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_qffl(q: float) -> None:
    rows = draw_rows()
    losses, moves, lr = [0.9, 0.4, 0.6], np.array([0.3, 0.02, 0.5]), 0.25
    (found,) = weigh(PowerOfLosses(q, lr=lr), rows, [losses], moves=moves)
    shares = [rows.number(client=k) / len(rows) for k in range(3)]
    h = [q * f ** (q - 1) * move / lr**2 + f**q / lr for f, move in zip(losses, moves, strict=True)]
    below = sum(w * each for w, each in zip(shares, h, strict=True))
    expected = [w * f**q / lr / below for w, f in zip(shares, losses, strict=True)]
    np.testing.assert_allclose(found, expected, **CLOSE)
    if q == 0:
        np.testing.assert_allclose(found, shares, **CLOSE)


def test_qffl_without_loss_is_finite() -> None:
    rows = draw_rows()
    for q in (0.0, 0.5, 2.0):
        (found,) = weigh(PowerOfLosses(q), rows, [[0.0, 0.0, 0.4]], moves=np.zeros(3))
        assert np.isfinite(found).all()


def signed_gaps(rows: Rows, probs: np.ndarray) -> list[float]:
    """Each client's rate of decisions of the group that is highest overall minus the lowest."""
    positive = decide(probs)
    overall = [rows.mean(positive, a=z) for z in range(rows.groups)]
    high, low = int(np.argmax(overall)), int(np.argmin(overall))
    return [
        rows.mean(positive, client=k, a=high) - rows.mean(positive, client=k, a=low)
        if rows.number(client=k, a=high) and rows.number(client=k, a=low)
        else 0.0
        for k in range(3)
    ]


@two_or_three
@pytest.mark.parametrize("missing", [False, True])
def test_fade(groups: int, missing: bool) -> None:
    """The weights are those that a general solver finds for the quadratic program."""
    rows = draw_rows(groups, missing=missing)
    solved = 0
    for seed in range(12):
        probs = draw_scores(rows, 1, seed=seed)[0]
        if seed % 2:  # opposing gaps
            probs = np.where((rows.client == 0)[:, None], probs[:, ::-1], probs)
        gaps = np.array(signed_gaps(rows, probs))
        (found,) = weigh(
            CancelingWeights(CATALOG["sp"]), rows, [[0.0] * 3], reports=[rows.report(probs)]
        )
        assert found.min() >= 0 and found.sum() == pytest.approx(1)
        if gaps.min() < -1e-3 and gaps.max() > 1e-3:
            best = minimize(
                lambda w: 10 * ((w - 1 / 3) ** 2).sum(),
                np.ones(3) / 3,
                method="SLSQP",
                bounds=[(0, 1)] * 3,
                constraints=[
                    {"type": "eq", "fun": lambda w, gaps=gaps: w @ gaps},
                    {"type": "eq", "fun": lambda w: w.sum() - 1},
                ],
                options={"ftol": 1e-14},
            )
            np.testing.assert_allclose(found, best.x, rtol=0, atol=1e-5)
            solved += 1
        elif gaps.min() > 1e-3 or gaps.max() < -1e-3:  # infeasible
            assert found[np.argmin(np.abs(gaps))] > 0.99
    assert solved >= 2


def test_fade_shares_its_weights_with_those_by_size() -> None:
    rows = draw_rows()
    reports = [rows.report(draw_scores(rows)[0])]
    all_, half, none = (
        weigh(CancelingWeights(CATALOG["sp"], beta), rows, [[0.0] * 3], reports=reports)[0]
        for beta in (1.0, 0.5, 0.0)
    )
    np.testing.assert_array_equal(none, rows.cohort.weight)
    np.testing.assert_allclose(half, (all_ + none) / 2, **CLOSE)


def test_fednova_passes_on_what_a_weighting_reads() -> None:
    for inner in (WorstClient(), PowerOfLosses()):
        outer = FedNova(inner)
        assert outer.reads_losses
        assert outer.reads_moves == isinstance(inner, PowerOfLosses)
    assert not FedNova().reads_losses and not FedNova().reads_moves


def test_the_mean_of_iterates() -> None:
    server = IterateAverage()
    params = np.array([[1.0, 2.0]])
    state = server.init(params)
    seen = []
    for update in ([[0.5, 0.0]], [[0.5, 1.0]], [[-1.0, 2.0]]):
        params, state = server.step(state, params, np.array(update))
        seen.append(params)
    np.testing.assert_allclose(params, [[1.0, 5.0]])
    np.testing.assert_allclose(server.result(state), sum(seen) / 3)


# What methods cannot do


def test_metrics_that_methods_refuse() -> None:
    for name, wrong in (("fedfb", "acc"), ("agnostic-fair", "eo"), ("fedfb", "fpr")):
        with pytest.raises(FedgftError, match=f"{name} takes .* not {wrong}") as caught:
            get_method(name, CATALOG[wrong], 0.1)
        assert caught.value.field == "metric" and "\n" not in str(caught.value)


def test_classes_and_groups_that_methods_refuse() -> None:
    three = np.ones((1, 2, 3, 3))
    for name in ("fedfb", "fairgrad", "agnostic-fair"):
        (rule,) = get_method(name, CATALOG["sp"], 0.1).objective.loss_rules
        with pytest.raises(FedgftError, match="two classes, and there are 3"):
            rule.init(three)
    (rule,) = get_method("ffalm", CATALOG["sp"], 0.1).objective.loss_rules
    with pytest.raises(FedgftError, match="compares two groups, and there are 4"):
        rule.init(np.ones((1, 2, 2, 5)))

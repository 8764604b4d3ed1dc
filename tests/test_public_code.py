"""Published methods against numbers that their public programs gave for the same losses and rates.

The lines of each public program were run as they are, on the inputs below; only their numbers are
here. Where the public program has an error, or takes another order of steps, only the line that is
shared is compared.
"""

import numpy as np
import pytest

from fedgft.algorithms import Cohort
from fedgft.algorithms.afl import WorstClient
from fedgft.algorithms.fade import cancel
from fedgft.algorithms.fairgrad import ErrorWeights
from fedgft.algorithms.fedfact import DualAscent, project_to_ball
from fedgft.algorithms.fedfb import FairBatchWeights
from fedgft.algorithms.fedminmax import MinimaxGroups
from fedgft.algorithms.ffalm import LossParity
from fedgft.algorithms.loss_rules import ClientReports
from fedgft.algorithms.puffle import LocalMomentum
from fedgft.algorithms.qffl import PowerOfLosses
from fedgft.algorithms.weightings import LocalResults
from fedgft.metrics import CATALOG
from fedgft.sums import Sums
from given_reports import public_cells

# mean losses of the cells (0,0), (0,1), (1,0), (1,1) in five rounds
LOSSES = [
    [0.10, 0.18, 1.30, 0.80],
    [0.12, 0.17, 1.15, 0.79],
    [0.14, 0.17, 1.05, 0.80],
    [0.15, 0.16, 0.98, 0.82],
    [0.16, 0.16, 0.92, 0.83],
]
# shares of right decisions of the same cells
RIGHT = [
    [0.98, 0.93, 0.30, 0.55],
    [0.97, 0.92, 0.35, 0.56],
    [0.96, 0.92, 0.41, 0.55],
    [0.955, 0.93, 0.46, 0.54],
    [0.95, 0.93, 0.50, 0.53],
]


def weights_of(rule, *, losses: list | None = None, right: list | None = None) -> list[np.ndarray]:
    """The row weights (label, group) after each round; the untrained model comes first."""
    rounds = len(losses or right or ())
    given = [public_cells((losses or LOSSES)[t], right and right[t]) for t in range(rounds)]
    count, cohort, first = given[0]
    state = rule.update(rule.init(count), cohort, first)
    found = []
    for _, _, report in given:
        state = rule.update(state, cohort, report)
        found.append(rule.terms(state, cohort).weights[0, :, :2])
    return found


def test_fedfb_for_statistical_parity() -> None:
    """UW-Madison-Lee-Lab/Improving-Fairness-via-Federated-Learning, DP_server.py, one client.

    Its weights of label 0 are right; those of label 1 use the bound of group 0 for all groups, so
    they are compared with 2 n_z / n minus the weight of label 0.
    """
    expected = [
        [0.481015037593985, 0.518984962406015],
        [0.45820685645646403, 0.5417931435435359],
        [0.44584808791223196, 0.5541519120877679],
        [0.44014132099493875, 0.5598586790050611],
        [0.4379725031821758, 0.562027496817824],
    ]
    share = np.array([0.525, 0.475])  # n_z / n
    found = weights_of(FairBatchWeights(CATALOG["sp"], 0.3), losses=LOSSES)
    for weights, negatives in zip(found, expected, strict=True):
        np.testing.assert_allclose(weights[0] * share, negatives, rtol=1e-12)
        np.testing.assert_allclose(weights[1] * share, 2 * share - negatives, rtol=1e-12)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (
            0.05,
            [
                [0.1, 0.2],
                [0.11272792206135782, 0.18727207793864217],
                [0.11994480042622813, 0.18005519957377186],
                [0.12394480042622813, 0.17605519957377186],
                [0.12595726160597795, 0.17404273839402204],
            ],
        ),
        (0.3, [[0.225, 0.075], [0.3, 0.0], [0.3, 0.0], [0.3, 0.0], [0.3, 0.0]]),
    ],
)
def test_fedfb_for_equal_opportunity(alpha: float, expected: list) -> None:
    """yzeng58/Fairness-aware-FL, EO/Server.py, FBVariant."""
    share = np.array([0.075, 0.225])  # m_1z / n
    found = weights_of(FairBatchWeights(CATALOG["eop"], alpha), losses=LOSSES)
    for weights, each in zip(found, expected, strict=True):
        np.testing.assert_allclose(weights[1] * share, each, rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights[0], 1.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            "sp",
            [
                [[0.995789, 1.004655], [1.004211, 0.995345]],
                [[0.991577, 1.009310], [1.008423, 0.990690]],
                [[0.989184, 1.011954], [1.010816, 0.988046]],
                [[0.984781, 1.016821], [1.015219, 0.983179]],
                [[0.983298, 1.018460], [1.016702, 0.981540]],
            ],
        ),
        (
            "eop",
            [
                [[1.0, 1.0], [1.018519, 0.993827]],
                [[1.0, 1.0], [1.037037, 0.987654]],
                [[1.0, 1.0], [1.018519, 0.993827]],
                [[1.0, 1.0], [1.018519, 0.993827]],
                [[1.0, 1.0], [1.0, 1.0]],
            ],
        ),
        (
            "eo",
            [
                [[0.999466, 1.000961], [1.018519, 0.993827]],
                [[0.998932, 1.001923], [1.037037, 0.987654]],
                [[0.999199, 1.001442], [1.018519, 0.993827]],
                [[0.997997, 1.003605], [1.018519, 0.993827]],
                [[0.999599, 1.000721], [1.0, 1.0]],
            ],
        ),
    ],
)
def test_fairgrad(metric: str, expected: list) -> None:
    """saist1993/fairgrad, FairnessLoss: the weight W_k / P_k of a row, fairness rate 0.01.

    Its cells hold 18, 10, 3 and 9 rows, which are the same shares as 900, 500, 150 and 450. For
    statistical parity it counts each condition twice, for decisions of 1 and of 0.
    """
    right = [[17, 9, 1, 5], [17, 9, 1, 5], [16, 9, 2, 5], [16, 8, 2, 6], [15, 9, 2, 5]]
    shares = [[r / n for r, n in zip(each, (18, 10, 3, 9), strict=True)] for each in right]
    eta = 0.02 if metric == "sp" else 0.01
    found = weights_of(ErrorWeights(CATALOG[metric], eta, slack=0.0), right=shares)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("metric", "expected"),  # W_k of (0,0), (0,1), (1,0), (1,1)
    [
        (
            "sp",
            [
                [0.246034, 0.375242, 0.108994, 0.112282],
                [0.046979, 0.497469, 0.142170, 0.002278],
                [-0.133275, 0.608152, 0.172213, -0.097336],
            ],
        ),
        (
            "eop",
            [
                [0.45, 0.25, 0.231249, 0.068751],
                [0.45, 0.25, 0.362498, -0.062498],
                [0.45, 0.25, 0.449997, -0.149997],
            ],
        ),
        (
            "eo",
            [
                [0.422960, 0.277040, 0.231249, 0.068751],
                [0.395920, 0.304080, 0.362498, -0.062498],
                [0.374289, 0.325711, 0.449997, -0.149997],
            ],
        ),
    ],
)
def test_fairgrad_in_declearn(metric: str, expected: list) -> None:
    """declearn 2.9.1, FairgradWeightsController with eta = 1 and eps = 1e-6: the weights W_k."""
    eta, slack = (2.0, 1e-6) if metric == "sp" else (1.0, 1e-6)
    found = weights_of(ErrorWeights(CATALOG[metric], eta, slack), right=RIGHT[:3])
    share = np.array([[0.45, 0.25], [0.075, 0.225]])
    reached = [(each * share).ravel() for each in found]
    np.testing.assert_allclose(reached, expected, rtol=0, atol=2e-6)


def matrix_of(metric: str, force: np.ndarray) -> np.ndarray:
    """FedFACT's matrices M (group, label, class) for given multipliers (v, g)."""
    rule = DualAscent(CATALOG[metric], rate=0.0, most=np.inf)
    count, cohort, report = public_cells(LOSSES[0], RIGHT[0])
    multipliers = np.stack((np.maximum(force, 0), np.maximum(-force, 0)))[:, None]
    state = rule.update((multipliers, *rule.init(count)[1:3], 1), cohort, report)
    terms = rule.terms(state, cohort)
    return np.swapaxes((terms.weights[..., None] * terms.labels)[0], 0, 1)[:2]


def test_matrices_of_fedfact() -> None:
    """liizhang/OptFair-Multi-Class-Fairness, get_cal_matrix: by the first author of FedFACT.

    Its multipliers have the opposite sign, and there is one for each of two classes; with the one
    of class 0 left out, what the other adds to the column of class 1 is the same. What makes all
    entries positive depends on both, so differences of entries are compared.
    """
    found = matrix_of("eop", np.array([[-0.06, 0.04]]))
    expected = [[[1.0, 0.0], [0.0, 1.7333333015]], [[1.0, 0.0], [0.0, 0.7555555509]]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
    columns = {
        "sp": [[0.0081303008, 1.0081303008], [0.1494836842, 1.1494836842]],
        "eo": [[0.0000100000, 1.6476290229], [0.2266766684, 0.8920734915]],
    }
    forces = {"sp": [[0.03, -0.04]], "eo": [[0.03, -0.04], [-0.05, 0.02]]}
    for metric, column in columns.items():
        found = matrix_of(metric, np.array(forces[metric]))[..., 1]
        expected = np.array(column)
        np.testing.assert_allclose(found - found[0, 0], expected - expected[0, 0], atol=1e-7)


def test_fedfact_projects_onto_the_ball_as_its_author_does() -> None:
    """OptFair, prox_l1_plus_l1ball of (3, -2, 0.5, 0.1) with eta xi = 0.0005 and B = 2."""
    shrunk = np.array([[2.9995, 0.0, 0.4995, 0.0995], [0.0, 1.9995, 0.0, 0.0]])[:, None, None]
    up, down = project_to_ball(shrunk, 2.0)[:, 0, 0]
    np.testing.assert_allclose(up - down, [1.5, -0.5, 0.0, 0.0], atol=1e-12)
    small = np.array([[0.2995, 0.0, 0.0495, 0.0], [0.0, 0.1995, 0.0, 0.0]])[:, None, None]
    np.testing.assert_array_equal(project_to_ball(small, 2.0), small)


def test_fade() -> None:
    """Akram275/Fairness-FL, fade_utils.Optimize_weights."""
    rounds = [
        (
            [0.12, -0.05, 0.2, -0.1, 0.02],
            [0.148135840, 0.255659118, 0.097536607, 0.287283626, 0.211384809],
        ),
        ([0.3, 0.2, -0.1, 0.1, 0.05], [0.0, 0.066666669, 0.466666657, 0.199999967, 0.266666708]),
        (
            [-0.2, -0.1, 0.05, 0.01, 0.4],
            [0.235781760, 0.220358591, 0.197223826, 0.203393101, 0.143242722],
        ),
        ([0.02, 0.03, -0.01, -0.04, 0.0], [0.2] * 5),
    ]
    for gaps, expected in rounds:
        found = cancel(np.array(gaps), np.ones(5, bool))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert found @ gaps == pytest.approx(0, abs=1e-9)


def one_run(shares: list[float]) -> Cohort:
    clients = np.arange(len(shares))
    bounds = np.array([0, len(shares)])
    return Cohort(0 * clients, clients, np.array(shares), bounds, full=True)


def test_afl() -> None:
    """litian96/fair_flearn, afl.py: lambda, with a step of 0.1."""
    losses = [[0.9, 0.4], [0.8, 0.42], [0.7, 0.44], [0.65, 0.45], [0.3, 0.9]]
    expected = [[0.525, 0.475], [0.544, 0.456], [0.557, 0.443], [0.567, 0.433], [0.537, 0.463]]
    rule = WorstClient(0.1)
    cohort = one_run([0.5, 0.5])
    state = rule.init(np.array([[10, 10]]))
    nothing = LocalResults(None, None, np.ones(2), np.array([3.0, 1.0]))
    found, state = rule.coefficients(state, cohort, nothing)  # of the untrained model
    np.testing.assert_array_equal(found, [0.5, 0.5])
    for each, weights in zip(losses, expected, strict=True):
        local = LocalResults(None, None, np.ones(2), np.array(each))
        found, state = rule.coefficients(state, cohort, local)
        np.testing.assert_allclose(found, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (0.0, [[0.4825, -0.995, 0.095], [0.46325, -0.9895, 0.09]]),
        (
            1.0,
            [
                [0.4780178131520913, -0.9893879097980841, 0.08938790979808409],
                [0.4549063836210394, -0.9789390642634882, 0.07988895931208782],
            ],
        ),
        (
            5.0,
            [
                [0.47295026618237834, -0.9821747249678392, 0.08217472496783917],
                [0.4444208368323247, -0.9636574824045878, 0.06534086809215611],
            ],
        ),
    ],
)
def test_qffl(q: float, expected: list) -> None:
    """litian96/fair_flearn, qffedavg.py with lr = 0.1; clients are equally likely."""
    rounds = [
        ([0.9, 0.4], [[-0.03, 0.02, -0.02], [-0.005, -0.01, 0.01]]),
        ([0.8, 0.42], [[-0.033, 0.022, -0.02], [-0.0055, -0.011, 0.01]]),
    ]
    params = np.array([0.5, -1.0, 0.1])
    rule = PowerOfLosses(q, lr=0.1)
    rule.init(np.array([[1, 1]]))
    for (losses, moves), model in zip(rounds, expected, strict=True):
        squared = np.square(moves).sum(1)
        local = LocalResults(None, None, np.ones(2), np.array(losses), squared)
        found, _ = rule.coefficients(None, one_run([0.5, 0.5]), local)
        params = params + found @ np.array(moves)
        np.testing.assert_allclose(params, model, rtol=0, atol=1e-8)


def reports_by_group(count: list, losses: np.ndarray) -> ClientReports:
    """Reports with counts and summed losses (client, group), all of label 0."""
    table = np.zeros((len(count), 2, 3))
    table[:, 0, :2] = count
    summed = np.zeros_like(table)
    summed[:, 0, :2] = losses * np.array(count)
    scores = np.stack((table, 0 * table), axis=-1)
    return ClientReports(Sums(table, scores, scores), summed)


def test_fedminmax() -> None:
    """BastiSrd/FairnessBenchmarkingFL, agg_Origfedminmax with lr_mu = 0.05, in single precision."""
    count = [[700.0, 300.0], [350.0, 650.0]]
    risks = [
        [[0.5, 0.9], [0.4, 0.7]],
        [[0.45, 0.8], [0.4, 0.72]],
        [[0.44, 0.76], [0.41, 0.66]],
        [[0.45, 0.7], [0.42, 0.62]],
        [[0.47, 0.6], [0.45, 0.58]],
    ]
    expected = [
        [0.98588145, 1.01560497],
        [0.97102761, 1.03202236],
        [0.95857149, 1.04578960],
        [0.94879705, 1.05659282],
        [0.94294077, 1.06306553],
    ]
    rule = MinimaxGroups(0.05)
    cohort = one_run([0.5, 0.5])
    first = reports_by_group(count, np.array(risks[0]))
    state = rule.update(rule.init(first.sums.count[None]), cohort, first)
    for each, weights in zip(risks, expected, strict=True):
        state = rule.update(state, cohort, reports_by_group(count, np.array(each)))
        found = rule.terms(state, cohort).weights[:, :, :2]
        np.testing.assert_allclose(found, np.broadcast_to(weights, found.shape), atol=1e-6)


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.5, 0.6, 0.1], [0.4333333, 0.5333334, 0.0333333]),
        ([1.5, -0.2, 0.1], [0.998, 0.001, 0.001]),
        ([0.01, 0.02, 0.97], [0.01, 0.02, 0.97]),
        ([3.0, 0.0, 0.0], [0.998, 0.001, 0.001]),
    ],
)
def test_fedminmax_projects_as_its_public_code(point: list, nearest: list) -> None:
    """BastiSrd/FairnessBenchmarkingFL, project_simplex with the floor 1e-3."""
    rule = MinimaxGroups(1.0)
    count = np.ones((1, 1, 2, 4))
    zeros = np.zeros((1, 2, 4))
    report = ClientReports(Sums(count[0], np.zeros((1, 2, 4, 2)), np.zeros((1, 2, 4, 2))), zeros)
    _, *rest, _ = rule.init(count)
    state = rule.update((np.array([point]), *rest, 1), one_run([1.0]), report)
    np.testing.assert_allclose(state[0], [nearest], rtol=0, atol=1e-6)


def test_ffalm() -> None:
    """gwmdunda/FairFedAvgALM: lam + eta (L_0 - L_1) with lam .3, eta 2, losses .55 and .75.

    One client, because the public server adds up several clients one after another.
    """
    rule = LossParity(5.0, rate=0.4)
    count = [[2.0, 2.0]]
    report = reports_by_group(count, np.array([[0.55, 0.75]]))
    _, *rest, _ = rule.init(report.sums.count[None])
    state = rule.update((np.array([0.3]), *rest, 1), one_run([1.0]), report)
    assert state[0] == pytest.approx([-0.1])


@pytest.mark.parametrize(
    ("alpha", "momentum", "target", "first", "expected"),
    [
        (0.5, 0.9, 0.05, 0.1, [0.225, 0.4225, 0.65025, 0.875225, 1, 1, 1]),
        (1.0, 0.0, 0.05, 0.0, [0.25, 0.42, 0.52, 0.56, 0.53, 0.49, 0.45]),
        (4.0, 0.5, 0.12, 0.3, [1, 1, 1, 1, 0.665, 0.0575, 0]),
    ],
)
def test_puffle(alpha: float, momentum: float, target: float, first: float, expected: list) -> None:
    """lucacorbucci/PUFFLE, learning.py: lambda after the violations of seven batches.

    Here a step is taken once per round.
    """
    rule = LocalMomentum(CATALOG["sp"], target, alpha=alpha, momentum=momentum)
    cohort = one_run([1.0])
    count = np.zeros((1, 2, 3))
    count[:, :, :2] = 50.0
    share, velocity, *rest, _ = rule.init(count[None])
    state = (np.full_like(share, first), velocity, *rest, 1)
    for gap, lam in zip([0.3, 0.22, 0.15, 0.09, 0.02, 0.01, 0.01], expected, strict=True):
        score = count[..., None] * 0.5 * np.ones(2)
        score[:, :, 0, 1] += 50.0 * gap
        score[:, :, 0, 0] -= 50.0 * gap
        state = rule.update(state, cohort, ClientReports(Sums(count, score, score)))
        assert state[0] == pytest.approx(lam, abs=1e-12)
        weights = rule.terms(state, cohort).weights
        np.testing.assert_allclose(weights, 1 - lam, rtol=0, atol=1e-12)

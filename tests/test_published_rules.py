"""LoGoFair, FedFACT and the LP of Duan et al.: beside their formulas, written out here."""

import json

import numpy as np
import polars as pl
import pytest
from scipy.optimize import linprog, minimize
from sklearn.linear_model import LogisticRegression

import fedgft
from fedgft import FedgftError, get_metric
from fedgft.data.dataset import Dataset, Federation
from fedgft.rules.beta_calibration import BetaCalibration
from fedgft.rules.federation_rule import FIXED_KEY, fit_rule, merge_sites
from fedgft.rules.fedfact_rule import FedFactDual, fit_fedfact_rule, project
from fedgft.rules.logofair import LoGoFairDual, fit_logofair
from fedgft.rules.priced_rule import ClientRows
from fedgft.study import Study, get_protocol
from fedgft.study.post_processing import check_rules
from test_cli import run
from test_rule_estimators import make_people

SP, EOP, EO, FPR = (get_metric(name) for name in ("sp", "eop", "eo", "fpr"))
NAMES = ("f", "m", "x")


def make_federation(
    rows: int = 4000, sites: int = 3, groups: int = 2, seed: int = 0
) -> tuple[Federation, np.ndarray]:
    """Rows whose scores are calibrated: labels are drawn from them. Groups' scores differ."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, groups, rows)
    site = rng.integers(0, sites, rows)
    logit = rng.normal(size=rows) + 0.9 * group - 0.8 + 0.4 * (site - 1) * (2 * group - 1)
    score = 1 / (1 + np.exp(-logit))
    label = (rng.random(rows) < score).astype(int)
    data = Dataset(
        features=logit[:, None].astype(np.float32),
        labels=label,
        groups=group,
        classes=("0", "1"),
        group_names=NAMES[:groups],
        columns=("logit",),
        name="drawn",
    )
    order = np.argsort(site, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(site, minlength=sites))))
    return Federation(data, order, offsets, order[:0]), score


def owners(federation: Federation) -> np.ndarray:
    """(n,) the site of each row."""
    found = np.empty(len(federation.dataset), int)
    found[federation.rows] = np.repeat(np.arange(federation.num_clients), federation.sizes)
    return found


def decide(rule: fedgft.DecisionRule, federation: Federation, score: np.ndarray) -> np.ndarray:
    names = np.array(federation.dataset.group_names)[federation.dataset.groups].tolist()
    sites = [f"client {k}" for k in owners(federation)] if rule.per_site else None
    given = score if rule.reads == "score" else score >= 0.5
    return rule.probabilities(given, names, sites=sites)


def gap_of(chance: np.ndarray, group: np.ndarray) -> float:
    return float(np.ptp([chance[group == g].mean() for g in np.unique(group)]))


# Beta calibration


def test_calibration_is_a_logistic_regression_on_logarithms() -> None:
    rng = np.random.default_rng(1)
    p = rng.beta(2, 3, 3000)
    y = (rng.random(3000) < p**2 / (p**2 + 0.6 * (1 - p))).astype(int)
    found = BetaCalibration.fit(p, y)
    other = LogisticRegression(C=1e12, tol=1e-12, max_iter=10_000)
    other.fit(np.stack((np.log(p), -np.log(1 - p)), 1), y)
    assert np.allclose([found.a, found.b], other.coef_[0], atol=1e-3)
    assert found.c == pytest.approx(other.intercept_[0], abs=1e-3)
    assert np.allclose(
        found(p), other.predict_proba(np.stack((np.log(p), -np.log(1 - p)), 1))[:, 1]
    )


def test_calibration_never_falls_and_is_inverted() -> None:
    rng = np.random.default_rng(2)
    p = rng.random(500)
    against = BetaCalibration.fit(p, (rng.random(500) > p).astype(int))
    assert against.a >= 0 and against.b >= 0
    assert BetaCalibration.fit(p, np.ones(500, int)) == BetaCalibration()
    bent = BetaCalibration(2.0, 0.5, -0.3)
    for value in (0.01, 0.3, 0.9):
        assert float(bent(np.array([bent.invert(value)]))[0]) == pytest.approx(value)
    assert bent.invert(0.0) == 0 and bent.invert(1.0) == np.inf
    assert BetaCalibration(0.0, 0.0, 1.0).invert(0.5) == 0
    assert BetaCalibration(0.0, 0.0, -1.0).invert(0.5) == np.inf


# LoGoFair


def logofair_h(
    federation: Federation,
    eta: np.ndarray,
    site: int,
    lam: np.ndarray,
    mu: np.ndarray,
    delta: tuple[float, float],
    metric: str,
) -> float:
    """H_c as the paper prints it, row by row; lam (v,), and mu (v,) is mu1 - mu2."""
    data = federation.dataset
    group, label, owner = data.groups, data.labels, owners(federation)
    n, total = len(label), 0.0
    for a, sign in ((0, 1), (1, -1)):
        mine = np.flatnonzero((owner == site) & (group == a))
        pi = len(mine) / n
        for e in eta[mine]:
            margin = pi * (2 * e - 1)
            if metric == "sp":
                margin -= sign * (lam[0] * pi / (group == a).mean() + mu[0])
            else:  # the label 0, then 1
                for v, c in ((0, 1 - e), (1, e)):
                    event = label == v
                    in_all = ((group == a) & event).mean()
                    in_site = ((group == a) & (owner == site) & event).mean()
                    margin -= sign * pi * c * (lam[v] / in_all + mu[v] / in_site)
            total += np.logaddexp(0, 1000 * margin) / 1000 / len(mine)
    charge = delta[0] * np.abs(lam).sum() / federation.num_clients
    return float(total + charge + delta[1] * np.abs(mu).sum())


def dual_of(
    federation: Federation, score: np.ndarray, metric: fedgft.Metric, local: float | None = 0.03
) -> LoGoFairDual:
    limits = {} if local is None else {metric: local}
    rows = ClientRows.of(federation, score, target={metric: 0.02}, local=limits, method="x")
    return LoGoFairDual(rows, score[federation.rows])


@pytest.mark.parametrize("metric", [SP, EO])
def test_the_dual_of_logofair_is_that_of_the_paper(metric: fedgft.Metric) -> None:
    federation, score = make_federation(300)
    dual = dual_of(federation, score, metric)
    conditions = len(dual.limits)
    rng = np.random.default_rng(3)
    lam = rng.normal(size=(3, conditions)) * 0.05
    net = rng.normal(size=(3, conditions)) * 0.02
    mu = np.stack((np.maximum(net, 0), np.maximum(-net, 0)))
    order = [0, 1] if metric is SP or dual.rows.units[0, 1] == 0 else [1, 0]  # labels 0, 1
    order = order[:conditions]
    for site, value in enumerate(dual.values(lam, mu)):
        given = (lam[site][order], net[site][order])
        wanted = logofair_h(federation, score, site, *given, (0.02, 0.03), metric.name)
        assert value == pytest.approx(wanted, abs=1e-12)
    step = 1e-7
    for v in range(conditions):  # finite differences
        moved = lam + step * (np.arange(conditions) == v)
        slope = (dual.values(moved, mu) - dual.values(lam, mu)) / step
        assert np.allclose(slope, dual.slope_in_lam(lam, mu)[:, v], atol=1e-4)
        for side in range(2):
            moved_mu = mu.copy()
            moved_mu[side, :, v] += step
            slope = (dual.values(lam, moved_mu) - dual.values(lam, mu)) / step
            assert np.allclose(slope, dual.slope_in_mu(lam, mu)[side, :, v], atol=1e-4)


class PlainSite:
    """One site of LoGoFair for statistical parity, as the paper prints it."""

    def __init__(self, federation: Federation, eta: np.ndarray, site: int) -> None:
        group = federation.dataset.groups
        self.eta = [eta[(owners(federation) == site) & (group == a)] for a in range(2)]
        self.pi = [len(each) / len(eta) for each in self.eta]
        self.p = [float((group == a).mean()) for a in range(2)]
        self.mu = [0.5, 0.5]

    def rates(self, lam: float, *, smooth: bool) -> list[float]:
        """The (smoothed) share of accepted rows of both groups."""
        found = []
        for a, sign in ((0, 1), (1, -1)):
            spent = sign * (lam * self.pi[a] / self.p[a] + self.mu[0] - self.mu[1])
            margin = self.pi[a] * (2 * self.eta[a] - 1) - spent
            chance = 1 / (1 + np.exp(-1000 * margin)) if smooth else margin > 0
            found.append(float(chance.mean()))
        return found

    def move_mu(self, lam: float, steps: int, *, smooth: bool) -> None:
        for _ in range(steps):
            first, second = self.rates(lam, smooth=smooth)
            self.mu[0] *= np.exp(-0.005 * (0.03 - first + second))
            self.mu[1] *= np.exp(-0.005 * (0.03 + first - second))

    def move_lam(self, lam: float) -> float:
        for _ in range(20):
            first, second = self.rates(lam, smooth=True)
            slope = -self.pi[0] / self.p[0] * first + self.pi[1] / self.p[1] * second
            lam -= 0.025 * (slope + 0.02 * np.sign(lam) / 3)
        return lam


def test_two_rounds_of_logofair_written_out() -> None:
    """20 steps of mu, 20 of lam, an average, 100 steps of mu with max(0, x)."""
    federation, score = make_federation(400)
    dual = dual_of(federation, score, SP)
    (found,), mu = dual.minimize(2)
    sites = [PlainSite(federation, score, k) for k in range(3)]
    lam = 0.01
    for _ in range(2):
        for site in sites:
            site.move_mu(lam, 20, smooth=True)
        lam = float(np.mean([site.move_lam(lam) for site in sites]))
        for site in sites:
            site.move_mu(lam, 100, smooth=False)
    assert found == pytest.approx(lam, abs=1e-12)
    assert np.allclose(mu[:, 0], [site.mu[0] - site.mu[1] for site in sites], atol=1e-12)
    assert abs(lam - 0.01) > 0.001


@pytest.mark.slow
def test_thresholds_of_logofair_follow_from_the_closed_form() -> None:
    federation, score = make_federation(900)
    group, owner = federation.dataset.groups, owners(federation)
    rows = ClientRows.of(federation, score, target={SP: 0.02}, local={SP: 0.05}, method="x")
    calibrations = rows.calibrate(by_site=True)
    dual = LoGoFairDual(rows, rows.apply(calibrations))
    (lam,), mu = dual.minimize()
    rule = fit_logofair(federation, score, target={SP: 0.02}, local={SP: 0.05})
    for (site, (name,)), acceptance in rule.cells.items():
        k, a = int(site.split()[1]), NAMES.index(name)
        sign = 1 - 2 * a
        share = ((group == a) & (owner == k)).mean()
        wanted = 0.5 + sign * lam / (2 * (group == a).mean()) + sign * mu[k, 0] / (2 * share)
        found = calibrations[k, a](np.array(acceptance.thresholds))
        assert float(found[0]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [SP, EOP, FPR])
def test_logofair_and_fedfact_approach_the_exact_rule(metric: fedgft.Metric) -> None:
    """With calibrated scores, enough rounds and little smoothing, they are the best thresholds."""
    federation, score = make_federation(10_000)
    exact = fit_rule(federation, score, "thresholds", target={metric: 0.02})
    best = exact.expected["accuracy"]["after"]
    rows = ClientRows.of(federation, score, target={metric: 0.02}, method="x")
    dual = LoGoFairDual(rows, score[federation.rows])
    lam, mu = dual.minimize(200)
    found = [rows.make_rule(rows.find_thresholds(dual.price(lam, mu), by_site=False))]
    other = FedFactDual(rows, score[federation.rows], temperature=0.005)
    prices = other.price(*other.minimize(100))
    found.append(rows.make_rule(rows.find_thresholds(prices, by_site=False)))
    for rule, limit in zip(found, (0.02, 0.02), strict=True):
        gap = next(g for g in rule.expected["gaps"] if g["metric"] == metric.name)
        assert gap["after"] <= limit + 0.006
        assert rule.expected["accuracy"]["after"] == pytest.approx(best, abs=0.006)
        assert gap["before"] > 0.1


def test_rules_of_logofair_that_cannot_be_fitted_are_refused() -> None:
    federation, score = make_federation(300, groups=3)
    with pytest.raises(FedgftError, match=r"logofair takes two groups.* 3: f, m, x"):
        fit_logofair(federation, score, target={SP: 0.02})
    federation, score = make_federation(300)
    with pytest.raises(FedgftError, match="logofair takes sp, eop, eo and fpr, not acc"):
        fit_logofair(federation, score, target={get_metric("acc"): 0.02})
    data = federation.dataset
    without = np.flatnonzero(~((data.groups == 1) & (data.labels == 1)))
    few = Federation(data, without, np.array([0, len(without)]), without[:0])
    for kind in ("logofair", "fedfact-post"):
        with pytest.raises(FedgftError, match="no row of its event in m"):
            fit_rule(few, score, kind, target={EOP: 0.02})


# FedFACT


def fedfact_h(
    federation: Federation,
    eta: np.ndarray,
    lam: np.ndarray,
    mu: np.ndarray,
    xi: tuple[float, float],
    metric: str,
) -> float:
    """H by matrices M and D as the paper prints them; lam (2, g), mu (2, site, g)."""
    data = federation.dataset
    group, label, owner = data.groups, data.labels, owners(federation)
    total, groups = 0.0, len(data.group_names)
    event = np.ones(len(label), bool) if metric == "sp" else label == 1
    for e, a, k in zip(eta, group, owner, strict=True):
        p_ak = ((group == a) & (owner == k)).mean()
        m = np.eye(2)
        for b in range(groups):
            both = np.zeros((2, 2))
            if metric == "sp":
                here = ((group == b) & (owner == k)).sum() / (group == b).sum()
                both[:, 1] = (lam[0, b] - lam[1, b]) * (here * (a == b) - p_ak)
                own = (a == b) - ((group == a) & (owner == k)).sum() / (owner == k).sum()
                both[:, 1] += (mu[0, k, b] - mu[1, k, b]) * own
            else:
                here = ((group == b) & (owner == k)).mean() / ((group == b) & event).mean()
                both[1, 1] = (lam[0, b] - lam[1, b]) * (here * (a == b) - p_ak / event.mean())
                own = p_ak * (a == b) / ((group == b) & (owner == k) & event).mean()
                own -= p_ak / ((owner == k) & event).mean()
                both[1, 1] += (mu[0, k, b] - mu[1, k, b]) * own
            m -= both / p_ak
        scores = m.T @ np.array([1 - e, e])
        total += 0.1 * np.logaddexp(*(scores / 0.1))
    return float(total / len(eta) + xi[0] * lam.sum() + xi[1] * mu.sum())


@pytest.mark.parametrize("metric", [SP, EOP])
@pytest.mark.parametrize("groups", [2, 3])
def test_the_dual_of_fedfact_is_that_of_the_paper(metric: fedgft.Metric, groups: int) -> None:
    federation, score = make_federation(300, groups=groups)
    rows = ClientRows.of(federation, score, target={metric: 0.02}, local={metric: 0.06}, method="x")
    dual = FedFactDual(rows, score[federation.rows])
    rng = np.random.default_rng(4)
    lam = rng.random((2, groups, 1)) * 0.1
    mu = rng.random((2, 3, groups, 1)) * 0.02
    wanted = fedfact_h(federation, score, lam[..., 0], mu[..., 0], (0.01, 0.03), metric.name)
    assert dual.value(lam, mu) == pytest.approx(wanted, abs=1e-12)
    step = 1e-6
    for place in np.ndindex(lam.shape):
        moved = lam.copy()
        moved[place] += step
        slope = (dual.value(moved, mu) - dual.value(lam, mu)) / step
        assert slope == pytest.approx(dual.slope_in_lam(lam, mu)[place], abs=1e-4)
    for place in np.ndindex(mu.shape):
        moved = mu.copy()
        moved[place] += step
        slope = (dual.value(lam, moved) - dual.value(lam, mu)) / step
        side, site, *rest = place
        assert slope == pytest.approx(dual.slope_in_mu(lam, mu, site)[side, *rest], abs=1e-4)


def test_ten_rounds_of_fedfact_reach_the_minimum() -> None:
    federation, score = make_federation(3000, groups=3)
    rows = ClientRows.of(federation, score, target={SP: 0.02}, method="x")
    dual = FedFactDual(rows, score[federation.rows])
    lam, mu = dual.minimize()
    least = minimize(
        lambda x: dual.value(x.reshape(lam.shape), mu),
        np.zeros(lam.size),
        bounds=[(0, 5)] * lam.size,
    )
    assert dual.value(lam, mu) == pytest.approx(least.fun, abs=2e-4)
    start = dual.value(0 * lam, mu)
    assert start - dual.value(lam, mu) > 0.95 * (start - least.fun) > 0.005
    assert not dual.minimize()[1].any()  # without local limits


@pytest.mark.slow
def test_decisions_of_fedfact_are_the_argmax() -> None:
    federation, score = make_federation(500, groups=3)
    rule = fit_fedfact_rule(federation, score, target={EOP: 0.02}, local={EOP: 0.1})
    rows = ClientRows.of(federation, score, target={EOP: 0.02}, local={EOP: 0.1}, method="x")
    dual = FedFactDual(rows, score[federation.rows])
    price = dual.price(*dual.minimize())[..., 0]
    mine = price[owners(federation), federation.dataset.groups]
    wanted = score - mine * score > 1 - score  # column 1 of M against column 0
    assert np.array_equal(decide(rule, federation, score) == 1, wanted)
    assert mine.std() > 0.01


def test_projection_is_the_nearest_point() -> None:
    rng = np.random.default_rng(5)
    for scale in (0.1, 3.0, 30.0):
        x = rng.normal(size=6) * scale
        found = project(x)
        nearest = minimize(
            lambda z, x=x: ((z - x) ** 2).sum(),
            np.full(6, 0.1),
            bounds=[(0, None)] * 6,
            constraints={"type": "ineq", "fun": lambda z: 5 - z.sum()},
        )
        assert np.allclose(found, nearest.x, atol=1e-3)


# Cost LP


def duan_value(
    federation: Federation, decided: np.ndarray, limit: float, local: float, metric: str
) -> float:
    """The accuracy of the linear program of Duan et al., from the 2x2 tables of sites and groups.

    x[c, a] = (true negatives, true positives) per negative, and per positive.
    """
    data = federation.dataset
    owner, sites = owners(federation), federation.num_clients
    size = np.zeros((sites, 2, 2))
    right = np.zeros((sites, 2, 2))
    for c, a, y in np.ndindex(size.shape):
        mine = (owner == c) & (data.groups == a) & (data.labels == y)
        size[c, a, y] = mine.sum()
        right[c, a, y] = (decided[mine] == y).mean()
    above, most = [], []
    for c, a in np.ndindex(sites, 2):  # the triangle of always 0, always 1, the decisions
        tn, tp = right[c, a]
        for row, end in (([-1, -1], -1), ([1 - tp, tn], tn), ([tp, 1 - tn], tp)):
            line = np.zeros((sites, 2, 2))
            line[c, a] = row
            above.append(line.ravel())
            most.append(end)
    whole = size.sum(0)

    def rate(c: int | None, a: int, y: int | None) -> tuple[np.ndarray, float]:
        """P(decided 1 | y): 1 - x for y = 0; over both labels if y is None."""
        line, constant = np.zeros((sites, 2, 2)), 0.0
        for k in range(sites) if c is None else [c]:
            for label in (0, 1) if y is None else (y,):
                base = whole[a] if c is None else size[c, a]
                weight = size[k, a, label] / (base.sum() if y is None else base[label])
                line[k, a, label] = weight if label == 1 else -weight
                constant += weight if label == 0 else 0.0
        return line.ravel(), constant

    for y in (None,) if metric == "sp" else (0, 1):
        for c, end in ((None, limit), *((c, local) for c in range(sites))):
            if end >= 1:
                continue
            (one, first), (two, second) = rate(c, 0, y), rate(c, 1, y)
            above += [one - two, two - one]
            most += [end - first + second, end + first - second]
    found = linprog(-size.ravel(), A_ub=np.array(above), b_ub=np.array(most), bounds=(0, 1))
    assert found.status == 0
    return -found.fun / size.sum()


@pytest.mark.parametrize("metric", [SP, EO])
@pytest.mark.parametrize(("limit", "local"), [(0.01, 1.0), (0.0, 0.0), (0.02, 0.05)])
def test_cost_lp_is_derived_decisions_by_site(
    metric: fedgft.Metric, limit: float, local: float
) -> None:
    federation, score = make_federation(2000)
    limits = {} if local >= 1 else {metric: local}
    found, same = (
        fit_rule(
            federation,
            score,
            kind,
            target={metric: limit},
            local=limits,
            per_site=True,
            key="ab" * 32,
        )
        for kind in ("cost-lp", "derived")
    )
    assert found.to_json() == same.to_json()
    wanted = duan_value(federation, score >= 0.5, limit, local, metric.name)
    assert found.expected["accuracy"]["after"] == pytest.approx(wanted, abs=1e-6)
    chance = decide(found, federation, score)
    label = federation.dataset.labels
    assert np.where(label == 1, chance, 1 - chance).mean() == pytest.approx(wanted, abs=1e-6)
    assert found.expected["accuracy"]["before"] > wanted + 0.01


def test_people_of_an_unknown_site_get_the_mean_of_the_flips() -> None:
    federation, score = make_federation(2000)
    rule = fit_rule(federation, score, "cost-lp", target={SP: 0.01}, key=FIXED_KEY)
    merged = merge_sites(rule, federation, score >= 0.5)
    assert rule.per_site and not merged.per_site
    ours, mean = (decide(each, federation, score) for each in (rule, merged))
    group, decided = federation.dataset.groups, score >= 0.5
    for g in range(2):
        for d in (False, True):
            mine = (group == g) & (decided == d)
            assert mean[mine].mean() == pytest.approx(ours[mine].mean())
            assert np.ptp(mean[mine]) == 0
    assert gap_of(mean, group) <= 0.01 + 1e-6


# Studies


@pytest.fixture(scope="module")
def people(tmp_path_factory) -> str:
    table, y, sex = make_people(1500)
    path = tmp_path_factory.mktemp("people") / "people.csv"
    table.with_columns(sex=pl.Series(sex), repaid=pl.Series(y)).write_csv(path)
    return str(path)


@pytest.mark.slow
def test_published_rules_are_methods_of_a_comparison(people: str, capsys) -> None:
    task = (people, "--label", "repaid", "--group", "sex", "--clients", "3", "--seeds", "1")
    methods = ("fedavg", "logofair", "fedfact-post", "cost-lp")
    target = ("--target", "0.03", "--json")
    code, out, err = run(capsys, "compare", *task, "--methods", *methods, *target)
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out)}
    assert set(rows) == set(methods)
    for name in methods[1:]:
        assert rows[name]["gap_hard"] < 0.1 < rows["fedavg"]["gap_hard"]
        assert rows[name]["accuracy"] > 0.65
    assert rows["cost-lp"]["gap_hard"] <= 0.03 + 1e-6


def test_a_study_refuses_rules_that_take_two_groups_only() -> None:
    federation, _ = make_federation(300, groups=3)
    study = Study(federation.dataset, get_protocol("heldout"), [0], clients=2)
    with pytest.raises(FedgftError, match=r"logofair takes two groups.*\(f, m, x\)") as caught:
        check_rules(study, SP, ["fedavg", "logofair"])
    assert caught.value.field == "methods"
    check_rules(study, SP, ["fedfact-post", "cost-lp"])
    with pytest.raises(FedgftError, match="fedfact-post takes sp, eop, eo and fpr, not acc"):
        check_rules(study, get_metric("acc"), ["fedfact-post"])

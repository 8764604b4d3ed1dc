"""Training with "sp|department": gaps within strata, in every executor and for trees."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft.algorithms import METHODS, get_method
from fedgft.data.dataset import Federation
from fedgft.engine import Settings, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.group_axis import GroupAxis, MappedMetric, bind_metric
from fedgft.metrics.metric import spread_gradient
from fedgft.models import Trees
from fedgft.study import Study, compare_methods, get_protocol
from fedgft.study.training import train_model
from fedgft.sums import Sums
from small_federation import EXECUTORS, SGD, federation, run

METRICS = ("sp", "eop", "eo", "acc", "fpr", "predictive-parity")
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def divided(made: Federation, strata: np.ndarray | int) -> Federation:
    """The federation, whose rows are in these strata, or in as many random ones."""
    if isinstance(strata, int):
        strata = np.random.default_rng(0).integers(0, strata, len(made.dataset))
    names = tuple(f"s{i}" for i in range(int(strata.max()) + 1))
    data = replace(made.dataset, strata=strata, strata_names=names, given=("ward",))
    return replace(made, dataset=data)


def large() -> Federation:
    return federation([(260, (0, 1, -1), (0, 1)), (140, (0, 1), (0, 1)), (90, (1,), (0, 1))])


def rates_by_loop(name: str, p, labels, groups, strata) -> dict:
    """Numerator and denominator of each (condition, stratum, group), row by row; p is P(1)."""
    found: dict = {}
    for score, y, a, s in zip(p, labels, groups, strata, strict=True):
        terms = {
            "sp": [("", score, 1.0)],
            "eop": [("", score * y, float(y))],
            "fpr": [("", score * (1 - y), 1.0 - y)],
            "eo": [("0", score * (1 - y), 1.0 - y), ("1", score * y, float(y))],
            "acc": [("", score if y else 1 - score, 1.0)],
            "predictive-parity": [("", score * y, score)],
        }[name]
        for condition, up, down in terms:
            if a >= 0:
                cell = found.setdefault((condition, int(s)), {}).setdefault(int(a), [0.0, 0.0])
                cell[0] += up
                cell[1] += down
    return found


def gap_by_loop(name: str, p, labels, groups, strata) -> float:
    """F, with Mantel-Haenszel shares written out for any number of groups."""
    by_condition: dict = {}
    for (condition, _), cells in rates_by_loop(name, p, labels, groups, strata).items():
        known = {a: (up / down, down) for a, (up, down) in cells.items() if down > 0}
        if len(known) < 2:
            continue
        total = sum(n for _, n in known.values())
        each = list(known.values())
        pairs = sum(
            each[i][1] * each[j][1] for i in range(len(each)) for j in range(len(each)) if i < j
        )
        rates = [rate for rate, _ in each]
        by_condition.setdefault(condition, []).append((pairs / total, max(rates) - min(rates)))
    return max(
        np.sqrt(sum(w * d * d for w, d in terms) / sum(w for w, _ in terms))
        for terms in by_condition.values()
    )


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("name", METRICS)
def test_the_gap_is_the_formula_counted_row_by_row(name, groups):
    rng = np.random.default_rng(1)
    n, strata = 500, 4
    labels = rng.integers(0, 2, n)
    group = rng.integers(-1, groups, n)
    stratum = rng.integers(0, strata, n)
    group[stratum == 3] = 0  # one group only: nothing to compare
    p = rng.random(n)
    cells = np.where(group >= 0, stratum * groups + group, -1)
    sums = Sums.of(np.stack((1 - p, p), 1), labels, cells, num_groups=strata * groups)
    axis = GroupAxis(groups, ("ward",), tuple("abcd"))
    sums = replace(sums, axis=axis)
    expected = gap_by_loop(name, p, labels, group, stratum)
    assert sums.gap(f"{name}|ward", "soft") == pytest.approx(expected, rel=1e-12)
    plain = Sums.of(np.stack((1 - p, p), 1), labels, group, num_groups=groups)
    assert sums.gap(name, "soft") == pytest.approx(float(plain.gap(name, "soft")), rel=1e-12)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("name", METRICS)
def test_the_gradient_is_that_of_finite_differences(name, groups):
    rng = np.random.default_rng(2)
    axis = GroupAxis(groups, ("ward",), tuple("abc"))
    metric = bind_metric(get_metric(f"{name}|ward"), axis)
    conditions = 3 * len(metric.conditions(2))
    mass = rng.uniform(5, 50, (conditions, groups))
    statistics = np.stack((mass * rng.uniform(0.1, 0.9, mass.shape), mass))
    statistics[:, 1, 0] = 0.0  # a group that does not occur in a stratum
    value, gradient = spread_gradient(metric, statistics, "range")
    step = 1e-6
    for at in np.ndindex(*statistics.shape):
        if statistics[1][at[1:]] == 0:
            continue
        nudge = np.zeros_like(statistics)
        nudge[at] = step
        above, below = (metric.readout(statistics + sign * nudge) for sign in (1, -1))
        assert gradient[at] == pytest.approx((above - below) / (2 * step), abs=1e-7)
    assert value == metric.readout(statistics)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["sp", "eo", "predictive-parity"])
def test_one_step_is_the_central_gradient_of_the_penalized_objective(name, executor):
    made = divided(large(), 3)
    start = np.random.default_rng(3).normal(size=10)
    options = {"rounds": 1, "batch_size": 1000, "optimizer": SGD, "init": start, "lr": 1.0}
    method = fedgft.algorithms.fedgft(f"{name}|ward", 7.0)
    found = run(made, method, executor=executor, **options)
    data = made.dataset
    rows = made.rows

    def loss(params: np.ndarray) -> float:
        z = data.features[rows] @ (params[4:8] - params[:4]) + params[9] - params[8]
        p = 1 / (1 + np.exp(-z))
        y = data.labels[rows]
        entropy = np.logaddexp(0, np.where(y == 1, -z, z)).mean()
        return entropy + 3.5 * gap_by_loop(name, p, y, data.groups[rows], data.strata[rows]) ** 2

    step = 1e-6
    expected = [(loss(start + step * e) - loss(start - step * e)) / (2 * step) for e in np.eye(10)]
    np.testing.assert_allclose(start - found.params[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["fedgft", "fedgft-control", "lft", "fairfed"])
@pytest.mark.parametrize("name", METRICS)
def test_with_one_stratum_it_is_the_marginal_metric(name, method):
    made = large()
    strength = {"target": 0.02, "lam": 5.0, "beta": 0.5}[METHODS[method].strength]
    plain = run(made, get_method(method, CATALOG[name], strength))
    one = run(divided(made, 1), get_method(method, get_metric(f"{name}|ward"), strength))
    np.testing.assert_allclose(one.params, plain.params, **TIGHT)
    for kind in ("soft", "hard"):
        np.testing.assert_allclose(
            one.test[-1].gap(f"{name}|ward", kind), plain.test[-1].gap(name, kind), **TIGHT
        )


@pytest.mark.parametrize("method", ["fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control"])
def test_strata_do_not_change_marginal_training(method):
    made = large()
    strength = {"target": 0.02, "lam": 5.0, "beta": 0.5}.get(METHODS[method].strength, 0.0)
    plain, found = (
        run(f, get_method(method, CATALOG["eo"], strength)) for f in (made, divided(made, 3))
    )
    np.testing.assert_allclose(found.params, plain.params, **TIGHT)
    by_group = found.test[-1].by_group()
    for mine, theirs in zip(by_group.arrays, plain.test[-1].arrays, strict=True):
        np.testing.assert_allclose(mine, theirs, **TIGHT)


@pytest.mark.parametrize("method", ["fedgft", "fedgft-control", "lft"])
def test_executors_agree_within_strata(method):
    made = divided(large(), 3)
    weights = np.random.default_rng(0).gamma(1.0, size=len(made.dataset))
    made = replace(made, dataset=replace(made.dataset, weights=weights))
    strength = {"target": 0.02, "lam": 5.0}[METHODS[method].strength]
    found = [
        run(made, get_method(method, get_metric("sp|ward"), strength), executor=each)
        for each in EXECUTORS
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other.params, found[0].params, rtol=1e-6, atol=1e-9)


def test_opposite_gaps_do_not_cancel():
    """Women are favored in one ward, men in the other: the pooled gap is 0, and F is not."""
    rates = np.array([[[0.7, 0.3], [0.3, 0.7]]])
    statistics = np.stack((100 * rates[0], np.full((2, 2), 100.0)))
    metric = bind_metric(get_metric("sp|ward"), GroupAxis(2, ("ward",), ("a", "b")))
    pooled, largest = metric.summarize(statistics)
    assert pooled == pytest.approx(0.0) and largest == pytest.approx(0.4)
    assert metric.readout(statistics) == pytest.approx(0.4)


def berkeley(rows: int = 6000, *, bias: float = 0.0, seed: int = 0) -> Federation:
    """Women apply to the department that admits few; within departments, `bias` is against them."""
    rng = np.random.default_rng(seed)
    woman = rng.integers(0, 2, rows)
    hard = (rng.random(rows) < np.where(woman == 1, 0.85, 0.15)).astype(int)
    chance = np.where(hard == 1, 0.25, 0.75) - bias * woman
    admitted = (rng.random(rows) < chance).astype(int)
    noise = rng.normal(size=rows)
    features = np.stack((2.0 * hard - 1, woman - 0.5, noise), 1)
    data = fedgft.Dataset(
        "admissions",
        features,
        admitted,
        woman,
        ("hard", "woman", "noise"),
        group_names=("man", "woman"),
        strata=hard,
        strata_names=("easy", "hard"),
        given=("department",),
    )
    return fedgft.standardize(fedgft.partition(data, clients=4, seed=0))


def admit(made: Federation, metric: str, **strength) -> Sums:
    history = simulate(
        made, "logistic", "fedgft-control", Settings(rounds=30), metric=metric, **strength
    )
    return history.federation[-1, 0]


def test_departments_explain_the_gap_of_berkeley():
    """Fair departments: nothing to do within them, and much to pay for a marginal gap of 0."""
    made = berkeley()
    plain = simulate(made, "logistic", "fedavg", Settings(rounds=30)).federation[-1, 0]
    within = admit(made, "sp|department", target=0.03)
    marginal = admit(made, "sp", target=0.03)
    assert plain.gap("sp", "hard") > 0.5
    assert within.gap("sp|department", "hard") <= 0.033
    assert within.gap("sp", "hard") > 0.5 and within.accuracy() > plain.accuracy() - 0.01
    assert marginal.gap("sp", "hard") <= 0.033
    assert marginal.gap("sp|department", "hard") > 0.2  # men of a department pay for it
    assert marginal.accuracy() < within.accuracy() - 0.03


def test_bias_within_departments_is_removed_within_them():
    made = berkeley(bias=0.35)
    plain = simulate(made, "logistic", "fedavg", Settings(rounds=30)).federation[-1, 0]
    within = admit(made, "sp|department", target=0.03)
    assert plain.gap("sp|department", "hard") > 0.2
    assert within.gap("sp|department", "hard") <= 0.033
    assert within.gap("sp", "hard") > 0.3  # departments still differ


def test_trees_train_within_strata():
    made = replace(berkeley(bias=0.35), mean=None, spread=None)
    model = Trees(max_depth=3, folds=0)
    plain = simulate(made, model, "fedavg", rounds=30)
    found = simulate(made, model, metric="sp|department", target=0.05, rounds=30)
    assert plain.federation[-1].gap("sp|department", "hard")[0] > 0.15
    assert found.control.reached[0]
    assert found.federation[-1].gap("sp|department", "hard")[0] <= 0.053


def test_several_columns_and_checkpoints():
    made = divided(large(), 3)
    states = []
    method = fedgft.algorithms.fedgft_control("sp|ward", 0.02)
    whole = run(made, method, rounds=6, on_state=lambda done, take: states.append(take()))
    again = run(made, method, rounds=6, resume=states[2])
    np.testing.assert_array_equal(again.params, whole.params)
    assert again.test[-1].axis == made.dataset.axis


# Tables, studies and bad input


def table(rows: int = 900) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    sex = rng.choice(["f", "m"], rows)
    ward = rng.choice(["north", "south", "west"], rows)
    x = rng.normal(size=rows) + (sex == "m") + (ward == "west")
    y = np.where(x + rng.normal(size=rows) > 0.8, "yes", "no")
    year = rng.choice([2020, 2021], rows)
    return pl.DataFrame({"x": x, "sex": sex, "ward": ward, "year": year, "y": y})


ROLES = {"label": "y", "group": "sex"}


def test_columns_divide_a_table():
    data = fedgft.load(table(), **ROLES, given=("ward", "year"))
    assert data.strata_names[0] == "north & 2020" and len(data.strata_names) == 6
    assert "x" in data.columns and any(name.startswith("ward") for name in data.columns)
    missing = table().with_columns(
        ward=pl.when(pl.col("x") > 1).then(None).otherwise(pl.col("ward"))
    )
    assert "(missing)" in fedgft.load(missing, **ROLES, given="ward").strata_names


def small_study(data) -> Study:
    base = get_protocol("heldout")
    settings = Settings(rounds=8, state="shared")
    protocol = replace(base, lr=(0.05,), settings=settings, round_factors=(), target=(0.05,))
    return Study(data, protocol, [0, 1], clients=3)


def test_a_study_reports_the_marginal_gap_beside_the_conditional_one():
    study = small_study(fedgft.load(table(), **ROLES, given="ward"))
    metrics = [get_metric("sp"), get_metric("sp|ward")]
    found = compare_methods(study, ["fedavg", "fedgft-control"], metrics, [0.5])
    marginal, within = (
        [r for r in found.rows if r["metric"] == name] for name in ("sp", "sp|ward")
    )
    assert "gap_marginal" not in marginal[0] and len(within) == 2
    assert within[0]["gap_marginal_test"] == pytest.approx(marginal[0]["gap_hard_test"])
    row = within[1]
    assert row["gap_pooled_test"] <= row["gap_hard_test"] + 1e-12 <= row["gap_largest_test"] + 2e-12
    assert row["gap_hard_test_low"] is None and row["floor"] > 0
    assert "given ward" in row["widest"]["condition"]
    assert set(row["selection_rates"]) == {"f", "m"}


BAD = {
    "sp|": "a column must follow",
    "sp|a,,b": "a column must follow",
    "sp|a,a": "twice",
    "sp+eop|ward": "one metric",
    "sp@all|ward": "one metric",
    "nosuch|ward": "not known",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_names_of_conditional_metrics(name):
    with pytest.raises(FedgftError, match=BAD[name]) as caught:
        get_metric(name)
    assert "\n" not in str(caught.value)


def test_bad_strata_are_named_in_one_line():
    with pytest.raises(FedgftError, match=r"no column 'wrad'.*'ward'"):
        fedgft.load(table(), **ROLES, given="wrad")
    for column in ("sex", "y"):
        with pytest.raises(FedgftError, match=f"'{column}' is both given and"):
            fedgft.load(table(), **ROLES, given=column)
    with pytest.raises(FedgftError, match="more than 200"):
        many = table().with_columns(ward=pl.int_range(pl.len()))
        fedgft.load(many, **ROLES, given="ward")
    same = table().with_columns(ward=pl.col("sex") + "-ward")
    study = small_study(fedgft.load(same, **ROLES, given="ward"))
    with pytest.raises(FedgftError, match="nothing is comparable"):
        study.run(0.5, "fedgft", get_metric("sp|ward"))
    with pytest.raises(FedgftError, match="not divided into strata"):
        run(federation(), fedgft.algorithms.fedgft("sp|ward", 1.0))
    with pytest.raises(FedgftError, match="divided by ward"):
        run(divided(federation(), 2), fedgft.algorithms.fedgft("sp|age", 1.0))
    with pytest.raises(FedgftError, match="is for fedavg"):
        get_method("fedfb", get_metric("sp|ward"), 0.1)
    with pytest.raises(FedgftError, match="knows no strata"):
        run(divided(federation(), 2), get_method("fedfb", CATALOG["sp"], 0.1))
    with pytest.raises(FedgftError) as caught:
        fedgft.algorithms.fedgft("sp|ward", 1.0, spread="variance")
    assert caught.value.field == "spread"


def test_a_mapped_metric_keeps_the_name_of_its_base():
    axis = GroupAxis(2, ("ward",), ("a", "b"))
    assert isinstance(bind_metric(CATALOG["sp"], axis), MappedMetric)
    assert bind_metric(CATALOG["sp"], axis).name == "sp"
    assert bind_metric(CATALOG["sp"], None) is CATALOG["sp"]


def test_a_classifier_compares_within_a_column():
    frame = table(3000)
    x = frame.drop("y", "sex")
    classifier = fedgft.FairClassifier(metric="sp|ward", target=0.03, lr=0.05, rounds=40)
    classifier.fit(x, frame["y"], sensitive_features=frame["sex"], clients=3)
    decisions = (classifier.predict(x) == "yes").astype(float)
    labels = (frame["y"] == "yes").to_numpy().astype(int)
    sex = (frame["sex"] == "m").to_numpy().astype(int)
    ward = frame["ward"].cast(pl.Categorical).to_physical().to_numpy()
    assert gap_by_loop("sp", decisions, labels, sex, ward) <= 0.034
    with pytest.raises(FedgftError, match="no column 'wrad'"):
        classifier.set_params(metric="sp|wrad").fit(x, frame["y"], sensitive_features=frame["sex"])
    with pytest.raises(FedgftError, match="X is an array"):
        classifier.set_params(metric="sp|ward").fit(
            x.select("x").to_numpy(), frame["y"], sensitive_features=frame["sex"]
        )


def test_the_audit_of_held_out_rows_has_the_same_gaps():
    """The pooled gap within strata, and one that is corrected for randomized groups."""
    study = small_study(fedgft.load(table(3000), **ROLES, given="ward"))
    trained = train_model(study, "fedavg", "sp|ward")
    metric = trained.result.metric
    sums = trained.result.test_sums[trained.choice.replicate]
    pooled, _ = metric.summarize(sums.statistics(metric, "hard"))
    found = trained.audit(group="sex")
    within = found.given["views"]["sex"]["sp"]["pooled"]
    assert abs(within["gap"] if isinstance(within, dict) else within) == pytest.approx(pooled)
    assert found.gaps["sp"].value == pytest.approx(float(sums.gap("sp", "hard")))
    data = replace(fedgft.load(table(3000), **ROLES), randomized=1.0)
    trained = train_model(small_study(data), "fedavg", "sp")
    sums = trained.result.test_sums[trained.choice.replicate]
    assert trained.audit(group="sex").gaps["sp"].value == pytest.approx(
        float(sums.gap("sp", "hard"))
    )

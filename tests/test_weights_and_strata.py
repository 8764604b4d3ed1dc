"""Weights, strata, randomized groups and probabilities of groups: files, audits, references.

References: Fairlearn with `sample_weight` and `control_features`, sums in loops, and statsmodels'
formula of the Mantel-Haenszel difference written out.
"""

import json
import math
from itertools import product

import numpy as np
import pandas as pd
import polars as pl
import pytest
from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score

import fedgft
from fedgft import FedgftError, SiteSums, audit, measure
from fedgft.auditing import measure_file
from fedgft.site_sums import COUNT, NOISE, ROWS, SLACK, SQUARES

RATES = {
    "sp": selection_rate,
    "eop": true_positive_rate,
    "fpr": false_positive_rate,
    "acc": accuracy_score,
}


def make_rows(seed: int, n: int = 400) -> pd.DataFrame:
    """Rows whose rates differ between groups and strata, with weights."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], n)
    region = rng.choice(["east", "west"], n, p=[0.3, 0.7])
    score = np.clip(rng.normal(0.5, 0.25, n) + 0.1 * (sex == "m"), 0, 1).round(3)
    return pd.DataFrame(
        {
            "sex": sex,
            "region": region,
            "score": score,
            "y": (rng.random(n) < score).astype(int),
            "w": rng.exponential(2.0, n).round(2) + 0.01,
        }
    )


def measure_rows(rows: pd.DataFrame, site: str = "north", **more) -> SiteSums:
    return measure(rows.y, rows.score, sensitive_features=rows[["sex"]], site=site, **more)


# Weights


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_weighted_gaps_are_those_of_fairlearn(seed, sites):
    rows = make_rows(seed)
    parts = [rows.iloc[k::sites] for k in range(sites)]
    sums = [measure_rows(p, f"s{k}", sample_weight=p.w) for k, p in enumerate(parts)]
    read = [SiteSums.from_json(each.to_json()) for each in sums]
    for found in (audit(sums), audit(read)):
        for name, rate in RATES.items():
            frame = MetricFrame(
                metrics=rate,
                y_true=rows.y,
                y_pred=(rows.score >= 0.5).astype(int),
                sensitive_features=rows.sex,
                sample_params={"sample_weight": rows.w},
            )
            assert found.gaps[name].value == pytest.approx(frame.difference(), abs=1e-9)
            for group, value in frame.by_group.items():
                assert found.rates[name][group].value == pytest.approx(value, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_equal_weights_change_no_interval(seed):
    rows = make_rows(seed)
    plain = audit(measure_rows(rows))
    weighted = audit(measure_rows(rows, sample_weight=np.full(len(rows), 3.0)))
    for name in ("sp", "eop", "eo", "acc", "fpr", "predictive-parity"):
        one, other = plain.gaps[name], weighted.gaps[name]
        assert (one.value, one.low, one.high) == pytest.approx(
            (other.value, other.low, other.high), abs=1e-9
        )
        assert one.ratio_low == pytest.approx(other.ratio_low, abs=1e-9)
    assert plain.summary["noise_floor"] == pytest.approx(weighted.summary["noise_floor"])
    one, other = plain.summary["scores"]["sp"], weighted.summary["scores"]["sp"]
    assert (one["gap"], one["low"]) == pytest.approx((other["gap"], other["low"]), abs=1e-9)


def test_sums_of_weights_in_loops():
    rows = make_rows(3)
    sums = measure_rows(rows, sample_weight=rows.w)
    (site,) = sums.sites.values()
    for group, table in site.tables.items():
        for label, decision in product((0, 1), (0, 1)):
            mine = rows[
                (rows.sex == group[0])
                & (rows.y == label)
                & ((rows.score >= 0.5).astype(int) == decision)
            ]
            cell = table[label, decision]
            assert cell[COUNT] == pytest.approx(mine.w.sum())
            assert cell[ROWS] == len(mine)
            assert cell[SQUARES] == pytest.approx((mine.w**2).sum())
    assert sums.rows() == len(rows)


def test_the_linearized_variance_is_that_of_survey_packages():
    """Var r = sum(w^2 (h - r)^2) / sum(w)^2 for r = sum(w h) / sum(w), h = 1 for hits."""
    from fedgft.auditing.rates import estimate_rates, list_views, pool_sites
    from fedgft.metrics import get_metric

    rows = make_rows(8)
    sums = measure_rows(rows, sample_weight=rows.w)
    (view,) = list_views(pool_sites(sums))
    rates = estimate_rates(get_metric("sp"), view, "hard")
    for g, group in enumerate(view.groups):
        mine = rows[rows.sex == group]
        hit = (mine.score >= 0.5).to_numpy(float)
        w = mine.w.to_numpy()
        r = (w * hit).sum() / w.sum()
        assert rates.rate[0, g] == pytest.approx(r)
        assert rates.sampling[0, g] == pytest.approx((w**2 * (hit - r) ** 2).sum() / w.sum() ** 2)
        # and the effective number agrees with r (1 - r) / variance where events are many
        plain = r * (1 - r) / rates.sampling[0, g]
        assert rates.effective[0, g] == pytest.approx(plain, rel=0.05)


def test_weighted_files_round_trip_and_coarsen():
    rows = make_rows(4)
    sums = measure_rows(rows, sample_weight=rows.w, control_features=rows[["region"]])
    text = sums.to_json()
    again = SiteSums.from_json(text)
    assert again.to_json() == text
    assert json.loads(text)["format"] == "fedgft-sums-3"
    coarse = measure_rows(rows, "south", sample_weight=rows.w, bins=20)
    fine = measure_rows(rows, "north", sample_weight=rows.w)
    merged = fedgft.auditing.merge([fine, coarse])
    total = sum(each.sum() for each in merged.bin_rows.values())
    assert total == 2 * len(rows)


def test_rows_of_weight_zero_are_left_out_and_told():
    rows = make_rows(5)
    rows.loc[rows.index[:7], "w"] = 0.0
    sums = measure_rows(rows, sample_weight=rows.w)
    assert sums.rows() == len(rows) - 7
    assert any("7 rows of weight 0" in note for note in sums.notes)
    without = measure_rows(rows.iloc[7:], sample_weight=rows.w.iloc[7:])
    assert sums.to_json() == without.to_json()


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, -2.0, 1.0, 1.0], "holds -2.0: weights must be finite, 0 or more"),
        ([1.0, None, 1.0, 1.0], "is empty in 1 row"),
        ([1.0, math.inf, 1.0, 1.0], "holds inf"),
        ([1.0, 1e200, 1.0, 1.0], "at most 1e+09"),
        ([1.0, math.nan, 1.0, 1.0], "is empty in 1 row"),
        (["a", "b", "c", "d"], "'a'"),
        ([1.0, 1.0], "2 rows"),
        ([0.0, 0.0, 0.0, 0.0], "no row has both a label and a prediction"),
    ],
)
def test_wrong_weights_are_one_line(weights, said):
    with pytest.raises(FedgftError) as caught:
        measure([0, 1, 0, 1], [0, 1, 1, 1], sensitive_features=list("abab"), sample_weight=weights)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_noise_for_privacy_takes_no_weights():
    rows = make_rows(6)
    with pytest.raises(FedgftError, match="noise is made for rows that count once"):
        measure_rows(rows, sample_weight=rows.w, epsilon=1.0)


def test_small_cells_are_withheld_by_rows_not_by_weight():
    rows = make_rows(7)
    rows.loc[rows.index[:3], "sex"] = "x"
    rows["w"] = np.where(rows.sex == "x", 100.0, rows.w)
    sums = measure_rows(rows, sample_weight=rows.w, min_cell=10)
    text = sums.to_json()
    cells = [cell for cell in json.loads(text)["cells"] if cell["group"] == ["x"]]
    assert cells
    assert all(cell["count"] is None and "weight" not in cell for cell in cells)
    assert json.loads(text)["privacy"]["max_weight"] == 128
    plain = audit(measure_rows(rows, sample_weight=rows.w)).rates["sp"]["f"]
    protected = audit(SiteSums.from_json(text)).rates["sp"]["f"]
    assert protected.low <= plain.value <= protected.high


def test_sites_with_and_without_weights_are_not_merged():
    rows = make_rows(9)
    with pytest.raises(FedgftError, match="weights differ: with and without"):
        audit([measure_rows(rows, "a", sample_weight=rows.w), measure_rows(rows, "b")])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cell: cell.pop("weight"), "weight is None"),
        (lambda cell: cell.update(weight=-1), "weight is -1"),
        (lambda cell: cell.update(squares=1e-9), "squares is 1e-09: not possible"),
        (lambda cell: cell.update(squares=1e12), "squares is 1e+12: not possible"),
        (lambda cell: cell.update(weight=cell["weight"] * 1.01), "the weight is"),
        (lambda cell: cell["scores"]["1"].pop("weights"), "weights is missing"),
        (lambda cell: cell["scores"]["1"]["weights"].append(1.0), "must hold"),
        (lambda cell: cell.update(given=["east", "x"]), "given must list"),
    ],
)
def test_weighted_files_with_impossible_numbers_are_refused(change, said):
    rows = make_rows(10)
    sums = measure_rows(rows, sample_weight=rows.w, control_features=rows[["region"]])
    found = json.loads(sums.to_json())
    change(found["cells"][0])
    with pytest.raises(FedgftError) as caught:
        SiteSums.from_json(json.dumps(found), source="north.json")
    assert said in str(caught.value)


# Strata


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_gaps_within_strata_are_those_of_fairlearn(seed, weighted):
    rows = make_rows(seed)
    more = {"sample_weight": rows.w} if weighted else {}
    found = audit(measure_rows(rows, control_features=rows[["region"]], **more))
    for name, rate in RATES.items():
        frame = MetricFrame(
            metrics=rate,
            y_true=rows.y,
            y_pred=(rows.score >= 0.5).astype(int),
            sensitive_features=rows.sex,
            control_features=rows.region,
            sample_params=more,
        )
        strata = found.given["views"]["sex"][name]["strata"]
        for stratum, value in frame.difference().items():
            assert strata[stratum]["largest"] == pytest.approx(value, abs=1e-9)
    # strata change nothing else
    plain = audit(measure_rows(rows, **more))
    assert plain.gaps["sp"].value == pytest.approx(found.gaps["sp"].value)
    assert plain.gaps["sp"].high == pytest.approx(found.gaps["sp"].high)


def test_the_pooled_gap_is_mantel_haenszel_in_loops():
    rows = make_rows(11, 2000)
    found = audit(measure_rows(rows, control_features=rows[["region"]])).given
    each = found["views"]["sex"]["sp"]
    first, second = each["pair"]
    top = bottom = 0.0
    for _, stratum in rows.groupby("region"):
        d = (stratum.score >= 0.5).astype(float)
        a = d[stratum.sex == first]
        b = d[stratum.sex == second]
        w = len(a) * len(b) / (len(a) + len(b))
        top += w * (a.mean() - b.mean())
        bottom += w
    assert each["pooled"]["gap"] == pytest.approx(top / bottom, abs=1e-12)
    assert each["pooled"]["low"] < top / bottom < each["pooled"]["high"]


def make_admissions(seed: int = 0, n: int = 20_000) -> pd.DataFrame:
    """Women apply to the hard department, and are admitted a little more often in both."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], n)
    hard = rng.random(n) < np.where(sex == "f", 0.8, 0.2)
    chance = np.where(hard, 0.2, 0.7) + 0.05 * (sex == "f")
    admitted = (rng.random(n) < chance).astype(int)
    department = np.where(hard, "hard", "easy")
    return pd.DataFrame({"sex": sex, "department": department, "admitted": admitted})


def test_reversals_are_named():
    rows = make_admissions()
    sums = measure(
        rows.admitted,
        rows.admitted,
        sensitive_features=rows[["sex"]],
        control_features=rows[["department"]],
        site="university",
    )
    found = audit(sums)
    each = found.given["views"]["sex"]["sp"]
    assert each["pair"] == ["m", "f"]
    assert each["overall"]["low"] > 0.2
    assert each["pooled"]["high"] < 0
    assert each["is_reversed"]
    assert each["reversed"] == ["easy", "hard"]
    assert any("Simpson's paradox" in text for text in found.warnings)
    assert "given department" in found.to_markdown()
    assert "Simpson" in found.to_html()


def test_strata_without_both_groups_are_not_estimable():
    sex = ["f"] * 50 + ["m"] * 50
    decisions = [0, 1] * 50
    found = audit(
        measure(
            decisions,
            decisions,
            sensitive_features={"sex": sex},
            control_features={"ward": sex},
            site="a",
        )
    )
    each = found.given["views"]["sex"]["sp"]
    assert each["pooled"]["gap"] is None
    assert each["not_comparable"] == ["f", "m"]
    assert any("not estimable" in text and "ward" in text for text in found.warnings)


def test_rows_without_a_stratum_stay_in_the_overall_gap():
    rows = make_rows(12)
    region = rows.region.where(rows.index % 5 > 0, None)
    sums = measure_rows(rows, control_features={"region": region})
    found = audit(SiteSums.from_json(sums.to_json()))
    assert found.given["rows_without_stratum"] == 80
    assert found.gaps["sp"].value == pytest.approx(audit(measure_rows(rows)).gaps["sp"].value)


def test_rules_read_files_with_strata_and_refuse_weights(tmp_path):
    rows = make_rows(13, 2000)
    strata = measure_rows(rows, control_features=rows[["region"]])
    plain = fedgft.adjust([measure_rows(rows)], target={"sp": 0.02})
    assert fedgft.adjust([strata], target={"sp": 0.02}).cells == plain.cells
    with pytest.raises(FedgftError, match="these sums have weights"):
        fedgft.adjust([measure_rows(rows, sample_weight=rows.w)], target={"sp": 0.02})


def test_a_file_is_measured_as_the_arrays_are(tmp_path):
    rows = make_rows(14)
    for kind in ("csv", "parquet"):
        path = tmp_path / f"north.{kind}"
        rows.to_csv(path, index=False) if kind == "csv" else pl.DataFrame(
            rows.to_dict("list")
        ).write_parquet(path)
        read = measure_file(path, label="y", group="sex", score="score", weight="w", given="region")
        sums = measure_rows(rows, sample_weight=rows.w, control_features=rows[["region"]])
        mine, other = (json.loads(each.to_json())["cells"] for each in (read, sums))
        assert [c["count"] for c in mine] == [c["count"] for c in other]
        for one, two in zip(mine, other, strict=True):
            assert one["weight"] == pytest.approx(two["weight"])
            assert one["squares"] == pytest.approx(two["squares"])


# Randomized groups


def randomize(values: np.ndarray, names: tuple[str, ...], epsilon: float, rng) -> np.ndarray:
    """Keep each value with probability e^eps / (e^eps + k - 1), else take another at random."""
    k = len(names)
    keep = rng.random(len(values)) < math.exp(epsilon) / (math.exp(epsilon) + k - 1)
    position = np.array([names.index(v) for v in values])
    other = (position + rng.integers(1, k, len(values))) % k
    return np.array(names)[np.where(keep, position, other)]


def test_randomized_groups_are_corrected_without_bias():
    """The mean over many randomizations of the same rows is the statistic of the true groups."""
    rng = np.random.default_rng(0)
    names = ("a", "b", "c")
    n = 3000
    group = rng.choice(names, n, p=[0.5, 0.3, 0.2])
    decision = (rng.random(n) < np.array([0.2, 0.5, 0.7])[[names.index(g) for g in group]]) * 1
    truth = audit(measure(decision, decision, sensitive_features={"g": group}, site="a"))
    rates = []
    for _ in range(200):
        noisy = randomize(group, names, 1.0, rng)
        sums = measure(
            decision,
            decision,
            sensitive_features={"g": noisy},
            randomized_groups=1.0,
            values={"g": names},
            site="a",
        )
        found = audit(SiteSums.from_json(sums.to_json()))
        rates.append([found.rates["sp"][g].value for g in names])
    wanted = [truth.rates["sp"][g].value for g in names]
    error = np.std(rates, 0) / math.sqrt(len(rates))
    assert (np.abs(np.mean(rates, 0) - wanted) < 4 * error + 0.002).all()


def test_the_correction_is_the_inverse_matrix_in_loops():
    names = ("a", "b", "c")
    rng = np.random.default_rng(1)
    group = rng.choice(names, 600)
    decision = rng.integers(0, 2, 600)
    sums = measure(
        decision,
        decision,
        sensitive_features={"g": group},
        randomized_groups=2.0,
        values={"g": names},
        site="a",
    )
    keep = math.exp(2) / (math.exp(2) + 2)
    matrix = np.full((3, 3), (1 - keep) / 2) + np.eye(3) * (keep - (1 - keep) / 2)
    rows = np.array([(group == name).sum() for name in names])
    hits = np.array([decision[group == name].sum() for name in names])
    wanted = np.linalg.solve(matrix, hits) / np.linalg.solve(matrix, rows)
    found = audit(sums)
    assert [found.rates["sp"][name].value for name in names] == pytest.approx(wanted)


def randomized_rows(n: int = 1500, **more) -> SiteSums:
    """Rows with scores whose groups were randomized with epsilon 1."""
    rng = np.random.default_rng(3)
    group = randomize(rng.choice(("a", "b", "c"), n), ("a", "b", "c"), 1.0, rng)
    scores = rng.beta(2, 3, n)
    label = (rng.random(n) < scores).astype(int)
    return measure(
        label,
        scores,
        sensitive_features={"g": group},
        randomized_groups=1.0,
        values={"g": ("a", "b", "c")},
        site="a",
        **more,
    )


def test_scores_in_merged_ranges_stay_rows_when_groups_are_corrected():
    """Whatever bins such rows are in, their number is the same, and every placement is possible."""
    sums = SiteSums.from_json(randomized_rows().to_json(min_bin=20))
    view = audit(sums).view
    assert view.bin_error is not None and view.bin_error[:2].any()
    fewest, most = (np.cumsum(each[..., ::-1], -1) for each in map(view.shifted_histogram, (0, 1)))
    assert fewest[..., -1] == pytest.approx(most[..., -1])
    assert (fewest <= most + 1e-9).all()
    true = np.cumsum(audit(randomized_rows()).view.histogram[..., ::-1], -1)  # no ranges merged
    assert ((fewest <= true + 1e-6) & (true <= most + 1e-6)).all()


def test_reports_of_randomized_groups_have_figures(tmp_path):
    audit(SiteSums.from_json(randomized_rows().to_json(min_bin=20))).save(tmp_path / "report")
    assert "interpolated" in (tmp_path / "report" / "report.html").read_text("utf-8")


def test_noise_and_withheld_counts_are_corrected_by_what_they_can_move():
    keep = math.e / (math.e + 2)
    matrix = np.full((3, 3), (1 - keep) / 2) + np.eye(3) * (keep - (1 - keep) / 2)
    inverse = np.linalg.inv(matrix)
    sums = randomized_rows(epsilon=1.0)
    variance = next(iter(next(iter(sums.sites.values())).tables.values()))[0, 0, NOISE]
    assert audit(sums).view.noise[0, 0, :3, 0] == pytest.approx(variance * (inverse**2).sum(1))
    sums = randomized_rows(120, min_cell=15)
    (site,) = sums.sites.values()
    slack = [site.tables["a",][..., SLACK], site.tables["b",][..., SLACK]]
    slack = np.stack([*slack, site.tables["c",][..., SLACK]])
    assert slack.any()
    wanted = np.einsum("ag,gyd->yad", np.abs(inverse), slack)
    assert audit(sums).view.slack[0, :, :3] == pytest.approx(wanted)


def test_large_epsilon_is_no_randomization():
    rows = make_rows(15)
    plain = audit(measure_rows(rows))
    found = audit(measure_rows(rows, randomized_groups=40.0, values={"sex": ("f", "m")}))
    for name in ("sp", "eop", "acc"):
        one, other = plain.gaps[name], found.gaps[name]
        assert (one.value, one.low, one.high) == pytest.approx(
            (other.value, other.low, other.high), abs=1e-6
        )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"randomized_groups": 1.0}, "needs all values of 'sex'"),
        ({"randomized_groups": -1.0, "values": {"sex": ("f", "m")}}, "randomized_groups"),
        ({"randomized_groups": 1.0, "values": {"sex": ("f",)}}, "two different values"),
    ],
)
def test_wrong_randomized_groups_are_one_line(more, said):
    with pytest.raises(FedgftError) as caught:
        measure_rows(make_rows(0), **more)
    assert said in str(caught.value)


# Probabilities of groups


def test_probabilities_count_a_row_for_each_group():
    rows = make_rows(16)
    rng = np.random.default_rng(2)
    p = rng.random(len(rows))
    sums = measure(
        rows.y, rows.score, group_probabilities={"sex": {"f": p, "m": 1 - p}}, site="north"
    )
    found = audit(SiteSums.from_json(sums.to_json()))
    d = (rows.score >= 0.5).to_numpy(float)
    assert found.rates["sp"]["f"].value == pytest.approx((p * d).sum() / p.sum())
    assert found.rates["sp"]["m"].value == pytest.approx(((1 - p) * d).sum() / (1 - p).sum())
    assert any("biased" in text for text in found.warnings)
    assert sums.rows() == pytest.approx(len(rows))


def test_certain_probabilities_are_groups():
    rows = make_rows(17)
    p = (rows.sex == "f").astype(float)
    found = audit(measure(rows.y, rows.score, group_probabilities={"sex": {"f": p, "m": 1 - p}}))
    plain = audit(measure_rows(rows))
    one, other = found.gaps["sp"], plain.gaps["sp"]
    assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0.5, 0.2], [0.5, 0.5], "add up to 0.7"),
        ([1.5, 0.2], [0.5, 0.8], "outside [0, 1]"),
        ([0.5, None], [0.5, 0.5], "only some of the probabilities"),
        (["x", "y"], [0.5, 0.5], "'x'"),
    ],
)
def test_wrong_probabilities_are_one_line(first, second, said):
    with pytest.raises(FedgftError) as caught:
        measure([0, 1], [0, 1], group_probabilities={"sex": {"f": first, "m": second}})
    assert said in str(caught.value)


def test_probabilities_take_the_place_of_groups():
    p = {"sex": {"f": [0.5, 0.5], "m": [0.5, 0.5]}}
    with pytest.raises(FedgftError, match="takes the place"):
        measure([0, 1], [0, 1], sensitive_features=["a", "b"], group_probabilities=p)
    with pytest.raises(FedgftError, match="sensitive_features"):
        measure([0, 1], [0, 1])

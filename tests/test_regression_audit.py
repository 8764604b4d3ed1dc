"""The audit of models that predict numbers: equal to Fairlearn, SciPy and formulas written out."""

import json
import math
from typing import Any

import numpy as np
import pytest
from fairlearn.metrics import MetricFrame, mean_prediction
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import studentized_range, t, ttest_ind
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from fedgft.auditing import RegressionAudit, audit_regression, measure_regression
from fedgft.errors import FedgftError
from test_html_escaping import HOSTILE, TAGS, Page

VALUES = st.floats(-1e5, 1e5, allow_subnormal=False).map(lambda x: round(x, 2))
ROWS = st.lists(
    st.tuples(VALUES, VALUES, st.sampled_from("ab"), st.sampled_from("xyz"), st.floats(0.2, 5)),
    min_size=4,
    max_size=80,
)
FAIRLEARN = {
    "mean-prediction": mean_prediction,
    "mean-outcome": lambda y, _, **more: np.average(y, weights=more.get("sample_weight")),
    "mean-error": lambda y, p, **more: np.average(y - p, weights=more.get("sample_weight")),
    "mean-absolute-error": mean_absolute_error,
    "mean-squared-error": mean_squared_error,
}


def transform(name: str, y: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The value of each row whose mean the metric is."""
    residual = y - p
    return {
        "mean-prediction": p,
        "mean-outcome": y,
        "mean-error": residual,
        "mean-absolute-error": abs(residual),
        "mean-squared-error": residual**2,
    }[name]


def draw_rows(seed: int, n: int = 300, groups: str = "ab") -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(seed)
    group = generator.choice(list(groups), n)
    shift = np.array([groups.index(g) for g in group])
    y = 100 + 10 * shift + generator.normal(0, 10, n)
    return y, y + generator.normal(0, 3 + shift, n) - shift, group


@settings(max_examples=60)
@given(rows=ROWS, weighted=st.booleans(), cut=st.integers(0, 79))
def test_means_and_gaps_equal_fairlearn(rows, weighted, cut):
    """Over two sites, by one attribute and by two, with and without weights."""
    cut = 1 + cut % (len(rows) - 1)
    y, p, a, b, w = (np.array(column) for column in zip(*rows, strict=True))
    parts = []
    for site, part in (("north", slice(None, cut)), ("south", slice(cut, None))):
        features = {"a": a[part], "b": b[part]}
        weights = w[part] if weighted else None
        parts.append(
            measure_regression(
                y[part],
                p[part],
                sensitive_features=features,
                sample_weight=weights,
                site=site,
                min_cell=0,
            )
        )
    found = audit_regression(parts)
    for title, features in {"a": [a], "b": [b], "a & b": [a, b]}.items():
        extra = {"sample_params": {"sample_weight": w}} if weighted else {}
        results = found.attributes[title]
        names = np.array([" & ".join(each) for each in zip(*features, strict=True)])
        for name, function in FAIRLEARN.items():
            frame = MetricFrame(
                metrics=function, y_true=y, y_pred=p, sensitive_features=names, **extra
            )
            scale = 1e-9 * (1 + abs(transform(name, y, p)).max())
            for group, value in frame.by_group.items():
                assert results.means[name][group].value == pytest.approx(value, abs=scale)
            gap = results.gaps[name]
            if len(frame.by_group) > 1:
                assert gap.value == pytest.approx(frame.difference(), abs=2 * scale)
                assert gap.pair is not None
                if results.means[name][gap.pair[1]].value > 0 and "error" in name[5:]:
                    expected = results.means[name][gap.pair[1]].value
                    expected /= results.means[name][gap.pair[0]].value
                    if name != "mean-error":
                        assert gap.ratio.value == pytest.approx(expected)
        for group, fit in results.fit.items():
            rows_of = names == group
            if len(set(y[rows_of])) > 1:
                weights = w[rows_of] if weighted else None
                expected = r2_score(y[rows_of], p[rows_of], sample_weight=weights)
                assert fit.r_squared == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), n=st.integers(40, 300))
def test_two_groups_have_the_interval_of_welch(seed, n):
    """As SciPy has it; squared errors have other degrees of freedom, see the next test."""
    y, p, g = draw_rows(seed, n)
    assume(min((g == "a").sum(), (g == "b").sum()) >= 10)
    found = audit_regression(
        {"north": (y[::2], p[::2], g[::2]), "south": (y[1::2], p[1::2], g[1::2])}
    )
    for name in FAIRLEARN:
        z = transform(name, y, p)
        expected = ttest_ind(z[g == "a"], z[g == "b"], equal_var=False).confidence_interval()
        each = found.difference(name, "a", "b")
        if name == "mean-squared-error":
            assert each.high - each.low >= expected.high - expected.low
            continue
        assert (each.low, each.high) == pytest.approx((expected.low, expected.high), rel=1e-8)
        gap = found.gaps[name]
        assert gap.low == pytest.approx(max(expected.low, -expected.high, 0), abs=1e-8)
        assert gap.high == pytest.approx(max(expected.high, -expected.low))


def test_degrees_of_freedom_of_squared_errors_follow_their_kurtosis():
    y, p, g = draw_rows(5, 200)
    found = audit_regression({"north": (y, p, g)})
    values, errors, freedom = [], [], []
    for group in "ab":
        s = (y - p)[g == group] ** 2
        n = len(s)
        kurtosis = np.mean(s**2) / s.mean() ** 2
        values.append(s.mean())
        errors.append(s.var(ddof=1) / n)
        freedom.append(min(n - 1, 2 * n / (5 * kurtosis - 1)))
    df = sum(errors) ** 2 / sum(e**2 / f for e, f in zip(errors, freedom, strict=True))
    half = t.ppf(0.975, df) * math.sqrt(sum(errors))
    each = found.difference("mse", "a", "b")
    difference = values[0] - values[1]
    assert (each.low, each.high) == pytest.approx((difference - half, difference + half))


@pytest.mark.parametrize("groups", ["abc", "abcde"])
def test_the_largest_of_many_gaps_has_the_limits_of_games_and_howell(groups):
    """Written out in loops: q(0.95; k, df) sqrt((v_a + v_b) / 2), the widest reach of all pairs."""
    y, p, g = draw_rows(1, 240, groups)
    found = audit_regression({"north": (y, p, g)})
    for name in ("mean-prediction", "mean-error", "mean-absolute-error"):
        z = transform(name, y, p)
        lows, highs, differences = [], [], []
        for i, one in enumerate(groups):
            for other in groups[i + 1 :]:
                a, b = z[g == one], z[g == other]
                va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
                df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
                half = studentized_range.ppf(0.95, len(groups), df) * math.sqrt((va + vb) / 2)
                d = abs(a.mean() - b.mean())
                differences.append(d)
                lows.append(max(d - half, 0))
                highs.append(d + half)
        gap = found.gaps[name]
        assert gap.value == pytest.approx(max(differences))
        assert gap.low == pytest.approx(max(lows), rel=2e-3, abs=1e-2)
        assert gap.high == pytest.approx(max(highs), rel=2e-3) and gap.high >= max(highs)


def test_weighted_intervals_come_from_linearization():
    """The variance of a weighted mean, and Kish's effective number, in a loop."""
    y, p, g = draw_rows(2, 200)
    w = np.random.default_rng(2).uniform(0.1, 4, 200)
    sums = measure_regression(y, p, sensitive_features=g, sample_weight=w, site="north")
    found = audit_regression(sums)
    parts = []
    for group in "ab":
        x, weight = p[g == group], w[g == group]
        n = len(x)
        mean = sum(weight * x) / sum(weight)
        error = n / (n - 1) * sum((weight * (x - mean)) ** 2) / sum(weight) ** 2
        parts.append((mean, error, sum(weight) ** 2 / sum(weight**2) - 1))
    (a, va, fa), (b, vb, fb) = parts
    df = (va + vb) ** 2 / (va**2 / fa + vb**2 / fb)
    half = t.ppf(0.975, df) * math.sqrt(va + vb)
    each = found.difference("mean-prediction", "a", "b")
    assert (each.low, each.high) == pytest.approx((a - b - half, a - b + half))
    equal = measure_regression(y, p, sensitive_features=g, sample_weight=[3.0] * 200, site="n")
    plain = measure_regression(y, p, sensitive_features=g, site="n")
    one, two = (audit_regression(s).gaps["mean-error"] for s in (equal, plain))
    assert (one.value, one.low, one.high) == pytest.approx((two.value, two.low, two.high))


def test_standardized_differences_and_ratios_follow_their_formulas():
    y, p, g = draw_rows(3)
    found = audit_regression({"north": (y, p, g)})
    first, second = found.gaps["mean-prediction"].pair
    a, b = p[g == first], p[g == second]
    va, vb = a.var(ddof=1), b.var(ddof=1)
    square = (va + vb) / 2
    d = (a.mean() - b.mean()) / math.sqrt(square)
    fa, fb = len(a) - 1, len(b) - 1
    variance = d**2 * (va**2 / fa + vb**2 / fb) / (8 * square**2)
    variance += (va / len(a) + vb / len(b)) / square
    expected = (d, d - 1.959964 * math.sqrt(variance), d + 1.959964 * math.sqrt(variance))
    smd = found.gaps["mean-prediction"].standardized
    assert (smd.value, smd.low, smd.high) == pytest.approx(expected)
    gap = found.gaps["mean-absolute-error"]
    errors = [abs(y - p)[g == group] for group in gap.pair]
    ratio = errors[1].mean() / errors[0].mean()
    assert gap.ratio.value == pytest.approx(ratio) and gap.ratio.low < ratio < gap.ratio.high
    assert found.gaps["mean-prediction"].ratio.value is None


@settings(max_examples=25)
@given(seed=st.integers(0, 999), sites=st.integers(1, 5), groups=st.sampled_from(["ab", "abc"]))
def test_contributions_of_sites_add_up_to_the_gap(seed, sites, groups):
    y, p, g = draw_rows(seed, 400, groups)
    site = np.random.default_rng(seed + 1).choice([f"s{i}" for i in range(sites)], 400)
    found = audit_regression({s: (y[site == s], p[site == s], g[site == s]) for s in set(site)})
    for name, gap in found.gaps.items():
        parts = [each.gaps[name] for each in found.sites.values()]
        assert sum(part.contribution for part in parts) == pytest.approx(gap.value)
        z = transform(name, y, p)
        weights, differences = [], []
        for s in found.sites:
            a, b = ((g == group) & (site == s) for group in gap.pair)
            local = found.sites[s].gaps[name]
            assert local.own + local.mix == pytest.approx(local.contribution)
            if a.any() and b.any():
                assert local.local.value == pytest.approx(z[a].mean() - z[b].mean())
                weights.append(a.sum() * b.sum() / (a.sum() + b.sum()))
                differences.append(z[a].mean() - z[b].mean())
        assert gap.within.value == pytest.approx(np.average(differences, weights=weights))
        if sites == 1:
            assert parts[0].mix == pytest.approx(0, abs=1e-9)


# Verdicts


def test_verdicts_need_a_stated_tolerance():
    y, p, g = draw_rows(4)
    sums = measure_regression(y, p, sensitive_features=g, site="north")
    found = audit_regression(sums)
    assert dict(found.verdicts) == {} and {each.state for each in found.verdict()} == {""}
    gap = found.gaps["mean-prediction"]
    tolerances = {gap.low / 2: "exceeds", gap.value: "inconclusive", gap.high * 2: "within"}
    for tolerance, state in tolerances.items():
        judged = audit_regression(sums, tolerance={"mean-prediction": tolerance})
        assert dict(judged.verdicts) == {"mean-prediction": state}
        assert judged.report().state == state
    found.check({"mean-prediction": gap.high})
    with pytest.raises(FedgftError) as caught:
        found.check({"mean-prediction": gap.low / 2, "mse": 1e9})
    assert caught.value.kind == "data" and "mean-prediction" in str(caught.value)


def test_a_withheld_group_is_not_estimable_and_never_fair():
    y, p, g = draw_rows(4)
    g = g.astype("U20")
    g[:5] = "few"
    found = audit_regression(
        measure_regression(y, p, sensitive_features=g, site="north"),
        tolerance={"mean-error": 1e6, "mean-prediction": 0.001},
    )
    gap = found.gaps["mean-error"]
    assert gap.value is None and gap.among_estimable.value > 0
    assert found.means["mean-error"]["few"].value is None
    assert dict(found.verdicts) == {"mean-error": "not estimable", "mean-prediction": "exceeds"}
    assert any("few" in text for text in found.warnings)
    with pytest.raises(FedgftError):
        found.check({"mean-error": 1e6})


def test_few_rows_have_no_interval():
    y, p, g = draw_rows(4, 30)
    g[:] = "a"
    g[:9] = "b"
    found = audit_regression({"north": (y, p, g)}, tolerance={"mean-error": 1e9})
    assert found.gaps["mean-error"].value is not None and found.gaps["mean-error"].high is None
    assert found.verdicts["mean-error"] == "not estimable"
    one = audit_regression({"north": (y, p, ["a"] * 30)}, tolerance={"mean-error": 1e9})
    assert one.gaps["mean-error"].value is None and one.verdicts["mean-error"] == "not estimable"
    with pytest.raises(FedgftError, match="nothing to audit"):
        audit_regression(measure_regression(y[:9], p[:9], sensitive_features=g[:9], site="n"))


def test_a_constant_outcome_has_no_r_squared():
    y, p, g = [5.0] * 40, [4.0, 6.0] * 20, ["a"] * 20 + ["b"] * 20
    found = audit_regression({"north": (y, p, g)})
    assert found.fit["a"].r_squared is None and found.fit["a"].rmse.value == 1
    assert any("constant" in text for text in found.warnings)
    same = found.gaps["mean-squared-error"]
    assert (same.value, same.low, same.high, same.standardized.value) == (0, 0, 0, None)
    assert json.loads(found.to_json())["views"]


def test_heavy_tails_are_warned_of():
    generator = np.random.default_rng(0)
    g = ["a", "b"] * 300
    for draw, warned in ((generator.normal, False), (generator.standard_cauchy, True)):
        y = draw(size=600)
        found = audit_regression({"north": (y, np.zeros(600), g)})
        assert any("too short" in text for text in found.warnings) == warned


@pytest.mark.parametrize(
    "tolerance",
    [0.05, {"sp": 0.1}, {"mean-error": -1}, {"mae": 1, "mean-absolute-error": 2}, {3: 1}],
)
def test_wrong_tolerances_are_refused(tolerance):
    sums = measure_regression(*draw_rows(0)[:2], sensitive_features=draw_rows(0)[2], site="n")
    with pytest.raises((FedgftError, TypeError)) as caught:
        audit_regression(sums, tolerance=tolerance)
    if isinstance(caught.value, FedgftError):
        assert "tolerance" in str(caught.value)


# Objects, frames and pages


def make_audit(names: tuple[str, ...] = ("a", "b", "c")) -> RegressionAudit:
    y, p, g = draw_rows(6, 400, "abc")
    features = {"sex": [names["abc".index(x) % len(names)] for x in g], "age": ["x", "y"] * 200}
    parts = [
        measure_regression(
            y[i::2],
            p[i::2],
            sensitive_features={name: values[i::2] for name, values in features.items()},
            site=site,
        )
        for i, site in enumerate(("north", names[0]))
    ]
    return audit_regression(parts, tolerance={"mean-prediction": 3}, reference_groups=["age=x"])


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_frames_hold_the_numbers_of_the_objects(library):
    found = make_audit()
    gaps = found.to_frame(library=library)
    assert list(gaps["value"]) == [gap.value for gap in found.gaps.values()]
    means = found.to_frame("means", by="sex", library=library)
    assert len(means) == 5 * 3 and means["rows"].sum() == 5 * 400
    sites = found.to_frame("sites", library=library)
    assert len(sites) == 5 * 2
    with pytest.raises(FedgftError):
        found.to_frame("rates")
    with pytest.raises(FedgftError):
        found.to_frame(by="race")


def test_a_report_is_saved_and_names_its_numbers(tmp_path):
    found = make_audit()
    paths = found.save(tmp_path / "report")
    assert [path.name for path in paths] == ["report.html", "report.md", "audit.json"]
    summary = json.loads(paths[2].read_text())
    assert summary["format"] == "fedgft-audit-regression-1"
    assert summary["views"]["sex"]["gaps"]["mean-error"]["value"] == pytest.approx(
        found.attributes["sex"].gaps["mean-error"].value
    )
    assert summary["views"]["age"]["reference"] == "x"
    markdown = paths[1].read_text()
    assert "Mean absolute error" in markdown and found.lead() in markdown.replace("\\", "")
    found.save(tmp_path / "report")  # its own files are replaced
    assert "mean prediction" in repr(found) and "<table" in found._repr_html_()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_plain_text_in_the_page(name):
    found = make_audit((name, "b", name + "2"))
    page = Page(found.to_html())
    plain = Page(make_audit().to_html())
    tags = [[tag for tag, *_ in each.found if tag in TAGS] for each in (page, plain)]
    assert tags[0] == tags[1] and page.comments == plain.comments
    assert len(page.scripts) == len(plain.scripts)
    assert name in "".join(page.text)


def test_charts_compile():
    vl_convert = pytest.importorskip("vl_convert")
    figures = make_audit().report(figures=True).figures
    assert [figure.name for figure in figures] == ["forest", "means"]
    for figure in figures:
        assert "<svg" in vl_convert.vegalite_to_svg(figure.spec)
        assert "percentage" not in json.dumps(figure.spec)

"""Areas and shares at the top, compared with scikit-learn, loops and brute force on the rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedgft.auditing import audit, measure
from fedgft.auditing.ranking import TOP_SHARES, estimate_areas, summarize_top
from fedgft.auditing.score_samples import sample_scores
from test_score_distributions import draw_rows, through_files

ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 9)), min_size=4, max_size=60
)


def cross_area(positives, negatives) -> float | None:
    """P(positive above negative) + ties / 2, in a double loop."""
    if not len(positives) or not len(negatives):
        return None
    wins = 0.0
    for score in positives:
        for other in negatives:
            wins += 1.0 if score > other else 0.5 if score == other else 0.0
    return wins / len(positives) / len(negatives)


def audit_grid(rows):
    g, y, k = (np.array(column) for column in zip(*rows, strict=True))
    p = (k + 0.5) / 10
    made = audit(measure(y, None, scores=p, sensitive_features=g, bins=10, classes=(0, 1)))
    return y, p, g, made


@settings(deadline=None, max_examples=25)
@given(ROWS)
def test_areas_of_scores_at_the_middles_are_exact(rows):
    y, p, g, made = audit_grid(rows)
    found = made.ranking["group"]["1"]
    for name, area in found["areas"].items():
        mine = g == name
        if len(set(y[mine])) < 2:
            assert area["value"] is None is area["low"]
            assert found["gap"]["high"] is None
            continue
        assert area["value"] == pytest.approx(roc_auc_score(y[mine], p[mine]), abs=1e-12)
        assert area["least"] <= area["value"] <= area["most"]
    for area in found["cross"]:
        positives = p[(g == area["positives"]) & (y == 1)]
        truth = cross_area(positives, p[(g == area["negatives"]) & (y == 0)])
        assert area["value"] == (None if truth is None else pytest.approx(truth, abs=1e-12))


@settings(deadline=None, max_examples=20)
@given(ROWS)
def test_the_top_is_that_of_brute_force(rows):
    """Everybody sorted by score; of those with the same score as the last one, a share is taken."""
    _, p, g, made = audit_grid(rows)
    for record in made.ranking["group"]["1"]["tops"]:
        wanted = record["top"] * len(p)
        taken = dict.fromkeys(g.tolist(), 0.0)
        least, most = dict(taken), dict(taken)
        left = wanted
        for score in sorted(set(p.tolist()), reverse=True):
            tied = p == score
            part = min(left, tied.sum())
            for name in taken:
                own = (tied & (g == name)).sum()
                taken[name] += own * part / tied.sum()
                least[name] += max(0.0, part - (tied.sum() - own))
                most[name] += min(part, own)
            left -= part
            if left <= 1e-9:
                break
        for name, group in record["groups"].items():
            size = (g == name).sum()
            assert group["share"] == pytest.approx(taken[name] / wanted, abs=1e-9)
            assert group["share_least"] == pytest.approx(least[name] / wanted, abs=1e-9)
            assert group["share_most"] == pytest.approx(most[name] / wanted, abs=1e-9)
            assert group["selected"] == pytest.approx(taken[name] / size, abs=1e-9)
            assert group["of_all"] == pytest.approx(size / len(p))


@pytest.mark.parametrize("min_bin", [1, 5, 40])
def test_the_rows_are_within_the_range_of_the_bins(min_bin):
    y, p, g = draw_rows(3, 900, "abc")
    found = through_files(y, p, g, min_bin=min_bin).ranking["group"]["1"]
    for area in found["cross"]:
        scores = (p[(g == area["positives"]) & (y == 1)], p[(g == area["negatives"]) & (y == 0)])
        truth = cross_area(*scores)
        assert area["least"] - 1e-9 <= truth <= area["most"] + 1e-9
        assert area["low"] <= area["least"] and area["most"] <= area["high"]
    for name, area in found["areas"].items():
        truth = roc_auc_score(y[g == name], p[g == name])
        assert area["least"] - 1e-9 <= truth <= area["most"] + 1e-9
    order = np.argsort(-p, kind="stable")
    for record in found["tops"]:
        number = record["top"] * len(p)
        top = order[: int(number)]
        part = number - int(number)
        for name, group in record["groups"].items():
            taken = (g[top] == name).sum() + part * (g[order[int(number)]] == name if part else 0)
            assert group["share_least"] - 1e-9 <= taken / number <= group["share_most"] + 1e-9
        assert record["above"] <= p[order[int(number) - 1]] <= 1
        assert sum(group["share"] for group in record["groups"].values()) == pytest.approx(1)


def test_the_variance_of_an_area_is_that_of_delong():
    """Written out: the placements of all positives among the negatives, and the other way round."""
    y, p, g = draw_rows(4, 400)
    p = (np.floor(p * 49.99) + 0.5) / 50
    view = audit(measure(y, p, sensitive_features=g, bins=50)).view
    positives, negatives = sample_scores(view, 0, [1]), sample_scores(view, 0, [0])
    found = estimate_areas(positives, negatives, np.array([0]), np.array([1]))
    yes, no = p[(g == "a") & (y == 1)], p[(g == "b") & (y == 0)]
    wins = np.array([[1.0 if s > t else 0.5 if s == t else 0.0 for t in no] for s in yes])
    variance = wins.mean(1).var(ddof=1) / len(yes) + wins.mean(0).var(ddof=1) / len(no)
    area = wins.mean()
    assert found.rate[0, 0] == pytest.approx(area)
    assert area * (1 - area) / found.n[0, 0] == pytest.approx(variance)


def test_perfect_ranking_has_an_interval():
    g = np.repeat(["a", "b"], 100)
    y = np.tile([0, 1], 100)
    found = audit(measure(y, 0.1 + 0.8 * y, sensitive_features=g)).ranking["group"]["1"]
    assert found["areas"]["a"]["value"] == 1 and 0.9 < found["areas"]["a"]["low"] < 0.99
    top = found["tops"][-1]["groups"]["a"]
    assert top["share_low"] < top["share"] < top["share_high"]


def test_nobody_of_a_group_at_the_top():
    """No share of a group is certain because none of a few people is of it."""
    generator = np.random.default_rng(0)
    g = np.repeat(["a", "b"], [2000, 500])
    p = np.where(g == "a", 0.5, 0.1) + 0.4 * generator.random(2500)
    found = audit(measure(p > 0.6, p, sensitive_features=g)).ranking["group"]["True"]
    groups = found["tops"][1]["groups"]  # 5%: 125 people
    assert groups["b"]["share"] == 0 and 0 < groups["b"]["share_high"] < 0.1
    assert groups["a"]["share"] == 1 and 0.9 < groups["a"]["share_low"] < 1
    assert groups["a"]["selected_low"] < groups["a"]["selected"] < groups["a"]["selected_high"]


def test_noise_widens_the_intervals():
    y, p, g = draw_rows(5, 6000)
    plain = audit(measure(y, p, sensitive_features=g, bins=20)).ranking["group"]["1"]
    noisy = audit(measure(y, p, sensitive_features=g, epsilon=0.5, values={"group": ("a", "b")}))
    found = noisy.ranking["group"]["1"]
    for name in "ab":
        one, other = plain["areas"][name], found["areas"][name]
        assert other["high"] - other["low"] > one["high"] - one["low"]
        assert other["low"] <= roc_auc_score(y[g == name], p[g == name]) <= other["high"]
        one, other = (each["tops"][4]["groups"][name] for each in (plain, found))
        assert other["share_low"] <= one["share"] <= other["share_high"]


@pytest.mark.slow
def test_noise_is_in_the_variance_of_the_top_and_of_areas():
    """The spread over many draws of noise on the same rows is the variance that is stated."""
    generator = np.random.default_rng(6)
    counts = generator.poisson(np.linspace(300, 100, 20), (2, 2, 20)).astype(float)
    sd = 15.0
    from fedgft.auditing.score_samples import ScoreSamples

    def samples(table):
        zero = np.zeros(2)
        noise = np.full(table.shape, sd**2)
        return ScoreSamples(("a", "b"), np.stack([table] * 3), noise, table.sum(-1), zero, zero)

    drawn = counts + sd * generator.standard_normal((3000, *counts.shape))
    at = (np.array([0]), np.array([1]))
    areas = [estimate_areas(samples(y), samples(n), *at).rate[0, 0] for y, n in drawn]
    stated = estimate_areas(samples(counts[0]), samples(counts[1]), *at).variance[0, 0]
    assert np.var(areas) == pytest.approx(stated, rel=0.12)
    from fedgft.auditing.ranking import _shares_near, _top_noise, cut_top

    total = counts.sum(0)
    sums = drawn.sum(1)
    near = _shares_near(samples(total), 0.2)
    stated = _top_noise(samples(total), 0.2, near)  # of draws with the noise of one table
    noisy = total + sd * generator.standard_normal(sums.shape)
    top = np.array([cut_top(table, 0.2) / (0.2 * table.sum()) for table in noisy])
    assert top.var(0) * (0.2 * total.sum()) ** 2 == pytest.approx(stated, rel=0.25)


def test_tops_are_those_of_the_summary():
    y, p, g = draw_rows(8, 500)
    made = audit(measure(y, p, sensitive_features=g))
    tops = made.ranking["group"]["1"]["tops"]
    assert [record["top"] for record in tops] == list(TOP_SHARES)
    assert tops[1] == summarize_top(sample_scores(made.view), 0.05)
    auc = made.to_dict()["auc"]["1"]["a"]
    area = made.ranking["group"]["1"]["areas"]["a"]
    assert auc["auc"] == pytest.approx(area["value"]) and auc["low"] == area["low"]
    assert auc["bin_error"] == pytest.approx(area["most"] - area["value"])


def test_one_group_has_areas_and_no_gaps():
    y, p, _ = draw_rows(9, 200)
    found = audit(measure(y, p, sensitive_features=["a"] * 200))
    ranking = found.ranking["group"]["1"]
    assert ranking["areas"]["a"]["low"] is not None and ranking["gap"]["gap"] is None
    assert ranking["cross"] == [] and ranking["cross_gap"]["gap"] is None
    assert found.distributions == {}

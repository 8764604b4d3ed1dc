"""Distances between score distributions, compared with SciPy on the rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp, wasserstein_distance

from fedgft.auditing import SiteSums, audit, measure
from fedgft.auditing.score_distributions import MAX_COMPARED, PairedSamples, threshold_gaps
from fedgft.auditing.score_samples import ScoreSamples, sample_scores
from fedgft.auditing.tables_and_charts import draw_cumulative

DISTANCES = ("threshold_gap", "wasserstein")


def reference(a, b) -> dict[str, float]:
    return {"threshold_gap": ks_2samp(a, b).statistic, "wasserstein": wasserstein_distance(a, b)}


def draw_rows(seed: int, n: int, groups: str = "ab"):
    generator = np.random.default_rng(seed)
    g = generator.choice(list(groups), n)
    y = generator.integers(0, 2, n)
    shift = generator.uniform(-0.3, 0.3) * (g == "a")
    p = np.clip(generator.beta(2, 3, n) + shift + 0.2 * y, 0, 1)
    return y, p, g


def through_files(y, p, g, *, sites: int = 3, min_bin: int = 5, **options):
    """The audit of files of several sites, which merge bins with few rows."""
    parts = [
        measure(y[i::sites], p[i::sites], sensitive_features=g[i::sites], site=str(i), **options)
        for i in range(sites)
    ]
    return audit([SiteSums.from_json(part.to_json(min_bin=min_bin)) for part in parts])


ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 9)), min_size=4, max_size=80
)


@settings(deadline=None, max_examples=25)
@given(ROWS)
def test_distances_of_scores_at_the_middles_are_those_of_scipy(rows):
    g, y, k = (np.array(column) for column in zip(*rows, strict=True))
    p = (k + 0.5) / 10
    if len(set(g)) < 2:
        return
    made = audit(measure(y, None, scores=p, sensitive_features=g, bins=10, classes=(0, 1)))
    found = made.distributions["group"]["1"]
    for among, kept in (("everyone", y >= 0), ("positives", y == 1)):
        for pair in found[among]["pairs"]:
            scores = [p[kept & (g == pair[key])] for key in ("first", "second")]
            if not min(map(len, scores)):
                assert pair["wasserstein"]["value"] is None is pair["threshold_gap"]["value"]
                continue
            for key, value in reference(*scores).items():
                assert pair[key]["value"] == pytest.approx(value, abs=1e-9)
                assert pair[key]["least"] - 1e-9 <= value <= pair[key]["most"] + 1e-9
        for key in DISTANCES:
            values = [pair[key]["value"] for pair in found[among]["pairs"]]
            known = [value for value in values if value is not None]
            assert found[among][key]["value"] == (max(known) if known else None)


@pytest.mark.parametrize("min_bin", [1, 5, 40])
@pytest.mark.parametrize("seed", range(4))
def test_distances_of_the_rows_are_within_the_range_of_the_bins(seed, min_bin):
    y, p, g = draw_rows(seed, 300 + 400 * seed)
    made = through_files(y, p, g, min_bin=min_bin)
    found = made.distributions["group"]["1"]
    for among, kept in (("everyone", y >= 0), ("positives", y == 1)):
        (pair,) = found[among]["pairs"]
        for key, value in reference(*(p[kept & (g == name)] for name in "ab")).items():
            assert pair[key]["least"] - 1e-6 <= value <= pair[key]["most"] + 1e-6
            assert pair[key]["low"] <= pair[key]["least"] <= pair[key]["value"]
            assert pair[key]["value"] <= pair[key]["most"] <= pair[key]["high"]


def test_the_threshold_is_where_the_groups_are_farthest_apart():
    y, p, g = draw_rows(7, 4000)
    (pair,) = audit(measure(y, p, sensitive_features=g)).distributions["group"]["1"]["everyone"][
        "pairs"
    ]
    rates = [(p[g == pair[key]] >= pair["threshold"]).mean() for key in ("first", "second")]
    assert rates[0] - rates[1] == pytest.approx(pair["threshold_gap"]["value"], abs=1e-12)


def test_known_means_narrow_the_wasserstein_distance():
    """If one distribution is above the other, the distance is the difference of the means."""
    generator = np.random.default_rng(0)
    g = np.repeat(["a", "b"], 2000)
    p = np.where(g == "a", 0.7, 0.2) * generator.random(4000) + 0.1
    found = audit(measure(p > 0.4, p, sensitive_features=g)).distributions["group"]["True"]
    distance = found["everyone"]["wasserstein"]
    assert distance["value"] == pytest.approx(p[g == "a"].mean() - p[g == "b"].mean(), abs=1e-3)
    assert distance["most"] - distance["least"] < 0.002  # the bins alone allow +- 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "least"), [(0.0, 0.93), (0.15, 0.92)])
def test_intervals_contain_the_truth(shift, least):
    """Scores of measured rows, 120 federations; benchmarks/coverage has more."""
    generator = np.random.default_rng(3)
    grid = np.linspace(0, 1, 4001)
    below = [np.clip((grid - low) / 0.8, 0, 1) for low in (0.0, shift)]
    apart = np.abs(below[0] - below[1])
    truth = {"threshold_gap": apart.max(), "wasserstein": np.trapezoid(apart, grid)}
    hits = {key: [] for key in truth}
    for _ in range(120):
        n = int(generator.integers(150, 800))
        g = generator.choice(["a", "b"], n)
        p = 0.8 * generator.random(n) + shift * (g == "b")
        y = generator.integers(0, 2, n)
        found = audit(measure(y, p, sensitive_features=g)).distributions["group"]["1"]["everyone"]
        for key, value in truth.items():
            hits[key].append(found[key]["low"] - 1e-9 <= value <= found[key]["high"])
    assert all(np.mean(each) >= least for each in hits.values())


def test_a_group_without_rows_is_not_estimable():
    y, p, g = draw_rows(1, 400)
    made = audit(measure(y * (g == "a"), p, sensitive_features=g))
    positives = made.distributions["group"]["1"]["positives"]
    assert positives["without_rows"] == ["b"] and positives["mean"]["b"] is None
    assert positives["wasserstein"]["value"] is None and positives["threshold_gap"]["high"] is None
    assert "not estimable" in made.to_markdown()
    three = np.append(g, ["c"]), np.append(y, [0]), np.append(p, [0.5])
    made = audit(measure(three[1], three[2], sensitive_features=three[0]))
    found = made.distributions["group"]["1"]
    assert found["positives"]["without_rows"] == ["c"] and found["everyone"]["without_rows"] == []
    for each in found.values():  # a group of one row, or of none, may be farther apart
        assert each["threshold_gap"]["high"] is None is each["wasserstein"]["high"]
        assert each["threshold_gap"]["low"] is not None
    (table,) = (table for table in made.report().tables if "any threshold" in table.title)
    assert ["*" in row[4] for row in table.rows] == [False, True]


def test_noise_widens_the_intervals_and_withheld_counts_leave_none():
    y, p, g = draw_rows(2, 6000)
    plain = audit(measure(y, p, sensitive_features=g, bins=20)).distributions["group"]["1"]
    noisy = audit(measure(y, p, sensitive_features=g, epsilon=0.5, values={"group": ("a", "b")}))
    found = noisy.distributions["group"]["1"]
    for among in ("everyone", "positives"):
        for key in DISTANCES:
            one, other = plain[among][key], found[among][key]
            assert other["high"] - other["low"] > one["high"] - one["low"]
            truth = reference(*(p[(g == n) & ((y == 1) | (among == "everyone"))] for n in "ab"))
            assert other["low"] <= truth[key] <= other["high"]
    held = audit(measure(y, p, sensitive_features=g, min_cell=10))
    assert held.distributions == {} and held.ranking == {}
    assert held.to_dict()["distributions"] is None


def test_weights_count_as_effective_rows():
    """Squares twice as large as the rows: as sure as half of the rows."""
    counts = np.random.default_rng(0).integers(5, 60, (2, 20)).astype(float)

    def samples(rows: np.ndarray, squares: np.ndarray) -> ScoreSamples:
        nothing = np.zeros(2)
        return ScoreSamples(
            ("a", "b"), np.stack([rows] * 3), 0 * rows, squares, nothing, nothing + np.inf
        )

    pair = (np.array([0]), np.array([1]))
    weighted = threshold_gaps(PairedSamples(samples(2 * counts, 4 * counts.sum(-1)), *pair))
    single = threshold_gaps(PairedSamples(samples(counts, counts.sum(-1)), *pair))
    assert weighted.low == pytest.approx(single.low) and weighted.high == pytest.approx(single.high)


def test_each_class_of_three_has_its_own_scores():
    generator = np.random.default_rng(4)
    p = generator.dirichlet([1, 2, 3], 600)
    y = generator.choice(["x", "y", "z"], 600)
    g = generator.choice(["a", "b"], 600)
    made = audit(measure(y, p, sensitive_features=g))
    found = made.distributions["group"]
    assert list(found) == ["x", "y", "z"]
    (pair,) = found["y"]["positives"]["pairs"]
    truth = reference(*(p[(y == "y") & (g == name), 1] for name in "ab"))
    for key, value in truth.items():
        assert pair[key]["least"] - 1e-6 <= value <= pair[key]["most"] + 1e-6


def test_many_groups_are_compared_by_size():
    generator = np.random.default_rng(5)
    names = [f"group {i}" for i in range(30)]
    g = generator.choice(names, 3000, p=np.arange(1, 31) / 465)
    y = generator.integers(0, 2, 3000)
    made = audit(measure(y, generator.random(3000), sensitive_features=g))
    found = made.distributions["group"]["1"]["everyone"]
    assert len(found["compared"]) == MAX_COMPARED and len(found["pairs"]) == 66
    assert min(found["n"].values()) >= np.sort(np.unique(g, return_counts=True)[1])[-MAX_COMPARED]


def test_the_chart_shows_the_shares_below_every_edge():
    y, p, g = draw_rows(6, 800)
    made = audit(measure(y, p, sensitive_features=g))
    spec = draw_cumulative(made.view)
    rows = spec["data"]["values"]
    for row in rows[::17]:
        share = (p[g == row["group"]] < row["threshold"]).mean()
        if row["threshold"] < 1:
            assert row["share"] == pytest.approx(share, abs=1e-12)
        assert row["low"] <= row["share"] <= row["high"]
    assert len(rows) == 2 * 101
    samples = sample_scores(made.view)
    assert samples.rows.tolist() == [(g == "a").sum(), (g == "b").sum()]


def test_weighted_rows_have_the_distances_of_their_weighted_shares():
    y, p, g = draw_rows(9, 900)
    w = np.random.default_rng(1).choice([0.5, 1.0, 4.0], 900)
    p = (np.floor(p * 19.99) + 0.5) / 20
    plain, weighted, heavy = (
        audit(measure(y, p, sensitive_features=g, bins=20, sample_weight=each))
        for each in (None, w, np.full(900, 3.0))
    )
    (pair,) = weighted.distributions["group"]["1"]["everyone"]["pairs"]
    a, b = (g == pair["first"], g == pair["second"])
    truth = wasserstein_distance(p[a], p[b], w[a], w[b])
    assert pair["wasserstein"]["value"] == pytest.approx(truth, abs=1e-9)
    (one,), (three,) = (
        made.distributions["group"]["1"]["everyone"]["pairs"] for made in (plain, heavy)
    )
    assert three["wasserstein"]["low"] == pytest.approx(one["wasserstein"]["low"])
    assert three["threshold_gap"]["high"] == pytest.approx(one["threshold_gap"]["high"])
    width, plain_width = (
        each["threshold_gap"]["high"] - each["threshold_gap"]["low"] for each in (pair, one)
    )
    assert width > plain_width  # unequal weights: fewer effective rows

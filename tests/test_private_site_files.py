"""Protection of people in a site file: noise with a stated budget, suppressed small cells."""

import json
import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedgft.auditing import audit, measure
from fedgft.auditing.rates import list_views, pool_sites
from fedgft.auditing.thresholds import compute_curves
from fedgft.errors import FedgftError
from fedgft.privacy.noise import calibrate_noise
from fedgft.site_sums import COUNT, NOISE, SCORES, MeasurementSpec, SiteSums
from fedgft.site_sums.tables import possible_cells


def people(n: int = 500, seed: int = 0):
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 2, n)
    return y, generator.random(n), generator.choice(["a", "b", None], n)


def noisy(epsilon: float, **more):
    y, p, g = people()
    return measure(y, p, sensitive_features=g, site="n", epsilon=epsilon, **more)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_laplace_noise_has_the_stated_variance_and_budget(epsilon):
    mechanism = calibrate_noise(epsilon, 0.0)
    drawn = np.array(mechanism.add([0] * 120_000))
    assert drawn.dtype.kind == "i" and abs(drawn.mean()) < 5 * math.sqrt(
        mechanism.variance / 120_000
    )
    assert drawn.var() == pytest.approx(mechanism.variance, rel=0.05)  # noise of 1% at most
    # P(x) / P(x + 1) = e^epsilon for a count that one row moves by 1
    share = (drawn == 0).sum() / (drawn == 1).sum()
    assert math.log(share) == pytest.approx(epsilon, abs=0.1)


@pytest.mark.slow
def test_gaussian_noise_has_the_stated_variance():
    mechanism = calibrate_noise(1.0, 1e-6)
    drawn = np.array(mechanism.add([0] * 40_000))
    assert drawn.var() == pytest.approx(mechanism.variance, rel=0.05)
    # the classical bound sqrt(2 ln(1.25/delta)) / epsilon is a little larger than what is needed
    assert 0.7 * math.sqrt(2 * math.log(1.25e6)) < mechanism.scale < math.sqrt(2 * math.log(1.25e6))


def test_one_row_moves_one_count_by_one():
    """The sensitivity: two data sets that differ in one row, before noise."""
    y, p, g = people(50)
    tables = []
    for rows in (slice(None), slice(1, None)):
        sums = measure(y[rows], p[rows], sensitive_features=g[rows], site="n", bins=20)
        tables.append(sums.histogram)
    change = sum(
        np.abs(tables[0].get(k, 0) - tables[1].get(k, 0)).sum() for k in {**tables[0], **tables[1]}
    )
    assert change == 1


def test_everything_in_a_noisy_file_follows_from_the_noisy_counts():
    found = json.loads(noisy(1.0).to_json())
    for cell in found["cells"]:
        (score,) = cell["scores"].values()
        assert cell["count"] == sum(score["histogram"]) and "sum" not in score
    assert found["rows"]["counted"] == sum(cell["count"] for cell in found["cells"])
    privacy = found["privacy"]
    assert privacy["mechanism"] == "discrete laplace" and privacy["epsilon"] == 1.0
    assert privacy["sensitivity"] == 1 and "one row" in privacy["unit"]
    assert {tuple(cell["group"]) for cell in found["cells"]} == {("a",), ("b",), (None,)}


@pytest.mark.slow
def test_two_measurements_differ_and_the_mean_is_right():
    y, p, g = people()
    exact = (
        measure(y, p, sensitive_features=g, site="n", bins=20).sites["n"].tables[("a",)][..., COUNT]
    )
    drawn = [noisy(1.0).sites["n"].tables[("a",)] for _ in range(60)]
    counts = np.stack([table[..., COUNT] for table in drawn])
    assert (counts.std(0) > 0).all()
    error = np.sqrt(drawn[0][..., NOISE] / 60)
    assert (np.abs(counts.mean(0) - exact) < 4.5 * error).all()
    assert counts.var(0).mean() == pytest.approx(drawn[0][..., NOISE].mean(), rel=0.4)


def test_listed_names_say_nothing_about_the_data(tmp_path):
    from fedgft.auditing import measure_file

    path = tmp_path / "p.csv"
    path.write_text("y,g,d\n" + "1,a,1\n" * 30)
    made = measure_file(
        path,
        label="y",
        group="g",
        decision="d",
        values={"g": ("a", "rare")},
        classes=("0", "1"),
        epsilon=1.0,
    )
    found = json.loads(made.to_json())
    assert found["privacy"]["names"] == "declared"
    assert {tuple(cell["group"]) for cell in found["cells"]} == {("a",), ("rare",), (None,)}
    assert len(found["cells"]) == 3 * 4


def test_noisy_files_may_be_negative_and_others_may_not():
    found = json.loads(noisy(0.1).to_json())
    assert any(
        cell["count"] < 0 or min(cell["scores"]["1"]["histogram"]) < 0 for cell in found["cells"]
    )
    SiteSums.from_json(json.dumps(found), source="file")
    found["privacy"] = {"mechanism": "none", "min_cell": 0}
    with pytest.raises(FedgftError, match="file: cells"):
        SiteSums.from_json(json.dumps(found), source="file")


def test_an_audit_under_noise_is_wider_and_says_so():
    y, p, g = people(4000)
    plain = audit(measure(y, p, sensitive_features=g, site="n")).to_dict()
    rough = audit(measure(y, p, sensitive_features=g, site="n", epsilon=0.2)).to_dict()
    size = lambda found: found["metrics"]["sp"]["high"] - found["metrics"]["sp"]["low"]  # noqa: E731
    assert size(rough) > size(plain)
    assert any("Noise for privacy" in text for text in rough["warnings"])
    assert rough["privacy"]["largest_epsilon"] == 0.2


def test_more_classes_have_noise_on_counts_alone():
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(3), 200)
    y = generator.choice(["a", "b", "c"], 200)
    g = generator.choice(["u", "v"], 200)
    made = measure(y, p, sensitive_features=g, site="n", epsilon=1.0)
    assert not made.spec.scored and made.histogram == {}
    audit(made).to_html()


@pytest.mark.parametrize("threshold", [0.0, 0.29, 0.5, 0.505, 1.0])
def test_what_a_threshold_leaves_possible(threshold):
    """Every row of every score is in a cell that gets noise."""
    possible = possible_cells(MeasurementSpec(("0", "1"), ("g",), threshold, True, 20))
    scores = np.concatenate((np.linspace(0, 1, 2001), [threshold]))
    bins = np.minimum((scores * 20 + 1e-12).astype(int), 19)
    assert possible[(scores >= threshold).astype(int), bins].all()


def test_small_cells_are_withheld_and_nothing_else_tells():
    y, p, g = people(120)
    exact = json.loads(measure(y, p, sensitive_features=g, site="n").to_json())
    kept = json.loads(measure(y, p, sensitive_features=g, site="n", min_cell=10).to_json())
    counts = {(*c["group"], c["label"], c["decision"]): c["count"] for c in exact["cells"]}
    shown = {(*c["group"], c["label"], c["decision"]): c for c in kept["cells"]}
    assert set(shown) == set(counts)
    small = [key for key, n in counts.items() if n < 10]
    assert small and kept["privacy"]["suppressed_cells"] == len(small)
    for key, cell in shown.items():
        if key in small:
            assert cell["count"] is None and "scores" not in cell
        else:
            assert cell["count"] == counts[key] and "scores" not in cell
    total = sum(c["count"] for c in kept["cells"] if c["count"] is not None)
    assert kept["rows"]["counted"] == total  # not the number of all rows: a difference would tell
    made = audit(SiteSums.from_json(json.dumps(kept), source="file"))
    assert made.to_dict()["curves"] is None and made.to_dict()["scores"] is None
    assert any("ROC curves, calibration" in text for text in made.warnings)
    with pytest.raises(FedgftError, match=r"without min.cell"):
        audit(SiteSums.from_json(json.dumps(kept), source="file"), adjust_to={"sp": 0.1})
    assert json.loads(SiteSums.from_json(json.dumps(kept), source="file").to_json()) == kept
    kept["cells"][-1]["count"] = 4
    with pytest.raises(FedgftError, match=r"declares .*min.cell 10"):
        SiteSums.from_json(json.dumps(kept), source="file")


@pytest.mark.parametrize("rows", [12, 60, 600, 6000])
@pytest.mark.parametrize("how", [{}, {"threshold": 0.37}, {"bins": 20}, {"bins": 7}])
def test_no_number_about_scores_is_one_of_few_people(rows, how):
    """Not a bin, not a sum. What is left still holds the truth: every block is where its rows are,
    and areas under curves lie within what is stated."""
    y, p, g = people(rows)
    exact = measure(y, p, sensitive_features=g, site="n", **how)
    text = exact.to_json()
    found = json.loads(text)
    for cell in found["cells"]:
        assert ("scores" in cell) == (cell["count"] >= 5)
        for told in cell.get("scores", {}).values():
            assert min(n for n in told["histogram"] if n) >= 5
            assert ("sum" in told) == (cell["count"] >= 10)
            assert sum(told["histogram"]) == cell["count"]
    assert found["reveals"]["score_counts_below_5"] == 0
    read = SiteSums.from_json(text, source="file")
    assert read.to_json() == text
    for group, estimate in read.histogram.items():
        shifts = read.bin_error.get(group, [0, 0, 0])[:2]
        first, last = (np.rint(estimate + shift) for shift in shifts)
        below = [np.cumsum(t, -1) for t in (first, exact.histogram[group], last)]
        assert (below[0] >= below[1]).all() and (below[1] >= below[2]).all()
    seen = list_views(pool_sites(read))[0]
    for one in compute_curves(seen):
        mine = (g == one.group) & np.isin(y, (0, 1))
        if 0 < y[mine].sum() < mine.sum():
            assert abs(one.auc - roc_auc_score(y[mine], p[mine])) <= one.bin_error + 1e-9


def test_every_bin_can_be_asked_for():
    y, p, g = people(60)
    exact = measure(y, p, sensitive_features=g, site="n")
    text = exact.to_json(min_bin=1)
    assert json.loads(text)["reveals"]["score_counts_below_5"] > 5
    read = SiteSums.from_json(text, source="file")
    for group, counts in exact.histogram.items():
        np.testing.assert_array_equal(read.histogram[group], counts)
    assert not read.bin_error
    with pytest.raises(FedgftError, match="min_bin must be at least 1, not 0"):
        exact.to_json(min_bin=0)


def test_thresholds_from_a_file_that_puts_bins_together_are_called_estimates():
    y, p, g = people(600)
    exact = measure(y, p, sensitive_features=g, site="n")
    for least, said in ((1, False), (5, True)):
        read = SiteSums.from_json(exact.to_json(min_bin=least), source="file")
        warnings = audit(read, adjust_to={"sp": 0.1}).to_dict()["warnings"]
        assert any("are estimates here" in text for text in warnings) == said


def test_files_of_the_first_version_are_read():
    y, p, g = people(200)
    exact = measure(y, p, sensitive_features=g, site="n")
    held = json.loads(exact.to_json(min_bin=1))
    held["format"] = "fedgft-sums-1"
    del held["min_bin"], held["reveals"]
    read = SiteSums.from_json(json.dumps(held), source="file")
    for group, counts in exact.histogram.items():
        np.testing.assert_array_equal(read.histogram[group], counts)
    assert audit(read).to_dict()["metrics"] == audit(exact).to_dict()["metrics"]


def test_no_score_is_written_where_small_cells_are_withheld():
    """A cell of four rows, which --min-cell 3 shows, would have their sum in it. Older files had
    such sums; they are still read, and say no more than the new ones."""
    y, p, g = people(60)
    exact = measure(y, p, sensitive_features=g, site="n")
    kept = measure(y, p, sensitive_features=g, site="n", min_cell=3)
    text = kept.to_json()
    assert '"scores"' not in text and '"sum"' not in text
    known = [t[..., SCORES].sum() for t in exact.sites["n"].tables.values()]
    held = [t[..., SCORES].sum() for t in kept.sites["n"].tables.values()]
    assert not np.isclose(held, known).any()  # in memory neither
    old = json.loads(text)
    for cell in old["cells"]:
        if cell["count"] is not None:
            cell["scores"] = {"1": {"sum": 0.25}}
    for name in ("metrics", "accuracy", "scores"):
        now, then = (
            audit(SiteSums.from_json(t, source="f")).to_dict() for t in (text, json.dumps(old))
        )
        assert now[name] == then[name]


@pytest.mark.slow
def test_accuracy_knows_of_the_noise():
    hits = []
    for seed in range(100):
        y, p, g = people(2000, seed)
        exact = ((p >= 0.5) == y).mean()
        found = audit(measure(y, p, sensitive_features=g, site="n", epsilon=0.3)).to_dict()[
            "accuracy"
        ]
        hits.append(found["low"] <= exact <= found["high"])
    assert np.mean(hits) > 0.95  # the site's own accuracy: noise alone, so more than 95%


def test_mean_scores_know_of_bins_and_noise():
    """Scores just either side of an edge: half a bin apart from the middle of theirs."""
    g = np.repeat(["a", "b"], 5000)
    p = np.where(g == "a", 0.0499, 0.0501)
    sp = audit(measure(np.ones(10_000, int), p, sensitive_features=g, site="n", epsilon=5.0))
    found = sp.to_dict()["scores"]["sp"]
    assert found["low"] <= 0.0002 <= found["high"]
    same = audit(measure(np.ones(50, int), np.full(50, 0.509), sensitive_features=["a", "b"] * 25))
    assert same.to_dict()["scores"]["sp"]["high"] > 0  # a variance of bins is never negative

"""What to expect at a site that did not take part, against formulas, published data and search."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq, linprog

import fedgft
from fedgft.auditing.about import list_answers
from fedgft.auditing.next_site import (
    bound_next_value,
    estimate_variances,
    limit_next_value,
    predict_next_site,
)
from fedgft.auditing.next_site_report import list_next_site_tables
from fedgft.auditing.worst_mix import maximize_gap
from fedgft.errors import FedgftError
from test_cli import run
from test_html_escaping import HOSTILE, TAGS, Page


def make_sites(count: int, seed: int = 0, rows: int = 400, groups=("woman", "man"), **options):
    """Sums of sites whose gaps vary; the second group is selected more often."""
    rng = np.random.default_rng(seed)
    sites = {}
    for k in range(count):
        group = rng.choice(groups, rows + 37 * k)
        label = rng.integers(0, 2, len(group))
        apart = (0.08 + 0.05 * rng.standard_normal()) * (group == groups[-1])
        decision = (rng.random(len(group)) < 0.3 + 0.2 * label + apart).astype(int)
        sums = {"sensitive_features": {"sex": group}, "site": f"bank {k}"} | options
        sites[f"bank {k}"] = fedgft.measure(label, decision, **sums)
    return sites


# The prediction interval


def predict_in_loops(y: np.ndarray, v: np.ndarray) -> tuple[float, float]:
    """The limits by their definition: a root per quantile of Q, and quantiles of the mixture."""
    sites = len(y)
    free = sites - 2 if sites >= 5 else sites - 1

    def weigh(square):
        weights = [1 / (variance + square) for variance in v]
        total = sum(weights)
        mean = sum(w * value for w, value in zip(weights, y, strict=True)) / total
        q = sum(w * (value - mean) ** 2 for w, value in zip(weights, y, strict=True))
        return q, mean, total

    parts = []
    for i in range(400):
        target = stats.chi2.isf((i + 0.5) / 400, free) * (sites - 1) / free
        square = 0.0
        if weigh(0.0)[0] > target:
            square = brentq(lambda x, t=target: weigh(x)[0] - t, 0.0, 1e6, xtol=1e-15, rtol=1e-14)
        _, mean, total = weigh(square)
        parts.append((mean, (square + 1 / total) ** 0.5))

    def below(x):
        return sum(stats.norm.cdf(x, mean, deviation) for mean, deviation in parts) / len(parts)

    return tuple(brentq(lambda x, p=p: below(x) - p, -1e4, 1e4) for p in (0.025, 0.975))


@pytest.mark.parametrize("sites", [3, 4, 5, 9, 25])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_the_interval_is_that_of_its_definition(sites, noise):
    rng = np.random.default_rng(sites)
    v = noise**2 * rng.uniform(0.2, 5, sites)
    y = 0.05 + 0.03 * rng.standard_normal(sites) + np.sqrt(v) * rng.standard_normal(sites)
    found = predict_next_site(y, v)
    np.testing.assert_allclose((found.low, found.high), predict_in_loops(y, v), atol=1e-7)
    assert found.low < found.mean_low < found.mean < found.mean_high < found.high
    assert found.spread_low <= found.spread <= found.spread_high


@pytest.mark.parametrize("sites", [3, 4, 5, 10, 40])
def test_exactly_known_gaps_have_the_t_interval(sites):
    """y +- t s sqrt(1 + 1/K) with K - 1 degrees of freedom, from 5 sites on with K - 2."""
    y = np.random.default_rng(sites).standard_normal(sites)
    free = sites - 1 if sites < 5 else sites - 2
    half = stats.t.ppf(0.975, free) * y.std(ddof=1) * (1 + 1 / sites) ** 0.5
    found = predict_next_site(y, np.zeros(sites))
    assert found.low == pytest.approx(y.mean() - half, abs=2e-3 * half)
    assert found.high == pytest.approx(y.mean() + half, abs=2e-3 * half)
    assert found.spread == pytest.approx(y.std(ddof=1))


def test_published_data():
    """Ten studies of Riley, Higgins & Deeks (2011), with the intervals published for them.

    -0.76 to 0.09 (Higgins et al. 2009) and -0.99 to 0.33 (Partlett & Riley 2017, whose estimate of
    tau is REML's) insert an estimate of tau. Ours adds its uncertainty: it has the same center and
    is wider.
    """
    y = np.array([0, 0.1, -0.4, -0.8, -0.63, 0.22, -0.34, -0.51, 0.03, -0.81])
    error = [0.423477, 0.219392, 0.025511, 0.198983, 0.301026, 0.301026, 0.07143, 0.102043]
    error = np.array([*error, 0.122451, 0.301026])
    found = predict_next_site(y, error**2)
    assert found.mean == pytest.approx(-0.3287, abs=0.005)
    assert -1.15 < found.low < -0.9887 and 0.3312 < found.high < 0.5
    weights = 1 / (error**2 + found.spread**2)  # Paule & Mandel: Q is its expectation
    mean = (weights * y).sum() / weights.sum()
    assert (weights * (y - mean) ** 2).sum() == pytest.approx(9)
    # Viechtbauer's interval of tau: Q is a quantile of chi-squared with 9 degrees of freedom
    for spread, quantile in ((found.spread_low, 0.975), (found.spread_high, 0.025)):
        weights = 1 / (error**2 + spread**2)
        mean = (weights * y).sum() / weights.sum()
        q = (weights * (y - mean) ** 2).sum()
        assert q == pytest.approx(stats.chi2.ppf(quantile, 9))


def test_the_sampling_error_of_the_next_site_can_be_added():
    y = np.array([0.02, 0.05, 0.11, 0.06, 0.03, 0.08])
    v = np.full(6, 4e-4)
    alone = predict_next_site(y, v)
    with_rows = predict_next_site(y, v, own_variance=1e-2)
    assert with_rows.low < alone.low - 0.05 and with_rows.high > alone.high + 0.05
    assert with_rows.mean == alone.mean


def test_equal_sites_have_no_spread_and_an_interval_as_wide_as_their_mean():
    found = predict_next_site(np.full(8, 0.1), np.full(8, 1e-4))
    half = stats.norm.ppf(0.975) * (1e-4 / 8) ** 0.5
    assert found.spread == found.spread_high == 0
    assert (found.low, found.high) == (pytest.approx(0.1 - half), pytest.approx(0.1 + half))


# Distribution-free limits


@pytest.mark.parametrize("sites", [18, 19, 38, 39, 60, 79, 119, 200])
def test_distribution_free_limits_contain_95_of_100_exchangeable_values(sites):
    """Each of K + 1 different values is equally often the next one."""
    values = np.random.default_rng(sites).permutation(sites + 1).astype(float)
    inside = below = 0
    for k in range(sites + 1):
        rest = np.delete(values, k)
        both, upper = bound_next_value(rest), limit_next_value(rest)
        assert (both is None) == (sites < 39) and (upper is None) == (sites < 19)
        inside += both is not None and both[0] <= values[k] <= both[1]
        below += upper is not None and values[k] <= upper
    for count, least in ((inside, 39), (below, 19)):
        if sites >= least:
            assert 0.95 <= count / (sites + 1) <= 0.95 + 2 / (sites + 1)


# The worst mix


def maximize_exactly(a, b, c, d, shares, change, tolerance=1e-7):
    """The largest a.w / b.w - c.w / d.w by branch and bound with linear programs.

    With z = w / b.w the gap is a.z - c.z / d.z. On a range of d.z, the gap is bounded by linear
    programs in which c.z / d.z is replaced by r + (c - r d).z / t, at both ends t of the range.
    """
    size = len(a)
    total = np.outer(np.ones(size), shares / shares.sum())
    above = np.vstack([(1 - change) * total - np.eye(size), np.eye(size) - (1 + change) * total])

    def solve(gain, low, high):
        rows = np.vstack([above, d, -d])
        limits = np.concatenate([np.zeros(2 * size), [high, -low]])
        return linprog(-gain, A_ub=rows, b_ub=limits, A_eq=b[None], b_eq=[1.0], bounds=(0, None))

    low, high = (d @ solve(sign * d, -1e9, 1e9).x for sign in (-1, 1))
    best = -1.0
    ranges = [(low, high)]
    while ranges:
        low, high = ranges.pop()
        found = solve(a - c / ((low + high) / 2), low, high)
        if found.status:
            continue
        rate = (c @ found.x) / (d @ found.x)
        best = max(best, a @ found.x - rate)
        bound = max(-solve(a - (c - rate * d) / t, low, high).fun - rate for t in (low, high))
        if bound > best + tolerance and high - low > 1e-9:
            middle = (low + high) / 2
            ranges += [(low, middle), (middle, high)]
    return best


def draw_sums(rng, groups, sites):
    below = rng.integers(1, 200, (groups, sites)) * (rng.random((groups, sites)) < 0.9)
    below[:, 0] += 1
    above = np.floor(below * rng.random((groups, sites)))
    return above.astype(float), below.astype(float), below.sum(0) + rng.integers(0, 50, sites)


@pytest.mark.parametrize("seed", range(12))
def test_the_worst_mix_is_the_global_maximum(seed):
    rng = np.random.default_rng(seed)
    above, below, shares = draw_sums(rng, 2 + seed % 2, int(rng.integers(2, 8)))
    change = (0.2, 0.5, 0.9)[seed % 3]
    gap, i, j, weights = maximize_gap(above, below, shares, largest_change=change)
    pairs = itertools.permutations(range(len(above)), 2)
    exact = max(
        maximize_exactly(above[p], below[p], above[q], below[q], shares, change) for p, q in pairs
    )
    assert gap == pytest.approx(exact, abs=2e-6)
    reached = (above[[i, j]] @ weights) / (below[[i, j]] @ weights)
    assert gap == pytest.approx(reached[0] - reached[1], abs=1e-12)
    assert (np.abs(weights - 1) <= change + 1e-9).all()
    assert (shares @ weights) == pytest.approx(shares.sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(2, 4), st.sampled_from([0.2, 0.6]))
def test_no_corner_and_no_random_mix_is_worse(seed, sites, groups, change):
    rng = np.random.default_rng(seed)
    above, below, shares = draw_sums(rng, groups, sites)
    gap, *_ = maximize_gap(above, below, shares, largest_change=change)
    tried = [np.ones(sites)]
    # A corner has all weights at a limit except one, which the sum of the shares determines.
    for free in range(sites):
        for signs in itertools.product([1 - change, 1 + change], repeat=sites - 1):
            weights = np.insert(np.array(signs), free, 0.0)
            weights[free] = (shares.sum() - shares @ weights) / shares[free]
            tried += [weights] * int(abs(weights[free] - 1) <= change)
    for weights in rng.uniform(1 - change, 1 + change, (300, sites)):
        weights *= shares.sum() / (shares @ weights)
        tried += [weights] * int((np.abs(weights - 1) <= change).all())
    rates = [(above @ w) / (below @ w) for w in tried]
    assert gap >= max(np.ptp(rate) for rate in rates) - 2e-6


def test_other_groups_can_have_the_worst_mix():
    """Today b is lowest; with more rows of the second site, c is."""
    above = np.array([[60.0, 60.0], [30.0, 50.0], [50.0, 31.0]])
    below = np.full((3, 2), 100.0)
    today = maximize_gap(above, below, below.sum(0), largest_change=0.0)
    worst = maximize_gap(above, below, below.sum(0), largest_change=0.5)
    assert today[:3] == (pytest.approx(0.2), 0, 1)
    assert worst[:3] == (pytest.approx(0.25), 0, 1)
    below[1, 0] = 20.0  # b has few rows at the first site: a shift changes its rate less
    above[1, 0] = 6.0
    worst = maximize_gap(above, below, below.sum(0), largest_change=0.5)
    assert worst[1:3] == (0, 2)


# In an audit


def test_the_audit_predicts_from_the_sums_of_the_sites():
    """The values and variances are those of the sites' own rates."""
    audit = fedgft.audit(make_sites(8))
    found = audit.next_site.gaps["sp"]
    first, second = audit.gaps["sp"].pair
    values, variances = [], []
    z = stats.norm.ppf(0.975)
    for site, table in zip(audit.sites.values(), audit.pool.tables, strict=True):
        counts = {g: table[i].sum(0)[:, 0] for i, (g,) in enumerate(audit.pool.groups)}
        limits = []
        for group in (first, second):
            n, hits = int(counts[group].sum()), int(counts[group][1])
            wilson = stats.binomtest(hits, n).proportion_ci(method="wilson")
            limits.append((hits / n, wilson.low, wilson.high))
        (p, p_low, p_high), (q, q_low, q_high) = limits  # Newcombe's interval of p - q
        below = ((p - p_low) ** 2 + (q_high - q) ** 2) ** 0.5
        above = ((p_high - p) ** 2 + (q - q_low) ** 2) ** 0.5
        variances.append(((below + above) / (2 * z)) ** 2)
        values.append(p - q)
        assert site.gaps["sp"].local.value == pytest.approx(p - q)
    expected = predict_in_loops(np.array(values), np.array(variances))
    assert (found["low"], found["high"]) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert found["sites"] == 8 and found["left_out"] == 0 and found["reason"] == ""
    assert found["observed_low"] is None and found["observed_limit"] is None
    assert 0.3 < audit.next_site.accuracy["low"] < audit.accuracy.value
    assert audit.next_site.accuracy["high"] < 0.8


def test_forty_sites_have_distribution_free_limits():
    audit = fedgft.audit(make_sites(41, rows=200))
    found = audit.next_site.gaps["sp"]
    local = np.sort([site.gaps["sp"].local.value for site in audit.sites.values()])
    largest = np.sort([site.gaps["sp"].value for site in audit.sites.values()])
    assert (found["observed_low"], found["observed_high"]) == (local[0], local[-1])
    assert found["observed_limit"] == largest[-2]
    accuracy = np.sort([site.accuracy.value for site in audit.sites.values()])
    assert audit.next_site.accuracy["observed_limit"] == accuracy[1]
    (table, _) = list_next_site_tables(audit.summary)
    assert table.header[-2:] == ("observed there, 95%", "largest observed there at most, 95%")


@pytest.mark.parametrize(("count", "reason"), [(1, "there is 1"), (2, "there are 2")])
def test_fewer_than_three_sites_predict_nothing(count, reason):
    audit = fedgft.audit(make_sites(count))
    for found in (*audit.next_site.gaps.values(), audit.next_site.accuracy):
        assert found["low"] is None and found["mean"] is None
        assert found["reason"] == f"needs 3 sites, {reason}"
    assert not any("other sites" in question for question, _ in list_answers(audit.summary))
    tables = list(list_next_site_tables(audit.summary))
    assert len(tables) == (0 if count == 1 else 2)
    if count == 2:
        assert {row[3] for row in tables[0].rows} == {"not estimable"}


def test_sites_that_lack_a_group_are_left_out_and_counted():
    sites = make_sites(5)
    for name in ("only men", "only women"):
        group = [name.removeprefix("only ").replace("men", "man").replace("women", "woman")] * 60
        sites[name] = fedgft.measure([0, 1] * 30, [0, 1] * 30, sensitive_features={"sex": group})
    sites["few"] = fedgft.measure(
        [0, 1] * 30, [1, 0] * 30, sensitive_features={"sex": ["man"] * 55 + ["woman"] * 5}
    )
    audit = fedgft.audit(sites)
    found = audit.next_site.gaps["sp"]
    assert (found["sites"], found["left_out"]) == (5, 3)
    assert audit.next_site.accuracy["left_out"] == 0
    alone = fedgft.audit(make_sites(5)).next_site.gaps["sp"]
    assert found["low"] == pytest.approx(alone["low"])
    (table, _) = list_next_site_tables(audit.summary)
    assert any(note.startswith("Up to 3 sites are left out") for note in table.notes)
    three = {name: sites[name] for name in ("bank 0", "only men", "few")}
    reason = fedgft.audit(three).next_site.gaps["sp"]["reason"]
    assert reason.endswith("there is 1 of 3")


def test_what_withheld_counts_leave_open_is_too_much_beyond_a_standard_error():
    z = stats.norm.ppf(0.975)
    error = 0.05
    width = np.array([0.0, 0.04, 0.06])
    low, high = 0.1 - width / 2 - z * error, 0.1 + width / 2 + z * error
    variances, unclear = estimate_variances(low, high, width)
    np.testing.assert_allclose(variances, (error + width / (2 * z)) ** 2)
    assert unclear.tolist() == [False, False, True]


def test_weights_make_a_site_as_precise_as_its_effective_number_of_rows():
    """A row of weight 2 that stands for two rows is less certain than two rows."""
    rng = np.random.default_rng(0)
    weighted, plain = {}, {}
    for k in range(6):
        sex = rng.choice(["man", "woman"], 400)
        label, decision = rng.integers(0, 2, (2, 400))
        weight = rng.choice([1.0, 3.0], 400)
        rows = {"sensitive_features": {"sex": sex}, "site": str(k)}
        weighted[str(k)] = fedgft.measure(label, decision, sample_weight=weight, **rows)
        copies = np.repeat(np.arange(400), weight.astype(int))
        rows["sensitive_features"] = {"sex": sex[copies]}
        plain[str(k)] = fedgft.measure(label[copies], decision[copies], **rows)
    one = fedgft.audit(weighted).next_site.gaps["sp"]
    other = fedgft.audit(plain).next_site.gaps["sp"]
    assert one["mean"] == pytest.approx(other["mean"], abs=0.01)
    assert one["mean_high"] - one["mean_low"] > 1.05 * (other["mean_high"] - other["mean_low"])


def test_noise_for_privacy_is_part_of_the_forecast():
    found = fedgft.audit(make_sites(6, rows=4000, epsilon=1.0)).next_site.gaps["sp"]
    assert found["sites"] == 6 and found["low"] < found["mean"] < found["high"]


def test_withheld_counts_that_matter_leave_a_site_out():
    sites = make_sites(6, rows=60, min_cell=11)
    found = fedgft.audit(sites).next_site.gaps["eop"]
    assert found["left_out"] > 0 and found["sites"] + found["left_out"] == 6


def test_a_metric_without_two_groups_says_so():
    sites = {
        name: fedgft.measure([0, 1] * 40, [0, 1] * 40, sensitive_features={"sex": ["man"] * 80})
        for name in "abc"
    }
    audit = fedgft.audit(sites)
    assert audit.next_site.gaps["sp"]["reason"] == "no two groups have a rate"
    assert audit.next_site.worst_mix["sp"] is None
    assert audit.to_markdown() and audit.next_site.accuracy["low"] is not None


def test_the_report_says_it_in_words_tables_and_the_chart(tmp_path):
    audit = fedgft.audit(make_sites(6), worst_mix=0.3)
    found = audit.to_dict()["next_site"]
    assert found["largest_change"] == 0.3 and json.loads(audit.to_json())["next_site"] == found
    low, high = (f"{100 * found['gaps']['sp'][end]:.1f}" for end in ("low", "high"))
    sentence = (
        "At a site like these 6 that did not take part, the gap in statistical parity between men "
        "and women (men minus women"
    )
    for text in (audit.to_markdown(), audit.to_html()):
        assert sentence in text.replace("\n", " ")
        assert f"would be expected between {low} and {high} points (95%)" in text
        assert "What about other sites?" in text and "Worst mix of today" in text
        assert "If no site&#x27;s share of the rows changed by more than 30%" in text or (
            "If no site's share of the rows changed by more than 30%" in text.replace("&#39;", "'")
        )
    mix = found["worst_mix"]["sp"]
    assert mix["gap"] > mix["today"] == pytest.approx(audit.gaps["sp"].value)
    assert set(mix["weights"]) == set(audit.sites)
    assert all(abs(weight - 1) <= 0.3 + 1e-6 for weight in mix["weights"].values())
    forest = next(f for f in audit.report(figures=True).figures if f.name == "forest")
    rows = [r for r in forest.spec["data"]["values"] if r["kind"] == "next"]
    by_metric = {row["metric"]: row for row in rows}
    assert by_metric["sp"]["low"] == pytest.approx(100 * found["gaps"]["sp"]["low"])
    assert "another site" in forest.caption


def test_the_command_takes_the_largest_change(capsys, tmp_path):
    for name, sums in make_sites(4).items():
        sums.save(tmp_path / f"{name}.json")
    code, out, _ = run(capsys, "audit", tmp_path, "--json", "--worst-mix", "0.1")
    assert code == 0 and json.loads(out)["next_site"]["largest_change"] == 0.1
    code, _, err = run(capsys, "audit", tmp_path, "--worst-mix", "1")
    assert code == 2 and "--worst-mix must be 0 or more and below 1" in err


@pytest.mark.parametrize("change", [1.0, -0.1, float("nan")])
def test_a_wrong_change_is_refused(change):
    with pytest.raises(FedgftError) as caught:
        fedgft.audit(make_sites(3), worst_mix=change)
    assert caught.value.field == "worst_mix"


def test_names_are_text(tmp_path):
    rng = np.random.default_rng(0)
    sites = {
        f"{name} {k}": (
            rng.integers(0, 2, 120),
            rng.integers(0, 2, 120),
            {HOSTILE[2]: rng.choice(HOSTILE[3:5], 120)},
        )
        for k, name in enumerate(HOSTILE)
    }
    audit = fedgft.audit(sites)
    page = Page(audit.to_html())
    assert not [n for _, attributes in page.found for n in attributes if n.startswith("on")]
    assert not {tag for tag, _ in page.found} & (TAGS - {"script", "link"})
    shown = " ".join(page.text)
    assert "At a site that did not take part" in shown and f"{HOSTILE[1]} 1" in shown
    assert "<img" not in audit.to_markdown().replace("\\<", "")

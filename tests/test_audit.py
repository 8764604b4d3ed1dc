"""Compare the audit with Fairlearn on pooled rows, and with the theory."""

import json

import numpy as np
import pytest
from fairlearn.metrics import demographic_parity_difference, equal_opportunity_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, roc_auc_score

from fairlearn_reference import by_group, estimable, fairlearn
from fedgft.auditing import SiteSums, audit, measure
from fedgft.auditing.report import compare
from fedgft.auditing.tables_and_charts import draw_waterfall
from fedgft.auditing.verdicts import list_verdicts
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, Metric
from fedgft.theory import locally_fair_globally_unfair, locally_unfair_globally_fair, simpson

ROW = st.tuples(
    st.integers(0, 1), st.integers(0, 1), st.sampled_from("abc"), st.sampled_from("NSEW")
)


@pytest.mark.slow
@given(st.lists(ROW, min_size=2, max_size=60))
@settings(max_examples=40, deadline=None)
def test_audit_of_many_sites_is_fairlearn_on_the_pooled_rows(rows):
    y, d, g, sites = (np.array(column) for column in zip(*rows, strict=True))
    if len(np.unique(g)) < 2:
        return
    parts = [
        measure(y[sites == s], d[sites == s], sensitive_features=g[sites == s], site=str(s))
        for s in np.unique(sites)
    ]
    made = audit(parts).to_dict()
    for name, (difference, ratio) in fairlearn(y, d, g).items():
        found = made["metrics"][name]
        if not estimable(name, y, d, g):
            assert found["gap"] is None and found["ratio"] is None
            continue
        assert found["gap"] == pytest.approx(difference, abs=1e-12)
        if ratio is not None and not np.isnan(ratio) and found["ratio"] is not None:
            assert found["ratio"] == pytest.approx(ratio, abs=1e-12)
    for s in np.unique(sites)[:1]:  # and a site's own gap is Fairlearn's on its rows alone
        mine = sites == s
        for name, (difference, _) in fairlearn(y[mine], d[mine], g[mine]).items():
            found = made["sites"][str(s)]["gap"][name]
            if len(np.unique(g[mine])) < 2 or not estimable(name, y[mine], d[mine], g[mine]):
                assert found is None
            else:
                assert found == pytest.approx(difference, abs=1e-12)


@pytest.mark.slow
@given(st.lists(ROW, min_size=2, max_size=60))
@settings(max_examples=50, deadline=None)
def test_sites_add_up_and_the_bound_holds(rows):
    y, d, g, sites = (np.array(column) for column in zip(*rows, strict=True))
    parts = [
        measure(y[sites == s], d[sites == s], sensitive_features=g[sites == s], site=str(s))
        for s in np.unique(sites)
    ]
    made = audit(parts).to_dict()
    assert sum(site["n"] for site in made["sites"].values()) == len(rows)
    for name, found in made["metrics"].items():
        if found["pair"] is None:
            continue
        shares = [site["contribution"][name] for site in made["sites"].values()]
        assert sum(shares) == pytest.approx(found["signed_gap"], abs=1e-12)
        assert found["signed_gap"] <= made["bound"][name] + 1e-12
        assert made["tv"][name] <= 1 + 1e-12
        if made["heterogeneity"][name] is not None:
            assert made["tv"][name] <= made["heterogeneity"][name] / 2 + 1e-12
    json.loads(audit(parts).to_json())  # no NaN in it


def example(made, names=("women", "men")):
    parts = []
    for k in range(int(made.clients.max()) + 1):
        mine = made.clients == k
        groups = np.array(names)[made.groups[mine]]
        parts.append(
            measure(
                made.labels[mine], made.decisions[mine], sensitive_features=groups, site=f"site {k}"
            )
        )
    return parts


def test_simpsons_admissions():
    found = audit(example(simpson())).to_dict()
    sp = found["metrics"]["sp"]
    assert sp["gap"] == pytest.approx(0.48) and sp["pair"] == ["men", "women"]
    assert [site["gap"]["sp"] for site in found["sites"].values()] == pytest.approx([0, 0])
    assert found["within"]["sp"]["gap"] == pytest.approx(0)
    assert any("overall gaps differ" in w and "statistical parity" in w for w in found["warnings"])
    assert not any("Simpson" in w for w in found["warnings"])  # a gap of 0 is not reversed
    assert any("it cannot be seen within sites" in w for w in found["warnings"])
    assert found["metrics"]["fpr"]["gap"] is None  # nobody has label 0
    nothing = {"rate": None, "low": None, "high": None, "n": 0}
    assert found["metrics"]["fpr"]["groups"]["women"] == nothing


PLACES = {"north": (200, 50), "south": (40, 160), "east": (60, 90)}  # women and men


def decided(rate: dict[str, float]) -> list[SiteSums]:
    """Sites where the groups live in different places; women and men have one rate at a site."""
    parts = []
    for site, rows in PLACES.items():
        accepted = [np.arange(n) < round(rate[site] * n) for n in rows]
        sex = np.repeat(["woman", "man"], rows)
        labels = np.arange(sum(rows)) % 2
        decision = np.concatenate(accepted).astype(int)
        parts.append(measure(labels, decision, sensitive_features=sex, site=site))
    return parts


@pytest.mark.slow
def test_a_model_that_accepts_everybody_has_no_site_that_adds_to_the_gap():
    """Before: "north adds -50.0, south 40.0, east 10.0" to a gap of 0 that no site has."""
    made = audit(decided(dict.fromkeys(PLACES, 1.0)))
    found = made.to_dict()
    for site in found["sites"].values():
        assert site["contribution"]["sp"] == 0 and site["gap"]["sp"] == 0
    said = "No site adds to the gap in statistical parity between men and women"
    assert said in made.to_markdown() and said in made.to_html()
    assert any(said in note for table in made.tables() for note in table.notes)
    (sites,) = (table for table in made.tables() if table.title == "Sites, points")
    at = sites.header.index("adds to the overall gap")
    assert [row[at] for row in sites.rows] == ["0.0", "0.0", "0.0"]
    steps = draw_waterfall(found)["data"]["values"]
    assert {row["amount"] for row in steps if row["metric"] == "sp"} == {0.0}


def test_one_rate_at_every_site_adds_nothing_though_it_has_no_exact_float():
    """A rate of 30%: rounding is no "-0.0" in the table either."""
    made = audit(decided(dict.fromkeys(PLACES, 0.3)))
    found = made.to_dict()
    assert found["metrics"]["sp"]["gap"] == pytest.approx(0, abs=1e-12)
    (sites,) = (table for table in made.tables() if table.title == "Sites, points")
    at = sites.header.index("adds to the overall gap")
    assert [row[at] for row in sites.rows] == ["0.0", "0.0", "0.0"]
    assert "No site adds to the gap in statistical parity" in made.to_markdown()
    steps = draw_waterfall(found)["data"]["values"]
    assert {str(row["amount"]) for row in steps if row["metric"] == "sp"} == {"0.0"}


def test_the_sites_that_add_to_the_gap_are_named_with_what_they_add():
    """North refuses all, where most women live; by hand from p (r - rho) - q (s - rho)."""
    rate = {"north": 0.0, "south": 1.0, "east": 1.0}
    made = audit(decided(rate))
    found = made.to_dict()
    women, men = (np.array([rows[i] for rows in PLACES.values()]) for i in (0, 1))
    own = np.array([rate[site] for site in PLACES])
    overall = (own * (women + men)).sum() / (women + men).sum()
    expected = (own - overall) * (men / men.sum() - women / women.sum())
    assert found["metrics"]["sp"]["pair"] == ["man", "woman"]
    assert expected.sum() == pytest.approx(found["metrics"]["sp"]["gap"])
    for site, value in zip(PLACES, expected, strict=True):
        assert found["sites"][site]["contribution"]["sp"] == pytest.approx(value)
    north, south, east = (f"{100 * value:.1f}" for value in expected)
    assert (
        "Of the gap of 50.0 points in statistical parity between men and women, "
        f"north adds {north}, south {south} and east {east}." in made.to_markdown()
    )


def test_sites_that_take_from_the_gap_are_named_apart():
    """The overall rate is 475 / 600; east is (1 - 475/600) (60/300 - 90/300) from it."""
    made = audit(decided({"north": 0.9, "south": 0.5, "east": 1.0}))
    (said,) = (
        note for table in made.tables() for note in table.notes if note.startswith("Of the gap")
    )
    assert said.endswith("; east takes away 2.1.") and "women and men" in said


def test_the_bound_of_an_audit_is_never_above_one():
    """Before: the largest local gap plus TV, 1.6 here."""
    parts = []
    for site, rows, accepted in (("a", (90, 10), (1, 0)), ("b", (10, 90), (0, 0))):
        decision = np.repeat(accepted, rows)
        sex = np.repeat(["woman", "man"], rows)
        parts.append(measure(np.ones(100, int), decision, sensitive_features=sex, site=site))
    made = audit(parts)
    found = made.to_dict()
    assert max(site["gap"]["sp"] for site in found["sites"].values()) == 1
    assert found["tv"]["sp"] == pytest.approx(0.8)
    assert found["bound"]["sp"] == 1
    (gaps,) = (table for table in made.report().tables if table.title.startswith("Spread"))
    assert gaps.rows[0][gaps.header.index("bound")] == "1"
    assert "at most α(1 − TV) + TV" in made.to_markdown() and "α + TV" not in made.to_markdown()


@pytest.mark.slow
def test_the_bound_is_not_above_one_under_noise_either():
    """Noise takes local rates beyond 1; the bound does not follow them."""
    rng = np.random.default_rng(5)
    bounds = []
    for _ in range(20):
        parts = [
            measure(
                rng.integers(0, 2, 60),
                np.ones(60, int),
                site=f"{k}",
                epsilon=0.3,
                sensitive_features=rng.choice(["a", "b"], 60, p=(0.1, 0.9)),
            )
            for k in range(3)
        ]
        bounds += [b for b in audit(parts).to_dict()["bound"].values() if b is not None]
    assert bounds and max(bounds) <= 1


def test_local_and_global_fairness_are_different_things():
    """Theorem 4.1: neither follows from the other, and the audit says which is which."""
    hidden = audit(example(locally_fair_globally_unfair(5, 0.6))).to_dict()
    assert hidden["metrics"]["sp"]["low"] > 0
    assert max(site["gap"]["sp"] for site in hidden["sites"].values()) == 0
    assert any("Local and overall gaps differ" in text for text in hidden["warnings"])
    canceled = audit(example(locally_unfair_globally_fair(4, 0.9))).to_dict()
    assert canceled["metrics"]["sp"]["gap"] == pytest.approx(0)
    assert min(site["gap"]["sp"] for site in canceled["sites"].values()) >= 0.9
    assert any("no gap beyond chance over all sites, but" in w for w in canceled["warnings"])


def test_the_gap_the_other_way_round_within_sites():
    """Every site prefers b, the whole prefers a: the paradox in full."""
    generator = np.random.default_rng(0)
    parts = []
    for site, rows, rates in (("high", (900, 100), (0.8, 0.95)), ("low", (100, 900), (0.1, 0.25))):
        drawn = [generator.random(n) < r for n, r in zip(rows, rates, strict=True)]
        d = np.concatenate(drawn).astype(int)
        g = np.repeat(["a", "b"], rows)
        parts.append(measure(np.ones_like(d), d, sensitive_features=g, site=site))
    found = audit(parts).to_dict()
    assert found["metrics"]["sp"]["pair"] == ["a", "b"] and found["within"]["sp"]["high"] < 0
    assert any("the other way round" in text and "Simpson" in text for text in found["warnings"])


def test_a_group_without_estimable_rates():
    y = [1, 0, 1, 0, 0, 0]
    d = [1, 0, 0, 1, 1, 0]
    found = audit(measure(y, d, sensitive_features=list("aabbcc"), site="n")).to_dict()
    eop = found["metrics"]["eop"]
    assert eop["gap"] is None and eop["low"] is None and eop["among_estimable"]["gap"] == 1
    assert eop["groups"]["c"]["rate"] is None
    text = audit(measure(y, d, sensitive_features=list("aabbcc"), site="n")).to_markdown()
    assert "| true-positive rate | c | not estimable | – | 0 |" in text
    assert any("c has no rows for this rate" in w for w in found["warnings"])


def test_few_rows_have_a_rate_but_no_interval():
    y = [1] * 40
    d = [1] * 15 + [0] * 15 + [1] * 4 + [0] * 6
    g = ["a"] * 30 + ["b"] * 4 + ["c"] * 6
    found = audit(measure(y, d, sensitive_features=g, site="n")).to_dict()["metrics"]["sp"]
    assert found["groups"]["a"]["low"] is not None
    assert found["groups"]["b"] == {"rate": 1.0, "low": None, "high": None, "n": 4}
    assert found["gap"] == 1 and found["low"] is None and found["high"] is None
    more = audit(measure(y * 2, d * 2, sensitive_features=["a"] * 30 + ["b"] * 10 + g, site="n"))
    text = more.to_markdown()
    assert (
        "| selection rate | c | 0.0 | too few rows | 6 |" in text and "fewer than 10 rows" in text
    )


def test_attributes_and_intersections():
    generator = np.random.default_rng(1)
    n = 400
    y, d = generator.integers(0, 2, (2, n))
    race = generator.choice(["w", "b", None], n)
    sex = generator.choice(["m", "f"], n)
    found = audit(measure(y, d, sensitive_features={"race": race, "sex": sex}, site="n")).to_dict()
    assert found["groups"] == "race & sex" and list(found["attributes"]) == ["race", "sex"]
    assert set(found["metrics"]["sp"]["groups"]) == {"b & f", "b & m", "w & f", "w & m"}
    known = np.array([r is not None for r in race])
    both = np.array([f"{r} & {s}" for r, s in zip(race, sex, strict=True)])
    views = {"race & sex": (both, known), "race": (race, known), "sex": (sex, known | True)}
    for title, (groups, rows) in views.items():
        view = found if title == "race & sex" else found["attributes"][title]
        reference = demographic_parity_difference(
            y[rows], d[rows], sensitive_features=groups[rows].astype(str)
        )
        assert view["metrics"]["sp"]["gap"] == pytest.approx(reference, abs=1e-12)
    assert found["rows"]["not_recorded"] == (~known).sum()
    assert any(f"not recorded for {(~known).sum()} of 400 rows" in w for w in found["warnings"])


@pytest.mark.parametrize("scored", [False, True])
def test_three_classes(scored):
    """One against the rest, as Fairlearn sees each class."""
    generator = np.random.default_rng(2)
    n = 300
    y = generator.choice(["hi", "lo", "mid"], n)
    p = generator.dirichlet(np.ones(3), n)
    classes = np.array(["hi", "lo", "mid"])
    d = classes[p.argmax(1)]
    g = generator.choice(["a", "b"], n)
    output = {"y_pred": p} if scored else {"y_pred": d}
    parts = [
        measure(
            y[i::3],
            output["y_pred"][i::3],
            sensitive_features=g[i::3],
            site=str(i),
            classes=classes,
        )
        for i in range(3)
    ]
    found = audit(parts).to_dict()
    for name, reference in (
        ("sp", demographic_parity_difference),
        ("eop", equal_opportunity_difference),
    ):
        each = [reference(y == c, (d == c).astype(int), sensitive_features=g) for c in classes]
        assert found["metrics"][name]["gap"] == pytest.approx(max(each), abs=1e-12)
    right = np.ptp(by_group(accuracy_score, y, d, g))
    assert found["metrics"]["acc"]["gap"] == pytest.approx(right, abs=1e-12)
    assert found["metrics"]["eop"]["condition"] in ("class hi", "class lo", "class mid")
    if scored:
        mid = found["auc"]["mid"]["a"]
        reference = roc_auc_score(y[g == "a"] == "mid", p[g == "a", 2])
        assert abs(mid["auc"] - reference) <= mid["bin_error"]
    assert "Fairness audit" in audit(parts).to_html()


def test_reference_groups_and_pairs():
    generator = np.random.default_rng(4)
    y, d = generator.integers(0, 2, (2, 600))
    g = generator.choice(["a", "b", "c"], 600)
    made = audit(measure(y, d, sensitive_features=g, site="n"), reference_groups=["b"])
    sp = made.to_dict()["metrics"]["sp"]
    assert sp["reference"] == "b" and set(sp["against_reference"]) == {"a", "c"}
    value, low, high = made.difference("sp", "a", "b")
    found = sp["against_reference"]["a"]
    assert (value, low, high) == (found["difference"], found["low"], found["high"])
    assert value == pytest.approx(d[g == "a"].mean() - d[g == "b"].mean())
    assert low < value < high


def test_names_that_look_alike_are_pointed_out():
    y = ["yes", "no"]
    rows = {"n": (y, y, ["White", "Black"]), "s": (y, y, ["white ", "Black"])}
    parts = [
        measure(a, b, sensitive_features={"race": g}, site=site) for site, (a, b, g) in rows.items()
    ]
    said = r"column 'race': 'White' \(site 'n'\) and 'white ' \(site 's'\) differ only in case or"
    for sums in (parts, sum(parts)):
        with pytest.raises(FedgftError, match=said) as caught:
            audit(sums)
        assert (caught.value.field, caught.value.kind) == ("ignore_case", "conflict")
        merged = audit(sums, ignore_case=True)
        assert set(merged.rates["sp"]) == {"White", "Black"}
        assert merged.rates["sp"]["White"].rows == 2
        assert "column 'race': 'white ' is counted as 'White'" in merged.warnings[0]
    with pytest.raises(FedgftError, match=r"'White' .* and 'white ' .* differ only in case"):
        audit(rows)
    assert audit(rows, ignore_case=True).to_dict()["rows"]["counted"] == 4


def test_labels_that_look_alike_are_merged_over_sites():
    groups = list("aabb")
    rows = {
        "n": (["Yes", "No", "Yes", "No"], ["Yes", "Yes", "No", "No"], groups),
        "s": (["yes", "no", "yes ", "no"], ["yes", "yes", "no", "no"], groups),
    }
    with pytest.raises(FedgftError, match=r"label: .*'Yes' .* and 'yes ' .* differ only in case"):
        audit(rows)
    made = audit(rows, ignore_case=True)
    once = {site: (y, d, groups) for site, (y, d, _) in (("n", rows["n"]), ("s", rows["n"]))}
    assert made.to_dict()["metrics"] == audit(once).to_dict()["metrics"]
    parts = [
        measure(y, d, sensitive_features=g, site=site, ignore_case=True)
        for site, (y, d, g) in rows.items()
    ]
    with pytest.raises(FedgftError, match=r"label: 'No' .* and 'no' "):
        audit(parts)
    assert audit(parts, ignore_case=True).to_dict()["metrics"] == made.to_dict()["metrics"]


def test_one_site_takes_the_most_frequent_spelling_or_the_declared_one():
    task = {"sensitive_features": {"sex": ["Man", "man", "man", "f"]}, "site": "n"}
    y = [1, 0, 1, 0]
    said = r"column 'sex': 'man' \(2 rows\) and 'Man' \(1 row\) differ only in case"
    with pytest.raises(FedgftError, match=said):
        measure(y, y, **task)
    merged = measure(y, y, **task, ignore_case=True)
    assert merged.groups == (("f",), ("man",)) and merged.rows() == 4
    assert "'Man' is counted as 'man'" in merged.notes[0]
    declared = measure(y, y, **task, ignore_case=True, values={"sex": ("F", "MAN")})
    assert declared.groups == (("F",), ("MAN",)) and declared.rows() == 4


def test_every_metric_of_the_catalog_is_there():
    found = audit(measure([1, 0], [1, 0], sensitive_features=["a", "b"], site="n")).to_dict()
    for place in ("metrics", "heterogeneity", "tv", "bound", "within"):
        assert list(found[place]) == list(CATALOG)


def test_a_gap_between_attributes_is_a_gap_though_cells_are_unsure():
    """Twenty cells of sixty people show nothing for sure; the two halves of them do."""
    sex = np.repeat(["f", "m"], 600)
    town = np.tile(np.repeat(np.arange(10), 60), 2)
    d = (np.tile(np.arange(60), 20) < np.where(sex == "f", 27, 33)).astype(int)
    sums = measure(d, d, sensitive_features={"sex": sex, "town": town}, site="n")
    made = audit(sums, tolerance=0.0)
    found = made.to_dict()
    assert found["metrics"]["sp"]["low"] == 0 < found["attributes"]["sex"]["metrics"]["sp"]["low"]
    good, said, state = list_verdicts(found)[0]
    assert good is False and state == "exceeds" == made.verdicts["sp"]
    assert said.startswith("The gap in statistical parity exceeds 0 points, by sex: ")
    assert "Also: by town" in said and "by sex & town" in said


def test_a_comparison_of_different_groups_is_none():
    y = [1] * 200
    many = audit(measure(y, [1, 0, 1, 0, 0] * 40, sensitive_features=list("aabbc") * 40, site="n"))
    few = audit(measure(y, [1, 0, 1, 0] * 50, sensitive_features=list("aabb") * 50, site="n"))
    good, said, _ = compare(many.to_dict(), few.to_dict()).verdict()[0]
    assert good is None and "not of the same groups" in said


def test_a_comparison_says_which_audit_lacks_a_part():
    made = audit(measure([1] * 40, [1, 0] * 20, sensitive_features=list("aabb") * 10, site="n"))
    other = made.to_dict()
    few = {name: found for name, found in other["metrics"].items() if name != "eo"}
    hollow = other | {"metrics": few}
    with pytest.raises(FedgftError, match=r"the old audit lacks a part \('eo'\)"):
        compare(hollow, other)
    with pytest.raises(FedgftError, match=r"the new audit lacks a part \('eo'\)"):
        compare(other, hollow)
    odd = other | {"attributes": {"elsewhere": other}}
    with pytest.raises(FedgftError, match="one of the audits lacks a part"):
        compare(odd, other)


def test_heterogeneity_is_infinite_for_proper_metrics_alone(monkeypatch):
    """Each site has one group only; of an improper metric DH is not infinite, there is none."""
    negative = Metric("npv", "negatives", lambda p, y: y[:, :1], lambda p, y: p[:, :1])
    monkeypatch.setitem(CATALOG, "npv", negative)
    parts = [
        measure([1, 0] * 20, [1, 0, 0, 1] * 10, sensitive_features=[g] * 40, site=g) for g in "ab"
    ]
    tables = audit(parts).report().tables
    gaps = next(table for table in tables if table.title.startswith("Spread"))
    shown = {row[0]: row[-1] for row in gaps.rows}
    assert shown["predictive parity"] == shown["negatives"] == "–"
    proper = CATALOG.keys() - {"predictive-parity", "npv"}
    assert {shown[CATALOG[name].title] for name in proper} == {"∞"}


def test_fractions_are_scores_whatever_the_labels():
    made = measure(["no", "yes", "yes"], [0.2, None, 0.7], sensitive_features=list("aab"))
    assert made.spec.scored and made.sites[""].prediction_missing == 1

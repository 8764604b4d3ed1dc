"""Gaps are judged by a stated tolerance: in Python, on the command line, in every text."""

import json

import numpy as np
import pytest

import fedgft
from fedgft.auditing.about import check_about
from fedgft.auditing.findings import explain_site
from fedgft.auditing.verdicts import (
    DEFAULT_TOLERANCE,
    VERDICT_METRICS,
    check_tolerance,
    rows_needed,
)
from fedgft.errors import FedgftError
from test_cli import run


def site(rates: dict[str, float], rows: int = 1000, name: str = "north"):
    """Sums of a site whose groups are decided positive with these rates; half have label 1."""
    parts = [(group, np.arange(rows) < rate * rows) for group, rate in rates.items()]
    decision = np.concatenate([accepted for _, accepted in parts]).astype(int)
    groups = np.repeat([group for group, _ in parts], rows)
    labels = np.arange(len(decision)) % 2
    return fedgft.measure(labels, decision, sensitive_features={"sex": groups}, site=name)


TWO = {"a": ((500, 500), (0.6, 0.4)), "b": ((500, 500), (0.6, 0.4))}
STATES = {  # gap -> the verdict at a tolerance of 5 points, with 1000 rows per group
    0.005: "within",
    0.05: "inconclusive",
    0.12: "exceeds",
}


@pytest.mark.parametrize("gap", STATES)
def test_a_gap_is_within_exceeds_or_is_inconclusive(gap):
    found = fedgft.audit(site({"man": 0.5, "woman": 0.5 - gap}))
    assert found.verdicts["sp"] == STATES[gap] and found.tolerance["sp"] == DEFAULT_TOLERANCE
    value = found.gaps["sp"]
    within = value.high < 0.05
    assert STATES[gap] == ("within" if within else "exceeds" if value.low > 0.05 else STATES[gap])
    verdict = found.verdict()[0]
    assert verdict.passes == {"within": True, "exceeds": False, "inconclusive": None}[STATES[gap]]
    assert verdict.sign == {"within": "✓", "exceeds": "✗", "inconclusive": "?"}[STATES[gap]]


def test_too_few_rows_and_no_rows_are_not_estimable():
    few = fedgft.audit(site({"a": 0.5, "b": 0.5}, rows=8))
    assert few.verdicts["sp"] == "not estimable" and few.verdict()[0].sign == "·"
    none = fedgft.audit(fedgft.measure([1] * 40, [1, 0] * 20, sensitive_features=["a", "b"] * 20))
    assert none.verdicts["fpr"] == "not estimable"
    text = none.verdict()[VERDICT_METRICS.index("fpr")].text
    assert text.startswith("The gap in false-positive-rate parity is not estimable: ")
    assert "does not mean that it is fair" in text


def test_the_sign_and_the_first_words_never_contradict_each_other():
    """D18: a cross stood before "No gap beyond chance", because of another attribute."""
    rng = np.random.default_rng(1)
    starts = {"✓": "is within", "✗": "exceeds", "?": "is inconclusive at", "·": "is not estimable"}
    seen = set()
    for rows in (30, 300, 3000):
        for tolerance in (0.0, 0.02, 0.1, 0.5):
            groups = {"sex": rng.choice(list("fm"), rows), "age": rng.choice(list("xyz"), rows)}
            y, d = rng.integers(0, 2, (2, rows))
            d |= (groups["sex"] == "m") & (rng.random(rows) < 0.2)
            found = fedgft.audit({"n": (y, d, groups)}, tolerance=tolerance)
            for name, verdict in zip(VERDICT_METRICS, found.verdict(), strict=True):
                head = verdict.text.split(":")[0]
                assert starts[verdict.sign] in head and verdict.state == found.verdicts[name]
                seen.add(verdict.state)
    assert seen == {"within", "exceeds", "inconclusive", "not estimable"}


def test_a_model_within_its_target_is_never_marked_as_failed_at_that_target():
    """Before: a model trained to 2 points got a cross in its own report."""
    sums = site({"man": 0.5, "woman": 0.497}, rows=20_000)
    found = fedgft.audit(sums, tolerance={"sp": 0.02})
    assert found.gaps["sp"].high < 0.02 and found.verdicts["sp"] == "within"
    assert found.lead().endswith("less than the tolerance of 2 points.")
    assert "✗ The gap in statistical" not in found.to_markdown()


def test_a_large_gap_of_few_rows_is_not_praised():
    """Before: 70% against 50% of 40 rows earned a check mark."""
    found = fedgft.audit(site({"man": 0.7, "woman": 0.5}, rows=20))
    assert found.gaps["sp"].value == pytest.approx(0.2) and found.gaps["sp"].low < 0.05
    assert found.verdicts["sp"] == "inconclusive" and found.verdict()[0].passes is None
    said = dict(found.report().answers)["Who must act?"]
    factor = rows_needed(found.summary["metrics"]["sp"], 0.05)
    assert factor and f"about {factor} times as many rows are needed" in said
    assert "It would then exceed the tolerance." in said


def test_tolerances_by_metric_are_stated_and_the_others_are_the_default():
    found = fedgft.audit(site({"a": 0.5, "b": 0.4}), tolerance={"equal_opportunity": 0.2})
    assert found.tolerance["eop"] == 0.2 == found.tolerance["eo"] and found.tolerance["sp"] == 0.05
    facts = dict(found.report().facts)
    assert "statistical parity 5 points (default)" in facts["Tolerance"]
    assert "equal opportunity 20 points;" in facts["Tolerance"]
    assert "of those whose true outcome is “1”" in found.lead()  # about the metric that was named
    default = dict(fedgft.audit(site({"a": 0.5, "b": 0.4})).report().facts)["Tolerance"]
    assert default.startswith("5 points, the default of fedgft and not a legal limit")
    assert "default tolerance" in fedgft.audit(site({"a": 0.5, "b": 0.4})).lead()


@pytest.mark.parametrize(
    ("tolerance", "said"),
    [
        ("sp=0.1", "^tolerance must be like"),
        ({"parity": 0.1}, "^tolerance 'parity' is no metric"),
        ({"sp": 2}, r"^tolerance\['sp'\] must be a gap, 0 or more and below 1, not 2"),
        (1.5, "^tolerance must be a gap"),
        ({"sp": "2%"}, r"^tolerance\['sp'\] must be a number"),
        ({"sp": 0.1, "SP": 0.2}, "^tolerance 'SP': sp is given twice"),
    ],
)
def test_wrong_tolerances(tolerance, said):
    with pytest.raises(FedgftError, match=said):
        check_tolerance(tolerance)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"author": "me"}, "^about 'author' is not known; choose from title, model"),
        ({"title": 3}, r"^about\['title'\] must be a text"),
        ({"purpose": "\ud800"}, r"^about\['purpose'\] must be a text"),
        ("a title", "^about must be like"),
        ({"files": ["no-such-file.json"]}, r"^about\['files'\] no-such-file.json: cannot be read"),
        ({"files": ["a\0b"]}, r"^about\['files'\] a.b: cannot be read \(not the name of a file"),
        ({"files": {"north.json": "abc"}}, r"^about\['files'\] 'north.json': must be a SHA-256"),
    ],
)
def test_wrong_facts(about, said):
    with pytest.raises(FedgftError, match=said):
        check_about(about)


def test_who_what_when_and_from_which_files(tmp_path):
    """Whose audit is it? The first screen and the head say so, in the page and in the text."""
    path = site({"man": 0.5, "woman": 0.3}).save(tmp_path / "north.json")
    about = {
        "title": "Audit of credit decisions",
        "model": "Credit model",
        "version": "2.1",
        "prepared_by": "Model risk",
        "purpose": "yearly review",
        "date": "2026-05-04",
        "outcome": "approved",
        "files": [path],
    }
    found = fedgft.audit(fedgft.read_sums(path), about=about, tolerance=0.05)
    assert found.about["model"] == "Credit model"
    for text in (found.to_markdown(), found.to_html()):
        for value in ("Credit model", "2.1", "Model risk", "yearly review", "2026", "approved"):
            assert value in text
        assert found.about["files"]["north.json"] in text
    assert found.lead() == (
        "At the only site, north, 50.0% of men and 30.0% of women are approved: a gap of 20.0 "
        "points (95% interval 15.8 to 24.1), more than the tolerance of 5 points."
    )


def test_the_first_screen_answers_four_questions():
    parts = [site({"man": 0.5, "woman": 0.3}, name=name) for name in ("north", "south")]
    found = fedgft.audit(parts, about={"model": "M", "outcome": "approved"})
    what, result, who, uncertain = (text for _, text in found.report().answers)
    assert "The decisions of M, on 4,000 rows of 2 sites (north, south)" in what
    assert "Of 100 men, about 50 are approved; of 100 women, about 30." in result
    assert "Too far apart: who is approved (statistical parity);" in result
    assert "The owner of the model" in who and "exceeds the tolerance at north, south" in who
    gap = found.gaps["sp"]
    assert f"true gap of {100 * gap.low:.1f} to {100 * gap.high:.1f} points" in uncertain


def test_a_site_with_a_gap_that_takes_from_the_overall_gap_is_explained():
    """Without a sentence, north looks exemplary: a gap of its own, and green."""
    places = {"north": ((300, 800), (0.97, 0.85)), "south": ((700, 200), (0.6, 0.05))}
    rows = {}
    for name, (sizes, rates) in places.items():
        d = np.concatenate([np.arange(n) < r * n for n, r in zip(sizes, rates, strict=True)])
        sex = np.repeat(["man", "woman"], sizes)
        rows[name] = (np.ones(len(d), int), d.astype(int), {"sex": sex})
    found = fedgft.audit(rows)
    local = found.sites["north"].gaps["sp"].local.value
    assert local > 0.1 > 0 > found.sites["north"].gaps["sp"].contribution
    text = explain_site(found.summary, "sp", "north")
    assert "north holds 30% of all men but 80% of all women." in text
    assert "is above the overall" in text and "takes" in text
    assert f"its own gap of {100 * local:.1f} points in favor of men adds" in text


def test_the_command_takes_and_prints_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site({"man": 0.5, "woman": 0.3}).save("north.json")
    asked = ("audit", "north.json", "--json")
    code, out, _ = run(
        capsys,
        *asked,
        "--title",
        "T",
        "--model-name",
        "M",
        "--model-version",
        "1",
        "--prepared-by",
        "me",
        "--purpose",
        "review",
        "--outcome",
        "approved",
        "--tolerance",
        "sp=2%,demographic-parity-difference=0.1",
        "eop=0.3",
    )
    assert code == 2  # named twice
    code, out, _ = run(
        capsys,
        *asked,
        "--title",
        "T",
        "--model-name",
        "M",
        "--model-version",
        "1",
        "--prepared-by",
        "me",
        "--purpose",
        "review",
        "--outcome",
        "approved",
        "--tolerance",
        "sp=2%,eop=0.3",
    )
    found = json.loads(out)
    assert code == 0 and found["tolerance"]["sp"] == 0.02 and found["tolerance"]["eop"] == 0.3
    assert found["verdicts"]["sp"] == "exceeds" and found["verdicts"]["eop"] == "within"
    known = {name: found["about"][name] for name in ("title", "model", "version", "prepared_by")}
    assert known == {"title": "T", "model": "M", "version": "1", "prepared_by": "me"}
    assert found["about"]["purpose"] == "review" and list(found["about"]["files"]) == ["north.json"]
    _, out, _ = run(capsys, *asked, "--tolerance", "30%")
    assert set(json.loads(out)["tolerance"].values()) == {0.3}
    for wrong in ("x", "sp", "sp=x", "2", "xx=0.1"):
        code, _, err = run(capsys, *asked, "--tolerance", wrong)
        assert code == 2 and "--tolerance" in err
    code, _, err = run(capsys, "audit", "--compare", ".", ".", "--tolerance", "0.1")
    assert code == 2


def test_the_limits_of_the_gate_are_the_tolerances_unless_these_are_given(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    site({"man": 0.5, "woman": 0.45}).save("north.json")
    code, out, _ = run(capsys, "audit", "north.json", "--json", "--fail-above", "sp=0.2")
    assert code == 0 and json.loads(out)["verdicts"]["sp"] == "within"
    both = ("--fail-above", "sp=0.2", "--tolerance", "sp=0.001")
    code, out, _ = run(capsys, "audit", "north.json", "--json", *both)
    assert code == 0 and json.loads(out)["verdicts"]["sp"] == "exceeds"
    code, out, _ = run(capsys, "audit", "north.json", "--json", "--fail-above", "sp=0.05")
    assert code == 0 and json.loads(out)["verdicts"]["sp"] == "inconclusive"  # passes the gate
    assert run(capsys, "audit", "north.json", "--fail-above", "sp=0.001")[0] == 3


def test_groups_without_the_name_of_an_attribute_are_named_themselves():
    """D10: "groups by group"."""
    found = fedgft.audit({"north": ([1, 0] * 40, [1, 0] * 40, list("ffmm") * 20)})
    assert ", groups by group" not in found.to_markdown() and "by group." not in found.scope()
    assert "the groups f, m" in found.scope()
    assert "compared between the groups f, m." in dict(found.report().answers)["What was audited?"]


def test_one_group_alone_is_said():
    found = fedgft.audit({"north": ([1, 0] * 40, [1, 0] * 40, ["f"] * 80)})
    assert "there is only one group" in found.verdict()[0].text


def test_an_audit_without_verdicts_can_be_compared():
    """Audits of 0.1.0 have no verdicts."""
    found = fedgft.audit(site({"man": 0.5, "woman": 0.3}))
    new = ("about", "tolerance", "tolerance_stated", "verdicts")
    old = {key: part for key, part in found.to_dict().items() if key not in new}
    change = found.compare(old)
    assert change.to_dict()["views"]["sex"]["sp"]["change"] == 0
    rates = next(table for table in change.tables() if table.title.startswith("Rates"))
    assert rates.rows[0][:2] == ("selection rate", "man")  # D8, here too


def federation(places: dict[str, tuple[tuple[int, int], tuple[float, float]]]):
    """Audit sites whose men and women have these numbers of rows and these approval rates."""
    rows = {}
    for name, (sizes, rates) in places.items():
        d = np.concatenate([np.arange(n) < r * n for n, r in zip(sizes, rates, strict=True)])
        sex = np.repeat(["man", "woman"], sizes)
        rows[name] = (np.arange(len(d)) % 2, d.astype(int), {"sex": sex})
    return fedgft.audit(rows, about={"outcome": "approved"})


def who_must_act(found) -> str:
    return dict(found.report().answers)["Who must act?"]


def test_a_gap_inside_small_sites_is_not_said_to_arise_between_them():
    """Before: "at most 18.0 points. It arises between the sites", and one site was blamed."""
    found = federation({f"site {k}": ((50, 50), (0.66, 0.5)) for k in range(20)})
    said = who_must_act(found)
    assert "Inside the sites, the average gap is 16.0 points (95% interval" in said
    assert "the gaps inside the sites add 16.0" in said and "over the sites adds nothing" in said
    assert "No single site has enough rows to show a gap above the tolerance." in said
    assert "No single site stands out: none adds more than 0.8 points." in said
    assert "arises" not in said and "comes from" not in said


def test_both_parts_of_a_gap_are_told():
    """Before: two sites with gaps of 7.5 points were said to have none."""
    found = federation({"a": ((800, 300), (0.7, 0.625)), "b": ((300, 800), (0.5, 0.425))})
    said = who_must_act(found)
    assert "Of the overall 16.5 points, the gaps inside the sites add 7.4, and how" in said
    assert "almost alike" not in said and "Most of" not in said  # a and b add about 8 each


def test_a_gap_of_the_mix_names_all_sites_that_make_it_up():
    """Before: "Most comes from east", which made 54% of it."""
    places = {"east": ((5000, 1500), (0.823, 0.821)), "north": ((2900, 6800), (0.222, 0.229))}
    found = federation(places | {"south": ((4300, 3700), (0.505, 0.504))})
    said = who_must_act(found)
    assert "Inside the sites, men and women are treated almost alike (average gap" in said
    assert "The gap comes from how they are spread over the sites." in said
    assert "Two sites make up almost all of it: east, where 82% are approved, holds 41%" in said
    assert "north, where 23% are approved" in said and "south" not in said


def test_opposite_gaps_of_sites_are_not_called_almost_alike():
    sites = {"a": ((500, 500), (0.6, 0.4)), "b": ((500, 500), (0.4, 0.55))}
    mix = {"c": ((900, 200), (0.8, 0.8)), "d": ((200, 900), (0.3, 0.3))}
    said = who_must_act(federation(sites | mix))
    assert "almost alike" not in said
    assert "exceeds the tolerance at a. The other way round, it exceeds the tolerance at b." in said


def test_the_rate_of_a_site_is_that_of_its_rows():
    """Before: the mean of the two groups' rates, whatever their rows."""
    found = federation({"a": ((900, 100), (0.8, 0.4)), "b": ((100, 900), (0.5, 0.3))})
    assert "Its selection rate of 76.0% is above the overall 54.0%" in explain_site(
        found.summary, "sp", "a"
    )


def test_the_figure_of_the_sites_blames_nobody():
    titles = [figure.title for figure in federation(TWO).report(figures=True).figures]
    assert "How the sites add up to the gap" in titles


def test_the_first_screen_says_who_is_compared_and_how_the_true_outcomes_differ():
    """Before: "Above the tolerance: equal opportunity", which sounds like good news."""
    y = np.repeat([1, 0, 1, 0], [550, 450, 300, 700])
    d = np.concatenate([np.arange(1000) < 600, np.arange(1000) < 400]).astype(int)
    found = fedgft.audit({"n": (y, d, {"sex": ["man"] * 1000 + ["woman"] * 1000})})
    result = dict(found.report().answers)["What was found?"]
    assert "The true outcome is “1” for about 55 of 100 men and 30 of 100 women." in result
    assert "Too far apart: who gets the decision “1” (statistical parity)" in result
    assert found.verdict()[0].text.startswith("The gap in statistical parity exceeds 5 points: ")


def test_the_80_percent_rule_is_about_selection_rates_alone():
    found = federation(TWO)
    sentences = [verdict.text for verdict in found.verdict()]
    assert "The ratio of 0.67 is below the 80% rule." in sentences[0]
    assert not any("80% rule" in text for text in sentences[1:])
    equal = federation({"a": ((500, 500), (0.6, 0.6))})
    assert "The ratio of 1.00 meets the 80% rule." in equal.verdict()[0].text


def test_one_caveat_per_attribute_says_where_local_and_overall_gaps_differ():
    places = {"east": ((5000, 1500), (0.82, 0.82)), "north": ((2900, 6800), (0.22, 0.22))}
    (caveat,) = federation(places).warnings
    start = "Local and overall gaps differ by sex, in points (95% interval): statistical parity, "
    assert caveat.startswith(f"{start}men minus women, is 27.1 (")
    assert "equal opportunity" in caveat and caveat.endswith("cannot be seen within sites.")


def test_groups_in_tables_have_the_names_that_sentences_use():
    tables = {table.title: table for table in federation(TWO).report().tables}
    header = tables["Where the groups are, percent"].header
    assert header[1:] == (
        "of all men",
        "of all women",
        "selection rate of men",
        "selection rate of women",
    )
    assert "Numbers are rounded; sums" in " ".join(tables["Sites, points"].notes)


def test_the_owner_must_act_if_any_gap_exceeds_the_tolerance():
    """Before: only the sites, if the first metric was undecided and another one exceeded."""
    y = np.repeat([1, 0, 1, 0], 500)
    d = np.concatenate([np.arange(500) < n for n in (400, 100, 250, 200)]).astype(int)
    groups = {"sex": ["man"] * 1000 + ["woman"] * 1000}
    found = fedgft.audit({"n": (y, d, groups)})
    assert found.verdicts["sp"] == "inconclusive" and found.verdicts["eop"] == "exceeds"
    said = who_must_act(found)
    assert said.startswith("The owner of the model, because the gaps in equal opportunity, ")
    assert "exceed the tolerance. The sites: " in said

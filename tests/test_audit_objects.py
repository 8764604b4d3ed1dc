"""An audit in Python: what it takes, its sums, its objects and its frames."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

import fedgft
from fedgft.auditing import Gap, Rate, Site, SiteSums, audit, measure
from fedgft.auditing.summary import read_summary
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG

SITES = ("east", "north", "south")
ROOT = Path(__file__).parents[1]


def people(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Labels, scores and two attributes; men are accepted more often."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], rows)
    age = rng.choice(["old", "young"], rows)
    y = rng.integers(0, 2, rows)
    score = np.clip(0.3 * y + 0.2 * (sex == "m") + 0.5 * rng.random(rows), 0, 1)
    return y, score, {"sex": sex, "age": age}


def federation(rows: int = 300) -> dict[str, tuple]:
    return {name: people(rows, seed) for seed, name in enumerate(SITES)}


@pytest.fixture(scope="module")
def found():
    return audit(federation())


def test_a_gap_prints_as_one_line(found):
    gap = found.gaps["sp"]
    points = [f"{100 * value:.1f}" for value in (gap.value, gap.low, gap.high)]
    assert str(gap) == (
        f"statistical parity: {points[0]} points (95% interval {points[1]} to {points[2]}) "
        f"between {gap.pair[0]} and {gap.pair[1]}"
    )
    assert str(replace(gap, value=None)) == "statistical parity: not estimable"


def test_an_audit_of_an_earlier_version_is_read_with_todays_names(found, tmp_path):
    """Version 0.1.0 called predictive parity "cal"; a comparison still finds it."""
    path = tmp_path / "audit.json"
    path.write_text(found.to_json().replace('"predictive-parity"', '"cal"'))
    assert read_summary(path) == found.to_dict()


# What `audit` takes


@pytest.mark.slow
def test_rows_by_site_are_measured_as_by_measure(found):
    sums = [measure(y, p, sensitive_features=g, site=n) for n, (y, p, g) in federation().items()]
    assert found.to_json() == audit(sums).to_json() == audit(sum(sums)).to_json()
    assert found.to_json() == audit(dict(zip(SITES, sums, strict=True))).to_json()
    y, p, g = federation()["east"]
    mixed = {"east": (y, p, g), "north": sums[1], "south": sums[2]}
    assert found.to_json() == audit(mixed).to_json()
    unnamed = measure(y, p, sensitive_features=g)
    assert list(audit({"north": unnamed}).sites) == ["north"]


@pytest.mark.parametrize("library", [pd, pl])
def test_columns_of_a_frame_are_rows(found, library):
    rows = {}
    for name, (y, p, g) in federation().items():
        frame = library.DataFrame({"y": y, "p": p, **g})
        rows[name] = (frame["y"], frame["p"], frame[["sex", "age"]])
    assert audit(rows).to_json() == found.to_json()


def test_a_class_may_be_missing_at_a_site():
    """The classes are those of all sites: "no" occurs at one of them alone."""
    made = audit(
        {
            "all yes": (["yes"] * 20, ["yes"] * 20, ["f", "m"] * 10),
            "both": (["yes", "no"] * 10, ["yes"] * 10 + ["no"] * 10, ["f", "m"] * 10),
            "a third": (["maybe"] * 20, ["yes"] * 20, ["f", "m"] * 10),
        }
    )
    assert made.summary["classes"] == ["maybe", "no", "yes"]
    ones = audit({"n": ([1] * 20, [1, 0] * 10, ["f", "m"] * 10)})
    assert ones.summary["classes"] == ["0", "1"]
    assert ones.gaps["eop"].value == 1.0
    assert ones.gaps["fpr"].value is None and ones.rates["fpr"]["f"].rows == 0
    decided = audit({"n": (["yes"] * 20, ["yes", "no"] * 10, ["f", "m"] * 10)})
    assert decided.summary["classes"] == ["no", "yes"]


Y = np.array([0, 1] * 20)
G = np.array(list("ffmm") * 10)
INDEX = pd.RangeIndex(40)[::-1]
WRONG = {
    "empty": ({}, "^sums is empty"),
    "no text": ({3: (Y, Y, G)}, "^sums has the site name 3: a site's name is a text"),
    "no name": ({" ": (Y, Y, G)}, "^sums has the site name ' '"),
    "half a character": ({"\ud800": (Y, Y, G)}, "^sums has the site name"),
    "two arrays": ({"n": (Y, Y)}, "^sums of site 'n': must be .y_true, y_pred or scores, sens"),
    "no rows": ({"n": None}, "^sums of site 'n': must be .* or a SiteSums, not None"),
    "a frame": ({"n": pd.DataFrame({"y": Y})}, "^sums of site 'n': must be .* or a SiteSums"),
    "lengths": (
        {"good": (Y, Y, G), "bad": (Y, Y[:3], G)},
        "^sums of site 'bad': y_pred has 3 rows, y_true has 40$",
    ),
    "groups": ({"n": (Y, Y, G[:-1])}, "site 'n': sensitive_features group has 39 rows, y_true has"),
    "no groups": ({"n": (Y, Y, None)}, "site 'n': sensitive_features is missing"),
    "no column": ({"n": (Y, Y, {})}, "site 'n': sensitive_features holds no column"),
    "no predictions": ({"n": (Y, None, G)}, "site 'n': name the model's output"),
    "two axes": ({"n": (np.eye(40), Y, G)}, "site 'n': y_true must have one axis, not 2"),
    "order": (
        {"n": (pd.Series(Y), pd.Series(Y, index=INDEX), G)},
        "site 'n': y_pred has the pandas index of y_true in another order",
    ),
    "other labels": (
        {"n": (pd.Series(Y, index=range(5, 45)), Y, pd.Series(G, index=range(9, 49)))},
        "site 'n': sensitive_features .*has another pandas index than y_true",
    ),
    "scores beyond": ({"n": (Y, Y + 0.5, G)}, r"site 'n': score column 'scores' holds 1.5, which"),
    "negative": ({"n": (Y, Y / 2 - 0.1, G)}, r"site 'n': score .* outside \[0, 1\]"),
    "logits": ({"n": (Y, Y * 9.5, G)}, "site 'n': decision '9.5' is none of the classes 0, 1"),
    "NaN scores": ({"n": (Y, np.where(Y, np.nan, 0.2), G)}, "site 'n': scores hold NaN"),
    "identifiers": (
        {"n": (np.arange(1000) % 2, np.arange(1000) % 2, np.arange(1000))},
        "site 'n': group column 'sensitive_features group' has more than 200 different values",
    ),
    "one label": ({"n": (["yes"] * 4, ["yes"] * 4, G[:4])}, "'yes' is the only label .* measure"),
    "a foreign name": (
        {"n": measure(Y, Y, sensitive_features=G, site="s")},
        "^sums of site 'n': its sums are those of site 's'; use one name",
    ),
    "several sites": (
        {
            "n": measure(Y, Y, sensitive_features=G, site="a")
            + measure(Y, Y, sensitive_features=G, site="b")
        },
        "site 'n': these are the sums of 2 sites",
    ),
    "nothing": ({"n": SiteSums()}, "site 'n': these are the sums of 0 sites"),
    "other columns": (
        {"n": (Y, Y, {"sex": G}), "s": (Y, Y, {"race": G})},
        "^sums of site 'n' and 's': group columns differ: 'sex' and 'race'",
    ),
    "scores at one site": ({"n": (Y, Y, G), "s": (Y, Y / 2, G)}, "'n' and 's': .* differ"),
    "an array": (3, "^sums must be a SiteSums, a list of them, or a mapping"),
    "a path": ("north.json", "^sums takes sums, not a path"),
    "a list of arrays": ([Y, Y, G], "^sums must be a SiteSums, not array.*or give .site name:"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_about_argument_and_site(case):
    given, said = WRONG[case]
    with pytest.raises(FedgftError, match=said) as caught:
        audit(given)
    assert caught.value.field == "sums" and "\n" not in str(caught.value)
    assert "--" not in str(caught.value) and "measure():" not in str(caught.value)


def test_one_group_and_missing_groups_are_no_errors():
    one = audit({"n": (Y, Y, ["f"] * 40)})
    assert one.gaps["sp"].value is None and one.gaps["sp"].pair is None
    assert one.gaps["sp"].noise_floor is None and one.rates["sp"]["f"].value == 0.5
    for unknown in (np.nan, None, pd.NA):
        holes = G.astype(object)
        holes[:8] = unknown
        made = audit({"n": (Y, Y, holes)})
        assert made.sites["n"].rows == 32 and made.accuracy.rows == 40
        assert any("not recorded for 8 of 40 rows" in text for text in made.warnings)


# Sums


def test_sums_have_a_short_text_and_survive_it(tmp_path):
    y, p, g = people(300)
    sums = measure(y, p, sensitive_features=g, site="north")
    assert repr(sums) == (
        "SiteSums(300 rows of 1 site: north; 4 groups by sex & age: f & old, f & young, m & old and"
        " 1 more; classes 0, 1, with scores)"
    )
    assert repr(SiteSums()) == "SiteSums(no site)"
    named = {"x" * 5000: (y, p, g), "\x1b[31m": (y, p, g)}
    long = repr(sum(measure(*rows[:2], sensitive_features=g, site=n) for n, rows in named.items()))
    assert len(long) < 300 and "\x1b" not in long
    again = SiteSums.from_json(sums.to_json())
    assert again.to_json() == sums.to_json()
    path = sums.save(tmp_path / "north.json")
    assert path.read_text() == sums.to_json() and fedgft.read_sums(path).to_json() == sums.to_json()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sum([sums, sums.named("south")]).rows() == 600


def test_text_of_sums_is_checked():
    y, p, g = people(300)
    sums = measure(y, p, sensitive_features=g, site="north")
    wrong = json.loads(sums.to_json())
    wrong["cells"][0]["count"] += 1
    with pytest.raises(FedgftError, match=r"^mail: cells\[0\].scores.*histogram adds up to"):
        SiteSums.from_json(json.dumps(wrong), source="mail")
    with pytest.raises(FedgftError, match=r"^text: not a whole file of sums: not JSON"):
        SiteSums.from_json("hello")
    with pytest.raises(FedgftError, match="has no name"):
        measure(y, p, sensitive_features=g).to_json()
    with pytest.raises(FedgftError, match=r"sums of one site, not of 2"):
        (sums + sums.named("south")).to_json()
    with pytest.raises(FedgftError, match=r"^min_bin must be at least 1"):
        sums.to_json(min_bin=0)


# Objects


def test_objects_hold_the_numbers_of_the_summary(found):
    summary = found.to_dict()
    assert list(found.gaps) == list(found.rates) == list(CATALOG)
    for name, gap in found.gaps.items():
        kept = summary["metrics"][name]
        assert isinstance(gap, Gap) and gap.metric == name and gap.title == CATALOG[name].title
        assert (gap.value, gap.low, gap.high) == (kept["gap"], kept["low"], kept["high"])
        assert (gap.ratio, gap.ratio_low) == (kept["ratio"], kept["ratio_low"])
        assert list(gap.pair) == kept["pair"] and gap.condition == kept["condition"]
        assert gap.noise_floor == summary["noise_floor"][name]
        assert gap.within.value == summary["within"][name]["gap"]
        for group, rate in found.rates[name].items():
            assert isinstance(rate, Rate)
            assert vars(rate) == {
                "value": kept["groups"][group]["rate"],
                "low": kept["groups"][group]["low"],
                "high": kept["groups"][group]["high"],
                "rows": kept["groups"][group]["n"],
            }
        highest, lowest = (found.rates[name][group].value for group in gap.pair)
        assert gap.value == pytest.approx(highest - lowest, abs=1e-12)
    assert list(found.sites) == list(SITES)
    for name, site in found.sites.items():
        kept = summary["sites"][name]
        assert isinstance(site, Site) and site.name == name and site.rows == kept["n"] == 300
        for metric, gap in site.gaps.items():
            assert gap.value == kept["gap"][metric] and gap.high == kept["high"][metric]
            assert gap.local.low == kept["local"][metric]["low"]
            assert gap.contribution == kept["contribution"][metric]
    assert sum(s.gaps["sp"].contribution for s in found.sites.values()) == pytest.approx(
        found.gaps["sp"].value
    )
    assert found.accuracy.value == summary["accuracy"]["rate"]
    assert list(found.attributes) == ["sex", "age", "sex & age"]
    assert found.attributes["sex"].gaps["sp"].pair == ("m", "f")
    assert found.attributes["sex & age"].gaps == found.gaps
    assert found.attributes["sex"].sites["north"].accuracy.value is None


def test_accuracy_of_sites_is_the_share_of_right_decisions(found):
    for name, (y, p, _) in federation().items():
        accuracy = found.sites[name].accuracy
        assert accuracy.value == pytest.approx(((p >= 0.5) == y).mean()) and accuracy.rows == 300
        assert accuracy.low < accuracy.value < accuracy.high


def test_the_noise_floor_is_the_mean_gap_of_a_fair_model(found):
    """A fair model: one rate for all groups, drawn many times on as many rows."""
    rng = np.random.default_rng(1)
    by_sex = found.attributes["sex"]
    rates = by_sex.rates["sp"]
    rows = np.array([rate.rows for rate in rates.values()]).astype(int)
    common = sum(rate.value * rate.rows for rate in rates.values()) / rows.sum()
    drawn = rng.binomial(rows, common, (20_000, len(rows))) / rows
    assert by_sex.gaps["sp"].noise_floor == pytest.approx(np.ptp(drawn, axis=1).mean(), rel=0.03)


def test_there_is_no_noise_floor_under_noise_or_of_few_rows():
    y, p, g = people(300)
    noisy = measure(y, p, sensitive_features=g["sex"], site="n", min_cell=100)
    assert audit(noisy).gaps["sp"].noise_floor is None
    few = audit({"n": (Y[:12], Y[:12], ["a"] * 9 + ["b"] * 3)})
    assert few.gaps["sp"].noise_floor is None and few.gaps["sp"].value is not None


# Frames


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_frames_are_tidy(found, library):
    gaps, rates, sites = (found.to_frame(t, library=library) for t in ("gaps", "rates", "sites"))
    assert {type(f).__module__.partition(".")[0] for f in (gaps, rates, sites)} == {library}
    assert (len(gaps), len(rates), len(sites)) == (6, 6 * 4, 6 * 3)
    assert list(gaps["metric"]) == list(CATALOG)
    assert list(gaps["value"]) == [gap.value for gap in found.gaps.values()]
    assert list(gaps["highest_group"]) == [gap.pair[0] for gap in found.gaps.values()]
    each = zip(rates["metric"], rates["group"], rates["value"], rates["rows"], strict=True)
    for metric, group, value, rows in each:
        assert (value, rows) == (found.rates[metric][group].value, found.rates[metric][group].rows)
    each = zip(sites["metric"], sites["site"], sites["contribution"], strict=True)
    for metric, site, value in each:
        assert value == found.sites[site].gaps[metric].contribution
    assert len(found.to_frame("rates", by="sex", library=library)) == 6 * 2
    assert len(found.to_frame(by="age", library=library)) == 6


def test_what_is_not_estimable_is_missing_in_a_frame():
    made = audit({"n": ([1] * 40, Y, G)})
    frame = made.to_frame().row(by_predicate=pl.col("metric") == "fpr", named=True)
    assert frame["value"] is None and frame["highest_group"] is None
    pandas = made.to_frame(library="pandas").set_index("metric")
    assert pandas["value"].dtype == float and np.isnan(pandas.loc["fpr", "value"])


def test_a_frame_of_an_unknown_table_or_library(found, monkeypatch):
    for given, said in (
        ({"table": "gap"}, "^table 'gap' is not known; choose from gaps, rates, sites"),
        ({"library": "dask"}, "^library 'dask' is not known; choose from polars, pandas"),
        ({"by": "race"}, "^by 'race' is not known; choose from sex, age, sex & age"),
    ):
        with pytest.raises(FedgftError, match=said):
            found.to_frame(**given)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedgftError, match=r"^library 'pandas' needs pandas: pip install pandas$"):
        found.to_frame(library="pandas")
    assert len(found.to_frame()) == 6


def test_the_types_of_the_package_are_those_of_its_names():
    stub = (ROOT / "src/fedgft/auditing/__init__.pyi").read_text()
    listed = re.findall(r'^    "(\w+)",$', stub, re.MULTILINE)
    assert sorted(listed) == sorted(fedgft.auditing.__all__)
    for name in listed:
        assert getattr(fedgft.auditing, name).__doc__, name


def test_scores_that_are_all_0_or_1_at_one_site_are_scores():
    """A tree may be certain about every row of a site."""
    y = [1, 0, 1, 0]
    groups = list("ffmm")
    certain = fedgft.audit(
        {"a": (y, [1.0, 0.0, 0.0, 0.0], groups), "b": (y, [0.9, 0.2, 0.6, 0.4], groups)}
    )
    assert certain.accuracy.value == 7 / 8

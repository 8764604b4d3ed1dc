"""The form for New York City's Local Law 144: the rule's own examples, and counts of raw rows."""

import csv
import math
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgft
from fedgft.auditing.form_ll144 import build
from fedgft.auditing.impact_ratios import SMALL, list_categories, score_table
from fedgft.auditing.median_score import count_above_median
from fedgft.auditing.rates import list_views, pool_sites
from fedgft.errors import FedgftError

# 6 RCNY § 5-301(b), the example of a tool that selects: (applicants, selected) and the printed
# rates and impact ratios. "Asian" and so on are short for the names in the rule.
SEX = {"Male": (1390, 667, "48", "1.00"), "Female": (1181, 555, "47", "0.979")}
RACE = {
    "Hispanic": (408, 204, "50", "0.97"),
    "White": (797, 412, "52", "1.00"),
    "Black": (390, 170, "44", "0.84"),
    "Hawaiian": (119, 52, "44", "0.85"),
    "Asian": (616, 302, "49", "0.95"),
    "Native": (41, 18, "44", "0.85"),
    "Two": (213, 96, "45", "0.87"),
}
BOTH = {  # the rule prints the last two numbers of Hispanic women in the wrong order
    ("Male", "Hispanic"): (205, 90, "43.9", "0.841"),
    ("Female", "Hispanic"): (190, 82, "43.2", "0.827"),
    ("Male", "White"): (412, 215, "52.2", "1.000"),
    ("Male", "Black"): (226, 95, "42.0", "0.806"),
    ("Male", "Hawaiian"): (87, 37, "42.5", "0.815"),
    ("Male", "Asian"): (321, 167, "52.0", "0.997"),
    ("Male", "Native"): (24, 11, "45.8", "0.878"),
    ("Male", "Two"): (115, 52, "45.2", "0.866"),
    ("Female", "White"): (385, 197, "51.2", "0.981"),
    ("Female", "Black"): (164, 75, "45.7", "0.876"),
    ("Female", "Hawaiian"): (32, 15, "46.9", "0.898"),
    ("Female", "Asian"): (295, 135, "45.8", "0.877"),
    ("Female", "Native"): (17, 7, "41.2", "0.789"),
    ("Female", "Two"): (98, 44, "44.9", "0.860"),
}
# § 5-301(d), the example of a tool that scores: applicants, and the printed numbers. The counts
# above the median follow from the rates.
SCORED = {
    ("Male", "Hispanic"): (16, 12, "75", "1.00"),
    ("Female", "Hispanic"): (12, 6, "50", "0.67"),
    ("Male", "White"): (20, 7, "35", "0.47"),
    ("Male", "Black"): (20, 10, "50", "0.67"),
    ("Male", "Hawaiian"): (4, 3, "75", "1.00"),
    ("Male", "Asian"): (12, 7, "58.3", "0.78"),
    ("Male", "Native"): (8, 5, "62.5", "0.83"),
    ("Male", "Two"): (12, 6, "50", "0.67"),
    ("Female", "White"): (20, 8, "40", "0.53"),
    ("Female", "Black"): (12, 6, "50", "0.67"),
    ("Female", "Hawaiian"): (4, 2, "50", "0.67"),
    ("Female", "Asian"): (12, 3, "25", "0.33"),
    ("Female", "Native"): (8, 5, "62.5", "0.83"),
    ("Female", "Two"): (8, 4, "50", "0.67"),
}
SCORED_SEX = {"Male": (92, "54.3", "1.00"), "Female": (76, "44.7", "0.82")}
SCORED_RACE = {
    "Hispanic": (28, "64.2", "1.00"),  # 18 of 28 is 64.3
    "White": (40, "37.5", "0.58"),
    "Black": (32, "50.0", "0.78"),
    "Hawaiian": (8, "62.5", "0.97"),
    "Asian": (24, "41.7", "0.65"),
    "Native": (16, "62.5", "0.97"),
    "Two": (20, "50.0", "0.78"),
}


def agrees(value: float, printed: str, scale: float = 1) -> bool:
    """Whether the number rounds to the printed one, up to one unit of its last digit."""
    digits = len(printed.partition(".")[2])
    return abs(scale * value - float(printed)) < 1.001 * 10**-digits


def form_of(sex: list, race: list, decisions: list, scores: list | None = None, **more):
    sums = fedgft.measure(
        decisions, decisions, scores=scores, sensitive_features={"sex": sex, "race": race}
    )
    return fedgft.audit(sums).form("ll144", **more)


def expand(cells: dict) -> tuple[list, list, list]:
    """Rows of people with the given numbers: sex, race and whether they are in the second one."""
    rows = [
        (sex, race, int(i < hits)) for (sex, race), (n, hits, *_) in cells.items() for i in range(n)
    ]
    return tuple(list(column) for column in zip(*rows, strict=True))


def table(form, by: str, part: str = "selection") -> dict:
    """The rows of one table by category."""
    found = form.to_dict()["numbers"][part]
    tables = found[0]["tables"] if part == "selection" else found
    (rows,) = [each["rows"] for each in tables if each["by"] == by]
    return {tuple(row["category"]): row for row in rows}


def test_the_example_of_selection_rates_in_the_rule() -> None:
    """Each of the three tables of the rule; their totals differ, so each is audited by itself."""
    for wanted, by in ((SEX, "sex"), (RACE, "race"), (BOTH, "sex & race")):
        cells = wanted
        if by == "sex":
            cells = {(name, "x"): numbers for name, numbers in wanted.items()}
        if by == "race":
            cells = {("x", name): numbers for name, numbers in wanted.items()}
        sex, race, selected = expand(cells)
        found = table(form_of(sex, race, selected), by)
        assert len(found) == len(wanted)
        for name, (people, number, rate, ratio) in wanted.items():
            row = found[name if isinstance(name, tuple) else (name,)]
            assert (row["applicants"], row["selected"]) == (people, number)
            assert agrees(row["rate"], rate, 100) and agrees(row["ratio"], ratio)


def test_the_example_of_unknown_people_in_the_rule() -> None:
    sex, race, selected = expand(BOTH)
    unknown = [(None, "White")] * 100 + [("Male", None)] * 90 + [(None, None)] * 60
    sex += [each[0] for each in unknown]
    race += [each[1] for each in unknown]
    form = form_of(sex, race, selected + [1] * 250)
    people = form.to_dict()["numbers"]["people"]
    assert people["unknown"] == 250  # "used to assess 250 individuals with an unknown ... category"
    assert (people["unknown_sex"], people["unknown_race"]) == (160, 150)
    assert "People of an unknown category:** 250 " in form.to_markdown()
    assert table(form, "sex & race")["Male", "White"]["applicants"] == 412


def test_the_example_of_scoring_rates_in_the_rule() -> None:
    sex, race, above = expand(SCORED)
    assert sum(above) == len(above) / 2 == 84  # so that a score in between is the median
    form = form_of(sex, race, above, scores=[0.3 + 0.4 * x for x in above])
    assert form.to_dict()["numbers"]["median"] == {"low": 0.3, "high": 0.71}
    for name, (people, rate, ratio) in (SCORED_SEX | SCORED_RACE).items():
        by = "sex" if name in SCORED_SEX else "race"
        row = table(form, by, "scoring")[name,]
        assert row["applicants"] == people
        assert agrees(row["rate"], rate, 100) and agrees(row["ratio"], ratio)
    for name, (people, _, rate, ratio) in SCORED.items():
        row = table(form, "sex & race", "scoring")[name]
        assert row["applicants"] == people
        assert agrees(row["rate"], rate, 100) and agrees(row["ratio"], ratio)


# Raw rows


def draw_rows(n: int = 3000, seed: int = 0, steps: int = 20) -> pl.DataFrame:
    """Applicants of two sites; 1% of them are of a rare race, and some are of an unknown one."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["F", "M", None], n, p=[0.45, 0.5, 0.05])
    race = rng.choice(["A", "B", "Rare", None], n, p=[0.6, 0.34, 0.01, 0.05])
    race[(race == "Rare") & (sex == "F")] = "B"  # nobody is both
    score = np.clip(rng.integers(0, steps, n) - 2 * (race == "B"), 0, None) / steps
    return pl.DataFrame(
        {"sex": list(sex), "race": list(race), "score": score, "site": rng.choice(["n", "s"], n)}
    ).with_columns(selected=(pl.col("score") > 0.6).cast(pl.Int64))


def audit_rows(rows: pl.DataFrame, folder: Path) -> fedgft.Audit:
    """The audit of these rows from the files of two sites, as the command line writes them."""
    paths = []
    for (site,), part in rows.partition_by("site", as_dict=True).items():
        part.write_parquet(folder / f"{site}.parquet")
        sums = fedgft.measure_file(
            folder / f"{site}.parquet",
            label="selected",
            group=["sex", "race"],
            score="score",
            decision="decided",
        )
        paths.append(sums.save(folder / f"{site}.json", min_bin=1))
    return fedgft.audit([fedgft.read_sums(path) for path in paths], about={"files": paths})


def count_rows(rows: pl.DataFrame, columns: list[str], column: str) -> dict[tuple, tuple]:
    """By a group-by of polars: people, hits, rate and impact ratio of each category."""
    found = (
        rows.drop_nulls(columns)
        .group_by(columns)
        .agg(n=pl.len(), hits=pl.col(column).sum())
        .with_columns(rate=pl.col("hits") / pl.col("n"))
    )
    found = found.with_columns(ratio=pl.col("rate") / pl.col("rate").max())
    numbers = found.select("n", "hits", "rate", "ratio").iter_rows()
    return dict(zip(found.select(columns).iter_rows(), numbers, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_numbers_equal_those_of_the_raw_rows(tmp_path, seed) -> None:
    rows = draw_rows(seed=seed).with_columns(decided=pl.col("selected"))
    median = float(np.median(rows["score"]))
    rows = rows.with_columns(above=(pl.col("score") > median).cast(pl.Int64))
    form = audit_rows(rows, tmp_path).form("ll144", facts={"score_step": "0.05"})
    numbers = form.to_dict()["numbers"]
    assert numbers["median"] == {"low": median, "high": median}
    for by, columns in (("sex", ["sex"]), ("race", ["race"]), ("sex & race", ["sex", "race"])):
        for part, column in (("selection", "selected"), ("scoring", "above")):
            wanted = count_rows(rows, columns, column)
            found = table(form, by, part)
            assert wanted.keys() <= found.keys()
            for name, row in found.items():
                if name not in wanted:
                    assert row["applicants"] == 0 and row["rate"] is row["ratio"] is None
                    continue
                n, hits, rate, ratio = wanted[name]
                assert row["applicants"] == n
                assert row.get("selected", hits) == hits
                assert row["rate"] == pytest.approx(rate, rel=1e-12)
                assert row["ratio"] == pytest.approx(ratio, rel=1e-12)
    people = numbers["people"]
    assert people["unknown_sex"] == rows["sex"].null_count()
    assert people["unknown_race"] == rows["race"].null_count()
    assert people["unknown"] == rows.height - rows.drop_nulls(["sex", "race"]).height
    assert people["counted"] == rows.height


def add_nobody(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows and 20 people of another race, none of whom has a decision."""
    rows = rows.with_columns(decided=pl.col("selected"))
    more = rows.head(20).with_columns(
        sex=pl.lit("F"), race=pl.lit("Nobody"), decided=pl.lit(None, pl.Int64)
    )
    return pl.concat([rows, more])


def test_every_pair_of_values_has_a_row_even_without_people(tmp_path) -> None:
    rows = add_nobody(draw_rows())
    found = table(audit_rows(rows, tmp_path).form("ll144"), "sex & race")
    assert set(found) == set(product("FM", ("A", "B", "Rare", "Nobody")))
    empty = {name for name, row in found.items() if row["applicants"] == 0}
    assert empty == {("F", "Rare"), ("F", "Nobody"), ("M", "Nobody")}


def test_an_empty_category_is_not_estimable_and_never_the_highest(tmp_path) -> None:
    form = audit_rows(add_nobody(draw_rows()), tmp_path).form("ll144")
    assert any("20 people have no decision or score" in text for text in form.warnings)
    row = table(form, "race")["Nobody",]
    assert row["rate"] is row["low"] is row["ratio"] is None and not row["is_highest"]
    assert "| Nobody | 0 | 0 | not estimable | not estimable | – |" in form.to_markdown()


def test_small_categories_are_left_out_only_with_a_justification(tmp_path) -> None:
    rows = draw_rows(seed=1).with_columns(decided=pl.col("selected"))
    rows = rows.with_columns(decided=pl.when(pl.col("race") == "Rare").then(1).otherwise("decided"))
    made = audit_rows(rows, tmp_path)
    plain, excluded = made.form("ll144"), made.form("ll144", facts={"exclusion": "30 people"})
    rare = table(plain, "race")["Rare",]
    assert rare["share"] < SMALL and rare["is_highest"] and rare["ratio"] == 1
    assert "They are included here" in plain.to_markdown()
    found = table(excluded, "race")
    assert found["Rare",]["is_excluded"] and found["Rare",]["ratio"] is None
    assert found["Rare",]["rate"] == 1 and found["Rare",]["selected"] == rare["applicants"]
    best = max(row["rate"] for name, row in found.items() if name[0] in "AB")
    for name in ("A", "B"):
        assert found[name,]["ratio"] == pytest.approx(found[name,]["rate"] / best)
    assert "30 people" in excluded.to_markdown()
    assert "| Rare | " in excluded.to_markdown() and "excluded" in excluded.to_markdown()


def test_several_classes_have_a_table_each() -> None:
    rng = np.random.default_rng(0)
    n = 600
    decided = rng.choice(["lead", "team", "solo"], n)
    sex, race = rng.choice(["F", "M"], n), rng.choice(["A", "B"], n)
    sums = fedgft.measure(decided, decided, sensitive_features={"gender": sex, "race": race})
    found = fedgft.audit(sums).form("ll144").to_dict()["numbers"]["selection"]
    assert [each["class"] for each in found] == ["lead", "solo", "team"]
    for each in found:
        for row in each["tables"][0]["rows"]:
            mine = sex == row["category"][0]
            assert row["selected"] == (decided[mine] == each["class"]).sum()
            assert row["rate"] == pytest.approx((decided[mine] == each["class"]).mean())


# Scoring rates from ranges


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ranges_contain_the_true_scoring_rate(data) -> None:
    """Whatever the scores, the bins and the merged ranges are."""
    n = data.draw(st.integers(2, 40))
    grid = data.draw(st.sampled_from([2, 5, 10, 37, 1000]))
    scores = np.array(data.draw(st.lists(st.integers(0, grid), min_size=n, max_size=n))) / grid
    groups = data.draw(st.lists(st.sampled_from(["A", "B", None]), min_size=n, max_size=n))
    sex = data.draw(st.lists(st.sampled_from(["F", "M"]), min_size=n, max_size=n))
    if all(group is None for group in groups):
        groups[0] = "A"
    bins = data.draw(st.sampled_from([2, 5, 10, 100]))
    labels = [0, 1] * (n // 2) + [0] * (n % 2)
    sums = fedgft.measure(
        labels,
        (scores > 0.5).astype(int),
        scores=scores,
        sensitive_features={"sex": sex, "race": groups},
        site="north",
        bins=bins,
        classes=[0, 1],
    )
    text = sums.to_json(min_bin=data.draw(st.sampled_from([1, 3, 5])))
    pool = pool_sites(fedgft.SiteSums.from_json(text))
    audit = SimpleNamespace(pool=pool, views=list_views(pool))
    step = 1 / grid if data.draw(st.booleans()) else None
    median = np.median(scores)
    found = count_above_median(audit.views[-1], step=step)
    assert found.median_low - 1e-12 <= median <= found.median_high + 1e-12
    by_sex, by_race, _ = list_categories(audit, {"sex": "sex", "race": "race"})
    for table, values in ((by_sex, sex), (by_race, groups)):
        rows = score_table(table, step, exclude=False)["rows"]
        mine = {row["category"]: [v == row["category"][0] for v in values] for row in rows}
        rates = {key: (scores[where] > median).mean() for key, where in mine.items()}
        for row in rows:
            true = rates[row["category"]]
            assert row["rate_low"] - 1e-12 <= true <= row["rate_high"] + 1e-12
            if max(rates.values()) > 0 and not math.isnan(row["ratio_from"]):
                ratio = true / max(rates.values())
                assert row["ratio_from"] - 1e-12 <= ratio <= row["ratio_to"] + 1e-12


def test_fine_bins_narrow_the_range() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random(4001)
    sex = rng.choice(["F", "M"], 4001)
    widths = []
    for bins in (10, 100, 1000):
        sums = fedgft.measure(
            rng.integers(0, 2, 4001),
            scores,
            sensitive_features={"sex": sex, "race": ["A"] * 4001},
            bins=bins,
        )
        row = table(fedgft.audit(sums).form("ll144"), "sex", "scoring")["F",]
        true = (scores[sex == "F"] > np.median(scores)).mean()
        assert row["rate_low"] <= true <= row["rate_high"]
        widths.append(row["rate_high"] - row["rate_low"])
    assert widths[0] > widths[1] > 3 * widths[2] > 0


def test_without_scores_or_with_noise_there_are_no_scoring_rates() -> None:
    sex, race, selected = expand(BOTH)
    assert form_of(sex, race, selected).to_dict()["numbers"]["scoring"] is None
    pytest.importorskip("opendp")
    sums = fedgft.measure(
        selected,
        [0.2 + 0.5 * x for x in selected],
        sensitive_features={"sex": sex, "race": race},
        epsilon=5.0,
    )
    form = fedgft.audit(sums).form("ll144")
    numbers = form.to_dict()["numbers"]
    assert numbers["scoring"] is None and "noise" in form.to_markdown()
    for row in numbers["selection"][0]["tables"][0]["rows"]:
        assert row["rate"] == pytest.approx(0.475, abs=0.05)
    assert "about 2,5" in form.to_markdown()  # people in the data


def test_withheld_counts_make_ranges() -> None:
    sex, race, selected = expand(BOTH)
    sums = fedgft.measure(
        selected, selected, sensitive_features={"sex": sex, "race": race}, min_cell=20
    )
    row = table(fedgft.audit(sums).form("ll144"), "sex & race")["Female", "Native"]
    assert row["rate"] is None and row["rate_low"] < 7 / 17 < row["rate_high"]


# The page


def test_the_tables_show_the_numbers_of_the_json(tmp_path) -> None:
    """Every cell of a table in the Markdown text is a number of the JSON file, rounded."""
    rows = draw_rows(seed=4).with_columns(decided=pl.col("selected"))
    form = audit_rows(rows, tmp_path).form("ll144", facts={"exclusion": "few people"})
    lines = [line for line in form.to_markdown().splitlines() if line.startswith("| ")]
    body = [line for line in lines if "---" not in line and "applicants" not in line]
    shown = iter([[cell.strip() for cell in line.strip("|").split("|")] for line in body])
    found = form.to_dict()["numbers"]
    parts = [("selection", found["selection"][0]["tables"]), ("scoring", found["scoring"])]
    for part, tables in parts:
        for each in tables:
            for row in each["rows"]:
                cells = next(shown)
                names, cells = cells[: len(each["columns"])], cells[len(each["columns"]) :]
                assert names == row["category"]
                assert cells.pop(0) == f"{row['applicants']:,}"
                if part == "selection":
                    assert cells.pop(0) == f"{row['selected']:,}"
                check_cells(cells, row)
    assert next(shown, None) is None


def check_cells(cells: list[str], row: dict) -> None:
    """The cells of rate, impact ratio and interval show the numbers of the row."""
    rate, ratio, interval = cells
    ends = (row["rate_low"], row["rate_high"])
    if ends[0] is None:
        assert rate == "not estimable"
    elif row["rate"] is None:
        assert rate == f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}"
    else:
        assert rate == f"{100 * row['rate']:.1f}"
    if row["is_excluded"]:
        assert (ratio, interval) == ("excluded", "–")
    elif row["ratio_from"] is None:
        assert (ratio, interval) == ("not estimable", "–")
    else:
        assert re.sub(" to .*", "", ratio) == f"{row['ratio_from']:.3f}"
        low, high = row["ratio_low"], row["ratio_high"]
        if low is not None and high is not None:
            assert interval == f"{low:.3f} to {high:.3f}"


def test_csv_of_a_table_has_one_number_per_cell(tmp_path) -> None:
    rows = draw_rows(seed=4).with_columns(decided=pl.col("selected"))
    form = audit_rows(rows, tmp_path).form("ll144")
    text = next(section for section in form.sections if section.tables).tables[0].csv()
    header, first, *_ = csv.reader(text.splitlines())
    assert header[:4] == ["sex", "# of applicants", "# selected", "selection rate, %"]
    assert first[0] == "F" and math.isfinite(float(first[3]))


# Bad input


@pytest.mark.parametrize(
    ("columns", "given", "kind"),
    [
        (["age", "race"], {}, "missing"),
        (["sex", "age"], {}, "missing"),
        (["sex", "gender", "race"], {}, "conflict"),
        (["sex", "race", "ethnicity"], {}, "conflict"),
        (["sex", "race"], {"sex": "gendr"}, "invalid"),
        (["sex", "race"], {"sex": "race"}, "conflict"),
        (["sex", "race"], {"color": "race"}, "invalid"),
    ],
)
def test_columns_that_are_missing_or_ambiguous(columns, given, kind) -> None:
    rows = ([1, 0] * 20, [1, 1, 0, 0] * 10, {name: ["x", "y"] * 20 for name in columns})
    audit = fedgft.audit({"north": rows})
    with pytest.raises(FedgftError) as error:
        audit.form("ll144", columns=given)
    assert (error.value.field, error.value.kind) == ("form_columns", kind)
    assert "\n" not in str(error.value)


def test_columns_by_other_names() -> None:
    rows = (
        [1, 0] * 20,
        [1, 1, 0, 0] * 10,
        {"geschl": ["x", "y"] * 20, "Race/Ethnicity": ["a"] * 40},
    )
    form = fedgft.audit({"north": rows}).form("ll144", columns={"sex": "geschl"})
    assert form.to_dict()["numbers"]["columns"] == {"sex": "geschl", "race": "Race/Ethnicity"}


@pytest.mark.parametrize(
    "facts",
    [
        {"score_step": "often"},
        {"score_step": "0"},
        {"score_step": "nan"},
        {"data_kind": "invented"},
        {"license": "mit"},
        {"auditor": ""},
        {"auditor": 7},
    ],
)
def test_facts_that_are_wrong(facts) -> None:
    sex, race, selected = expand(BOTH)
    with pytest.raises(FedgftError) as error:
        form_of(sex, race, selected, facts=facts)
    assert error.value.field == "form_facts"


def test_a_step_that_contradicts_the_scores() -> None:
    scores = [0.31] * 30 + [0.35] * 31
    rows = ([0, 1] * 30 + [0], scores, {"sex": ["F"] * 61, "race": ["A"] * 61})
    with pytest.raises(FedgftError) as error:
        fedgft.audit({"n": rows}).form("ll144", facts={"score_step": "0.25"})
    assert (error.value.field, error.value.kind) == ("form_facts", "data")


def test_a_column_that_nobody_recorded() -> None:
    rows = ([1, 0] * 20, [1, 1, 0, 0] * 10, {"sex": [None] * 40, "race": ["a", "b"] * 20})
    with pytest.raises(FedgftError) as error:
        fedgft.audit({"north": rows}).form("ll144")
    assert error.value.kind == "data"


@pytest.mark.parametrize("more", [{"sample_weight": [1.5] * 40}, {"randomized_groups": 2.0}])
def test_sums_that_are_no_numbers_of_people(more) -> None:
    groups = {"sex": ["F", "M"] * 20, "race": ["a", "a", "b", "b"] * 10}
    sums = fedgft.measure(
        [1, 0] * 20,
        [1, 1, 0, 0] * 10,
        sensitive_features=groups,
        values={"sex": ("F", "M"), "race": ("a", "b")},
        **more,
    )
    pool = pool_sites(sums)
    with pytest.raises(FedgftError) as error:
        build(SimpleNamespace(pool=pool, views=list_views(pool)), columns={}, facts={})
    assert (error.value.field, error.value.kind) == ("form", "unsupported")


def test_unknown_as_a_category_is_noticed() -> None:
    rows = ([1, 0] * 20, [1, 1, 0, 0] * 10, {"sex": ["F", "Unknown"] * 20, "race": ["a", "b"] * 20})
    form = fedgft.audit({"north": rows}).form("ll144")
    assert any("“Unknown” is counted as a category" in text for text in form.warnings)

"""The scan of subgroups, compared with loops over the rows; false alarms, power, commands."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import polars as pl
import pytest
from scipy.stats import fisher_exact

from fedgft.auditing import audit, measure
from fedgft.auditing.subgroup_scan import LEVEL, everybody_else, scan_subgroups
from fedgft.errors import FedgftError
from test_cli import run
from test_html_escaping import HOSTILE, check

EVENTS = {  # rows of the event, and what is counted among them
    "sp": lambda y, d: (y >= 0, d == 1),
    "eop": lambda y, d: (y == 1, d == 1),
    "fpr": lambda y, d: (y == 0, d == 1),
    "predictive-parity": lambda y, d: (d == 1, y == 1),
    "acc": lambda y, d: (y >= 0, d == y),
}


def draw_rows(seed: int, n: int, *, drop: float = 0.0):
    """Rows with three attributes; women of race b have a lower rate of positive decisions."""
    generator = np.random.default_rng(seed)
    groups = {
        "sex": generator.choice(["f", "m"], n),
        "age": generator.choice(["old", "young"], n),
        "race": generator.choice(list("abc"), n, p=[0.6, 0.3, 0.1]),
    }
    y = generator.integers(0, 2, n)
    few = (groups["sex"] == "f") & (groups["race"] == "b")
    d = (generator.random(n) < 0.5 - drop * few).astype(int)
    return y, d, groups


def measured(y, d, groups, *, sites: int = 3, **options):
    parts = {name: [column[i::sites] for i in range(sites)] for name, column in groups.items()}
    return audit(
        [
            measure(
                y[i::sites],
                d[i::sites],
                sensitive_features={name: part[i] for name, part in parts.items()},
                site=str(i),
                **options,
            )
            for i in range(sites)
        ]
    )


def look(y, d, inside, other, min_rows: int):
    """For every metric: the rates inside and in the other group, and Fisher's p-value."""
    for metric, event in EVENTS.items():
        kept, hit = event(y, d)
        table = [
            [(kept & hit & part).sum(), (kept & ~hit & part).sum()] for part in (inside, other)
        ]
        sizes = [sum(row) for row in table]
        if min(sizes) >= min_rows:
            tails = (fisher_exact(table, side).pvalue for side in ("less", "greater"))
            rates = [row[0] / size for row, size in zip(table, sizes, strict=True)]
            yield metric, rates, min(1.0, 2 * min(tails))


def subgroups(groups):
    """Every subgroup by up to three attributes: (names of attributes, name, rows)."""
    for size in (1, 2, 3):
        for names in combinations(groups, size):
            columns = [groups[name] for name in names]
            cells = dict.fromkeys(zip(*(column.tolist() for column in columns), strict=True))
            for cell in cells:
                inside = np.all([c == v for c, v in zip(columns, cell, strict=True)], axis=0)
                yield " & ".join(names), " & ".join(cell), inside


def brute_force(y, d, groups, min_rows: int):
    """Both families of looks in loops, with Holm's adjusted p-values at half of the level."""
    every = list(subgroups(groups))
    rest, pairs = {}, {}
    for by, name, inside in every:
        if sum(other == by for other, *_ in every) == 2:
            sizes = [part.sum() for other, _, part in every if other == by]
            first = [n for other, n, _ in every if other == by][int(np.argmin(sizes))]
            if name != first:
                continue
        for metric, rates, p in look(y, d, inside, ~inside, min_rows):
            rest[metric, by, frozenset([name])] = (p, abs(rates[0] - rates[1]))
    for (by, one, a), (other_by, two, b) in combinations(every, 2):
        if by == other_by and sum(each == by for each, *_ in every) > 2:
            for metric, rates, p in look(y, d, a, b, min_rows):
                pairs[metric, by, frozenset([one, two])] = (p, abs(rates[0] - rates[1]))
    return [adjust(family) for family in (rest, pairs)]


def adjust(family):
    adjusted, largest = {}, 0.0
    for rank, (key, (p, gap)) in enumerate(sorted(family.items(), key=lambda item: item[1][0])):
        largest = max(largest, p * (len(family) - rank))
        adjusted[key] = (min(1.0, 2 * min(largest, 1.0)), gap)
    return adjusted


@pytest.mark.slow
def test_the_scan_is_that_of_loops_over_the_rows():
    y, d, groups = draw_rows(0, 1500, drop=0.25)
    scan = measured(y, d, groups).scan(shown=1000)
    for key, expected in zip(("against_rest", "pairs"), brute_force(y, d, groups, 30), strict=True):
        found = {
            (each["metric"], each["by"], frozenset([each["group"], each["other"]]) - {None}): each
            for each in scan[key]
        }
        assert scan["looks"][key] == len(expected) == len(found)
        for name, (p, gap) in expected.items():
            assert found[name]["p"] == pytest.approx(p, rel=1e-6, abs=1e-12)
            assert abs(found[name]["difference"]) == pytest.approx(gap, abs=1e-12)
            assert found[name]["low"] <= found[name]["difference"] <= found[name]["high"]
            assert found[name]["beyond_chance"] == (p <= LEVEL)
        assert scan["beyond_chance"][key] == sum(p <= LEVEL for p, _ in expected.values())
        certain = [max(each["low"], -each["high"], 0.0) for each in scan[key]]
        assert certain == sorted(certain, reverse=True)
    first = scan["against_rest"][0]
    assert first["group"] == "f & b" and first["by"] == "sex & race" and first["beyond_chance"]
    assert first["difference"] < 0 and scan["pairs"][0]["difference"] > 0


@pytest.mark.slow
def test_a_fair_model_raises_an_alarm_in_at_most_one_scan_of_twenty():
    alarms = []
    for seed in range(30):
        scan = measured(*draw_rows(seed, 500), sites=1).scan()
        alarms.append(any(scan["beyond_chance"].values()))
    assert np.mean(alarms) <= 0.05


def test_small_subgroups_are_counted_and_not_compared():
    y, d, groups = draw_rows(1, 600)
    made = measured(y, d, groups)
    scan = made.scan(min_rows=60)
    sizes = [inside.sum() for *_, inside in subgroups(groups)]
    assert scan["subgroups"] == len(sizes) and scan["too_small"] == sum(n < 60 for n in sizes)
    assert all(min(each["n"], each["other_n"]) >= 60 for each in scan["pairs"])
    assert "with fewer than 30 rows" in made.to_markdown()
    nobody = made.scan(min_rows=10_000)
    assert nobody["looks"] == {"against_rest": 0, "pairs": 0} and nobody["pairs"] == []


def test_everybody_else_is_everybody_else():
    y, d, groups = draw_rows(2, 500)
    view = measured(y, d, groups).views[-2]
    rest = everybody_else(view)
    for g, _ in enumerate(view.groups):
        both = view.sums.count[:, :, g] + rest.sums.count[:, :, g]
        assert (both == view.sums.count[:, :, :-1].sum(2)).all()


def test_noise_and_withheld_counts_make_the_scan_careful():
    """The same rows: what the exact counts say is at least as sure as what protected ones say."""
    y, d, groups = draw_rows(3, 4000, drop=0.3)
    values = {name: tuple(sorted(set(column))) for name, column in groups.items()}
    exact, noisy, held = (
        measured(y, d, groups, sites=2, **options).scan(shown=1000)
        for options in ({}, {"epsilon": 0.3, "values": values}, {"min_cell": 10})
    )
    for scan in (noisy, held):
        first = scan["against_rest"][0]
        (same,) = [
            each
            for each in exact["against_rest"]
            if all(each[key] == first[key] for key in ("metric", "by", "group"))
        ]
        assert {"f", "b"} <= set(first["group"].split(" & ")) and first["beyond_chance"]
        assert first["high"] - first["low"] > same["high"] - same["low"]
        assert first["low"] <= same["difference"] <= first["high"]


def test_a_view_of_noise_alone_has_less_evidence():
    y, d, groups = draw_rows(4, 2000, drop=0.3)
    views = measured(y, d, groups, sites=1).views
    blurred = [replace(view, noise=view.noise + 200.0) for view in views]
    sure, unsure = (scan_subgroups(each)["against_rest"][0] for each in (views, blurred))
    assert sure["p"] < unsure["p"]


def test_one_attribute_has_no_scan():
    y, d, groups = draw_rows(5, 200)
    made = audit(measure(y, d, sensitive_features=groups["race"]))
    assert made.to_dict()["scan"] is None and made.scan_tables() == []
    with pytest.raises(FedgftError) as caught:
        made.scan()
    assert caught.value.kind == "data"
    with pytest.raises(FedgftError) as caught:
        measured(y, d, groups).scan(min_rows=0)
    assert caught.value.field == "min_rows"


def test_three_classes_name_the_condition():
    generator = np.random.default_rng(6)
    n = 900
    groups = {"sex": generator.choice(["f", "m"], n), "age": generator.choice(["o", "y"], n)}
    y, d = generator.choice(["u", "v", "w"], (2, n))
    made = audit(measure(y, d, sensitive_features=groups))
    looks = made.scan()["looks"]["against_rest"]
    assert looks == (1 + 1 + 4) * (3 + 3 + 3 + 3 + 1)
    table = made.scan_tables()[0]
    assert all("class" in row[0] or row[0].startswith("accuracy") for row in table.rows)


def write_tables(folder, *, names=("sex", "race")) -> list:
    files = []
    for site in range(2):
        y, d, groups = draw_rows(10 + site, 700, drop=0.35)
        columns = {new: groups[old] for new, old in zip(names, ("sex", "race"), strict=True)}
        frame = pl.DataFrame({"y": y, "p": (d + 0.5) / 2, **columns})
        frame.write_csv(folder / f"{site}.csv")
        files.append(folder / f"{site}.json")
    return files


def test_the_command_prints_the_subgroups_that_differ_most(tmp_path, capsys):
    files = write_tables(tmp_path)
    for file in files:
        columns = ("--label", "y", "--group", "sex", "race", "--score", "p")
        assert run(capsys, "measure", file.with_suffix(".csv"), *columns, "--out", file)[0] == 0
    code, plain, _ = run(capsys, "audit", *files)
    assert code == 0 and "differ most" not in plain
    code, text, _ = run(capsys, "audit", *files, "--scan", "2")
    assert code == 0 and text.count("Subgroups that differ most") == 2
    assert "f & b" in text.split("everybody else, points")[1]
    code, text, _ = run(capsys, "audit", *files, "--scan", "2", "--json")
    assert code == 0 and len(json.loads(text)["scan"]["pairs"]) == 2
    code, text, _ = run(capsys, "audit", *files, "--wide")
    assert code == 0 and text.count("Subgroups that differ most") == 2
    for wrong in (("--scan", "0"), ("--scan", "5000"), ("--scan", "3", "--compare", *files)):
        code, _, error = run(capsys, "audit", *(files if "--compare" not in wrong else ()), *wrong)
        assert code == 2 and len(error.strip().splitlines()) == 1


def test_a_scan_of_one_column_is_refused(tmp_path, capsys):
    file = write_tables(tmp_path)[0]
    columns = ("--label", "y", "--group", "sex", "--score", "p")
    assert run(capsys, "measure", file.with_suffix(".csv"), *columns, "--out", file)[0] == 0
    code, _, error = run(capsys, "audit", file, "--scan", "3", "--out", tmp_path / "report")
    assert code == 2 and "--scan" in error and not (tmp_path / "report").exists()


@pytest.mark.slow
def test_hostile_names_are_text_in_the_new_tables(tmp_path):
    y, d, groups = draw_rows(7, 900, drop=0.4)
    names = dict(zip("fmabc", (*HOSTILE[:4], HOSTILE[6]), strict=True))
    columns = {
        HOSTILE[4]: [names[value] for value in groups["sex"].tolist()],
        HOSTILE[2]: [names[value] for value in groups["race"].tolist()],
    }
    made = audit(measure(y, (d + 0.5) / 2, sensitive_features=columns, site=HOSTILE[1]))
    made.save(tmp_path / "out")
    page = check(tmp_path / "out/report.html", own={"link", "script"}, names=HOSTILE[:4])
    shown = " ".join(page.text)
    for title in ("differ most", "any threshold", "Wasserstein", "Who is at the top"):
        assert title in shown
    text = made.to_markdown()
    assert "<script>" not in text and "<img" not in text

"""`fedgft monitor`: folders of dated files, periods, alarms, the page, and bad input."""

import datetime
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

import fedgft
from dated_sites import SITES, draw_history, make_sums, month_ends, write_history
from fedgft.auditing import Monitor, monitor
from fedgft.auditing.dated_files import find_date, name_period
from fedgft.cli import main

COUNTS = {"f": (30, 20, 20, 30), "m": (25, 25, 15, 35)}
VERSIONS = ["1.0"] * 12 + ["2.0"] * 12


def run(capsys, *words) -> tuple[int, str, str]:
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.fixture(scope="module")
def history() -> list[fedgft.SiteSums]:
    return list(draw_history(np.random.default_rng(3), change=0.09, site="north"))


@pytest.fixture(scope="module")
def found(history) -> Monitor:
    return monitor(history, since="2015-01-01", fail_above={"sp": 0.035})


# Results


def test_each_period_has_the_gap_of_an_audit_of_its_files(history, found):
    for t in (0, 11, 23):
        audit = fedgft.audit(history[3 * t : 3 * t + 3])
        gap = found.periods[t].gaps["eop"]
        assert gap.gap == pytest.approx(audit.gaps["eop"].value)
        assert (gap.low, gap.high) == pytest.approx((audit.gaps["eop"].low, audit.gaps["eop"].high))
        assert gap.pair == audit.gaps["eop"].pair
        assert gap.rates["f"] == pytest.approx(audit.rates["eop"]["f"].value)
        assert found.periods[t].rows == audit.summary["rows"]["counted"]
        assert list(found.periods[t].sites) == sorted(SITES)


def test_what_was_known_does_not_change_when_months_are_added(history, found):
    for months in (1, 12, 14, 20):
        early = monitor(history[: 3 * months], since="2015-01-01", fail_above={"sp": 0.035})
        assert [p.gaps for p in early.periods] == [p.gaps for p in found.periods[:months]]


def test_the_order_of_the_files_does_not_matter(history, found):
    again = monitor(reversed(history), since="2015-01-01", fail_above={"sp": 0.035})
    assert again.to_dict() == found.to_dict()


def test_the_change_is_an_alarm_in_the_period_in_which_it_was_found(history, found):
    (change,) = (c for c in found.changes if c.metric == "sp")
    kinds = {(alarm.kind, alarm.period) for alarm in found.alarms}
    assert ("change", change.found_in) in kinds
    assert ("limit", found.periods[-1].label) in kinds
    at = [period.label for period in found.periods].index(change.found_in) + 1
    assert {a.kind for a in monitor(history[: 3 * at]).alarms} == {"change"}
    assert monitor(history[: 3 * at - 3]).alarms == []
    assert monitor(history[: 3 * at + 3]).alarms == []  # an old alarm does not repeat


def test_a_gap_that_becomes_smaller_is_no_alarm():
    parts = list(draw_history(np.random.default_rng(2), change=-0.06, gap=0.08))
    found = monitor(parts, since="2015-01-01")
    assert {change.direction for change in found.changes} == {"smaller"}
    assert found.alarms == []
    assert any(verdict.passes for verdict in found.verdict())


def test_a_new_version_begins_a_regime_and_is_compared():
    parts = list(draw_history(np.random.default_rng(0), change=0.04, versions=VERSIONS))
    found = monitor(parts, since="2015-01-01", metrics=["sp"])
    (change,) = found.changes
    assert (change.kind, change.period) == ("model version", found.periods[12].label)
    assert change.direction == "larger" and change.low < 0.04 < change.high
    assert change.earliest == change.latest == change.period
    assert [alarm.kind for alarm in found.alarms] == ["model version"]
    assert [p.label for p in found.periods if p.new_version] == [change.period]
    assert found.periods[12].gaps["sp"].since == change.period


def test_a_version_without_a_change_is_not_clear_and_no_alarm():
    parts = list(draw_history(np.random.default_rng(4), rows=1000, versions=VERSIONS))
    found = monitor(parts, since="2015-01-01", metrics=["sp"])
    (change,) = found.changes
    assert (change.direction, change.found_in) == ("not clear", None)
    assert found.alarms == []


def test_limits_are_compared_with_the_band(history):
    assert [a.kind for a in monitor(history, fail_above={"sp": 0.04}).alarms] == ["limit"]
    assert monitor(history, fail_above={"sp": 0.05}).alarms == []  # inside the band
    verdicts = monitor(history, fail_above={"sp": 0.2}).verdict()
    assert verdicts[0].passes is True
    assert monitor(history, metrics=["eop"], fail_above={"sp": 0.04}).metrics == ("eop", "sp")


def test_sites_that_appear_and_leave_are_named(history):
    parts = [p for p in history if ("south" not in p.sites) or p.require_spec().date > "2015-06-30"]
    found = monitor([p for p in parts if "east" not in p.sites or p.require_spec().date < "2016"])
    assert found.periods[6].appeared == ("south",)
    assert found.periods[12].left == ("east",)
    text = " ".join(found.warnings)
    assert "2015-07-31: south appeared." in text and "east is missing" in text


def test_a_group_without_rows_is_not_estimable_and_not_fair():
    parts = [
        make_sums({"f": (30, 20, 20, 30), **({"m": (9, 9, 9, 9)} if t else {})}, site="a", date=d)
        for t, d in enumerate(month_ends(3))
    ]
    found = monitor(parts, metrics=["sp"], fail_above={"sp": 0.01})
    assert found.periods[0].gaps["sp"].gap is None
    assert found.periods[0].gaps["sp"].band_low is None
    assert found.periods[2].gaps["sp"].band_low is not None
    alone = monitor(parts[:1], metrics=["sp"], fail_above={"sp": 0.01})
    assert [alarm.kind for alarm in alone.alarms] == ["not estimable"]


def test_a_group_with_few_rows_leaves_the_band_without_an_upper_limit():
    few = COUNTS | {"x": (1, 1, 1, 1)}
    parts = [make_sums(few, site="a", date=d) for d in month_ends(2)]
    gap = monitor(parts, metrics=["sp"]).periods[-1].gaps["sp"]
    assert gap.band_low is not None and gap.band_high is None


def test_periods_of_months_add_up_the_files_of_a_site():
    days = ["2020-01-10", "2020-01-20", "2020-02-05"]
    parts = [make_sums(COUNTS, site="a", date=day) for day in days]
    assert [p.label for p in monitor(parts).periods] == days
    by_month = monitor(parts, period="month").periods
    assert [(p.label, p.rows) for p in by_month] == [("2020-01", 400), ("2020-02", 200)]
    assert by_month[0].date == datetime.date(2020, 1, 20)


def test_frames(found):
    gaps = found.to_frame()
    assert gaps.height == 48 and gaps.schema["date"] == pl.Date
    last = gaps.filter(metric="sp").row(-1, named=True)
    assert last["band_low"] == found.periods[-1].gaps["sp"].band_low
    assert found.to_frame("rates").height == 24 * 2 * 2
    assert found.to_frame("changes")["metric"].to_list() == [c.metric for c in found.changes]
    assert found.to_frame("sites", library="pandas")["rows"].sum() == 24 * 3 * 4000
    assert isinstance(found.to_frame(library="pandas"), pd.DataFrame)
    assert monitor([make_sums(COUNTS, site="a", date="2020-01-01")]).to_frame("changes").height == 0
    with pytest.raises(fedgft.FedgftError):
        found.to_frame("other")


def test_several_columns_are_compared_together_or_alone():
    generator = np.random.default_rng(0)
    parts = []
    for date in month_ends(3):
        y, d = generator.integers(0, 2, (2, 400))
        features = {"sex": list("fm") * 200, "race": list("aabb") * 100}
        sums = fedgft.measure(y, d, sensitive_features=features, site="north", date=date)
        parts.append(sums)
    assert monitor(parts).groups == "sex & race"
    assert set(monitor(parts, by="race").periods[0].gaps["sp"].rates) == {"a", "b"}
    with pytest.raises(fedgft.FedgftError, match="race & sex"):
        monitor(parts, by="race & sex")


# Pages


def test_the_page_holds_the_history_and_no_foreign_code(found):
    page = found.to_html()
    assert page.startswith("<!doctype html>\n<!-- fedgft monitor -->")
    assert "About this history" in page and "this audit" not in page
    assert 'id="gap-over-time"' in page and 'id="rates-over-time"' in page
    text = found.to_markdown()
    assert "What moved statistical parity" in text
    assert "In at most 5%" not in text and "at most 5%" in text


def test_names_from_data_are_escaped():
    evil = '<script>alert("1")</script>'
    parts = [
        make_sums({evil: (30, 20, 20, 30), "m\n": (5, 45, 5, 45)}, site=evil, date=date)
        for date in month_ends(2)
    ]
    found = monitor(parts)
    assert "<script>alert" not in found.to_html()
    assert "<script>alert" not in found.to_markdown()
    assert "\\u003cscript" in found.to_html()


def test_json_is_strict_and_complete(found):
    record = json.loads(found.to_json())
    assert record["format"] == "fedgft-monitor-1"
    assert len(record["periods"]) == 24
    change = record["changes"][0]
    total = sum(site["total"] for site in change["sites"].values())
    assert total == pytest.approx(change["change"])


def test_the_files_are_written_and_replaced_together(found, history, tmp_path):
    paths = found.save(tmp_path / "page")
    names = ["monitor.html", "monitor.md", "monitor.json", "metrics.prom"]
    assert [path.name for path in paths] == names
    monitor(history[:6]).save(tmp_path / "page")
    assert len(json.loads((tmp_path / "page/monitor.json").read_text())["periods"]) == 2
    (tmp_path / "page/metrics.prom").write_text("other 1\n")
    before = (tmp_path / "page/monitor.json").read_text()
    with pytest.raises(fedgft.FedgftError, match=r"metrics\.prom"):
        found.save(tmp_path / "page")
    assert (tmp_path / "page/monitor.json").read_text() == before


def test_a_notebook_shows_lead_and_verdicts(found):
    assert found.lead() in repr(found)
    assert "fedgft-report" in found._repr_html_()


# Folders and dates


@pytest.mark.parametrize(
    ("path", "date"),
    [
        ("2026-01/north.json", "2026-01-31"),
        ("north-2024-02.json", "2024-02-29"),
        ("north_20260115.json", "2026-01-15"),
        ("a/2025/2026-01-15/north.json", "2026-01-15"),
        ("2025-12-31/north-2026-01-15.json", "2026-01-15"),
        ("site-2026/north.json", None),
        ("north-1234-56.json", None),
        ("id-120260115.json", None),
    ],
)
def test_dates_in_names(path, date):
    assert find_date(Path(path)) == (date and datetime.date.fromisoformat(date))


@pytest.mark.parametrize("kind", ["date", "week", "month", "quarter", "year"])
def test_periods_sort_like_their_dates(kind):
    days = [datetime.date(2019, 12, 28) + datetime.timedelta(days=5 * k) for k in range(300)]
    labels = [name_period(day, kind) for day in days]
    assert labels == sorted(labels)


def test_a_folder_is_read_with_the_folders_inside_it(history, tmp_path):
    folder = write_history(tmp_path / "sums", iter(history))
    monitor(history).save(folder)  # its own report is no file of a site
    (folder / ".cache").mkdir()
    (folder / ".cache/other.json").write_text("{}")
    assert monitor(folder).to_dict() == monitor(history).to_dict()


def test_the_date_of_the_name_counts_only_without_one_in_the_file(tmp_path):
    for name, date in (("2020-01/a.json", ""), ("2020-02/a.json", "2020-02-15")):
        (tmp_path / name).parent.mkdir()
        make_sums(COUNTS, site="a", date=date).save(tmp_path / name)
    found = monitor(tmp_path)
    assert [p.label for p in found.periods] == ["2020-01-31", "2020-02-15"]
    assert any("without a date" in text for text in found.warnings)
    assert any("another date in the name" in text for text in found.warnings)


# Bad input


def save_all(folder: Path, *parts: fedgft.SiteSums) -> None:
    for i, part in enumerate(parts):
        part.save(folder / f"{i}.json")


def other_spec(**changes):
    part = make_sums(COUNTS, site="b", date="2020-01-31")
    return replace(part, spec=replace(part.require_spec(), **changes))


A = make_sums(COUNTS, site="a", date="2020-01-31", version="1")
BAD_FOLDERS = {
    "no date": ([make_sums(COUNTS, site="a", date="")], ["0.json", "its date"]),
    "same site and date": ([A, A], ["0.json", "1.json", "site 'a' and 2020-01-31"]),
    "versions in one period": (
        [A, make_sums(COUNTS, site="b", date="2020-01-31", version="2")],
        ["0.json", "1.json", "'1'", "'2'", "2020-01-31"],
    ),
    "a version comes back": (
        [
            make_sums(COUNTS, site="a", date=date, version=version)
            for date, version in (("2020-01-31", "1"), ("2020-02-29", "2"), ("2020-03-31", "1"))
        ],
        ["2020-03-31", "'1' comes back", "2020-02-29"],
    ),
    "the future": ([make_sums(COUNTS, site="a", date="2999-01-31")], ["0.json", "future"]),
    "other columns": ([A, other_spec(attributes=("race",))], ["0.json", "1.json", "group columns"]),
    "other classes": ([A, other_spec(classes=("no", "yes"))], ["0.json", "1.json", "classes"]),
    "other thresholds": ([A, other_spec(threshold=0.3)], ["0.json", "1.json", "thresholds"]),
    "other spelling": (
        [A, make_sums({"F": (9, 9, 9, 9)}, site="b", date="2020-01-31")],
        ["'F'", "--ignore-case"],
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_files_that_cannot_be_followed_are_named_in_one_line(case, tmp_path, capsys):
    parts, words = BAD_FOLDERS[case]
    save_all(tmp_path, *parts)
    code, out, error = run(capsys, "monitor", tmp_path)
    assert (code, out) == (2, "")
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_a_new_version_may_have_another_threshold(tmp_path):
    parts = [
        replace(p, spec=replace(p.require_spec(), threshold=threshold))
        for p, threshold in (
            (make_sums(COUNTS, site="a", date="2020-01-31", version="1"), 0.5),
            (make_sums(COUNTS, site="a", date="2020-02-29", version="2"), 0.6),
        )
    ]
    assert "version 2: threshold 0.6 instead of 0.5" in monitor(parts).warnings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["table.csv"], "is a table"),
        (["empty"], "no files of sums"),
        (["a.json"], "name the folder"),
        (["damaged"], "ends too early or is damaged"),
        ([], "the folder with the dated files"),
        (["good", "--metrics", "spp"], "spp"),
        (["good", "--metrics", ","], "--metrics"),
        (["good", "--by", "race"], "--by"),
        (["good", "--period", "day"], "--period"),
        (["good", "--since", "soon"], "--since must be a day"),
        (["good", "--fail-above", "sp"], "--fail-above"),
        (["good", "--fail-above", "sp=2"], "--fail-above"),
        (["good", "--out", "a.json"], "a.json"),
    ],
)
def test_wrong_words_give_one_line(words, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged", "good"):
        Path(name).mkdir()
    Path("table.csv").write_text("y,sex\n1,f\n")
    A.save("a.json")
    A.save("good/a.json")
    Path("damaged/b.json").write_text(A.to_json()[:200])
    code, out, error = run(capsys, "monitor", *words)
    assert (code, out) == (2, "")
    assert expected in error and error.count("\n") == 1, error


def test_wrong_arguments_in_python():
    for wrong in ({}, [], 3, None, "nowhere"):
        with pytest.raises(fedgft.FedgftError):
            monitor(wrong)
    with pytest.raises(fedgft.FedgftError) as error:
        monitor([fedgft.SiteSums()])
    assert error.value.field == "source"
    with pytest.raises(fedgft.FedgftError) as error:
        monitor([A], since="soon")
    assert error.value.field == "since"
    with pytest.raises(fedgft.FedgftError) as error:
        monitor([A], fail_above={"spp": 0.1})
    assert error.value.field == "fail_above"


# The command


def test_the_command_prints_writes_and_ends_with_code_3_on_alarm(history, tmp_path, capsys):
    folder = write_history(tmp_path / "sums", iter(history))
    out = tmp_path / "page"
    code, text, error = run(capsys, "monitor", folder, "--out", out)
    assert code == 0, error
    assert text.startswith("No alarm in 2016-12-31.")
    assert (out / "monitor.html").is_file()
    code, text, error = run(capsys, "monitor", folder, "--out", out, "--fail-above", "sp=0.03")
    assert code == 3
    assert "alarm in 2016-12-31" in error
    code, text, error = run(capsys, "monitor", folder, "--since", "2016-01-01", "--json")
    assert code == 3
    assert {alarm["kind"] for alarm in json.loads(text)["alarms"]} == {"change"}
    for late in ("2016-03-31", "2016-04-30"):  # as cron would have seen it
        assert (folder / late).is_dir()
    for month in sorted(folder.iterdir())[14:]:
        shutil.rmtree(month)
    assert run(capsys, "monitor", folder, "-q")[0] == 3


def test_one_period_says_that_changes_need_two(tmp_path, capsys):
    A.save(tmp_path / "a.json")
    code, _, error = run(capsys, "monitor", tmp_path)
    assert code == 0
    assert "one period" in error


# Weights, strata, randomized groups and withheld counts


def measure_rows(seed: int, date: str, **more) -> fedgft.SiteSums:
    generator = np.random.default_rng(seed)
    sex = generator.choice(["f", "m"], 4000)
    y = generator.integers(0, 2, 4000)
    d = (generator.random(4000) < 0.4 + 0.1 * (sex == "m")).astype(int)
    return fedgft.measure(y, d, sensitive_features={"sex": sex}, site="a", date=date, **more)


def test_rows_of_equal_weight_are_rows_without_weights():
    plain = monitor([measure_rows(t, day) for t, day in enumerate(month_ends(3))])
    weights = np.full(4000, 2.5)
    parts = [measure_rows(t, day, sample_weight=weights) for t, day in enumerate(month_ends(3))]
    weighted = monitor(parts)
    for one, other in zip(plain.periods, weighted.periods, strict=True):
        assert one.rows == other.rows == 4000
        a, b = one.gaps["sp"], other.gaps["sp"]
        assert (a.gap, a.average) == pytest.approx((b.gap, b.average))
        assert (a.band_low, a.band_high) == pytest.approx((b.band_low, b.band_high))


def test_unequal_weights_widen_the_band():
    weights = np.random.default_rng(0).exponential(1.0, 4000)
    plain = monitor([measure_rows(0, "2020-01-31")]).periods[0].gaps["sp"]
    found = monitor([measure_rows(0, "2020-01-31", sample_weight=weights)]).periods[0].gaps["sp"]
    ratio = (found.band_high - found.band_low) / (plain.band_high - plain.band_low)
    assert 1.25 < ratio < 1.6  # the effective number is half of the rows


def test_withheld_counts_and_noise_widen_the_band():
    plain = monitor([measure_rows(0, "2020-01-31")]).periods[0].gaps["sp"]
    for more in ({"min_cell": 450}, {"epsilon": 0.02, "values": {"sex": ("f", "m")}}):
        found = monitor([measure_rows(0, "2020-01-31", **more)]).periods[0].gaps["sp"]
        assert found.band_high - found.band_low > 1.05 * (plain.band_high - plain.band_low), more


def test_a_period_without_rows_of_the_column_is_named():
    nobody = make_sums({"f": (0, 0, 0, 0)}, site="a", date="2020-01-31")
    with pytest.raises(fedgft.FedgftError, match="2020-01-31: "):
        monitor([nobody])


def test_randomized_groups_are_corrected_and_widen_the_band():
    plain = monitor([measure_rows(0, "2020-01-31")]).periods[0].gaps["sp"]
    generator = np.random.default_rng(1)
    sex = np.random.default_rng(0).choice(["f", "m"], 4000)
    told = np.where(generator.random(4000) < np.e / (np.e + 1), sex, np.where(sex == "f", "m", "f"))
    decisions = np.random.default_rng(2).random(4000) < 0.4 + 0.1 * (sex == "m")
    sums = fedgft.measure(
        generator.integers(0, 2, 4000),
        decisions.astype(int),
        sensitive_features={"sex": told},
        values={"sex": ("f", "m")},
        randomized_groups=1.0,
        site="a",
        date="2020-01-31",
    )
    gap = monitor([sums]).periods[0].gaps["sp"]
    assert gap.band_high - gap.band_low > 1.5 * (plain.band_high - plain.band_low)
    series_gap = fedgft.audit(sums).gaps["sp"]
    usual = (series_gap.high - series_gap.low) / 2 / 1.96
    assert (gap.band_high - gap.average) > 3 * usual  # the covariance of the groups is counted

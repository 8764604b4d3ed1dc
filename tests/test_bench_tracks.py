"""The tracks of the benchmark: frozen rows, sites that divide their own rows, no group column."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fedgft.bench import TRACKS, get_track
from fedgft.bench.track_tables import build_table, count_track, describe_rows, write_rows
from fedgft.bench.tracks import ACS_STATES, ACS_YEAR, INNER, TEST, TRAIN, Datasheet, Track
from fedgft.data.dataset import Dataset
from fedgft.data.generated import synthetic
from fedgft.errors import FedgftError
from fedgft.rules.blind import find_group_columns
from synthetic_images import write_celeba_folder

SHEET = Datasheet("generated", "none", "a row", "one", "two", "three", ())
PROTECTED = {
    "adult-sex": ("sex",),
    "adult-race": ("race",),
    "adult-race-sex": ("race", "sex"),
    "compas-race": ("race", "African-American"),
    "law-race": ("race",),
}


def make_track(**changes) -> Track:
    data = synthetic(rows=400, features=3, gap=0.3)
    return replace(Track("tiny", 1, "Tiny", lambda: data, SHEET, clients=3, seeds=2), **changes)


def natural_data() -> Dataset:
    data = synthetic(rows=60, features=2)
    owner = np.repeat([2, 0, 1], [1, 39, 20])
    return replace(data, clients=owner, client_names=("a", "b", "c"))


def obtain(name: str) -> Track:
    """A track; tests are skipped if its rows cannot be downloaded."""
    track = get_track(name)
    try:
        track.load()
    except FedgftError as error:
        pytest.skip(f"the rows of {name} are not available: {error}")
    return track


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKS)
def test_a_track_comes_out_as_its_version_says(name):
    """If this fails, give the track a new version together with its new checksum."""
    track = obtain(name)
    if not track.is_fetched and not track.sha256:
        pytest.skip(f"{name} has no checksum yet")
    assert track.checksum() == track.sha256
    track.check()
    if track.kind == "column":
        assert len(track.load().client_names) == track.clients


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTECTED)
def test_no_feature_tells_the_group(name):
    data = obtain(name).load()
    assert not find_group_columns(data)
    assert not [c for c in data.columns if c.partition("=")[0] in PROTECTED[name]]
    assert data.features.shape[1] == len(data.columns) == len(data.encoder.columns)
    assert (data.groups >= 0).all() and len(data.classes) == 2


@pytest.mark.slow
def test_groups_are_those_that_the_name_says():
    names = {name: obtain(name).load().group_names for name in PROTECTED if name != "law-race"}
    assert names["adult-sex"] == ("Female", "Male")
    assert names["adult-race"] == ("Non-white", "White")
    assert len(names["adult-race-sex"]) == 4
    assert names["compas-race"] == ("African-American", "Caucasian")
    sexes = get_track("adult-sex").load().groups
    both = get_track("adult-race-sex").load()
    np.testing.assert_array_equal(sexes, [g.endswith("& Male") for g in _groups(both)])


def _groups(data: Dataset) -> np.ndarray:
    return np.array(data.group_names)[data.groups]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_site_divides_its_own_rows(seed):
    track = make_track()
    split = track.split(seed)
    owner, parts = split.owner, split.parts
    for k in range(3):
        rows = int((owner == k).sum())
        tests = int(0.3 * rows)
        inner = int(0.25 * (rows - tests))
        found = np.bincount(parts[owner == k], minlength=3).tolist()
        assert found[TEST] == tests and found[INNER] == inner and sum(found) == rows
        np.testing.assert_array_equal(
            split.federation.client(k), np.flatnonzero((owner == k) & (parts == TRAIN))
        )
    np.testing.assert_array_equal(split.federation.test, np.flatnonzero(parts == TEST))
    np.testing.assert_array_equal(split.inner, np.flatnonzero(parts == INNER))


def test_each_group_is_dealt_anew_for_every_seed():
    first, again, other = (make_track().split(seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.owner, again.owner)
    np.testing.assert_array_equal(first.parts, again.parts)
    assert (first.owner != other.owner).any() and (first.parts != other.parts).any()


def test_features_are_scaled_by_training_rows_alone():
    split = make_track().split(0)
    rows = split.federation.dataset.features[split.parts == TRAIN].astype(float)
    np.testing.assert_allclose(split.federation.mean, rows.mean(0))
    np.testing.assert_allclose(split.federation.spread, rows.std(0))


def test_a_site_is_left_out_with_all_its_rows():
    split = make_track().split(0)
    made = split.without_site(1)
    assert made.num_clients == 2 and made.keys.tolist() == [0, 2]
    np.testing.assert_array_equal(made.test, np.flatnonzero(split.owner == 1))
    for position, k in enumerate((0, 2)):
        np.testing.assert_array_equal(made.client(position), split.federation.client(k))
    train = (split.parts == TRAIN) & (split.owner != 1)
    np.testing.assert_allclose(made.mean, made.dataset.features[train].astype(float).mean(0))
    with pytest.raises(FedgftError, match="must be a site from 0 to 2, not 3"):
        split.without_site(3)


def test_natural_sites_keep_their_rows_even_a_single_one():
    data = natural_data()
    track = make_track(read=lambda: data, kind="column")
    split = track.split(1)
    np.testing.assert_array_equal(split.owner, data.clients)
    assert split.num_sites == 3 and split.federation.sizes.tolist() == [21, 11, 1]
    assert split.parts[data.clients == 2].tolist() == [TRAIN]


@pytest.mark.parametrize(
    "change",
    [
        {"features": lambda data: data.features[:, ::-1]},
        {"labels": lambda data: 1 - data.labels},
        {"groups": lambda data: 1 - data.groups},
        {"columns": lambda data: data.columns[::-1]},
        {"clients": lambda data: data.clients[::-1]},
        {"group_names": lambda data: data.group_names[::-1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_the_rows_changes_the_checksum(change):
    """With natural sites, so that the splits stay the same."""
    data = natural_data()
    changed = replace(data, **{name: make(data) for name, make in change.items()})
    track, same, other = (
        make_track(read=lambda rows=rows: rows, kind="column")
        for rows in (data, natural_data(), changed)
    )
    assert track.checksum() == same.checksum() != other.checksum()


@pytest.mark.parametrize("change", [{"alpha": 0.6}, {"test_share": 0.2}, {"inner_share": 0.3}])
def test_a_change_of_the_splits_changes_the_checksum(change):
    assert make_track().checksum() != make_track(**change).checksum()


def test_rows_that_are_not_here_are_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDGFT_DATA", raising=False)
    with pytest.raises(FedgftError, match="folder that the variable FEDGFT_DATA names") as error:
        get_track("celeba-smiling").load()
    assert "\n" not in str(error.value) and error.value.kind == "file"
    monkeypatch.setenv("FEDGFT_DATA", str(tmp_path))
    with pytest.raises(FedgftError, match="a folder celeba"):
        get_track("celeba-smiling").load()


def test_incomes_are_read_from_the_cache_alone(monkeypatch, tmp_path):
    files = pytest.importorskip("fedgft.data.acs_files", reason="needs the data set acs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "fedgft" / "acs" / str(ACS_YEAR)
    folder.mkdir(parents=True)
    track = get_track("acs-income")
    read = track.read.__wrapped__  # not kept for other tests
    rng = np.random.default_rng(0)
    for state in ACS_STATES:
        with pytest.raises(FedgftError, match=f"{state}.* by `fedgft data get acs --year 2018"):
            read()
        columns = {name: rng.integers(1, 3, 40) for name in files.list_columns(ACS_YEAR)}
        columns["PINCP"] = rng.choice([20_000, 90_000], 40)
        pl.DataFrame(columns).write_parquet(folder / f"{state}-income.parquet")
    track = replace(track, read=read)
    data = track.load()
    assert data.client_names == ACS_STATES and len(ACS_STATES) == track.clients
    assert data.group_names == ("Female", "Male") and not find_group_columns(data)
    assert (track.split(0).owner == np.repeat(np.arange(9), 40)).all()


def test_pictures_of_the_user_become_a_track(monkeypatch, tmp_path):
    pytest.importorskip("PIL", reason="needs: pip install 'fedgft[images]'")
    write_celeba_folder(tmp_path / "celeba", rows=60)
    monkeypatch.setenv("FEDGFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    track = replace(get_track("celeba-smiling"), clients=2, seeds=2)
    track = replace(track, read=track.read.__wrapped__)  # not kept for other tests
    split = track.split(0)
    data = track.load()
    assert data.images and data.test is None and data.group_names == ("not Male", "Male")
    assert len(split.owner) == len(data) and count_track(track)["features"] == 0
    assert build_table(track).columns == ["row", "label", "group"]


def test_a_track_that_comes_out_differently_is_refused():
    with pytest.raises(FedgftError, match="tiny: rows or splits are not those of version 1") as e:
        make_track(sha256="0" * 64).check()
    assert "\n" not in str(e.value)


def test_unknown_tracks_and_seeds():
    with pytest.raises(FedgftError, match="'adult-sx' is not known; did you mean 'adult-sex'"):
        get_track("adult-sx")
    with pytest.raises(FedgftError, match="tiny: there are seeds from 0 to 1, not 2") as e:
        make_track().split(2)
    assert e.value.field == "seed"


def test_the_tables_of_a_track_hold_every_row_and_its_part():
    track = make_track()
    data = track.load()
    table = build_table(track)
    assert table.columns == ["row", *data.columns, "label", "group"]
    np.testing.assert_array_equal(table[data.columns[1]], data.features[:, 1])
    np.testing.assert_array_equal(table["label"], data.labels)
    assert table["group"].to_list() == [data.group_names[g] for g in data.groups]
    rows = describe_rows(track)
    assert rows.columns == ["seed", "row", "site", "part"] and rows.height == 2 * len(data)
    for seed in range(2):
        split = track.split(seed)
        mine = rows.filter(seed=seed).sort("row")
        tests = mine.filter(part="test")["row"]
        np.testing.assert_array_equal(tests, split.federation.test)
        np.testing.assert_array_equal(mine["site"].cast(int), split.owner)


@pytest.mark.parametrize("csv", [False, True])
def test_rows_are_written_with_a_text_that_names_them(tmp_path, csv):
    files = write_rows(make_track(), tmp_path / "new", csv=csv)
    ending = "csv" if csv else "parquet"
    assert [f.name for f in files] == [
        f"tiny-table.{ending}",
        f"tiny-rows.{ending}",
        "tiny-README.md",
    ]
    text = files[2].read_text()
    assert files[0].name in text and files[1].name in text and "{" not in text
    assert len(text.splitlines()) <= 15


def test_a_datasheet_counts_the_rows():
    track = make_track()
    data = track.load()
    found = count_track(track)
    assert found["rows"] == 400 and found["sites"] == 3 and found["features"] == len(data.columns)
    for g, each in enumerate(found["groups"]):
        mine = data.labels[data.groups == g]
        assert each["rows"] == len(mine) and each["positive"] == pytest.approx(mine.mean())
    parts = [np.bincount(track.split(s).parts, minlength=3) for s in range(2)]
    least, most = np.min(parts, 0), np.max(parts, 0)
    for i, name in enumerate(("train", "inner", "test")):
        assert found[f"{name}_rows"] == [least[i], most[i]]
    sizes = np.concatenate([np.bincount(track.split(s).owner) for s in range(2)])
    assert found["site_rows"] == [sizes.min(), sizes.max()]


def test_the_floor_of_a_datasheet_is_that_of_chance():
    """Simulated: decisions at the rate of positive labels, the same for both groups."""
    rows = synthetic(rows=400, features=3, gap=0.3)
    labels = np.where(np.arange(400) % 3, 0, rows.labels)
    track = make_track(read=lambda: replace(rows, labels=labels), seeds=1)
    assert labels.mean() < 0.25
    data, test = track.load(), track.split(0).federation.test
    rng = np.random.default_rng(0)
    groups = data.groups[test]
    tossed = rng.random((4000, len(test))) < data.labels.mean()
    gaps = np.abs(tossed[:, groups == 0].mean(1) - tossed[:, groups == 1].mean(1))
    assert count_track(track)["floors"]["sp"] == pytest.approx(gaps.mean(), rel=0.05)

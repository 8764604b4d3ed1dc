"""Tracks: a table, its groups, its sites, and which rows are for training, choices and tests.

A track is frozen. Its rows, features, groups and splits follow from its name and version, and a
checksum over all of them is part of its definition: if anything changes, the version must.

Per seed, the rows are dealt to sites (or the data name the site of each row), and then every site
divides its own rows at random: 30% test rows, a quarter of the others inner rows, on which
settings are chosen, and the rest training rows. The columns that tell the group are no features,
so that methods that must not see the group and methods that may have the same features.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedgft.bench.datasheets import ACS, ADULT, CELEBA, COMPAS, LAW, Datasheet
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.encode import suggest_name
from fedgft.data.images import load_celeba
from fedgft.data.partition import PartitionKind, make_rng, partition
from fedgft.data.public import SOURCES, load
from fedgft.data.remote_files import get_cache_folder
from fedgft.errors import FedgftError
from fedgft.validation import format_value

PARTS = ("train", "inner", "test")
TRAIN, INNER, TEST = range(3)
BENCH_STREAM = 16  # number of the random stream that divides the rows of a site
VARIABLE = "FEDGFT_DATA"  # names the folder with the user's own copies
ACS_YEAR = 2018
ACS_STATES = ("CT", "MA", "ME", "NH", "NJ", "NY", "PA", "RI", "VT")  # the Northeast
COMPAS_PAIR = ("African-American", "Caucasian")


@dataclass(frozen=True, eq=False)
class TrackSplit:
    """The rows of a track for one seed.

    Parameters
    ----------
    seed
        The seed.
    federation
        The sites and their training rows, standardized by sums over these; `test` are the test rows
        of all sites together.
    inner
        Numbers of the inner rows, in ascending order.
    owner
        (n,) The number of the site of each row, whatever its part.
    """

    seed: int
    federation: Federation
    inner: np.ndarray
    owner: np.ndarray

    @property
    def parts(self) -> np.ndarray:
        """The part of each row, (n,): indices into `PARTS`."""
        found = np.full(len(self.owner), TRAIN, np.int8)
        found[self.inner] = INNER
        found[self.federation.test] = TEST
        return found

    @property
    def num_sites(self) -> int:
        """Number of sites."""
        return self.federation.num_clients

    def without_site(self, k: int) -> Federation:
        """Return the training rows of the other sites; the test rows are all rows of site k.

        The others keep their keys, so that they draw the batches that they draw with all sites.
        """
        if not 0 <= k < self.num_sites:
            raise FedgftError(f"`k` must be a site from 0 to {self.num_sites - 1}, not {k}")
        whole = self.federation
        others = np.arange(self.num_sites) != k
        rows = whole.rows[np.repeat(others, whole.sizes)]
        offsets = np.concatenate(([0], np.cumsum(whole.sizes[others])))
        test = np.flatnonzero(self.owner == k)
        made = Federation(whole.dataset, rows, offsets, test, keys=whole.keys[others])
        return standardize(made)


@dataclass(frozen=True)
class Track:
    """One frozen task of the benchmark.

    Parameters
    ----------
    name, version, title
        What identifies the track, and a name for tables. Any change of what the track yields is a
        new version.
    read
        Returns the rows, without the columns that tell the group.
    sheet
        The datasheet.
    sha256
        What `checksum` returns for this version; empty: not recorded yet.
    kind, clients, alpha
        How rows are dealt to sites, see `fedgft.partition`; "column": the data name the sites.
    seeds
        Number of replicates: the seeds are 0, 1, ..., `seeds` - 1.
    test_share
        Share of test rows of each site.
    inner_share
        Share of inner rows among the other rows of each site.
    metrics
        The metrics that are scored.
    is_fetched
        Whether the rows are downloaded when they are needed; otherwise the user provides them.
    """

    name: str
    version: int
    title: str
    read: Callable[[], Dataset]
    sheet: Datasheet
    sha256: str = ""
    kind: PartitionKind = "dirichlet-group"
    clients: int = 5
    alpha: float = 0.5
    seeds: int = 20
    test_share: float = 0.3
    inner_share: float = 0.25
    metrics: tuple[str, ...] = ("sp", "eop", "eo")
    is_fetched: bool = True

    def load(self) -> Dataset:
        """Return the rows. They are read once per process."""
        return self.read()

    def split(self, seed: int) -> TrackSplit:
        """Return which site holds which row, and the part of each row.

        Parameters
        ----------
        seed
            One of the seeds of the track.
        """
        if not 0 <= seed < self.seeds:
            text = f"{self.name}: there are seeds from 0 to {self.seeds - 1}, not {seed}"
            raise FedgftError(text, field="seed")
        data = self.load()
        owner, parts = self._deal(data, seed)
        rows = np.flatnonzero(parts == TRAIN)
        rows = rows[np.argsort(owner[rows], kind="stable")]
        count = len(data.client_names) if self.kind == "column" else self.clients
        sizes = np.bincount(owner[rows], minlength=count)
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        made = standardize(Federation(data, rows, offsets, np.flatnonzero(parts == TEST)))
        return TrackSplit(seed, made, np.flatnonzero(parts == INNER), owner)

    def _deal(self, data: Dataset, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the site and the part of each row, (n,) each."""
        whole = partition(
            data, self.kind, clients=self.clients, alpha=self.alpha, seed=seed, test_share=0
        )
        owner = np.empty(len(data), np.int64)
        owner[whole.rows] = np.repeat(np.arange(whole.num_clients), whole.sizes)
        order = np.lexsort((make_rng(seed, BENCH_STREAM).random(len(data)), owner))
        sizes = whole.sizes
        rank = np.empty(len(data), np.int64)
        rank[order] = np.arange(len(data)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tests = np.floor(self.test_share * sizes).astype(np.int64)
        inner = np.floor(self.inner_share * (sizes - tests)).astype(np.int64)
        parts = np.where(rank < (tests + inner)[owner], INNER, TRAIN)
        parts[rank < tests[owner]] = TEST
        return owner, parts

    def checksum(self) -> str:
        """Return the SHA-256 of features, labels, groups, and the sites and parts of all seeds."""
        data = self.load()
        found = hashlib.sha256()
        names = (*data.columns, *data.classes, *data.group_names, *data.client_names)
        found.update("\n".join(names).encode())
        found.update(np.ascontiguousarray(data.features, "<f4").tobytes())
        for codes in (data.labels, data.groups):
            found.update(codes.astype("<i8").tobytes())
        for seed in range(self.seeds):
            for codes in self._deal(data, seed):
                found.update(codes.astype("<i8").tobytes())
        return found.hexdigest()

    def check(self) -> None:
        """Raise a `FedgftError` unless the track comes out here as it is defined."""
        if self.sha256 and self.checksum() != self.sha256:
            text = f"{self.name}: rows or splits are not those of version {self.version} here "
            text += f"(NumPy {np.__version__}); scores would not be comparable"
            raise FedgftError(f"{text}; install the versions of constraints.txt", kind="data")


def get_track(name: str) -> Track:
    """Return a track by its name."""
    if name not in TRACKS:
        text = f"{format_value(name)} is not known{suggest_name(str(name), list(TRACKS))}"
        raise FedgftError(text, field="track")
    return TRACKS[name]


def _drop_fields(data: Dataset, *names: str) -> Dataset:
    """Return the rows without columns of the table, which may be several features each."""
    assert data.encoder is not None
    gone = {c for field in data.encoder.fields if field.name in names for c in field.columns}
    kept = [i for i, column in enumerate(data.columns) if column not in gone]
    fields = tuple(field for field in data.encoder.fields if field.name not in names)
    return replace(
        data,
        features=np.ascontiguousarray(data.features[:, kept]),
        columns=tuple(data.columns[i] for i in kept),
        encoder=replace(data.encoder, fields=fields),
    )


@lru_cache
def _read_adult(group: str) -> Dataset:
    """Return Adult with these groups, which are no features."""
    name = None if group == "race" else group  # by itself, the data set has names for its races
    return _drop_fields(load("adult", group=name), *group.split(","))


@lru_cache
def _read_compas() -> Dataset:
    """Return COMPAS for its two largest races."""
    data = _drop_fields(load("compas-races"), "race")
    assert data.group_names[:2] == COMPAS_PAIR
    kept = np.flatnonzero(data.groups < 2)
    return replace(
        data,
        features=data.features[kept],
        labels=data.labels[kept],
        groups=data.groups[kept],
        group_names=COMPAS_PAIR,
    )


@lru_cache
def _read_public(name: str) -> Dataset:
    """Return a public data set whose clients are named by a column."""
    if name not in SOURCES:
        raise FedgftError(f"this version of fedgft lacks the data set '{name}'", kind="data")
    data = load(name)
    source = SOURCES[name]
    return _drop_fields(data, source.group) if source.keep_group else data


@lru_cache
def _read_acs() -> Dataset:
    """Return ACSIncome for nine states, from the cache alone: the files are too large to fetch."""
    folder = get_cache_folder() / "acs" / str(ACS_YEAR)
    missing = [s for s in ACS_STATES if not (folder / f"{s}-income.parquet").is_file()]
    if missing:
        text = f"the data set acs of {ACS_YEAR} is not in the cache for {', '.join(missing)}"
        command = f"fedgft data get acs --year {ACS_YEAR} --states {' '.join(missing)}"
        raise FedgftError(f"{text}: fetch them by `{command}`", kind="file")
    return load("acs", year=ACS_YEAR, states=ACS_STATES)


@lru_cache
def _read_celeba() -> Dataset:
    """Return CelebA from the user's folder, without its division into parts."""
    home = os.environ.get(VARIABLE)
    folder = Path(home or "") / "celeba"
    if not home or not folder.is_dir():
        text = "pictures of CelebA are not downloaded: put them into a folder celeba inside the "
        raise FedgftError(f"{text}folder that the variable {VARIABLE} names", kind="file")
    return replace(load_celeba(folder), test=None)


TRACKS = {
    track.name: track
    for track in (
        Track(
            name="adult-sex",
            version=1,
            title="Adult by sex",
            read=lambda: _read_adult("sex"),
            sheet=replace(ADULT, groups="sex as recorded; the column is no feature"),
            sha256="d2ff101cad8f281d9bf97141f573a368a6d5686fda8d9ebda6682c4be8c285a8",
        ),
        Track(
            name="adult-race",
            version=1,
            title="Adult by race",
            read=lambda: _read_adult("race"),
            sheet=replace(ADULT, groups="race, White or not; the column is no feature"),
            sha256="a1af9b5451ad1fefa7c8c3da323430f5fc70b8f3fa9993bdd8e8ec6b44a45981",
        ),
        Track(
            name="adult-race-sex",
            version=1,
            title="Adult by race and sex",
            read=lambda: _read_adult("race,sex"),
            sheet=replace(ADULT, groups="race and sex combined; neither is a feature"),
            sha256="e52426cebb6ab7355071450ea8d534363c8fbdd0449a2969a49984bbeeff6f73",
        ),
        Track(
            name="compas-race",
            version=1,
            title="COMPAS by race",
            read=_read_compas,
            sheet=COMPAS,
            sha256="7e1848ec7de3dc6f84e0345e7aa468e3afe308038f63293bd36e6b33e7a402a5",
            clients=2,
        ),
        Track(
            name="law-race",
            version=1,
            title="Law School by race",
            read=lambda: _read_public("law"),
            sheet=LAW,
            sha256="e674b61bd9e1490fc722a22beb0b165275d5227c44a794563100a25d46340bcf",
            kind="column",
            clients=10,
        ),
        Track(
            name="acs-income",
            version=1,
            title="Incomes by sex",
            read=_read_acs,
            sheet=ACS,
            kind="column",
            clients=len(ACS_STATES),
            is_fetched=False,
        ),
        Track(
            name="celeba-smiling",
            version=1,
            title="Smiles by sex",
            read=_read_celeba,
            sheet=CELEBA,
            is_fetched=False,
        ),
    )
}
"The tracks by name."

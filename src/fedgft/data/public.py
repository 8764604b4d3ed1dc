"""The data sets by name; the public ones are prepared as in section 5 of the paper.

A source consists of a frame of raw columns and the names of its label and group columns. The frame
is read like a user's table, so an exported frame gives the same features when it is read back.
`fedgft.data.remote_files` gets the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.data import acs_income
from fedgft.data.dataset import Dataset
from fedgft.data.encode import suggest_name
from fedgft.data.generated import PROBABILITY, make_loans, synthetic
from fedgft.data.remote_files import (
    ADULT_DATA,
    ADULT_TEST,
    COMPAS,
    LAW,
    Progress,
    RemoteFile,
    ignore_progress,
    obtain,
)
from fedgft.data.table import Roles, build_dataset, from_frame, load_tables, read_frame, to_polars
from fedgft.errors import FedgftError, LazyModule
from fedgft.validation import check_column_names, format_value

if TYPE_CHECKING:
    import polars as pl
    from narwhals.typing import IntoDataFrame
else:
    IntoDataFrame = Any
    pl = LazyModule("polars")

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


def prepare_law(paths: Sequence[Path]) -> pl.DataFrame:
    """Return the law students with readable values, without what repeats other columns.

    The column `sander_index` is left out, because it is 0.6 LSAT / 48 + 0.4 UGPA / 4.2. One row is
    left out, too: the only one of its region, PO. Race is White or Non-white.
    """
    table = pl.read_csv(paths[0], glob=False).filter(pl.col("region_first") != "PO")
    race = pl.when(pl.col("race") == "White").then("race").otherwise(pl.lit("Non-white"))
    return table.select(
        pl.col("region_first").alias("region"),
        race.alias("race"),
        pl.col("sex").replace_strict({1: "Female", 2: "Male"}, return_dtype=pl.String),
        "LSAT",
        "UGPA",
        "ZFYA",
        pl.col("first_pf")
        .replace_strict({0.0: "no", 1.0: "yes"}, return_dtype=pl.String)
        .alias("pass_bar_first"),
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
LAW_SCHOOL = Source(
    name="law",
    description="bar examination passed at the first attempt (law students of 1991, United "
    "States), 10 regions; group: race, White or not",
    rows=21_790,
    license="LSAC survey data, no license stated (ethik: BSD-3-Clause)",
    files=(LAW,),
    prepare=prepare_law,
    label="pass_bar_first",
    group="race",
    group_names=("Non-white", "White"),
    client="region",
    keep_group=False,
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
        LAW_SCHOOL,
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
    name: str,
    *,
    folder: str | Path | None = None,
    year: int | None = None,
    states: str | Sequence[str] = (),
    on_progress: Progress = ignore_progress,
) -> pl.DataFrame:
    """Return the raw columns, label and group included, as `fedgft data get --out` writes them.

    See `load` for the arguments.
    """
    if name == acs_income.NAME:
        return acs_income.prepare_acs_income(year, states, on_progress=on_progress)[0]
    source = find_source(name)
    paths, _ = obtain(source.files, folder=folder, on_progress=on_progress)
    return source.prepare(paths)


def find_source(name: str) -> Source:
    """Return a public data set by its name."""
    if name not in SOURCES:
        hint = suggest_name(name, [*SOURCES, acs_income.NAME])
        raise FedgftError(f"no data set '{name}'{hint}", kind="data")
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
    weight: str | None = None,
    given: str | Sequence[str] = (),
    folder: str | Path | None = None,
    year: int | None = None,
    states: str | Sequence[str] = (),
    on_progress: Progress = ignore_progress,
) -> Dataset:
    """Load a public data set, CSV or Parquet files, or a table in memory.

    Parameters
    ----------
    data
        The name of a public data set ("adult", "compas", "law", "adult-hours", "compas-races",
        "acs"), or of a generated one ("loans", "synthetic"); the path of a .csv or .parquet file,
        or a list of several, one per client; or a pandas, polars or pyarrow table.
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
    weight
        The column that says how much each row counts, in training and in every measurement: numbers
        of at least 0, such as survey weights. It is not a feature. None (default): all rows count
        the same.
    given
        The column, or several, within whose values a metric such as "sp|department" compares
        groups. None by default.
    folder
        The folder with your own copies of a public data set's files; None (default): the
        environment variable FEDGFT_DATA, or a download.
    year
        The year of "acs", 2014 to 2023 except 2020; None (default): 2018.
    states
        The states of "acs", which are its clients: abbreviations such as ["CA", "NY"], or "all";
        it has no default.
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
    roles |= {"weight": weight, "given": tuple(check_column_names("given", given))}
    if isinstance(data, list | tuple) and data and all(isinstance(d, str | Path) for d in data):
        if len(data) > 1:
            return _load_several(data, roles)
        (data,) = data
    if not isinstance(data, str | Path):
        return from_frame(_check_table(data), "table", roles=_make_roles("data", roles))
    name = str(data)
    if not name.strip():
        raise FedgftError("`data` must name a data set or a .csv or .parquet file")
    open_roles = ("group", "client", "keep_group")
    if name == acs_income.NAME:
        _refuse_roles(name, {key: v for key, v in roles.items() if key not in open_roles})
        if folder is not None:
            text = "`folder`: the data set 'acs' has none; FEDGFT_ACS names the place of its files"
            raise FedgftError(text, kind="conflict")
        chosen = {"group": group, "client": client, "keep_group": keep_group}
        return acs_income.load_acs_income(year, states, **chosen, on_progress=on_progress)
    for field, value in {"year": year, "states": states}.items():
        if value not in (None, (), "", []):
            raise FedgftError(f"`{field}`: only the data set 'acs' has it", kind="conflict")
    if name == "synthetic":
        _refuse_roles(name, roles)
        return synthetic()
    if name in SOURCES:
        open_roles = (*open_roles, "given")
        _refuse_roles(name, {key: v for key, v in roles.items() if key not in open_roles})
        source = replace(SOURCES[name], keep_group=keep_group or SOURCES[name].keep_group)
        chosen = {"group": group, "client": client, "given": roles["given"]}
        return _load_public(source, chosen, folder=folder, on_progress=on_progress)
    if not Path(name).suffix and not Path(name).exists():
        problem = f"`data` '{name}' is neither a data set nor a .csv or .parquet file"
        raise FedgftError(problem + suggest_name(name, [*SOURCES, acs_income.NAME, "synthetic"]))
    known = _make_roles(name, roles)
    return from_frame(read_frame(name), Path(name).stem, roles=known, source=name)


def _load_several(paths: Sequence[str | Path], roles: dict[str, Any]) -> Dataset:
    """Read one file per client."""
    for path in paths:
        if str(path) in (*SOURCES, acs_income.NAME, "synthetic"):
            text = f"'{path}' is a data set: name it alone, or only .csv and .parquet files"
            raise FedgftError(text, field="data")
    _make_roles(", ".join(map(str, paths)), roles)
    return load_tables(paths, **roles)


def _load_public(
    source: Source, chosen: dict[str, Any], *, folder: str | Path | None, on_progress: Progress
) -> Dataset:
    paths, served = obtain(source.files, folder=folder, on_progress=on_progress)
    roles = Roles(
        source.label,
        chosen["group"] or source.group,
        chosen["client"] or source.client,
        leave_out=source.leave_out,
        keep_group=source.keep_group,
        given=chosen["given"],
    )
    data = build_dataset(source.prepare(paths), source.name, roles=roles, prepared=True)
    names = source.group_names if roles.group == source.group else data.group_names
    return replace(data, group_names=names, notes=(*served, *data.notes))


def _refuse_roles(name: str, roles: Mapping[str, Any]) -> None:
    """Refuse roles of columns for a data set whose roles are known."""
    if roles.get("weight") is not None:
        text = (
            f"`weight`: the data set '{name}' has no column of weights; name a table that has one"
        )
        raise FedgftError(text, kind="conflict")
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

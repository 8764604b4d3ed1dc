"""The public data sets by name, prepared as section 5 of the paper prepares them.

A source is a frame of raw columns and two names, the label and the group; from there on it is
read like any user's table. So an exported frame, read back, gives the same features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedgft.arguments import path_of
from fedgft.data.columns import suggestion
from fedgft.data.dataset import Dataset
from fedgft.data.fetching import (
    ADULT_DATA,
    ADULT_TEST,
    COMPAS,
    Progress,
    RemoteFile,
    obtain,
    silent,
)
from fedgft.data.roles import Roles
from fedgft.data.table import dataset_of, load_table
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

ADULT_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
ADULT_NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
COMPAS_RACES = ("African-American", "Asian", "Hispanic", "Native American", "Other")


@dataclass(frozen=True)
class Source:
    """What `fedgft data list` shows of a data set, and how its frame is made."""

    name: str
    description: str
    rows: int
    licence: str
    files: tuple[RemoteFile, ...]
    prepare: Callable[[Sequence[Path]], "pl.DataFrame"]
    label: str
    group: str
    group_names: tuple[str, ...]


def adult_frame(paths: Sequence[Path]) -> "pl.DataFrame":
    """Both files; fnlwgt and education dropped, race as White or not, '?' kept as a level."""
    import polars as pl

    parts = [
        pl.read_csv(
            path,
            glob=False,
            has_header=False,
            new_columns=list(ADULT_COLUMNS),
            infer_schema=False,
            comment_prefix="|",
        )
        for path in paths
    ]
    text = pl.concat(parts).select(pl.all().str.strip_chars()).drop_nulls()
    return text.drop("fnlwgt", "education").with_columns(
        pl.col(ADULT_NUMBERS).cast(pl.Int64),
        pl.when(pl.col("race") == "White")
        .then(pl.lit("White"))
        .otherwise(pl.lit("Non-white"))
        .alias("race"),
        pl.col("income").str.strip_chars_end("."),
    )


def compas_frame(paths: Sequence[Path]) -> "pl.DataFrame":
    """ProPublica's filter, then the ten raw features; 'female' is also the group."""
    import polars as pl

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


def adult_hours_frame(paths: Sequence[Path]) -> "pl.DataFrame":
    """Adult with another question, of three answers: hours worked a week; income is a feature."""
    import polars as pl

    hours = pl.col("hours-per-week")
    answer = pl.when(hours < 40).then(pl.lit("1 below 40")).when(hours == 40)
    return adult_frame(paths).select(
        pl.exclude("hours-per-week"),
        answer.then(pl.lit("2 exactly 40")).otherwise(pl.lit("3 above 40")).alias("hours"),
    )


def compas_races_frame(paths: Sequence[Path]) -> "pl.DataFrame":
    """COMPAS, people of its three largest groups, race in one column."""
    import polars as pl

    table = compas_frame(paths)
    apart = pl.when(pl.col("African-American") == 1).then(pl.lit("African-American"))
    apart = apart.when(pl.col("Hispanic") == 1).then(pl.lit("Hispanic"))
    others = pl.any_horizontal(pl.col("Asian", "Native American", "Other") == 1)
    race = apart.when(others).then(None).otherwise(pl.lit("Caucasian")).alias("race")
    return table.with_columns(race).drop_nulls("race").drop(COMPAS_RACES)


ADULT = Source(
    name="adult",
    description="income above 50,000 dollars (1994 census); group: race, White or not",
    rows=48_842,
    licence="CC BY 4.0 (UCI)",
    files=(ADULT_DATA, ADULT_TEST),
    prepare=adult_frame,
    label="income",
    group="race",
    group_names=("Non-white", "White"),
)
COMPAS_SEX = Source(
    name="compas",
    description="a new offence within two years (Broward County); group: sex",
    rows=6_172,
    licence="public records (ProPublica), no licence stated",
    files=(COMPAS,),
    prepare=compas_frame,
    label="two_year_recid",
    group="female",
    group_names=("Male", "Female"),
)
SOURCES = {
    source.name: source
    for source in (
        ADULT,
        COMPAS_SEX,
        replace(
            ADULT, name="adult-hours", prepare=adult_hours_frame, label="hours", group="sex",
            description="Adult, hours worked a week: below 40, 40, above; group: sex",
            group_names=("Female", "Male"),
        ),
        replace(
            COMPAS_SEX, name="compas-races", prepare=compas_races_frame, rows=5_787, group="race",
            description="COMPAS; group: African-American, Caucasian or Hispanic (others left out)",
            group_names=("African-American", "Caucasian", "Hispanic"),
        ),
    )
}  # fmt: skip
"The public data sets by name."


def prepared_frame(
    name: str, *, folder: str | Path | None = None, on_progress: Progress = silent
) -> "pl.DataFrame":
    """The raw columns with label and group: what `fedgft data get NAME --out FILE` writes."""
    source = find_source(name)
    paths, _ = obtain(source.files, folder=folder, on_progress=on_progress)
    return source.prepare(paths)


def find_source(name: str) -> Source:
    if name not in SOURCES:
        raise FedgftError(f"no data set '{name}'{suggestion(name, list(SOURCES))}")
    return SOURCES[name]


def load_source(
    name: str,
    *,
    group: str | Sequence[str] | None = None,
    client: str | None = None,
    folder: str | Path | None = None,
    on_progress: Progress = silent,
) -> Dataset:
    """A public data set. Another group, or a client, may be any of its columns."""
    source = find_source(name)
    paths, served = obtain(source.files, folder=folder, on_progress=on_progress)
    group = group or source.group
    roles = Roles(source.label, group, client)
    data = dataset_of(source.prepare(paths), name, roles=roles)
    names = source.group_names if group == source.group else data.group_names
    return replace(data, group_names=names, notes=(*served, *data.notes))


def load_adult(
    *,
    group: str | Sequence[str] = "race",
    client: str | None = None,
    folder: str | Path | None = None,
    on_progress: Progress = silent,
) -> Dataset:
    """Adult: 48,842 rows, 81 features; group 1 is White."""
    return load_source("adult", group=group, client=client, folder=folder, on_progress=on_progress)


def load_compas(
    *,
    group: str | Sequence[str] = "female",
    client: str | None = None,
    folder: str | Path | None = None,
    on_progress: Progress = silent,
) -> Dataset:
    """COMPAS: 6,172 rows, 10 features; group 1 is Female."""
    return load_source("compas", group=group, client=client, folder=folder, on_progress=on_progress)


def load(
    name_or_path: str | Path,
    *,
    label: str | None = None,
    group: str | Sequence[str] | None = None,
    client: str | None = None,
    split: str | None = None,
    positive: str | None = None,
    leave_out: Sequence[str] = (),
    folder: str | Path | None = None,
    on_progress: Progress = silent,
) -> Dataset:
    """A public data set by name, or a user's own table by path."""
    name = str(path_of("name_or_path", name_or_path))
    if not name.strip():
        raise FedgftError("--data must name a data set or a .csv or .parquet file")
    if name in SOURCES:
        given = {"--label": label, "--split": split, "--positive": positive,
                 "--leave-out": leave_out or None}  # fmt: skip
        for option, value in given.items():
            if value is not None:
                raise FedgftError(f"{option}: the data set '{name}' has its own")
        return load_source(name, group=group, client=client, folder=folder, on_progress=on_progress)
    if not Path(name).suffix and not Path(name).exists():
        raise FedgftError(
            f"'{name}' is neither a data set nor a .csv or .parquet file"
            f"{suggestion(name, list(SOURCES))}"
        )
    if label is None or group is None:
        option = "--label" if label is None else "--group"
        raise FedgftError(f"{name}: {option} must name a column of the table")
    return load_table(name, label=label, group=group, client=client, split=split,
                      positive=positive, leave_out=leave_out)  # fmt: skip

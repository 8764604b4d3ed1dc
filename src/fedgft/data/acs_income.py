"""ACSIncome by state: does a person earn more than 50,000 dollars a year?

The task of Ding et al. (Retiring Adult, NeurIPS 2021) on the files of `fedgft.data.acs_files`. The
label is PINCP > 50,000, without an adjustment for inflation. The client is the state, the usual
group is SEX, and RAC1P is the other one.

Codes become names, so that reports can be read and a table reads back from CSV as it was. Three
columns are amounts: AGEP, WKHP, and SCHL, whose codes 1 (none) to 24 (doctorate) are in order. Two
columns have hundreds of codes, which would become as many features:

- OCCP becomes one of 26 major groups. The Census Bureau's codes are in order of these groups, so
  the first code of each group is enough, and the bounds hold for the codes of 2010 and of 2018.
- POBP becomes "US state" (codes up to 56, with the District of Columbia), "US territory" (up to 99)
  or "abroad".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedgft.data.acs_files import RELSHIPP_SINCE, obtain_states
from fedgft.data.dataset import Dataset
from fedgft.data.remote_files import Progress, ignore_progress
from fedgft.data.table import Roles, build_dataset
from fedgft.errors import LazyModule

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

NAME = "acs"
LABEL = "income"
GROUP = "SEX"
CLIENT = "state"
USUAL_YEAR = 2018
THRESHOLD = 50_000
SEX = {1: "Male", 2: "Female"}
RACE = {
    1: "White",
    2: "Black",
    3: "American Indian",
    4: "Alaska Native",
    5: "American Indian or Alaska Native, other",
    6: "Asian",
    7: "Pacific Islander",
    8: "Other",
    9: "Two or more",
}
CLASS_OF_WORKER = {
    1: "company",
    2: "non-profit",
    3: "local government",
    4: "state government",
    5: "federal government",
    6: "self-employed",
    7: "self-employed, incorporated",
    8: "family business without pay",
    9: "unemployed",
}
MARITAL_STATUS = {1: "married", 2: "widowed", 3: "divorced", 4: "separated", 5: "never married"}
RELATIONSHIP = {  # RELP, until 2018
    0: "reference person",
    1: "spouse",
    2: "child",
    3: "adopted child",
    4: "stepchild",
    5: "sibling",
    6: "parent",
    7: "grandchild",
    8: "parent-in-law",
    9: "child-in-law",
    10: "other relative",
    11: "roomer",
    12: "housemate",
    13: "unmarried partner",
    14: "foster child",
    15: "other nonrelative",
    16: "in an institution",
    17: "in other group quarters",
}
RELATIONSHIP_SINCE_2019 = {  # RELSHIPP
    20: "reference person",
    21: "spouse of the other sex",
    22: "unmarried partner of the other sex",
    23: "spouse of the same sex",
    24: "unmarried partner of the same sex",
    25: "child",
    26: "adopted child",
    27: "stepchild",
    28: "sibling",
    29: "parent",
    30: "grandchild",
    31: "parent-in-law",
    32: "child-in-law",
    33: "other relative",
    34: "housemate",
    35: "foster child",
    36: "other nonrelative",
    37: "in an institution",
    38: "in other group quarters",
}
OCCUPATIONS = {  # the first code of each major group
    10: "management",
    500: "business",
    800: "finance",
    1000: "computing",
    1300: "engineering",
    1600: "science",
    2000: "social service",
    2100: "law",
    2200: "education",
    2600: "arts and media",
    3000: "health practice",
    3600: "health support",
    3700: "protection",
    4000: "food",
    4200: "cleaning",
    4300: "personal service",
    4700: "sales",
    5000: "office",
    6000: "farming",
    6200: "construction",
    6800: "extraction",
    7000: "repair",
    7700: "production",
    9000: "transport",
    9800: "military",
    9920: "unemployed",
}
BIRTHPLACES = {1: "US state", 57: "US territory", 100: "abroad"}  # the first code of each


def prepare_acs_income(
    year: int | None, states: Sequence[str] | str, *, on_progress: Progress = ignore_progress
) -> tuple[pl.DataFrame, list[str]]:
    """Return the table of some states, and notes that say where it came from.

    Parameters
    ----------
    year
        The year of the survey; None: 2018, as in most papers.
    states
        Abbreviations or names of states, or "all".
    on_progress
        Called during downloads.

    Returns
    -------
    table, notes
        The column `state`, the ten features, SEX and RAC1P among them, and the label `income`.
    """
    asked = USUAL_YEAR if year is None else year
    tables, notes = obtain_states(asked, states, on_progress=on_progress)
    parts = [table.select(pl.lit(state).alias(CLIENT), pl.all()) for state, table in tables.items()]
    return _name_codes(pl.concat(parts), asked), notes


def load_acs_income(
    year: int | None,
    states: Sequence[str] | str,
    *,
    group: str | Sequence[str] | None = None,
    client: str | None = None,
    keep_group: bool = False,
    on_progress: Progress = ignore_progress,
) -> Dataset:
    """Return the data set of some states; see `load` for the arguments."""
    frame, notes = prepare_acs_income(year, states, on_progress=on_progress)
    roles = Roles(LABEL, group or GROUP, client or CLIENT, keep_group=keep_group)
    data = build_dataset(frame, NAME, roles=roles, prepared=True)
    return replace(data, notes=(*notes, *data.notes))


def _name_codes(table: pl.DataFrame, year: int) -> pl.DataFrame:
    is_new = year >= RELSHIPP_SINCE
    relationship = RELATIONSHIP_SINCE_2019 if is_new else RELATIONSHIP
    named = {
        "COW": CLASS_OF_WORKER,
        "MAR": MARITAL_STATUS,
        "RELSHIPP" if is_new else "RELP": relationship,
        "SEX": SEX,
        "RAC1P": RACE,
    }
    is_high = pl.col("PINCP") > THRESHOLD
    return table.with_columns(
        *(_replace_codes(column, names) for column, names in named.items()),
        _name_ranges("OCCP", OCCUPATIONS),
        _name_ranges("POBP", BIRTHPLACES),
        pl.when(is_high).then(pl.lit(">50K")).otherwise(pl.lit("<=50K")).alias(LABEL),
    ).drop("PINCP")


def _replace_codes(column: str, names: Mapping[int, str]) -> pl.Expr:
    """Replace codes by names; a code that is not known is named by its number."""
    code = pl.col(column)
    other = pl.format("code {}", code)
    return code.replace_strict(names, default=other, return_dtype=pl.String).alias(column)


def _name_ranges(column: str, names: Mapping[int, str]) -> pl.Expr:
    """Replace codes by the name of the last range that begins at or below them."""
    code = pl.col(column)
    name = pl.when(code.is_null()).then(pl.lit(None, pl.String))
    for first in sorted(names, reverse=True):
        name = name.when(code >= first).then(pl.lit(names[first]))
    return name.otherwise(pl.format("code {}", code)).alias(column)

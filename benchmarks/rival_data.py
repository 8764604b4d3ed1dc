"""Tables and federations as the papers of the rivals have them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import polars as pl

import fedgft
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.partition import inner_split
from fedgft.data.public import ADULT, ADULT_COLUMNS, COMPAS_SEX
from fedgft.data.remote_files import obtain

FIRST_FILE = 32_561  # rows of adult.data; those of adult.test follow
CODED = (  # columns that the public code of the benchmark of FedMinMax replaces by numbers
    *("workclass", "education", "marital-status", "occupation", "relationship"),
    *("race", "sex", "native-country"),
)
SCALED = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
COMPAS_STEPS = {  # percentiles that cut a column into levels, in the public code of LoGoFair
    "age": (20, 40, 60, 80, 90),
    "decile_score": (20, 40, 60, 80, 90),
    "priors_count": (0, 50, 70, 80, 90),
}


@lru_cache
def load_logofair_compas(*, keep_group: bool = False, with_scores: bool = True) -> Dataset:
    """Return COMPAS as the public code of LoGoFair prepares it, Black against all others.

    Its features contain the score of COMPAS itself, as a level and as a decile.
    """
    paths, _ = obtain(COMPAS_SEX.files)
    table = pl.read_csv(paths[0], glob=False, infer_schema=False)
    kept = table.filter(
        pl.col("days_b_screening_arrest").cast(pl.Int64).is_between(-30, 30),
        pl.col("is_recid") != "-1",
        pl.col("c_charge_degree") != "O",
        pl.col("score_text") != "N/A",
    )
    cut = {name: cut_at(kept[name], steps) for name, steps in COMPAS_STEPS.items()}
    black = pl.when(pl.col("race") == "African-American").then(pl.lit("Black"))
    made = kept.select(
        pl.col("days_b_screening_arrest").cast(pl.Int64),
        "c_charge_degree",
        "score_text",
        "sex",
        *(pl.Series(name, levels) for name, levels in cut.items()),
        black.otherwise(pl.lit("Another")).alias("race"),
        "two_year_recid",
    )
    made = made if with_scores else made.drop("score_text", "decile_score")
    return fedgft.load(made, label="two_year_recid", group="race", keep_group=keep_group)


def cut_at(column: pl.Series, steps: tuple[int, ...]) -> list[str]:
    """Return the level of each row between these percentiles, ends included."""
    values = column.cast(pl.Int64).to_numpy()
    return [f"level {i}" for i in np.searchsorted(np.percentile(values, steps), values)]


def deal_by_workclass(data: Dataset, seed: int) -> Federation:
    """Return FedFB's two clients of Adult: 80% of Private and 20% of the others, and the rest.

    Training rows are adult.data, test rows adult.test.
    """
    private = data.features[:, data.columns.index("workclass=Private")]
    is_private = private[:FIRST_FILE] > private.mean()
    draw = np.random.default_rng(seed).random(FIRST_FILE)
    first = np.zeros(FIRST_FILE, bool)
    for is_member, share in ((is_private, 0.8), (~is_private, 0.2)):
        members = np.flatnonzero(is_member)
        first[members[np.argsort(draw[members])][: round(share * len(members))]] = True
    rows = np.concatenate((np.flatnonzero(first), np.flatnonzero(~first)))
    test = np.arange(FIRST_FILE, len(data))
    bounds = np.array([0, first.sum(), FIRST_FILE])
    return fedgft.standardize(Federation(data, rows, bounds, test))


def deal_by_doctorate(data: Dataset) -> tuple[Federation, np.ndarray]:
    """Return AFL's two clients of Adult, people with a doctorate and all others.

    Training rows are adult.data, test rows adult.test. Also returns the client of every row, (n,).
    """
    level = data.features[:, data.columns.index("education-num")]
    owner = np.where(level == level.max(), 0, 1)  # 16, the highest one
    columns = [i for i, name in enumerate(data.columns) if "=" in name]
    categorical = replace(
        data,
        features=data.features[:, columns],
        columns=tuple(data.columns[i] for i in columns),
        center=None,
        scale=None,
        encoder=None,
    )
    rows = np.argsort(owner[:FIRST_FILE], kind="stable")
    bounds = np.array([0, (owner[:FIRST_FILE] == 0).sum(), FIRST_FILE])
    test = np.arange(FIRST_FILE, len(data))
    return fedgft.standardize(Federation(categorical, rows, bounds, test)), owner


@lru_cache
def load_coded_adult() -> Dataset:
    """Return adult.data with numbers for categories, grouped by sex and label.

    The numbers are not scaled; the other columns are, by all rows.
    """
    paths, _ = obtain(ADULT.files)
    text = pl.read_csv(
        paths[0],
        glob=False,
        has_header=False,
        infer_schema=False,
        new_columns=ADULT_COLUMNS,
        comment_prefix="|",
    ).select(pl.all().str.strip_chars())
    text = text.drop_nulls()
    columns = [text[name].rank("dense").to_numpy() - 1.0 for name in CODED]
    for name in SCALED:
        values = text[name].cast(pl.Float64).to_numpy()
        columns.append((values - values.mean()) / values.std())
    male = (text["sex"] == "Male").to_numpy().astype(int)
    rich = text["income"].str.starts_with(">50K").to_numpy().astype(int)
    return Dataset(
        name="adult, coded",
        features=np.stack(columns, 1).astype(np.float32),
        labels=rich,
        groups=2 * male + rich,
        columns=(*CODED, *SCALED),
        classes=("<=50K", ">50K"),
        group_names=("Female <=50K", "Female >50K", "Male <=50K", "Male >50K"),
    )


def by_sex(data: Dataset) -> Dataset:
    """Return the table of `load_coded_adult` with the groups of sex alone."""
    return replace(data, groups=data.groups // 2, group_names=("Female", "Male"))


def deal_evenly(data: Dataset, seed: int) -> Federation:
    """Return ten equal clients of which each keeps 70% of its rows and tests on 15%."""
    whole = fedgft.partition(data, "iid", clients=10, seed=seed, test_share=0)
    inner = inner_split(whole, share=0.3, seed=seed)
    return replace(inner, test=inner.test[::2])  # the others serve validation there


PUBLISHED_SPLITS: Mapping[str, tuple[str, float]] = {
    "Dirichlet 0.5": ("dirichlet-group", 0.5),
    "Dirichlet 1": ("dirichlet-group", 1.0),
    "hetero": ("hetero", 0.5),
}
"FedFACT's ways to deal rows: a kind of `fedgft.partition`, and its alpha."

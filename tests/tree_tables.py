"""Small tables with numbers, categories and missing values, and federations of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from fedgft.algorithms import Algorithm
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.encode import Encoder
from fedgft.engine import History, Settings, simulate
from fedgft.models import Trees

LEVELS = np.array(["a", "b", "c", "d", "e", "new"])  # "new" occurs in the last rows only
TEST = 0.3  # the share of the rows, at the end of the table


def draw_table(rows: int = 600, *, seed: int = 0, classes: int = 2, groups: int = 2) -> Dataset:
    """A table whose label depends on two columns of numbers, one of categories, and the group."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, groups, rows)
    x = rng.standard_normal(rows).round(1)
    z = rng.standard_normal(rows).round(2) + 0.5 * group
    known = rng.random(rows) > 0.15
    last = np.arange(rows) >= (1 - TEST) * rows
    level = np.where(last & (rng.random(rows) < 0.2), 5, rng.integers(0, 5, rows))
    score = x + np.where(known, z, 0.4) + 0.6 * (level % 3) - 0.8 + rng.logistic(0, 0.7, rows)
    labels = np.digitize(score, np.quantile(score, np.arange(1, classes) / classes))
    frame = pl.DataFrame(
        {"x": x, "level": LEVELS[level], "z": pl.Series(np.where(known, z, np.nan)).fill_nan(None)}
    )
    encoder = Encoder.fit(frame, frame.columns, rows=~last, indicators=True)
    features, _ = encoder.encode(frame)
    names = (tuple(map(str, range(classes))), tuple(map(str, range(groups))))
    return Dataset("small", features, labels, group, encoder.columns, *names, encoder=encoder)


def numbers_only(
    x: np.ndarray, labels: np.ndarray, groups: np.ndarray, *, classes: int = 2, group_count: int = 2
) -> Dataset:
    """A data set of these columns."""
    names = tuple(f"x{i}" for i in range(x.shape[1]))
    kinds = (tuple(map(str, range(classes))), tuple(map(str, range(group_count))))
    return Dataset("numbers", x, labels, groups, names, *kinds)


def pooled(data: Dataset, training: int | None = None) -> Federation:
    """One client with the first rows; the others are test rows."""
    training = round((1 - TEST) * len(data)) if training is None else training
    rows = np.arange(len(data))
    return Federation(data, rows[:training], np.array([0, training]), rows[training:])


def dealt(whole: Federation, clients: int, *, alpha: float, seed: int = 0) -> Federation:
    """The same training rows in the hands of clients with different shares of the labels."""
    rng = np.random.default_rng(seed)
    labels = whole.dataset.labels[whole.rows]
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        here = labels == label
        shares = rng.dirichlet(np.full(clients, alpha)) + 1e-12
        owner[here] = rng.choice(clients, here.sum(), p=shares / shares.sum())
    order = np.lexsort((rng.random(len(labels)), owner))
    offsets = np.searchsorted(owner[order], np.arange(clients + 1))
    return replace(whole, rows=whole.rows[order], offsets=offsets, keys=np.empty(0, np.uint64))


def grow(
    federations: Federation | list[Federation],
    algorithm: Algorithm | str = "fedavg",
    *,
    rounds: int = 6,
    threads: int = 1,
    every: int = 0,
    settings: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> History:
    """Grow shallow trees, one run per federation."""
    chosen = Settings(rounds=rounds, threads=threads, eval_every=every, **(settings or {}))
    trees = Trees(**{"max_depth": 3, "folds": 0, **(model or {})})
    options = {"lr": 0.3, **options}
    if "seeds" not in options and isinstance(federations, list):
        options["seeds"] = [0] * len(federations)
    return simulate(federations, trees, algorithm, chosen, **options)

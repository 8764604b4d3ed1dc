"""Other boosters, plain and fair, on the pooled rows of a federation; `trees.py` compares them.

A fitted model is a function from rows to P(second class), (n,), or to P(class), (n, classes).
"""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin stall one another here

import numpy as np

import fedgft
from fedgft.auditing.thresholds import candidate_thresholds, search_group_thresholds
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine.trees.rows import read_fields
from fedgft.metrics import Metric
from fedgft.study.cache import ResultCache
from fedgft.study.tradeoff import CONSTRAINTS
from fedgft.sums import Sums

HISTOGRAM_BINS = 400
MAX_WINDOWS = 4_000
LEAST = 0.002  # Fairlearn's bound and the tolerance of thresholds where the target is 0
FITS = 20  # of ExponentiatedGradient, at most
Scores = Callable[[np.ndarray], np.ndarray]
SumsPair = tuple[Sums, Sums]  # over the clients' rows, over the test rows
LIBRARIES = ("fairlearn", "lightgbm", "scikit-learn", "xgboost-cpu")


def categories(data: Dataset) -> list[int]:
    """Return the columns of `read_fields` that hold categories."""
    encoder = data.encoder
    return [] if encoder is None else np.flatnonzero(encoder.are_categorical).tolist()


def xgboost_matrix(data: Dataset, rows: np.ndarray, threads: int = 1) -> Any:
    """Return the rows as XGBoost's matrix for `hist`, with native categories."""
    import xgboost

    found = set(categories(data))
    fields = read_fields(data)
    types = ["c" if i in found else "q" for i in range(fields.shape[1])]
    options = {"feature_types": types, "enable_categorical": True, "nthread": threads}
    return xgboost.QuantileDMatrix(fields[rows], data.labels[rows], **options)


def train_xgboost(
    data: Dataset,
    rows: np.ndarray,
    *,
    trees: int,
    leaves: int | None = None,
    depth: int = 6,
    lr: float = 0.1,
    threads: int = 1,
) -> Any:
    """Return XGBoost's booster, of depth 6 or of so many leaves; the rest are its defaults."""
    import xgboost

    classes = len(data.classes)
    kind = {"objective": "binary:logistic"}
    if classes > 2:
        kind = {"objective": "multi:softprob", "num_class": classes}
    size = {"max_depth": depth}
    if leaves is not None:
        size = {"grow_policy": "lossguide", "max_leaves": leaves, "max_depth": 0}
    options = {"tree_method": "hist", "eta": lr, "nthread": threads, **kind, **size}
    return xgboost.train(options, xgboost_matrix(data, rows, threads), trees)


def fit_xgboost(data: Dataset, rows: np.ndarray, **options: Any) -> Scores:
    """Return the probabilities of XGBoost's `hist`; see `train_xgboost`."""
    booster = train_xgboost(data, rows, **options)
    fields = read_fields(data)
    return lambda rows: booster.inplace_predict(fields[rows])


def lightgbm_rows(data: Dataset, rows: np.ndarray) -> Any:
    """Return the rows as LightGBM's data, with native categories."""
    import lightgbm

    known = {"categorical_feature": categories(data), "params": {"verbose": -1}}
    return lightgbm.Dataset(
        read_fields(data)[rows], data.labels[rows], free_raw_data=False, **known
    )


def fit_lightgbm(
    data: Dataset,
    rows: np.ndarray,
    *,
    trees: int,
    leaves: int | None = None,
    depth: int = 6,
    lr: float = 0.1,
) -> Scores:
    """Return the probabilities of LightGBM with native categories; the rest are its defaults."""
    import lightgbm

    classes = len(data.classes)
    kind = {"objective": "multiclass", "num_class": classes} if classes > 2 else {}
    size = (
        {"num_leaves": 2**depth, "max_depth": depth} if leaves is None else {"num_leaves": leaves}
    )
    options = {"objective": "binary", "learning_rate": lr, "verbose": -1, "num_threads": 1}
    fields = read_fields(data)
    booster = lightgbm.train(options | kind | size, lightgbm_rows(data, rows), trees)
    return lambda rows: np.asarray(booster.predict(fields[rows]))


def keep(cache: ResultCache, key: str, make: Callable[[], SumsPair]) -> SumsPair:
    """Return sums of decisions from the cache, or what `make` returns, which is then kept."""
    versions = "-".join(version(name) for name in LIBRARIES)
    key = f"trees-{key}-{versions}".replace(", ", "-").replace(" ", "-").lower()
    kept = cache.get(key)
    if kept is None:
        kept = {"decision": [sums.decision.tolist() for sums in make()]}
        cache.put(key, kept)
    clients, test = (np.array(each) for each in kept["decision"])
    return Sums(clients.sum(-1), clients, clients), Sums(test.sum(-1), test, test)


def sum_decisions(data: Dataset, rows: np.ndarray, positive: np.ndarray) -> Sums:
    """Return the sums of decisions, each with its probability."""
    positive = np.clip(positive, 0.0, 1.0)
    probs = np.stack((1 - positive, positive), axis=1)
    sums = Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))
    return Sums(sums.count, sums.score, sums.score)


def decide_by_group(federation: Federation, metric: Metric, target: float) -> SumsPair:
    """Return the sums of XGBoost with one threshold per group.

    Scores of the training rows are out of fold, and the thresholds are the most accurate ones whose
    gap on them is at most the target. The model is then fitted to all rows.
    """
    data = federation.dataset
    rows = federation.rows
    score, tested = _score_out_of_fold(federation)
    bins = np.minimum((score * HISTOGRAM_BINS).astype(int), HISTOGRAM_BINS - 1)
    counts = np.zeros((2, len(data.group_names) + 1, HISTOGRAM_BINS))
    np.add.at(counts, (data.labels[rows], data.groups[rows], bins), 1)
    known = {"groups": data.group_names, "max_windows": MAX_WINDOWS}
    best, _ = search_group_thresholds(metric, counts, max(target, LEAST), **known)
    threshold = np.append(candidate_thresholds(HISTOGRAM_BINS)[best], 0.5)
    places = ((rows, score), (federation.test, tested))
    decided = [(r, 1.0 * (p >= threshold[data.groups[r]])) for r, p in places]
    clients, test = (sum_decisions(data, r, d) for r, d in decided)
    return clients, test


@lru_cache(maxsize=64)
def _score_out_of_fold(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Return XGBoost's scores of the training rows, out of fold, and of the test rows."""
    data = federation.dataset
    rows = federation.rows
    fold = np.random.default_rng(0).integers(0, 3, len(rows))
    score = np.empty(len(rows))
    for k in range(3):
        score[fold == k] = fit_xgboost(data, rows[fold != k], trees=100)(rows[fold == k])
    return score, fit_xgboost(data, rows, trees=100)(federation.test)


def reduce_lightgbm(federation: Federation, metric: Metric, target: float) -> SumsPair:
    """Return the sums of Fairlearn's ExponentiatedGradient on LightGBM.

    Fairlearn bounds the difference to the mean of all rows, so its bound is half the target.
    """
    data = federation.dataset
    accept = _fit_reduction(data, metric, target, federation.rows)
    places = (federation.rows, federation.test)
    clients, test = (sum_decisions(data, rows, accept(rows)) for rows in places)
    return clients, test


def _fit_reduction(data: Dataset, metric: Metric, target: float, rows: np.ndarray) -> Scores:
    """Return the probability with which a row is accepted."""
    import warnings

    import lightgbm
    from fairlearn import reductions

    options = {"n_estimators": 100, "num_leaves": 31, "learning_rate": 0.1, "n_jobs": 1}
    booster = lightgbm.LGBMClassifier(**options, verbose=-1)
    bound = max(target / 2, LEAST)
    parity = getattr(reductions, CONSTRAINTS[metric.name][0])(difference_bound=bound)
    mixture = reductions.ExponentiatedGradient(booster, parity, eps=bound, max_iter=FITS)
    known = rows[data.groups[rows] >= 0]
    with warnings.catch_warnings():  # about names of columns, and Fairlearn's dependencies
        warnings.simplefilter("ignore")
        x = data.features[known]
        mixture.fit(x, data.labels[known], sensitive_features=data.groups[known])

    def accept(rows: np.ndarray) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(mixture._pmf_predict(data.features[rows]))[:, 1]

    return accept


def fit_prices(
    federation: Federation, metric: Metric, *, library: str, folds: int | None, trees: int = 150
) -> Scores:
    """Return the scores of XGBoost or LightGBM with `fedgft.price_objective`, target 0.

    `folds` None: without prices; 0: the gap is counted on the booster's own rows.
    """
    data = federation.dataset
    rows = federation.rows
    is_xgboost = library == "xgboost"
    if folds is None:
        return (
            fit_xgboost(data, rows, trees=trees)
            if is_xgboost
            else fit_lightgbm(data, rows, trees=trees, leaves=63)
        )
    objective = fedgft.price_objective(
        metric.name,
        target=0.0,
        y=data.labels[rows],
        sensitive_features=data.groups[rows],
        groups=len(data.group_names),
        lr=0.1,
    )
    boost = _boost_xgboost if is_xgboost else _boost_lightgbm
    return boost(data, rows, objective, folds, trees)


def _boost_xgboost(
    data: Dataset, rows: np.ndarray, objective: Any, folds: int, trees: int
) -> Scores:
    import xgboost

    options = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 6, "nthread": 1}
    matrix = xgboost_matrix(data, rows)
    if folds:
        booster = objective.train_out_of_fold(options, matrix, trees, folds=folds)
    else:
        calls = [objective.callback(matrix)]
        booster = xgboost.train(options, matrix, trees, obj=objective, callbacks=calls)
    return lambda rows: booster.predict(xgboost_matrix(data, rows))


def _boost_lightgbm(
    data: Dataset, rows: np.ndarray, objective: Any, folds: int, trees: int
) -> Scores:
    import lightgbm

    options: dict[str, Any] = {"learning_rate": 0.1, "num_leaves": 63, "max_depth": 6}
    options |= {"num_threads": 1, "verbose": -1}
    matrix = lightgbm_rows(data, rows)
    if folds:
        booster = objective.train_out_of_fold(options, matrix, trees, folds=folds)
    else:
        calls: list[Any] = [objective.callback(matrix)]
        booster = lightgbm.train(options | {"objective": objective}, matrix, trees, callbacks=calls)
    fields = read_fields(data)
    return lambda rows: 1.0 / (1.0 + np.exp(-np.asarray(booster.predict(fields[rows]))))


FAIRGBM = {"eop": "FNR", "fpr": "FPR", "eo": "FNR,FPR"}
"FairGBM's names of the constraints; it has none for statistical parity."


def has_fairgbm() -> bool:
    """Return whether FairGBM can be imported."""
    try:
        import fairgbm  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def constrain_fairgbm(federation: Federation, metric: Metric, target: float) -> SumsPair:
    """Return the sums of FairGBM, through its `train`: its classes do not fit scikit-learn 1.8."""
    import fairgbm  # pyrefly: ignore[missing-import]

    data = federation.dataset
    kind = FAIRGBM[metric.name]
    bounds = {f"constraint_{name.lower()}_threshold": target for name in kind.split(",")}
    options = {
        "objective": "constrained_cross_entropy",
        "constraint_type": kind,
        "learning_rate": 0.1,
        "num_leaves": 31,
        "num_threads": 1,
        "verbose": -1,
    }
    rows = federation.rows
    group = data.groups[rows]
    kept = rows[group >= 0]
    x = data.features[kept].astype(np.float64)
    matrix = fairgbm.Dataset(x, data.labels[kept], constraint_group=group[group >= 0])
    booster = fairgbm.train(options | bounds, matrix, num_boost_round=100, verbose_eval=False)
    pairs = []
    for places in (rows, federation.test):
        score = np.asarray(booster.predict(data.features[places].astype(np.float64)))
        pairs.append(sum_decisions(data, places, 1.0 * (score >= 0.5)))
    return pairs[0], pairs[1]

"""What others reach: a threshold for each group after the fact, and Fairlearn on pooled rows.

`thresholds` is the honest baseline of everything here: a plain model and, from the histograms of
its scores that the clients could send, one threshold a group. It needs the group of every person
at the time of the decision. Fairlearn's methods see all rows in one place, which is what a
federation cannot do; they say what federation costs. Theirs are randomised decisions: a row counts
with the probability with which it is accepted.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.audit.thresholds import by_group, edges
from fedgft.data.dataset import Federation
from fedgft.engine.predict import probabilities
from fedgft.errors import FedgftError
from fedgft.experiments.shelf import Shelf
from fedgft.experiments.study import Result, Study
from fedgft.metrics import Metric, Tally, stack

BINS = 400  # of the scores' histograms
WINDOWS = 4_000  # that are tried, for a metric of two conditions: enough for a line in a figure
CONSTRAINTS = {
    "sp": ("DemographicParity", "demographic_parity"),
    "eop": ("TruePositiveRateParity", "true_positive_rate_parity"),
    "fpr": ("FalsePositiveRateParity", "false_positive_rate_parity"),
    "eo": ("EqualizedOdds", "equalized_odds"),
}
Tallies = tuple[Tally, Tally]  # the federation's rows, the test rows


def thresholds(study: Study, plain: Result, tolerances: Sequence[float]) -> list[Tallies]:
    """For each tolerance, the tallies (replicate, ...) of plain models with thresholds by group."""
    each = [
        [_adjusted(federation, scores, plain.metric, t) for t in tolerances]
        for federation, scores in zip(plain.federations, _scores(study, plain), strict=True)
    ]
    return [
        (stack([run[t][0] for run in each]), stack([run[t][1] for run in each]))
        for t in range(len(tolerances))
    ]


def _scores(study: Study, plain: Result) -> list[tuple[np.ndarray, np.ndarray]]:
    """P(positive) of every replicate's own model, on its clients' and on its test rows."""
    models = zip(plain.federations, plain.history.params, strict=True)
    return [
        (probabilities(f, study.model, params, f.rows)[:, 1],
         probabilities(f, study.model, params, f.test)[:, 1])
        for f, params in models
    ]  # fmt: skip


def _adjusted(
    federation: Federation, scores: tuple[np.ndarray, np.ndarray], metric: Metric, tolerance: float
) -> Tallies:
    data = federation.dataset
    groups = len(data.group_names) + 1
    if not all(np.isfinite(p).all() for p in scores):  # a run that diverged has no thresholds
        lost = np.full((2, groups, 2), np.nan)
        return _of_decisions(lost), _of_decisions(lost)
    where = np.minimum((scores[0] * BINS).astype(int), BINS - 1)
    cell = data.labels[federation.rows] * groups + data.groups[federation.rows] % groups
    counts = np.bincount(cell * BINS + where, minlength=2 * groups * BINS)
    counts = counts.reshape(2, groups, BINS).astype(np.float64)
    best, _ = by_group(metric, counts, tolerance, names=data.group_names, windows=WINDOWS)
    line = np.append(edges(BINS)[best], 0.5)  # who is in no group keeps the old threshold
    pairs = zip((federation.rows, federation.test), scores, strict=True)
    clients, test = (_decided(federation, rows, 1.0 * (p >= line[data.groups[rows]]))
                     for rows, p in pairs)  # fmt: skip
    return clients, test


def fairlearn_fit(
    federation: Federation, metric: Metric, bound: float | None, shelf: Shelf | None = None
) -> Tallies:
    """ExponentiatedGradient with this bound, or (None) ThresholdOptimizer, on the pooled rows.

    Fits take long, so what is on the shelf is taken from it: the key is made of the rows
    themselves, in their own order, so all partitions of one table share it.
    """
    train, test = np.sort(federation.rows), np.sort(federation.test)
    if shelf is None:
        return _fitted(federation, metric, bound, train, test)
    key = _key(federation, metric, bound, train, test)
    kept = shelf.get(key)
    if kept is None:
        found = _fitted(federation, metric, bound, train, test)
        kept = {"decision": [tally.decision.tolist() for tally in found]}
        shelf.put(key, kept)
    clients, tested = (_of_decisions(np.array(each)) for each in kept["decision"])
    return clients, tested


def _key(federation: Federation, metric: Metric, bound: float | None, *rows: np.ndarray) -> str:
    data = federation.dataset
    versions = [version(name) for name in ("fairlearn", "scikit-learn")]
    digest = hashlib.sha256(repr((metric.name, bound, versions)).encode())
    digest.update(Path(__file__).read_bytes())  # how it is fitted
    for each in rows:
        for array in (data.features, data.labels, data.groups):  # not scaled: sums of clients round
            digest.update(np.ascontiguousarray(array[each]).data)
    return "fairlearn-" + digest.hexdigest()[:32]


def _fitted(
    federation: Federation, metric: Metric, bound: float | None, train: np.ndarray, test: np.ndarray
) -> Tallies:
    """It trains on rows whose group is known, and is judged on all of them, as everybody is."""
    known = train[federation.dataset.groups[train] >= 0]
    with warnings.catch_warnings():  # what it says about its own dependencies is not ours to mend
        warnings.simplefilter("ignore")
        fit = _thresholds if bound is None else partial(_exponentiated, bound=bound)
        accept = fit(metric, *_pooled(federation, known))
        found = [accept(*_pooled(federation, rows)[::2]) for rows in (train, test)]
    return _decided(federation, train, found[0]), _decided(federation, test, found[1])


Accept = Callable[[np.ndarray, np.ndarray], np.ndarray]  # features, groups -> P(accepted)


def _exponentiated(
    metric: Metric, x: np.ndarray, y: np.ndarray, a: np.ndarray, *, bound: float
) -> Accept:
    from sklearn.linear_model import LogisticRegression

    reductions, _ = _fairlearn()
    constraint = getattr(reductions, CONSTRAINTS[metric.name][0])(difference_bound=bound)
    made = reductions.ExponentiatedGradient(
        LogisticRegression(max_iter=200), constraint, eps=bound, max_iter=20
    )
    made.fit(x, y, sensitive_features=a)
    return lambda x, a: made._pmf_predict(x)[:, 1]


def _thresholds(metric: Metric, x: np.ndarray, y: np.ndarray, a: np.ndarray) -> Accept:
    from sklearn.linear_model import LogisticRegression

    _, postprocessing = _fairlearn()
    made = postprocessing.ThresholdOptimizer(
        estimator=LogisticRegression(max_iter=200), constraints=CONSTRAINTS[metric.name][1],
        predict_method="predict_proba",
    )  # fmt: skip
    made.fit(x, y, sensitive_features=a)

    def accept(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        """Who is in no group is decided on by the model under it, at one half."""
        plain = 1.0 * (made.estimator_.predict_proba(x)[:, 1] >= 0.5)
        known = a >= 0
        plain[known] = made._pmf_predict(x[known], sensitive_features=a[known])[:, 1]
        return plain

    return accept


def check_fairlearn(metric: Metric, classes: int) -> None:
    """Said before any work is done."""
    _fairlearn()
    if metric.name not in CONSTRAINTS or classes != 2:
        raise FedgftError(
            f"--references: Fairlearn has no method for {metric.name} with {classes} classes; "
            f"it knows {', '.join(CONSTRAINTS)} with two"
        )


def _fairlearn() -> tuple[Any, Any]:
    try:
        from fairlearn import postprocessing, reductions
    except ImportError as error:
        raise FedgftError(
            "--references needs Fairlearn: pip install 'fedgft[references]'"
        ) from error
    return reductions, postprocessing


def _pooled(federation: Federation, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = federation.dataset
    return federation.seen(rows), data.labels[rows], data.groups[rows]


def _decided(federation: Federation, rows: np.ndarray, positive: np.ndarray) -> Tally:
    """The tally of decisions, each with its probability; there are no scores."""
    data = federation.dataset
    positive = np.clip(positive, 0.0, 1.0)  # a mixture's weights add up to one but for rounding
    probs = np.stack((1 - positive, positive), 1)
    tally = Tally.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))
    return _of_decisions(tally.score)


def _of_decisions(decision: np.ndarray) -> Tally:
    return Tally(decision.sum(-1), np.full_like(decision, np.nan), decision)

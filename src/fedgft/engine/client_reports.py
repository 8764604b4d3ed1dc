"""What clients report besides sums of scores: losses, logits and histograms of scores."""

import numpy as np

from fedgft.algorithms.loss_rules import SCORE_BINS
from fedgft.engine.plan import RowIndex, Units


def sum_losses(index: RowIndex, units: Units, log_odds: np.ndarray) -> np.ndarray:
    """Return the summed cross-entropy of each unit by label and group, (u, c, k).

    Parameters
    ----------
    index
        Rows of every client.
    units
        The rows that were measured.
    log_odds
        Their logits (rows, c), one unit after another.
    """
    rows, cell = _locate_rows(index, units)
    top = log_odds.max(1)
    total = top + np.log(np.exp(log_odds - top[:, None]).sum(1))
    own = log_odds[np.arange(len(rows)), index.dataset.labels[rows]]
    return np.bincount(cell, total - own, units.count.size).reshape(units.count.shape)


def sum_logits(index: RowIndex, units: Units, log_odds: np.ndarray) -> np.ndarray:
    """Return the summed logit of the second class of each unit by label and group, (u, c, k)."""
    _, cell = _locate_rows(index, units)
    logit = log_odds[:, 1] - log_odds[:, 0]
    return np.bincount(cell, logit, units.count.size).reshape(units.count.shape)


def count_scores(index: RowIndex, units: Units, log_odds: np.ndarray) -> np.ndarray:
    """Return the rows of each unit by label, group and bin of the score of the second class.

    The result has the shape (u, c, k, SCORE_BINS). The arguments are those of `sum_losses`, for two
    classes. Bin b holds the scores from b / SCORE_BINS to below (b + 1) / SCORE_BINS.
    """
    _, cell = _locate_rows(index, units)
    scores = 0.5 * (1 + np.tanh(0.5 * (log_odds[:, 1] - log_odds[:, 0])))
    scores = np.where(np.isfinite(scores), scores, 0.0)  # of a model that has diverged
    bins = np.minimum((scores * SCORE_BINS).astype(np.int64), SCORE_BINS - 1)
    size = units.count.size * SCORE_BINS
    flat = np.bincount(cell * SCORE_BINS + bins, minlength=size).astype(np.float64)
    return flat.reshape(*units.count.shape, SCORE_BINS)


def _locate_rows(index: RowIndex, units: Units) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers of all units, and the number of (unit, label, group) of each row."""
    data = index.dataset
    parts = [index.rows[a:b] for a, b in zip(units.low, units.high, strict=True)]
    rows = np.concatenate(parts)
    groups = units.count.shape[-1]
    cell = data.labels[rows] * groups + data.groups[rows] % groups  # group -1 becomes the last
    cells = units.count.shape[1] * groups
    return rows, np.repeat(np.arange(len(units)), units.sizes) * cells + cell


REPORTS = {"losses": sum_losses, "logits": sum_logits, "histograms": count_scores}
"How each report is measured; see `ClientReports`."

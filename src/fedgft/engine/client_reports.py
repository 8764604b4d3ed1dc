"""What clients report besides sums of scores: losses, logits and histograms of scores."""

import numpy as np

from fedgft.engine.plan import RowIndex, Units


def report_rows(
    index: RowIndex, units: Units, logs: np.ndarray, *, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return summed losses, summed logits and histograms of each unit by label and group.

    Parameters
    ----------
    index
        Rows of every client.
    units
        The rows that were measured.
    logs
        (rows, c): the logarithms of their class probabilities, one unit after another.
    bins
        The number of bins of the scores; 0: no histograms.

    Returns
    -------
    losses, logits, histograms
        As `Executor.report` returns them: (u, c, k), (u, c, k) and (u, c, k, bins).
    """
    data = index.dataset
    parts = [index.rows[a:b] for a, b in zip(units.low, units.high, strict=True)]
    rows = np.concatenate(parts)
    groups = units.count.shape[-1]
    cell = data.labels[rows] * groups + data.cells[rows] % groups  # group -1 becomes the last
    cell = np.repeat(np.arange(len(units)), units.sizes) * units.count[0].size + cell
    shape = units.count.shape
    weights = 1.0 if index.row_weights is None else index.row_weights[rows]
    loss = -logs[np.arange(len(rows)), data.labels[rows]]
    losses = np.bincount(cell, weights * loss, units.count.size)
    logits = np.bincount(cell, weights * (logs[:, 1] - logs[:, 0]), units.count.size)
    histograms = np.zeros((*shape, bins))
    if bins:
        scores = np.nan_to_num(np.exp(logs[:, 1]))  # NaN if the model has diverged
        at = np.minimum((scores * bins).astype(np.int64), bins - 1)
        each = None if index.row_weights is None else weights
        counts = np.bincount(cell * bins + at, each, minlength=units.count.size * bins)
        histograms = counts.reshape(*shape, bins).astype(np.float64)
    return losses.reshape(shape), logits.reshape(shape), histograms

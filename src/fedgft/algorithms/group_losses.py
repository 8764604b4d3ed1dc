"""Losses by group, as rules that weigh the groups by their losses need them."""

import numpy as np

from fedgft.algorithms.loss_rules import ClientReports
from fedgft.algorithms.weightings import Cohort


def mean_group_losses(reports: ClientReports, cohort: Cohort) -> np.ndarray:
    """Return the mean loss of each group over all clients of a run, (r, g); 0 without rows."""
    return _divide_by_rows(cohort.sum(reports.read_losses()), cohort.sum(reports.sums.count))


def own_group_losses(reports: ClientReports) -> np.ndarray:
    """Return the mean loss of each group at each client, (u, g); 0 without rows."""
    return _divide_by_rows(reports.read_losses(), reports.sums.count)


def _divide_by_rows(losses: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return mean losses by group, (..., g), from sums (..., c, g + 1)."""
    rows = count[..., :-1].sum(-2)
    means = losses[..., :-1].sum(-2) / np.where(rows > 0, rows, 1.0)
    return np.where(rows > 0, means, 0.0)


def weigh_groups(weights: np.ndarray, classes: int) -> np.ndarray:
    """Return row weights (u, c, g + 1) from weights of groups (u, g); 1 without a group."""
    table = np.ones((len(weights), classes, weights.shape[-1] + 1))
    table[..., :-1] = weights[:, None, :]
    return table


def project_to_simplex(values: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """Return the nearest points of the probability simplex (Duchi et al., 2008).

    Parameters
    ----------
    values
        (..., n): one point per row.
    allowed
        (..., n): the coordinates that may differ from zero; None: all.
    """
    values = values if allowed is None else np.where(allowed, values, -np.inf)
    ordered = -np.sort(-values, axis=-1)
    finite = np.where(np.isfinite(ordered), ordered, 0.0)
    number = np.arange(1, values.shape[-1] + 1)
    shift = (np.cumsum(finite, axis=-1) - 1) / number
    kept = (np.isfinite(ordered) & (finite > shift)).sum(-1, keepdims=True)
    cut = np.take_along_axis(shift, kept - 1, axis=-1)
    return np.maximum(np.where(np.isfinite(values), values - cut, 0.0), 0.0)

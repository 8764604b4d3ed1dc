"""LRW: local reweighing.

Kamiran & Calders (2012), on each client's own rows (Algorithm 4 of the paper): a row of group
a and label y weighs n_a n_y / (n n_ay), so that on the client label and group look
independent. The weighted loss is divided by the batch size. A cell without rows has no
weight and needs none; rows without a recorded group keep the weight one.
"""

import numpy as np

from fedgft.types import Weights


def reweigh(count: np.ndarray) -> Weights:
    """Counts (u, label, group) -> weights; the last group is "not recorded"."""
    known = count[..., :-1].astype(np.float64)
    by_label, by_group = known.sum(-1, keepdims=True), known.sum(-2, keepdims=True)
    total = by_label.sum(-2, keepdims=True)
    weights = np.ones_like(count, dtype=np.float64)
    np.divide(by_label * by_group, total * known, out=weights[..., :-1], where=known > 0)
    return weights

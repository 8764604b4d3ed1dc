"""Scores of single rows, for whoever needs more than sums of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.models import Model, get_model

PIECE = 2**22  # numbers in one go


def probabilities(
    federation: Federation, model: Any, params: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """(rows, classes), under the scaling of this federation."""
    data, classes, parts = federation.dataset, len(federation.dataset.classes), []
    logits = _logits(get_model(model), params, features=data.features.shape[1], classes=classes)
    step = max(1, PIECE // max(1, data.features[:1].size))
    for start in range(0, len(rows), step):
        parts.append(_softmax(logits(federation.seen(rows[start : start + step]))))
    return np.concatenate(parts) if parts else np.zeros((0, classes))


def _logits(
    model: Model, params: np.ndarray, *, features: int, classes: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Of rows; a network is built once for all of them."""
    if model.linear:
        weight, bias = params[:-classes].reshape(classes, -1), params[-classes:]
        return lambda x: x @ weight.T + bias
    import torch
    from torch.func import functional_call

    from fedgft.engine.flat import layout

    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        module = model.module(features=features, classes=classes).double().eval()
    where = layout(module)
    views = where.views(torch.as_tensor(where.inward(np.asarray(params, dtype=np.float64))))

    def applied(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return functional_call(module, views, (torch.as_tensor(x),)).numpy()

    return applied


def _softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)

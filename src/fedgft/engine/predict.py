"""Scores of single rows, for whoever needs more than sums of them."""

from typing import Any

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.models import get_model

PIECE = 2**22  # numbers in one go


def probabilities(
    federation: Federation, model: Any, params: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """(rows, classes), under the scaling of this federation."""
    data, found = federation.dataset, get_model(model)
    parts = []
    step = max(1, PIECE // max(1, data.features[:1].size))
    for start in range(0, len(rows), step):
        x = federation.seen(rows[start : start + step])
        parts.append(_softmax(_logits(found, x, params, len(data.classes))))
    return np.concatenate(parts) if parts else np.zeros((0, len(data.classes)))


def _logits(model: Any, x: np.ndarray, params: np.ndarray, classes: int) -> np.ndarray:
    if model.linear:
        weight, bias = params[:-classes].reshape(classes, -1), params[-classes:]
        return x @ weight.T + bias
    import torch
    from torch.func import functional_call

    from fedgft.engine.flat import layout

    module = model.module(features=x.shape[1], classes=classes).double().eval()
    where = layout(module)
    views = where.views(torch.as_tensor(where.inward(np.asarray(params, dtype=np.float64))))
    with torch.no_grad():
        return functional_call(module, views, (torch.as_tensor(x),)).numpy()


def _softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)

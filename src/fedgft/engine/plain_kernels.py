"""The fused kernel in NumPy, for machines without numba: the same steps, a batch at a time.

The signatures are those of fedgft.engine.kernels; `lanes` means nothing here.
"""

from typing import Any

import numpy as np

from fedgft.engine.schedule import batches

Array = np.ndarray


def _seen(u: Array, mean: Array, inverse: Array, bias: int) -> Array:
    w = u * inverse
    w[bias] -= w @ mean
    return w


def _sigmoid(z: Array) -> Array:
    # tanh saturates where exp would overflow
    return 0.5 * (1 + np.tanh(0.5 * z))


def _step(u: Array, g: Array, m: Array, v: Array, *, lr: float, decay: float, adaptive: bool,
          moments: tuple[float, float, float], count: Array) -> None:  # fmt: skip
    first, second, epsilon = moments
    count += 1
    u *= u.dtype.type(1 - lr * decay)
    m *= first
    if not adaptive:
        m += g
        u -= u.dtype.type(2 * lr) * m
        return
    m += (1 - first) * g
    v *= second
    v += (1 - second) * g * g
    rate = 2 * lr / (1 - first ** int(count[0]))
    root = 1 / np.sqrt(1 - second ** int(count[1]))
    u -= u.dtype.type(rate) * m / (np.sqrt(v) * u.dtype.type(root) + u.dtype.type(epsilon))


def _difference(params: Array, bias: int, width: int) -> Array:
    u = np.zeros(width, params.dtype)
    u[:bias] = params[bias : 2 * bias] - params[:bias]
    u[bias] = params[2 * bias + 1] - params[2 * bias]
    return u


def _both_rows(params: Array, bias: int, u: Array, kept: float) -> None:
    low, high = np.r_[:bias, 2 * bias], np.r_[bias : 2 * bias, 2 * bias + 1]
    middle = params.dtype.type(0.5 * kept) * (params[low] + params[high])
    half = params.dtype.type(0.5) * u[: bias + 1]
    params[low], params[high] = middle - half, middle + half


def train(
    begin: int, end: int, lanes: int, x: Array, cell: Array, label: Array, rows: Array, run: Array,
    low: Array, high: Array, seed: Array, batch_size: int, most: int, mu: float, drift: Array,
    raw: Array, origin: Array,
    block: Array, m: Array, v: Array, count: Array, weight: Array, price: Array,
    mean: Array, inverse: Array, bias: int, lr: Array, decay: float, adaptive: bool, moments: Any,
) -> None:  # fmt: skip
    """Local epochs of units begin..end, in place on their models, moments and counts."""
    for i in range(begin, end):
        r, steps, own = run[i], 0, rows[low[i] : high[i]]
        u = _difference(block[i], bias, x.shape[1])
        start = _difference(origin[i], bias, x.shape[1])
        for epoch_seed in seed[i]:
            for batch in batches(own, seed=int(epoch_seed), batch_size=batch_size, most=most):
                xb, c = x[batch], cell[batch]
                p = _sigmoid(xb @ _seen(u, mean[r], inverse[r], bias))
                e = weight[i, c] * (p - label[c]) + price[i, c] * p * (1 - p)
                g = (e @ xb) / u.dtype.type(len(batch))
                g = (g - mean[r] * g[bias]) * inverse[r]
                if len(drift):
                    raw[i] += g
                    g = g + drift[i]
                g += u.dtype.type(mu / 2) * (u - start)
                _step(u, g, m[i], v[i], lr=lr[i], decay=decay, adaptive=adaptive,
                      moments=moments, count=count[i])  # fmt: skip
                steps += 1
        _both_rows(block[i], bias, u, (1 - lr[i] * decay) ** steps)


def measure(
    begin: int, end: int, lanes: int, x: Array, cell: Array, rows: Array, run: Array, low: Array,
    high: Array, block: Array, which: Array, mean: Array, inverse: Array, bias: int, tally: Array,
) -> None:  # fmt: skip
    """Summed scores and positive decisions per cell."""
    cells = tally.shape[1]
    for i in range(begin, end):
        own = rows[low[i] : high[i]]
        u = _difference(block[which[i]], bias, x.shape[1])
        p = _sigmoid(x[own] @ _seen(u, mean[run[i]], inverse[run[i]], bias))
        tally[i, :, 0] = np.bincount(cell[own], weights=p, minlength=cells)
        tally[i, :, 1] = np.bincount(cell[own], weights=p > 0.5, minlength=cells)


def combine(coefficients: Array, block: Array, bounds: Array, out: Array) -> None:
    """Weighted sums of the models of each run."""
    out[:] = np.add.reduceat(coefficients[:, None] * block, bounds[:-1], axis=0)

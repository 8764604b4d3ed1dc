"""The fused kernel: a binary linear model, one client after another, one pass per row.

With two classes the gradient of the second logit is minus that of the first, for every loss
of the scores, so only u = W1 - W0 is simulated, with a doubled step: exact for SGD, momentum,
Adam and AdamW. A row costs one dot product and one update of the gradient while it is in the
first-level cache; no batch is ever gathered, nothing is padded.

Whatever the method, a row's residual by the logit is

    e = weight[cell] (p - y) + price[cell] p (1 - p),      cell = (label, group)

so cross-entropy, reweighing and every fairness penalty are two small tables.

Features are stored once for all runs. A run that sees them standardised as (x - mean) / spread
gets there through its parameters: u'x' = (u / spread)'x + (b - sum u mean / spread), and the
gradient follows by the chain rule once a batch instead of once a row.
"""

import math

import numpy as np
from numba.core import types
from numba.extending import overload

from fedgft.engine.compiled import GAP, OPTIONS, inlined, jit
from fedgft.engine.schedule import shuffle
from fedgft.engine.vector import BLOCK, add_rows, as_float, dot_rows, prefetch_row


def _sigmoid(z):
    """1 / (1 + exp(-z)); numba takes the version below that fits the type of number."""


@overload(_sigmoid, jit_options=OPTIONS, inline="always")
def _sigmoid_for(z):
    if z != types.float32:
        return lambda z: 1.0 / (1.0 + math.exp(-z))

    def vectorisable(z):
        # exp(x) = 2^k exp(r), |r| <= ln(2) / 2: the Taylor series to r^7 / 7! is then good to
        # 6e-9, below what float32 resolves; no branch and no call, so LLVM vectorises it.
        f = np.float32
        x = min(max(-z, f(-87.0)), f(87.0))
        k = np.floor(x * f(1.4426950408889634) + f(0.5))
        r = x - k * f(0.693359375) + k * f(2.12194440e-4)  # ln 2 in two parts
        e = f(1 / 5040)
        e = e * r + f(1 / 720)
        e = e * r + f(1 / 120)
        e = e * r + f(1 / 24)
        e = e * r + f(1 / 6)
        e = e * r + f(1 / 2)
        e = e * r + f(1)
        e = e * r + f(1)
        return f(1) / (f(1) + e * as_float(np.int32((np.int32(k) + np.int32(127)) << np.int32(23))))

    return vectorisable


@inlined
def _apart(like):
    """Memory for a few vectors, each 1 KB or more from the next and from everything else.

    A compiled loop asks first whether what it writes lies close before what it reads, and is then
    not vectorised. Where that was left to chance, so was the last digit of the results.
    """
    return np.empty((7, like.shape[1] + BLOCK + GAP), like.dtype)


@inlined
def _take(x, order, at, end, row, ahead):
    """The next block of row numbers; past the end stands the last row of x, which is zeros.

    Rows are scattered in memory, and waiting for them is most of the time there is to save:
    the block that comes `ahead` blocks later is sent for now.
    """
    for q in range(BLOCK):
        row[q] = order[at + q] if at + q < end else x.shape[0] - 1
    for q in range(at + ahead * BLOCK, min(at + (ahead + 1) * BLOCK, end)):
        prefetch_row(x, order[q])


@inlined
def _seen(u, mean, inverse, bias, w):
    """The parameters on stored features that act as u does on standardised ones."""
    shift = u.dtype.type(0)
    for d in range(u.shape[0]):
        w[d] = u[d] * inverse[d]
        shift += w[d] * mean[d]
    w[bias] -= shift


@inlined
def _gradient(x, cell, label, order, at, end, weight, price, w, g, z, row):
    """Mean gradient of one batch by the stored features' parameters w."""
    one = w.dtype.type(1)
    g[:] = w.dtype.type(0)
    for start in range(at, end, BLOCK):
        _take(x, order, start, end, row, 1)
        dot_rows(x, row, w, z)
        for q in range(z.shape[0]):
            z[q] = _sigmoid(z[q])
        for q in range(BLOCK):
            c = cell[row[q]]
            z[q] = weight[c] * (z[q] - label[c]) + price[c] * z[q] * (one - z[q])
        add_rows(x, row, z, g)
    share = w.dtype.type(1.0 / (end - at))
    for d in range(g.shape[0]):
        g[d] *= share


@inlined
def _step(u, g, m, v, lr, decay, adaptive, moments, count):
    """One step of the local optimiser. `count` holds the steps behind m and behind v."""
    f = u.dtype.type
    first, second, tiny = moments
    count[0] += 1
    count[1] += 1
    keep = f(1.0 - lr * decay)
    if adaptive:
        rate = f(2.0 * lr / (1.0 - first ** count[0]))
        root = f(1.0 / math.sqrt(1.0 - second ** count[1]))
        b1, a1, b2, a2, eps = f(first), f(1 - first), f(second), f(1 - second), f(tiny)
        for d in range(u.shape[0]):
            m[d] = b1 * m[d] + a1 * g[d]
            v[d] = b2 * v[d] + a2 * g[d] * g[d]
            u[d] = keep * u[d] - rate * m[d] / (np.sqrt(v[d]) * root + eps)
    else:
        b1, rate = f(first), f(2.0 * lr)
        for d in range(u.shape[0]):
            m[d] = b1 * m[d] + g[d]
            u[d] = keep * u[d] - rate * m[d]


@inlined
def _difference(params, bias, u):
    """u = W1 - W0 of a model in the order of nn.Linear(features, 2), its bias last."""
    u[:] = u.dtype.type(0)
    for d in range(bias):
        u[d] = params[bias + d] - params[d]
    u[bias] = params[2 * bias + 1] - params[2 * bias]


@inlined
def _both_rows(params, bias, u, kept):
    """W0 and W1 again, in place: their sum has no gradient and only decays, to `kept` of it."""
    half = params.dtype.type(0.5)
    for d in range(bias + 1):
        low, high = (d, bias + d) if d < bias else (2 * bias, 2 * bias + 1)
        middle = half * kept * (params[low] + params[high])
        params[low] = middle - half * u[d]
        params[high] = middle + half * u[d]


@jit
def train(
    begin, end, lanes, x, cell, label, rows, run, low, high, seed, batch_size, most, mu, drift, raw,
    origin, block, m, v, count, weight, price, mean, inverse, bias, lr, decay, adaptive, moments,
):  # fmt: skip
    """Local epochs of units begin..end, in place on their models (and moments and their counts).

    A gradient by u stands for two, by W1 and (with the other sign) by W0; so do `drift` and `raw`.

    `lanes` is BLOCK, told at run time: a loop of known length is unrolled instead of vectorised.
    """
    longest = 0
    for i in range(begin, end):
        longest = max(longest, high[i] - low[i])
    order, row = np.empty(longest, np.int32), np.empty(BLOCK, np.int32)
    width, own = m.shape[1], _apart(m)
    g, w, u, start = own[1, :width], own[2, :width], own[3, :width], own[4, :width]
    z = own[5, :lanes]
    half = m.dtype.type(mu / 2)  # u moves by twice what each of the two rows moves by
    for i in range(begin, end):
        size, r, steps = high[i] - low[i], run[i], 0
        _difference(block[i], bias, u)
        _difference(origin[i], bias, start)
        for epoch in range(seed.shape[1]):
            order[:size] = rows[low[i] : high[i]]
            shuffle(order[:size], seed[i, epoch])
            used = min(size, most)
            for at in range(0, used, batch_size):
                stop = min(at + batch_size, used)
                _seen(u, mean[r], inverse[r], bias, w)
                _gradient(x, cell, label, order, at, stop, weight[i], price[i], w, g, z, row)
                total = g[bias]
                for d in range(g.shape[0]):
                    g[d] = (g[d] - mean[r, d] * total) * inverse[r, d]
                    g[d] += half * (u[d] - start[d])
                if drift.shape[0] > 0:
                    for d in range(g.shape[0]):
                        raw[i, d] += g[d] - half * (u[d] - start[d])
                        g[d] += drift[i, d]
                _step(u, g, m[i], v[i], lr[i], decay, adaptive, moments, count[i])
                steps += 1
        _both_rows(block[i], bias, u, m.dtype.type((1.0 - lr[i] * decay) ** steps))


@jit
def measure(
    begin, end, lanes, x, cell, rows, run, low, high, block, which, mean, inverse, bias, tally
):
    """Summed scores and positive decisions per cell, of the rows of units begin..end.

    Neighbouring rows add to different copies of the sums, since most rows fall into few cells
    and an addition would wait for the one before it.
    """
    width, own = mean.shape[1], _apart(mean)
    w, u, z = own[1, :width], own[2, :width], own[3, :lanes]
    copies, row = np.empty((4, tally.shape[1], 2)), np.empty(BLOCK, np.int32)
    for i in range(begin, end):
        _difference(block[which[i]], bias, u)
        _seen(u, mean[run[i]], inverse[run[i]], bias, w)
        copies[:] = 0.0
        for at in range(low[i], high[i], BLOCK):
            _take(x, rows, at, high[i], row, 2)
            dot_rows(x, row, w, z)
            for q in range(z.shape[0]):
                z[q] = _sigmoid(z[q])
            for q in range(BLOCK):  # rows past the end fall into the last cell, which nobody reads
                c = cell[row[q]]
                copies[q & 3, c, 0] += z[q]
                copies[q & 3, c, 1] += 1.0 if z[q] > 0.5 else 0.0
        for copy in range(4):
            tally[i] += copies[copy]


@jit
def combine(coefficients, block, bounds, out):
    """out[r] = sum of coefficient times model over the units of run r, in their fixed order."""
    out[:] = 0.0
    for r in range(out.shape[0]):
        for i in range(bounds[r], bounds[r + 1]):
            for d in range(out.shape[1]):
                out[r, d] += coefficients[i] * block[i, d]

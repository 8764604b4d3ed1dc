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

from fedgft.engine.compiled import AVAILABLE, OPTIONS, jit
from fedgft.engine.schedule import shuffle

BLOCK = 16  # rows in flight: enough to vectorise the sigmoid, few enough to stay in the cache

if AVAILABLE:
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic, overload

    @intrinsic
    def _prefetch(typing_context, array, offset):
        """Ask for the cache line at this byte of the array; rows come in random order."""

        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            line = builder.bitcast(cgutils.pointer_add(builder, data, args[1]), cgutils.voidptr_t)
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
            call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(call, [line, word(0), word(3), word(1)])
            return context.get_dummy_value()

        return types.void(array, types.intp), codegen

    @intrinsic
    def _as_float(typing_context, bits):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(types.float32))

        return types.float32(types.int32), codegen

    def _sigmoid(z):
        """1 / (1 + exp(-z)), compiled below for each type of number."""
        raise NotImplementedError

    @overload(_sigmoid, jit_options=OPTIONS)
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
            return f(1) / (
                # pyrefly: ignore[missing-argument]
                f(1) + e * _as_float(np.int32((np.int32(k) + np.int32(127)) << np.int32(23)))
            )

        return vectorisable


@jit
def _logits(x, row, w, z):
    """z = X[row] w for a block of rows, four at a time so that w is read once for four."""
    for q in range(0, BLOCK, 4):
        r0, r1, r2, r3 = row[q], row[q + 1], row[q + 2], row[q + 3]
        z0 = z1 = z2 = z3 = w.dtype.type(0)
        for d in range(w.shape[0]):
            z0 += x[r0, d] * w[d]
            z1 += x[r1, d] * w[d]
            z2 += x[r2, d] * w[d]
            z3 += x[r3, d] * w[d]
        z[q], z[q + 1], z[q + 2], z[q + 3] = z0, z1, z2, z3


@jit
def _add_rows(x, row, e, g):
    """g += X[row]' e."""
    for q in range(0, BLOCK, 4):
        r0, r1, r2, r3 = row[q], row[q + 1], row[q + 2], row[q + 3]
        e0, e1, e2, e3 = e[q], e[q + 1], e[q + 2], e[q + 3]
        for d in range(g.shape[0]):
            g[d] += e0 * x[r0, d] + e1 * x[r1, d] + e2 * x[r2, d] + e3 * x[r3, d]


@jit
def _take(x, order, at, end, row):
    """The next block of row numbers; past the end stands the last row of x, which is zeros.

    Rows are scattered in memory, and waiting for them is most of the time there is to save:
    the block after this one is sent for now.
    """
    for q in range(BLOCK):
        row[q] = order[at + q] if at + q < end else x.shape[0] - 1
    for q in range(at + BLOCK, min(at + 2 * BLOCK, end)):
        for byte in range(0, x.strides[0], 64):
            # pyrefly: ignore[missing-argument]
            _prefetch(x, np.int64(order[q]) * x.strides[0] + byte)


@jit
def _seen(u, mean, inverse, bias, w):
    """The parameters on stored features that act as u does on standardised ones."""
    shift = u.dtype.type(0)
    for d in range(u.shape[0]):
        w[d] = u[d] * inverse[d]
        shift += w[d] * mean[d]
    w[bias] -= shift


@jit
def _gradient(x, cell, label, order, at, end, weight, price, w, g, z, row):
    """Mean gradient of one batch by the stored features' parameters w."""
    one = w.dtype.type(1)
    g[:] = w.dtype.type(0)
    for start in range(at, end, BLOCK):
        _take(x, order, start, end, row)
        _logits(x, row, w, z)
        for q in range(z.shape[0]):
            z[q] = _sigmoid(z[q])
        for q in range(BLOCK):
            c = cell[row[q]]
            z[q] = weight[c] * (z[q] - label[c]) + price[c] * z[q] * (one - z[q])
        _add_rows(x, row, z, g)
    share = w.dtype.type(1.0 / (end - at))
    for d in range(g.shape[0]):
        g[d] *= share


@jit
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


@jit
def train(
    begin, end, lanes, x, cell, label, rows, run, low, high, seed, batch_size, start, mu,
    u, m, v, count, weight, price, mean, inverse, bias, lr, decay, adaptive, moments,
):  # fmt: skip
    """Local epochs of units begin..end, in place on u (and the moments m, v and their counts).

    `lanes` is BLOCK, told at run time: a loop of known length is unrolled instead of vectorised.
    """
    longest = 0
    for i in range(begin, end):
        longest = max(longest, high[i] - low[i])
    order, row = np.empty(longest, np.int32), np.empty(BLOCK, np.int32)
    g, w, z = np.empty_like(u[0]), np.empty_like(u[0]), np.empty(lanes, u.dtype)
    half = u.dtype.type(mu / 2)  # u moves by twice what each of the two rows moves by
    for i in range(begin, end):
        size, r = high[i] - low[i], run[i]
        for epoch in range(seed.shape[1]):
            order[:size] = rows[low[i] : high[i]]
            shuffle(order[:size], seed[i, epoch])
            for at in range(0, size, batch_size):
                stop = min(at + batch_size, size)
                _seen(u[i], mean[r], inverse[r], bias, w)
                _gradient(x, cell, label, order, at, stop, weight[i], price[i], w, g, z, row)
                total = g[bias]
                for d in range(g.shape[0]):
                    g[d] = (g[d] - mean[r, d] * total) * inverse[r, d]
                    g[d] += half * (u[i, d] - start[i, d])
                _step(u[i], g, m[i], v[i], lr[i], decay, adaptive, moments, count[i])


@jit
def _scores(x, rows, at, end, w, row, z):
    """The scores of a block of rows."""
    _take(x, rows, at, end, row)
    _logits(x, row, w, z)
    for q in range(z.shape[0]):
        z[q] = _sigmoid(z[q])


@jit
def measure(begin, end, lanes, x, cell, rows, run, low, high, u, which, mean, inverse, bias, tally):
    """Summed scores and positive decisions per cell, of the rows of units begin..end."""
    w, z, row = np.empty_like(u[0]), np.empty(lanes, u.dtype), np.empty(BLOCK, np.int32)
    for i in range(begin, end):
        _seen(u[which[i]], mean[run[i]], inverse[run[i]], bias, w)
        for at in range(low[i], high[i], BLOCK):
            _scores(x, rows, at, high[i], w, row, z)
            for q in range(min(BLOCK, high[i] - at)):
                c = cell[row[q]]
                tally[i, c, 0] += z[q]
                tally[i, c, 1] += 1.0 if z[q] > 0.5 else 0.0

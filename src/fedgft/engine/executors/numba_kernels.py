"""The fused kernel: a binary linear model, one client after another, one pass per row.

With two classes, the gradients of the two logits are equal with opposite signs for every loss that
depends on the scores. The kernel therefore simulates only u = W1 - W0, with a doubled step size,
which is exact for SGD, momentum, Adam and AdamW. A row costs one dot product and one update of the
gradient while it is in the first-level cache; no batch is gathered and nothing is padded.

For every method, the derivative of a row's loss with respect to the logit is

    e = weight[cell] (p - y) + price[cell] p (1 - p),      cell = (label, group)

so two small tables describe cross-entropy, reweighing and every fairness penalty. Where rows have
weights, e is multiplied by that of the row.

Features are stored once for all runs. A run that standardizes them to x' = (x - mean) / spread
transforms its parameters instead: u'x' = (u / spread)'x + (b - sum u mean / spread). The gradient
is transformed back by the chain rule once per batch instead of once per row.

Products with a block of rows are written as vector instructions (`dot_rows`, `add_rows`,
`prefetch_row`). LLVM also vectorizes plain loops, but with a vector width that leaves a third of a
typical row to scalar code. Here a row is a whole number of 64-byte vectors, every row of the block
has its own vector accumulator, and each number is read once.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from fedgft.compiled import NUMBA_OPTIONS, inlined, jit
from fedgft.engine.executors.numpy_kernels import BLOCK, VECTOR_GAP
from fedgft.engine.plan import shuffle

instruction: Any = intrinsic  # numba passes the first argument of each function below

LINE = 64  # bytes in a vector, and in a cache line


class Vectors(NamedTuple):
    """Memory that `_gradient` reads and writes.

    Attributes
    ----------
    w, g
        Parameters and gradient on stored features, (width,).
    z
        Logits, then scores, then derivatives of the loss, for the rows of a block.
    row
        Row numbers of a block.
    """

    w: Any
    g: Any
    z: Any
    row: Any


class _Block:
    """The rows `row[0..BLOCK)` of table x, and a loop over their columns, vector by vector."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        pairs = zip(signature.args, args, strict=True)
        arrays = [context.make_array(kind)(context, builder, value) for kind, value in pairs]
        x, row, *self.vectors = arrays
        self.builder = builder
        self.number = context.get_data_type(signature.args[0].dtype)
        self.lanes = LINE // context.get_abi_sizeof(self.number)
        self.vector = ir.VectorType(self.number, self.lanes)
        self.row_bytes = builder.extract_value(x.strides, 0)
        numbers = [builder.load(cgutils.gep(builder, row.data, q)) for q in range(BLOCK)]
        self.rows = [_row_start(builder, x, number) for number in numbers]

    def load(self, start: Any, offset: Any) -> Any:
        """Read one vector."""
        return self.builder.load(self.pointer(start, offset), align=4)

    def call(self, name: str, *args: Any) -> Any:
        """Call an LLVM intrinsic on vectors, for example fma."""
        bits = f"v{self.lanes}f{32 if self.lanes == 16 else 64}"
        result = self.number if name.startswith("vector.reduce") else self.vector
        kind = ir.FunctionType(result, [a.type for a in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.{bits}")
        return self.builder.call(function, args, fastmath=("fast",))

    def splat(self, value: Any) -> Any:
        """A vector of equal numbers."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, one, mask)

    def pointer(self, start: Any, offset: Any) -> Any:
        """The address of one vector."""
        place = cgutils.pointer_add(self.builder, start, offset)
        return self.builder.bitcast(place, self.vector.as_pointer())


def _row_start(builder: Any, x: Any, number: Any) -> Any:
    """The address of a row of table x."""
    row_bytes = builder.extract_value(x.strides, 0)
    offset = builder.mul(builder.sext(number, row_bytes.type), row_bytes)
    return cgutils.pointer_add(builder, x.data, offset)


def _vector_offsets(builder: Any, row_bytes: Any) -> Any:
    """A loop over the byte offsets of the vectors of a row."""
    kind = row_bytes.type
    return cgutils.for_range_slice(builder, kind(0), row_bytes, kind(LINE))


@instruction
def dot_rows(typing_context, x, row, w, z):
    """Set z[q] = X[row[q]] w for every row of the block."""

    def codegen(context, builder, signature, args):
        block = _Block(context, builder, signature, args)
        w, z = block.vectors
        zero = ir.Constant(block.vector, None)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in block.rows]
        with _vector_offsets(builder, block.row_bytes) as (offset, _):
            weights = block.load(w.data, offset)
            for start, total in zip(block.rows, sums, strict=True):
                product = block.call("fma", block.load(start, offset), weights, builder.load(total))
                builder.store(product, total)
        for q, total in enumerate(sums):
            added = block.call("vector.reduce.fadd", block.number(0.0), builder.load(total))
            builder.store(added, cgutils.gep(builder, z.data, q))
        return context.get_dummy_value()

    return types.void(x, row, w, z), codegen


@instruction
def add_rows(typing_context, x, row, e, g):
    """Add X[row]' e to g, for the rows of the block."""

    def codegen(context, builder, signature, args):
        block = _Block(context, builder, signature, args)
        e, g = block.vectors
        factors = [block.splat(builder.load(cgutils.gep(builder, e.data, q))) for q in range(BLOCK)]
        with _vector_offsets(builder, block.row_bytes) as (offset, _):
            total = block.load(g.data, offset)
            for start, factor in zip(block.rows, factors, strict=True):
                total = block.call("fma", block.load(start, offset), factor, total)
            builder.store(total, block.pointer(g.data, offset), align=4)
        return context.get_dummy_value()

    return types.void(x, row, e, g), codegen


@instruction
def prefetch_row(typing_context, x, row):
    """Prefetch all cache lines of a row.

    Rows are read in random order, and most of the time is spent waiting for memory.
    """

    def codegen(context, builder, signature, args):
        x = context.make_array(signature.args[0])(context, builder, args[0])
        word = ir.IntType(32)
        start = _row_start(builder, x, args[1])
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with _vector_offsets(builder, builder.extract_value(x.strides, 0)) as (offset, _):
            line = builder.bitcast(cgutils.pointer_add(builder, start, offset), cgutils.voidptr_t)
            builder.call(call, [line, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(x, row), codegen


@instruction
def as_float(typing_context, bits):
    """Reinterpret 32 bits as float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


def _sigmoid(z):
    """1 / (1 + exp(-z)); numba compiles the version below for the type of z."""


@overload(_sigmoid, jit_options=NUMBA_OPTIONS, inline="always")
def _sigmoid_for(z):
    if z != types.float32:
        return lambda z: 1.0 / (1.0 + math.exp(-z))

    def vectorizable(z):
        # exp(x) = 2^k exp(r), |r| <= ln(2) / 2: the Taylor series to r^7 / 7! has an error of 6e-9,
        # below the resolution of float32. It has no branch and no call, so LLVM vectorizes it.
        f = np.float32
        x = min(max(-z, f(-87.0)), f(87.0))
        k = np.floor(x * f(1.4426950408889634) + f(0.5))
        r = x - k * f(0.693359375) + k * f(2.12194440e-4)  # ln 2 in two parts
        e = f(1 / 5040) * r + f(1 / 720)
        e = (e * r + f(1 / 120)) * r + f(1 / 24)
        e = (e * r + f(1 / 6)) * r + f(1 / 2)
        e = (e * r + f(1)) * r + f(1)
        return f(1) / (f(1) + e * as_float(np.int32((np.int32(k) + np.int32(127)) << np.int32(23))))

    return vectorizable


@inlined
def _allocate_vectors(like):
    """Allocate memory for seven vectors, each at least 1 KB apart from all other memory in use.

    A compiled loop first checks whether the memory it writes begins shortly before the memory it
    reads; if so, it runs without vector instructions. Without the distance, the addresses would
    decide this at random, and the last digit of the results would vary.
    """
    return np.empty((7, like.shape[1] + BLOCK + VECTOR_GAP), like.dtype)


@inlined
def _read_block(x, rows, at, row, ahead):
    """Copy BLOCK row numbers, from position `at` of `rows`, to `row`.

    Past the end of `rows`, the number of the last row of x is used, which holds zeros. Most of the
    time is spent waiting for scattered rows, so the block that is `ahead` blocks after this one is
    prefetched now.
    """
    end = rows.shape[0]
    for q in range(BLOCK):
        row[q] = rows[at + q] if at + q < end else x.shape[0] - 1
    for q in range(at + ahead * BLOCK, min(at + (ahead + 1) * BLOCK, end)):
        prefetch_row(x, rows[q])


@inlined
def _unscale(u, table, run, w):
    """Set w so that w'x on stored features equals u'x on standardized features."""
    mean = table.mean[run]
    inverse = table.inverse[run]
    shift = u.dtype.type(0)
    for d in range(u.shape[0]):
        w[d] = u[d] * inverse[d]
        shift += w[d] * mean[d]
    w[table.bias] -= shift


@inlined
def _gradient(table, batch, weight, label, price, curve, vectors):
    """Set g to the mean gradient over the rows of a batch with respect to w, on stored features.

    `weight`, `label`, `price` and `curve` are the tables of the unit, by cell; w and g are in
    `vectors`.
    """
    w = vectors.w
    g = vectors.g
    z = vectors.z
    row = vectors.row
    x = table.x
    cell = table.cell
    bins = curve.shape[1]
    one = w.dtype.type(1)
    g[:] = w.dtype.type(0)
    for start in range(0, batch.shape[0], BLOCK):
        _read_block(x, batch, start, row, 1)
        dot_rows(x, row, w, z)
        for q in range(z.shape[0]):
            z[q] = _sigmoid(z[q])
        if bins == 0:
            for q in range(BLOCK):
                c = cell[row[q]]
                z[q] = weight[c] * (z[q] - label[c]) + price[c] * z[q] * (one - z[q])
        else:
            for q in range(BLOCK):
                c = cell[row[q]]
                at = min(max(np.int64(z[q] * bins), 0), bins - 1)  # a NaN has no place
                cost = price[c] + curve[c, at]
                z[q] = weight[c] * (z[q] - label[c]) + cost * z[q] * (one - z[q])
        if table.weight.shape[0] > 0:
            for q in range(BLOCK):
                z[q] *= table.weight[row[q]]
        add_rows(x, row, z, g)
    share = w.dtype.type(1.0 / batch.shape[0])
    for d in range(g.shape[0]):
        g[d] *= share


@inlined
def _step(u, g, work, i):
    """Make one optimizer step of unit i, in place, from its gradient g."""
    m = work.m[i]
    v = work.v[i]
    count = work.steps[i]
    lr = work.lr[i]
    rule = work.rule
    f = u.dtype.type
    count[0] += 1
    count[1] += 1
    keep = f(1.0 - lr * rule.decay)
    b1 = f(rule.first)
    if rule.adaptive:
        rate = f(2.0 * lr / (1.0 - rule.first ** count[0]))
        root = f(1.0 / math.sqrt(1.0 - rule.second ** count[1]))
        a1 = f(1 - rule.first)
        b2 = f(rule.second)
        a2 = f(1 - rule.second)
        eps = f(rule.epsilon)
        for d in range(u.shape[0]):
            m[d] = b1 * m[d] + a1 * g[d]
            v[d] = b2 * v[d] + a2 * g[d] * g[d]
            u[d] = keep * u[d] - rate * m[d] / (np.sqrt(v[d]) * root + eps)
    else:
        rate = f(2.0 * lr)
        for d in range(u.shape[0]):
            m[d] = b1 * m[d] + g[d]
            u[d] = keep * u[d] - rate * m[d]


@inlined
def _read_difference(params, bias, u):
    """Set u = W1 - W0, with the bias last, from parameters in the order of nn.Linear."""
    u[:] = u.dtype.type(0)
    for d in range(bias):
        u[d] = params[bias + d] - params[d]
    u[bias] = params[2 * bias + 1] - params[2 * bias]


@inlined
def _write_rows(params, bias, u, factor):
    """Set W0 and W1 in place from u = W1 - W0.

    W0 + W1 has no gradient; weight decay has multiplied it by `factor`.
    """
    half = params.dtype.type(0.5)
    for d in range(bias + 1):
        low, high = (d, bias + d) if d < bias else (2 * bias, 2 * bias + 1)
        middle = half * factor * (params[low] + params[high])
        params[low] = middle - half * u[d]
        params[high] = middle + half * u[d]


@jit
def train(begin, end, block_rows, table, work):
    """Train the units begin..end; their models, moments and step counts change in place.

    A gradient g with respect to u represents the gradient g with respect to W1 and -g with respect
    to W0; the same holds for `work.drift` and `work.gradients`. `block_rows` equals BLOCK and
    is passed at run time, because a loop of known length would be unrolled, not vectorized.
    """
    mean = table.mean
    inverse = table.inverse
    bias = table.bias
    low = work.low
    high = work.high
    m = work.m
    drift = work.drift
    gradients = work.gradients
    longest = 0
    for i in range(begin, end):
        longest = max(longest, high[i] - low[i])
    order = np.empty(longest, np.int32)
    row = np.empty(BLOCK, np.int32)
    width = m.shape[1]
    scratch = _allocate_vectors(m)
    g = scratch[1, :width]
    w = scratch[2, :width]
    u = scratch[3, :width]
    start = scratch[4, :width]
    vectors = Vectors(w=w, g=g, z=scratch[5, :block_rows], row=row)
    half = m.dtype.type(work.mu / 2)  # u moves twice as far as each of the two rows
    for i in range(begin, end):
        size = high[i] - low[i]
        r = work.run[i]
        weight = work.weight[i]
        label = work.label[i]
        price = work.price[i]
        curve = work.curve[i if work.curve.shape[0] > 1 else 0]
        lr = work.lr[i]
        steps = 0
        _read_difference(work.block[i], bias, u)
        _read_difference(work.origin[i], bias, start)
        for epoch in range(work.seeds.shape[1]):
            order[:size] = table.rows[low[i] : high[i]]
            shuffle(order[:size], work.seeds[i, epoch])
            used = min(size, work.max_rows)
            for at in range(0, used, work.batch_size):
                stop = min(at + work.batch_size, used)
                _unscale(u, table, r, w)
                _gradient(table, order[at:stop], weight, label, price, curve, vectors)
                total = g[bias]
                for d in range(g.shape[0]):
                    g[d] = (g[d] - mean[r, d] * total) * inverse[r, d]
                    g[d] += half * (u[d] - start[d])
                if drift.shape[0] > 0:
                    for d in range(g.shape[0]):
                        gradients[i, d] += g[d] - half * (u[d] - start[d])
                        g[d] += drift[i, d]
                _step(u, g, work, i)
                steps += 1
        factor = m.dtype.type((1.0 - lr * work.rule.decay) ** steps)
        _write_rows(work.block[i], bias, u, factor)


@jit
def measure(begin, end, block_rows, table, work):
    """Sum scores and positive decisions by cell over the rows of units begin..end.

    Neighboring rows add to different copies of the sums. Most rows fall into few cells, so that
    with one copy each addition would have to wait for the previous one.
    """
    x = table.x
    cell = table.cell
    sums = work.sums
    width = x.shape[1]
    scratch = _allocate_vectors(table.mean)
    w = scratch[1, :width]
    u = scratch[2, :width]
    z = scratch[3, :block_rows]
    copies = np.empty((4, sums.shape[1], 2))
    row = np.empty(BLOCK, np.int32)
    for i in range(begin, end):
        _read_difference(work.block[work.which[i]], table.bias, u)
        _unscale(u, table, work.run[i], w)
        copies[:] = 0.0
        rows = table.rows[work.low[i] : work.high[i]]
        for at in range(0, rows.shape[0], BLOCK):
            _read_block(x, rows, at, row, 2)
            dot_rows(x, row, w, z)
            for q in range(z.shape[0]):
                z[q] = _sigmoid(z[q])
            if table.weight.shape[0] > 0:
                for q in range(BLOCK):
                    c = cell[row[q]]
                    count = np.float64(table.weight[row[q]])
                    copies[q & 3, c, 0] += count * z[q]
                    copies[q & 3, c, 1] += count if z[q] > 0.5 else 0.0
                continue
            for q in range(BLOCK):  # rows past the end fall into the last cell, which is not read
                c = cell[row[q]]
                copies[q & 3, c, 0] += z[q]
                copies[q & 3, c, 1] += 1.0 if z[q] > 0.5 else 0.0
        for copy in range(4):
            sums[i] += copies[copy]


@jit
def report(begin, end, block_rows, table, work):
    """Sum losses and logits by cell, and count scores by cell and bin, of units begin..end."""
    x = table.x
    cell = table.cell
    sums = work.sums
    cells = sums.shape[1]
    bins = sums.shape[2] - 2
    width = x.shape[1]
    scratch = _allocate_vectors(table.mean)
    w = scratch[1, :width]
    u = scratch[2, :width]
    z = scratch[3, :block_rows]
    row = np.empty(BLOCK, np.int32)
    for i in range(begin, end):
        _read_difference(work.block[work.which[i]], table.bias, u)
        _unscale(u, table, work.run[i], w)
        rows = table.rows[work.low[i] : work.high[i]]
        for at in range(0, rows.shape[0], BLOCK):
            _read_block(x, rows, at, row, 2)
            dot_rows(x, row, w, z)
            for q in range(BLOCK):  # rows past the end fall into the last cell, which is not read
                c = cell[row[q]]
                logit = np.float64(z[q])
                odds = math.exp(-abs(logit))
                loss = max(logit, 0.0) + math.log1p(odds)
                count = np.float64(table.weight[row[q]]) if table.weight.shape[0] > 0 else 1.0
                sums[i, c, 0] += count * (loss - logit if c >= cells // 2 else loss)
                sums[i, c, 1] += count * logit
                if bins > 0:
                    score = 1.0 / (1.0 + odds)
                    score = score if logit >= 0 else 1.0 - score
                    at_bin = np.int64(score * bins)  # any number, if the model has diverged
                    sums[i, c, 2 + max(0, min(at_bin, bins - 1))] += count


@jit
def combine(coefficients, block, bounds, out):
    """Set out[r] to the sum of coefficient times model over the units of run r, in fixed order."""
    out[:] = 0.0
    for r in range(out.shape[0]):
        for i in range(bounds[r], bounds[r + 1]):
            for d in range(out.shape[1]):
                out[r, d] += coefficients[i] * block[i, d]

"""The fused kernel in NumPy, for machines without numba; it makes the same steps, batch by batch.

The named tuples below are the arguments of the kernels here and in `numba_kernels`. The functions
have the same signatures as there; `block_rows` is not used here.
"""

from typing import NamedTuple

import numpy as np

from fedgft.engine.plan import draw_batches

Array = np.ndarray
BLOCK = 16  # rows that the compiled kernel processes together: their sums fit into the registers
VECTOR_GAP = 256  # numbers between two vectors, see `numba_kernels._allocate_vectors`


class Table(NamedTuple):
    """The data as the kernels read it, for all runs.

    Attributes
    ----------
    x
        Rows padded to cache lines, with a column of ones and a last row of zeros, (n + 1, width).
    cell
        The index of the (label, group) cell of each row, (n + 1,); the row of zeros has its own
        cell.
    rows
        Row numbers of all units.
    mean, inverse
        Mean and 1 / spread of the features, (run, width).
    bias
        Position of the column of ones.
    weight
        The weight of each row, (n + 1,), 0 for the row of zeros; empty if all rows count the same.
    """

    x: Array
    cell: Array
    rows: Array
    mean: Array
    inverse: Array
    bias: int
    weight: Array


class LocalOptimizer(NamedTuple):
    """The local optimizer: decoupled decay, decay rates of the moments, and epsilon."""

    adaptive: bool
    decay: float
    first: float
    second: float
    epsilon: float


class Training(NamedTuple):
    """Local training of units; unit i of run `run[i]` trains on `rows[low[i]:high[i]]`.

    Attributes
    ----------
    seeds
        Seeds of the order of rows, (u, epochs).
    batch_size, max_rows
        Number of rows per batch, and largest number of rows per epoch.
    weight, label, price
        Weight of a row, the probability of the positive class that it is fitted to (0 or 1, unless
        the method changes labels), and the price of its score, for each cell, (u, cells).
    curve
        Price of the score by the bin of the score, (u, cells, bins); no rows if it is zero.
    mu, origin
        Weight and center (u, p) of the proximal term.
    drift, gradients
        The vector that is added to every gradient, and the sum of the uncorrected gradients,
        (u, width); both arrays have no rows if there is no drift.
    block
        Models (u, p), changed in place.
    m, v, steps
        Moments (u, width) and the number of steps that each has accumulated (u, 2), changed in
        place.
    """

    run: Array
    low: Array
    high: Array
    seeds: Array
    batch_size: int
    max_rows: int
    lr: Array
    weight: Array
    label: Array
    price: Array
    curve: Array
    mu: float
    drift: Array
    gradients: Array
    origin: Array
    block: Array
    m: Array
    v: Array
    steps: Array
    rule: LocalOptimizer


class Measurement(NamedTuple):
    """Sums over the rows of units; unit i is measured with model `block[which[i]]`.

    `sums` (u, cells, 2) holds scores and positive decisions and is changed in place. For `report`
    it holds losses and logits, and then the rows in each bin of the scores, (u, cells, 2 + bins).
    """

    run: Array
    low: Array
    high: Array
    block: Array
    which: Array
    sums: Array


def _unscale(u: Array, table: Table, run: int) -> Array:
    """Return the parameters w for which w'x on stored features equals u'x on standardized ones."""
    w = u * table.inverse[run]
    w[table.bias] -= w @ table.mean[run]
    return w


def _sigmoid(z: Array) -> Array:
    # tanh saturates where exp would overflow
    return 0.5 * (1 + np.tanh(0.5 * z))


def _step(u: Array, g: Array, work: Training, i: int) -> None:
    """One step of the local optimizer of unit i, in place."""
    rule = work.rule
    m = work.m[i]
    v = work.v[i]
    count = work.steps[i]
    lr = work.lr[i]
    number = u.dtype.type
    count += 1
    u *= number(1 - lr * rule.decay)
    m *= rule.first
    if not rule.adaptive:
        m += g
        u -= number(2 * lr) * m
        return
    m += (1 - rule.first) * g
    v *= rule.second
    v += (1 - rule.second) * g * g
    rate = 2 * lr / (1 - rule.first ** int(count[0]))
    root = 1 / np.sqrt(1 - rule.second ** int(count[1]))
    u -= number(rate) * m / (np.sqrt(v) * number(root) + number(rule.epsilon))


def _read_difference(params: Array, bias: int, width: int) -> Array:
    """Return u = W1 - W0, with the bias last, of parameters in the order of nn.Linear."""
    u = np.zeros(width, params.dtype)
    u[:bias] = params[bias : 2 * bias] - params[:bias]
    u[bias] = params[2 * bias + 1] - params[2 * bias]
    return u


def _write_rows(params: Array, bias: int, u: Array, factor: float) -> None:
    """Set W0 and W1 in place from u = W1 - W0.

    W0 + W1 has no gradient; weight decay has multiplied it by `factor`.
    """
    low = np.r_[:bias, 2 * bias]
    high = np.r_[bias : 2 * bias, 2 * bias + 1]
    middle = params.dtype.type(0.5 * factor) * (params[low] + params[high])
    half = params.dtype.type(0.5) * u[: bias + 1]
    params[low] = middle - half
    params[high] = middle + half


def train(begin: int, end: int, block_rows: int, table: Table, work: Training) -> None:
    """Train the units begin..end; their models, moments and step counts change in place."""
    bias = table.bias
    width = table.x.shape[1]
    for i in range(begin, end):
        steps = 0
        rows = table.rows[work.low[i] : work.high[i]]
        u = _read_difference(work.block[i], bias, width)
        start = _read_difference(work.origin[i], bias, width)
        cut = {"batch_size": work.batch_size, "most": work.max_rows}
        for seed in work.seeds[i]:
            for batch in draw_batches(rows, seed=int(seed), **cut):
                g = _gradient(u, batch, table, work, i)
                if len(work.drift):
                    work.gradients[i] += g
                    g = g + work.drift[i]
                g += u.dtype.type(work.mu / 2) * (u - start)
                _step(u, g, work, i)
                steps += 1
        _write_rows(work.block[i], bias, u, (1 - work.lr[i] * work.rule.decay) ** steps)


def _gradient(u: Array, batch: Array, table: Table, work: Training, i: int) -> Array:
    """The mean gradient of one batch of unit i."""
    run = int(work.run[i])
    x = table.x[batch]
    cell = table.cell[batch]
    p = _sigmoid(x @ _unscale(u, table, run))
    error = work.weight[i, cell] * (p - work.label[i, cell]) + work.price[i, cell] * p * (1 - p)
    bins = work.curve.shape[2]
    if bins:
        at = np.minimum((np.nan_to_num(p) * bins).astype(np.int64), bins - 1)
        error = error + work.curve[i, cell, at] * p * (1 - p)
    if len(table.weight):
        error = error * table.weight[batch]
    g = (error @ x) / u.dtype.type(len(batch))
    return (g - table.mean[run] * g[table.bias]) * table.inverse[run]


def measure(begin: int, end: int, block_rows: int, table: Table, work: Measurement) -> None:
    """Sum scores and positive decisions by cell over the rows of units begin..end."""
    cells = work.sums.shape[1]
    for i in range(begin, end):
        rows = table.rows[work.low[i] : work.high[i]]
        u = _read_difference(work.block[work.which[i]], table.bias, table.x.shape[1])
        p = _sigmoid(table.x[rows] @ _unscale(u, table, int(work.run[i])))
        for column, values in enumerate((p, p > 0.5)):
            found = _weigh(values, table, rows)
            work.sums[i, :, column] = np.bincount(table.cell[rows], found, minlength=cells)


def _weigh(values: Array | None, table: Table, rows: Array) -> Array | None:
    """Return the values of rows times their weights; None stands for a value of one."""
    if not len(table.weight):
        return values
    return table.weight[rows] if values is None else values * table.weight[rows]


def report(begin: int, end: int, block_rows: int, table: Table, work: Measurement) -> None:
    """Sum losses and logits by cell, and count scores by cell and bin, of units begin..end."""
    cells = work.sums.shape[1]
    bins = work.sums.shape[2] - 2
    for i in range(begin, end):
        rows = table.rows[work.low[i] : work.high[i]]
        u = _read_difference(work.block[work.which[i]], table.bias, table.x.shape[1])
        z = (table.x[rows] @ _unscale(u, table, int(work.run[i]))).astype(np.float64)
        cell = table.cell[rows]
        label = cell >= cells // 2  # the last cell is that of the row of zeros
        loss = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))) - label * z
        for column, values in enumerate((loss, z)):
            work.sums[i, :, column] = np.bincount(cell, _weigh(values, table, rows), cells)
        if bins:
            at = np.clip(np.nan_to_num(_sigmoid(z) * bins).astype(np.int64), 0, bins - 1)
            counts = np.bincount(cell * bins + at, _weigh(None, table, rows), cells * bins)
            work.sums[i, :, 2:] = counts.reshape(cells, bins)


def combine(coefficients: Array, block: Array, bounds: Array, out: Array) -> None:
    """Set out[r] to the sum of coefficient times model over the units of run r."""
    out[:] = np.add.reduceat(coefficients[:, None] * block, bounds[:-1], axis=0)

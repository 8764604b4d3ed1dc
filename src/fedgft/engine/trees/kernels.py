"""Compiled parts of a booster. All sums over rows are sums of whole numbers.

A row's gradient g and hessian h are rounded to multiples of 2^-k once, before they are added. Sums
of whole numbers do not depend on their order, so a histogram is the same for one client with all
rows, for many clients in any order, and for any number of threads.

Both numbers of a row are packed into one: ``(g << 32) + h``. Sums of up to `BLOCK_ROWS` packed
numbers are added to the histogram, which holds g and h apart.

A *grower* grows one tree. Its rows are a part of `Growers.order`: first those that the tree is
fitted to, then those that it only scores. A node has a range of each.
"""

from typing import NamedTuple

import numpy as np

from fedgft.compiled import exact_jit, inlined

BITS = 17  # |g| and h of a row are below 2^17 and 2^18 after scaling
BLOCK_ROWS = 2**13  # so many packed numbers cannot overflow
SMALL = 1e-6  # an improvement below this is a rounding error
FINE = 2.0**30  # scores are rounded to multiples of 1 / FINE, so that their sums are exact
G, H = 0, 1
LOW, HIGH, OTHER_LOW, OTHER_HIGH = 0, 1, 2, 3


class Columns(NamedTuple):
    """The bins of all rows of all federations; row numbers count through all federations."""

    places: np.ndarray  # (rows, f) uint16 or uint32: the place of a row's bin in a histogram
    codes: np.ndarray  # (f, rows) uint8: the bin of each row by column
    offsets: np.ndarray  # (federations, f + 1): where the bins of a column begin in a histogram
    categorical: np.ndarray  # (f,) bool


class Rule(NamedTuple):
    """What decides about splits."""

    l2: float
    min_child_weight: float
    category_l2: float  # added to l2 in splits by category
    category_smoothing: float  # added to the hessians by which categories are sorted


class Growers(NamedTuple):
    """The trees that are grown together. Axes: grower g, node n."""

    federation: np.ndarray  # (g,)
    shift: np.ndarray  # (g,): `packed[shift + row]` belongs to a row
    packed: np.ndarray  # gradients of all growers
    order: np.ndarray  # int32: the rows of all nodes of all growers
    scratch: np.ndarray  # as long as `order`
    scale: np.ndarray  # (g, 2): what one unit of g and of h is worth
    histograms: np.ndarray  # (g, slot, bins, 2) int64
    slot: np.ndarray  # (g, n): the histogram of a node
    rows: np.ndarray  # (g, n, 4): ranges of `order`
    sums: np.ndarray  # (g, n, 2) int64: of g and h
    left_sums: np.ndarray  # (g, n, 2) int64: of the rows that would go left
    gain: np.ndarray  # (g, n): of the best split; 0: there is none
    feature: np.ndarray  # (g, n) int32
    bin: np.ndarray  # (g, n) int32: the last bin of numbers that goes left
    goes_left: np.ndarray  # (g, n, 256) bool: by bin, missing values included


@exact_jit
def pack_gradients(begin, end, p, rows, weight, price, output, scale, packed):
    """Fill `packed` with the gradients of rows begin..end of one grower.

    Parameters
    ----------
    begin, end
        Rows of the federation.
    p
        (rows, outputs): the probability of the second class, or of every class.
    rows
        (label, cell, unit) of each row.
    weight, price
        (unit, cell) and (unit, cell, class).
    output
        The output that the tree adds to.
    scale
        (2,): what one unit of g and of h is worth.
    packed
        (rows,): receives the result.
    """
    label, cell, unit = rows
    classes = price.shape[2]
    scale_g = 1.0 / scale[G]
    scale_h = 1.0 / scale[H]
    for i in range(begin, end):
        c = cell[i]
        u = unit[i]
        w = weight[u, c]
        if classes == 2:
            score = p[i, 0]
            h = score * (1.0 - score)
            g = w * (score - label[i]) + (price[u, c, 1] - price[u, c, 0]) * h
        else:
            score = p[i, output]
            mean = 0.0
            for k in range(classes):
                mean += price[u, c, k] * p[i, k]
            h = score * (1.0 - score)
            g = w * (score - (1.0 if label[i] == output else 0.0))
            g += score * (price[u, c, output] - mean)
        h *= w
        whole_g = np.int64(np.rint(g * scale_g))
        whole_h = max(np.int64(np.rint(h * scale_h)), np.int64(1 if w > 0 else 0))
        packed[i] = (whole_g << 32) + whole_h


@exact_jit
def sum_histograms(begin, end, columns, growers, work, first, carry):
    """Sum gradients by bin over a share of the fitted rows of some nodes.

    Parameters
    ----------
    begin, end
        The share, in positions that count through the rows of all nodes of `work`.
    columns, growers
        The data and the trees.
    work, first
        (w, 2) grower and node; (w + 1,) the position of the first row of each.
    carry
        (bins, 2): receives the sums of the first node if the share begins within its rows.

    Returns
    -------
    The position in `work` of the node that `carry` belongs to; -1: none.
    """
    carried = -1
    local = np.zeros(carry.shape[0], np.int64)
    places = columns.places
    order = growers.order
    packed = growers.packed
    at = np.searchsorted(first, begin, side="right") - 1
    while at < len(work) and first[at] < end:
        g = work[at, 0]
        n = work[at, 1]
        offsets = columns.offsets[growers.federation[g]]
        shift = growers.shift[g]
        low = growers.rows[g, n, LOW]
        start = low + max(begin - first[at], 0)
        stop = low + min(end, first[at + 1]) - first[at]
        out = growers.histograms[g, growers.slot[g, n]]
        if begin > first[at]:
            out = carry
            carried = at
        total = offsets[-1]
        out[:total] = 0
        for block in range(start, stop, BLOCK_ROWS):
            local[:total] = 0
            for i in range(block, min(block + BLOCK_ROWS, stop)):
                row = order[i]
                value = packed[shift + row]
                for f in range(places.shape[1]):
                    local[places[row, f]] += value
            for b in range(total):
                h = local[b] & 0xFFFFFFFF
                out[b, G] += (local[b] - h) >> 32
                out[b, H] += h
        at += 1
    return carried


@exact_jit
def find_splits(begin, end, columns, growers, pairs, rule):
    """Find the best split of the nodes of pairs begin..end.

    A row of `pairs` holds the grower, the node whose histogram was summed, and its sibling, whose
    histogram is the parent's less that of the first; -1: no sibling.
    """
    order = np.empty(257, np.int64)
    ratio = np.empty(257)
    for i in range(begin, end):
        g = pairs[i, 0]
        small = pairs[i, 1]
        large = pairs[i, 2]
        offsets = columns.offsets[growers.federation[g]]
        first = growers.histograms[g, growers.slot[g, small]]
        if large >= 0:
            second = growers.histograms[g, growers.slot[g, large]]
            for b in range(offsets[-1]):
                second[b, G] -= first[b, G]
                second[b, H] -= first[b, H]
            _search(columns, growers, g, large, offsets, second, rule, order, ratio)
        else:
            growers.sums[g, small] = 0
            for b in range(offsets[1]):
                growers.sums[g, small, G] += first[b, G]
                growers.sums[g, small, H] += first[b, H]
        _search(columns, growers, g, small, offsets, first, rule, order, ratio)


@inlined
def _score(g, h, l2):
    """How much a leaf lowers the loss: g^2 / (h + l2) / 2."""
    return 0.5 * g * g / (h + l2) if h + l2 > 0 else 0.0


@exact_jit
def _search(columns, growers, g, n, offsets, histogram, rule, order, ratio):
    """Set the best split of node n from its histogram."""
    total_g = growers.sums[g, n, G]
    total_h = growers.sums[g, n, H]
    unit_g = growers.scale[g, G]
    unit_h = growers.scale[g, H]
    before = _score(total_g * unit_g, total_h * unit_h, rule.l2)
    least = max(rule.min_child_weight, 0.5 * unit_h) / unit_h
    growers.gain[g, n] = SMALL
    for f in range(len(offsets) - 1):
        low = offsets[f]
        missing = offsets[f + 1] - 1
        missing_g = histogram[missing, G]
        missing_h = histogram[missing, H]
        if columns.categorical[f]:
            _search_categories(
                growers, g, n, f, histogram[low : missing + 1], rule, before, least, order, ratio
            )
            continue
        left_g = np.int64(0)
        left_h = np.int64(0)
        for b in range(low, missing):
            if histogram[b, H] == 0:
                continue
            left_g += histogram[b, G]
            left_h += histogram[b, H]
            for side in range(2):
                if side == 1 and missing_h == 0:
                    break
                lg = left_g + side * missing_g
                lh = left_h + side * missing_h
                rh = total_h - lh
                if lh < least or rh < least:
                    continue
                gain = (
                    _score(lg * unit_g, lh * unit_h, rule.l2)
                    + _score((total_g - lg) * unit_g, rh * unit_h, rule.l2)
                    - before
                )
                if gain > growers.gain[g, n]:
                    growers.gain[g, n] = gain
                    growers.feature[g, n] = f
                    growers.bin[g, n] = b - low
                    growers.left_sums[g, n, G] = lg
                    growers.left_sums[g, n, H] = lh
                    goes_left = side == 1 if missing_h > 0 else lh > rh
                    growers.goes_left[g, n, : b - low + 1] = True
                    growers.goes_left[g, n, b - low + 1 : missing - low] = False
                    growers.goes_left[g, n, missing - low] = goes_left
    if growers.gain[g, n] <= SMALL:
        growers.gain[g, n] = 0.0


@exact_jit
def _search_categories(growers, g, n, f, histogram, rule, before, least, order, ratio):
    """Try to divide categories, sorted by g / h: a prefix of the sorted ones goes left.

    Categories without rows in this node go where more weight goes.
    """
    unit_g = growers.scale[g, G]
    unit_h = growers.scale[g, H]
    l2 = rule.l2 + rule.category_l2
    bins = len(histogram)
    count = 0
    for b in range(bins):
        if histogram[b, H] > 0:
            weight = histogram[b, H] * unit_h + rule.category_smoothing
            value = histogram[b, G] * unit_g / weight
            k = count
            while k > 0 and ratio[k - 1] > value:
                ratio[k] = ratio[k - 1]
                order[k] = order[k - 1]
                k -= 1
            ratio[k] = value
            order[k] = b
            count += 1
    total_g = growers.sums[g, n, G]
    total_h = growers.sums[g, n, H]
    left_g = np.int64(0)
    left_h = np.int64(0)
    best = -1
    for k in range(count - 1):
        left_g += histogram[order[k], G]
        left_h += histogram[order[k], H]
        if left_h < least or total_h - left_h < least:
            continue
        gain = (
            _score(left_g * unit_g, left_h * unit_h, l2)
            + _score((total_g - left_g) * unit_g, (total_h - left_h) * unit_h, l2)
            - before
        )
        if gain > growers.gain[g, n]:
            growers.gain[g, n] = gain
            growers.feature[g, n] = f
            growers.bin[g, n] = -1
            growers.left_sums[g, n, G] = left_g
            growers.left_sums[g, n, H] = left_h
            best = k
    if best >= 0:
        left_is_larger = 2 * growers.left_sums[g, n, H] > total_h
        for b in range(bins):
            growers.goes_left[g, n, b] = left_is_larger and histogram[b, H] == 0
        for k in range(best + 1):
            growers.goes_left[g, n, order[k]] = True


@exact_jit
def split_rows(begin, end, columns, growers, splits):
    """Divide the rows of nodes begin..end between their children, in their order.

    A row of `splits` holds the grower, the node and its left child.
    """
    order = growers.order
    scratch = growers.scratch
    for i in range(begin, end):
        g = splits[i, 0]
        n = splits[i, 1]
        child = splits[i, 2]
        codes = columns.codes[growers.feature[g, n]]
        goes_left = growers.goes_left[g, n]
        for part in range(2):
            low = growers.rows[g, n, 2 * part]
            high = growers.rows[g, n, 2 * part + 1]
            left = low
            right = 0
            for k in range(low, high):
                row = order[k]
                is_left = goes_left[codes[row]]
                order[left] = row
                scratch[low + right] = row
                left += is_left
                right += not is_left
            order[left:high] = scratch[low : low + right]
            growers.rows[g, child, 2 * part] = low
            growers.rows[g, child, 2 * part + 1] = left
            growers.rows[g, child + 1, 2 * part] = left
            growers.rows[g, child + 1, 2 * part + 1] = high
        for k in range(2):
            growers.sums[g, child, k] = growers.left_sums[g, n, k]
            growers.sums[g, child + 1, k] = growers.sums[g, n, k] - growers.left_sums[g, n, k]


@exact_jit
def add_leaves(begin, end, growers, leaves, values, margins, outputs, output):
    """Add the values of leaves begin..end to the margins of their rows, fitted and others.

    `leaves` holds grower and node; ``(shift[g] + row) * outputs + output[g]`` is the position of a
    row in the flat `margins`.
    """
    order = growers.order
    for i in range(begin, end):
        g = leaves[i, 0]
        n = leaves[i, 1]
        for part in range(2):
            for k in range(growers.rows[g, n, 2 * part], growers.rows[g, n, 2 * part + 1]):
                margins[(growers.shift[g] + order[k]) * outputs + output[g]] += values[i]


@exact_jit
def set_probabilities(begin, end, margins, p):
    """Set p (rows, outputs) from the margins: a sigmoid of one output, a softmax of several."""
    outputs = margins.shape[1]
    for i in range(begin, end):
        if outputs == 1:
            p[i, 0] = 1.0 / (1.0 + np.exp(-margins[i, 0]))
            continue
        largest = margins[i].max()
        total = 0.0
        for k in range(outputs):
            p[i, k] = np.exp(margins[i, k] - largest)
            total += p[i, k]
        for k in range(outputs):
            p[i, k] /= total


@exact_jit
def sum_scores(begin, end, ranges, shift, fold, margins, p, cell, sums):
    """Sum scores and decisions by cell over the rows of units begin..end.

    Parameters
    ----------
    begin, end
        The units.
    ranges
        (u, 2): unit i has the rows ``low..high``.
    shift
        (u, 1 + folds): ``shift[i, m] + row`` is the place of a row in `margins` and `p` under the
        model m of its run.
    fold
        (u, 2): where the folds of a unit's rows begin in the flat array, and whether a row is
        decided by the model of its fold (1) or by model 0; and the flat array itself.
    margins, p
        (places, outputs).
    cell
        (rows,).
    sums
        (u, cell, class, 2): receives scores and decisions.
    """
    where, folds = fold
    outputs = margins.shape[1]
    for i in range(begin, end):
        for row in range(ranges[i, 0], ranges[i, 1]):
            m = 1 + folds[where[i, 0] + row] if where[i, 1] else 0
            at = shift[i, m] + row
            c = cell[row]
            best = 0
            if outputs == 1:
                score = np.rint(p[at, 0] * FINE) / FINE
                sums[i, c, 1, 0] += score
                sums[i, c, 0, 0] += 1.0 - score
                best = 1 if margins[at, 0] > 0 else 0
            else:
                for k in range(outputs):
                    sums[i, c, k, 0] += np.rint(p[at, k] * FINE) / FINE
                    if margins[at, k] > margins[at, best]:
                        best = k
            sums[i, c, best, 1] += 1.0


@exact_jit
def list_rows(low, high, other_low, other_high, fold, left_out, draws, share, order):
    """Fill `order` with the rows of a tree: those it is fitted to, then those it only scores.

    Parameters
    ----------
    low, high
        The training rows.
    other_low, other_high
        The test rows, which are only scored; an empty range for the models of folds.
    fold, left_out
        The fold of each training row, from `low` on, and the fold that is left out; -1: none.
    draws, share
        A number from 0 to 1 per training row, and the share of the rows to fit to.
    order
        Receives the rows.

    Returns
    -------
    The number of rows that the tree is fitted to, and the number of all rows.
    """
    fitted = 0
    for row in range(low, high):
        is_in = left_out < 0 or fold[row - low] != left_out
        if is_in and (share >= 1.0 or draws[row - low] < share):
            order[fitted] = row
            fitted += 1
    total = fitted
    for row in range(low, high):
        is_in = left_out < 0 or fold[row - low] != left_out
        if not (is_in and (share >= 1.0 or draws[row - low] < share)):
            order[total] = row
            total += 1
    for row in range(other_low, other_high):
        order[total] = row
        total += 1
    return fitted, total

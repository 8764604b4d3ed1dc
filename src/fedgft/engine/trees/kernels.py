"""Compiled parts of a booster. All sums over rows are sums of whole numbers.

A row's gradient g and hessian h are rounded to multiples of 2^-k once, before they are added. Sums
of whole numbers do not depend on their order, so a histogram is the same for one client with all
rows, for many clients in any order, and for any number of threads.

Both numbers of a row are packed into one: ``(g << 32) + h``. Sums of up to `BLOCK_ROWS` packed
numbers are added to the histogram, which holds g and h apart.

The rows of a tree are listed in `Tree.order`: first those that it is fitted to, then those that it
only scores. A node has a range of each.
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


class Tree(NamedTuple):
    """One tree while it grows, by node. Node 0 is the root; a right child follows the left one."""

    shift: int  # `packed[shift + row]` belongs to a row
    packed: np.ndarray  # gradients
    order: np.ndarray  # int32: the rows of all nodes
    scratch: np.ndarray  # as long as `order`
    scale: np.ndarray  # (2,): what one unit of g and of h is worth
    histograms: np.ndarray  # (slot, bins, 2) int64
    slot: np.ndarray  # (n,): the histogram of a node
    rows: np.ndarray  # (n, 4): ranges of `order`
    sums: np.ndarray  # (n, 2) int64: of g and h
    left_sums: np.ndarray  # (n, 2) int64: of the rows that would go left
    gain: np.ndarray  # (n,): of the best split; 0: there is none
    feature: np.ndarray  # (n,) int32: of the best split
    bin: np.ndarray  # (n,) int32: the last bin of numbers that goes left
    goes_left: np.ndarray  # (n, 256) bool: by bin, missing values included
    left: np.ndarray  # (n,) int32: the left child; 0 at leaves
    depth: np.ndarray  # (n,) int32


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
        (label, cell, unit, weight) of each row; no weights: all rows count the same.
    weight, price
        (unit, cell) and (unit, cell, class).
    output
        The output that the tree adds to.
    scale
        (2,): what one unit of g and of h is worth.
    packed
        (rows,): receives the result.
    """
    label, cell, unit, row_weight = rows
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
            h = score * (1.0 - score) * classes / (classes - 1.0)  # all outputs step at once
            g = w * (score - (1.0 if label[i] == output else 0.0))
            g += score * (price[u, c, output] - mean)
        if len(row_weight) > 0:
            g *= row_weight[i]
            w *= row_weight[i]
        h *= w
        whole_g = np.int64(np.rint(g * scale_g))
        whole_h = max(np.int64(np.rint(h * scale_h)), np.int64(1 if w > 0 else 0))
        packed[i] = (whole_g << 32) + whole_h


@exact_jit
def sum_rows(low, high, offsets, columns, tree, local, out):
    """Set `out`, (bins, 2), to the sums over the rows ``order[low:high]``."""
    places = columns.places
    order = tree.order
    packed = tree.packed
    shift = tree.shift
    total = offsets[-1]
    out[:total] = 0
    for block in range(low, high, BLOCK_ROWS):
        local[:total] = 0
        for i in range(block, min(block + BLOCK_ROWS, high)):
            row = order[i]
            value = packed[shift + row]
            for f in range(places.shape[1]):
                local[places[row, f]] += value
        for b in range(total):
            h = local[b] & 0xFFFFFFFF
            out[b, G] += (local[b] - h) >> 32
            out[b, H] += h


@exact_jit
def sum_histograms(begin, end, offsets, columns, tree, nodes, first, carry):
    """Sum gradients by bin over a share of the fitted rows of some nodes.

    Parameters
    ----------
    begin, end
        The share, in positions that count through the rows of all `nodes`.
    offsets, columns, tree
        The data and the tree.
    nodes, first
        The nodes, (w,), and the position of the first row of each, (w + 1,).
    carry
        (bins, 2): receives the sums of the first node if the share begins within its rows.

    Returns
    -------
    The position in `nodes` of the node that `carry` belongs to; -1: none.
    """
    carried = -1
    local = np.empty(carry.shape[0], np.int64)
    at = np.searchsorted(first, begin, side="right") - 1
    while at < len(nodes) and first[at] < end:
        n = nodes[at]
        low = tree.rows[n, LOW]
        start = low + max(begin - first[at], 0)
        stop = low + min(end, first[at + 1]) - first[at]
        if begin > first[at]:
            sum_rows(start, stop, offsets, columns, tree, local, carry)
            carried = at
        else:
            sum_rows(start, stop, offsets, columns, tree, local, tree.histograms[tree.slot[n]])
        at += 1
    return carried


@exact_jit
def find_splits(begin, end, offsets, columns, tree, pairs, rule):
    """Find the best split of the nodes of pairs begin..end.

    A pair is the node whose histogram was summed, and its sibling, whose histogram is the parent's
    less that of the first; -1: no sibling.
    """
    order = np.empty(257, np.int64)
    ratio = np.empty(257)
    for i in range(begin, end):
        _find_pair(pairs[i, 0], pairs[i, 1], offsets, columns, tree, rule, order, ratio)


@exact_jit
def _find_pair(small, large, offsets, columns, tree, rule, order, ratio):
    first = tree.histograms[tree.slot[small]]
    if large >= 0:
        second = tree.histograms[tree.slot[large]]
        for b in range(offsets[-1]):
            second[b, G] -= first[b, G]
            second[b, H] -= first[b, H]
        _search(columns, tree, large, offsets, second, rule, order, ratio)
    else:
        tree.sums[small] = 0
        for b in range(offsets[1]):
            tree.sums[small, G] += first[b, G]
            tree.sums[small, H] += first[b, H]
    _search(columns, tree, small, offsets, first, rule, order, ratio)


@inlined
def _score(g, h, l2):
    """How much a leaf lowers the loss: g^2 / (h + l2) / 2."""
    return 0.5 * g * g / (h + l2) if h + l2 > 0 else 0.0


@exact_jit
def _search(columns, tree, n, offsets, histogram, rule, order, ratio):
    """Set the best split of node n from its histogram."""
    total_g = tree.sums[n, G]
    total_h = tree.sums[n, H]
    unit_g = tree.scale[G]
    unit_h = tree.scale[H]
    before = _score(total_g * unit_g, total_h * unit_h, rule.l2)
    least = max(rule.min_child_weight, 0.5 * unit_h) / unit_h
    tree.gain[n] = SMALL
    for f in range(len(offsets) - 1):
        low = offsets[f]
        missing = offsets[f + 1] - 1
        missing_g = histogram[missing, G]
        missing_h = histogram[missing, H]
        if columns.categorical[f]:
            _search_categories(
                tree, n, f, histogram[low : missing + 1], rule, before, least, order, ratio
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
                if gain > tree.gain[n]:
                    tree.gain[n] = gain
                    tree.feature[n] = f
                    tree.bin[n] = b - low
                    tree.left_sums[n, G] = lg
                    tree.left_sums[n, H] = lh
                    goes_left = side == 1 if missing_h > 0 else lh > rh
                    tree.goes_left[n, : b - low + 1] = True
                    tree.goes_left[n, b - low + 1 : missing - low] = False
                    tree.goes_left[n, missing - low] = goes_left
    if tree.gain[n] <= SMALL:
        tree.gain[n] = 0.0


@exact_jit
def _search_categories(tree, n, f, histogram, rule, before, least, order, ratio):
    """Try to divide categories, sorted by g / h: a prefix of the sorted ones goes left.

    Categories without rows in this node go where more weight goes.
    """
    unit_g = tree.scale[G]
    unit_h = tree.scale[H]
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
    total_g = tree.sums[n, G]
    total_h = tree.sums[n, H]
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
        if gain > tree.gain[n]:
            tree.gain[n] = gain
            tree.feature[n] = f
            tree.bin[n] = -1
            tree.left_sums[n, G] = left_g
            tree.left_sums[n, H] = left_h
            best = k
    if best >= 0:
        left_is_larger = 2 * tree.left_sums[n, H] > total_h
        for b in range(bins):
            tree.goes_left[n, b] = left_is_larger and histogram[b, H] == 0
        for k in range(best + 1):
            tree.goes_left[n, order[k]] = True


@exact_jit
def split_rows(begin, end, columns, tree, splits):
    """Divide the rows of nodes begin..end; a row of `splits` is a node and its left child."""
    for i in range(begin, end):
        _split_node(columns, tree, splits[i, 0], splits[i, 1])


@exact_jit
def _split_node(columns, tree, n, child):
    """Divide the rows of node n between its children, in their order."""
    order = tree.order
    scratch = tree.scratch
    codes = columns.codes[tree.feature[n]]
    goes_left = tree.goes_left[n]
    for part in range(2):
        low = tree.rows[n, 2 * part]
        high = tree.rows[n, 2 * part + 1]
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
        tree.rows[child, 2 * part] = low
        tree.rows[child, 2 * part + 1] = left
        tree.rows[child + 1, 2 * part] = left
        tree.rows[child + 1, 2 * part + 1] = high
    tree.left[n] = child
    for k in range(2):
        tree.depth[child + k] = tree.depth[n] + 1
        tree.sums[child, k] = tree.left_sums[n, k]
        tree.sums[child + 1, k] = tree.sums[n, k] - tree.left_sums[n, k]


@exact_jit
def grow_tree(offsets, columns, tree, rule, max_depth, max_leaves):
    """Grow a tree from its root, in one thread; return the number of its nodes.

    `max_leaves` 0: no limit. `grow.Grower` makes the same steps in several threads.
    """
    local = np.empty(tree.histograms.shape[1], np.int64)
    order = np.empty(257, np.int64)
    ratio = np.empty(257)
    waiting = np.empty(len(tree.gain), np.int64)  # leaves that are worth a split
    root = tree.rows[0]
    sum_rows(root[LOW], root[HIGH], offsets, columns, tree, local, tree.histograms[0])
    _find_pair(0, -1, offsets, columns, tree, rule, order, ratio)
    first = 0
    last = 0
    used = 1
    slots = 1
    if tree.gain[0] > 0:
        waiting[0] = 0
        last = 1
    while first < last and (max_leaves == 0 or used < 2 * max_leaves - 1):
        if max_leaves > 0:  # the best one is next
            best = first
            for i in range(first + 1, last):
                gain = tree.gain[waiting[i]] - tree.gain[waiting[best]]
                if gain > 0 or (gain == 0 and waiting[i] < waiting[best]):
                    best = i
            n = waiting[best]
            for i in range(best, first, -1):
                waiting[i] = waiting[i - 1]
        else:
            n = waiting[first]
        first += 1
        child = used
        used += 2
        _split_node(columns, tree, n, child)
        if tree.depth[child] >= max_depth or used == 2 * max_leaves - 1:
            continue
        sizes = tree.rows[child : child + 2, HIGH] - tree.rows[child : child + 2, LOW]
        small = child + (sizes[1] < sizes[0])
        large = 2 * child + 1 - small
        tree.slot[large] = tree.slot[n]
        tree.slot[small] = slots
        slots += 1
        out = tree.histograms[tree.slot[small]]
        low = tree.rows[small, LOW]
        sum_rows(low, tree.rows[small, HIGH], offsets, columns, tree, local, out)
        _find_pair(small, large, offsets, columns, tree, rule, order, ratio)
        for k in range(child, child + 2):
            if tree.gain[k] > 0:
                waiting[last] = k
                last += 1
    return used


@exact_jit
def add_leaves(begin, end, tree, leaves, values, margins, first, step):
    """Add the values of leaves begin..end to the margins of their rows, fitted and others.

    ``first + row * step`` is the place of a row in the flat `margins`.
    """
    order = tree.order
    for i in range(begin, end):
        n = leaves[i]
        for part in range(2):
            for k in range(tree.rows[n, 2 * part], tree.rows[n, 2 * part + 1]):
                margins[first + order[k] * step] += values[i]


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
def sum_scores(begin, end, ranges, shift, fold, margins, p, rows, sums):
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
    rows
        The cell and the weight of each row; no weights: all rows count the same.
    sums
        (u, cell, class, 2): receives scores and decisions.
    """
    where, folds = fold
    cell, weight = rows
    outputs = margins.shape[1]
    for i in range(begin, end):
        for row in range(ranges[i, 0], ranges[i, 1]):
            m = 1 + folds[where[i, 0] + row] if where[i, 1] else 0
            at = shift[i, m] + row
            c = cell[row]
            count = weight[row] if len(weight) > 0 else 1.0
            best = 0
            if outputs == 1:
                score = np.rint(p[at, 0] * FINE) / FINE
                sums[i, c, 1, 0] += count * score
                sums[i, c, 0, 0] += count * (1.0 - score)
                best = 1 if margins[at, 0] > 0 else 0
            else:
                for k in range(outputs):
                    sums[i, c, k, 0] += count * (np.rint(p[at, k] * FINE) / FINE)
                    if margins[at, k] > margins[at, best]:
                        best = k
            sums[i, c, best, 1] += count


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

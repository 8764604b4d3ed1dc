"""A plain gradient booster for tests: loops over rows and thresholds, without histograms.

Gradients of a row with label y, probability p and price c, as in the documentation of `Trees`:

    g = p - y + c p (1 - p)        h = p (1 - p)

Softmax, with probabilities p_k and K classes: g_k = p_k - [y = k], h_k = p_k (1 - p_k) K / (K - 1).

A leaf has the value -G / (H + l2), and a split gains (S_left + S_right - S_node) / 2 with
S = G^2 / (H + l2), where G and H are sums over the rows of the node.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

SMALLEST_GAIN = 1e-6
TIE = 1e-9  # gains that differ by less are those of the same rows on each side


@dataclass
class Booster:
    """Margins of all rows, (n, outputs), and the columns of all splits, by tree."""

    margins: np.ndarray
    splits: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Rule:
    """Settings of a tree, as in `fedgft.models.Trees`."""

    max_depth: int = 3
    l2: float = 1.0
    min_child_weight: float = 1.0
    category_l2: float = 0.0
    category_smoothing: float = 1.0


def boost(
    x: np.ndarray,
    categorical: np.ndarray,
    labels: np.ndarray,
    fitted: np.ndarray,
    rule: Rule,
    *,
    trees: int,
    lr: float = 0.1,
    price: np.ndarray | float = 0.0,
    base_rows: np.ndarray | None = None,
) -> Booster:
    """Boost on the rows of the mask `fitted`, and return the margins of all rows.

    `price` is that of each row; `base_rows`, by default `fitted`, set the margins to start from.
    """
    classes = int(labels.max()) + 1
    started = fitted if base_rows is None else base_rows
    logs = np.log(np.bincount(labels[started], minlength=classes) + 0.5)
    base = logs[1:] - logs[:1] if classes == 2 else logs - logs.mean()
    made = Booster(np.tile(base, (len(x), 1)))
    for _ in range(trees):
        steps = []
        for g, h in gradients(made.margins, labels, price):
            splits: list[int] = []
            everyone = np.ones(len(x), bool)
            steps.append(grow(x, categorical, (g, h), everyone, fitted, rule, splits))
            made.splits.append(sorted(splits))
        made.margins = made.margins + lr * np.stack(steps, axis=1)
    return made


def gradients(
    margins: np.ndarray, labels: np.ndarray, price: np.ndarray | float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield gradient and hessian of every row, for each output."""
    outputs = margins.shape[1]
    if outputs == 1:
        p = 1 / (1 + np.exp(-margins[:, 0]))
        yield p - labels + price * p * (1 - p), p * (1 - p)
        return
    powers = np.exp(margins - margins.max(1, keepdims=True))
    for k, p in enumerate((powers / powers.sum(1, keepdims=True)).T):
        yield p - (labels == k), p * (1 - p) * outputs / (outputs - 1)


def grow(x, categorical, sums, inside, fitted, rule, splits, depth=0) -> np.ndarray:
    """Return the value of the leaf of every row of the mask `inside`, 0 for others."""
    g, h = (each[inside & fitted].sum() for each in sums)
    best = SMALLEST_GAIN
    chosen = None
    for f in range(x.shape[1] if depth < rule.max_depth else 0):
        divide = by_category if categorical[f] else by_number
        more = rule.category_l2 if categorical[f] else 0.0
        for left in divide(x[:, f], sums, inside & fitted, rule):
            part = [each[inside & fitted & left].sum() for each in sums]
            rest = g - part[0], h - part[1]
            if min(part[1], rest[1]) < max(rule.min_child_weight, 1e-9):
                continue
            gain = score(*part, rule.l2 + more) + score(*rest, rule.l2 + more)
            gain -= score(g, h, rule.l2)
            if gain > best + TIE:
                best = gain
                chosen = f, left
    if chosen is None:
        return np.where(inside, -g / (h + rule.l2) if h > 0 else 0.0, 0.0)
    f, left = chosen
    splits.append(f)
    sides = (inside & left, inside & ~left)
    parts = [grow(x, categorical, sums, side, fitted, rule, splits, depth + 1) for side in sides]
    return parts[0] + parts[1]


def score(g: float, h: float, l2: float) -> float:
    return g**2 / (h + l2) / 2


def by_number(column, sums, here, rule) -> Iterator[np.ndarray]:
    """Yield masks of the rows that go left: up to each value, missing values right, then left."""
    missing = np.isnan(column)
    for value in np.unique(column[here & ~missing]):
        left = column <= value  # False for NaN
        if (here & missing).any():
            yield left
            yield left | missing
        else:  # no missing value in this node: new ones go where more weight goes
            heavy = sums[1][here & left].sum() > sums[1][here & ~left].sum()
            yield left | missing if heavy else left


def by_category(column, sums, here, rule) -> Iterator[np.ndarray]:
    """Yield masks of the categories with the smallest g / (h + smoothing); missing is one too."""
    codes = np.where(np.isnan(column), np.inf, column)
    present = np.unique(codes[here])
    parts = [[each[here & (codes == code)].sum() for each in sums] for code in present]
    ratio = [g / (h + rule.category_smoothing) for g, h in parts]
    order = present[np.argsort(ratio, kind="stable")]
    for count in range(1, len(order)):
        left = np.isin(codes, order[:count])
        heavy = sums[1][here & left].sum() > sums[1][here & ~left].sum()
        yield left | ~np.isin(codes, present) if heavy else left

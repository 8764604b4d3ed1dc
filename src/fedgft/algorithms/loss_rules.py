"""Loss rules: how the loss of the clients' rows changes from round to round.

A penalty of the objective adds a price to the scores. A loss rule may change everything else that
the loss of a row depends on, by the label y and the group a of the row:

    weight[y, a] sum_c label[y, a, c] (-log p_c)  +  <price[y, a], p>  +  int_0^p curve[y, a]

Published methods are rules that compute these tables from what the clients report: sums of
decisions, sums of losses, or histograms of scores. A table has one entry per client of the cohort,
so a rule may act on the server (the same table for all clients) or at each client.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.metrics.metric import Price
from fedgft.sums import Sums
from fedgft.validation import format_value

SCORE_BINS = 100
"The number of bins of the scores in the clients' histograms."
REPORTS = ("losses", "logits", "histograms")
SMALLEST_SHARE = 1e-12


@dataclass(frozen=True)
class ClientReports:
    """What the clients of a cohort report of the model that they received.

    Parameters
    ----------
    sums
        The sums of each client, (u, ...).
    losses
        The summed cross-entropy by label and group, (u, c, k); None unless a slot reads it.
    logits
        The summed logit of the second class, relative to the first, by label and group, (u, c, k);
        None unless a slot reads it.
    histograms
        The number of rows by label, group and bin of the positive one of two scores,
        (u, c, k, SCORE_BINS); None unless a slot reads it.
    """

    sums: Sums
    losses: np.ndarray | None = None
    logits: np.ndarray | None = None
    histograms: np.ndarray | None = None

    def read_losses(self) -> np.ndarray:
        """Return the losses of a rule that asked for them."""
        assert self.losses is not None
        return self.losses

    def read_logits(self) -> np.ndarray:
        """Return the summed logits of a rule that asked for them."""
        assert self.logits is not None
        return self.logits

    def read_histograms(self) -> np.ndarray:
        """Return the histograms of a rule that asked for them."""
        assert self.histograms is not None
        return self.histograms


@dataclass(frozen=True)
class LossTerms:
    """The loss of the rows of each client of a cohort; see the module.

    Parameters
    ----------
    weights
        Weight of a row, (u, c, k), or 1.
    labels
        What cross-entropy fits a row to, (u, c, k, c), with the sum one; None: its label. Usually a
        distribution over the classes; a number outside [0, 1] adds a price of the logit.
    price
        Price of each score, (u, c, k, c), or 0.
    curve
        Price of the positive score by its bin, (u, c, k, SCORE_BINS); None: zero.
    """

    weights: np.ndarray | float = 1.0
    labels: np.ndarray | None = None
    price: np.ndarray | float = 0.0
    curve: np.ndarray | None = None

    def __add__(self, other: "LossTerms") -> "LossTerms":
        """Combine two rules: weights multiply, prices add up, and one of them may change labels."""
        labels = self.labels if other.labels is None else other.labels
        curve = self.curve if other.curve is None else other.curve
        if self.curve is not None and other.curve is not None:
            curve = self.curve + other.curve
        return LossTerms(self.weights * other.weights, labels, self.price + other.price, curve)

    def scaled(self, factor: np.ndarray) -> "LossTerms":
        """Return the loss of each client times its factor, (u,)."""
        wide = factor[:, None, None]
        curve = None if self.curve is None else wide[..., None] * self.curve
        price = wide[..., None] * self.price
        return LossTerms(wide * self.weights, self.labels, price, curve)


@runtime_checkable
class LossRule(Protocol):
    """Computes the loss of the clients' rows from what the clients report.

    `reads` says which reports it needs besides sums: "losses", "logits", "histograms", or several.
    `init` returns the state before the first round, from the number of rows (run, client, label,
    group); it raises a `FedgftError` where a strength does not fit the number of runs. `update`
    returns the next state from the reports of a cohort. It is called at the start of each round,
    also of the first one, whose model has not been trained. `terms` returns the loss of each client
    of the cohort.
    """

    @property
    def reads(self) -> tuple[str, ...]: ...

    def init(self, count: np.ndarray) -> Any: ...

    def update(self, state: Any, cohort: Cohort, reports: ClientReports) -> Any: ...

    def terms(self, state: Any, cohort: Cohort) -> LossTerms: ...


def check_rule(rule: Any) -> None:
    """Raise a `FedgftError` unless this is a loss rule that reads known reports."""
    if isinstance(rule, type) or not isinstance(rule, LossRule):
        text = f"must be rules with reads, init, update and terms, not {format_value(rule)}"
        raise FedgftError(text, field="loss_rules")
    unknown = [name for name in rule.reads if name not in REPORTS]
    if isinstance(rule.reads, str) or unknown:
        text = f"`reads` of {type(rule).__name__} must be a tuple of {', '.join(REPORTS)}"
        raise FedgftError(f"{text}, not {format_value(rule.reads)}", field="loss_rules")


def check_terms(rule: LossRule, terms: Any, price: Price) -> LossTerms:
    """Return the terms of a rule; raise a `FedgftError` where a table has a wrong shape.

    `price` (u, c, k, c) are the prices of the same clients.
    """
    name = f"terms of {type(rule).__name__}"
    if not isinstance(terms, LossTerms):
        text = f"{name} must be LossTerms, not {format_value(terms)}"
        raise FedgftError(text, field="loss_rules")
    rows = price.shape[:3]
    curve = (*rows, SCORE_BINS)
    wanted = {"weights": rows, "labels": price.shape, "price": price.shape, "curve": curve}
    for key, shape in wanted.items():
        table = getattr(terms, key)
        if isinstance(table, np.ndarray) and table.shape != shape:
            text = f"{key} in the {name} must have the shape {shape} (client, label, group and "
            text += f"rows without a group, ...), not {table.shape}"
            raise FedgftError(text, field="loss_rules")
    return terms


def per_run(value: float | np.ndarray, runs: int, axes: int = 0) -> np.ndarray:
    """Return a strength as an array (r, 1, ..., 1) with `axes` axes of length one."""
    return np.broadcast_to(np.asarray(value, np.float64), (runs,)).reshape(-1, *[1] * axes)


def shift_to_labels(price: Price) -> tuple[np.ndarray, np.ndarray]:
    """Return the row weights and labels for which cross-entropy minimizes error plus price.

    A decision for class c about a row of label y and group a costs

        cost_c = 1{c != y} + price[y, a, c].

    The mean cost of decisions is minimized by weighted classification: a row is fitted to class c
    with the weight  max_j cost_j - cost_c. With two classes and the price v of class 1, that is the
    weight |1 - 2y + v|, for class 1 if 1 - 2y + v < 0 and for class 0 otherwise. So a price on
    decisions, which have no gradient, becomes a convex loss of a linear model.

    Parameters
    ----------
    price
        (..., c, k, c): what a decision for a class costs a row, by label and group.

    Returns
    -------
    weights
        (..., c, k): the weight of a row.
    labels
        (..., c, k, c): the distribution over the classes that it is fitted to.
    """
    classes = price.shape[-1]
    cost = price + (1.0 - np.eye(classes))[:, None, :]
    mass = cost.max(-1, keepdims=True) - cost
    weights = mass.sum(-1)
    own = np.broadcast_to(np.eye(classes)[:, None, :], mass.shape)
    some = weights[..., None] > SMALLEST_SHARE
    labels = np.where(some, mass / np.where(some, weights[..., None], 1.0), own)
    return weights, labels

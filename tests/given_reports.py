"""Rows with given scores, counted by plain loops: what clients would report of a model."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from fedgft.algorithms import Cohort
from fedgft.algorithms.loss_rules import SCORE_BINS, ClientReports, LossRule, LossTerms
from fedgft.sums import Sums


@dataclass(frozen=True)
class Rows:
    """The rows of a federation; the group -1 is not recorded.

    `client`, `y` and `a` have one entry per row.
    """

    client: np.ndarray
    y: np.ndarray
    a: np.ndarray
    clients: int
    groups: int
    classes: int = 2

    def __len__(self) -> int:
        return len(self.y)

    @property
    def cohort(self) -> Cohort:
        sizes = np.bincount(self.client, minlength=self.clients)
        run = np.zeros(self.clients, np.int64)
        bounds = np.array([0, self.clients])
        return Cohort(run, np.arange(self.clients), sizes / len(self), bounds, full=True)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum values (n, ...) by client, label and group."""
        out = np.zeros((self.clients, self.classes, self.groups + 1, *values.shape[1:]))
        for i in range(len(self)):
            out[self.client[i], self.y[i], self.a[i]] += values[i]
        return out

    @property
    def count(self) -> np.ndarray:
        """Rows by run, client, label and group: what a rule starts with."""
        return self.total(np.ones(len(self)))[None]

    def report(self, probs: np.ndarray) -> ClientReports:
        """The reports of a model with these scores (n, c)."""
        decided = np.zeros_like(probs)
        bins = np.zeros((len(self), SCORE_BINS))
        losses = np.zeros(len(self))
        for i in range(len(self)):
            decided[i, probs[i].argmax()] = 1.0
            bins[i, min(int(probs[i, 1] * SCORE_BINS), SCORE_BINS - 1)] = 1.0
            losses[i] = -np.log(probs[i, self.y[i]])
        logits = np.log(probs[:, 1] / probs[:, 0])
        sums = Sums(self.count[0], self.total(probs), self.total(decided))
        return ClientReports(sums, self.total(losses), self.total(logits), self.total(bins))

    def mean(self, values: np.ndarray, **where: int) -> float:
        """The mean over the rows with these values of client, y and a."""
        chosen = [i for i in range(len(self)) if self._matches(i, where)]
        return sum(float(values[i]) for i in chosen) / len(chosen)

    def number(self, **where: int) -> int:
        """The number of rows with these values of client, y and a."""
        return sum(self._matches(i, where) for i in range(len(self)))

    def _matches(self, i: int, where: dict[str, int]) -> bool:
        return all(getattr(self, name)[i] == value for name, value in where.items())


def draw_rows(groups: int = 2, classes: int = 2, *, missing: bool = False, seed: int = 0) -> Rows:
    """120 rows of three clients, with every cell at every client and a few without a group.

    With `missing`, the last client lacks group 0.
    """
    rng = np.random.default_rng(seed)
    cells = list(product(range(3), range(classes), range(-1, groups)))
    rest = rng.integers(0, [3, classes, groups], (120 - len(cells), 3))
    client, y, a = np.concatenate((cells, rest)).T
    if missing:
        a = np.where((client == 2) & (a == 0), 1, a)
    return Rows(client, y, a, 3, groups, classes)


def draw_scores(rows: Rows, rounds: int = 4, *, seed: int = 1) -> list[np.ndarray]:
    """One array of scores per model; groups and labels differ in them."""
    rng = np.random.default_rng(seed)
    made = []
    for t in range(rounds):
        logits = rng.normal(0, 1.2, (len(rows), rows.classes))
        logits[:, 1] += 0.8 * (rows.y == 1) - 1.8 * (rows.a == 0) + 0.1 * t
        expd = np.exp(logits)
        made.append(expd / expd.sum(1, keepdims=True))
    return made


def follow(rule: LossRule, rows: Rows, scores: list[np.ndarray]) -> list[LossTerms]:
    """The terms after the reports of each model in turn."""
    state = rule.init(rows.count)
    found = []
    for probs in scores:
        state = rule.update(state, rows.cohort, rows.report(probs))
        found.append(rule.terms(state, rows.cohort))
    return found


def public_cells(means: list[float], right: list[float] | None = None):
    """One client with 900, 500, 150 and 450 rows of (label, group) (0,0), (0,1), (1,0), (1,1).

    The public programs that `test_public_code.py` names were run on these counts. `means` are mean
    losses by cell and `right` the shares of right decisions. Returns the counts that a rule starts
    with, the cohort and the report.
    """
    count = np.array([[900.0, 500.0, 0.0], [150.0, 450.0, 0.0]])
    losses = np.zeros((2, 3))
    losses[:, :2] = count[:, :2] * np.reshape(means, (2, 2))
    accuracy = np.ones((2, 3))
    accuracy[:, :2] = np.reshape([1.0] * 4 if right is None else right, (2, 2))
    positive = np.stack((1 - accuracy[0], accuracy[1])) * count
    decision = np.stack((count - positive, positive), axis=-1)
    sums = Sums(count[None], decision[None], decision[None])
    one = np.zeros(1, np.int64)
    cohort = Cohort(one, one, np.ones(1), np.array([0, 1]), full=True)
    return count[None, None], cohort, ClientReports(sums, losses[None])

"""The two protocols: `paper` repeats the published experiments, `heldout` is the one to trust.

| | `paper` | `heldout` |
|---|---|---|
| test rows | 30% at random, also among the clients' rows | 30%, taken out before partitioning |
| features | raw | standardized by federated sums over training rows |
| start | every client its own in round 1 | one common start |
| client Adam | state kept, batches fixed once | m reset each round, v shared; reshuffled |
| learning rate | 0.002 constant | cosine, start chosen on an inner split |
| rounds | 20 | 50; of fedgft-control 100 or 200 where 50 miss the target |
| trees | none | 100 of learning rate 0.1; of fedgft-control 200 where 100 miss the target |
| depth of trees | none | 2, 4 or 6, chosen on an inner split |
| strength | lam 20, beta 1 | chosen on an inner split |
| target of fedgft-control | 0 | 0 |
| FairFed | the authors' code | as published |
| headline gap | soft, on the federation's rows | hard, on held-out rows, with interval and floor |

A federation is checked before anything is trained on it: `check_groups`, `contradiction`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedgft.algorithms import METHODS, Algorithm, get_method, with_base
from fedgft.algorithms.weightings import FairFedRule
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.partition import TestRows
from fedgft.engine import Settings
from fedgft.errors import FedgftError
from fedgft.formatting import join_names
from fedgft.metrics import Kind, MappedMetric, Metric, bind_metric
from fedgft.settings import PriceOn, Spread
from fedgft.validation import check_choice

LAMS = (1.0, 10.0, 20.0, 50.0)
BETAS = (0.1, 1.0, 10.0)
RATES = (0.005, 0.01, 0.02, 0.03)
DEPTHS = (2, 4, 6)
MORE_RATES = (0.001, 0.002, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Protocol:
    """How the cells of a study are trained and tested.

    If `lr`, `lam`, `beta`, `target` or `max_depth` holds several values, each replicate chooses one
    of them on an inner split of its training rows.

    Parameters
    ----------
    name
        "paper" or "heldout".
    test
        Whether test rows are disjoint from the clients' rows.
    features
        Whether features are standardized.
    settings
        Settings of the simulator.
    lr
        Local learning rates.
    lam
        Strengths of fedgft, lft, and methods without candidates of their own.
    beta
        Strengths of fairfed.
    fairfed
        The rule of `FairFed`.
    headline
        Which gap tables and figures show first: on which rows, of scores or of decisions.
    target
        Targets of fedgft-control.
    max_depth
        Depths of trees; empty: that of the model.
    more_lr
        Rates outside `lr`. A replicate whose best rate is the lowest or the highest of `lr` tries
        the rates beyond it, nearest first, until a rate is no better than the one before.
    round_factors
        A replicate of fedgft-control that misses its target is trained again from the start with
        this many times the rounds, in this order, until it meets the target.
    penalty, spread
        J and F of fedgft and lft, see `LinearizedPenalty`.
    local_target
        The target of each client's own gap, of fedgft-control; None: local gaps are not limited.
    control, pick
        Which gap fedgft-control measures, and the share of rounds it picks from, see `Controller`.
    price_on
        What the prices of fedgft-control are paid for, see `Objective`.
    base, mu, server_lr
        The federated algorithm that the methods extend, see `with_base`.
    train_rows, test_rows
        Rows drawn in each replicate; None: all.
    own_test
        Whether test rows that the data set defines are used as such.
    fixed
        The strengths that hold for every method, also where a method has candidates of its own.
    """

    name: str
    test: TestRows
    features: Literal["raw", "standardized"]
    settings: Settings
    lr: tuple[float, ...]
    lam: tuple[float, ...]
    beta: tuple[float, ...]
    fairfed: FairFedRule
    headline: tuple[Literal["federation", "test"], Kind]
    target: tuple[float, ...] = (0.0,)
    max_depth: tuple[int, ...] = ()
    more_lr: tuple[float, ...] = ()
    round_factors: tuple[int, ...] = ()
    penalty: str = "half"
    spread: Spread = "range"
    local_target: float | None = None
    control: Kind = "hard"
    price_on: PriceOn = "scores"
    pick: float = 0.6
    base: str = "fedavg"
    mu: float | None = None
    server_lr: float | None = None
    train_rows: int | None = None
    test_rows: int | None = None
    own_test: bool = True
    fixed: tuple[str, ...] = ()

    def strength(self, method: str) -> tuple[float, ...]:
        """The candidates for the strength of a method; only 0 if it has no strength."""
        row = METHODS[method]
        if row.strength is None:
            return (0.0,)
        return (
            row.grid if row.grid and row.strength not in self.fixed else getattr(self, row.strength)
        )

    def algorithm(self, method: str, metric: Metric, strength: float | np.ndarray) -> Algorithm:
        """The method with the options and the base of this protocol.

        `strength`: one number, or one per run.
        """
        algorithm = get_method(
            method,
            metric,
            strength,
            penalty=self.penalty,
            spread=self.spread,
            rule=self.fairfed,
            kind=self.control,
            pick=self.pick,
            local_target=self.local_target,
            price_on=self.price_on,
        )
        return with_base(algorithm, self.base, mu=self.mu, server_lr=self.server_lr)


PROTOCOLS: dict[str, Protocol] = {
    "paper": Protocol(
        name="paper",
        test="overlap",
        features="raw",
        settings=Settings(
            rounds=20, schedule="constant", state="keep", start="own", batches="fixed"
        ),
        lr=(0.002,),
        lam=(20.0,),
        beta=(1.0,),
        fairfed="authors",
        headline=("federation", "soft"),
    ),
    "heldout": Protocol(
        name="heldout",
        test="disjoint",
        features="standardized",
        settings=Settings(rounds=50, state="shared", schedule="cosine"),
        lr=RATES,
        lam=LAMS,
        beta=BETAS,
        fairfed="subtract",
        headline=("test", "hard"),
        more_lr=MORE_RATES,
        round_factors=(2, 4),
    ),
}
"heldout is what to trust; paper is how the published numbers were made."


def get_protocol(
    name: str, *, images: bool = False, trees: bool = False, data: str = ""
) -> Protocol:
    """A protocol by its name.

    Parameters
    ----------
    name
        A key of `PROTOCOLS`.
    images
        Whether the protocol is for images instead of tables.
    trees
        Whether it is for the model "trees".
    data
        Name of the data set. From "celeba" each replicate draws as many rows as in the paper.
    """
    found = PROTOCOLS[check_choice("protocol", name, tuple(PROTOCOLS))]
    found = _for_images(found) if images else found
    found = _for_trees(found) if trees else found
    if data != "celeba":
        return found
    # The paper draws both parts at random from all images, so they share people.
    return replace(found, train_rows=10_000, test_rows=6_000, own_test=name != "paper")


def _for_images(protocol: Protocol) -> Protocol:
    """20 rounds of batches of 64 from a common start, with disjoint test rows.

    A common start is needed because the mean of networks with different starts is noise. There is
    one value of each strength and of the rounds, because trying several takes eight times as long.
    """
    is_paper = protocol.name == "paper"
    augment = "none" if is_paper else "flip"
    settings = replace(protocol.settings, rounds=20, batch_size=64, start="common", augment=augment)
    return replace(
        protocol,
        settings=settings,
        test="disjoint",
        lr=(0.0005 if is_paper else 0.001,),
        lam=(20.0 if is_paper else 10.0,),
        beta=(1.0,),
        round_factors=(),
    )


def _for_trees(protocol: Protocol) -> Protocol:
    """100 trees with the learning rate 0.1, on features as they are; the depth is chosen."""
    if protocol.name == "paper":
        text = "paper is for linear models and networks: leave it out, or choose another model"
        raise FedgftError(text, field="protocol", kind="conflict")
    settings = replace(protocol.settings, rounds=100)
    changed = {"lr": (0.1,), "max_depth": DEPTHS, "more_lr": (), "round_factors": (2,)}
    return replace(protocol, settings=settings, features="raw", **changed)


EQUAL_SHARES = 0.01  # shares of positives that differ by less count as equal
CONSTRAINED_RATES = {  # by metric: the rates that it wants equal in all groups
    "sp": ("selection rates",),
    "eop": ("true-positive rates",),
    "fpr": ("false-positive rates",),
    "eo": ("true-positive rates", "false-positive rates"),
    "predictive-parity": ("precision",),
    "acc": (),
}


def check_groups(federation: Federation, metric: Metric) -> None:
    """Raise `FedgftError` unless every group has a training row that the metric needs.

    The message names the groups that have none.
    """
    data = federation.dataset
    names = data.group_names
    metric = bind_metric(metric, data.axis)
    if len(names) < 2:
        found = f"only {names[0]!r}" if names else "none"
        text = f"{data.name}: fairness compares groups, and the column of `group` has {found}"
        raise FedgftError(text, kind="data")
    if metric.columns and not _find_comparable(data, federation.rows).any():
        column = ", ".join(metric.columns)
        text = f"{data.name}: no value of {column} has rows of two groups: nothing is comparable"
        raise FedgftError(text, field="metric", kind="data")
    empty = join_names([repr(names[g]) for g in empty_groups(federation, metric)])
    if empty:
        raise FedgftError(
            f"{data.name}: no training row that {metric.title} asks for in group {empty}; "
            "`exclude_empty` leaves such groups out",
            kind="data",
        )


def empty_groups(federation: Federation, metric: Metric) -> list[int]:
    """Groups without a training row of some event of the metric.

    An event that depends on the decision, such as that of predictive parity, is not known before
    training and is not considered.
    """
    data = federation.dataset
    classes = len(data.classes)
    rows = federation.rows[data.groups[federation.rows] >= 0]
    count = np.zeros((classes, len(data.group_names)))
    np.add.at(count, (data.labels[rows], data.groups[rows]), 1)
    if isinstance(metric, MappedMetric) and metric.base is not None:
        metric = metric.base
    proper = metric.proper_conditions(classes)
    events = np.einsum("vy,yg->vg", metric.affine(classes)[1][1], count)
    empty = (count.sum(0) == 0) | (events[proper] == 0).any(0)
    return np.flatnonzero(empty).tolist()


def _find_comparable(data: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return which strata have rows of two groups among these, (strata,)."""
    assert data.strata is not None
    count = np.zeros((len(data.strata_names), len(data.group_names)), int)
    known = rows[data.groups[rows] >= 0]
    np.add.at(count, (data.strata[known], data.groups[known]), 1)
    return (count > 0).sum(1) > 1


def describe_lone_strata(data: Dataset, metric: Metric) -> str | None:
    """A sentence that names the strata with rows of one group only; None if there are none."""
    if not metric.columns or data.strata is None:
        return None
    lone = np.flatnonzero(~_find_comparable(data, np.arange(len(data))))
    if not len(lone):
        return None
    names = join_names([repr(data.strata_names[s]) for s in lone])
    return (
        f"{metric.name}: rows of one group only, so no comparison, where {data.given[0]} is {names}"
    )


def without_groups(dataset: Dataset, groups: Sequence[int]) -> Dataset:
    """The data set with the given groups marked as not recorded, and a note about it."""
    names = dataset.group_names
    kept = [g for g in range(len(names)) if g not in set(groups)]
    number = np.full(len(names) + 1, -1)  # -1 stays -1
    number[kept] = np.arange(len(kept))
    empty = ", ".join(repr(names[g]) for g in groups)
    note = f"{dataset.name}: left out of the comparison, for want of training rows: {empty}"
    remaining = tuple(names[g] for g in kept)
    notes = (*dataset.notes, note)
    return replace(dataset, groups=number[dataset.groups], group_names=remaining, notes=notes)


def contradiction(dataset: Dataset, metric: Metric) -> str | None:
    """A sentence on why the parts of a combined metric cannot all be zero; None if they can.

    A decision between two classes has two rates in each group, the true-positive and the
    false-positive rate; with the share of positives b they determine the selection rate and the
    precision. If any three of these four rates are equal in groups with different b, the decision
    accepts no negative, or accepts no positive, or does not depend on the label. (Equal accuracy
    may follow from them.) Metrics that a user has added are not considered.
    """
    if len(dataset.classes) != 2:
        return None
    demands = {name for part, _ in metric.parts for name in CONSTRAINED_RATES.get(part.name, ())}
    if len(demands) <= 2:
        return None
    groups = (dataset.groups == g for g in range(len(dataset.group_names)))
    share = [dataset.labels[rows].mean() for rows in groups if rows.any()]
    if np.ptp(share) < EQUAL_SHARES:
        return None
    return (
        f"{metric.name} asks for equal {', '.join(sorted(demands))} at once, and the groups differ "
        f"in how many are positive ({100 * min(share):.0f}% to {100 * max(share):.0f}%): two rates "
        "of a decision cannot meet three demands, unless it accepts no negative or ignores the "
        "label. Training will end, with a compromise; a smaller weight "
        "(0.5*predictive-parity) gives way first"
    )

"""Decision rules for the scores of a model over a federation in memory."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.metrics.metric import Metric
from fedgft.rules.adjustment import find_rule
from fedgft.rules.blind import fit_blind_rule
from fedgft.rules.counts import ALL_SITES, DECISION_BINS, RuleCounts
from fedgft.rules.decision_rule import DecisionRule
from fedgft.site_sums import Group, MeasurementSpec

RuleKind = Literal["thresholds", "blind", "derived"]
"A threshold by group; a threshold that bends with the columns; decisions changed by a coin."
RULE_KINDS = get_args(RuleKind)
BINS = 400  # of the scores: finer than in files, because they stay in memory
FIXED_KEY = "00" * 32  # of the coins in studies, which are to be repeatable
RowGroups = tuple[Sequence[str], Sequence[Group], np.ndarray]
"The attributes, the groups, and (n,) the index of each row's group."


def fit_rule(
    federation: Federation,
    scores: np.ndarray,
    kind: RuleKind,
    *,
    target: Mapping[Metric, float],
    local: Mapping[Metric, float] | None = None,
    per_site: bool = False,
    row_groups: RowGroups | None = None,
    key: str | None = None,
) -> DecisionRule:
    """Return the best rule on the clients' rows, or the nearest one if none meets the targets.

    Parameters
    ----------
    federation
        The rows of all clients.
    scores
        (n,) The probability of the positive class for each row of the data set.
    kind
        The kind of rule.
    target
        The largest gap over all rows, by metric.
    local
        The largest gap at every client, by metric; None: no limit.
    per_site
        Whether each client has thresholds of its own.
    row_groups
        The groups of the rows. By default, those of the data set, with the attribute "group".
    key
        The key of the coins. By default it is drawn at random.
    """
    if kind == "blind":
        attribute = "group" if row_groups is None else " & ".join(row_groups[0])
        return fit_blind_rule(
            federation, scores, target=dict(target), attribute=attribute, nearest=True
        )
    by_site = per_site or bool(local)
    decisions = kind == "derived"
    counts = count_federation(federation, scores, row_groups, by_site=by_site, decisions=decisions)
    return find_rule(
        counts,
        target,
        local or {},
        groups=" & ".join(counts.spec.attributes),
        per_site=per_site,
        randomized=decisions,
        nearest=True,
        key=key,
    )


def count_federation(
    federation: Federation,
    scores: np.ndarray,
    row_groups: RowGroups | None = None,
    *,
    by_site: bool = False,
    decisions: bool = False,
    bins: int = BINS,
) -> RuleCounts:
    """Return the counts of the clients' rows that a rule is fitted on.

    The parameters are those of `fit_rule`; `decisions` counts decisions instead of scores.
    """
    data = federation.dataset
    rows = federation.rows
    if row_groups is None:
        names = [*((name,) for name in data.group_names), (None,)]
        row_groups = (("group",), names, data.groups)  # -1 is the last: not recorded
    attributes, groups, codes = row_groups
    places = np.where(codes[rows] < 0, len(groups) + codes[rows], codes[rows])
    positive = scores[rows] >= 0.5
    if decisions:
        bins = DECISION_BINS
        at = positive.astype(int)
    else:
        at = np.searchsorted(np.arange(1, bins) / bins, scores[rows], side="right")
    site = np.zeros(len(rows), int)
    sites = (ALL_SITES,)
    if by_site:
        site = np.repeat(np.arange(federation.num_clients), federation.sizes)
        sites = tuple(f"client {k}" for k in range(federation.num_clients))
        if data.client_names:
            sites = tuple(data.client_names[int(k)] for k in federation.keys)
    shape = (len(sites), len(groups), 2, bins)
    flat = np.ravel_multi_index((site, places, data.labels[rows], at), shape)
    counts = np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape).astype(float)
    decided = np.zeros(shape[:3])
    np.add.at(decided, (site, places, data.labels[rows]), positive)
    return RuleCounts(
        spec=MeasurementSpec(data.classes, tuple(attributes), scored=not decisions, bins=bins),
        reads="decision" if decisions else "score",
        sites=sites,
        groups=tuple(groups),
        counts=counts,
        decided=decided,
        noise=None,
        shifts=None,
        digests={},
    )

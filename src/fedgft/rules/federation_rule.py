"""Decision rules for the scores of a model over a federation in memory."""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.metrics.metric import Metric
from fedgft.rules.adjustment import find_rule
from fedgft.rules.blind import fit_blind_rule
from fedgft.rules.counts import RowGroups, count_federation
from fedgft.rules.decision_rule import DecisionRule

RuleKind = Literal["thresholds", "blind", "derived"]
"A threshold by group; a threshold that bends with the columns; decisions changed by a coin."
RULE_KINDS = get_args(RuleKind)
FIXED_KEY = "00" * 32  # of the coins in studies, which are to be repeatable


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

"""Decision rules for the scores of a model over a federation in memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.metrics.metric import Metric
from fedgft.rules.adjustment import find_rule
from fedgft.rules.blind import fit_blind_rule
from fedgft.rules.counts import RowGroups, count_federation
from fedgft.rules.decision_rule import Acceptance, Cell, DecisionRule
from fedgft.rules.fedfact_rule import fit_fedfact_rule
from fedgft.rules.logofair import fit_logofair

OwnKind = Literal["thresholds", "blind", "derived"]
"A threshold by group; a threshold that bends with the columns; decisions changed by a coin."
RuleKind = Literal["thresholds", "blind", "derived", "logofair", "fedfact-post", "cost-lp"]
"Our own kinds, and published ones."
OWN_KINDS = get_args(OwnKind)
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

    The published kinds "logofair" and "fedfact-post" end where their iterations end. "cost-lp"
    (Duan et al., AISTATS 2025) is "derived" with `per_site`.

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
    if kind in ("logofair", "fedfact-post"):
        fit = fit_logofair if kind == "logofair" else fit_fedfact_rule
        options = {"local": local, "per_site": per_site, "row_groups": row_groups}
        return fit(federation, scores, target=target, **options)
    decisions = kind in ("derived", "cost-lp")
    per_site = per_site or kind == "cost-lp"
    by_site = per_site or bool(local)
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


def merge_sites(rule: DecisionRule, federation: Federation, decided: np.ndarray) -> DecisionRule:
    """Return the rule for people of an unknown site: the mean of the sites' rules.

    A person is of each site with the share that it has among the clients' rows of the same group
    and decision, so that the rates on these rows stay the same.

    Parameters
    ----------
    rule
        A rule by site that changes decisions, by the attribute "group".
    federation
        The rows of all clients.
    decided
        (n,) The decision about each row of the data set, before the rule.
    """
    data = federation.dataset
    counts = count_federation(federation, decided.astype(float), by_site=True, decisions=True)
    rows = counts.counts.sum(2)  # (site, group, decision)
    cells: dict[Cell, Acceptance] = {}
    for g, name in enumerate(data.group_names):
        known = [s for s, site in enumerate(counts.sites) if (site, (name,)) in rule.cells]
        if not known:
            continue
        chances = np.stack(
            [rule.cells[counts.sites[s], (name,)](np.array([0.0, 1.0])) for s in known]
        )
        weights = rows[known, g]
        weights = np.where(weights.sum(0) > 0, weights, rows[known, g].sum(-1, keepdims=True))
        mean = (chances * weights).sum(0) / weights.sum(0)
        cells[None, (name,)] = Acceptance((0.5,), tuple(np.clip(mean, 0.0, 1.0).tolist()))
    return replace(rule, cells=cells)

"""Decision rules in studies: FedAvg's scores with a rule that keeps a target.

The rule of each replicate is fitted on its clients' rows and judged on its test rows, as a trained
model is. A randomized rule counts each row with its probability of a positive decision. Test rows
are of no client, so a rule by client counts them with the mean of the clients' rules.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine import predict_proba
from fedgft.engine.select_best import GAP_TOLERANCE
from fedgft.errors import FedgftError
from fedgft.formatting import format_points, join_names
from fedgft.metrics import Metric
from fedgft.metrics.functions import is_collapsed
from fedgft.rules.blind import find_group_columns
from fedgft.rules.counts import name_clients
from fedgft.rules.decision_rule import DecisionRule
from fedgft.rules.federation_rule import FIXED_KEY, RULE_KINDS, RuleKind, fit_rule, merge_sites
from fedgft.study.results import GAP_OF, Row, cell_columns, decision_columns, mean_sd, measure, row
from fedgft.study.study import Result, Study
from fedgft.sums import Sums, stack

RULE_METHODS = RULE_KINDS
"FedAvg with a decision rule: our kinds, and published ones."
LINEAR = {"logofair", "fedfact-post"}  # which take no difference of accuracies
SumsPair = tuple[Sums, Sums]  # over the clients' rows, over the test rows


def check_rules(study: Study, metric: Metric, methods: Sequence[str]) -> None:
    """Raise a `FedgftError` if a rule among the methods cannot be fitted on this study."""
    data = study.dataset
    wanted = [name for name in methods if name in RULE_METHODS]
    if not wanted:
        return
    if data.row_weights is not None:
        text = f"{wanted[0]} counts rows, and these have weights (`weight`): leave one of them out"
        raise FedgftError(text, field="methods", kind="unsupported")
    if data.axis is not None:
        text = f"{wanted[0]} knows neither strata (`metric` with |) nor randomized groups"
        raise FedgftError(text, field="methods", kind="unsupported")
    if metric.every_threshold:
        text = f"{metric.name} is for training with fedgft; {wanted[0]} has a threshold of its own"
        raise FedgftError(text, field="metrics", kind="unsupported")
    if len(data.classes) != 2:
        text = f"{wanted[0]} decides between two classes, the label has {len(data.classes)}"
        raise FedgftError(text, field="methods", kind="unsupported")
    parts = [part for part, _ in metric.parts] or [metric]
    improper = [part.name for part in parts if not part.proper()]
    if improper and (len(parts) > 1 or wanted != ["thresholds"]):
        text = f"{wanted[-1]} takes sp, eop, eo, fpr and acc, not {improper[0]}"
        raise FedgftError(text, field="methods", kind="unsupported")
    if linear := [name for name in wanted if name in LINEAR and "acc" in {p.name for p in parts}]:
        text = f"{linear[0]} takes sp, eop, eo and fpr, not acc"
        raise FedgftError(text, field="methods", kind="unsupported")
    if "logofair" in wanted and len(data.group_names) != 2:
        text = f"logofair takes two groups, these rows have {len(data.group_names)}"
        text += f" ({join_names(data.group_names)}); fedfact-post takes any number"
        raise FedgftError(text, field="methods", kind="unsupported")
    if "blind" not in wanted:
        return
    if data.images:
        raise FedgftError("blind needs a table, not images", field="methods", kind="unsupported")
    if telling := find_group_columns(data):
        column = telling[0].partition("=")[0]
        text = (
            f"blind: the column '{column}' tells the group of every row, and a group-blind rule "
            "must not read it; leave it out (of public data, `fedgft data get` writes a table)"
        )
        raise FedgftError(text, field="methods", kind="data")


def apply_rules(
    study: Study, fedavg: Result, kind: str, metric: Metric, targets: Sequence[float]
) -> list[SumsPair]:
    """For each target, the sums (replicate, ...) of FedAvg's scores under the best rule.

    Parameters
    ----------
    study, fedavg
        The study, and its result for FedAvg.
    kind
        The kind of rule, one of `RULE_METHODS`.
    metric
        The metric whose gap is limited.
    targets
        The largest gaps on the clients' rows.
    """
    history = fedavg.history
    parts = [part for part, _ in metric.parts] or [metric]
    runs = []
    for i, federation in enumerate(fedavg.federations):
        every = np.arange(len(federation.dataset))
        scores = predict_proba(federation, study.model, history.params[i], every)[:, 1]
        fitted = scores.copy()
        if history.scores is not None:  # of models that have not seen the row
            fitted[federation.rows] = history.scores[i][:, 1]
        if not np.isfinite(scores).all():  # the run has diverged
            groups = len(federation.dataset.group_names) + 1
            lost = _sums_of_decisions(np.full((2, groups, 2), np.nan))
            runs.append([(lost, lost)] * len(targets))
            continue
        pairs = []
        for target in targets:
            rule = fit_rule(
                federation,
                fitted,
                cast("RuleKind", kind),
                target=dict.fromkeys(parts, target),
                key=FIXED_KEY,
            )
            anywhere = rule
            if rule.per_site:
                anywhere = merge_sites(rule, federation, fitted >= 0.5)
            pairs.append(
                (
                    _count(federation, federation.rows, rule, fitted),
                    _count(federation, federation.test, anywhere, scores),
                )
            )
        runs.append(pairs)
    stacked = []
    for pairs in zip(*runs, strict=True):
        clients, test = (stack(list(each)) for each in zip(*pairs, strict=True))
        stacked.append((clients, test))
    return stacked


def rule_row(study: Study, fedavg: Result, kind: str, metric: Metric) -> Row:
    """The row of a rule for the study's target, with the columns of `results.row`."""
    target = study.protocol.target[0]
    ((clients, test),) = apply_rules(study, fedavg, kind, metric, [target])
    gap = clients.gap(metric, "hard")
    within = gap <= target + GAP_TOLERANCE
    base = row(study, replace(fedavg, metric=metric))
    return {
        **base,
        **cell_columns(study, fedavg.alpha, kind, metric),
        **mean_sd(measure(metric, clients, test)),
        **decision_columns(study.dataset, metric, clients, test),
        "strength": target,
        "target": target,
        "target_of": GAP_OF["hard"],
        "reached": int(within.sum()),
        "reached_collapsed": int((within & is_collapsed(clients)).sum()),
        "missed_because": None,
    }


def describe_rule_row(found: Row) -> str:
    """One sentence: in how many replicates a rule kept its target."""
    name = METHOD_LABELS[found["method"]]
    limit = format_points(found["target"])
    return (
        f"{name}: a gap of at most {limit} points on the clients' rows in {found['reached']} of "
        f"{found['seeds']} replicates."
    )


def _count(
    federation: Federation, rows: np.ndarray, rule: DecisionRule, scores: np.ndarray
) -> Sums:
    """The sums of decisions about some rows, each with its probability; there are no scores.

    If the rule differs by site, the rows are all clients' rows.
    """
    data = federation.dataset
    sites = None
    if rule.per_site:
        sites = np.repeat(name_clients(federation), federation.sizes).tolist()
    positive = apply_rule(data, rows, rule, scores, sites=sites)
    probs = np.stack((1 - positive, positive), 1)
    sums = Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))
    return _sums_of_decisions(sums.score)


def apply_rule(
    data: Dataset,
    rows: np.ndarray,
    rule: DecisionRule,
    scores: np.ndarray,
    *,
    sites: Sequence[str] | None = None,
) -> np.ndarray:
    """The probability of a positive decision about each of some rows.

    Parameters
    ----------
    data
        The data set.
    rows
        Numbers of its rows.
    rule
        A rule that `fit_rule` has made.
    scores
        (n,) The probability of the positive class for each row of the data set.
    sites
        The site of each of the rows, if the rule differs by site.
    """
    if rule.is_blind:
        features = data.features[rows].astype(np.float64)
        if data.center is not None and data.scale is not None:
            features = features * data.scale + data.center
        return rule.probabilities(scores[rows], features=features)
    names = np.array([*data.group_names, None], object)[data.groups[rows]]
    given = scores[rows] if rule.reads == "score" else scores[rows] >= 0.5
    return rule.probabilities(given, {"group": names.tolist()}, sites=sites)


def _sums_of_decisions(decision: np.ndarray) -> Sums:
    return Sums(decision.sum(-1), np.full_like(decision, np.nan), decision)

"""The catalog of metrics. An outcome and an event define a metric.

With two classes, the rate is that of the positive class, class 1; with more classes, every class
has a rate against the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fedgft.errors import FedgftError
from fedgft.metrics.group_axis import MappedMetric
from fedgft.metrics.metric import Labels, Metric, Probs, compared
from fedgft.validation import format_value


def predicted(probs: Probs, labels: Labels) -> Any:
    """Return the scores of the compared classes: the positive class of two, or all classes."""
    return probs[..., 1:] if probs.shape[-1] == 2 else probs


def labeled(probs: Probs, labels: Labels) -> Any:
    """Return the one-hot labels of the compared classes; see `predicted`."""
    return predicted(labels, labels)


def predicted_by_label(probs: Probs, labels: Labels) -> Any:
    """Return the scores of the compared classes for each label: the outcomes of equalized odds."""
    return predicted(probs, labels)[:, None, :]


def each_label(probs: Probs, labels: Labels) -> Any:
    """Return the events of equalized odds: the row has the label."""
    return labels[:, :, None]


def score_of_label(probs: Probs, labels: Labels) -> Any:
    """Return the score of the row's own label: its accuracy."""
    return (probs * labels).sum(1)[:, None]


def other_label(probs: Probs, labels: Labels) -> Any:
    """Return the events of false positives: the row has another label."""
    return 1.0 - labeled(probs, labels)


def all_rows_only(classes: int) -> tuple[str, ...]:
    """Return the name of the condition of accuracy parity."""
    return ("all rows",)


def each_class_given_label(classes: int) -> tuple[str, ...]:
    """Return the names of the conditions of equalized odds."""
    pairs = product(range(classes), compared(classes))
    return tuple(f"class {c} given label {y}" for y, c in pairs)


CATALOG: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("sp", "statistical parity", predicted),
        Metric("eop", "equal opportunity", predicted, labeled),
        Metric("eo", "equalized odds", predicted_by_label, each_label, each_class_given_label),
        Metric("predictive-parity", "predictive parity", labeled, predicted),
        Metric("acc", "accuracy parity", score_of_label, conditions=all_rows_only),
        Metric("fpr", "false-positive-rate parity", predicted, other_label),
    )
}
"The metrics by their names: sp, eop, eo, predictive-parity, acc, fpr."

AT_ALL = ("sp", "eop")
"The metrics that may be asked for at every threshold: sp@all, eop@all."

LONG_NAMES = {
    "statistical_parity": "sp",
    "demographic_parity": "sp",
    "dp": "sp",
    "selection_rate": "sp",
    "equal_opportunity": "eop",
    "true_positive_rate": "eop",
    "true_positive_rate_parity": "eop",
    "tpr": "eop",
    "equalized_odds": "eo",
    "predictive_parity": "predictive-parity",
    "precision": "predictive-parity",
    "cal": "predictive-parity",  # its name up to 0.1.0; the paper calls it well-calibration
    "accuracy": "acc",
    "accuracy_parity": "acc",
    "false_positive_rate": "fpr",
    "false_positive_rate_parity": "fpr",
    "predictive_equality": "fpr",
}
"Other names of the metrics, as in Fairlearn and in plain words; see `resolve_name`."


def resolve_name(name: str) -> str:
    """Return the name in `CATALOG` of the metric with this name.

    Parameters
    ----------
    name
        A key of `CATALOG` or of `LONG_NAMES`, in any case, with hyphens, spaces or underscores,
        and with or without "difference" at the end.

    Returns
    -------
    str
        The key of `CATALOG`; a name that is not known is returned as it is, without outer spaces.

    Examples
    --------
    >>> resolve_name("demographic_parity_difference"), resolve_name("Equal opportunity")
    ('sp', 'eop')
    """
    key = "_".join(name.lower().replace("-", " ").replace("_", " ").split())
    key = key.removesuffix("_difference")
    if key in CATALOG:
        return key
    return LONG_NAMES.get(key, name.strip())


def get_metric(metric: str | Metric) -> Metric:
    """Return the metric with this short name, or a weighted combination of several.

    Parameters
    ----------
    metric
        "sp" (statistical parity: selection rates), "eop" (equal opportunity: true-positive rates),
        "eo" (equalized odds: true-positive and false-positive rates), "predictive-parity"
        (precision), "acc" (accuracy parity) or "fpr" (false-positive rates); several with weights,
        as in "sp+0.5*eop"; "sp@all" or "eop@all", for which the method fedgft trains at every
        threshold of the scores; "sp|department", which compares groups within each department, in
        training (several columns: "sp|department,year"); or a `Metric`, which is returned as it is.
        Long names, such as "demographic_parity" or "equal opportunity", mean the same; see
        `resolve_name`.

    Returns
    -------
    Metric
        The gap of a combination is the largest gap of its parts; the weights count in training.

    Examples
    --------
    >>> import fedgft
    >>> fedgft.get_metric("eop").title
    'equal opportunity'
    >>> fedgft.get_metric("sp+0.5*eop").title
    'statistical parity and equal opportunity'
    >>> fedgft.get_metric("sp|department").title
    'statistical parity given department'
    """
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        text = f"must be a name, as in 'sp', or a Metric, not {format_value(metric)}"
        raise FedgftError(text, field="metric")
    metric, is_within, columns = metric.partition("|")
    if is_within:
        return _compare_within(metric, columns)
    parts = [_parse_part(part, metric) for part in metric.split("+")]
    if len({part.name for part, _ in parts}) < len(parts):
        raise FedgftError(f"`metric` {metric!r} names one metric twice")
    return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else combine(parts)


def _compare_within(name: str, columns: str) -> Metric:
    """Return the metric that compares groups within the strata of columns, such as "a,b"."""
    asked = f"`metric` '{name}|{columns}'"
    base = get_metric(name)
    within = tuple(column.strip() for column in columns.split(","))
    if base.parts or base.every_threshold:
        text = f"{asked}: one metric at one threshold stands before `|`, not {base.name}"
        raise FedgftError(text, kind="unsupported")
    if not all(within):
        raise FedgftError(f"{asked}: a column must follow `|`, as in {base.name}|department")
    if len(set(within)) < len(within):
        raise FedgftError(f"{asked} names a column twice")
    return MappedMetric.of(base, within)


def _parse_part(text: str, asked: str) -> tuple[Metric, float]:
    factor, star, name = text.rpartition("*")
    try:
        weight = float(factor) if star else 1.0
    except ValueError:
        weight = float("nan")
    if not 1e-6 <= weight <= 1e6:
        raise FedgftError(
            f"`metric` {asked!r}: {factor!r} is no positive weight (of a millionth to a million)"
        )
    name, at, every = resolve_name(name), "", ""
    if "@" in name:
        name, at, every = name.partition("@")
        name = resolve_name(name)
    if at and (every != "all" or name not in AT_ALL):
        known = ", ".join(f"{each}@all" for each in AT_ALL)
        raise FedgftError(
            f"`metric` {asked!r} is not known; metrics at every threshold are {known}"
        )
    if name not in CATALOG:
        raise FedgftError(
            f"`metric` {name or asked!r} is not known; choose from {', '.join(CATALOG)}, "
            "or several of them, as in sp+0.5*eop"
        )
    return _at_every_threshold(CATALOG[name]) if at else CATALOG[name], weight


def _at_every_threshold(metric: Metric) -> Metric:
    """Return the metric for which training compares rates at every threshold of the scores."""
    title = f"{metric.title} at every threshold"
    return replace(metric, name=f"{metric.name}@all", title=title, every_threshold=True)


def at_one_threshold(metric: Metric) -> Metric:
    """Return the metric that is measured at one threshold over all rows of a group.

    It is "sp" for "sp@all" and for "sp|department".
    """
    if isinstance(metric, MappedMetric) and metric.base is not None:
        return metric.base
    return CATALOG[metric.name.partition("@")[0]] if metric.every_threshold else metric


def check_one_threshold(metric: Metric) -> Metric:
    """Return the metric; raise a `FedgftError` if it is about every threshold of the scores."""
    if metric.every_threshold:
        usual = metric.name.partition("@")[0]
        text = f"{metric.name} is only for training with the method fedgft; here, write {usual}"
        raise FedgftError(text, field="metric", kind="unsupported")
    return metric


def check_over_all_rows(metric: Metric) -> Metric:
    """Return the metric; raise a `FedgftError` if it compares groups within strata."""
    if metric.columns:
        usual = metric.name.partition("|")[0]
        text = f"{metric.name} is only for training in the simulator; here, write {usual}"
        raise FedgftError(text, field="metric", kind="unsupported")
    return metric


@dataclass(frozen=True)
class CombinedConditions:
    """The function that names the conditions of a combined metric; unlike a closure, it pickles.

    Parameters
    ----------
    parts
        The metrics with their weights.
    """

    parts: tuple[tuple[Metric, float], ...]

    def __call__(self, classes: int) -> tuple[str, ...]:
        """Return the conditions of all parts for this number of classes."""
        return tuple(f"{m.name}: {text}" for m, _ in self.parts for text in m.conditions(classes))


def combine(parts: Sequence[tuple[Metric, float]]) -> Metric:
    """Combine several metrics with weights into one metric.

    The combined metric has the conditions of all parts, so its gap is the largest gap of the parts.
    The weights are used in training only.
    """
    for metric, _ in parts:
        if metric.every_threshold:
            text = f"{metric.name} is neither combined nor weighted; its strength is `lam`"
            raise FedgftError(text, field="metric", kind="unsupported")
    names = [m.name if w == 1 else f"{w:.12g}*{m.name}" for m, w in parts]
    conditions = CombinedConditions(tuple(parts))
    title = " and ".join(metric.title for metric, _ in parts)
    name = "+".join(names)
    return replace(parts[0][0], name=name, title=title, conditions=conditions, parts=tuple(parts))

"""The catalog of metrics: each is an outcome and an event, from which everything else follows.

With two classes the rate is that of the positive one, class 1; with more, every class has its rate
against the rest.
"""

from collections.abc import Sequence
from typing import Any

from fedgft.errors import FedgftError
from fedgft.metrics.metric import Metric, compared
from fedgft.validation import format_value


def _compared(columns: Any) -> Any:
    """Select the classes that are compared from the last axis."""
    return columns[..., 1:] if columns.shape[-1] == 2 else columns


def _each_pair(classes: int) -> tuple[str, ...]:
    pairs = [(y, c) for y in range(classes) for c in compared(classes)]
    return tuple(f"class {c} given label {y}" for y, c in pairs)


statistical_parity = Metric("sp", "statistical parity", outcome=lambda p, y: _compared(p))
equal_opportunity = Metric(
    "eop", "equal opportunity", outcome=lambda p, y: _compared(p), event=lambda p, y: _compared(y)
)
equalized_odds = Metric(
    "eo",
    "equalized odds",
    outcome=lambda p, y: _compared(p)[:, None, :],
    event=lambda p, y: y[:, :, None],
    conditions=_each_pair,
)
predictive_parity = Metric(  # the paper's well-calibration
    "cal", "predictive parity", outcome=lambda p, y: _compared(y), event=lambda p, y: _compared(p)
)
accuracy_parity = Metric(
    "acc",
    "accuracy parity",
    outcome=lambda p, y: (p * y).sum(1)[:, None],
    conditions=lambda classes: ("all rows",),
)
false_positive_rate_parity = Metric(
    "fpr",
    "false-positive-rate parity",
    outcome=lambda p, y: _compared(p),
    event=lambda p, y: 1.0 - _compared(y),
)

CATALOG: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        statistical_parity,
        equal_opportunity,
        equalized_odds,
        predictive_parity,
        accuracy_parity,
        false_positive_rate_parity,
    )
}
"The metrics by their short names: sp, eop, eo, cal, acc, fpr."


def get_metric(metric: str | Metric) -> Metric:
    """Return a metric.

    Parameters
    ----------
    metric
        A short name ("sp"), several with weights ("sp+0.5*eop", see `combined`), or a `Metric`,
        which is returned as it is.
    """
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        raise FedgftError(
            f"metric must be a name, as in 'sp', or a Metric, not {format_value(metric)}"
        )
    parts = [_parse_part(part, metric) for part in metric.split("+")]
    if len({part.name for part, _ in parts}) < len(parts):
        raise FedgftError(f"`metric` {metric!r} names one metric twice")
    return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else combined(parts)


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
    if name.strip() not in CATALOG:
        raise FedgftError(
            f"`metric` {name.strip()!r} is not known; choose from {', '.join(CATALOG)}, "
            "or several of them, as in sp+0.5*eop"
        )
    return CATALOG[name.strip()], weight


def combined(parts: Sequence[tuple[Metric, float]]) -> Metric:
    """Return one metric for several with weights.

    Its conditions are those of all parts, so its gap is the largest of theirs. The weights count
    in training only.
    """
    names = [m.name if w == 1 else f"{w:.12g}*{m.name}" for m, w in parts]

    def conditions(classes: int) -> tuple[str, ...]:
        return tuple(f"{m.name}: {text}" for m, _ in parts for text in m.conditions(classes))

    first = parts[0][0]
    return Metric(
        "+".join(names),
        " and ".join(metric.title for metric, _ in parts),
        first.outcome,
        first.event,
        conditions,
        parts=tuple(parts),
    )

"""The catalogue of metrics. An entry is an outcome and an event; everything else follows.

Class 0 is the reference class: `[:, 1:]` is "positive" with two classes and "each other
class" with more.
"""

from fedgft.metrics.metric import Metric
from fedgft.types import FedgftError


def _each_class(classes: int) -> tuple[str, ...]:
    return tuple(f"class {c}" for c in range(1, classes))


def _each_pair(classes: int) -> tuple[str, ...]:
    return tuple(f"class {c} given label {y}" for y in range(classes) for c in range(1, classes))


statistical_parity = Metric(
    "sp",
    "statistical parity",
    lambda p, y: p[:, 1:],
    lambda p, y: 1.0 + 0.0 * y[:, :1],
    _each_class,
)
equal_opportunity = Metric(
    "eop", "equal opportunity", lambda p, y: p[:, 1:], lambda p, y: y[:, 1:], _each_class
)
equalized_odds = Metric(
    "eo", "equalized odds", lambda p, y: p[:, None, 1:], lambda p, y: y[:, :, None], _each_pair
)
predictive_parity = Metric(  # the paper's well-calibration
    "cal", "predictive parity", lambda p, y: y[:, 1:], lambda p, y: p[:, 1:], _each_class
)
accuracy_parity = Metric(
    "acc",
    "accuracy parity",
    lambda p, y: (p * y).sum(1)[:, None],
    lambda p, y: 1.0 + 0.0 * y[:, :1],
    lambda classes: ("all rows",),
)
false_positive_rate_parity = Metric(
    "fpr",
    "false-positive-rate parity",
    lambda p, y: p[:, 1:],
    lambda p, y: 1.0 - y[:, 1:],
    _each_class,
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


def get_metric(metric: str | Metric) -> Metric:
    """A metric by its short name; a metric passes through."""
    if isinstance(metric, Metric):
        return metric
    if metric not in CATALOG:
        raise FedgftError(f"--metric {metric!r} is not known; choose from {', '.join(CATALOG)}")
    return CATALOG[metric]

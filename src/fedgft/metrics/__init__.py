"""Fairness metrics: statistics that add up over rows, and gaps that are computed from their sum."""

from fedgft.metrics.catalog import CATALOG, check_one_threshold, check_over_all_rows, get_metric
from fedgft.metrics.functions import NotEstimableWarning
from fedgft.metrics.group_axis import GroupAxis, MappedMetric, bind_metric
from fedgft.metrics.metric import Kind, Metric, Pair, price

__all__ = [
    "CATALOG",
    "GroupAxis",
    "Kind",
    "MappedMetric",
    "Metric",
    "NotEstimableWarning",
    "Pair",
    "bind_metric",
    "check_one_threshold",
    "check_over_all_rows",
    "get_metric",
    "price",
]

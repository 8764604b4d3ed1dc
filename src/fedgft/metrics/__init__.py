"""Fairness metrics: statistics that add up over rows, and gaps that are computed from their sum."""

from fedgft.metrics.catalog import CATALOG, check_one_threshold, get_metric
from fedgft.metrics.functions import NotEstimableWarning
from fedgft.metrics.metric import Kind, Metric, Pair, price

__all__ = [
    "CATALOG",
    "Kind",
    "Metric",
    "NotEstimableWarning",
    "Pair",
    "check_one_threshold",
    "get_metric",
    "price",
]

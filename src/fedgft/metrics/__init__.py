"""Fairness metrics: statistics that add up over rows, and what is read from their sum."""

from fedgft.metrics.catalog import CATALOG, get_metric
from fedgft.metrics.functions import NotEstimableWarning
from fedgft.metrics.metric import Metric, Pair
from fedgft.metrics.tally import Kind, Tally, concatenate, price, stack

__all__ = [
    "CATALOG",
    "Kind",
    "Metric",
    "NotEstimableWarning",
    "Pair",
    "Tally",
    "concatenate",
    "get_metric",
    "price",
    "stack",
]

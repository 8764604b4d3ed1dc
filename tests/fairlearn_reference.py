"""Fairlearn on pooled rows: the reference for an audit of many sites."""

import numpy as np
import pandas as pd
from fairlearn.metrics import (
    MetricFrame,
    demographic_parity_difference,
    demographic_parity_ratio,
    equal_opportunity_difference,
    equal_opportunity_ratio,
    equalized_odds_difference,
    equalized_odds_ratio,
    false_positive_rate,
)
from sklearn.metrics import accuracy_score, precision_score


def precision(y, d):
    return precision_score(y, d, zero_division=np.nan)


def by_group(metric, y, d, g) -> np.ndarray:
    return MetricFrame(metrics=metric, y_true=y, y_pred=d, sensitive_features=g).by_group.to_numpy()


def fairlearn(y, d, g) -> dict[str, tuple[float, float | None]]:
    """Difference and ratio of each metric; `estimable` says whether every group has a rate."""
    g = pd.Series(g)  # Fairlearn drops the axis of an array with one row
    shared = {"sensitive_features": g}
    rates = {
        "acc": by_group(accuracy_score, y, d, g),
        "predictive-parity": by_group(precision, y, d, g),
        "fpr": by_group(false_positive_rate, y, d, g),
    }
    out: dict[str, tuple[float, float | None]] = {
        name: (difference(y, d, **shared), ratio(y, d, **shared))
        for name, difference, ratio in (
            ("sp", demographic_parity_difference, demographic_parity_ratio),
            ("eop", equal_opportunity_difference, equal_opportunity_ratio),
            ("eo", equalized_odds_difference, equalized_odds_ratio),
        )
    }
    return out | {name: (float(np.ptp(r)), None) for name, r in rates.items()}


def estimable(name, y, d, g) -> bool:
    """Whether every group has a row of the metric's event."""
    event = {"sp": y >= 0, "acc": y >= 0, "eop": y == 1, "fpr": y == 0, "predictive-parity": d == 1}
    wanted = [event["eop"], event["fpr"]] if name == "eo" else [event[name]]
    return all((e & (g == group)).any() for e in wanted for group in np.unique(g))

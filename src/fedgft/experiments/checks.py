"""What can be seen to be wrong with a federation before anything is trained on it."""

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.metrics import Metric
from fedgft.types import FedgftError


def check_groups(federation: Federation, metric: Metric) -> None:
    """Training needs a row of the event in every group; the first group without is named."""
    data, classes = federation.dataset, len(federation.dataset.classes)
    if len(data.group_names) < 2:
        found = f"only {data.group_names[0]!r}" if data.group_names else "none"
        raise FedgftError(
            f"{data.name}: fairness compares groups, and the group column has {found}"
        )
    rows = federation.rows
    known = data.groups[rows] >= 0
    count = np.zeros((classes, len(data.group_names)))
    np.add.at(count, (data.labels[rows][known], data.groups[rows][known]), 1)
    for g, name in enumerate(data.group_names):
        if count[:, g].sum() == 0:
            raise FedgftError(f"{data.name}: group {name!r} has no training rows")
    if metric.proper(classes):
        events = np.einsum("vy,yg->vg", metric.affine(classes)[1][1], count)
        for g, name in enumerate(data.group_names):
            if (events[:, g] == 0).any():
                raise FedgftError(
                    f"{data.name}: group {name!r} has no training row that {metric.title} asks for"
                )

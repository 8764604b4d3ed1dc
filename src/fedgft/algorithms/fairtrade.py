"""FairTrade's local penalty: each client pulls the rates of its groups to its overall rate.

Badar, Sikdar, Nejdl & Fisichella, "FairTrade: Achieving Pareto-Optimal Trade-Offs between Balanced
Accuracy and Fairness in Federated Learning", AAAI 2024. With the rate m_g of the scores of group g
and the rate m of all rows of the client:

    loss = CE + alpha sum_g (m_g - m)^2

It is locally fair training (`lft`) with the spread "squares" and the penalty l2. The search over
alpha by Bayesian optimization is replaced by the choice on inner rows that all methods have. As in
every method with local penalties, a client measures its rates before each epoch.
"""

import numpy as np

from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.metrics import Metric


def squared_deviations(metric: Metric, lam: float | np.ndarray) -> LinearizedPenalty:
    """Return the penalty lam sum_g (m_g - m)^2; `lam` is one number, or one per run."""
    return LinearizedPenalty(metric, lam, penalty="l2", spread="squares")

"""What local fairness says about global fairness (Section 4 of the paper), and small examples."""

from fedgft.theory.analysis import (
    AllWeights,
    Analysis,
    Compared,
    analyze,
    compare,
    fair_for_all_weights,
    per_client,
)
from fedgft.theory.paper_examples import (
    Example,
    locally_fair_globally_unfair,
    locally_unfair_globally_fair,
    simpson,
)

__all__ = [
    "AllWeights",
    "Analysis",
    "Compared",
    "Example",
    "analyze",
    "compare",
    "fair_for_all_weights",
    "locally_fair_globally_unfair",
    "locally_unfair_globally_fair",
    "per_client",
    "simpson",
]

"""Decision rules: make the decisions of a finished model fair, from sums alone."""

from fedgft.rules.adjustment import adjust
from fedgft.rules.decision_rule import Acceptance, DecisionRule, load_rule

__all__ = ["Acceptance", "DecisionRule", "adjust", "load_rule"]

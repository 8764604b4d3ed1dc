"""Who takes part in the benchmark: every trained method and every decision rule of the library.

A method that is added to `METHODS`, or a kind of rule that is added to `RULE_KINDS`, takes part
without a change here. A method may have a field `grid`, the strengths that it is tried with, and a
field `league`; without them, `GRIDS` has strengths for the setting that holds the strength, and
a method is group-blind, because the group of a person is not an input of the trained model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fedgft.algorithms import METHODS
from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.data.encode import suggest_name
from fedgft.errors import FedgftError
from fedgft.formatting import join_names
from fedgft.rules.federation_rule import RULE_KINDS
from fedgft.settings import TARGET_TOLERANCE
from fedgft.validation import check_name_list

League = Literal["blind", "aware"]
LEAGUES: tuple[League, ...] = get_args(League)
LEAGUE_TITLES = {"blind": "group-blind", "aware": "group-aware"}
TARGETS = (0.0, 0.01, 0.02, 0.05)
"The gaps that methods are asked to keep."
FIXED_TARGETS = (TARGET_TOLERANCE, *TARGETS[1:])
"""Those of fixed thresholds. No gap at all, to the last row, often leaves only rules that accept
everybody; a gap of `TARGET_TOLERANCE` counts as none."""
GRIDS = {  # by the setting that holds the strength
    "target": TARGETS,
    "lam": (1.0, 5.0, 10.0, 20.0, 50.0),
    "beta": (0.1, 0.5, 1.0, 5.0, 10.0),
}
ANY_STRENGTH = (0.1, 1.0, 10.0)  # of a setting that `GRIDS` does not have
REFERENCE = "fedavg"  # the method without fairness, which all others are compared with


@dataclass(frozen=True)
class Entrant:
    """A method or a decision rule.

    Parameters
    ----------
    name, label
        The name in commands, and in tables and figures.
    league
        "aware" if a decision depends on the group of the person, else "blind".
    is_rule
        Whether it is a rule for the scores of FedAvg; otherwise it trains a model.
    grid
        The strengths that it is tried with, of which inner rows choose; for a rule, its targets.
    has_strength
        Whether there is a strength. Without one, a single training serves all metrics.
    has_targets
        Whether the strengths are targets for the gap.
    reads_metric
        Whether training depends on the metric. If it does not, metrics differ in the strength that
        is chosen.
    """

    name: str
    label: str
    league: League
    is_rule: bool
    grid: tuple[float, ...]
    has_strength: bool
    has_targets: bool = False
    reads_metric: bool = True


def list_entrants() -> dict[str, Entrant]:
    """Return all entrants by name: the methods first, then the decision rules."""
    found = {}
    for name, method in METHODS.items():
        grid = tuple(getattr(method, "grid", ())) or GRIDS.get(method.strength or "", ANY_STRENGTH)
        league: League = getattr(method, "league", None) or "blind"
        grid = (0.0,) if method.strength is None else grid
        has_strength = method.strength is not None
        reads_metric = method.aim == "the metric"
        has_targets = reads_metric and method.strength == "target"
        flags = (False, grid, has_strength, has_targets, reads_metric)
        found[name] = Entrant(name, method.label, league, *flags)
    for name in RULE_KINDS:
        league = "blind" if name == "blind" else "aware"
        label = METHOD_LABELS.get(name, name)
        grid = FIXED_TARGETS if name == "thresholds" else TARGETS
        found[name] = Entrant(name, label, league, True, grid, True, has_targets=True)
    return found


def choose_entrants(
    names: Sequence[str] | None = None, league: League | Literal["both"] = "both"
) -> tuple[Entrant, ...]:
    """Return the entrants with these names in one league; FedAvg is always among them.

    Parameters
    ----------
    names
        Their names; None: all of them.
    league
        "blind", "aware", or "both".
    """
    known = list_entrants()
    if names is not None:
        check_name_list("methods", names)
    for name in names or ():
        if name not in known:
            text = f"'{name}' is not known{suggest_name(name, list(known))}"
            raise FedgftError(text, field="methods")
    wanted = set(known if names is None else names)
    leagues = LEAGUES if league == "both" else (league,)
    chosen = [e for e in known.values() if e.name in wanted and e.league in leagues]
    if not chosen:
        listed = join_names([name for name in known if name in wanted])
        text = f"none of {listed} is in the league '{league}'; choose the other league, or both"
        raise FedgftError(text, field="methods", kind="conflict")
    return (known[REFERENCE], *(entrant for entrant in chosen if entrant.name != REFERENCE))

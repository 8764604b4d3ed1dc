"""The server's side of a penalty: sums come in, prices go out, and a record of every round is kept.

It is the simulator's own `Pricing` slot, fed with one client that stands for all of them.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgft.engine.picking import SLACK, WORTH
from fedgft.federated import Cohort
from fedgft.federated.algorithm import Pricing
from fedgft.federated.control import (
    NEAR,
    ControllerState,
    StepDamper,
    at_speed,
    plain,
    restored,
)
from fedgft.files import parsed
from fedgft.flower.checks import Noise
from fedgft.flower.private import gap_error
from fedgft.flower.wire import Names
from fedgft.metrics import Kind, Metric, Tally
from fedgft.metrics.decisions import described

EVERYBODY = Cohort(
    run=np.zeros(1, int), client=np.zeros(1, int), weight=np.ones(1), bounds=np.array([0, 1]),
    full=True,
)  # fmt: skip


@dataclass
class Constants:
    """What the server knows about fairness: the penalty's state, and what was measured when."""

    metric: Metric
    pricing: Pricing | None  # None: measured, and nothing is done about it
    state: Any = None
    names: Names | None = None
    damper: StepDamper | None = None  # where there is a target, once a step was taken
    history: list[dict[str, Any]] = field(default_factory=list)

    def learn(self, total: Tally, *, round: int, clients: int, noise: Noise | None) -> None:
        """One model's sums over everybody; `round`: of how many rounds that model is the result."""
        if self.pricing is not None and self._estimable(total):
            state = at_speed(self.state, 1.0 if self.damper is None else self.damper.speed)
            self.state = self.pricing.update(state, EVERYBODY, _unit(total, noise))
        row = {
            "round": round,
            "accuracy": _finite(total.accuracy()),
            "gap_soft": _finite(total.gap(self.metric, "soft")),
            "gap_hard": _finite(total.gap(self.metric, "hard")),
            "rows": float(total.rows()),
            "clients": clients,
        }
        if noise is None and self.names is not None:
            row |= described(total, self.names.classes, self.names.groups)
        if noise is not None:
            row["gap_error"] = _finite(gap_error(self.metric, total, noise, clients))
        self.history.append(row | self._target(row))

    def _target(self, row: dict[str, Any]) -> dict[str, Any]:
        """Where there is a target: which, of what, and whether the rows that were measured meet it;
        None where the gap is not known, or where noise decides."""
        target = getattr(self.pricing, "target", None)
        if target is None:
            return {}
        kind, limit = kind_of(self.pricing), float(target) + NEAR
        gap, error = row[f"gap_{kind}"], row.get("gap_error", 0.0)
        unsure = gap is None or error is None or abs(gap - limit) < 2 * error
        return {
            "target": float(target),
            "target_of": {"hard": "decisions", "soft": "scores"}[kind],
            "reached": None if unsure else gap <= limit,
        }

    def _estimable(self, total: Tally) -> bool:
        """Whether every group has a rate; without one the last constants stay."""
        return bool((total.statistics(self.metric, kind_of(self.pricing))[1] > 0).all())

    @property
    def price(self) -> np.ndarray | None:
        """(c, k, c), or None before the first sums."""
        if self.pricing is None or self.names is None or not self.history:
            return None
        classes = len(self.names.classes)
        if self.state is None:
            return None
        found = self.pricing.price(self.state, run=np.zeros(1, int), classes=classes)
        return None if isinstance(found, float) else found[0]

    def score(self, total: Tally) -> float:
        """Accuracy less twice the gap above the target: by which one model is preferred."""
        if self.pricing is None:
            return -math.inf
        excess = float(self.pricing.excess(EVERYBODY, _unit(total, None))[0])
        found = float(total.accuracy()) - WORTH * max(excess - SLACK, 0.0)
        return found if math.isfinite(found) else -math.inf

    def to_json(self) -> str:
        controlled = isinstance(self.state, ControllerState)
        kept = self.state._asdict() if controlled else {"v": self.state}
        names = None if self.names is None else [self.names.classes, self.names.groups]
        steps = None if self.damper is None else [self.damper.rounds, self.damper.lengths]
        held = {"state": plain(kept), "names": names, "history": self.history, "steps": steps}
        return json.dumps(held)

    def restore(self, text: str) -> None:
        found = parsed(text)
        held = restored(found["state"])
        if isinstance(self.state, ControllerState):
            self.state = ControllerState(**held)
        else:
            self.state = held["v"]
        if found["names"] is not None:
            self.names = Names(*(tuple(names) for names in found["names"]))
        self.history = found["history"]
        if found.get("steps") is not None:
            rounds, lengths = found["steps"]
            self.damper = StepDamper(rounds)
            self.damper.lengths = lengths


def kind_of(pricing: Pricing | None) -> Kind:
    """Which sums a penalty is set from; those alone are sent where there is noise."""
    return getattr(pricing, "kind", "soft")


def _unit(total: Tally, noise: Noise | None) -> Tally:
    """As one client; what was not sent is zero, and no penalty looks at it."""
    return total.map(lambda table: (table if noise is None else np.nan_to_num(table))[None])


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None

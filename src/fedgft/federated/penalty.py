"""FedGFT: globally fair training on top of any federated algorithm.

Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: Beyond Local
Fairness", Algorithm 1. It minimises L(theta) + lam J(F(S)), where the statistics
S = sum_k w_k S_k(theta) are a mean over clients. By the chain rule,

    grad J(F(S)) = sum_k w_k grad <v, S_k(theta)>,   v = J'(F) dF/dS.

The server sends the cotangent v (the paper's C, Theorem 5.1) once a round, and every client
adds lam <v, statistics> to the loss of each of its rows. Nothing else changes. The statistics
are affine in the scores, so v acts as a price on them: `price[label, group, class]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgft.arguments import numbers_per_run, real_number, shown, whole_number
from fedgft.errors import FedgftError
from fedgft.federated.cohort import Cohort, client_means
from fedgft.federated.control import (
    Controlled,
    ControllerState,
    ControlReport,
    Loop,
    StepDamper,
    plain,
    restored,
)
from fedgft.metrics import Metric, Tally, get_metric, price
from fedgft.metrics.spread import SPREADS, spread_gradient
from fedgft.types import Price, Statistics

# J by name, as its derivative: x, x^2 (the paper's l2), x^2 / 2 (what its Table 1 used: C = F~).
SLOPES: dict[str, Callable[[Any], Any]] = {
    "l1": lambda gap: 1.0 + 0.0 * gap,
    "l2": lambda gap: 2.0 * gap,
    "half": lambda gap: gap,
}
"The derivative of J by its name: l1, l2 or half."


@dataclass(frozen=True)
class Linearised:
    """The penalty lam J(F), linearised at the statistics that were measured last.

    `lam` is one number, or one a run.
    """

    metric: Metric
    lam: float | np.ndarray
    penalty: str = "half"
    spread: str = "range"

    def __post_init__(self) -> None:
        if not isinstance(self.penalty, str) or self.penalty not in SLOPES:
            raise FedgftError(
                f"--penalty {self.penalty!r} is not known; choose from {', '.join(SLOPES)}"
            )
        object.__setattr__(self, "lam", numbers_per_run("lam", self.lam))
        if np.any(np.asarray(self.lam) < 0) or not np.all(np.isfinite(self.lam)):
            raise FedgftError(f"--lam must be a number >= 0, got {self.lam}")
        if not isinstance(self.spread, str) or self.spread not in SPREADS:
            raise FedgftError(
                f"--spread {self.spread!r} is not known; choose from {', '.join(SPREADS)}"
            )

    def init(self, loop: Loop) -> None:
        return None

    def update(self, state: Statistics | None, cohort: Cohort, received: Tally) -> Statistics:
        mean = cohort.mean(client_means(self.metric, received))
        return self.cotangent(mean, np.zeros_like(mean) if state is None else state)

    @property
    def pick(self) -> float:
        return 0.0

    def excess(self, cohort: Cohort, received: Tally) -> np.ndarray:
        """It has no target to be above."""
        return np.zeros(len(cohort.bounds) - 1)

    def cotangent(self, statistics: Statistics, last: Statistics) -> Statistics:
        """v at these statistics; where a group has no row of the event, the last v stays.

        Of several metrics the weighted penalties add up.
        """
        known = (statistics[..., 1, :, :] > 0).all((-2, -1))
        v = np.zeros_like(statistics)
        for at, stop, metric, weight in self.metric.pieces(statistics.shape[-2]):
            with np.errstate(divide="ignore", invalid="ignore"):
                gap, gradient = spread_gradient(metric, statistics[..., at:stop, :], self.spread)
            slope = weight * SLOPES[self.penalty](gap)
            v[..., at:stop, :] = slope[..., None, None, None] * gradient
        return np.where(known[..., None, None, None], v, last)

    def price(self, state: Statistics | None, *, run: np.ndarray, classes: int) -> Price | float:
        """lam <v, d statistics / d score>; entry i of the leading axis belongs to run `run[i]`."""
        if state is None:
            return 0.0
        lam = np.asarray(self.lam, dtype=np.float64)
        lam = lam[run] if lam.ndim else np.broadcast_to(lam, run.shape)
        return lam[:, None, None, None] * price(self.metric, state, classes)


class Penalty:
    """The paper's one-line change, in a training loop of your own (PyTorch).

    Each round, `penalty.update(statistics)` takes the sum over clients of what
    `penalty.statistics(logits, y, a)` gave for the round's global model; in the loop,
    `loss = cross_entropy + penalty(logits, y, a)`. Before the first update it is zero.
    `y` holds class indices and `a` group indices, -1 where the group is not recorded: tensors,
    arrays or lists of whole numbers. Sums are taken in float64, and the loss in at least float32,
    whatever the type of the logits (one column a class).

    Give `lam`, the strength of a penalty on the gap of scores, or `target`, the gap of decisions
    that is to be reached. With a target, also give `rounds`, the length of the loop, and call
    `penalty.damp(model)` at the end of each round: where the learning rate does not fall, the model
    would otherwise never settle. `penalty.report` says whether the target was reached.

    `lagging`: statistics are of the model that the round began with, as when clients send them
    together with their updates.
    """

    def __init__(
        self,
        metric: str | Metric,
        lam: float | None = None,
        *,
        target: float | None = None,
        groups: int = 2,
        penalty: str = "half",
        rounds: int | None = None,
        lagging: bool = False,
    ) -> None:
        if (lam is None) == (target is None):
            raise FedgftError("Penalty needs either lam or target")
        for name, value in (("lam", lam), ("target", target)):
            if value is not None and real_number(name, value) < 0:
                raise FedgftError(f"{name} must be a number >= 0, not {value:g}")
        if rounds is not None:
            whole_number("rounds", rounds, least=1)
        groups = whole_number("groups", groups, least=2, most=100_000)
        self.metric, self.groups = get_metric(metric), groups
        self.lam = 1.0 if lam is None else float(lam)
        self.rule = Linearised(self.metric, self.lam, penalty)
        self.control = None if target is None else Controlled(self.metric, target)
        self.controller = ControllerState((2 if lagging else 1, 1.0))
        self.damper = None if rounds is None else StepDamper(rounds)
        self.last_model: dict[str, Any] | None = None
        self.v: Any = None

    def _rows(self, probs: Any, y: Any, a: Any) -> Any:
        from torch.nn.functional import one_hot

        groups = one_hot(a + 1, self.groups + 1)[:, 1:].to(probs.dtype)
        labels = one_hot(y, probs.shape[-1]).to(probs.dtype)
        return self.metric.statistics(probs, labels, groups)

    def _checked(self, logits: Any, y: Any, a: Any) -> tuple[Any, Any, Any]:
        """The three as tensors: scores (n, classes), and two columns of indices in their ranges."""
        import torch

        if not isinstance(logits, torch.Tensor):
            raise FedgftError(f"logits must be a torch tensor, not {shown(logits)}")
        if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
            raise FedgftError(
                f"logits must be floating-point numbers of shape (rows, classes), with a column "
                f"for each of two classes or more, not {logits.dtype} of shape "
                f"{tuple(logits.shape)}"
            )
        device = logits.device
        return (
            logits,
            _index_tensor("y", y, device, len(logits), 0, logits.shape[1], "classes"),
            _index_tensor("a", a, device, len(logits), -1, self.groups, "groups"),
        )

    def statistics(self, logits: Any, y: Any, a: Any) -> np.ndarray:
        """This client's message, sums over its rows: their number, then the statistics, flat; of
        scores, or for a `target` of decisions. NaN or infinite logits are an error."""
        import torch
        from torch.nn.functional import one_hot

        if isinstance(logits, np.ndarray) and logits.dtype.kind == "f":
            logits = torch.as_tensor(logits)
        logits, y, a = self._checked(logits, y, a)
        if not bool(torch.isfinite(logits).all()):
            raise FedgftError("logits hold NaN or infinity: the model has no answer for some rows")
        probs = logits.detach().double().softmax(-1)
        if self.control is not None:
            probs = one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype)
        sums = self._rows(probs, y, a).sum(0).cpu().numpy()
        return np.concatenate(([len(y)], sums.ravel()))

    def update(self, statistics: np.ndarray) -> float:
        """Sets the prices from the sum of all clients' messages; returns the gap F."""
        rows, sums = statistics[0], np.asarray(statistics[1:], dtype=np.float64)
        mean = sums.reshape(2, -1, self.groups) / rows
        if self.control is not None:
            speed = 1.0 if self.damper is None else self.damper.speed
            state = self.controller._replace(speed=speed)
            self.controller = self.control.steer(state, mean[None])
            self.v = None if self.controller.v is None else self.controller.v[0]
        else:
            self.v = self.rule.cotangent(mean, np.zeros_like(mean) if self.v is None else self.v)
        return float(self.metric.readout(mean))

    def __call__(self, logits: Any, y: Any, a: Any) -> Any:
        """lam <v, statistics>, averaged over the rows of the batch: add it to the loss.

        NaN logits make it NaN, as they do the cross-entropy. A batch without rows gives 0.
        """
        logits, y, a = self._checked(logits, y, a)
        if self.v is None or not len(y):
            return 0.0 * logits.sum()
        work = logits if logits.element_size() > 2 else logits.float()
        v = work.new_tensor(self.v)
        return self.lam * (self._rows(work.softmax(-1), y, a) * v).sum() / len(y)

    def damp(self, model: Any) -> float:
        """Shortens the step that `model` has taken since the last call; returns the share kept.

        Parameters and floating-point buffers change in place. The first call only remembers them:
        call it once before the first round, and then at the end of each round.
        """
        import torch

        if self.damper is None:
            raise FedgftError("rounds is missing: Penalty(..., rounds=) says how long the loop is")
        values = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
        with torch.no_grad():
            if self.last_model is None:
                share = 1.0
            else:
                steps = {k: value - self.last_model[k] for k, value in values.items()}
                length = sum(float((step.double() ** 2).sum()) for step in steps.values()) ** 0.5
                share = self.damper.share(length)
                for name, value in values.items():
                    value.copy_(self.last_model[name] + share * steps[name])
            self.last_model = {name: value.clone() for name, value in values.items()}
        return share

    @property
    def report(self) -> ControlReport | None:
        """Whether the target was reached by the last measured model, on the rows that were
        counted; None without a target or before the first update."""
        gaps = self.controller.gaps
        if self.control is None or gaps is None:
            return None
        target = np.asarray([self.control.target], np.float64)
        return ControlReport(target, gaps[:, -1], gaps, self.control.kind)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed loop needs, as numbers and lists: for your own checkpoint."""
        model = self.last_model
        return {
            "controller": plain(self.controller._asdict()),
            "v": plain(self.v),
            "lengths": [] if self.damper is None else list(self.damper.lengths),
            "last_model": None if model is None else {k: v.clone() for k, v in model.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.controller = ControllerState(**restored(state["controller"]))
        self.v = restored(state["v"])
        self.last_model = state["last_model"]
        if self.damper is not None:
            self.damper.lengths = list(state["lengths"])


def _index_tensor(
    name: str, values: Any, device: Any, rows: int, least: int, known: int, kind: str
) -> Any:
    """One whole number a row from `least` to `known` - 1, as int64 on the logits' device."""
    import torch

    try:
        found = torch.as_tensor(values, device=device)
    except Exception:  # of text, of objects, of lists of different lengths: any of torch's errors
        raise FedgftError(
            f"{name} must hold indices (whole numbers), not {shown(values)}"
        ) from None
    if found.shape != (rows,):
        raise FedgftError(f"{name} has the shape {tuple(found.shape)}, not ({rows},) as the logits")
    if not rows:
        return found.long()
    if found.is_complex() or found.dtype == torch.bool:
        raise FedgftError(f"{name} must hold indices (whole numbers), not {found.dtype}")
    if found.is_floating_point() and not bool((found == found.floor()).all()):
        raise FedgftError(f"{name} must hold indices, and holds fractions or NaN")
    low, high = (end.item() for end in found.double().aminmax())
    if low < least or high >= known:
        wrong = low if low < least else high
        raise FedgftError(
            f"{name} holds the index {wrong:g}; there are {known} {kind}, from "
            f"{least} to {known - 1}"
        )
    return found.long()

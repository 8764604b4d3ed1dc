"""FedGFT's one-line change in a PyTorch training loop of your own."""

from typing import Any

import numpy as np

from fedgft.algorithms.controller import (
    Controller,
    ControllerState,
    ControlReport,
    StepDamper,
    arrays_to_lists,
    lists_to_arrays,
)
from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.errors import FedgftError, import_extra
from fedgft.metrics import Metric, get_metric
from fedgft.validation import check_integer, check_number, format_value

torch = import_extra("torch", "fedgft.Penalty")


class Penalty:
    """The term that FedGFT adds to the loss.

    Each round, call `penalty.update(statistics)` with the sum over clients of what
    `penalty.statistics(logits, y, a)` returned for the round's global model. In the training
    loop, `loss = cross_entropy + penalty(logits, y, a)`. The penalty is zero before the first
    update. `logits` has one column per class; `y` holds class indices and `a` group indices (-1:
    the group is not recorded) as tensors, arrays or lists of whole numbers. Sums are taken in
    float64 and the loss in at least float32, whatever the type of the logits.

    Parameters
    ----------
    metric
        The metric whose gap is penalized, as a name or a `Metric`.
    lam
        Strength of a penalty on the gap of scores. Give either `lam` or `target`.
    target
        The gap of decisions to reach, as a fraction. `report` says whether it was reached.
    groups
        How many groups there are.
    penalty
        J in lam J(F): "l1", "l2" or "half"; ignored if there is a target.
    rounds
        Number of rounds of the loop. With a target, pass it and call `penalty.damp(model)` at the
        end of each round; otherwise the model would not settle if the learning rate does not fall.
    lagging
        Whether the statistics are those of the model at the start of the round, as when clients
        send them together with their updates.
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
            raise FedgftError("Penalty needs either `lam` or `target`", kind="conflict")
        for name, value in (("lam", lam), ("target", target)):
            if value is not None and check_number(name, value) < 0:
                raise FedgftError(f"must be a number >= 0, not {value:g}", field=name)
        if rounds is not None:
            check_integer("rounds", rounds, least=1)
        self.groups = check_integer("groups", groups, least=2, most=100_000)
        self.metric = get_metric(metric)
        self.lam = 1.0 if lam is None else float(lam)
        self.rule = LinearizedPenalty(self.metric, self.lam, penalty)
        self.control = None if target is None else Controller(self.metric, target)
        self.controller = ControllerState((2 if lagging else 1, 1.0))
        self.damper = None if rounds is None else StepDamper(rounds)
        self.last_model: dict[str, Any] | None = None
        self.v: Any = None

    def statistics(self, logits: Any, y: Any, a: Any) -> np.ndarray:
        """Return this client's message: its number of rows, then the summed statistics, flat.

        They are statistics of scores, or of decisions where there is a `target`. Raises
        `FedgftError` where a logit is NaN or infinite.
        """
        if isinstance(logits, np.ndarray) and logits.dtype.kind == "f":
            logits = torch.as_tensor(logits)
        logits, y, a = self._check(logits, y, a)
        if not bool(torch.isfinite(logits).all()):
            raise FedgftError("logits hold NaN or infinity: the model has no answer for some rows")
        probs = logits.detach().double().softmax(-1)
        if self.control is not None:
            probs = _one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype)
        sums = self._by_row(probs, y, a).sum(0).cpu().numpy()
        return np.concatenate(([len(y)], sums.ravel()))

    def update(self, statistics: np.ndarray) -> float:
        """Set the prices from the sum of all clients' messages; return the gap F."""
        sums = np.asarray(statistics[1:], dtype=np.float64)
        mean = sums.reshape(2, -1, self.groups) / statistics[0]
        if self.control is None:
            self.v = self.rule.cotangent(mean, np.zeros_like(mean) if self.v is None else self.v)
        else:
            speed = 1.0 if self.damper is None else self.damper.speed
            state = self.controller._replace(speed=speed)
            self.controller = self.control.steer(state, mean[None])
            self.v = None if self.controller.v is None else self.controller.v[0]
        return float(self.metric.readout(mean))

    def __call__(self, logits: Any, y: Any, a: Any) -> Any:
        """Return lam <v, statistics>, averaged over the rows of the batch: add it to the loss.

        NaN logits make it NaN, as they do the cross-entropy. A batch without rows gives 0.
        """
        logits, y, a = self._check(logits, y, a)
        if self.v is None or not len(y):
            return 0.0 * logits.sum()
        work = logits if logits.element_size() > 2 else logits.float()
        v = work.new_tensor(self.v)
        return self.lam * (self._by_row(work.softmax(-1), y, a) * v).sum() / len(y)

    def damp(self, model: Any) -> float:
        """Shorten the step that `model` has taken since the last call; return the share kept.

        Parameters and floating-point buffers change in place. The first call only remembers them:
        call it once before the first round, and then at the end of each round.
        """
        if self.damper is None:
            raise FedgftError(
                "is missing: Penalty(..., rounds=) says how long the loop is",
                field="rounds",
                kind="missing",
            )
        values = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
        share = 1.0
        with torch.no_grad():
            if self.last_model is not None:
                steps = {k: value - self.last_model[k] for k, value in values.items()}
                length = sum(float((step.double() ** 2).sum()) for step in steps.values()) ** 0.5
                share = self.damper.share(length)
                for name, value in values.items():
                    value.copy_(self.last_model[name] + share * steps[name])
            self.last_model = {name: value.clone() for name, value in values.items()}
        return share

    @property
    def report(self) -> ControlReport | None:
        """Whether the last measured model reached the target, on the rows that were counted.

        None without a target, and before the first update.
        """
        gaps = self.controller.gaps
        if self.control is None or gaps is None:
            return None
        target = np.asarray([self.control.target], np.float64)
        return ControlReport(target, gaps[:, -1], gaps, self.control.kind)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed loop needs, as numbers and lists."""
        model = self.last_model
        return {
            "controller": arrays_to_lists(self.controller._asdict()),
            "v": arrays_to_lists(self.v),
            "lengths": [] if self.damper is None else list(self.damper.lengths),
            "last_model": None if model is None else {k: v.clone() for k, v in model.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.controller = ControllerState(**lists_to_arrays(state["controller"]))
        self.v = lists_to_arrays(state["v"])
        self.last_model = state["last_model"]
        if self.damper is not None:
            self.damper.lengths = list(state["lengths"])

    def _by_row(self, probs: Any, y: Any, a: Any) -> Any:
        """Return the statistics of each row: (rows, 2, condition, group)."""
        groups = _one_hot(a + 1, self.groups + 1)[:, 1:].to(probs.dtype)
        labels = _one_hot(y, probs.shape[-1]).to(probs.dtype)
        return self.metric.statistics(probs, labels, groups)

    def _check(self, logits: Any, y: Any, a: Any) -> tuple[Any, Any, Any]:
        """Return the three as tensors: scores (rows, classes), and two columns of valid indices."""
        if not isinstance(logits, torch.Tensor):
            raise FedgftError(f"logits must be a torch tensor, not {format_value(logits)}")
        if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
            raise FedgftError(
                f"logits must be floating-point numbers of shape (rows, classes), with a column "
                f"for each of two classes or more, not {logits.dtype} of shape "
                f"{tuple(logits.shape)}"
            )
        classes = range(logits.shape[1])
        groups = range(-1, self.groups)
        return logits, _indices("y", y, logits, classes), _indices("a", a, logits, groups)


def _one_hot(index: Any, size: int) -> Any:
    return torch.nn.functional.one_hot(index, size)


def _indices(name: str, values: Any, logits: Any, allowed: range) -> Any:
    """Return one index of `allowed` per row of the logits, as int64 on their device."""
    try:
        found = torch.as_tensor(values, device=logits.device)
    except Exception:  # torch raises many types for text, objects and ragged lists
        raise FedgftError(
            f"{name} must hold indices (whole numbers), not {format_value(values)}"
        ) from None
    rows = len(logits)
    if found.shape != (rows,):
        raise FedgftError(f"{name} has the shape {tuple(found.shape)}, not ({rows},) as the logits")
    if not rows:
        return found.long()
    if found.is_complex() or found.dtype == torch.bool:
        raise FedgftError(f"{name} must hold indices (whole numbers), not {found.dtype}")
    if found.is_floating_point() and not bool((found == found.floor()).all()):
        raise FedgftError(f"{name} must hold indices, and holds fractions or NaN")
    low, high = (end.item() for end in found.double().aminmax())
    if low < allowed.start or high >= allowed.stop:
        wrong = low if low < allowed.start else high
        kind = {"y": "classes", "a": "groups"}[name]
        raise FedgftError(
            f"{name} holds the index {wrong:g}; there are {allowed.stop} {kind}, from "
            f"{allowed.start} to {allowed.stop - 1}"
        )
    return found.long()

"""FedGFT's one-line change in your own PyTorch training loop."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fedgft.algorithms.batches import DeviceCopies, GroupReader, Rows, one_hot, read_rows
from fedgft.algorithms.client_messages import add_messages, pack_message, read_message
from fedgft.algorithms.controller import (
    Controller,
    ControllerState,
    ControlReport,
    StepDamper,
    arrays_to_lists,
    lists_to_arrays,
)
from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.data.encode import Names
from fedgft.data.groups import MAX_GROUPS, GroupNames
from fedgft.errors import FedgftError, import_extra
from fedgft.metrics import Metric, check_over_all_rows, get_metric
from fedgft.validation import check_integer, check_number, format_value

torch = import_extra("torch", "fedgft.Penalty")


class Penalty:
    """The term that FedGFT adds to the loss.

    Each round, call `penalty.update` with what `penalty.statistics(logits, y, a)` returned at each
    client for the round's global model. In the training loop,
    ``loss = cross_entropy + penalty(logits, y, a)``. The penalty is zero before the first update.

    The groups `a` are codes, or names if `groups` or `fit` states the names. A row with a missing
    group (None, NaN, or the number -1) counts in no gap. Sums are taken in float64 and the loss in
    at least float32, whatever the type of the logits, with and without autocast.

    Parameters
    ----------
    metric
        The metric whose gap is penalized, as a name or a `Metric`.
    lam
        Strength of a penalty on the gap of scores. Give either `lam` or `target`. None: the
        controller finds the strength.
    target
        The gap of decisions to reach, as a fraction. `report` says whether it was reached. None:
        there is no target, and `lam` is the strength.
    groups
        How many groups there are, if `a` holds the codes 0, 1, ...; or a list of their names, as
        in ``["f", "m"]``, in the same order at every client. None: two groups, or those that `fit`
        finds.
    penalty
        J in lam J(F): "l1", "l2" or "half"; ignored if there is a target.
    rounds
        Number of rounds of the loop. With a target, pass it and call `penalty.damp(model)` at the
        end of each round; otherwise the model would not settle if the learning rate does not fall.
        None: for loops whose learning rate falls.
    lagging
        Whether the statistics are those of the model at the start of the round, as when clients
        send them together with their updates.

    Attributes
    ----------
    metric
        The `Metric`.
    groups
        The number of groups.
    v
        (2, conditions, groups) What the server sends to clients: the derivative of the penalty by
        the statistics. None before prices are set.

    Examples
    --------
    >>> import fedgft
    >>> import torch
    >>> logits = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, -1.0], [0.0, -2.0]])
    >>> sex = ["f", "f", "m", None]
    >>> penalty = fedgft.Penalty("sp", lam=1.0).fit(sex)
    >>> round(penalty.update([penalty.statistics(logits, [0, 1, 0, 1], sex)]), 3)
    0.537
    >>> a = penalty.encode(sex)
    >>> a
    tensor([ 0,  0,  1, -1])
    >>> bool(penalty(logits[1:2], [1], a[1:2]) > 0)  # a high score in the group with high scores
    True
    """

    def __init__(
        self,
        metric: str | Metric,
        lam: float | None = None,
        *,
        target: float | None = None,
        groups: Any = None,
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
        if groups is None or isinstance(groups, int | float | np.number):
            number = 2 if groups is None else groups
            self.groups = check_integer("groups", number, least=2, most=MAX_GROUPS)
            self._reader = GroupReader(self.groups)
        else:
            self._set_names(GroupNames.declare(groups))
        self._given = None if groups is None else self.groups
        self._declared = self.group_names is not None
        self.metric = check_over_all_rows(get_metric(metric))
        self.lam = 1.0 if lam is None else float(lam)
        self.rule = LinearizedPenalty(self.metric, self.lam, penalty)
        self.control = None if target is None else Controller(self.metric, target)
        self._delay = 2 if lagging else 1
        self._rounds = rounds
        self._start()

    def fit(self, sensitive_features: Any) -> "Penalty":
        """Find the groups in the training rows, forget all rounds, and return the penalty.

        In a federation no client has all rows, and each must know the same groups in the same
        order: pass `groups` instead.

        Parameters
        ----------
        sensitive_features
            One column of text, whole numbers or truth values; or several columns (a table, a
            dictionary, or an array with two axes) whose combinations are the groups, as in
            "f & under 40". Columns of pandas, polars, pyarrow, NumPy, torch, and lists are read.
            `group_names` has the result: numbers in their order, the rest as text.
        """
        if self._declared:
            text = "names the groups already: leave it out, or do not call `fit`"
            raise FedgftError(text, field="groups", kind="conflict")
        names = GroupNames.find(sensitive_features)
        if self._given not in (None, len(names.names)):
            text = f"is {self._given}, and `sensitive_features` holds {len(names.names)} groups"
            raise FedgftError(text, field="groups", kind="conflict")
        self._set_names(names)
        self._start()
        return self

    @property
    def group_names(self) -> Names | None:
        """The names of the groups in the order of their indices; None if `groups` is a number."""
        return None if self._reader.names is None else self._reader.names.names

    def encode(self, sensitive_features: Any) -> Any:
        """Return the code of each row's group as an int64 tensor, -1 where it is missing.

        Call it once before the loop: reading names in every batch costs time, codes cost none.
        `statistics` and the penalty take codes and names alike. The code of a group is its index in
        `group_names`; groups that are whole numbers (1 and 2, say) keep their numbers as codes.

        Parameters
        ----------
        sensitive_features
            One or several columns, as in `fit`. A value that is no group is an error. The result is
            on the device of a tensor, otherwise on the CPU.
        """
        return self._reader.encode(sensitive_features, "sensitive_features")

    def statistics(self, logits: Any, y: Any, a: Any) -> np.ndarray:
        """Return this client's message: its number of rows, then the summed statistics, flat.

        They are statistics of scores, or of decisions where there is a `target`.

        Parameters
        ----------
        logits
            (n, classes) A floating-point tensor or array; (n,) or (n, 1) for a model of two classes
            with one logit, whose score is its sigmoid. NaN and infinity are errors.
        y
            (n,) Class indices as a tensor, an array, a column or a list: whole numbers of any type
            (0.0 and 1.0 too) or truth values.
        a
            (n,) The group of each row, as codes or as names; see `encode`.
        """
        if isinstance(logits, np.ndarray) and logits.dtype.kind == "f":
            logits = torch.tensor(logits)
        rows = read_rows(logits, y, a, self._reader, wait=True)
        if not bool(torch.isfinite(rows.logits).all()):
            text = "hold NaN or infinity: the model has no answer for some rows"
            raise FedgftError(text, field="logits")
        with _full_precision(rows.logits.device):
            probs = rows.logits.detach().double().softmax(-1)
            if self.control is not None:
                probs = one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype)
            sums = self._by_row(probs, rows).sum(0).cpu().numpy()
        return pack_message(len(rows.y), sums)

    def update(self, statistics: Any) -> float:
        """Set the prices from all clients' messages; return the gap F of the measured model.

        Parameters
        ----------
        statistics
            The messages of all clients (any iterable), or their sum. The gap is NaN, and the last
            prices stay, where a group has no row that the metric needs.
        """
        total = add_messages(statistics)
        mean = self._read_message(total)
        if self.control is None:
            last = np.zeros_like(mean) if self.v is None else self.v
            self._set_prices(self.rule.cotangent(mean, last))
        else:
            speed = 1.0 if self.damper is None else self.damper.speed
            state = self.controller._replace(speed=speed)
            self.controller = self.control.steer(state, mean[None])
            self._set_prices(None if self.controller.v is None else self.controller.v[0])
        return float(self.metric.readout(mean))

    def __call__(self, logits: Any, y: Any, a: Any) -> Any:
        """Return lam <v, statistics>, averaged over the rows of the batch: add it to the loss.

        NaN logits make it NaN, as they do the cross-entropy. A batch without rows gives 0. On a GPU
        the call does not wait for the device: labels and groups that are on it are checked there,
        and an index out of range makes the loss NaN (`statistics` raises the error).

        Parameters
        ----------
        logits, y, a
            As in `statistics`; the logits are a tensor.
        """
        rows = read_rows(logits, y, a, self._reader, wait=False)
        work = rows.logits if rows.logits.element_size() > 2 else rows.logits.float()
        if self.v is None or not len(rows.y):
            return 0.0 * work.sum()
        with _full_precision(work.device):
            by_row = self._by_row(work.softmax(-1), rows)
            if by_row.shape[1:] != self.v.shape:
                text = f"have {work.shape[1]} classes, and the last statistics another number"
                raise FedgftError(text, field="logits")
            v = self._prices.on(work.device, work.dtype)
            loss = self.lam * (by_row * v).sum() / len(rows.y)
        if rows.valid is None:
            return loss
        return loss * torch.where(rows.valid, 1.0, torch.nan).to(loss.dtype)

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
        """Return everything that a resumed loop needs, as numbers, texts, lists and tensors."""
        model = self.last_model
        state = {
            "controller": arrays_to_lists(self.controller._asdict()),
            "v": arrays_to_lists(self.v),
            "lengths": [] if self.damper is None else list(self.damper.lengths),
            "last_model": None if model is None else {k: v.clone() for k, v in model.items()},
        }
        return state | ({"groups": list(self.group_names)} if self.group_names else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, into a penalty with the same groups.

        Parameters
        ----------
        state
            The state. Other groups, or the same in another order, are an error.
        """
        if absent := {"controller", "v", "lengths", "last_model"} - state.keys():
            text = f"is no state of a Penalty: {min(absent)!r} is missing"
            raise FedgftError(text, field="state")
        saved = state.get("groups")
        names = list(self.group_names) if self.group_names else None
        controller = ControllerState(**lists_to_arrays(state["controller"]))
        v = lists_to_arrays(state["v"])
        numbers = {x.shape[-1] for x in (v, controller.rates) if x is not None}
        if saved != names or not numbers <= {self.groups}:
            found = format_value(saved) if saved else f"{max(numbers, default=2)} unnamed groups"
            here = format_value(names) if names else f"{self.groups} unnamed groups"
            raise FedgftError(f"has {found}, and the penalty has {here}", field="state")
        self.controller = controller
        self._set_prices(v)
        self.last_model = state["last_model"]
        if self.damper is not None:
            self.damper.lengths = list(state["lengths"])

    def _start(self) -> None:
        """Forget all rounds."""
        self.controller = ControllerState((self._delay, 1.0))
        self.damper = None if self._rounds is None else StepDamper(self._rounds)
        self.last_model: dict[str, Any] | None = None
        self._set_prices(None)

    def _set_names(self, names: GroupNames) -> None:
        self.groups = len(names.names)
        self._reader = GroupReader(self.groups, names)

    def _set_prices(self, v: Any) -> None:
        self.v = v
        self._prices = DeviceCopies(v)

    def _by_row(self, probs: Any, rows: Rows) -> Any:
        """Return the statistics of each row: (rows, 2, condition, group)."""
        groups = one_hot(rows.a, self.groups).to(probs.dtype)
        labels = one_hot(rows.y, probs.shape[-1]).to(probs.dtype)
        return self.metric.statistics(probs, labels, groups)

    def _read_message(self, total: np.ndarray) -> np.ndarray:
        """Return mean statistics (2, condition, group) from the sum of all messages."""
        last = self.v if self.control is None else self.controller.rates
        conditions = None if last is None else last.shape[-2]
        return read_message(total, self.metric, self.groups, conditions=conditions)


def _full_precision(device: Any) -> AbstractContextManager[Any]:
    """Turn autocast off, which would take sums in half precision."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()

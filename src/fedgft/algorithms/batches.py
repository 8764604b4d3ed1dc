"""Read a batch: logits, labels and groups of any type as tensors.

Values on the CPU are checked at once. Values on a GPU are checked there, because the training loop
would have to wait for an error: the result of the check is a tensor.
"""

from typing import Any, NamedTuple

import numpy as np

from fedgft.data.groups import MAX_CODE, MISSING_CODE, GroupNames, read_columns
from fedgft.errors import FedgftError, import_extra
from fedgft.validation import check_indices, format_value

torch = import_extra("torch", "fedgft.Penalty")


class DeviceCopies:
    """An array, and its copies on the devices where it was needed. It pickles as the array alone.

    Parameters
    ----------
    array
        The array.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        self._copies: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[type["DeviceCopies"], tuple[Any]]:
        return DeviceCopies, (self.array,)

    def on(self, device: Any, dtype: Any) -> Any:
        """Return the array as a tensor on a device."""
        key = (device, dtype)
        if key not in self._copies:
            with torch.inference_mode(False):  # a tensor made inside it could not be trained with
                self._copies[key] = torch.tensor(self.array, dtype=dtype, device=device)
        return self._copies[key]


class GroupReader:
    """Reads the groups of rows as codes or as names.

    Parameters
    ----------
    number
        How many groups there are.
    names
        Their names; None: the codes are 0, 1, ... and there are no names.

    Attributes
    ----------
    codes
        The code of each group if it differs from its index, which is so for whole numbers such as
        1 and 2.
    """

    def __init__(self, number: int, names: GroupNames | None = None) -> None:
        self.number = number
        self.names = names
        codes = None if names is None else names.codes
        plain = codes is None or np.array_equal(codes, np.arange(number))
        self.codes = None if plain else codes
        if self.codes is not None:
            order = np.argsort(self.codes)
            self._sorted = DeviceCopies(self.codes[order])
            self._order = DeviceCopies(order)

    def encode(self, values: Any, field: str) -> Any:
        """Return the code of each row's group, -1 where it is missing."""
        index, _ = self.index(values, field, wait=True)
        if self.codes is None:
            return index
        return torch.tensor([*self.codes, MISSING_CODE], device=index.device)[index]

    def index(self, values: Any, field: str, *, wait: bool) -> tuple[Any, Any]:
        """Return the index of each row's group, -1 where it is missing, as `read_indices` does."""
        found = _to_tensor(values)
        names = self.names
        if names is not None and (found is None or found.ndim > 1 or found.dtype == torch.bool):
            return torch.tensor(names.index(values, field=field)), None
        if found is None:
            found = _read_nullable(values, field)
        if found.is_floating_point():
            found = torch.where(found.isnan(), MISSING_CODE, found)
        if names is None or self.codes is None:
            return read_indices(found, field, range(MISSING_CODE, self.number), wait=wait)
        number, whole = _to_whole(found)
        codes, order = (
            table.on(found.device, torch.int64) for table in (self._sorted, self._order)
        )
        at = torch.searchsorted(codes, number).clamp(max=self.number - 1)
        missing = number == MISSING_CODE
        index = torch.where(missing, MISSING_CODE, order[at])
        valid = (codes[at] == number) | missing
        valid = valid if whole is None else valid & whole
        if not wait and found.device.type != "cpu":
            return index, valid
        if not bool(valid.all()):
            raise names.unknown(found[~valid][0].item(), field=field)
        return index, None


class Rows(NamedTuple):
    """A batch: logits (n, classes), label and group index of each row (n,).

    `valid` is a truth value on the device, or None if the rows are known to be valid.
    """

    logits: Any
    y: Any
    a: Any
    valid: Any


def read_rows(logits: Any, y: Any, a: Any, groups: GroupReader, *, wait: bool) -> Rows:
    """Return a batch of valid rows.

    Parameters
    ----------
    logits, y, a
        As in `Penalty.statistics`.
    groups
        Reads `a`.
    wait
        Whether to wait for other devices than the CPU, and to raise errors about labels and groups
        that are there.
    """
    check_indices(y=y, a=a)
    logits = _read_logits(logits)
    found = _to_tensor(y)
    if found is None:
        text = f"must hold indices (whole numbers), not {format_value(y)}"
        raise FedgftError(text, field="y")
    read = {"y": read_indices(found, "y", range(logits.shape[1]), wait=wait)}
    read["a"] = groups.index(a, "a", wait=wait)
    for name, (index, _) in read.items():
        if index.shape != logits.shape[:1]:
            text = f"has the shape {tuple(index.shape)}, not ({len(logits)},) as the logits"
            raise FedgftError(text, field=name)
    labels, owners = (index.to(logits.device) for index, _ in read.values())
    checks = [valid.all() for _, valid in read.values() if valid is not None]
    return Rows(logits, labels, owners, torch.stack(checks).all() if checks else None)


def one_hot(index: Any, size: int) -> Any:
    """Return (n, size): whether it is the row's index. An index of -1 gives a row of zeros."""
    return index[:, None] == torch.arange(size, device=index.device)


def _read_logits(logits: Any) -> Any:
    """Return one column per class; a model of two classes may have one logit, that of class 1."""
    if not isinstance(logits, torch.Tensor):
        raise FedgftError(f"must be a torch tensor, not {format_value(logits)}", field="logits")
    if logits.ndim not in (1, 2) or not logits.is_floating_point() or 0 in logits.shape[1:]:
        raise FedgftError(
            "must be floating-point numbers of shape (rows, classes), or (rows,) for one logit, "
            f"not {logits.dtype} of shape {tuple(logits.shape)}",
            field="logits",
        )
    if logits.ndim == 2 and logits.shape[1] > 1:
        return logits
    one = logits.reshape(-1)
    return torch.stack((torch.zeros_like(one), one), -1)


def _to_tensor(values: Any) -> Any:
    """Return numbers or truth values as a tensor; None if the values are anything else."""
    if not isinstance(values, torch.Tensor):
        try:
            array = np.asarray(values)
            array = np.asarray(array.tolist()) if array.dtype == object else array
        except Exception:  # array-like objects may raise anything
            return None
        if np.ma.is_masked(values) or array.dtype.kind not in "biuf" or not array.ndim:
            return None
        values = torch.tensor(array)
    if values.is_complex() or not values.ndim:
        return None
    found = values.double() if values.dtype == torch.uint64 else values
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def _read_nullable(values: Any, field: str) -> Any:
    """Return whole numbers, some of which are None or NA, as a tensor with -1 for those."""
    columns = list(read_columns(values, field=field).values())
    if len(columns) > 1 or not columns[0].dtype.is_numeric():
        text = "holds names, and the groups have none: call penalty.fit(sensitive_features), or "
        raise FedgftError(f"{text}pass `groups`=['f', 'm']", field=field)
    return torch.tensor(columns[0].fill_null(MISSING_CODE).to_numpy())


def _to_whole(found: Any) -> tuple[Any, Any]:
    """Return the numbers as int64, and whether each is a whole number (None: all are)."""
    if not found.is_floating_point():
        return found.long(), None
    whole = (found == found.floor()) & (found.abs() < MAX_CODE)
    return torch.where(whole, found, 0).long(), whole


def read_indices(found: Any, name: str, allowed: range, *, wait: bool) -> tuple[Any, Any]:
    """Return indices as int64, and whether each is allowed.

    Instead of the latter, None if they have been checked: on the CPU, and if `wait` is True.
    """
    index, whole = _to_whole(found)
    valid = (index >= allowed.start) & (index < allowed.stop)
    valid = valid if whole is None else valid & whole
    if not wait and found.device.type != "cpu":
        return index, valid
    if not bool(valid.all()):
        wrong = found[~valid][0].item()
        if whole is not None and not bool(whole.all()):
            wrong = found[~whole][0].item()
            raise FedgftError(f"must hold indices (whole numbers), not {wrong:g}", field=name)
        what = "classes" if name == "y" else "groups"
        more = "" if allowed.start == 0 else ", and -1 where it is missing"
        raise FedgftError(
            f"holds the index {wrong:g}; there are {allowed.stop} {what}: 0 to {allowed.stop - 1}"
            f"{more}",
            field=name,
        )
    return index, None

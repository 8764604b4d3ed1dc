"""A site: its model, its rows, and the sums of the one over the other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from fedgft.errors import FedgftError
from fedgft.flower.wire import Names
from fedgft.metrics import Tally

if TYPE_CHECKING:
    from fedgft.flower.client import ServerPenalty

Batch = tuple[Any, Any, Any]  # inputs, labels, groups (-1: not recorded)
PIECE = 2**14  # rows of a table in one forward pass


@dataclass
class Site:
    """One site's pieces. `rows` and `held_out` are three tensors (inputs, labels, groups), or an
    iterable of batches that `read` turns into three. `train(model, penalty, config)` is your own
    local training, which adds `penalty(logits, labels, groups)` to its loss; it may return metrics.
    """

    model: Any
    rows: Any
    held_out: Any = None
    read: Callable[[Any], Any] = tuple
    train: Callable[[Any, "ServerPenalty", ConfigRecord], dict[str, float] | None] | None = None
    classes: int | Sequence[str] = 2
    groups: int | Sequence[str] = 2
    name: str = "unnamed"
    attribute: str = "group"  # what the groups are groups of, in a report
    key: int = 0  # names the site in the random numbers
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.names = Names.of(self.classes, self.groups)
        for rows in (self.rows, self.held_out):
            if rows is not None and not is_table(rows) and iter(rows) is rows:
                raise FedgftError("rows are read several times: give tensors or a loader, not an "
                                  "iterator that is used up")  # fmt: skip

    def load(self, arrays: ArrayRecord) -> None:
        """Puts the received parameters into the model."""
        own = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        sent = {name: tuple(array.shape) for name, array in arrays.items()}
        if own != sent:
            odd = [n for n in sorted(own | sent) if own.get(n) != sent.get(n)]
            raise FedgftError(
                f"site '{self.name}': the model it received has '{odd[0]}' {sent.get(odd[0])}, its "
                f"own {own.get(odd[0])}: other columns, classes or another model than the server's"
            )
        try:
            self.model.load_state_dict(arrays.to_torch_state_dict())
        except Exception as error:  # whatever a stranger's bytes may do to a decoder
            raise FedgftError(f"site '{self.name}': the model it received cannot be read "
                              f"({type(error).__name__})") from None  # fmt: skip

    def tally(self, rows: Any) -> Tally:
        """The model's sums over these rows."""
        import torch

        groups, total = len(self.names.groups), None
        self.model.eval()
        with torch.no_grad():
            for x, y, a in self.batches(rows):
                probs = self.model(x).double().softmax(-1).cpu().numpy()
                own = Tally.of(probs, np.asarray(y.cpu()), np.asarray(a.cpu()), num_groups=groups)
                total = own if total is None else total + own
        if total is None:
            raise FedgftError(f"site '{self.name}' has no rows")
        return total

    def counts(self) -> np.ndarray:
        """Training rows by label and group, the last column: not recorded."""
        out = np.zeros(self.names.shape[:2])
        for _, y, a in self.batches(self.rows):
            np.add.at(out, (np.asarray(y.cpu()), np.asarray(a.cpu())), 1.0)
        return out

    def size(self) -> int:
        """Of training rows; a loader must be read for it."""
        return len(self.rows[1]) if is_table(self.rows) else int(self.counts().sum())

    def batches(self, rows: Any) -> Iterable[Batch]:
        if is_table(rows):
            x, y, a = rows
            return ((x[i : i + PIECE], y[i : i + PIECE], a[i : i + PIECE])
                    for i in range(0, len(y), PIECE))  # fmt: skip
        return map(self.read, rows)


def is_table(rows: Any) -> bool:
    return isinstance(rows, tuple) and len(rows) == 3 and hasattr(rows[0], "shape")

"""What an executor is asked to do in a round, and what every executor can do."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedgft.engine.book import Units
from fedgft.federated import Cohort
from fedgft.metrics import Tally
from fedgft.optim import Moments
from fedgft.types import Price, Weights


@dataclass(frozen=True)
class Task:
    """Local training of some units. The whole method is in `weights`, `price`, `mu`, `drift`."""

    units: Units
    seeds: np.ndarray  # (u, epochs), uint64: the order of the rows
    noise: np.ndarray  # (u, epochs), uint64: seeds of whatever is random inside the module
    batch_size: int
    most: int  # rows of an epoch that are read at most
    lr: np.ndarray  # (u,)
    weights: Weights  # (u, c, k): what a row of this label and group counts
    price: Price  # (u, c, k, c): what each of its scores costs
    least: int = 1  # rows that a batch must have
    mu: float = 0.0  # the pull back to where the round began,
    origin: Any = None  # (u, p): if that is not where this training begins
    drift: Any = None  # (u, w): what is added to every gradient; an executor's array, or nothing
    gradients: Any = None  # (u, w): raw gradients are added up here, where there is a drift

    def part(self, at: slice) -> "Task":
        """Some of the units. What is an executor's array is given to each part by itself."""
        return replace(
            self, units=self.units[at], seeds=self.seeds[at], noise=self.noise[at], lr=self.lr[at],
            weights=self.weights[at], price=self.price[at],
        )  # fmt: skip

    @property
    def steps(self) -> np.ndarray:
        """(u,): local steps of each unit."""
        whole, rest = np.divmod(np.minimum(self.units.sizes, self.most), self.batch_size)
        return (whole + (rest >= self.least) * (rest > 0)) * self.seeds.shape[1]


@runtime_checkable
class Executor(Protocol):
    """Blocks are the executor's own arrays, (units or runs, parameters); `train` may reuse its."""

    @property
    def name(self) -> str: ...

    @property
    def trained(self) -> int: ...  # parameters that are trained; the rest are buffers, behind them

    @property
    def least(self) -> int: ...  # rows that its model asks for in a batch

    @property
    def wave(self) -> int | None: ...  # units that are trained at a time; None: all of them

    def local(self) -> np.ndarray: ...  # places of what a client may keep to itself

    def place(self, params: np.ndarray) -> Any: ...

    def fetch(self, block: Any) -> np.ndarray: ...

    def zeros(self, units: int) -> Any: ...  # (units, w): as long as a gradient

    def stored(self, units: int, width: int) -> Any: ...  # zeros, where clients' memories are kept

    def out(self, stored: Any, at: np.ndarray) -> Any: ...  # a copy of some rows, to work with

    def back(self, stored: Any, at: np.ndarray, values: Any) -> None: ...

    def tensor(self, array: np.ndarray, host: bool) -> Any: ...  # from a snapshot

    def park(self, block: Any) -> Any: ...  # models that wait for their weights

    def column(self, values: np.ndarray) -> Any: ...  # (n,) -> (n, 1)

    def where(self, chosen: Any, first: Any, second: Any) -> Any: ...

    def moments(self, units: int, *, brief: bool = False) -> Moments: ...  # brief: for one `train`

    def recall(self, kept: Moments, at: np.ndarray) -> Moments: ...

    def train(self, task: Task, block: Any, moments: Moments) -> Any: ...

    def measure(self, units: Units, block: Any, which: np.ndarray) -> Tally: ...

    def mix(
        self, coefficients: np.ndarray, block: Any, params: Any, cohort: Cohort, total: Any = None
    ) -> Any: ...  # added to `total`, of the waves before

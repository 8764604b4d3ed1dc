"""The stacked executor: the models of many clients in one batched program.

For each shape, `vmap(vjp(module))` over a group of models is captured once with make_fx and then
replayed in every step; this removes functorch's dispatch from the loop. Clients are sorted by their
number of steps, so that the active clients are a prefix of the group. A short last batch is padded
with rows of weight zero.

The kind and the size of the layers decide whether a module is stacked, not a timing: the results of
two executors differ by rounding, so a choice by timing would make results depend on the load of the
machine. The rule follows `benchmarks/modules.py`. CPU seconds of three rounds, sequential / stacked
(after capture):

| module                  | batches of 256 | batches of 32 |
|-------------------------|----------------|---------------|
| MLP, 10,000 parameters  | 0.2 / 0.1      | 0.6 / 0.2     |
| MLP, 107,000 parameters | 0.5 / 0.6      | 1.0 / 1.6     |
| MLP, 1.2 million        | 3.1 / 13.5     | 5.8 / 53.8    |
| LSTM                    | 1.0 / 3.3      | 1.6 / 2.6     |
| transformer layer       | 1.3 / 1.5      | 2.9 / 1.4     |

Capturing an unrolled LSTM takes another 4 seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedgft.algorithms import Cohort
from fedgft.engine.executors import torch_common as common
from fedgft.engine.executors.base import Task
from fedgft.engine.executors.numpy_kernels import Array
from fedgft.engine.executors.torch_common import Layout, ModuleTraits, TorchExecutor
from fedgft.engine.plan import RowIndex
from fedgft.models import Model, Module
from fedgft.optimizers import Moments, step
from fedgft.settings import Settings

# Models per group: on a CPU they fit into the second-level cache together, on a GPU they fill it.
GROUP_SIZE = {"cpu": 20, "cuda": 512}
MAX_PARAMETERS = 64_000  # per model on a CPU: several larger models do not fit into the cache
MAX_ATTENTION_ROWS = 64  # rows per batch: with more, one attention model keeps a core busy
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

Gradient = Callable[..., Tensor]


@dataclass(frozen=True)
class ProgramShape:
    """Everything that a captured program depends on, apart from the model.

    `batch` holds the number of rows and then the shape of one row.
    """

    models: int
    batch: tuple[int, ...]
    classes: int
    dtype: torch.dtype
    device: str


@lru_cache(maxsize=256)
def capture_gradient(model: Model, shape: ProgramShape) -> Gradient:
    """Return a program (params, x, labels, weights, price, share) -> gradients.

    All arguments have a leading axis of models. `x` holds the rows of a batch, `labels` their
    labels by class, `weights` and `price` the entries of the method's tables for these rows, and
    `share` the weight of each row in the mean of the batch, which is 0 for padding.
    """
    with torch.random.fork_rng(devices=[]):
        module = model.module(features=shape.batch[1], classes=shape.classes)
    module = module.to(dtype=shape.dtype, device=shape.device).train()
    layout = Layout.of(module)

    def one(flat: Tensor, x: Tensor, y: Tensor, w: Tensor, price: Tensor, share: Tensor) -> Tensor:
        logits, pull, *_ = vjp(lambda p: functional_call(module, layout.views(p), (x,)), flat)
        objective = common.residual(logits.softmax(-1), y, w, price) * share.unsqueeze(-1)
        return pull(objective)[0]

    def zeros(*size: int) -> Tensor:
        return torch.zeros(shape.models, *size, dtype=shape.dtype, device=shape.device)

    rows = shape.batch[0]
    classes = shape.classes
    shapes = ((layout.trained,), shape.batch, (rows, classes), (rows,), (rows, classes), (rows,))
    return make_fx(vmap(one))(*(zeros(*size) for size in shapes))  # a separate tensor per argument


class StackedExecutor(TorchExecutor):
    """Trains groups of models in one program; the clients' state is kept on the device."""

    name = "stacked"
    on_host = False

    @cached_property
    def _programs(self) -> dict[ProgramShape, Gradient]:
        return {}  # programs of a module that the caller passed, for this simulation only

    def why_not_captured(self) -> str | None:
        """Return why the module cannot be vectorized, or None if it can; found by trying it."""
        settings = self.settings
        clients = self.index.runs * (settings.cohort or self.index.num_clients)
        models = min(GROUP_SIZE[self.rows.device.type], clients)
        try:
            self._program(models, _batch_width(self.index.sizes, settings.batch_size))
        except Exception as error:
            return f"it does not vectorize ({common.first_line(error)})"
        return None

    def mix(
        self, coefficients: Array, block: Tensor, params: Tensor, cohort: Cohort, total: Any = None
    ) -> Tensor:
        """Return sum_k c_k (model_k - params) of each run."""
        assert total is None  # all units are one chunk
        weight = self.rows.put(coefficients)
        moved = block - params[cohort.run]
        pairs = pairwise(cohort.bounds.tolist())
        with common.one_thread_per_operation():
            return torch.stack([weight[a:b] @ moved[a:b] for a, b in pairs])

    def _train(self, task: Task, block: Tensor, moments: Moments | None) -> None:
        """Train in place, in groups of units with similar numbers of steps."""
        if moments is None:
            moments = Moments.zeros(self.buffers.zeros, len(block), self.layout.trained)
        order = np.argsort(-task.steps, kind="stable")
        size = GROUP_SIZE[self.rows.device.type]
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        # Capturing a program patches torch for all threads, so it is done before threads start.
        groups = [_Group(self, task, units) for units in parts]
        threads = min(self.settings.threads, len(groups))
        common.run_in_threads(lambda group: group.train(block, moments), groups, threads)

    def _program(self, models: int, width: int) -> Gradient:
        """Return the program for `models` models and `width` rows per batch.

        It is cached across simulations, unless the caller passed the module and may change it.
        """
        rows = self.rows
        batch = (width, *rows.shape)
        shape = ProgramShape(models, batch, rows.classes, rows.dtype, str(rows.device))
        if not (isinstance(self.model, Module) and self.model.given):
            return capture_gradient(self.model, shape)
        if shape not in self._programs:
            self._programs[shape] = capture_gradient.__wrapped__(self.model, shape)
        return self._programs[shape]


class _Group:
    """Some units of a task, sorted by decreasing number of steps, and the programs they need."""

    def __init__(self, executor: StackedExecutor, task: Task, units: np.ndarray) -> None:
        self.executor = executor
        self.task = task
        self.units = units
        self.steps = task.steps[units]
        self.width = _batch_width(task.units.sizes[units], task.batch_size)
        self.sizes = _models_per_step(self.steps)
        self.programs = {n: executor._program(n, self.width) for n in set(self.sizes)}

    def train(self, block: Tensor, moments: Moments) -> None:
        """Train all units and write the results to their rows of `block` and `moments`."""
        task = self.task
        units = self.units
        optimizer = self.executor.settings.optimizer
        params = block[units]
        start = (block if task.origin is None else task.origin)[units]
        lr = self.executor.rows.put(task.lr[units])[:, None]
        unit_moments = moments[units]
        for s, inputs in enumerate(self._inputs()):
            size = len(inputs[0])
            at = slice(0, int((self.steps > s).sum()))
            grad = self.programs[size](params[:size], *inputs)[at]
            if task.drift is not None:
                task.gradients[units[at]] += grad
                grad = grad + task.drift[units[at]]
            if task.mu:
                grad = grad + task.mu * (params[at] - start[at])
            step(optimizer, params[at], grad, moments=unit_moments[at], lr=lr[at])
        block[units] = params
        moments[units] = unit_moments

    def _inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the program's arguments for each step, without the parameters."""
        rows = self.executor.rows
        run = torch.as_tensor(self.task.units.run[self.units], device=rows.device)
        weights, labels, price = rows.put_tables(self.task, self.units)
        positions, share = self._schedule()
        for s, size in enumerate(self.sizes):
            at = positions[s, :size]
            cell = rows.cell[at]
            by_class = cell.unsqueeze(-1).expand(-1, -1, rows.classes)
            yield (
                rows.read(at, rows.mean[run[:size]], rows.inverse[run[:size]]),
                labels[:size].gather(1, by_class),
                weights[:size].gather(1, cell),
                price[:size].gather(1, by_class),
                share[s, :size],
            )

    def _schedule(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows and their shares of the batch, (step, unit, row).

        The share of padding is 0.
        """
        rows = self.executor.rows
        weights = self.executor.index.row_weights
        positions = np.zeros((len(self.sizes), len(self.units), self.width), dtype=np.int64)
        share = np.zeros(positions.shape)
        for j, unit in enumerate(self.units.tolist()):
            epochs = self.task.batches(self.executor.index.rows, unit)
            for s, batch in enumerate(chain.from_iterable(epochs)):
                positions[s, j, : len(batch)] = rows.positions(batch)
                share[s, j, : len(batch)] = 1.0 / len(batch)
                if weights is not None:
                    share[s, j, : len(batch)] *= weights[batch]
        return torch.as_tensor(positions, device=rows.device), rows.put(share)


def why_not_stacked(traits: ModuleTraits, index: RowIndex, settings: Settings) -> str | None:
    """Return why clients must train one by one, or None if stacking is possible and faster.

    With ``executor="stacked"``, reasons why stacking would be slower are ignored.
    """
    module = traits.module
    changing = [buffer.is_floating_point() for buffer in module.buffers()]
    trained = [parameter.requires_grad for parameter in module.parameters()]
    impossible = {
        "in bf16 clients train one by one": settings.precision == "bf16",
        "clients whose images are mirrored train one by one": settings.augment != "none",
        "on several devices clients train one by one": len(settings.devices) > 1,
        "it has convolutions, which are 4 x slower": _find(module, nn.modules.conv._ConvNd),
        "it has {}, which ties rows of a batch together": _find(module, common.NORM_LAYERS),
        "it has dropout or other randomness inside": traits.random,
        "it has buffers that change while it trains": any(changing),
        "some of its parameters are frozen": not all(trained),
    }
    rows = _batch_width(index.sizes, settings.batch_size)
    many = rows > MAX_ATTENTION_ROWS
    parameters = sum(p.numel() for p in module.parameters())
    slower = {
        f"it has more than {MAX_PARAMETERS:,} parameters": parameters > MAX_PARAMETERS,
        "it has {}, which would be unrolled step by step": _find(module, RECURRENT),
        f"it has {{}}, and batches of {rows} rows": many and _find(module, ATTENTION),
    }
    counts = settings.executor == "auto" and settings.device == "cpu"
    reasons = impossible | slower if counts else impossible
    return next((text.format(found) for text, found in reasons.items() if found), None)


def _find(module: nn.Module, kinds: Any) -> str | None:
    """Return the class name of the first layer that is an instance of `kinds`, or None."""
    return next((type(part).__name__ for part in module.modules() if isinstance(part, kinds)), None)


def _batch_width(sizes: np.ndarray, batch_size: int) -> int:
    """Return the number of rows, with padding, in a batch of clients of the given sizes."""
    return min(batch_size, _next_power_of_two(max(1, int(sizes.max(initial=1)))))


def _models_per_step(steps: np.ndarray) -> list[int]:
    """Return the number of models computed in each step.

    It is the number of active models, rounded up to a power of two so that few programs are needed.
    """
    active = (steps > np.arange(steps.max(initial=0))[:, None]).sum(1)
    return [min(len(steps), _next_power_of_two(int(count))) for count in active]


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()

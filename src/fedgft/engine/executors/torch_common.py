"""Code shared by the torch executors: flat parameter vectors, data on a device, measurements.

Subclasses of `TorchExecutor` differ in how they train clients and combine their models.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from fedgft.engine.client_reports import report_rows
from fedgft.engine.executors.base import Buffers, ModelSpec, Task
from fedgft.engine.plan import RowIndex, Units
from fedgft.errors import FedgftError
from fedgft.models import Model, named_tensors
from fedgft.optimizers import Moments
from fedgft.settings import Settings
from fedgft.sums import Sums

IMAGE_AXES = 4  # number of axes of a block of images
MAX_LOG = 700.0  # of a probability; exp of it is finite in double precision
FILTER_AXES = 4  # number of axes of convolution weights, which are stored channels-last
UPLOAD_ROWS = 4096  # number of rows that are copied to a GPU at a time
MEASURED_BYTES = {"cpu": 2**19, "cuda": 2**28}  # bytes of features per forward pass
NORM_LAYERS = torch.nn.modules.batchnorm._NormBase

Map = Callable[[Callable[[Tensor], Tensor], Iterable[Tensor]], Iterable[Tensor]]


@dataclass(frozen=True)
class Layout:
    """The layout of a module as one flat vector: trained tensors, frozen tensors, then buffers.

    Outside the executors, a vector has the order of `models.named_tensors` (the outer order).
    Inside them, the weights of convolutions are stored channels-last (the inner order). All other
    operations act on single elements, so they do not depend on the order.

    Attributes
    ----------
    names, shapes
        Names and shapes of the tensors, in the order of the vector.
    trained
        Length of the trained part.
    norm_names
        The tensors of normalization layers.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    trained: int
    norm_names: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> "Layout":
        """The layout of a module."""
        named = named_tensors(module)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        norms = {
            f"{place}.{name}".removeprefix(".")
            for place, part in module.named_modules()
            if isinstance(part, NORM_LAYERS)
            for name in (*dict(part.named_parameters()), *dict(part.named_buffers()))
        }
        return cls(tuple(named), tuple(t.shape for t in named.values()), trained, frozenset(norms))

    @cached_property
    def edges(self) -> list[int]:
        """The offset at which each tensor begins, followed by the length of the vector."""
        return [0, *accumulate(shape.numel() for shape in self.shapes)]

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.edges[-1]

    def views(self, flat: Tensor, start: int = 0) -> dict[str, Tensor]:
        """Return named views of the tensors in `flat`, a part of the vector that begins at `start`.

        Both the part and `start` are in the inner order.
        """
        inside = [entry for entry in self._entries() if start <= entry[2] < start + len(flat)]
        return {name: _view(flat, at - start, shape) for name, shape, at in inside}

    @cached_property
    def inner_order(self) -> np.ndarray:
        """The position in the outer order of each element of the inner order, (p,)."""
        order = np.arange(self.size)
        for _, shape, at in self._entries():
            if len(shape) == FILTER_AXES:
                part = order[at : at + shape.numel()]
                part[:] = part.reshape(shape).transpose(0, 2, 3, 1).ravel()
        return order

    def to_inner(self, flat: np.ndarray) -> np.ndarray:
        """Reorder vectors (..., p) from the outer to the inner order."""
        return np.take(flat, self.inner_order, axis=-1)

    def to_outer(self, flat: np.ndarray) -> np.ndarray:
        """Reorder vectors (..., p) from the inner to the outer order."""
        out = np.empty_like(flat)
        out[..., self.inner_order] = flat
        return out

    def norms(self) -> np.ndarray:
        """Return the positions of the normalization layers' parameters and buffers, for FedBN."""
        lengths = [shape.numel() for shape in self.shapes]
        return np.flatnonzero(np.repeat([name in self.norm_names for name in self.names], lengths))

    def _entries(self) -> list[tuple[str, torch.Size, int]]:
        return list(zip(self.names, self.shapes, self.edges, strict=False))


def _view(flat: Tensor, at: int, shape: torch.Size) -> Tensor:
    part = flat[at : at + shape.numel()]
    if len(shape) != FILTER_AXES:
        return part.view(shape)
    outputs, channels, height, width = shape
    return part.view(outputs, height, width, channels).permute(0, 3, 1, 2)


def residual(probs: Tensor, labels: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """Return the gradient of weights * cross-entropy + <price, probs> with respect to the logits.

    Every objective has this gradient. With probabilities p and price v it is
    weights (p - labels) + p (v - <v, p>). Labels are one-hot, unless the method changes them.
    """
    centered_price = price - (price * probs).sum(-1, keepdim=True)
    return weights.unsqueeze(-1) * (probs - labels) + probs * centered_price


class DeviceRows:
    """The data set on one device.

    Images are stored channels-last with one byte per channel; each batch is converted to
    floating-point numbers on the device. A GPU holds only the rows that the runs use.

    Attributes
    ----------
    features
        Features of the stored rows.
    cell
        The index of the (label, group) cell of each stored row.
    cells
        The number of (label, group) cells.
    mean, inverse
        Mean and 1 / spread of the features of each run.
    used
        Row numbers of the stored rows on a GPU; None: all rows.
    weight
        The weight of each stored row; None: all rows count the same.
    """

    def __init__(self, index: RowIndex, settings: Settings, device: str) -> None:
        data = index.dataset
        self.device = torch.device(device)
        self.dtype = getattr(torch, settings.dtype)
        self.groups = data.num_cells + 1
        self.classes = len(data.classes)
        self.shape = data.features.shape[1:]
        self.used = np.unique(index.rows) if self.device.type == "cuda" else None
        self.features = self._upload(data.features)
        cell = data.labels * self.groups + data.cells % self.groups
        cell = cell if self.used is None else cell[self.used]
        self.cell = torch.as_tensor(cell, dtype=torch.long, device=self.device)
        self.cells = self.classes * self.groups
        weight = index.row_weights
        if weight is not None and self.used is not None:
            weight = weight[self.used]
        self.weight = None if weight is None else self.put(weight)
        self.scaled = any(f.mean is not None for f in index.federations)
        scaling = index.scaling(data.features.shape[1], np.dtype(settings.dtype))
        self.mean, self.inverse = (self.put(each) for each in scaling)

    def _upload(self, features: np.ndarray) -> Tensor:
        if features.ndim == IMAGE_AXES:
            features = np.moveaxis(features, 1, -1)
        dtype = torch.uint8 if features.dtype == np.uint8 else self.dtype
        if self.used is None:
            array = np.require(features, requirements=["C", "W"])  # torch warns of read-only memory
            return torch.as_tensor(array, dtype=dtype)
        size = (len(self.used), *features.shape[1:])
        stored = torch.empty(size, dtype=dtype, device=self.device)
        for at in range(0, len(self.used), UPLOAD_ROWS):
            part = features[self.used[at : at + UPLOAD_ROWS]]
            stored[at : at + UPLOAD_ROWS] = torch.as_tensor(part, dtype=dtype)
        return stored

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Return the positions on the device of the given rows of the data set."""
        return rows if self.used is None else np.searchsorted(self.used, rows)

    def put(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device, in the executor's precision."""
        return torch.as_tensor(array, dtype=self.dtype, device=self.device)

    def put_integers(self, values: np.ndarray) -> Tensor:
        """Copy integers to the device without waiting for the copy to finish."""
        tensor = torch.as_tensor(values, dtype=torch.long)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def read(self, positions: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
        """Return the scaled features of the rows at `positions`.

        `positions`, `mean` and `inverse` (1 / spread) have the same leading axes.
        """
        x = self.features.index_select(0, positions.reshape(-1)).to(self.dtype)
        x = x.reshape(*positions.shape, *self.features.shape[1:])
        if len(self.shape) == IMAGE_AXES - 1:
            x = x.movedim(-1, -3)
        if not self.scaled:
            return x
        shape = (*mean.shape[:-1], 1, mean.shape[-1], *[1] * (len(self.shape) - 1))
        return (x - mean.reshape(shape)) * inverse.reshape(shape)

    def put_tables(self, task: Task, at: Any = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the tables of the units `at`.

        Returns row weights (u, cells), labels (u, cells, classes) and prices (u, cells, classes).
        """
        labels = np.ascontiguousarray(task.soft_labels()[at])
        tables = (self.put(labels).flatten(1, 2), self.put(task.price[at]).flatten(1, 2))
        return self.put(task.weights[at]).flatten(1), *tables


@dataclass(frozen=True)
class TorchBuffers(Buffers):
    """Torch tensors with one row per unit or client.

    With `on_host`, the clients' state between rounds and parked models are kept in host memory.
    """

    device: torch.device
    on_host: bool

    def zeros(self, rows: int, width: int) -> Tensor:
        """Return zeros on the device."""
        return torch.zeros(rows, width, dtype=self.dtype, device=self.device)

    def storage(self, rows: int, width: int) -> Tensor:
        """Return zeros for the clients' state between rounds."""
        dtype = str(self.dtype).removeprefix("torch.")
        return self.restore(np.zeros((rows, width), dtype), self.on_host)

    def restore(self, array: np.ndarray, on_host: bool) -> Tensor:
        """Return the array on the device, or in host memory that a GPU can access."""
        tensor = torch.from_numpy(array)
        if not on_host:
            return tensor.to(self.device)
        return tensor if self.device.type == "cpu" else tensor.pin_memory()

    def read(self, stored: Tensor, at: np.ndarray) -> Tensor:
        """Copy the rows `at` to the device."""
        if not stored.is_pinned():
            return stored[at].to(self.device)
        out = torch.empty(len(at), stored.shape[1], dtype=stored.dtype, device=self.device)
        for i, place in enumerate(at.tolist()):
            out[i].copy_(stored[place], non_blocking=True)
        return out

    def write(self, stored: Tensor, at: np.ndarray, values: Tensor) -> None:
        """Replace the rows `at` by `values`."""
        if not stored.is_pinned():
            stored[at] = values.to(stored.device)
            return
        for i, place in enumerate(at.tolist()):
            stored[place].copy_(values[i], non_blocking=True)

    def park(self, block: Tensor) -> Tensor:
        """Move models to host memory (with `on_host`) until their coefficients are known."""
        return block.cpu() if self.on_host else block


@dataclass(frozen=True)
class ModuleTraits:
    """A module on the CPU, and its properties as found by a trial run on two rows.

    `random` says whether training draws random numbers; `min_batch` is the smallest number of rows
    that a batch may have.
    """

    module: torch.nn.Module
    random: bool
    min_batch: int


class TorchExecutor:
    """Base of the torch executors; subclasses define `_train`, `mix` and `_chunk`.

    Parameters
    ----------
    index
        Rows of every client.
    model
        Builds the module.
    settings
        Devices, threads, precision and optimizer.
    traits
        Properties of the module; see `probe_module`.
    """

    name: str
    on_host: bool  # whether the clients' state between rounds is kept in host memory

    def __init__(
        self, index: RowIndex, model: Model, settings: Settings, traits: ModuleTraits
    ) -> None:
        self.index = index
        self.model = model
        self.settings = settings
        self.traits = traits
        self.devices = [DeviceRows(index, settings, device) for device in settings.devices]
        self.rows = self.devices[0]
        self.module = _build_module(model, index, settings)
        self.layout = Layout.of(self.module)
        self.buffers: Buffers = TorchBuffers(self.rows.dtype, self.rows.device, self.on_host)
        self._modules: SimpleQueue[torch.nn.Module] = SimpleQueue()  # one per thread
        for _ in range(self.threads):
            self._modules.put(copy.deepcopy(self.module).eval())

    @property
    def threads(self) -> int:
        """The number of computing threads; on a GPU it is one, which keeps the GPU busy."""
        return self.settings.threads if self.rows.device.type == "cpu" else 1

    @cached_property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""
        trained = self.layout.trained
        norms = self.layout.norms()
        return ModelSpec(trained, trained, norms, self.traits.min_batch, self._chunk())

    def to_device(self, params: np.ndarray) -> Tensor:
        """Parameters on the device, in the inner order."""
        return self.rows.put(self.layout.to_inner(np.asarray(params)))

    def to_host(self, block: Tensor) -> np.ndarray:
        """Parameters in the outer order."""
        return self.layout.to_outer(block.cpu().numpy())

    def to_gradient(self, difference: Tensor) -> Tensor:
        """Return the trained part of a difference of parameters, (u, w)."""
        return difference[:, : self.layout.trained]

    def train(self, task: Task, block: Tensor, moments: Moments | None) -> Tensor:
        """Train each unit's model; `block` is changed in place."""
        with one_thread_per_operation(), self._torch_flags():
            self._train(task, block, moments)
        return block

    def measure(self, units: Units, block: Tensor, which: np.ndarray) -> Sums:
        """Sums over the rows of each unit under model `block[which[i]]`."""
        shape = (*units.count.shape, self.rows.classes)
        axis = self.index.dataset.axis
        sums = Sums(units.count, np.empty(shape), np.empty(shape), axis=axis)
        with one_thread_per_operation(), self._torch_flags(), ExitStack() as stack:
            threads: Map = map  # CUDA libraries cache their choices per thread
            if self.threads > 1:
                threads = stack.enter_context(ThreadPoolExecutor(self.threads)).map
            for model in np.unique(which).tolist():
                at = np.flatnonzero(which == model)
                params = block[model].to(self.rows.device)
                self._measure_model(threads, sums, units, at=at, params=params)
        return sums

    def report(
        self, units: Units, block: Tensor, which: np.ndarray, *, bins: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return summed losses, summed logits and histograms by label and group of each unit."""
        logs = np.empty((int(units.sizes.sum()), self.rows.classes))
        ends = np.cumsum(units.sizes)
        with one_thread_per_operation(), self._torch_flags():
            for i, end in enumerate(ends):
                part = self.index.rows[units.low[i] : units.high[i]]
                rows = self.rows.put_integers(self.rows.positions(part))
                params = block[int(which[i])].to(self.rows.device)
                probs = self._scores(map, rows, int(units.run[i]), params)
                with np.errstate(divide="ignore"):
                    logs[end - len(part) : end] = np.log(probs).clip(-MAX_LOG, 0)  # NaN stays
        return report_rows(self.index, units, logs, bins=bins)

    def _train(self, task: Task, block: Tensor, moments: Moments | None) -> None:
        """Train in place."""
        raise NotImplementedError

    def _chunk(self) -> int | None:
        """Return the number of units that are trained at a time; None means all."""
        return None

    def _measure_model(
        self, threads: Map, sums: Sums, units: Units, *, at: np.ndarray, params: Tensor
    ) -> None:
        """Fill in the sums of the units `at`, which share one model."""
        cells = self.rows.groups * self.rows.classes
        parts = [self.index.rows[units.low[i] : units.high[i]] for i in at]
        rows = self.rows.put_integers(self.rows.positions(np.concatenate(parts)))
        scores = self._scores(threads, rows, int(units.run[at[0]]), params)
        unit = np.repeat(np.arange(len(at)), units.sizes[at])
        cell = unit * cells + self.rows.cell[rows].cpu().numpy()
        chosen = scores.argmax(1)
        weights = self.index.row_weights
        if weights is not None:
            weights = weights[np.concatenate(parts)]
        for c in range(self.rows.classes):
            score = scores[:, c]
            decided = (chosen == c) + 0 * score  # NaN if the run diverged
            if weights is not None:
                score, decided = weights * score, weights * decided
            for array, values in ((sums.score, score), (sums.decision, decided)):
                flat = np.bincount(cell, weights=values, minlength=len(at) * cells)
                array[at, ..., c] = flat.reshape(len(at), *sums.count.shape[1:])

    def _scores(self, threads: Map, rows: Tensor, run: int, params: Tensor) -> np.ndarray:
        """Return class probabilities (rows, classes).

        Rows are processed in pieces that fit into the cache or the GPU.
        """
        views = self.layout.views(params)
        mean = self.rows.mean[run]
        inverse = self.rows.inverse[run]

        def logits(part: Tensor) -> Tensor:
            module = self._modules.get()
            try:
                with torch.no_grad(), autocast(self.settings, self.rows.device):
                    x = self.rows.read(part, mean, inverse)
                    return functional_call(module, views, (x,)).double()
            finally:
                self._modules.put(module)

        if len(rows) == 0:
            return np.zeros((0, self.rows.classes))
        row_bytes = int(np.prod(self.rows.shape)) * self.rows.dtype.itemsize
        piece = max(1, MEASURED_BYTES[self.rows.device.type] // row_bytes)
        odds = torch.cat(list(threads(logits, rows.split(piece))))
        odds = (odds - odds.amax(-1, keepdim=True)).exp()
        return (odds / odds.sum(-1, keepdim=True)).cpu().numpy()

    @contextmanager
    def _torch_flags(self) -> Iterator[None]:
        """Set cuDNN, TF32 and determinism flags within the block."""
        if self.rows.device.type == "cpu":
            yield
            return
        deterministic = self.settings.deterministic
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        flags = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, allow_tf32=False, deterministic=deterministic
        )
        try:
            with flags, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # harmless, once
                yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Split work by client, not inside operations, so that results do not depend on threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_in_threads(function: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    """Call the function with each item; with `threads` = 1, in the calling thread."""
    if threads == 1:
        for item in items:
            function(item)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(function, items))


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """A context in which products are computed in bfloat16 if the settings ask for it."""
    half = settings.precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False)


def probe_module(index: RowIndex, model: Model, settings: Settings) -> ModuleTraits:
    """Build the module, run two rows through it, and raise if it or the data do not fit.

    Random numbers may be drawn in a layer or in `forward` itself. BatchNorm may refuse a batch of
    one row, which has no variance.
    """
    if settings.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module = _build_module(model, index, settings).cpu()
    data = index.dataset
    scaled = index.federations[0].scale_rows(np.arange(min(2, len(data))))
    x = torch.tensor(scaled, dtype=getattr(torch, settings.dtype))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        out = _try_forward(copy.deepcopy(module).eval(), x)
        before = torch.get_rng_state()
        _try_forward(copy.deepcopy(module).train(), x)
        random = not torch.equal(before, torch.get_rng_state())
        try:
            copy.deepcopy(module).train()(x[:1])
            min_batch = 1
        except ValueError:
            min_batch = 2
    _check_output(out, rows=len(x), classes=len(data.classes))
    _check_settings(module, index, settings)
    return ModuleTraits(module, random, min_batch)


def _build_module(model: Model, index: RowIndex, settings: Settings) -> torch.nn.Module:
    data = index.dataset
    with torch.random.fork_rng(devices=[]):
        module = model.module(features=data.features.shape[1], classes=len(data.classes))
    return module.to(dtype=getattr(torch, settings.dtype), device=settings.devices[0])


def _try_forward(module: torch.nn.Module, x: Tensor) -> Any:
    try:
        return module(x)
    except FedgftError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        rows = f"rows of shape {tuple(x.shape[1:])}, type {x.dtype}"
        raise FedgftError(f"the `model` does not take {rows}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def _check_output(out: Any, *, rows: int, classes: int) -> None:
    if not isinstance(out, Tensor):
        wrong = f"`model` must give one tensor of scores, and it gave a {type(out).__name__}"
        raise FedgftError(f"{wrong}; wrap it in a module that returns the scores alone")
    if tuple(out.shape) != (rows, classes):
        wanted = f"one score per class, shape ({rows}, {classes}) for {rows} rows"
        raise FedgftError(f"the model must give {wanted}; it gave {tuple(out.shape)}")


def _check_settings(module: torch.nn.Module, index: RowIndex, settings: Settings) -> None:
    """Raise if the settings require something that the model or the data do not provide."""
    if settings.augment != "none" and index.dataset.features.ndim != IMAGE_AXES:
        raise FedgftError(f"`augment` {settings.augment} is for images")
    if settings.norms == "local" and not Layout.of(module).norm_names:
        raise FedgftError("`fedbn`: the model has no BatchNorm that clients could keep")
    for part in module.modules():
        if isinstance(part, NORM_LAYERS) and part.momentum is None:
            layer = f"{type(part).__name__} with momentum=None counts batches"
            remedy = "give it a momentum (torch's usual one is 0.1)"
            raise FedgftError(f"{layer}, and counts of clients have no mean; {remedy}")

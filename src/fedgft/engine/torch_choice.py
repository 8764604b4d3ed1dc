"""Stacked where the module vectorises, sequential where it does not."""

import copy
import os

import torch
from torch import Tensor

from fedgft.engine import sequential, stacked
from fedgft.engine.book import Book
from fedgft.engine.flat import layout
from fedgft.engine.rows import IMAGES
from fedgft.engine.settings import Settings
from fedgft.engine.torch_executor import TorchExecutor, build
from fedgft.errors import FedgftError
from fedgft.models import Model


def choose_torch_executor(book: Book, model: Model, settings: Settings) -> TorchExecutor:
    check_devices(settings)
    if settings.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module = build(model, book, settings).cpu()
    random, least = _try(module, book, settings)
    _check_wishes(module, book, settings)
    if settings.executor != "sequential":
        reason = _why_one_by_one(settings) or why_not_stacked(module, random=random)
        if reason is None:
            executor = TorchExecutor(
                book, model, settings, name="stacked", trainer=stacked.train, random=random
            )
            reason = _why_not_captured(executor)
            if reason is None:
                return executor
        if settings.executor == "stacked":
            raise FedgftError(f"--executor stacked cannot take this model: {reason}")
    return TorchExecutor(
        book, model, settings, name="sequential", trainer=sequential.train, random=random,
        least=least,
    )  # fmt: skip


def _check_wishes(module: torch.nn.Module, book: Book, settings: Settings) -> None:
    """What the model, or the data, cannot give."""
    if settings.augment != "none" and book.dataset.features.ndim != IMAGES:
        raise FedgftError(f"--augment {settings.augment} is for images")
    if settings.norms == "local" and not layout(module).norms:
        raise FedgftError("--fedbn: the model has no BatchNorm that clients could keep")
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.momentum is None:
            raise FedgftError(
                f"{type(part).__name__} with momentum=None counts batches, and counts of different "
                "clients have no mean; give it a momentum (torch's usual one is 0.1)"
            )


def check_devices(settings: Settings) -> None:
    if settings.device == "cpu":
        return
    for device in settings.devices:
        _check_device(device)


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()) or device.endswith(":"):
        raise FedgftError(f"--device {device!r} is not known; choose cpu, cuda or cuda:0,cuda:1")
    number = int(index or 0)
    if not torch.cuda.is_available():
        raise FedgftError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    if number >= (count := torch.cuda.device_count()):
        raise FedgftError(f"--device {device}: this machine has {count} CUDA device(s), from 0 on")


def _why_one_by_one(settings: Settings) -> str | None:
    if settings.precision == "bf16":
        return "in bf16 clients train one by one"
    if settings.augment != "none":
        return "clients whose pictures are mirrored train one by one"
    return "on several devices clients train one by one" if len(settings.devices) > 1 else None


def why_not_stacked(module: torch.nn.Module, *, random: bool) -> str | None:
    """Rows must be independent, the module free of state; convolutions stack badly (4 x slower)."""
    for part in module.modules():
        if isinstance(part, torch.nn.modules.conv._ConvNd):
            return "it has convolutions"
        if isinstance(part, torch.nn.modules.batchnorm._NormBase):
            return f"it has {type(part).__name__}, which ties rows of a batch together"
    if random:
        return "it has dropout or other randomness inside"
    if any(b.is_floating_point() for b in module.buffers()):
        return "it has buffers that change while it trains"
    if not all(p.requires_grad for p in module.parameters()):
        return "some of its parameters are frozen"
    return None


def _why_not_captured(executor: TorchExecutor) -> str | None:
    """Data-dependent control flow, an operation that vmap does not know: only trying tells."""
    book, settings = executor.book, executor.settings
    models = min(
        stacked.GROUP[executor.rows.device.type], book.runs * (settings.cohort or book.num_clients)
    )
    width = stacked.width_of(book.sizes, settings.batch_size)
    try:
        stacked.program(executor, stacked.shape_of(executor, models, width))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"it does not vectorise ({first_line})"
    return None


def _try(module: torch.nn.Module, book: Book, settings: Settings) -> tuple[bool, int]:
    """Two rows through the model, so that a wrong one is an error before round one.

    Returns whether training draws random numbers, in a layer or in `forward` itself, and how many
    rows a batch must have: one alone has no variance, and BatchNorm may refuse it.
    """
    data, classes = book.dataset, len(book.dataset.classes)
    x = torch.tensor(data.features[:2], dtype=getattr(torch, settings.dtype))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        out = _forward(copy.deepcopy(module).eval(), x)
        before = torch.get_rng_state()
        _forward(copy.deepcopy(module).train(), x)
        random = not torch.equal(before, torch.get_rng_state())
        try:
            copy.deepcopy(module).train()(x[:1])
            least = 1
        except ValueError:
            least = 2
    if tuple(out.shape) != (len(x), classes):
        raise FedgftError(
            f"the model must give one score a class, shape ({len(x)}, {classes}) "
            f"for {len(x)} rows; it gave {tuple(out.shape)}"
        )
    return random, least


def _forward(module: torch.nn.Module, x: Tensor) -> Tensor:
    try:
        return module(x)
    except (RuntimeError, ValueError) as error:
        raise FedgftError(
            f"the model does not take rows of shape {tuple(x.shape[1:])}: {error}"
        ) from error

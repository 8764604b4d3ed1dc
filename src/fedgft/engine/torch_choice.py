"""Stacked where the module vectorises and gains by it, sequential elsewhere.

What gains is told by the kind and size of the layers, not by a clock: executors agree to rounding
only, so a choice by timing would make results depend on how busy a machine is. The rule follows
`benchmarks/modules.py` (CPU seconds of three rounds, sequential / stacked after its capture, in
batches of 256 and of 32): MLP of 10,000 parameters 0.2 / 0.1 and 0.6 / 0.2, of 107,000 0.5 / 0.6
and 1.0 / 1.6, of 1.2 million 3.1 / 13.5 and 5.8 / 53.8; LSTM 1.0 / 3.3 and 1.6 / 2.6; transformer
layer 1.3 / 1.5 and 2.9 / 1.4. Capturing an unrolled LSTM takes another 4 seconds.
"""

import copy
import os
from typing import Any

import numpy as np
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

MOST_PARAMETERS = 64_000  # of a model on a CPU: more than that do not share a cache with others
MOST_ATTENDING = 64  # rows in a batch, where there is attention: beyond it one model fills a core
RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)
ATTENTION = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
)


def choose_torch_executor(book: Book, model: Model, settings: Settings) -> TorchExecutor:
    check_devices(settings)
    if settings.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module = build(model, book, settings).cpu()
    random, least = _try(module, book, settings)
    _check_wishes(module, book, settings)
    if settings.executor != "sequential":
        reason = _why_one_by_one(settings) or why_not_stacked(module, random=random)
        if reason is None and settings.executor == "auto":
            reason = why_slower_stacked(module, book, settings)
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


def why_slower_stacked(module: torch.nn.Module, book: Book, settings: Settings) -> str | None:
    """What makes one model after another faster on a CPU; None where stacking gains."""
    if settings.device != "cpu":
        return None
    if sum(p.numel() for p in module.parameters()) > MOST_PARAMETERS:
        return f"it has more than {MOST_PARAMETERS:,} parameters"
    rows = stacked.width_of(book.sizes, settings.batch_size)
    for part in module.modules():
        if isinstance(part, RECURRENT):
            return f"it has {type(part).__name__}, which would be unrolled step by step"
        if isinstance(part, ATTENTION) and rows > MOST_ATTENDING:
            return f"it has {type(part).__name__}, and batches of {rows} rows"
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
    seen = book.federations[0].seen(np.arange(min(2, len(data))))  # scaled, where it is
    x = torch.tensor(seen, dtype=getattr(torch, settings.dtype))
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
    if not isinstance(out, Tensor):
        raise FedgftError(
            f"model must give one tensor of scores, and it gave a {type(out).__name__}; wrap it in "
            "a module that returns the scores alone"
        )
    if tuple(out.shape) != (len(x), classes):
        raise FedgftError(
            f"the model must give one score a class, shape ({len(x)}, {classes}) "
            f"for {len(x)} rows; it gave {tuple(out.shape)}"
        )
    return random, least


def _forward(module: torch.nn.Module, x: Tensor) -> Any:
    try:
        return module(x)
    except FedgftError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise FedgftError(
            f"the model does not take rows of shape {tuple(x.shape[1:])}, type {x.dtype}: "
            f"{first_line}"
        ) from error

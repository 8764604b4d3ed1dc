"""Stacked where the module vectorises, sequential where it does not."""

import torch

from fedgft.engine import sequential, stacked
from fedgft.engine.book import Book
from fedgft.engine.settings import Settings
from fedgft.engine.torch_executor import TorchExecutor, build
from fedgft.models import Model
from fedgft.types import FedgftError


def choose_torch_executor(book: Book, model: Model, settings: Settings) -> TorchExecutor:
    if settings.device != "cpu" and not torch.cuda.is_available():
        raise FedgftError(f"--device {settings.device}: this machine has no CUDA device")
    module = build(model, book, settings)
    _check_outputs(module, book, settings)
    reason = None if settings.executor == "sequential" else why_not_stacked(module)
    if settings.executor == "stacked" and reason:
        raise FedgftError(f"--executor stacked cannot take this model: {reason}")
    if settings.executor == "sequential" or reason:
        return TorchExecutor(book, model, settings, name="sequential", trainer=sequential.train)
    return TorchExecutor(book, model, settings, name="stacked", trainer=stacked.train)


def why_not_stacked(module: torch.nn.Module) -> str | None:
    """Rows must be independent and the module free of state; convolutions stack badly (4 x slower)."""
    for part in module.modules():
        if isinstance(part, torch.nn.modules.conv._ConvNd):
            return "it has convolutions"
        if isinstance(part, torch.nn.modules.batchnorm._NormBase):
            return f"it has {type(part).__name__}, which ties rows of a batch together"
    if sequential.is_random(module):
        return "it has dropout or other randomness inside"
    if any(b.is_floating_point() for b in module.buffers()):
        return "it has buffers that change while it trains"
    return None


def _check_outputs(module: torch.nn.Module, book: Book, settings: Settings) -> None:
    """One forward pass of two rows, so that a wrong model is an error before round one."""
    data, classes = book.dataset, len(book.dataset.classes)
    x = torch.as_tensor(
        data.features[:2], dtype=getattr(torch, settings.dtype), device=settings.device
    )
    with torch.no_grad():
        out = module.eval()(x)
    if tuple(out.shape) != (len(x), classes):
        raise FedgftError(
            f"the model must give one score a class, shape ({len(x)}, {classes}) for {len(x)} rows; "
            f"it gave {tuple(out.shape)}"
        )

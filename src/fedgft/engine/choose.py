"""Which executor takes a simulation: the fastest one that computes exactly what is asked."""

import numpy as np

from fedgft.engine.book import Book
from fedgft.engine.fused import Fused
from fedgft.engine.settings import Settings
from fedgft.engine.task import Executor
from fedgft.errors import FedgftError
from fedgft.federated import Algorithm
from fedgft.models import Model


def choose_executor(book: Book, model: Model, algorithm: Algorithm, settings: Settings) -> Executor:
    reason = why_not_fused(book, model, algorithm, settings)
    if settings.executor == "fused" and reason:
        raise FedgftError(f"--executor fused cannot take this run: {reason}")
    if settings.executor in ("auto", "fused") and not reason:
        return Fused(book, settings.optimizer, dtype=settings.dtype, threads=settings.threads)
    from fedgft.engine.torch_choice import choose_torch_executor  # heavy: imports torch

    return choose_torch_executor(book, model, settings)


def why_not_fused(book: Book, model: Model, algorithm: Algorithm, settings: Settings) -> str | None:
    """None, or what it is that the one-logit kernel cannot compute exactly."""
    optimizer = settings.optimizer
    if not model.linear:
        return f"the model {model.name!r} is not one linear layer"
    if book.dataset.features.ndim != 2:
        return "the features are not a table"
    if len(book.dataset.classes) != 2:
        return f"the label has {len(book.dataset.classes)} classes, not two"
    if settings.device != "cpu":
        return f"it runs on the CPU, not on {settings.device}"
    if settings.augment != "none":
        return "it reads rows as they are"
    if settings.norms == "local":
        return "the model has no BatchNorm that clients could keep"
    if settings.precision == "bf16":
        return "it computes in fp32 or fp64"
    if optimizer.weight_decay and not optimizer.decoupled:
        return f"weight decay inside the gradient of {optimizer.rule} moves the two logits apart"
    if optimizer.weight_decay and np.any(algorithm.correction.mu):
        return "weight decay together with a proximal term moves the two logits apart"
    return None

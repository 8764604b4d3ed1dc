"""A module as one flat vector of numbers, and where each of its tensors lies in it.

Outside the engine a vector is in the order of `models.tensors`, each tensor as torch prints it.
Inside, the weights of convolutions lie as channels-last programs read them; everything the engine
does to a vector is done number by number, so only those who come and go notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fedgft.models import tensors

CONVOLUTION = 4  # axes of the weights that are laid out anew


@dataclass(frozen=True)
class Layout:
    """Trained tensors first, then frozen ones, then buffers."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    trained: int  # the length of the part that is trained
    norms: frozenset[str]  # tensors of normalising layers

    @cached_property
    def edges(self) -> list[int]:
        """Where each tensor begins, and where the last one ends."""
        return [0, *accumulate(shape.numel() for shape in self.shapes)]

    @property
    def size(self) -> int:
        return self.edges[-1]

    @property
    def heads(self) -> int:
        """How many tensors are trained."""
        return self.edges.index(self.trained) if self.trained else 0

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a vector in the engine's order: of all tensors, or of the trained ones."""
        named = zip(self.names, self.shapes, self.edges, strict=False)
        return {name: _view(flat, at, shape) for name, shape, at in named if at < len(flat)}

    def others(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a vector that holds what is not trained."""
        named = list(zip(self.names, self.shapes, self.edges, strict=False))[self.heads :]
        return {name: _view(flat, at - self.trained, shape) for name, shape, at in named}

    def inward(self, flat: np.ndarray) -> np.ndarray:
        """(..., p) as the outside has it -> as the engine has it."""
        return self._turned(flat, lambda shape: shape, (0, 2, 3, 1))

    def outward(self, flat: np.ndarray) -> np.ndarray:
        return self._turned(flat, lambda s: (s[0], s[2], s[3], s[1]), (0, 3, 1, 2))

    def _turned(
        self, flat: np.ndarray, held: Callable[[torch.Size], Sequence[int]], axes: tuple[int, ...]
    ) -> np.ndarray:
        out = flat.copy()
        for shape, at in zip(self.shapes, self.edges, strict=False):
            if len(shape) == CONVOLUTION:
                part = slice(at, at + shape.numel())
                for old, new in zip(_rows(flat), _rows(out), strict=True):
                    new[part] = old[part].reshape(held(shape)).transpose(axes).ravel()
        return out

    def local(self) -> np.ndarray:
        """Places of the normalising layers' numbers, for clients that keep their own (FedBN)."""
        named = zip(self.names, self.shapes, self.edges, strict=False)
        parts = [np.arange(at, at + shape.numel()) for n, shape, at in named if n in self.norms]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _rows(flat: np.ndarray) -> np.ndarray:
    return flat.reshape(-1, flat.shape[-1])


def _view(flat: Tensor, at: int, shape: torch.Size) -> Tensor:
    part = flat[at : at + shape.numel()]
    if len(shape) != CONVOLUTION:
        return part.view(shape)
    out, channels, high, wide = shape
    return part.view(out, high, wide, channels).permute(0, 3, 1, 2)


def layout(module: torch.nn.Module) -> Layout:
    named = tensors(module)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    norms = {
        f"{place}.{name}".removeprefix(".")
        for place, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._NormBase)
        for name in (*dict(part.named_parameters()), *dict(part.named_buffers()))
    }
    return Layout(tuple(named), tuple(t.shape for t in named.values()), trained, frozenset(norms))


def residual(probs: Tensor, labels: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """d/dlogits of weights * cross-entropy + <price, probs>: the whole objective in one line."""
    dear = price - (price * probs).sum(-1, keepdim=True)
    return weights.unsqueeze(-1) * (probs - labels) + probs * dear

"""The models that ship, and the wrapper for a model of your own.

A model knows its starting parameters as one flat vector (the order of `module.parameters()`,
frozen ones last, then the floating-point buffers) and how to build its torch module. The linear
model needs no torch for either.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np

from fedgft.arguments import shown, whole_number
from fedgft.errors import FedgftError


@runtime_checkable
class Model(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def linear(self) -> bool: ...  # one nn.Linear: the fused executor may take it

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray: ...

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]: ...

    def module(self, *, features: int, classes: int) -> Any: ...


def _uniform(seed: int, shapes: list[tuple[int, int]]) -> np.ndarray:
    """Weights and biases of linear layers (out, in), uniform in +-1/sqrt(in) as torch has them."""
    rng = np.random.default_rng([seed, 0x1417])
    parts = []
    for rows, columns in shapes:
        bound = columns**-0.5
        parts += [rng.uniform(-bound, bound, rows * columns), rng.uniform(-bound, bound, rows)]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Logistic:
    """Linear(features, classes) and a softmax: the paper's model for tables."""

    name: str = "logistic"
    linear: bool = True

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        return _uniform(seed, [(classes, features)])

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (classes, features), "bias": (classes,)}

    def module(self, *, features: int, classes: int) -> Any:
        from torch import nn

        return nn.Linear(features, classes)


@dataclass(frozen=True)
class MLP:
    """Linear layers with ReLU between them."""

    hidden: tuple[int, ...] = (64,)
    name: str = "mlp"
    linear: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, tuple | list):
            raise FedgftError(f"hidden must be a tuple of widths, as in (64,), not {self.hidden!r}")
        widths = tuple(whole_number("hidden", width, least=1) for width in self.hidden)
        object.__setattr__(self, "hidden", widths)

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        sizes = (features, *self.hidden, classes)
        return _uniform(seed, [(outputs, inputs) for inputs, outputs in pairwise(sizes)])

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        sizes, out = (features, *self.hidden, classes), {}
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            out |= {f"{2 * i}.weight": (outputs, inputs), f"{2 * i}.bias": (outputs,)}
        return out

    def module(self, *, features: int, classes: int) -> Any:
        from torch import nn

        sizes = (features, *self.hidden, classes)
        layers: list[Any] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class ResNet18:
    """For images: torchvision's, name by name. `weights`: a file to start from.

    BatchNorm's running means are averaged like everything else, by the clients' weights, unless
    clients keep their own normalising layers (`Settings.norms`).
    """

    norm: Literal["batch", "group"] = "batch"
    stem: Literal["imagenet", "small"] = "imagenet"
    weights: str | None = None
    name: str = "resnet18"
    linear: bool = False

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        from fedgft.resnet import load_weights

        def make() -> Any:
            module = self.module(features=features, classes=classes)
            if self.weights is not None:
                load_weights(module, self.weights)
            return module

        return _drawn(make, seed)

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        module = self.module(features=features, classes=classes)
        return {name: tuple(t.shape) for name, t in tensors(module).items()}

    def module(self, *, features: int, classes: int) -> Any:
        from fedgft.resnet import Net

        return Net(channels=features, classes=classes, norm=self.norm, stem=self.stem)


@dataclass(frozen=True)
class Module:
    """A model of your own: a function that makes an `nn.Module` with one output a class.

    It is called once a run under that run's seed, so every run has its own start. To start
    all runs from parameters you have, pass `lambda: module`.
    """

    make: Callable[[], Any]
    name: str = "module"
    linear: bool = False
    given: bool = False  # the very module of a caller, who may change it between simulations

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        return _drawn(self.make, seed)

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        module = self.module(features=features, classes=classes)
        return {name: tuple(t.shape) for name, t in tensors(module).items()}

    def module(self, *, features: int, classes: int) -> Any:
        import torch

        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            return copy.deepcopy(_made(self.make))  # it is cast and trained in place


def _drawn(make: Callable[[], Any], seed: int) -> np.ndarray:
    """The flat vector of a module that is made under this seed."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _made(make)
    parts = tensors(module).values()
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in parts])


def _made(make: Callable[[], Any]) -> Any:
    """The module a function makes, if it is one that can be trained."""
    try:
        module = make()
    except TypeError as error:
        raise FedgftError(f"model: the function that makes a module fails ({error})") from error
    if not hasattr(module, "named_parameters"):
        raise FedgftError(f"model must make an nn.Module, and it made {shown(module)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise FedgftError("model has no parameter to train")
    return module


def tensors(module: Any) -> dict[str, Any]:
    """All that is aggregated: what is trained, what is frozen, then floating-point buffers."""
    parameters = sorted(module.named_parameters(), key=lambda item: not item[1].requires_grad)
    buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
    return dict([*parameters, *buffers])


def named(flat: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors that lie one behind the other in a flat vector."""
    out, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        out[name] = np.ascontiguousarray(flat[at : at + size].reshape(shape))
        at += size
    return out


MODELS: dict[str, Model] = {"logistic": Logistic(), "mlp": MLP(), "resnet18": ResNet18()}


def get_model(model: Any) -> Model:
    """A model by name, a function that makes an nn.Module, or a model as it is."""
    if isinstance(model, str):
        if model not in MODELS:
            raise FedgftError(f"--model {model!r} is not known; choose from {', '.join(MODELS)}")
        return MODELS[model]
    if hasattr(model, "parameters") and not isinstance(model, type):  # an nn.Module itself
        return Module(lambda: model, given=True)
    if hasattr(model, "init") and hasattr(model, "module"):
        return cast(Model, model)
    if not callable(model):
        raise FedgftError(
            f"model must be a name ({', '.join(MODELS)}), an nn.Module or a function that makes "
            f"one, not {shown(model)}"
        )
    return Module(model)

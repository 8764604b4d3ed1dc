"""The models of the library, and the wrapper for your own model.

A model makes its starting parameters as one flat vector (the order of `module.parameters()`,
frozen ones last, then the floating-point buffers) and builds its torch module. The linear model
starts and predicts without torch.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np

from fedgft.errors import FedgftError, import_extra
from fedgft.validation import check_choice, check_integer, check_number, format_value

MAX_DEPTH = 12  # of trees: the histograms of all nodes of a level are kept


@runtime_checkable
class Model(Protocol):
    """A model for rows with `features` columns (or channels) and `classes` classes."""

    @property
    def name(self) -> str: ...

    @property
    def linear(self) -> bool: ...  # one nn.Linear, which the fused executor can train

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        """Random parameters, (p,)."""

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors, in the order of the flat vector."""

    def module(self, *, features: int, classes: int) -> Any:
        """A new `nn.Module`."""


@dataclass(frozen=True)
class Logistic:
    """Linear(features, classes) and a softmax: the paper's model for tables."""

    name: str = "logistic"
    linear: bool = True

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        """Uniform in +-1/sqrt(features)."""
        return _draw_uniform(seed, [features, classes])

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        """weight (classes, features) and bias (classes,)."""
        return {"weight": (classes, features), "bias": (classes,)}

    def module(self, *, features: int, classes: int) -> Any:
        """`nn.Linear(features, classes)`."""
        nn = import_extra("torch.nn", "a logistic model as a torch module")
        return nn.Linear(features, classes)


@dataclass(frozen=True)
class MLP:
    """Linear layers with ReLU between them; `hidden` holds the widths of the hidden layers."""

    hidden: tuple[int, ...] = (64,)
    name: str = "mlp"
    linear: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, tuple | list):
            raise FedgftError(f"hidden must be a tuple of widths, as in (64,), not {self.hidden!r}")
        widths = tuple(check_integer("hidden", width, least=1) for width in self.hidden)
        object.__setattr__(self, "hidden", widths)

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        """Uniform in +-1/sqrt(inputs of the layer)."""
        return _draw_uniform(seed, [features, *self.hidden, classes])

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        """Names as in `nn.Sequential`: 0.weight, 0.bias, 2.weight, ..."""
        sizes = (features, *self.hidden, classes)
        out = {}
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            out |= {f"{2 * i}.weight": (outputs, inputs), f"{2 * i}.bias": (outputs,)}
        return out

    def module(self, *, features: int, classes: int) -> Any:
        """`nn.Sequential` of linear layers and ReLU."""
        nn = import_extra("torch.nn", "the model mlp")
        layers: list[Any] = []
        for inputs, outputs in pairwise((features, *self.hidden, classes)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted trees: one tree per round, of histograms that clients add up.

    The number of trees is `Settings.rounds`, and the learning rate is `lr` of `simulate`.

    Parameters
    ----------
    max_depth
        The largest number of splits between the root and a leaf.
    max_leaves
        The largest number of leaves: the leaf whose split lowers the loss most is split next.
        None: no limit, and all leaves of one depth are split together.
    l2
        Added to the hessians of a leaf; larger values give smaller leaves.
    min_child_weight
        The smallest sum of hessians on each side of a split.
    subsample
        The share of the rows that a tree is fitted to; each tree draws its own.
    bins
        The largest number of bins of a column.
    min_bin_rows
        The fewest training rows in a bin of numbers.
    folds
        The clients' rows are divided into so many folds, and beside the model there is one per
        fold that leaves it out: accuracy and gap on a client's row are those of the model that has
        not seen the row. Deep trees fit their own rows, so a gap on these says little about others.
        0: gaps are those on the rows that the trees were fitted to; training is up to four times as
        fast as with 3.
    category_l2, category_smoothing
        Added to `l2` in splits by category, and to the hessians by which categories are sorted.
    """

    max_depth: int = 6
    max_leaves: int | None = None
    l2: float = 1.0
    min_child_weight: float = 1.0
    subsample: float = 1.0
    bins: int = 255
    min_bin_rows: int = 1
    folds: int = 3
    category_l2: float = 0.0
    category_smoothing: float = 1.0
    name: str = "trees"
    linear: bool = False

    def __post_init__(self) -> None:
        check_integer("max_depth", self.max_depth, least=1, most=MAX_DEPTH)
        if self.max_leaves is not None:
            check_integer("max_leaves", self.max_leaves, least=2, most=2**MAX_DEPTH)
        check_integer("bins", self.bins, least=2, most=255)
        check_integer("min_bin_rows", self.min_bin_rows, least=1)
        if check_integer("folds", self.folds, least=0, most=100) == 1:
            text = "must be 0 or at least 2: one fold would leave no rows for its model"
            raise FedgftError(text, field="folds")
        for name in ("l2", "min_child_weight", "category_l2", "category_smoothing"):
            if check_number(name, getattr(self, name)) < 0:
                raise FedgftError("must be at least 0", field=name)
        if not 0 < check_number("subsample", self.subsample) <= 1:
            raise FedgftError("must be above 0 and at most 1", field="subsample")

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        """Refuse: trees have no parameters before the first round."""
        raise FedgftError("trees have no initial parameters", field="model", kind="unsupported")

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        """Refuse: the shapes depend on the trees."""
        raise FedgftError("trees have no fixed shapes", field="model", kind="unsupported")

    def module(self, *, features: int, classes: int) -> Any:
        """Refuse: trees are no torch module."""
        raise FedgftError("trees are no torch module", field="model", kind="unsupported")

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes of a tree."""
        full = 2 ** (self.max_depth + 1) - 1
        return full if self.max_leaves is None else min(full, 2 * self.max_leaves - 1)

    @property
    def most_histograms(self) -> int:
        """The largest number of histograms that are needed while a tree grows."""
        full = 2 ** max(self.max_depth - 1, 0)
        return full if self.max_leaves is None else min(full, self.max_leaves)


class _FromModule:
    """Base class of models whose shapes are read from their torch module."""

    def module(self, *, features: int, classes: int) -> Any:
        raise NotImplementedError

    def shapes(self, *, features: int, classes: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors, in the order of the flat vector."""
        return _shapes(self.module(features=features, classes=classes))


@dataclass(frozen=True)
class ResNet18(_FromModule):
    """ResNet-18 for images, with the tensor names of torchvision.

    Running means of BatchNorm are averaged like parameters, by the clients' weights, unless clients
    keep their own normalization layers (`Settings.norms`).

    Parameters
    ----------
    norm
        Normalization layers: "batch" or "group".
    stem
        First layers: "imagenet", or "small" for images of about 32 x 32 pixels.
    weights
        A file of tensors to start from; see `fedgft.resnet.load_weights`.
    """

    norm: Literal["batch", "group"] = "batch"
    stem: Literal["imagenet", "small"] = "imagenet"
    weights: str | None = None
    name: str = "resnet18"
    linear: bool = False

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        """Random as in torchvision, or from the file."""

        def make() -> Any:
            module = self.module(features=features, classes=classes)
            if self.weights is not None:
                _resnet().load_weights(module, self.weights)
            return module

        return _draw_module(make, seed)

    def module(self, *, features: int, classes: int) -> Any:
        """A `fedgft.resnet.ResNet`."""
        return _resnet().ResNet(channels=features, classes=classes, norm=self.norm, stem=self.stem)


@dataclass(frozen=True)
class Module(_FromModule):
    """Your own model: a function that makes an `nn.Module` with one output per class.

    The function is called once per run under that run's seed, so every run has its own start. To
    start all runs from the parameters of one module, pass `lambda: module`.

    Parameters
    ----------
    make
        Returns a module.
    given
        Whether `make` returns the caller's own module, which may change between simulations.
    """

    make: Callable[[], Any]
    name: str = "module"
    linear: bool = False
    given: bool = False

    def init(self, seed: int, *, features: int, classes: int) -> np.ndarray:
        """The parameters of a module that is made under this seed."""
        return _draw_module(self.make, seed)

    def module(self, *, features: int, classes: int) -> Any:
        """A copy of what `make` returns."""
        torch = import_extra("torch", "your own model")
        with torch.random.fork_rng(devices=[]):  # do not advance the caller's random numbers
            return copy.deepcopy(_make_module(self.make))  # it is cast and trained in place


MODELS: dict[str, Any] = {
    "logistic": Logistic(),
    "mlp": MLP(),
    "trees": Trees(),
    "resnet18": ResNet18(),
}
"The models by name."


def get_model(model: Any) -> Model:
    """The model for a name, an `nn.Module`, a function that makes one, or a model itself."""
    if isinstance(model, str):
        return MODELS[check_choice("model", model, tuple(MODELS))]
    if hasattr(model, "parameters") and not isinstance(model, type):  # an nn.Module itself
        return Module(lambda: model, given=True)
    if isinstance(model, Trees) or (hasattr(model, "init") and hasattr(model, "module")):
        return cast(Model, model)
    if not callable(model):
        raise FedgftError(
            f"must be a name ({', '.join(MODELS)}), an nn.Module or a function that makes one, "
            f"not {format_value(model)}",
            field="model",
        )
    return Module(model)


def named_tensors(module: Any) -> dict[str, Any]:
    """The tensors of a module's flat vector: trained, then frozen, then floating-point buffers."""
    parameters = sorted(module.named_parameters(), key=lambda item: not item[1].requires_grad)
    buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
    return dict([*parameters, *buffers])


def _shapes(module: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}


def unflatten(flat: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors of a flat vector, by name."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = zip(shapes.items(), np.split(flat, ends), strict=False)  # the last part is the rest
    return {name: np.ascontiguousarray(part.reshape(shape)) for (name, shape), part in parts}


def prepare_logits(
    model: Model, params: np.ndarray, *, features: int, classes: int
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from rows to logits (rows, classes), in double precision for networks.

    A network is built once; linear models need no torch.
    """
    if model.linear:
        weight = params[:-classes].reshape(classes, -1)
        bias = params[-classes:]
        return lambda x: x @ weight.T + bias
    torch = import_extra("torch", f"predicting with the model {model.name}")
    with torch.random.fork_rng(devices=[]):  # do not advance the caller's random numbers
        module = model.module(features=features, classes=classes).double().eval()
    values = {}
    for name, array in unflatten(np.asarray(params, dtype=np.float64), _shapes(module)).items():
        layout = torch.channels_last if array.ndim == 4 else torch.contiguous_format
        values[name] = torch.as_tensor(array).contiguous(memory_format=layout)

    def logits(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return torch.func.functional_call(module, values, (torch.as_tensor(x),)).numpy()

    return logits


def _draw_uniform(seed: int, sizes: list[int]) -> np.ndarray:
    """Weights and biases of linear layers, uniform in +-1/sqrt(inputs) as in torch."""
    rng = np.random.default_rng([seed, 0x1417])
    layers = [((inputs + 1) * outputs, inputs**-0.5) for inputs, outputs in pairwise(sizes)]
    return np.concatenate([rng.uniform(-bound, bound, size) for size, bound in layers])


def _draw_module(make: Callable[[], Any], seed: int) -> np.ndarray:
    """The flat vector of a module that is made under this seed."""
    torch = import_extra("torch", "training a network")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _make_module(make)
    parts = named_tensors(module).values()
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in parts])


def _make_module(make: Callable[[], Any]) -> Any:
    """Return the module that `make` creates; raise if it cannot be trained."""
    try:
        module = make()
    except TypeError as error:
        raise FedgftError(f"model: the function that makes a module fails ({error})") from error
    if not hasattr(module, "named_parameters"):
        raise FedgftError(f"`model` must make an nn.Module, and it made {format_value(module)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise FedgftError("`model` has no parameter to train")
    return module


def _resnet() -> Any:
    """The module `fedgft.resnet`, which imports torch."""
    import_extra("torch", "the model resnet18")
    from fedgft import resnet

    return resnet

"""Models as safetensors, tables for people. Each file is written whole or not at all."""

import json
import re
from dataclasses import dataclass, field
from itertools import count, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data import Encoder, Federation
from fedgft.data.scaling import raw_scaling
from fedgft.errors import FedgftError
from fedgft.files import make_folder, parsed, proper, read_tensors, refuse_link, whole
from fedgft.models import ResNet18

if TYPE_CHECKING:
    import polars as pl

FORMAT = "fedgft-model-1"
FORMULA = r"^[=+\-@\t\r\n＝＋－＠]"  # how a text begins that a spreadsheet runs
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
NETWORKS = [{"norm": n, "stem": s} for n, s in product(("batch", "group"), ("imagenet", "small"))]


def check_table(path: Path) -> Path:
    """A table can be written there: said before any work is done for it."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise FedgftError(f"--out {path}: the ending must be .csv or .parquet")
    if path.is_dir():
        raise FedgftError(f"--out {path}: is a folder")
    refuse_link(path, "--out")
    make_folder(path.parent)
    return path


def write_frame(frame: "pl.DataFrame", path: Path) -> Path:
    """A table for people: CSV or Parquet by the ending."""
    from polars.exceptions import PolarsError

    with whole(path) as part:
        try:
            if path.suffix.lower() == ".csv":
                without_formulas(frame)[0].write_csv(part.file)
            else:
                frame.write_parquet(part.file)
        except PolarsError as error:  # what a full disk is to its Parquet writer
            raise OSError(str(error)) from error
    return path


def without_formulas(frame: "pl.DataFrame") -> tuple["pl.DataFrame", int]:
    """The table as it can be written to CSV, and how many of its cells had to be changed.

    A spreadsheet runs a cell that begins with =, +, -, @, a tab or a line end as a formula. Such
    texts and column names, which come from data, get an apostrophe in front; numbers, and texts
    that are numbers (-0.5), stay as they are.
    """
    import polars as pl

    texts = [n for n, kind in frame.schema.items() if kind in (pl.String, pl.Categorical, pl.Enum)]
    runs = [_is_formula(pl.col(name).cast(pl.String)) for name in texts]
    changed = sum(frame.select(runs).sum().row(0)) if texts else 0
    marked = [
        pl.when(run).then("'" + pl.col(name).cast(pl.String)).otherwise(pl.col(name)).alias(name)
        for name, run in zip(texts, runs, strict=True)
    ]
    names: dict[str, str] = {}
    for name in frame.columns:
        if re.match(FORMULA, name) and not re.fullmatch(NUMBER.strip("^$"), name):
            taken = (*frame.columns, *names.values())
            names[name] = next(n for i in count(1) if (n := "'" * i + name) not in taken)
    return frame.with_columns(marked).rename(names), changed + len(names)


def _is_formula(text: "pl.Expr") -> "pl.Expr":
    return text.str.contains(FORMULA).fill_null(False) & ~text.str.contains(NUMBER).fill_null(False)


@dataclass(frozen=True)
class SavedModel:
    """A trained model with everything it takes to apply it to a raw table."""

    layers: list[tuple[np.ndarray, np.ndarray]]  # weight (out, in) and bias of each linear layer
    mean: np.ndarray
    spread: np.ndarray
    about: dict[str, Any]
    path: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)  # of a network, by name

    def start(self, federation: Federation) -> np.ndarray:
        """Flat parameters that give the same scores under this federation's own scaling."""
        data = federation.dataset
        for what, ours in (("columns", data.columns), ("classes", data.classes)):
            if tuple(self.about[what]) != ours:
                raise FedgftError(
                    f"--init {self.path}: the model's {what} are not those of {data.name}"
                )
        if self.tensors:
            return self._network()
        mean, spread = raw_scaling(federation)
        (weight, bias), *rest = self.layers
        first = (
            weight * (spread / self.spread),
            bias + weight @ ((mean - self.mean) / self.spread),
        )
        return np.concatenate([part.ravel() for layer in (first, *rest) for part in layer])

    def _network(self) -> np.ndarray:
        """Flat, in the order that the engine has; images are seen alike in every federation."""
        network = ResNet18(**self.about["network"])
        width, classes = len(self.mean), len(self.about["classes"])
        shapes = network.shapes(features=width, classes=classes)
        if {name: t.shape for name, t in self.tensors.items()} != shapes:
            raise FedgftError(f"--init {self.path}: its tensors are not those of a {network.name}")
        return np.concatenate([self.tensors[name].ravel() for name in shapes])

    def scores(self, features: np.ndarray) -> np.ndarray:
        """(n, classes): softmax of linear layers with ReLU between them."""
        x = (features - self.mean) / self.spread
        for i, (weight, bias) in enumerate(self.layers):
            x = (np.maximum(x, 0) if i else x) @ weight.T + bias
        x = np.exp(x - x.max(axis=1, keepdims=True))
        return x / x.sum(axis=1, keepdims=True)

    def predict(
        self, frame: "pl.DataFrame", *, source: str
    ) -> tuple["pl.DataFrame", tuple[str, ...]]:
        """The table with `score` and `decision` behind its own columns, and what was noticed."""
        import polars as pl

        if self.tensors:
            raise FedgftError(
                f"{self.path}: a model for images, and predict reads tables; docs/images.md shows "
                "how torchvision's resnet18 loads it"
            )
        classes = self.about["classes"]
        names = ["score"] if len(classes) == 2 else [f"score_{c}" for c in classes]
        for name in (*names, "decision"):
            if name in frame.columns:
                raise FedgftError(
                    f"{source}: has a column {name!r} already, which predict would write; rename it"
                )
        if self.about["encoder"] is None:
            raise FedgftError(f"{self.path}: it was not trained on a table, and knows none")
        features, notes = Encoder.from_json(self.about["encoder"]).encode(frame, source=source)
        scores = self.scores(features)
        decision = pl.Series("decision", [classes[i] for i in scores.argmax(1)])
        shown = scores[:, -len(names) :]  # of two classes the second one's alone
        columns = [pl.Series(name, shown[:, i]) for i, name in enumerate(names)]
        return frame.with_columns(*columns, decision), notes


def write_model(
    tensors: dict[str, np.ndarray], scaling: tuple[np.ndarray, np.ndarray], about: dict[str, Any],
    path: Path,
) -> Path:  # fmt: skip
    """`scaling`: mean and spread of the columns as the table has them."""
    from safetensors.numpy import save

    mean, spread = scaling
    held = {**tensors, "scaler.mean": mean, "scaler.spread": spread}
    header = {"fedgft": json.dumps({"format": FORMAT, **about})}
    with whole(path) as part:
        part.write_bytes(save(held, metadata=header))
    return path


def load_model(path: str | Path) -> SavedModel:
    if Path(path).exists() and not Path(path).is_file():
        raise FedgftError(f"{path}: not a model file (a folder, or a pipe)")
    try:
        header, tensors = read_tensors(Path(path))
        about = parsed(header.get("fedgft", "{}"))
        if any(t.dtype.kind != "f" or not np.isfinite(t).all() for t in tensors.values()):
            raise ValueError("it holds numbers that are none")
    except FileNotFoundError as error:
        raise FedgftError(f"{path}: no such file") from error
    except ValueError as error:
        raise FedgftError(f"{path}: not a model file ({error})") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise FedgftError(f"{path}: not a model that fedgft saved (no {FORMAT!r} in its header)")
    try:
        return _assemble(tensors, about, str(path))
    except FedgftError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        raise FedgftError(f"{path}: a model file with a part missing ({error})") from error


def _assemble(tensors: dict[str, np.ndarray], about: dict[str, Any], path: str) -> SavedModel:
    mean, spread = tensors.pop("scaler.mean"), tensors.pop("scaler.spread")
    columns, classes = (tuple(map(proper, about[what])) for what in ("columns", "classes"))
    if not mean.shape == spread.shape == (len(columns),) or not (spread > 0).all():
        raise ValueError("the scaling does not fit the columns")
    if len(set(classes)) < 2:
        raise ValueError("fewer than two classes")
    if "network" in about:
        if about["network"] not in NETWORKS:
            raise ValueError("another network than ours")
        return SavedModel([], mean, spread, about, path, tensors)
    if about["encoder"] is not None and Encoder.from_json(about["encoder"]).columns != columns:
        raise ValueError("the encoder makes other columns")
    names = [name.removesuffix("weight") for name in tensors if name.endswith("weight")]
    order = sorted(names, key=lambda name: int(name.rstrip(".") or 0))
    layers = [(tensors[f"{n}weight"], tensors[f"{n}bias"]) for n in order]
    widths = [len(columns), *(len(bias) for _, bias in layers)]
    for (weight, bias), (inward, outward) in zip(layers, pairwise(widths), strict=True):
        if weight.shape != (outward, inward) or bias.shape != (outward,):
            raise ValueError("the layers do not fit each other")
    if not layers or widths[-1] != len(classes):
        raise ValueError("the layers do not end in the classes")
    return SavedModel(layers, mean, spread, about, path)

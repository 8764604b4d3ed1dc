"""A trained model with everything that is needed to apply it to a raw table.

The file is a safetensors file, which can hold only numbers and text: the parameters by their torch
names, the scaling as ``scaler.mean`` and ``scaler.spread``, and a JSON record in the header. Trees
of XGBoost can also be saved as XGBoost's own JSON, with the same record among its attributes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft import xgboost_model
from fedgft.data.dataset import Dataset, Federation, get_raw_scaling
from fedgft.data.encode import UNSEEN, Categorical, Encoder, Names, data_error
from fedgft.data.table import to_polars
from fedgft.errors import FedgftError, LazyModule
from fedgft.forest import Forest
from fedgft.formatting import DASH, format_percent, format_points
from fedgft.models import Module, ResNet18, get_model, prepare_logits
from fedgft.settings import TARGET_TOLERANCE
from fedgft.store import atomic_write, file_error, parse_json, read_tensors, require_encodable
from fedgft.validation import check_instance, check_path

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

FORMAT = "fedgft-model-1"
MAX_SCORED = 2**18  # features that are scored at a time, as many as a cache holds
MAX_LISTED = 8  # most levels of a feature that a card lists
XGBOOST = "xgboost"
TREE_MODELS = ("trees", XGBOOST)  # the booster of the engine, and trees that XGBoost grew
NETWORKS = [{"norm": n, "stem": s} for n, s in product(("batch", "group"), ("imagenet", "small"))]


@dataclass(frozen=True, eq=False)
class FairModel:
    """A trained model: it predicts raw tables, describes itself, and is saved to one file.

    Linear models, multilayer perceptrons and trees need no torch to predict.

    Parameters
    ----------
    tensors
        The parameters by their torch names.
    mean, spread
        (d,) scaling of the raw features: the model receives ``(x - mean) / spread``.
    about
        A record that JSON can hold: ``columns``, ``classes``, ``groups``, ``encoder`` (JSON text or
        None) and ``model``; for images ``network``; how the model was trained.
    path
        The file that it was loaded from, for error messages.
    module
        For your own network: the function that makes its `nn.Module`. It is not saved. None:
        a model of the library.
    booster
        For trees of XGBoost: the booster as XGBoost's JSON. None: no such model, or it was read
        from a safetensors file.

    Examples
    --------
    >>> import fedgft
    >>> people = fedgft.load("synthetic")
    >>> federation = fedgft.standardize(fedgft.partition(people, clients=3))
    >>> model = fedgft.simulate(federation, metric="sp", target=0.1, rounds=5).model()
    >>> model.predict(people.features[:3]).shape
    (3,)
    """

    tensors: dict[str, np.ndarray]
    mean: np.ndarray
    spread: np.ndarray
    about: dict[str, Any]
    path: str = "the model"
    module: Callable[[], Any] | None = None
    booster: bytes | None = None

    def __repr__(self) -> str:
        about = self.about
        words = [f"{about.get('model')}, {len(self.features)} columns, classes {self.classes}"]
        if self.groups:
            trained = f"{about.get('method', '?')}, {about.get('metric', '?')}"
            words.append(f"{trained} between {', '.join(self.groups)}")
        return f"FairModel({'; '.join(words)})"

    @property
    def columns(self) -> Names:
        """Names of the features."""
        return tuple(self.about["columns"])

    @property
    def classes(self) -> Names:
        """Names of the classes; of two classes, the score is the probability of the second."""
        return tuple(self.about["classes"])

    @property
    def groups(self) -> Names:
        """Names of the groups that the model was trained to treat alike."""
        return tuple(self.about["groups"])

    @property
    def features(self) -> dict[str, str | Names]:
        """The columns that a table needs: "number", or the categories that the model knows."""
        if self.encoder is None:
            return dict.fromkeys(self.columns, "number")
        fields = self.encoder.fields
        return {f.name: f.levels if isinstance(f, Categorical) else "number" for f in fields}

    @property
    def is_network(self) -> bool:
        """Whether the model is a network for images."""
        return "network" in self.about

    @property
    def has_trees(self) -> bool:
        """Whether the model is an ensemble of trees."""
        return self.about.get("model") in TREE_MODELS

    @cached_property
    def forest(self) -> Forest:
        """The trees of a model that has some (`has_trees`)."""
        return Forest.from_tensors(self.tensors)

    def importances(self) -> dict[str, float]:
        """Return the share of each column in the gain of all splits, the largest first.

        Only models of trees have it. The gain of a split is how much it lowered the loss; it comes
        from sums over the rows of all clients.
        """
        if not self.has_trees:
            text = f"{self.path}: only models of trees have importances"
            raise FedgftError(text, kind="unsupported")
        gains = self.forest.importances()
        shares = gains / max(gains.sum(), 1e-300)
        order = np.argsort(-shares, kind="stable")
        names = list(self.features)
        return {names[i]: float(shares[i]) for i in order}

    @cached_property
    def encoder(self) -> Encoder | None:
        """How a raw table becomes features; None if the model was not trained on a table."""
        text = self.about["encoder"]
        return None if text is None else Encoder.from_json(text)

    @cached_property
    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Weight (out, in) and bias (out,) of each linear layer, in order; empty for a network."""
        if self.is_network or self.has_trees or self.about.get("model") == Module.name:
            return []
        names = [name.removesuffix("weight") for name in self.tensors if name.endswith("weight")]
        order = sorted(names, key=lambda name: int(name.rstrip(".") or 0))
        return [(self.tensors[f"{n}weight"], self.tensors[f"{n}bias"]) for n in order]

    def predict_proba(self, table: Any, *, source: str = "table") -> np.ndarray:
        """Return the probability of each class, (n, classes).

        Parameters
        ----------
        table
            A pandas, polars or pyarrow table with the columns that the model was trained on, or
            the features as an array (n, d) in the order of `columns`.
        source
            What error messages call the table.
        """
        if isinstance(table, np.ndarray):
            if table.ndim != 2 or table.shape[1] != len(self.columns):
                problem = f"must be of shape (n, {len(self.columns)}), not {table.shape}"
                raise data_error(source, problem)
            if table.dtype.kind not in "biuf" or not np.isfinite(table).all():
                raise data_error(source, "must hold finite numbers, as an array of features")
            return self._score(table)
        features, notes = self._encode(to_polars(table, "table"), source=source)
        for note in notes:
            if UNSEEN in note:
                warnings.warn(note, UserWarning, stacklevel=2)
        return self._score(features)

    def predict(self, table: Any, *, source: str = "table") -> np.ndarray:
        """Return the name of the most probable class of each row, (n,); see `predict_proba`."""
        return np.array(self.classes)[self.predict_proba(table, source=source).argmax(1)]

    def add_predictions(
        self,
        frame: pl.DataFrame,
        *,
        source: str,
        score_name: str = "score",
        decision_name: str = "decision",
    ) -> tuple[pl.DataFrame, Names]:
        """Append the columns ``score`` and ``decision`` to a table.

        With more than two classes there is one column per class, ``score_CLASS``.

        Parameters
        ----------
        frame
            The table.
        source
            What error messages call it.
        score_name, decision_name
            The names of the columns, if the table has others of the usual names.

        Returns
        -------
        frame, notes
            The table, and what was filled in or ignored.
        """
        names = list_score_columns(self.classes, score_name)
        options = {**dict.fromkeys(names, "score_name"), decision_name: "decision_name"}
        if decision_name in names or not (score_name.strip() and decision_name.strip()):
            raise FedgftError("`score_name` and `decision_name` must be two different names")
        for name, option in options.items():
            if name in frame.columns:
                problem = f"has a column {name!r} already, which predict would write; give another "
                raise data_error(source, f"{problem}`{option}`")
        features, notes = self._encode(frame, source=source)
        scores = self._score(features)
        decision = pl.Series(decision_name, [self.classes[i] for i in scores.argmax(1)])
        written = scores[:, -len(names) :]  # with two classes, only the second
        columns = [pl.Series(name, written[:, i]) for i, name in enumerate(names)]
        return frame.with_columns(*columns, decision), notes

    def _encode(self, frame: pl.DataFrame, *, source: str) -> tuple[np.ndarray, Names]:
        self._refuse_network()
        if self.encoder is None:
            text = f"{self.path}: it was not trained on a table and cannot read one"
            raise FedgftError(text, kind="unsupported")
        return self.encoder.encode(frame, source=source)

    def _refuse_network(self) -> None:
        if self.is_network:
            advice = "docs/images.md shows how torchvision's resnet18 loads it"
            text = f"{self.path}: a model for images, and predict reads tables; {advice}"
            raise FedgftError(text, kind="unsupported")

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Return the logits, (n, classes), for encoded features (n, d)."""
        self._refuse_network()
        if self.has_trees:
            return self.forest.logits(self.to_fields(features))
        last_layer = self._make_last_layer()
        step = max(1, MAX_SCORED // max(1, features.shape[1]))
        out = np.empty((len(features), len(self.classes)))
        for start in range(0, len(features), step):
            rows = slice(start, start + step)
            out[rows] = last_layer((features[rows] - self.mean) / self.spread)
        return out

    def to_fields(self, features: np.ndarray) -> np.ndarray:
        """Return the columns that trees ask about, (n, fields), from encoded features (n, d)."""
        if self.encoder is not None:
            return self.encoder.to_fields(features)
        is_single = self.about.get("model") == XGBOOST  # XGBoost compares float32 numbers
        return features.astype(np.float32) if is_single else features

    def _make_last_layer(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from scaled features to logits."""
        if self.about.get("model") == Module.name:
            model = self._own_model()
            parts = [self.tensors[name].ravel() for name in self._own_shapes()]
            sizes = {"features": len(self.columns), "classes": len(self.classes)}
            return prepare_logits(model, np.concatenate(parts), **sizes)

        def apply_layers(x: np.ndarray) -> np.ndarray:
            for i, (weight, bias) in enumerate(self.layers):
                x = (np.maximum(x, 0) if i else x) @ weight.T + bias
            return x

        return apply_layers

    def _own_model(self) -> Any:
        if self.module is None:
            text = f"{self.path} holds no network: `module` must be the function that makes it"
            raise FedgftError(text, kind="missing")
        return get_model(self.module)

    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of your own network, in the order of its parameters."""
        sizes = {"features": len(self.columns), "classes": len(self.classes)}
        shapes = self._own_model().shapes(**sizes)
        if {name: tensor.shape for name, tensor in self.tensors.items()} != shapes:
            text = f"makes a network whose tensors are not those of {self.path}"
            raise FedgftError(text, field="module")
        return shapes

    def _score(self, features: np.ndarray) -> np.ndarray:
        """Return the softmax of the logits, (n, classes)."""
        return softmax(self.logits(features))

    def initial_parameters(self, federation: Federation) -> np.ndarray:
        """Return flat parameters, (p,), that give the same scores under a federation's scaling."""
        data = federation.dataset
        if self.has_trees:
            text = f"`init` {self.path}: trees cannot be trained further; leave `init` out"
            raise FedgftError(text, kind="unsupported")
        for what in ("columns", "classes"):
            own = getattr(self, what)
            other = getattr(data, what)
            if own != other:
                problem = f"the model's {what} are not those of {data.name}"
                problem += _describe_difference(own, other)
                raise FedgftError(f"`init` {self.path}: {problem}")
        if self.is_network:
            network = ResNet18(**self.about["network"])
            shapes = network.shapes(features=len(self.mean), classes=len(self.classes))
            if {name: tensor.shape for name, tensor in self.tensors.items()} != shapes:
                problem = f"its tensors are not those of a {network.name}"
                raise FedgftError(f"`init` {self.path}: {problem}")
            return np.concatenate([self.tensors[name].ravel() for name in shapes])
        mean, spread = get_raw_scaling(federation)
        (weight, bias), *rest = self.layers
        shifted = bias + weight @ ((mean - self.mean) / self.spread)
        layers = ((weight * (spread / self.spread), shifted), *rest)
        return np.concatenate([part.ravel() for layer in layers for part in layer])

    def card(self) -> str:
        """Return a model card in Markdown: what the model decides, for whom, and how fairly."""
        about = self.about
        family = about.get("model", "linear")
        trained = about.get("trained", {})
        gap_of = trained.get("gap_of", "decisions")
        tolerance = format_points(TARGET_TOLERANCE)
        unseen = ", out of fold" if trained.get("out_of_fold") else ""
        groups = _escape_cell(", ".join(self.groups)) or "none: trained without fairness"
        lines = [
            "# Model card",
            "",
            f"{_FAMILIES.get(family, f'A {family}')} model that predicts "
            f"{_escape_cell(' or '.join(self.classes))}, trained with {about.get('method', DASH)} "
            f"on {_escape_cell(about.get('data', DASH))} (seed "
            f"{about.get('seed', DASH)}, fedgft).",
            "",
            "| | |",
            "|---|---|",
            f"| groups | {groups} |",
            f"| metric | {about.get('metric', DASH)}, of {gap_of} |",
            f"| target | {_in_points(trained.get('target'))} |",
            f"| gap on the training rows{unseen} | {_in_points(trained.get('gap'))} |",
            f"| gap on held-out rows | {_in_points(trained.get('gap_test'))} |",
            f"| target reached, within {tolerance} points | "
            f"{_YES_NO.get(trained.get('reached'), DASH)} |",
            f"| accuracy on the training rows{unseen} | "
            f"{format_percent(trained.get('accuracy'))} |",
            f"| accuracy on held-out rows | {format_percent(trained.get('accuracy_test'))} |",
            f"| rounds, learning rate | {trained.get('rounds', DASH)}, {trained.get('lr', DASH)} |",
            "",
            "The gap was measured when the model was trained. Measure it again on the rows that "
            "the model decides about: `fedgft measure`, or `fedgft.audit` in Python.",
            "",
            "| column | values |",
            "|---|---|",
        ]
        for name, kind in self.features.items():
            values = kind
            if not isinstance(kind, str):
                values = ", ".join(kind[:MAX_LISTED]) + (", ..." if len(kind) > MAX_LISTED else "")
            lines.append(f"| {_escape_cell(name)} | {_escape_cell(str(values))} |")
        if self.has_trees:
            lines += [
                "",
                f"{self.forest.describe()} Share of each column in the gain of all splits:",
            ]
            lines += ["", "| column | share |", "|---|---:|"]
            lines += [
                f"| {_escape_cell(name)} | {format_percent(share)} |"
                for name, share in self.importances().items()
                if share > 0
            ]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the model to a .safetensors file, atomically; trees of XGBoost also to a .json."""
        from safetensors.numpy import save  # the command line starts faster without it

        check_path("path", path)
        record = json.dumps({"format": FORMAT, **self.about})
        if Path(path).suffix.lower() == ".json":
            return self._save_booster(Path(path), record)
        tensors = {**self.tensors, "scaler.mean": self.mean, "scaler.spread": self.spread}
        with atomic_write(Path(path)) as part:
            part.write(save(tensors, metadata={"fedgft": record}))
        return Path(path)

    def _save_booster(self, path: Path, record: str) -> Path:
        if self.booster is None:
            text = "ends in .json, which only models of XGBoost have: name a .safetensors file"
            raise FedgftError(text, field="path", kind="unsupported")
        with atomic_write(path) as part:
            part.write(xgboost_model.write_header(self.booster, record))
        return path

    @classmethod
    def from_xgboost(
        cls, booster: Any, data: Dataset | Encoder, *, about: dict[str, Any] | None = None
    ) -> FairModel:
        """Return the model of a booster of XGBoost, which predicts tables and can be saved.

        All its trees count, as in ``booster.predict(data)``. With an encoder, the booster must have
        been trained on ``encoder.to_fields(features)``; otherwise on the features.

        Parameters
        ----------
        booster
            A `Booster`, an `XGBClassifier`, or XGBoost's JSON as bytes. Its objective must be
            "binary:logistic" or "multi:softprob".
        data
            The `Dataset` of the training rows, or the `Encoder` of the table.
        about
            More for the record, such as `PriceObjective.about` of the objective; ``classes`` and
            ``groups`` if `data` is an encoder. None: nothing.
        """
        record = _describe_data(data) | {"model": XGBOOST, "method": XGBOOST} | (about or {})
        if "classes" not in record:
            text = "lacks the names of the classes: about={'classes': ['no', 'yes'], ...}"
            raise FedgftError(text, field="about", kind="missing")
        booster = booster.get_booster() if hasattr(booster, "get_booster") else booster
        text = bytes(booster.save_raw("json") if hasattr(booster, "save_raw") else booster)
        try:
            record = parse_json(json.dumps(record, allow_nan=False))
            model = cls._from_booster(text, xgboost_model.parse_model(text), record)
            model._check()
        except (KeyError, ValueError, TypeError) as error:
            raise FedgftError(f"is {error}", field="booster", kind="data") from error
        return model

    @classmethod
    def _from_booster(
        cls, text: bytes, learner: dict[str, Any], about: dict[str, Any], path: str = "the model"
    ) -> FairModel:
        """Return the model of a learner in XGBoost's JSON; ValueError or KeyError if it is none."""
        columns = len(about["columns"])
        unread = cls({}, np.zeros(columns), np.ones(columns), about, path, booster=text)
        levels = [() if kind == "number" else kind for kind in unread.features.values()]
        xgboost_model.check_fields(learner, list(unread.features), levels)
        forest = xgboost_model.read_forest(learner, [len(each) for each in levels])
        return replace(unread, tensors=forest.to_tensors())

    @classmethod
    def load(cls, path: str | Path, *, module: Callable[[], Any] | None = None) -> FairModel:
        """Read a model file, see `load_model`."""
        check_path("path", path)
        if Path(path).exists() and not Path(path).is_file():
            raise file_error(path, "not a model file (a folder, or a pipe)")
        learner: dict[str, Any] = {}
        text = b""
        try:
            if Path(path).suffix.lower() == ".json":
                text, learner = _read_booster(Path(path))
                header, tensors = {"fedgft": xgboost_model.read_header(learner)}, {}
            else:
                header, tensors = read_tensors(Path(path))
            about = parse_json(header.get("fedgft") or "{}")
            if any(t.dtype.kind != "f" or not np.isfinite(t).all() for t in tensors.values()):
                raise ValueError("it holds NaN, infinity or whole numbers")
        except FileNotFoundError as error:
            raise file_error(path, "no such file") from error
        except ValueError as error:
            raise file_error(path, f"not a model file ({error})") from error
        _check_format(path, about, is_booster=bool(learner))
        try:
            if learner:
                model = cls._from_booster(text, learner, about, str(path))
                model._check()
                return model
            mean = tensors.pop("scaler.mean")
            spread = tensors.pop("scaler.spread")
            model = cls(tensors, mean, spread, about, str(path), module)
            model._check()
        except FedgftError:
            raise
        except (KeyError, ValueError, TypeError) as error:
            what = "a damaged model of XGBoost" if learner else "a model file with a part missing"
            raise file_error(path, f"{what} ({error})") from error
        return model

    def _check(self) -> None:
        """Raise KeyError, ValueError or TypeError where parts are missing or do not fit."""
        for name in (*self.columns, *self.classes, *self.groups):
            require_encodable(name)
        for name in ("method", "metric", "data", "model", "class_type"):
            if not isinstance(self.about.get(name, ""), str):
                raise ValueError(f"{name} is not a text")
        if not isinstance(self.about.get("trained", {}), dict):
            raise ValueError("trained is not an object")
        width = (len(self.columns),)
        if not self.mean.shape == self.spread.shape == width or not (self.spread > 0).all():
            raise ValueError("the scaling does not fit the columns")
        if len(set(self.classes)) < 2:
            raise ValueError("fewer than two classes")
        if self.is_network:
            if self.about["network"] not in NETWORKS:
                raise ValueError("a network that fedgft does not have")
            return
        if self.encoder is not None and self.encoder.columns != self.columns:
            raise ValueError("the encoder does not make the columns of the model")
        if self.about.get("model") == Module.name:
            return  # `_own_shapes` compares the tensors with those of the module
        if self.has_trees:
            self._check_forest()
            return
        widths = [len(self.columns), *(len(bias) for _, bias in self.layers)]
        for (weight, bias), (inputs, outputs) in zip(self.layers, pairwise(widths), strict=True):
            if weight.shape != (outputs, inputs) or bias.shape != (outputs,):
                raise ValueError("the layers do not fit each other")
        if not self.layers or widths[-1] != len(self.classes):
            raise ValueError("the layers do not end in the classes")

    def _check_forest(self) -> None:
        """Raise ValueError unless the trees fit the columns and the classes."""
        categorical = tuple(not isinstance(kind, str) for kind in self.features.values())
        if tuple(self.forest.categorical.tolist()) != categorical:
            raise ValueError("the trees do not fit the columns")
        outputs = 1 if len(self.classes) == 2 else len(self.classes)
        if len(self.forest.base) != outputs:
            raise ValueError("the trees do not fit the classes")


def _check_format(path: str | Path, about: Any, *, is_booster: bool) -> None:
    """Raise a `FedgftError` unless the header is that of a model which this version wrote."""
    found = about.get("format") if isinstance(about, dict) else None
    if found == FORMAT:
        return
    if found is not None:
        problem = f"its format is {str(found)[:40]!r}, which another version of fedgft wrote; this"
        raise file_error(path, f"{problem} one reads {FORMAT!r}")
    advice = "; `FairModel.from_xgboost` makes one of a booster" if is_booster else ""
    problem = f"not a model that fedgft saved (no {FORMAT!r} in its header){advice}"
    raise file_error(path, problem)


def _read_booster(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return XGBoost's JSON and the learner in it; raise ValueError if it is no such file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or "unreadable") from None
    return text, xgboost_model.parse_model(text)


def _describe_data(data: Dataset | Encoder) -> dict[str, Any]:
    """Return the record of a data set or of an encoder, for the header of a model."""
    if isinstance(data, Encoder):
        return {"columns": data.columns, "groups": (), "encoder": data.to_json()}
    check_instance("data", data, Dataset, "or an Encoder")
    if data.images or data.center is not None:
        text = "must hold the rows of a table as they were loaded, not images or scaled features"
        raise FedgftError(text, field="data", kind="unsupported")
    return {
        "columns": data.columns,
        "classes": data.classes,
        "groups": data.group_names,
        "encoder": None if data.encoder is None else data.encoder.to_json(),
        "data": data.name,
    }


def list_score_columns(classes: Sequence[str], score_name: str = "score") -> list[str]:
    """Return the names of the columns of scores: one, or one per class of more than two."""
    return [score_name] if len(classes) == 2 else [f"{score_name}_{c}" for c in classes]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of the classes, (n, classes)."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def _describe_difference(own: Names, other: Names) -> str:
    """Return which names only the model, or only the data, has; empty if the order differs."""
    parts = []
    for where, names in (("the model", set(own) - set(other)), ("the data", set(other) - set(own))):
        if names:
            more = ", ..." if len(names) > MAX_LISTED else ""
            listed = ", ".join(f"'{name}'" for name in sorted(names)[:MAX_LISTED])
            parts.append(f"only {where} has {listed}{more}")
    return f": {'; '.join(parts)}" if parts else ", or not in this order"


_YES_NO = {True: "yes", False: "no"}
_FAMILIES = {XGBOOST: "An XGBoost", "trees": "A boosted-trees"}  # other models: "A linear"


def _in_points(value: float | None) -> str:
    return format_points(value) if value is None else f"{format_points(value)} points"


def _escape_cell(text: str) -> str:
    """Return a text that cannot end a cell of a Markdown table or start HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def load_model(path: str | Path, *, module: Callable[[], Any] | None = None) -> FairModel:
    """Read a model that `fedgft train`, `FairClassifier.save` or `FairModel.save` wrote.

    Nothing in the file is executed. A damaged file raises a `FedgftError` of one line.

    Parameters
    ----------
    path
        A .safetensors file, or a .json file of XGBoost that `FairModel.save` wrote.
    module
        For your own network: the function that makes its `nn.Module`, as in training. None:
        a model of the library.

    Returns
    -------
    FairModel
        The model, with `predict`, `predict_proba`, `features` and `card`.

    Examples
    --------
    >>> import tempfile
    >>> import fedgft
    >>> federation = fedgft.standardize(fedgft.partition(fedgft.load("synthetic"), clients=3))
    >>> history = fedgft.simulate(federation, metric="sp", target=0.1, rounds=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = history.model().save(f"{folder}/model.safetensors")
    ...     fedgft.load_model(path).classes
    ('0', '1')
    """
    return FairModel.load(path, module=module)

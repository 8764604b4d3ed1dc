"""A scikit-learn classifier that is fair over the data of all clients.

classifier = FairClassifier(metric="sp", target=0.02)
classifier.fit(X, y, sensitive_features=frame["sex"], clients=frame["hospital"])
classifier.predict(X_new)
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np
import polars as pl

from fedgft.auditing.arrays import split_attributes, to_series
from fedgft.auditing.measurement import measure
from fedgft.auditing.report import Audit, audit
from fedgft.data.dataset import Dataset
from fedgft.data.encode import UNSEEN, Encoder, as_text
from fedgft.data.partition import PartitionKind, hold_out
from fedgft.data.table import MAX_VALUES, Roles, read_groups, to_polars
from fedgft.errors import FedgftError, import_extra
from fedgft.fair_model import FairModel
from fedgft.metrics import get_metric
from fedgft.site_sums import SiteSums, merge
from fedgft.study.protocol import Protocol, get_protocol
from fedgft.study.results import Row, round_rows
from fedgft.study.study import Point, Study
from fedgft.study.training import build_model
from fedgft.validation import check_indices, format_value

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator, ClassifierMixin

    multiclass: Any
    validation: Any
else:
    _base = import_extra("sklearn.base", "FairClassifier")
    BaseEstimator = _base.BaseEstimator
    ClassifierMixin = _base.ClassifierMixin
    multiclass = import_extra("sklearn.utils.multiclass", "FairClassifier")
    validation = import_extra("sklearn.utils.validation", "FairClassifier")

NO_GROUPS = ("", " ")  # FedAvg ignores groups, but the engine needs two of them
CLASS_TYPES = {"b": "bool", "i": "int", "u": "int", "f": "float"}  # else text


class FairClassifier(ClassifierMixin, BaseEstimator):
    """A linear model or a small network whose decisions treat groups alike.

    The model is trained over clients that do not pool their rows, as `fedgft train` does, with the
    same numbers. After `fit`, a `TargetMissedWarning` says so if the gap is above the target.

    Parameters
    ----------
    metric
        The metric whose gap is reduced: sp, eop, eo, cal, acc or fpr; a weighted sum such as
        "sp+0.5*eop"; or a `Metric`.
    target
        The largest gap that the decisions may have over the rows of all clients.
    method
        "fedgft-control" keeps the target; "fedavg" ignores fairness; "fedgft", "lft", "lrw" and
        "fairfed" are the published methods.
    lam
        The strength of "fedgft" and "lft"; None: chosen on held-out rows.
    model
        "logistic", "mlp", a model of `fedgft`, or a function that makes a torch module.
    base
        The federated algorithm that the method extends, such as "fedavg", "fedprox" or "scaffold".
    rounds
        Rounds of training; None: 50, and up to 200 where the target is missed.
    lr
        Local learning rate; None: chosen on held-out rows.
    pos_label
        The class that counts as positive, of two; None: the last in sorted order.
    test_share
        Share of the rows that are kept out of training, for `audit_`. At 0 all rows are used, and
        `audit_` describes the training rows.
    protocol
        "heldout", or "paper" to train as the published experiments did.
    random_state
        Seed of all random numbers: equal seeds give equal models.

    Attributes
    ----------
    classes_
        (k,) The classes in sorted order.
    n_features_in_, feature_names_in_
        Number and names of the columns of X; the names exist only if X has some.
    model_
        The `FairModel`, for deployment without scikit-learn.
    history_
        One dictionary per measured round: accuracy, gaps. ``pandas.DataFrame(history_)`` works.
    training_
        A dictionary: learning rate, rounds, gap, whether the target was reached.
    notes_
        Sentences on missing values and missing groups.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3))
    >>> sex = np.where(X[:, 0] + rng.normal(size=400) > 0, "f", "m")
    >>> y = (X.sum(1) > 0).astype(int)
    >>> classifier = FairClassifier(metric="sp", target=0.05, lr=0.02)
    >>> classifier.fit(X, y, sensitive_features=sex, clients=4).predict(X[:2]).shape
    (2,)
    """

    n_features_in_: int
    feature_names_in_: np.ndarray

    def __init__(
        self,
        metric: Any = "sp",
        target: float = 0.0,
        *,
        method: str = "fedgft-control",
        lam: float | None = None,
        model: Any = "logistic",
        base: str = "fedavg",
        rounds: int | None = None,
        lr: float | None = None,
        pos_label: Any = None,
        test_share: float = 0.0,
        protocol: str = "heldout",
        random_state: Any = 0,
    ) -> None:
        self.metric = metric
        self.target = target
        self.method = method
        self.lam = lam
        self.model = model
        self.base = base
        self.rounds = rounds
        self.lr = lr
        self.pos_label = pos_label
        self.test_share = test_share
        self.protocol = protocol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags: Any = super().__sklearn_tags__()  # pyrefly: ignore[missing-attribute]
        tags.input_tags.allow_nan = True
        return tags

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        sensitive_features: Any = None,
        clients: Any = None,
        alpha: float = 0.5,
        sample_weight: Any = None,
    ) -> FairClassifier:
        """Train the model.

        Parameters
        ----------
        X
            A pandas, polars or pyarrow table, or an array (n, d). Text columns become categories,
            and missing values are filled in.
        y
            (n,) The classes.
        sensitive_features
            The groups: one column, or several columns whose combinations are the groups. Rows
            without a recorded group take part in training and in no gap. Without any groups, the
            model is trained without fairness, with a warning.
        clients
            (n,) The client of each row; or the number of clients of a simulated federation. None:
            one client holds all rows.
        alpha
            How rows are dealt to simulated clients: small is heterogeneous.
        sample_weight
            (n,) Weights of the rows; see `fedgft.data.partition.repeat_rows`.
        """
        frame = self._read_features(X, reset=True)
        check_indices(
            X=X,
            y=y,
            sensitive_features=sensitive_features,
            clients=clients,
            sample_weight=sample_weight,
        )
        labels = self._read_classes(y, frame.height)
        weights = _read_weights(sample_weight, frame.height)
        if weights is not None and len(np.unique(labels[weights > 0])) < 2:
            text = "is zero in all rows but those of one class: there is nothing to learn"
            raise FedgftError(text, field="sample_weight", kind="data")
        seed = _read_seed(self.random_state)
        groups, group_names, notes = _read_groups(sensitive_features, frame.height)
        owners, client_names, kind, number = _read_clients(clients, frame.height)
        encoder = Encoder.fit(frame, frame.columns, source="X")
        features, encoder_notes = encoder.encode(frame, source="X")
        data = Dataset(
            name="X",
            features=features,
            labels=labels,
            groups=groups,
            columns=encoder.columns,
            classes=self._class_names,
            group_names=group_names,
            clients=owners,
            client_names=client_names,
            encoder=encoder,
            notes=(*encoder_notes, *notes),
        )
        test = hold_out(data, share=self.test_share, seed=seed, keep_clients=kind == "column")
        mask = np.zeros(len(data), bool)
        mask[test] = True
        study = Study(
            replace(data, test=mask),
            self._make_protocol(),
            [seed],
            clients=number,
            kind=kind,
            model=self.model,
            weights=weights,
        )
        method = self.method if sensitive_features is not None else "fedavg"
        result = study.sweep(method, get_metric(self.metric), [Point(alpha)])[0]
        self.model_ = build_model(study, result, 0)
        self.model_.about["class_type"] = CLASS_TYPES.get(self.classes_.dtype.kind, "text")
        if sensitive_features is None:
            self.model_.about["groups"] = []
            self.model_.about["trained"] |= {"gap": None, "gap_test": None, "reached": None}
        self.history_: list[Row] = round_rows(study, result)
        self.training_ = self.model_.about["trained"]
        self.notes_ = data.notes
        self._sums = self._measure(data, features, result.federations[0], clients is not None)
        self.__dict__.pop("audit_", None)
        return self

    @cached_property
    def audit_(self) -> Audit:
        """The audit of the model over the test rows, or with `test_share` 0 over all rows."""
        validation.check_is_fitted(self, "model_")
        if self._sums is None:
            text = "a model that was fitted without sensitive_features has no audit"
            raise FedgftError(text, field="sensitive_features", kind="missing")
        return audit(self._sums)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log-odds of ``classes_[1]``, (n,); with more classes the logits, (n, k)."""
        logits = self._compute_logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (n, k), in the order of `classes_`."""
        logits = self._compute_logits(X)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row, (n,)."""
        best = self._compute_logits(X).argmax(axis=1)
        return self.classes_[best]

    def save(self, path: str | Path) -> Path:
        """Write the model to a .safetensors file, which `fedgft predict` reads too."""
        validation.check_is_fitted(self, "model_")
        return self.model_.save(path)

    @classmethod
    def load(cls, path: str | Path) -> FairClassifier:
        """Read a model that `save` or `fedgft train` wrote. Nothing in the file is executed."""
        model = FairModel.load(path)
        if model.encoder is None:
            text = f"{path}: not trained on a table; load_model reads it"
            raise FedgftError(text, field="path", kind="unsupported")
        about = model.about
        target = about["trained"]["target"] or 0.0
        loaded = cls(about["metric"], target, method=about["method"], random_state=about["seed"])
        loaded.model_ = model
        loaded.training_ = about["trained"]
        loaded.notes_ = ()
        loaded.history_ = []
        names = np.array([field.name for field in model.encoder.fields], dtype=object)
        loaded.n_features_in_ = len(names)
        if not about.get("unnamed"):
            loaded.feature_names_in_ = names
        kind = about.get("class_type", "text")
        values = [_parse_class(name, kind) for name in model.classes]
        loaded.classes_ = np.array(sorted(values))
        loaded._class_names = model.classes
        return loaded

    def _make_protocol(self) -> Protocol:
        protocol = get_protocol(self.protocol)
        changed: dict[str, Any] = {"target": (self.target,), "base": self.base}
        if self.rounds is not None:
            changed["settings"] = replace(protocol.settings, rounds=self.rounds)
            changed["round_factors"] = ()
        if self.lr is not None:
            changed["lr"] = (self.lr,)
        if self.lam is not None:
            changed["lam"] = (self.lam,)
        return replace(protocol, **changed)

    def _read_features(self, X: Any, *, reset: bool) -> pl.DataFrame:
        """Return X as a frame, and check or record the number and names of its columns."""
        try:
            table = nw.from_native(X, eager_only=True)
        except TypeError:
            return self._read_array(X, reset=reset)
        validation._check_feature_names(self, X, reset=reset)
        validation._check_n_features(self, np.empty((0, len(table.columns))), reset=reset)
        if not len(table) or not len(table.columns):
            raise FedgftError(f"X has the shape {table.shape}; it needs a row and a column")
        names = [str(name) for name in table.columns]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise FedgftError(f"X has the column {repeated!r} more than once", field="X")
        return to_polars(X, "X")

    def _read_array(self, X: Any, *, reset: bool) -> pl.DataFrame:
        array = validation.validate_data(
            self, X, reset=reset, dtype=None, ensure_all_finite="allow-nan"
        )
        columns = {f"x{i}": _to_numbers(array[:, i]) for i in range(array.shape[1])}
        frame = pl.DataFrame({name: to_series(name, column) for name, column in columns.items()})
        return frame.fill_nan(None)

    def _read_classes(self, y: Any, rows: int) -> np.ndarray:
        """Set `classes_` and return the index of each row's class, the positive class last."""
        if y is None:
            raise FedgftError("requires y to be passed, but the target y is None")
        y = validation.column_or_1d(y, warn=True)
        if len(y) != rows:
            raise FedgftError(f"y has {len(y)} rows, X has {rows}", field="y")
        series = to_series("y", y)
        if series.null_count() or (series.dtype.is_float() and not series.is_finite().all()):
            raise FedgftError("y has missing values, NaN or infinity among the classes", field="y")
        multiclass.check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            text = f"y has one class only, {self.classes_[0]!r}: there is nothing to learn"
            raise FedgftError(text, field="y", kind="data")
        if len(self.classes_) > MAX_VALUES:
            text = f"y has {len(self.classes_):,} classes, more than the {MAX_VALUES} there may be"
            raise FedgftError(text, field="y", kind="data")
        names = tuple(as_text(to_series("y", self.classes_)))
        if self.pos_label is not None:
            if len(names) != 2 or self.pos_label not in self.classes_.tolist():
                known = format_value(self.classes_.tolist())
                text = f"{self.pos_label!r} must be one of two classes; y has {known}"
                raise FedgftError(text, field="pos_label")
            if self.classes_.tolist()[0] == self.pos_label:
                names = names[::-1]
                codes = 1 - codes
        self._class_names = names
        return codes

    def _compute_logits(self, X: Any) -> np.ndarray:
        """Return the logits in the order of `classes_`."""
        validation.check_is_fitted(self, "model_")
        frame = self._read_features(X, reset=False)
        encoder = self.model_.encoder
        assert encoder is not None  # `fit` sets it, and `load` refuses a model without it
        features, notes = encoder.encode(frame, source="X")
        for note in notes:
            if UNSEEN in note:
                warnings.warn(note, UserWarning, stacklevel=3)
        logits = self.model_.logits(features)
        kind = self.model_.about.get("class_type", "text")
        values = [_parse_class(name, kind) for name in self.model_.classes]
        return logits[:, np.argsort(np.array(values))]

    def _measure(
        self, data: Dataset, features: np.ndarray, federation: Any, by_client: bool
    ) -> SiteSums | None:
        """Return the sums of each client's rows, or of the test rows where there are some."""
        if data.group_names == NO_GROUPS:
            return None
        logits = self.model_.logits(features)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = odds / odds.sum(axis=1, keepdims=True)
        parts: dict[str, np.ndarray] = {}
        if len(federation.test):
            parts["test rows"] = np.unique(federation.test)
        else:
            names = data.client_names
            for k in range(federation.num_clients):
                rows = federation.rows[federation.offsets[k] : federation.offsets[k + 1]]
                name = names[k] if names else f"client {k}" if by_client else "all rows"
                if len(rows):
                    parts[name] = np.unique(rows)
        class_names = np.array(data.classes)
        group_names = np.array([*data.group_names, None], dtype=object)
        sums = [
            measure(
                class_names[data.labels[rows]],
                class_names[logits[rows].argmax(1)],
                scores=scores[rows, 1] if len(class_names) == 2 else scores[rows],
                sensitive_features=group_names[data.groups[rows]],
                site=name,
                classes=data.classes,
            )
            for name, rows in parts.items()
        ]
        return merge(sums)


def _parse_class(name: str, kind: str) -> Any:
    """Return a class from its name in a model file."""
    if kind == "bool":
        return name == "True"
    if kind == "text":
        return name
    return int(name) if kind == "int" else float(name)


def _to_numbers(column: np.ndarray) -> np.ndarray:
    """Return a column of objects as numbers where all of them are; refuse what is no value."""
    if column.dtype != object:
        return column
    try:
        return column.astype(float)
    except (TypeError, ValueError):
        if any(isinstance(value, dict | list | set) for value in column):
            text = "X: argument must be a string or a number, or a table with one value per cell"
            raise TypeError(text) from None
        return column


def _read_seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer) and random_state >= 0:
        return int(random_state)
    try:
        generator = import_extra("sklearn.utils").check_random_state(random_state)
    except ValueError as error:
        raise FedgftError(str(error), field="random_state") from None
    return int(generator.randint(2**31 - 1))


def _read_weights(weights: Any, rows: int) -> np.ndarray | None:
    if weights is None:
        return None
    array = np.asarray(weights)
    if array.ndim == 0:
        array = np.full(rows, array)
    if array.ndim != 1 or array.dtype.kind not in "fiub":
        text = f"must have one number per row, not the shape {array.shape}"
        raise FedgftError(text, field="sample_weight")
    if len(array) != rows:
        raise FedgftError(f"sample_weight.shape == {array.shape}, expected ({rows},)!")
    array = array.astype(float)
    if not np.isfinite(array).all() or (array < 0).any():
        raise FedgftError("must be finite numbers >= 0", field="sample_weight")
    if not array.any():
        raise FedgftError("are all zero: no row counts", field="sample_weight")
    return None if (array == 1).all() else array


def _read_groups(given: Any, rows: int) -> tuple[np.ndarray, tuple[str, ...], list[str]]:
    """Return the group of each row, the names of the groups, and notes."""
    field = "sensitive_features"
    if given is None:
        text = "no sensitive_features: the model is trained without fairness"
        warnings.warn(text, UserWarning, stacklevel=3)
        return np.arange(rows) % 2, NO_GROUPS, []
    columns = {name: to_series(name, v) for name, v in split_attributes(given).items()}
    if not columns:
        raise FedgftError("has no column", field=field)
    for name, series in columns.items():
        if len(series) != rows:
            raise FedgftError(f"has {len(series)} rows, X has {rows}", field=field)
        found = series.drop_nulls().n_unique()
        if found > MAX_VALUES:
            text = f"column {name!r} has {found:,} different values, more than {MAX_VALUES}: use "
            raise FedgftError(f"{text}ranges of values as groups", field=field, kind="data")
    frame = pl.DataFrame(columns)
    groups, names, notes = read_groups(frame, Roles("y", frame.columns), source=field)
    if len(names) < 2:
        text = f"holds one group only, {names[0]!r}: fairness compares groups"
        raise FedgftError(text, field=field, kind="data")
    return groups, names, notes


def _read_clients(
    given: Any, rows: int
) -> tuple[np.ndarray | None, tuple[str, ...], PartitionKind, int]:
    """Return the client of each row, their names, the kind of partition and the number."""
    if given is None:
        return None, (), "iid", 1
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return None, (), "dirichlet", int(given)
    series = to_series("clients", given)
    if len(series) != rows:
        raise FedgftError(f"has {len(series)} rows, X has {rows}", field="clients")
    if series.null_count():
        text = f"lacks {series.null_count()} value(s): every row needs a client"
        raise FedgftError(text, field="clients", kind="data")
    text = as_text(series)
    names = tuple(text.unique().sort())
    codes = text.replace_strict(dict(zip(names, range(len(names)), strict=True)))
    return codes.to_numpy().astype(np.int64), names, "column", len(names)

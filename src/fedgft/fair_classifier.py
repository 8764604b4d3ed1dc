"""A scikit-learn classifier that is fair over the data of all clients.

classifier = FairClassifier(metric="sp", target=0.02)
classifier.fit(X, y, sensitive_features=frame["sex"], clients=frame["hospital"])
classifier.predict(X_new)

`fit` reads its arguments into a `Dataset`, trains one replicate of a `Study` as `fedgft train`
does, and keeps the `FairModel` and the sums that `audit_` reports on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import narwhals as nw
import numpy as np
import polars as pl
from sklearn.base import BaseEstimator, ClassifierMixin

from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.registry import METHODS
from fedgft.auditing.arrays import to_series
from fedgft.auditing.measurement_task import DEFAULT_BINS
from fedgft.auditing.report import Audit, audit
from fedgft.classifier_input import (
    RowGroups,
    encode_features,
    fit_encoder,
    name_argument,
    name_class_type,
    parse_class,
    read_classes,
    read_clients,
    read_seed,
    read_sensitive_features,
    read_weights,
    to_numbers,
)
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.encode import TOO_CLOSE, UNSEEN, get_column
from fedgft.data.partition import hold_out
from fedgft.data.table import read_strata, to_polars
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel, softmax
from fedgft.formatting import format_points
from fedgft.metrics import get_metric
from fedgft.models import Trees, get_model
from fedgft.rules.decision_rule import DecisionRule, load_rule
from fedgft.rules.federation_rule import OWN_KINDS, OwnKind, fit_rule
from fedgft.settings import TARGET_TOLERANCE, check_settings
from fedgft.site_sums import COUNT, ROWS, SCORES, SQUARES, MeasurementSpec, SiteSums, SiteTables
from fedgft.study.protocol import Protocol, get_protocol
from fedgft.study.results import Row, round_rows
from fedgft.study.study import Point, Result, Study
from fedgft.study.training import build_model
from fedgft.validation import check_choice, check_indices

if TYPE_CHECKING:  # the types that editors know of scikit-learn lack some of these names
    multiclass: Any
    validation: Any
else:
    from sklearn.utils import validation

ALL_ROWS = "all rows"  # the site of a model that was fitted without clients
TEST_ROWS = "test rows"


class FairClassifier(ClassifierMixin, BaseEstimator):
    """A linear model, trees or a small network whose decisions treat groups alike.

    The model is trained over clients that do not pool their rows, as `fedgft train` does, with the
    same numbers. After `fit`, a `TargetMissedWarning` says so if the gap is more than 0.3 points
    above the target.

    Parameters
    ----------
    metric
        The metric whose gap is reduced: sp, eop, eo, predictive-parity, acc or fpr; a weighted sum
        such as "sp+0.5*eop"; "sp|department" for gaps within the values of the column department of
        X; or a `Metric`.
    target
        The largest gap that the decisions may have over the rows of all clients.
    method
        "fedgft-control" keeps the target; "fedavg" ignores fairness; "fedgft", "lft", "lrw",
        "fairfed" and the other keys of `fedgft.algorithms.METHODS` are published methods.
    lam
        The strength of "fedgft", "lft" and other methods; None: chosen on held-out rows.
    model
        "logistic", "mlp", "trees" (gradient boosting; the depth is chosen on held-out rows), a
        model of `fedgft.models` such as ``Trees(max_depth=4)``, or a function that makes a torch
        module with one output per class.
    base
        The federated algorithm that the method extends, such as "fedavg", "fedprox" or "scaffold".
    rounds
        Rounds of training, or the number of trees; None: 50, or 100 trees, and up to 200 where the
        target is missed.
    lr
        Local learning rate; None: chosen on held-out rows, or 0.1 for trees.
    pos_label
        The class that counts as positive, of two; None: the alphabetically last, or the larger
        number.
    test_share
        Share of the rows that are kept out of training, for `audit_`. At 0 all rows are used, and
        `audit_` describes the training rows. The values that replace missing numbers, and the
        categories, are always those of all rows.
    protocol
        "heldout", or "paper" to train as the published experiments did.
    postprocess
        None: training keeps the target. Otherwise the model is trained without fairness, and a
        decision rule keeps the target: "thresholds" by group, "blind" (a threshold that bends with
        the columns; it decides without the group), or "derived" (decisions are changed by a coin).
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
    rule_
        The `DecisionRule`; None without `postprocess`.
    training_
        A dictionary: learning rate, rounds, gap, whether the target was reached.
    notes_
        Sentences on missing values and missing groups.

    Examples
    --------
    >>> import numpy as np
    >>> import fedgft
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3))
    >>> sex = np.where(X[:, 0] + rng.normal(size=400) > 0, "f", "m")
    >>> y = (X.sum(1) > 0).astype(int)
    >>> classifier = fedgft.FairClassifier(metric="sp", target=0.05, lr=0.02)
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
        postprocess: str | None = None,
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
        self.postprocess = postprocess
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
            A pandas, polars or pyarrow table, or an array (n, d). All columns are features, also
            the group and identifiers if X has them. Text columns become categories. Missing values
            are filled in; if 10 or more rows lack a number, a feature says where it is missing.
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
            (n,) Weights of the rows, relative to each other: a row of weight 2 counts as two equal
            rows, in training and in all measurements.

        Returns
        -------
        FairClassifier
            The fitted classifier itself.
        """
        with name_argument("X"):
            table = self._read_features(X, reset=True)
        rows = len(table)
        check_indices(
            X=X,
            y=y,
            sensitive_features=sensitive_features,
            clients=clients,
            sample_weight=sample_weight,
        )
        classes, class_names, labels = read_classes(y, rows, self.pos_label)
        weights = read_weights(sample_weight, rows)
        if weights is not None and len(np.unique(labels[weights > 0])) < 2:
            text = "is zero in all rows but those of one class: there is nothing to learn"
            raise FedgftError(text, field="sample_weight", kind="data")
        if self.postprocess is not None and sensitive_features is None:
            text = "is missing: the rule of `postprocess` treats groups alike"
            raise FedgftError(text, field="sensitive_features", kind="missing")
        with name_argument("sensitive_features"):
            if isinstance(sensitive_features, Mapping):
                check_indices(X=X, **{str(name): v for name, v in sensitive_features.items()})
            groups = read_sensitive_features(sensitive_features, rows)
        with name_argument("clients"):
            owners, client_names, kind, number = read_clients(clients, rows)
        with name_argument("X"):
            encoder = fit_encoder(table)
            features, notes = encode_features(table, encoder)
        with name_argument("metric"):
            strata = self._read_strata(table)
        del table  # it may be as large as X
        for note in notes:
            if TOO_CLOSE in note:
                warnings.warn(note, UserWarning, stacklevel=2)
        data = Dataset(
            name="X",
            features=features,
            labels=labels,
            groups=groups.codes,
            columns=encoder.columns,
            classes=class_names,
            group_names=groups.names,
            clients=owners,
            client_names=client_names,
            encoder=encoder,
            notes=(*notes, *groups.notes),
            weights=weights,
            **strata,
        )
        check_choice("method", self.method, tuple(METHODS))
        self._check_postprocess(class_names)
        seed = read_seed(self.random_state)
        test = np.zeros(rows, bool)
        test[hold_out(data, share=self.test_share, seed=seed, keep_clients=kind == "column")] = True
        study = Study(
            replace(data, test=test),
            self._make_protocol(),
            [seed],
            clients=number,
            kind=kind,
            model=self.model,
        )
        result = self._train(study, alpha, fair=sensitive_features is not None)
        self.classes_ = classes
        self._class_names = class_names
        self._keep_model(study, result, fair=sensitive_features is not None)
        self.notes_ = data.notes
        simulated = clients is not None and owners is None
        parts = _list_parts(data, result.federations[0], simulated=simulated)
        logits = self.model_.logits(features)
        scores = softmax(logits)
        decisions = logits.argmax(axis=1)
        self.rule_ = None
        if self.postprocess is not None:
            self.rule_ = self._fit_rule(study, result, groups, scores)
            decisions = self._decide(data, groups, scores).astype(int)
        self._sums = _count(data, groups, parts, scores, decisions)
        self.__dict__.pop("audit_", None)
        return self

    @cached_property
    def audit_(self) -> Audit:
        """The audit of the model over the test rows, or with `test_share` 0 over all rows."""
        validation.check_is_fitted(self, "model_")
        if self._sums is None:
            text = "is missing: only a model that was fitted with it here has an audit"
            raise FedgftError(text, field="sensitive_features", kind="missing")
        return audit(self._sums)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log-odds of ``classes_[1]``, (n,); with more classes the logits, (n, k)."""
        logits = self._compute_logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (n, k), in the order of `classes_`.

        A category that was not in the training rows counts as no category, with a warning.
        """
        return softmax(self._compute_logits(X))

    def predict(self, X: Any, *, sensitive_features: Any = None, ids: Any = None) -> np.ndarray:
        """Return the most probable class of each row, (n,), or the class that the rule decides.

        Parameters
        ----------
        X
            As in `fit`.
        sensitive_features
            The groups, as in `fit`. Only the rules "thresholds" and "derived" need them.
        ids
            (n,) An identifier of each person. Only the rule "derived" needs them: the same
            identifier always gets the same coin.
        """
        validation.check_is_fitted(self, "model_")
        rule = getattr(self, "rule_", None)
        if rule is None:
            if sensitive_features is not None or ids is not None:
                field = "ids" if sensitive_features is None else "sensitive_features"
                text = "is only for a rule, and `postprocess` is None: predict takes X alone"
                raise FedgftError(text, field=field, kind="conflict")
            return self.classes_[self._compute_logits(X).argmax(axis=1)]
        positive = parse_class(self._class_names[1], self._class_kind)
        scores = self.predict_proba(X)[:, self.classes_.tolist().index(positive)]
        if rule.is_blind:
            encoder = self.model_.encoder
            assert encoder is not None
            with name_argument("X"):
                features, _ = encode_features(self._read_features(X, reset=False), encoder)
            accepted = self._apply_rule(rule, scores, sensitive_features, features=features)
        else:
            given = scores if rule.reads == "score" else scores >= 0.5
            accepted = self._apply_rule(rule, given, sensitive_features, ids=ids)
        negative = parse_class(self._class_names[0], self._class_kind)
        return np.where(accepted, positive, negative).astype(self.classes_.dtype)

    def save(self, path: str | Path) -> Path:
        """Write the model to a .safetensors file, which `fedgft predict` reads too.

        A rule is written beside it, as NAME.rule.json; ``fedgft predict --rule`` reads it.
        """
        validation.check_is_fitted(self, "model_")
        rule = getattr(self, "rule_", None)
        if rule is not None:
            rule.save(name_rule_file(path))
        return self.model_.save(path)

    @classmethod
    def load(cls, path: str | Path, *, module: Callable[[], Any] | None = None) -> FairClassifier:
        """Read a model that `save` or `fedgft train` wrote. Nothing in the file is executed.

        Parameters
        ----------
        path
            A .safetensors file.
        module
            For your own network: the function that makes its `nn.Module`.
        """
        model = FairModel.load(path, module=module)
        if model.encoder is None:
            text = f"{path}: not trained on a table; load_model reads it"
            raise FedgftError(text, field="path", kind="unsupported")
        about = model.about
        trained = about.get("trained", {})
        loaded = cls(
            about.get("metric", "sp"),
            trained.get("target") or 0.0,
            method=about.get("method", "fedgft-control"),
            model=_name_model(about) if module is None else module,
            random_state=about.get("seed", 0),
        )
        loaded.model_ = model
        loaded.training_ = trained
        loaded.notes_ = ()
        loaded.history_ = []
        loaded._sums = None
        columns = np.array(list(model.features), dtype=object)
        loaded.n_features_in_ = len(columns)
        if about.get("named_columns", True):
            loaded.feature_names_in_ = columns
        loaded._class_names = model.classes
        kind = loaded._class_kind
        loaded.classes_ = np.array(sorted(parse_class(name, kind) for name in model.classes))
        loaded.postprocess = about.get("postprocess")
        loaded.rule_ = loaded._load_rule(name_rule_file(path)) if loaded.postprocess else None
        return loaded

    def _load_rule(self, path: Path) -> DecisionRule:
        """Return the rule in a file; raise a `FedgftError` if it is that of another model."""
        rule = load_rule(path)
        encoder = self.model_.encoder
        is_own = rule.classes == self._class_names and rule.is_blind == (
            self.postprocess == "blind"
        )
        if rule.group_model is not None and encoder is not None:
            is_own = is_own and rule.group_model.encoder.to_json() == encoder.to_json()
        if not is_own:
            raise FedgftError(f"{path}: is the rule of another model", kind="conflict")
        return rule

    def _apply_rule(
        self, rule: DecisionRule, given: np.ndarray, groups: Any, **more: Any
    ) -> np.ndarray:
        """Return the decisions of a rule; errors name the arguments of `predict`."""
        try:
            return rule.decide(given, groups, **more)
        except FedgftError as error:
            if error.field != "groups":
                raise
            text = error.message.removeprefix("`groups` ")
            raise FedgftError(text, field="sensitive_features", kind=error.kind) from None

    @property
    def _class_kind(self) -> str:
        """The type of the classes, which a model file holds as texts."""
        return self.model_.about.get("class_type", "text")

    def _make_protocol(self) -> Protocol:
        model = get_model(self.model)
        protocol = get_protocol(self.protocol, trees=isinstance(model, Trees))
        if isinstance(self.model, Trees):
            protocol = replace(protocol, max_depth=(self.model.max_depth,))
        if METHODS[self.method].strength != "target" and self.target:
            text = f"is for methods such as fedgft-control; {self.method} has no target"
            raise FedgftError(text, field="target", kind="conflict")
        if self.lam is not None and METHODS[self.method].strength != "lam":
            text = f"is the strength of methods such as fedgft; {self.method} has none of this name"
            raise FedgftError(text, field="lam", kind="conflict")
        check_settings({name: getattr(self, name) for name in ("target", "lam", "lr", "rounds")})
        changed: dict[str, Any] = {"target": (self.target,), "base": self.base}
        if self.rounds is not None:
            changed["settings"] = replace(protocol.settings, rounds=self.rounds)
            changed["round_factors"] = ()
        if self.lr is not None:
            changed["lr"] = (self.lr,)
        if self.lam is not None:
            changed["lam"] = (self.lam,)
        return replace(protocol, **changed)

    def _train(self, study: Study, alpha: float, *, fair: bool) -> Result:
        """Train one replicate, and warn if it misses its target."""
        method = self.method if fair and self.postprocess is None else "fedavg"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TargetMissedWarning)
                result = study.sweep(method, get_metric(self.metric), [Point(alpha)])[0]
        except FedgftError as error:
            if error.field != "exclude_empty":
                raise
            found = error.message.removeprefix("X: ").partition(";")[0]
            advice = "join it with another group, or replace its values by None (not recorded)"
            text = f"has {found}: {advice}"
            raise FedgftError(text, field="sensitive_features", kind="data") from None
        control = result.history.control
        if control is not None and not control.reached[0]:
            text = f"the target was missed: {control.reason(0)}"
            warnings.warn(text, TargetMissedWarning, stacklevel=3)
        return result

    def _check_postprocess(self, classes: tuple[str, ...]) -> None:
        """Raise a `FedgftError` for a rule that cannot be fitted."""
        if self.postprocess is None:
            return
        check_choice("postprocess", self.postprocess, OWN_KINDS)
        if len(classes) != 2:
            text = f"decides between two classes, y has {len(classes)}"
            raise FedgftError(text, field="postprocess", kind="unsupported")
        if self.method not in ("fedgft-control", "fedavg"):
            text = f"is {self.method}, and `postprocess` keeps the target: leave one out"
            raise FedgftError(text, field="method", kind="conflict")

    def _fit_rule(
        self, study: Study, result: Result, groups: RowGroups, scores: np.ndarray
    ) -> DecisionRule:
        """Return the rule that keeps the target on the training rows; warn if none does."""
        (federation,) = result.federations
        fitted = scores.copy()
        if result.history.scores is not None:  # of models that have not seen the row
            fitted[federation.rows] = result.history.scores[0]
        metric = get_metric(self.metric)
        parts = [part for part, _ in metric.parts] or [metric]
        assert groups.cell_codes is not None
        rule = fit_rule(
            federation,
            fitted[:, 1],
            cast("OwnKind", self.postprocess),
            target=dict.fromkeys(parts, self.target),
            row_groups=(groups.attributes, groups.cells, groups.cell_codes),
        )
        limited = [each for each in rule.expected["gaps"] if each["target"] is not None]
        if any((each["after"] or 0.0) > each["target"] + TARGET_TOLERANCE for each in limited):
            reached = ", ".join(
                f"{each['metric']} {format_points(each['after'])} points" for each in limited
            )
            text = f"no rule meets the target; the nearest has {reached}"
            warnings.warn(text, TargetMissedWarning, stacklevel=3)
        return rule

    def _decide(self, data: Dataset, groups: RowGroups, scores: np.ndarray) -> np.ndarray:
        """Return the decisions of the rule about the rows of `fit`, (n,) bool."""
        rule = self.rule_
        assert rule is not None and groups.cell_codes is not None
        if rule.is_blind:
            return rule.decide(scores[:, 1], features=data.features.astype(np.float64))
        cells = [groups.cells[i] for i in groups.cell_codes.tolist()]
        columns = dict(zip(groups.attributes, zip(*cells, strict=True), strict=True))
        given = scores[:, 1] if rule.reads == "score" else scores[:, 1] >= 0.5
        names = {name: list(values) for name, values in columns.items()}
        return rule.decide(given, names, ids=np.arange(len(given)))

    def _keep_model(self, study: Study, result: Result, *, fair: bool) -> None:
        self.model_ = build_model(study, result, 0)
        about = self.model_.about
        about["data"] = "a table"
        about["class_type"] = name_class_type(self.classes_.tolist())
        about["named_columns"] = hasattr(self, "feature_names_in_")
        about["postprocess"] = self.postprocess
        if not fair:
            about["groups"] = []
            about["trained"] |= {"gap": None, "gap_test": None, "reached": None}
        self.history_: list[Row] = round_rows(study, result)
        self.training_ = about["trained"]
        if self.training_["collapsed"]:
            text = "the model has collapsed: it gives nearly all rows the same class; try a larger"
            warnings.warn(f"{text} target or another lr", UserWarning, stacklevel=3)

    def _read_features(self, X: Any, *, reset: bool) -> pl.DataFrame | np.ndarray:
        """Return X as a table, or as an array of finite numbers; check or record its columns."""
        if isinstance(X, pl.LazyFrame):
            raise FedgftError("is a LazyFrame: pass X.collect()", field="X")
        names = [str(name) for name in getattr(X, "columns", ())]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise FedgftError(f"has the column {repeated!r} more than once", field="X")
        try:
            table = nw.from_native(X, eager_only=True)
        except TypeError:
            return self._read_array(X, reset=reset)
        validation._check_feature_names(self, X, reset=reset)
        validation._check_n_features(self, np.empty((0, len(table.columns))), reset=reset)
        if not len(table) or not len(table.columns):
            text = f"has the shape {table.shape}; it needs a row and a column"
            raise FedgftError(text, field="X", kind="data")
        frame = to_polars(X, "X").fill_nan(None)
        if not reset:  # the names have been compared; a model of an array goes by position
            frame.columns = list(self.model_.features)
        return frame

    def _read_array(self, X: Any, *, reset: bool) -> pl.DataFrame | np.ndarray:
        array = validation.validate_data(
            self, X, reset=reset, dtype=None, ensure_all_finite="allow-nan"
        )
        if array.dtype.kind in "biuf" and not np.isnan(array.sum(dtype=np.float64)):
            return array
        names = [f"x{i}" for i in range(array.shape[1])] if reset else list(self.model_.features)
        columns = {name: to_numbers(array[:, i]) for i, name in enumerate(names)}
        frame = pl.DataFrame({name: to_series(name, column) for name, column in columns.items()})
        return frame.fill_nan(None)

    def _read_strata(self, table: pl.DataFrame | np.ndarray) -> dict[str, Any]:
        """Return the fields of a `Dataset` with the strata that the metric names; often none."""
        within = get_metric(self.metric).columns
        if not within:
            return {}
        if not isinstance(table, pl.DataFrame) or not hasattr(self, "feature_names_in_"):
            text = f"{get_metric(self.metric).name} needs the column of a table, and X is an array"
            raise FedgftError(text, field="metric", kind="data")
        for name in within:
            get_column(table, name, source="X", option="`metric`")
        return read_strata(table, within, source="X")

    def _compute_logits(self, X: Any) -> np.ndarray:
        """Return the logits in the order of `classes_`."""
        validation.check_is_fitted(self, "model_")
        encoder = self.model_.encoder
        assert encoder is not None  # `fit` sets it, and `load` refuses a model without it
        with name_argument("X"):
            features, notes = encode_features(self._read_features(X, reset=False), encoder)
        for note in notes:
            if UNSEEN in note:
                warnings.warn(note, UserWarning, stacklevel=3)
        values = [parse_class(name, self._class_kind) for name in self._class_names]
        return self.model_.logits(features)[:, sorted(range(len(values)), key=values.__getitem__)]


def name_rule_file(model: str | Path) -> Path:
    """Return the file of the rule that belongs to a model file."""
    return Path(model).with_suffix(".rule.json")


def _name_model(about: Mapping[str, Any]) -> Any:
    """Return the `model` argument for a saved model: its name, or the trees with their options."""
    name = about.get("model", "logistic")
    if name != "trees":
        return name
    known = {each.name for each in fields(Trees)} - {"name", "linear"}
    try:
        return Trees(**{k: v for k, v in about.get("trees", {}).items() if k in known})
    except (FedgftError, TypeError, AttributeError):
        return name


# The sums behind `audit_`


def _list_parts(data: Dataset, federation: Federation, *, simulated: bool) -> dict[str, np.ndarray]:
    """Return the rows of the audit by name of the client: its test rows, or else all its rows."""
    names = data.client_names
    if len(federation.test):
        test = np.unique(federation.test)
        if data.clients is None:
            return {TEST_ROWS: test}
        owners = data.clients[test]
        return {names[k]: test[owners == k] for k in np.unique(owners)}
    parts = {}
    for k in range(federation.num_clients):
        name = names[federation.keys[k]] if names else f"client {k}" if simulated else ALL_ROWS
        if len(rows := federation.client(k)):
            parts[name] = np.unique(rows)
    return parts


def _count(
    data: Dataset,
    groups: RowGroups,
    parts: dict[str, np.ndarray],
    scores: np.ndarray,
    decisions: np.ndarray,
) -> SiteSums | None:
    """Return the sums that `measure` would return for these scores and decisions, per site.

    The rows are known as indices here, so that one count of all indices replaces reading texts.
    """
    if groups.cell_codes is None:
        return None
    classes = len(data.classes)
    name = "" if data.weights is None else "sample_weight"
    spec = MeasurementSpec(
        data.classes, groups.attributes, scored=True, bins=DEFAULT_BINS, weight=name
    )
    rows = np.concatenate(list(parts.values()))
    site = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
    weights = None
    if data.weights is not None:
        counts = data.weights[rows] > 0
        rows, site = rows[counts], site[counts]
        weights = data.weights[rows]
    cell = (groups.cell_codes[rows] * classes + data.labels[rows]) * classes
    cell += decisions[rows]
    shape = (len(groups.cells), classes, classes)
    size = int(np.prod(shape))
    tables = np.zeros((len(parts), *shape, SCORES + len(spec.score_classes)))
    histogram = np.zeros((*shape, len(spec.score_classes), spec.bins))
    per_site = _make_counter(site * size + cell, (len(parts), *shape))
    tables[..., COUNT] = per_site(weights)
    if weights is not None:
        tables[..., ROWS] = per_site()
        tables[..., SQUARES] = per_site(weights**2)
    bin_rows = np.zeros_like(histogram)
    edges = np.arange(1, spec.bins) / spec.bins
    for i, c in enumerate(spec.score_classes):
        score = scores[rows, c]
        tables[..., SCORES + i] = per_site(score if weights is None else weights * score)
        bins = np.searchsorted(edges, score, side="right")
        per_bin = _make_counter(cell * spec.bins + bins, (*shape, spec.bins))
        histogram[..., i, :] = per_bin(weights)
        bin_rows[..., i, :] = per_bin()
    found = {}
    for name, table in zip(parts, tables, strict=True):
        held = np.flatnonzero(table[..., COUNT].any(axis=(1, 2)))
        found[name] = SiteTables({groups.cells[i]: table[i] for i in held})
    used = np.flatnonzero(histogram.any(axis=(1, 2, 3, 4)))
    histograms, of_rows = ({groups.cells[i]: h[i] for i in used} for h in (histogram, bin_rows))
    return SiteSums(spec, found, histograms, bin_rows={} if weights is None else of_rows)


def _make_counter(places: np.ndarray, shape: tuple[int, ...]) -> Callable[..., np.ndarray]:
    """Return a function that counts rows, or adds up weights, by place in an array."""

    def count(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(places, weights, minlength=int(np.prod(shape))).reshape(shape)

    return count

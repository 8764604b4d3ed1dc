"""XGBoost and LightGBM: read their data, follow their training, and grow boosters in step.

Both are optional packages, so nothing of them is imported before it is needed.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.errors import FedgftError, import_extra
from fedgft.validation import format_value

if TYPE_CHECKING:
    from fedgft.algorithms.price_objective import LabeledRows, PriceObjective

PURPOSE = "fedgft.price_objective"
LINKS = ("binary:logistic", "binary:logitraw", "reg:logistic", "multi:softprob", "multi:softmax")
"Objectives of XGBoost with which a model predicts classes from logits."
RATE_NAMES = ("learning_rate", "shrinkage_rate", "eta")
OBJECTIVE_NAMES = ("objective", "objective_type", "app", "application", "loss")
UNSUPPORTED_BOOSTINGS = ("dart", "rf", "random_forest")
DROPOUT = "its trees change after they were grown, so the measured model is not the final one"


def find_library(data: Any) -> str:
    """Return "xgboost" for a `DMatrix`, "lightgbm" for a `Dataset`; an error for other types."""
    names = {f"{each.__module__.split('.')[0]}.{each.__name__}" for each in type(data).__mro__}
    if "xgboost.DMatrix" in names:
        return "xgboost"
    if "lightgbm.Dataset" in names:
        return "lightgbm"
    text = f"must be a DMatrix of XGBoost or a Dataset of LightGBM, not {format_value(data)}"
    raise FedgftError(text, field="data")


def read_labels(data: Any) -> np.ndarray:
    """Return the labels in a `DMatrix` or `Dataset`, (n,)."""
    labels = _read_field(data, "label")
    if labels is None:
        raise FedgftError("holds no labels: pass them with the rows", field="data", kind="missing")
    return labels


def read_weights(data: Any) -> np.ndarray | None:
    """Return the weights of the rows in a `DMatrix` or `Dataset`, (n,); None if it has none."""
    return _read_field(data, "weight")


def _read_field(data: Any, name: str) -> np.ndarray | None:
    """Return the labels or weights of the rows; None if there are none."""
    library = find_library(data)
    try:
        values = getattr(data, f"get_{name}")()
    except Exception:  # LightGBM has no narrower type
        if library == "xgboost":
            raise
        return None  # neither given as an array nor read from a file yet
    return None if values is None or not len(values) else np.asarray(values)


def make_callback(
    objective: "PriceObjective", data: Any, rows: "LabeledRows", *, save_best: bool
) -> Any:
    """Return a callback of the library that `data` belongs to; see `PriceObjective.callback`."""
    weight = objective.read_weights(data, rows)
    if find_library(data) == "xgboost":
        return _make_xgboost_callback(objective, data, rows, weight, save_best)
    return LightGBMCallback(objective, data, rows, weight)


def _make_xgboost_callback(
    objective: "PriceObjective",
    data: Any,
    rows: "LabeledRows",
    weight: np.ndarray | None,
    save_best: bool,
) -> Any:
    base = import_extra("xgboost.callback", PURPOSE).TrainingCallback

    class XGBoostCallback(base):
        """Measures the model before each tree and at the end."""

        def __init__(self) -> None:
            self.start: int | None = None

        def before_training(self, model: Any) -> Any:
            _refuse_reuse(self.start is not None)
            self.start = model.num_boosted_rounds()
            check_booster(model, objective.lr)
            return model

        def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            self.measure(model)
            return False

        def measure(self, model: Any) -> None:
            # XGBoost keeps the predictions for this matrix and adds the new tree only.
            margins = model.predict(data, output_margin=True)
            objective.measure(margins, rows, sample_weight=weight)

        def after_training(self, model: Any) -> Any:
            self.measure(model)
            start = self.start or 0
            best = objective.choose(model.num_boosted_rounds() - start)
            return model if best is None else _end_xgboost(model, start + best, save_best)

    return XGBoostCallback()


def check_booster(model: Any, lr: float) -> None:
    """Refuse a booster of XGBoost whose margins are not logits, or whose old trees change."""
    learner = json.loads(model.save_config())["learner"]
    booster = learner["gradient_booster"]
    if booster["name"] != "gbtree":
        text = f"must have booster 'gbtree', not {booster['name']!r}"
        reason = f": {DROPOUT}" if booster["name"] == "dart" else ""
        raise FedgftError(text + reason, field="params", kind="unsupported")
    name = learner["objective"]["name"]
    if name not in LINKS:
        text = f'has the objective {name!r}: add "objective": "binary:logistic" (or '
        text = f'{text}"multi:softprob"), so that the model predicts probabilities'
        raise FedgftError(text, field="params", kind="conflict")
    _check_rate(float(booster.get("tree_train_param", {}).get("eta", lr)), lr)


def _check_rate(found: float, lr: float) -> None:
    if abs(found - lr) > 1e-6 * lr:
        text = f"is {lr:g}, and the booster learns at {found:g}: give both the same rate"
        raise FedgftError(text, field="lr", kind="conflict")


def _refuse_reuse(is_used: bool) -> None:
    if is_used:
        text = "served a training already: make another one with `objective.callback(...)`"
        raise FedgftError(text, field="callback", kind="conflict")


def _end_xgboost(model: Any, trees: int, save_best: bool) -> Any:
    """Return the booster with its best iteration, the last one of the first `trees` rounds."""
    if save_best and trees < model.num_boosted_rounds():
        model = model[:trees]
    model.set_attr(best_iteration=str(trees - 1))
    return model


class LightGBMCallback:
    """Measures the model after each tree, and ends the training with the chosen one.

    Parameters
    ----------
    objective
        The objective whose prices are set.
    data, rows, weight
        The rows that are counted, as a `Dataset`, as labels and groups, and their weights.
    """

    before_iteration = False
    order = 25  # before LightGBM's own early stopping, which ends the training

    def __init__(
        self, objective: "PriceObjective", data: Any, rows: "LabeledRows", weight: np.ndarray | None
    ) -> None:
        self.objective = objective
        self.data = data
        self.rows = rows
        self.weight = weight
        self.is_used = False

    def __call__(self, env: Any) -> None:
        """Measure the model after a tree; LightGBM calls it.

        Parameters
        ----------
        env
            The state of the training.
        """
        is_first = env.iteration == env.begin_iteration
        if is_first:
            _refuse_reuse(self.is_used)
            self.is_used = True
            _check_lightgbm(env.params, self.objective.lr)
        margins = predict_lightgbm(env.model, self.data)
        if is_first:
            self._measure(self._first_margins())
        self._measure(margins)
        if env.iteration == env.end_iteration - 1:
            best = self.objective.choose(env.iteration - env.begin_iteration + 1)
            if best is not None:
                end = import_extra("lightgbm.callback", PURPOSE).EarlyStopException
                found = ("counted rows", "accuracy", self.objective.accuracies[best], True)
                raise end(env.begin_iteration + best - 1, [found])

    def _measure(self, margins: np.ndarray) -> None:
        self.objective.measure(margins, self.rows, sample_weight=self.weight)

    def _first_margins(self) -> np.ndarray:
        """Return the margins before the first tree: zeros, or the `init_score` of the data."""
        rows = len(self.rows.labels)
        classes = self.objective.classes
        shape = (rows,) if classes == 2 else (rows, classes)
        given = self.data.get_init_score()
        if given is None or not np.size(given):
            return np.zeros(shape)
        return np.reshape(given, shape, order="F")


def _check_lightgbm(params: dict[str, Any], lr: float) -> None:
    boosting = params.get("boosting", params.get("boosting_type", params.get("boost", "gbdt")))
    if boosting in UNSUPPORTED_BOOSTINGS:
        reason = f": {DROPOUT}" if boosting == "dart" else ""
        text = f"must have boosting 'gbdt', not {boosting!r}{reason}"
        raise FedgftError(text, field="params", kind="unsupported")
    _check_rate(next((float(params[n]) for n in RATE_NAMES if n in params), 0.1), lr)


def predict_lightgbm(booster: Any, data: Any) -> np.ndarray:
    """Return the margins of the rows of a `Dataset` in a training of LightGBM.

    LightGBM keeps them and adds the new tree only.
    """
    found: list[np.ndarray] = []

    def remember(margins: np.ndarray, _: Any) -> tuple[str, float, bool]:
        found.append(np.array(margins))
        return "margins", 0.0, True

    booster.eval(data, "counted rows", feval=remember)
    return found[0]


def train_out_of_fold(
    objective: "PriceObjective",
    params: dict[str, Any],
    data: Any,
    num_boost_round: int,
    fold: np.ndarray,
    *,
    save_best: bool,
) -> Any:
    """Grow boosters in step; see `PriceObjective.train_out_of_fold`.

    Parameters
    ----------
    objective, params, data, num_boost_round, save_best
        As there.
    fold
        (n,) The part of each row.
    """
    weight = objective.read_weights(data, objective.rows)
    library = XGBoostTrainer if find_library(data) == "xgboost" else LightGBMTrainer
    trainer = library(params, data, objective.lr)
    parts = range(int(fold.max()) + 1)
    boosters = [trainer.start() for _ in (None, *parts)]  # the first one has all rows
    for t in range(num_boost_round):
        margins = [trainer.predict(booster) for booster in boosters]
        _measure_parts(objective, margins, fold, weight)
        for part, booster in zip((None, *parts), boosters, strict=True):
            gradient, hessian = objective.gradient(
                margins[0 if part is None else part + 1], sample_weight=weight
            )
            if part is not None:
                gradient[fold == part] = 0.0
                hessian[fold == part] = 0.0
            trainer.boost(booster, t, gradient, hessian)
    _measure_parts(objective, [trainer.predict(b) for b in boosters], fold, weight)
    best = objective.choose(trainer.count(boosters[0]))
    return trainer.finish(boosters[0], best, save_best)


def _measure_parts(
    objective: "PriceObjective",
    margins: list[np.ndarray],
    fold: np.ndarray,
    weight: np.ndarray | None,
) -> None:
    """Measure each row by the booster that has not seen it."""
    unseen = margins[0].copy()
    for part, found in enumerate(margins[1:]):
        unseen[fold == part] = found[fold == part]
    objective.measure(unseen, sample_weight=weight)


class XGBoostTrainer:
    """Grows boosters of XGBoost tree by tree.

    Parameters
    ----------
    params, data
        As in ``xgb.train``.
    lr
        The learning rate that the parameters must have.
    """

    def __init__(self, params: dict[str, Any], data: Any, lr: float) -> None:
        self.module = import_extra("xgboost", PURPOSE)
        # Without it, a booster that grows by `boost` has another base in memory than in a file.
        self.params = {"base_score": 0.5} | params
        self.data = data
        check_booster(self.start(), lr)

    def start(self) -> Any:
        """Return a booster without trees."""
        return self.module.Booster(self.params, [self.data])

    def predict(self, booster: Any) -> np.ndarray:
        """Return the margins of all rows."""
        return booster.predict(self.data, output_margin=True)

    def boost(self, booster: Any, t: int, gradient: np.ndarray, hessian: np.ndarray) -> None:
        """Add tree t."""
        booster.boost(self.data, iteration=t, grad=gradient, hess=hessian)

    def count(self, booster: Any) -> int:
        """Return the number of rounds that the booster has."""
        return booster.num_boosted_rounds()

    def finish(self, booster: Any, best: int | None, save_best: bool) -> Any:
        """Return the final booster, with its best iteration if there is one."""
        return booster if best is None else _end_xgboost(booster, best, save_best)


class LightGBMTrainer:
    """Does the same with LightGBM.

    Parameters
    ----------
    params, data
        As in ``lgb.train``.
    lr
        The learning rate that the parameters must have.
    """

    def __init__(self, params: dict[str, Any], data: Any, lr: float) -> None:
        self.module = import_extra("lightgbm", PURPOSE)
        _check_lightgbm(params, lr)
        kept = {name: value for name, value in params.items() if name not in OBJECTIVE_NAMES}
        self.params = {**kept, "objective": "none", "metric": "none"}
        self.data = data

    def start(self) -> Any:
        """Return a booster without trees."""
        return self.module.Booster(self.params, self.data)

    def predict(self, booster: Any) -> np.ndarray:
        """Return the margins of all rows."""
        return predict_lightgbm(booster, self.data)

    def boost(self, booster: Any, t: int, gradient: np.ndarray, hessian: np.ndarray) -> None:
        """Add a tree."""
        booster.update(fobj=lambda *_: (gradient, hessian))

    def count(self, booster: Any) -> int:
        """Return the number of rounds that the booster has."""
        return booster.current_iteration()

    def finish(self, booster: Any, best: int | None, save_best: bool) -> Any:
        """Return the final booster, cut after its best iteration if there is one."""
        if best is None:
            return booster
        if save_best:
            text = booster.model_to_string(num_iteration=best)
            booster = self.module.Booster(model_str=text)
        booster.best_iteration = best
        return booster

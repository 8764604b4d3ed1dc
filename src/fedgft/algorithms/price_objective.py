"""FedGFT's prices as a custom objective of XGBoost and LightGBM.

A booster fits each tree to the gradient and the hessian of the loss at the current margins f. With
p = sigmoid(f), the label y and the price of the row's label and group:

    gradient    p - y + price p (1 - p)           hessian    max(p (1 - p), MIN_HESSIAN)

With more than two classes, p = softmax(f), and class k has

    gradient    p_k - y_k + p_k (price_k - sum_j p_j price_j)       hessian    2 p_k (1 - p_k)

Both are multiplied by the weight of the row. After each tree, sums over rows give the gap, and the
`Controller` (or a penalty of fixed strength) sets the prices of the next tree. With a target, the
first 1 / lr trees have no prices.

The rows that are counted decide what the target means. Deep trees fit the rows that they are grown
on, so that equal opportunity can hold on these rows and fail on others: count rows that the trees
have not seen (`PriceObjective.callback` with held-out rows, `PriceObjective.train_out_of_fold`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgft.algorithms import booster_training
from fedgft.algorithms.client_messages import add_messages, pack_message, read_message
from fedgft.algorithms.controller import Controller, ControlReport, boosting_loop
from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.data.encode import Names
from fedgft.data.groups import MAX_GROUPS, GroupNames
from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric, check_over_all_rows, get_metric, price
from fedgft.metrics.metric import Statistics
from fedgft.sums import Sums
from fedgft.validation import as_array, check_indices, check_integer, check_number

MIN_HESSIAN = 1e-6
"The smallest hessian of a row: a row that is certain still has a step of finite length."
FREE_SHARE = 1.0
"""The share of 1 / lr trees that have no price. The first margins lie so close together that a
small price turns all decisions; the controller would then undo its prices for many trees."""
PICK_SHARE = 0.6
"The share of the trees, counted from the end, after which the ensemble may end."
GAP_TOLERANCE = 0.002
"A gap at most this far above its target counts as having reached it; as in the simulator."
GAP_WEIGHT = 2.0
"Points of accuracy that outweigh one point of gap above the target; as in the simulator."
MAX_CLASSES = 1000

Counted = Literal["own", "held-out", "out-of-fold", "all clients"]
"Which rows set the prices."


@dataclass(frozen=True)
class LabeledRows:
    """The label and the group of each row, (n,); the group is -1 where it is not recorded."""

    labels: np.ndarray
    groups: np.ndarray

    def sum(
        self, margins: np.ndarray, weight: np.ndarray | None, *, classes: int, num_groups: int
    ) -> Sums:
        """Return the sums of the scores and decisions that follow from margins.

        Parameters
        ----------
        margins
            (n,) of two classes, or (n, classes).
        weight
            (n,) how much each row counts; None: 1.
        classes, num_groups
            The number of classes and of groups.
        """
        probs = to_probabilities(margins)
        k = num_groups + 1
        cell = self.labels * k + np.where(self.groups < 0, num_groups, self.groups)
        size = classes * k
        chosen = probs.argmax(1)
        count = np.bincount(cell, weight, size)
        columns = [probs[:, c] if weight is None else weight * probs[:, c] for c in range(classes)]
        score = np.stack([np.bincount(cell, column, size) for column in columns], -1)
        decision = np.bincount(cell * classes + chosen, weight, size * classes)
        shape = (classes, k, classes)
        return Sums(
            count.reshape(classes, k).astype(float),
            score.reshape(shape),
            decision.reshape(shape).astype(float),
        )


class PriceObjective:
    """A custom objective for XGBoost and LightGBM whose trees pay for the gap between groups.

    `fedgft.price_objective` makes one. Pass it as ``xgb.train(..., obj=objective)`` or as
    ``lgb.train({"objective": objective, ...}, ...)``. It serves one training; `reset` starts anew.

    Parameters
    ----------
    rule
        How prices follow from the statistics.
    rows
        Label and group of each training row.
    names
        The names of the groups.
    classes
        The number of classes.
    lr
        The learning rate of the booster.

    Attributes
    ----------
    metric
        The `Metric`.
    groups
        The names of the groups, in the order of the columns of `prices`.
    counted
        Which rows set the prices: "own" (the training rows), "held-out", "out-of-fold", or
        "all clients" (after `update`).
    best
        The number of trees that was chosen. None before the end of a training with a callback, and
        without a target.
    """

    def __init__(
        self,
        rule: Controller | LinearizedPenalty,
        rows: LabeledRows,
        names: GroupNames,
        *,
        classes: int,
        lr: float,
    ) -> None:
        self.rule = rule
        self.metric: Metric = rule.metric
        self.metric.affine(classes)  # raises an error where sums cannot carry the metric
        self.rows = rows
        self.classes = classes
        self.lr = lr
        self.groups: Names = names.names
        self._names = names
        self.reset()

    def __repr__(self) -> str:
        rows = f"{len(self.rows.labels):,} rows, groups {', '.join(self.groups[:5])}"
        rule = self.rule
        is_fixed = isinstance(rule, LinearizedPenalty)
        aim = f"lam={rule.lam:g}" if is_fixed else f"target={rule.target:g}"
        return f"PriceObjective({self.metric.name!r}, {aim}, {rows})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PriceObjective":
        """Return the same object: LightGBM copies its parameters, and the user reads the report."""
        return self

    def reset(self) -> "PriceObjective":
        """Forget prices and measurements, for the next training; return the objective."""
        self.counted: Counted = "own"
        self.measures_itself = True  # until something else sets the prices
        self.best: int | None = None
        self._sums: list[Sums] = []  # of each measured model, where they are known
        self._gaps: list[float] = []
        self._v: Statistics | None = None
        self._table = np.zeros((self.classes, len(self.groups) + 1, self.classes))
        if isinstance(self.rule, Controller):
            self._state = self.rule.init(1, boosting_loop(self.lr))._replace(speed=self.lr)
        return self

    def __call__(self, margins: Any, data: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return gradient and hessian of each training row; the libraries call it.

        Parameters
        ----------
        margins
            (n,) or (n, classes) The raw predictions of the training rows.
        data
            The `DMatrix` or `Dataset` of the training rows. Its weights count in the gradient, in
            the hessian and in the gap.
        """
        weight = self.read_weights(data, self.rows)
        if self.measures_itself:
            self.measure(margins, sample_weight=weight)
        return self.gradient(margins, sample_weight=weight)

    def gradient(self, margins: Any, *, sample_weight: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return gradient and hessian of each training row at the current prices.

        Parameters
        ----------
        margins
            (n,) or (n, classes) The raw predictions of the training rows.
        sample_weight
            (n,) The weight of each row. None: 1.
        """
        labels = self.rows.labels
        margins = self._read_margins(margins, len(labels))
        weight = _read_weights(sample_weight, len(labels))
        probs = to_probabilities(margins)
        cost = self._table[labels, self.rows.groups]  # the last column, -1, has no price
        if margins.ndim == 1:
            p = probs[:, 1]
            slope = p * (1 - p)
            gradient = p - labels + (cost[:, 1] - cost[:, 0]) * slope
            hessian = np.maximum(slope, MIN_HESSIAN)
        else:
            gradient = probs * (1 + cost - (probs * cost).sum(1, keepdims=True))
            gradient[np.arange(len(labels)), labels] -= 1
            hessian = np.maximum(2 * probs * (1 - probs), MIN_HESSIAN)
            weight = None if weight is None else weight[:, None]
        return (gradient, hessian) if weight is None else (weight * gradient, weight * hessian)

    def statistics(self, margins: Any, *, sample_weight: Any = None) -> np.ndarray:
        """Return this client's message: its number of rows, then the summed statistics, flat.

        A client of a federation sends it, and `update` reads the messages of all clients.

        Parameters
        ----------
        margins
            (n,) or (n, classes) The raw predictions for this client's training rows by the model
            that all clients share: ``booster.predict(data, output_margin=True)`` of XGBoost,
            ``booster.predict(X, raw_score=True)`` of LightGBM.
        sample_weight
            (n,) The weight of each row. None: 1.
        """
        sums = self._sum(self.rows, margins, sample_weight)
        return pack_message(float(sums.rows()), sums.statistics(self.metric, self._kind))

    def update(self, statistics: Any) -> float:
        """Set the prices from all clients' messages; return the gap of the measured model.

        From now on, prices change in calls of `update` only.

        Parameters
        ----------
        statistics
            The messages of all clients (any iterable), or their sum. The gap is NaN where a group
            has no row that the metric needs.
        """
        conditions = len(self.metric.conditions(self.classes))
        total = add_messages(statistics)
        mean = read_message(total, self.metric, len(self.groups), conditions=conditions)
        self.counted = "all clients"
        self.measures_itself = False
        self._sums = []
        return self._steer(mean)

    def measure(
        self, margins: Any, rows: LabeledRows | None = None, *, sample_weight: Any = None
    ) -> float:
        """Set the prices from rows of this process; return the gap of the measured model.

        Parameters
        ----------
        margins
            (n,) or (n, classes) The raw predictions for the rows.
        rows
            Their labels and groups. None: the training rows.
        sample_weight
            (n,) The weight of each row. None: 1.
        """
        sums = self._sum(self.rows if rows is None else rows, margins, sample_weight)
        self._sums.append(sums)
        counted = max(float(sums.rows()), 1e-300)
        return self._steer(sums.statistics(self.metric, self._kind) / counted)

    def callback(self, data: Any, sensitive_features: Any = None, *, save_best: bool = True) -> Any:
        """Return a callback that sets the prices by the rows of `data` and chooses the last tree.

        It measures the model on these rows after each tree. With a target, it chooses the tree to
        end with: among the last 60% of the trees, the one after which
        accuracy - 2 x (gap above the target) is largest. `best_iteration` of the booster has the
        choice, as after early stopping. A callback serves one training, and making it calls
        `reset`.

        Parameters
        ----------
        data
            The `DMatrix` or `Dataset` with labels (and weights) of the rows: the training data, or
            rows that are held out. LightGBM needs a `Dataset` that refers to the training data, as
            ``train.create_valid(X, y)`` makes it.
        sensitive_features
            The groups of held-out rows. None: `data` are the training rows.
        save_best
            Whether XGBoost's booster is cut after the chosen tree; LightGBM always does it.
        """
        self.reset()
        self.measures_itself = False
        rows = self.rows
        if sensitive_features is not None:
            self.counted = "held-out"
            rows = LabeledRows(
                _read_labels(booster_training.read_labels(data), self.classes),
                _read_groups(sensitive_features, self._names),
            )
            _check_lengths(y=rows.labels, sensitive_features=rows.groups)
        return booster_training.make_callback(self, data, rows, save_best=save_best)

    def train_out_of_fold(
        self,
        params: dict[str, Any],
        data: Any,
        num_boost_round: int = 100,
        *,
        folds: int = 5,
        seed: int = 0,
        save_best: bool = True,
    ) -> Any:
        """Train a booster whose prices follow from rows that the trees have not seen; return it.

        The rows are dealt to `folds` parts. One more booster per part is grown beside the booster
        on all rows, tree by tree: the rows of its part have no gradient. Its predictions for these
        rows are those for new rows, and the gap of these predictions sets the prices of the next
        tree of all boosters. The last tree is chosen as by `callback`. This takes `folds` + 1 times
        as long as one training.

        Parameters
        ----------
        params
            As in ``xgb.train`` or ``lgb.train``, without a custom objective.
        data
            The `DMatrix` or `Dataset` of the training rows.
        num_boost_round
            The number of trees (of rounds).
        folds
            The number of parts, at least 2. Labels and groups are shared out evenly.
        seed
            Seed of the parts.
        save_best
            Whether the booster is cut after the chosen tree.
        """
        check_integer("num_boost_round", num_boost_round, least=1)
        rows = self.rows
        check_integer("folds", folds, least=2, most=len(rows.labels))
        generator = np.random.default_rng(check_integer("seed", seed, least=0))
        order = generator.permutation(len(rows.labels))
        order = order[np.lexsort((rows.groups[order], rows.labels[order]))]
        fold = np.empty(len(order), np.int64)
        fold[order] = np.arange(len(order)) % folds
        self.reset()
        self.counted = "out-of-fold"
        self.measures_itself = False
        return booster_training.train_out_of_fold(
            self, params, data, num_boost_round, fold, save_best=save_best
        )

    @property
    def target(self) -> float | None:
        """The target; None for a penalty of fixed strength."""
        return float(self.rule.target) if isinstance(self.rule, Controller) else None

    @property
    def prices(self) -> np.ndarray:
        """The prices that the next tree is grown with.

        (labels, groups) what the second class costs a row of this label and group, with two
        classes; (labels, groups, classes) with more.
        """
        table = self._table[:, :-1]
        return table[..., 1] - table[..., 0] if self.classes == 2 else table.copy()

    @property
    def gaps(self) -> np.ndarray:
        """The gap of each measured model: entry i is that of the first i trees.

        Gaps of decisions with a target, of scores otherwise; on the rows that `counted` names.
        """
        return np.array(self._gaps)

    @property
    def accuracies(self) -> np.ndarray:
        """The accuracy of each measured model; empty where prices come from `update`."""
        return np.array([float(sums.accuracy()) for sums in self._sums])

    @property
    def report(self) -> ControlReport | None:
        """Whether the target was reached by the chosen model, or else by the last measured one.

        None without a target, and before the first measurement.
        """
        if self.target is None or not self._gaps:
            return None
        gap = self.gaps[[-1 if self.best is None else self.best]]
        return ControlReport(np.array([self.target]), gap, self.gaps[None])

    def about(self) -> dict[str, Any]:
        """Return how the model was trained, for the record of `FairModel.from_xgboost`."""
        at = -1 if self.best is None else self.best
        gap = self._gaps[at] if self._gaps else math.nan
        report = self.report
        trained = {
            "rounds": len(self._gaps) - 1 if self.best is None else self.best,
            "lr": self.lr,
            "target": self.target,
            "gap_of": {"hard": "decisions", "soft": "scores"}[self._kind],
            "gap": gap if math.isfinite(gap) else None,
            "reached": None if report is None else bool(report.reached[0]),
            "accuracy": float(self.accuracies[at]) if self._sums else None,
            "counted": self.counted,
        }
        return {
            "method": "fedgft" if self.target is None else "fedgft-control",
            "metric": self.metric.name,
            "groups": list(self.groups),
            "trained": trained,
        }

    def choose(self, trees: int) -> int | None:
        """Choose the number of trees of the final model, and return it; see `callback`.

        Parameters
        ----------
        trees
            The number of trees that there are. None is chosen without a target.
        """
        measured = min(len(self._sums) - 1, trees)
        if self.target is None or measured < 1:
            return None
        excess = np.maximum(self.gaps - self.target, 0.0)
        scores = self.accuracies - GAP_WEIGHT * np.maximum(excess - GAP_TOLERANCE, 0.0)
        scores = np.where(np.isfinite(scores), scores, -np.inf)
        first = min(math.floor(measured * (1 - PICK_SHARE)) + 1, measured)
        last_to_first = scores[first : measured + 1][::-1]  # the later one of two equal models
        self.best = measured - int(last_to_first.argmax())
        return self.best

    def read_weights(self, data: Any, rows: LabeledRows) -> np.ndarray | None:
        """Return the weights of the rows in a `DMatrix` or `Dataset`; None: 1.

        Raises an error unless the data have the labels of these rows.
        """
        labels = booster_training.read_labels(data)
        if len(labels) != len(rows.labels):
            text = f"has {len(labels):,} rows, and the objective was made for "
            text = f"{text}{len(rows.labels):,}: pass the data with the rows of `y`"
            raise FedgftError(text, field="data", kind="conflict")
        if not np.array_equal(labels, rows.labels):
            text = "has other labels than `y`: pass the same rows in the same order"
            raise FedgftError(text, field="data", kind="conflict")
        return booster_training.read_weights(data)

    @property
    def _kind(self) -> Kind:
        return "soft" if self.target is None else "hard"

    def _sum(self, rows: LabeledRows, margins: Any, sample_weight: Any) -> Sums:
        read = self._read_margins(margins, len(rows.labels))
        weight = _read_weights(sample_weight, len(rows.labels))
        return rows.sum(read, weight, classes=self.classes, num_groups=len(self.groups))

    def _steer(self, mean: Statistics) -> float:
        """Set the prices by mean statistics (2, v, g); return the gap."""
        gap = float(self.metric.readout(mean))
        if isinstance(self.rule, LinearizedPenalty):
            last = np.zeros_like(mean) if self._v is None else self._v
            self._v = self.rule.cotangent(mean, last)
            self._table = float(self.rule.lam) * price(self.metric, self._v, self.classes)
        elif len(self._gaps) >= FREE_SHARE / self.lr:
            self._state = self.rule.steer(self._state, mean[None])
            if self._state.v is not None:
                self._table = price(self.metric, self._state.v[0], self.classes)
        self._gaps.append(gap)
        return gap

    def _read_margins(self, margins: Any, rows: int) -> np.ndarray:
        """Return finite margins, (n,) with two classes, or (n, classes)."""
        read = as_array("margins", margins)
        if read.dtype.kind not in "fiu":
            raise FedgftError(f"must hold numbers, not {read.dtype}", field="margins")
        read = read[:, 0] if read.ndim == 2 and read.shape[1] == 1 else read
        one = read.shape == (rows,) and self.classes == 2
        if not one and read.shape != (rows, self.classes):
            wanted = f"({rows},)" if self.classes == 2 else f"({rows}, {self.classes})"
            raise FedgftError(f"must have the shape {wanted}, not {read.shape}", field="margins")
        if not np.isfinite(read).all():
            text = "hold NaN or infinity: check `base_score`, `init_score` and the learning rate"
            raise FedgftError(text, field="margins", kind="data")
        return read.astype(np.float64)


def price_objective(
    metric: str | Metric,
    *,
    y: Any,
    sensitive_features: Any,
    lr: float,
    target: float | None = None,
    lam: float | None = None,
    penalty: str = "half",
    groups: Any = None,
    classes: int | None = None,
) -> PriceObjective:
    """Return a custom objective with which XGBoost or LightGBM grows a fair ensemble.

    Pass it as ``obj`` of ``xgb.train`` with ``"objective": "binary:logistic"`` in the parameters,
    or as ``"objective"`` in the parameters of ``lgb.train``. Before each tree, the rows are counted
    by label, group and decision, and the prices of the tree are set. The first 1 / `lr` trees have
    none, so grow at least 5 / `lr`. ``report`` of the objective says whether the target was
    reached. Its methods ``callback`` and ``train_out_of_fold`` count rows that the trees have not
    seen, which equal opportunity needs. In a federation, exchange ``statistics`` and ``update``.

    Parameters
    ----------
    metric
        The metric whose gap is limited, as a name or a `Metric`.
    y
        (n,) The labels of the training rows: class indices 0, 1, ...
    sensitive_features
        The group of each training row: a column of text, whole numbers or truth values, or several
        columns whose combinations are the groups. A row where it is missing (None, NaN, or the
        number -1) counts in no gap.
    lr
        The learning rate of the booster (`eta`, `learning_rate`). If a federation grows several
        trees between two calls of ``update``: 1 - (1 - learning rate)^trees.
    target
        The gap of decisions to reach, as a fraction. None: `lam` is the strength.
    lam
        Strength of a penalty on the gap of scores. Give either `lam` or `target`. None: the
        controller finds the strength.
    penalty
        J in lam J(gap): "l1", "l2" or "half"; ignored if there is a target.
    groups
        For a federation, where a client may lack a group: the names of all groups, in the same
        order at every client; or their number, if `sensitive_features` holds the codes 0, 1, ...
        An array of codes may also come with names. None: the groups that occur.
    classes
        The number of classes; a client of a federation may lack one. None: those that occur.

    Returns
    -------
    PriceObjective
        The objective, with ``report``, ``gaps`` and ``prices``.

    Examples
    --------
    >>> import fedgft
    >>> import xgboost as xgb
    >>> people = fedgft.load("synthetic")
    >>> data = xgb.DMatrix(people.features, people.labels)
    >>> objective = fedgft.price_objective(
    ...     "sp", target=0.02, y=people.labels, sensitive_features=people.groups, lr=0.1
    ... )
    >>> params = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 3, "nthread": 1}
    >>> booster = xgb.train(
    ...     params, data, 60, obj=objective, callbacks=[objective.callback(data)]
    ... )
    >>> bool(objective.report.reached[0])
    True
    """
    if (lam is None) == (target is None):
        text = "is missing: give either `target` or `lam`"
        raise FedgftError(text, field="target", kind="conflict")
    read = check_over_all_rows(get_metric(metric))
    if target is not None:
        rule: Controller | LinearizedPenalty = Controller(read, check_number("target", target))
    else:
        rule = LinearizedPenalty(read, check_number("lam", lam), penalty)
    if not 0 < check_number("lr", lr) <= 1:
        raise FedgftError(f"must be above 0 and at most 1, not {lr:g}", field="lr")
    check_indices(y=y, sensitive_features=sensitive_features)
    if classes is not None:
        check_integer("classes", classes, least=2, most=MAX_CLASSES)
    labels = _read_labels(y, classes)
    names = _find_groups(sensitive_features, groups)
    rows = LabeledRows(labels, _read_groups(sensitive_features, names))
    _check_lengths(y=rows.labels, sensitive_features=rows.groups)
    found = int(labels.max(initial=0)) + 1
    return PriceObjective(rule, rows, names, classes=classes or found, lr=float(lr))


def to_probabilities(margins: np.ndarray) -> np.ndarray:
    """Return the probabilities of the classes, (n, classes), from margins (n,) or (n, classes)."""
    if margins.ndim == 1:
        p = 1.0 / (1.0 + np.exp(-np.clip(margins, -500, 500)))
        return np.stack((1.0 - p, p), 1)
    odds = np.exp(margins - margins.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def _read_labels(y: Any, classes: int | None) -> np.ndarray:
    """Return class indices, (n,) int64; without `classes`, at least two must occur."""
    array = as_array("y", y)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        found = f"{array.dtype} of shape {array.shape}"
        raise FedgftError(f"must hold class indices 0, 1, ... per row, not {found}", field="y")
    most = (classes or MAX_CLASSES) - 1
    with np.errstate(invalid="ignore"):
        valid = (array >= 0) & (array <= most) & (array == np.floor(array))
    if not valid.all():
        wrong = array[~valid][0]
        text = f"must hold class indices from 0 to {most}, not {wrong}"
        raise FedgftError(text, field="y", kind="data")
    labels = array.astype(np.int64)
    if classes is None and len(np.unique(labels)) < 2:
        text = "holds one class only: there is nothing to predict (a client gives `classes`)"
        raise FedgftError(text, field="y", kind="data")
    return labels


def _find_groups(sensitive_features: Any, groups: Any) -> GroupNames:
    if groups is None:
        return GroupNames.find(sensitive_features)
    if isinstance(groups, int | np.integer) and not isinstance(groups, bool):
        number = check_integer("groups", groups, least=2, most=MAX_GROUPS)
        return GroupNames(tuple(map(str, range(number))))
    return GroupNames.declare(groups)


def _read_groups(values: Any, names: GroupNames) -> np.ndarray:
    """Return the index of each row's group, (n,), -1 where it is missing."""
    field = "sensitive_features"
    codes = names.codes
    number = len(names.names)
    is_code = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"
    if is_code and (codes is None or np.array_equal(codes, np.arange(number))):
        wrong = values[(values < -1) | (values >= number)]
        if len(wrong):
            raise names.unknown(wrong[0].item(), field=field)
        return values.astype(np.int64)
    return names.index(values, field=field)


def _read_weights(values: Any, rows: int) -> np.ndarray | None:
    if values is None:
        return None
    weight = as_array("sample_weight", values)
    if weight.shape != (rows,) or weight.dtype.kind not in "biuf":
        text = f"must hold one number for each of the {rows:,} rows, not {weight.shape}"
        raise FedgftError(text, field="sample_weight")
    if not (np.isfinite(weight) & (weight >= 0)).all() or (rows and not weight.any()):
        text = "must hold finite numbers of at least 0, and not zeros only"
        raise FedgftError(text, field="sample_weight", kind="data")
    return weight.astype(np.float64)


def _check_lengths(**columns: np.ndarray) -> None:
    (first, one), (second, two) = columns.items()
    if len(one) != len(two):
        text = f"has {len(two):,} rows, and `{first}` has {len(one):,}"
        raise FedgftError(text, field=second, kind="conflict")

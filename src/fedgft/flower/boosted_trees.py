"""A site's model that XGBoost grows: it receives a booster and adds trees with the server's prices.

With probability p of the second class, label y, row weight w and price r(y, group) of each class, a
row enters the next tree with

    gradient  w (p - y) + (r_1 - r_0) p (1 - p)          hessian  w p (1 - p)

The weight is 1, except with FairFed's reweighing. The hessian leaves the price out, whose curvature
has no sign.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedgft.engine.plan import derive_seeds
from fedgft.errors import FedgftError, import_extra
from fedgft.flower.boosters import Booster, Tree, boosting_rate, empty_booster, read_trees
from fedgft.privacy.policy import SitePolicy
from fedgft.settings import SETTINGS, TREE_KEYS, check_run_config
from fedgft.sums import Sums

MIN_HESSIAN = 1e-6
MIN_FOLD_CELL = 10
"Rows of a label and group that a fold needs so that its sums stand for all rows of them."
MAX_WEIGHT_PER_ROW = 0.25  # the largest p (1 - p)


class BoostedTrees:
    """Trees that XGBoost grows at a site; for strategies `FedXgbBagging` and `FedXgbCyclic`.

    Its rows are arrays (n, columns) of numbers, of indices of categories (0, 1, ...), and of NaN
    where a value is missing.

    Parameters
    ----------
    levels
        The number of categories of each column; 0 for a column of numbers.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        self._xgboost = import_extra("xgboost", "`model` xgboost")
        self.levels = tuple(map(int, levels))
        self.types = ["c" if count else "q" for count in self.levels]
        self.new_trees: list[Tree] = []
        self._received = empty_booster(self.levels)
        self._booster = Booster(self.levels)
        self._margins: Any = None  # what applies the received booster

    def load(self, arrays: ArrayRecord) -> None:
        """Take the received booster; raise a `FedgftError` if it does not fit the columns."""
        self._booster = Booster.from_arrays(arrays, source="the booster", levels=self.levels)
        self._received = arrays
        self.new_trees = []
        self._margins = None

    def arrays(self) -> ArrayRecord:
        """Return the received booster, or, after training, a booster of the new trees only."""
        if not self.new_trees:
            return self._received
        new = Booster(self.levels, self._booster.base).grown(self.new_trees)
        return new.to_arrays(parallel=len(self.new_trees))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return the probabilities (n, 2) of the received booster with the new trees."""
        positive = 1.0 / (1.0 + np.exp(-self.margins(x)))
        return np.stack((1.0 - positive, positive), axis=1)

    def margins(self, x: np.ndarray) -> np.ndarray:
        """Return the logits (n,) of the second class, in double precision."""
        if self._margins is None:
            whole = self._booster.grown(self.new_trees) if self.new_trees else self._booster
            self._margins = self._read(whole)
        return self._apply(self._margins, self._table(x))

    def boost(
        self,
        rows: tuple[np.ndarray, np.ndarray, np.ndarray],
        penalty: Any,
        config: Mapping[str, Any],
        *,
        min_rows: float = 0,
    ) -> float:
        """Grow the trees of one round.

        Parameters
        ----------
        rows
            Columns (n, columns), labels (n,) and groups (n,) of the rows to fit.
        penalty
            The `ServerPenalty` of the round.
        config
            The server's settings: "lr", "local-trees", "max-depth", "min-child-weight", "l2".
        min_rows
            The fewest rows that a leaf may have. A row adds at most 1/4 to the weight of a leaf.

        Returns
        -------
        float
            The mean cross-entropy before these trees.
        """
        check_run_config(config, TREE_KEYS)
        x, y, a = rows
        price = penalty.price[y, a, 1] - penalty.price[y, a, 0]
        weights = np.ones(len(y)) if penalty.weights is None else penalty.weights[y, a]
        lr, count = boosting_rate(config)
        parameters = self._make_parameters(config, lr, min_rows)
        margins = self.margins(x)
        table = self._table(x)
        loss = float(np.mean(np.logaddexp(0.0, margins) - y * margins))
        trees: list[Tree] = []
        for _ in range(count):
            p = 1.0 / (1.0 + np.exp(-margins))
            gradient = weights * (p - y) + price * p * (1.0 - p)
            hessian = np.maximum(weights * p * (1.0 - p), MIN_HESSIAN)
            one = self._xgboost.Booster(parameters, [table])
            one.boost(table, iteration=0, grad=gradient, hess=hessian)
            learner = json.loads(bytes(one.save_raw("json")))["learner"]
            trees += read_trees(learner["gradient_booster"]["model"]["trees"], self.levels)
            margins = margins + self._apply(one, table)
        self.new_trees = trees
        self._margins = None
        return loss

    def _make_parameters(
        self, config: Mapping[str, Any], lr: float, min_rows: float
    ) -> dict[str, Any]:
        def setting(key: str) -> Any:
            return config.get(key, SETTINGS[key.replace("-", "_")].default)

        least = max(float(setting("min-child-weight")), MAX_WEIGHT_PER_ROW * min_rows)
        return {
            "objective": "binary:logistic",
            "base_score": 0.5,
            "eta": lr,
            "max_depth": int(setting("max-depth")),
            "min_child_weight": least,
            "lambda": float(setting("l2")),
            "tree_method": "hist",
            "nthread": 1,
            "seed": 0,
            "verbosity": 0,
        }

    def _table(self, x: np.ndarray) -> Any:
        if x.ndim != 2 or x.shape[1] != len(self.levels):
            text = f"has {x.shape[-1]} columns; the trees ask about {len(self.levels)}"
            raise FedgftError(f"the site's table {text}", kind="data")
        return self._xgboost.DMatrix(
            np.asarray(x, np.float32), feature_types=self.types, enable_categorical=True, nthread=1
        )

    def _read(self, booster: Booster) -> Any:
        text = booster.to_json().encode()
        return self._xgboost.Booster({"nthread": 1}, model_file=bytearray(text))

    @staticmethod
    def _apply(booster: Any, table: Any) -> np.ndarray:
        return booster.predict(table, output_margin=True).astype(np.float64)


# One round at a site


def grow_trees(site: Any, penalty: Any, policy: SitePolicy, config: Mapping[str, Any]) -> float:
    """Grow the trees of one round on a site's rows, without those of the fold that sets prices.

    Returns the mean cross-entropy before these trees.
    """
    if not site.in_memory:
        raise FedgftError(f"site '{site.name}': trees need `rows` as arrays, not a loader")
    x, y, a = (np.asarray(part) for part in site.rows)
    left_out = _find_fold(site, policy, config, rounds_done(policy))
    if left_out is not None and not left_out.all():
        x, y, a = x[~left_out], y[~left_out], a[~left_out]
    min_rows = policy.agree().min_count
    return site.model.boost((x, y, a), penalty, config, min_rows=min_rows)


def tally_unseen(site: Any, exact: Sums, policy: SitePolicy, config: Mapping[str, Any]) -> Sums:
    """Return the sums that set the prices: of rows that the site's last trees were not fitted to.

    The rows are those of one fold. Their scores and decisions are multiplied, for each label and
    group, by the number of all rows over that of the fold's rows, so that counts stay the same in
    all rounds. Where the fold has few rows, the exact sums stay. With noise or secure sums they
    always stay: a row of a fold would count several times, and noise is made for rows that count
    once.

    Parameters
    ----------
    site
        The site, whose model is the one that it received.
    exact
        The sums over all of its training rows.
    policy, config
        The site's policy, with the server's request, and the server's settings.
    """
    budget = policy.agree()
    last = rounds_done(policy) - (0 if site.model.new_trees else 1)
    if last < 0 or budget.epsilon is not None or not site.in_memory:
        return exact
    fold = _find_fold(site, policy, config, last)
    if fold is None or not fold.any():
        return exact
    part = site.tally(tuple(np.asarray(values)[fold] for values in site.rows))
    enough = part.count >= max(MIN_FOLD_CELL, budget.min_count)
    factor = np.where(enough, exact.count / np.maximum(part.count, 1.0), 0.0)[..., None]
    score, decision = (
        np.where(enough[..., None], np.minimum(factor * mine, exact.count[..., None]), whole)
        for mine, whole in zip(part.arrays[1:], exact.arrays[1:], strict=True)
    )
    return Sums(exact.count, score, decision)


def rounds_done(policy: SitePolicy) -> int:
    """Return how many rounds the model in a message has been trained for, as the server says."""
    done = policy.request.get("rounds-done", 0)
    if type(done) is not int or not 0 <= done < 2**31:
        raise FedgftError("the server's number of finished rounds is not a whole number")
    return done


def _find_fold(
    site: Any, policy: SitePolicy, config: Mapping[str, Any], number: int
) -> np.ndarray | None:
    """Return which rows round `number`, counted from 0, leaves out; None if there are no folds."""
    check_run_config(config, ("rotating-folds",))
    folds = int(config.get("rotating-folds", SETTINGS["rotating_folds"].default))
    if folds < 2:
        return None
    _, y, a = (np.asarray(part) for part in site.rows)
    seed = derive_seeds(int(config.get("seed", 0)), site.key)
    return assign_folds(y, a, folds, int(seed)) == number % folds


def assign_folds(y: np.ndarray, a: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row, (n,): the rows of a label and group are spread evenly."""
    order = np.random.default_rng(seed).permutation(len(y))
    cells = np.unique(np.stack((y, a)), axis=1, return_inverse=True)[1].ravel()
    fold = np.empty(len(y), np.int64)
    for cell in range(cells.max(initial=-1) + 1):
        rows = order[cells[order] == cell]
        fold[rows] = np.arange(len(rows)) % folds
    return fold

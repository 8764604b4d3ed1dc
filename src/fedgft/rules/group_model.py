"""The model of group and label behind a group-blind rule.

It gives, for a person's columns and score, the probability of each pair of label and group. It is a
linear softmax model, small enough to be a part of the rule's JSON file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgft.data.encode import Encoder
from fedgft.data.table import to_polars
from fedgft.errors import FedgftError
from fedgft.fair_model import softmax
from fedgft.site_sums import Group
from fedgft.sums import RecordReader

MAX_LOGIT = 10.0  # scores nearer to 0 or 1 than this logit count as this logit
MAX_PARAMETERS = 2_000_000


@dataclass(frozen=True, eq=False)
class GroupModel:
    """P(label, group | columns, score) by a linear softmax model, and what each pair costs.

    Parameters
    ----------
    encoder
        How the columns become features.
    weight, bias
        (pair, feature + 1) and (pair,): the last feature is the logit of the score.
    pairs
        The label's index and the group of each pair.
    costs
        (pair,): the threshold of the score rises by the sum of P(pair) times its cost.
    """

    encoder: Encoder
    weight: np.ndarray
    bias: np.ndarray
    pairs: tuple[tuple[int, Group], ...]
    costs: np.ndarray

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the model reads."""
        return tuple(field.name for field in self.encoder.fields)

    def predict_proba(self, scores: np.ndarray, features: Any) -> np.ndarray:
        """Return the probability of each pair, (n, pair).

        Parameters
        ----------
        scores
            (n,): probabilities of the positive class.
        features
            The table with `columns`, or the encoded features, (n, d).
        """
        if features is None:
            text = f"is missing: the rule is group-blind and reads {', '.join(self.columns[:8])}"
            raise FedgftError(text, field="features", kind="missing")
        if not isinstance(features, np.ndarray):
            features, _ = self.encoder.encode(to_polars(features, "features"), source="features")
        elif features.ndim != 2 or features.dtype.kind not in "fiub":
            raise FedgftError("must be numbers with two axes, (n, d)", field="features")
        if len(features) != len(scores):
            text = f"has {len(features)} rows, scores has {len(scores)}"
            raise FedgftError(text, field="features")
        if features.shape[1] != self.weight.shape[1] - 1:
            text = f"has {features.shape[1]} features, the rule {self.weight.shape[1] - 1}"
            raise FedgftError(text, field="features")
        if not np.isfinite(features).all():
            raise FedgftError("holds NaN or infinity", field="features", kind="data")
        logits = features @ self.weight[:, :-1].T + np.outer(to_logit(scores), self.weight[:, -1])
        return softmax(logits + self.bias)

    def bend(self, scores: np.ndarray, features: Any) -> np.ndarray:
        """Return by how much the threshold of each person rises, (n,)."""
        return self.predict_proba(scores, features) @ self.costs

    def to_record(self) -> dict[str, Any]:
        """Return the model as lists of numbers and texts."""
        return {
            "encoder": self.encoder.to_json(),
            "pairs": [{"label": label, "group": list(group)} for label, group in self.pairs],
            "costs": self.costs.tolist(),
            "bias": self.bias.tolist(),
            "weight": self.weight.tolist(),
        }

    @classmethod
    def from_record(cls, reader: RecordReader) -> "GroupModel":
        """Read what `to_record` wrote."""
        try:
            encoder = Encoder.from_json(reader.text("encoder"))
        except ValueError as error:
            reader.fail("encoder", f"is damaged ({error})")
        pairs = []
        for i, pair in enumerate(reader.get("pairs", list)):
            valid = isinstance(pair, Mapping) and pair.get("label") in (0, 1)
            group = pair.get("group") if valid else None
            if not isinstance(group, list) or not all(isinstance(v, str) for v in group):
                reader.fail(f"pairs[{i}]", "must name a label and a group")
            pairs.append((int(pair["label"]), tuple(group)))
        width = sum(len(field.columns) for field in encoder.fields) + 1
        if len(pairs) * width > MAX_PARAMETERS:
            reader.fail("weight", "is too large")
        shapes = {"costs": (len(pairs),), "bias": (len(pairs),), "weight": (len(pairs), width)}
        arrays = {}
        for name, shape in shapes.items():
            try:
                array = np.array(reader.get(name, list), np.float64)
            except (TypeError, ValueError, OverflowError):
                reader.fail(name, "must hold numbers")
            if array.shape != shape or not np.isfinite(array).all():
                reader.fail(name, f"must hold finite numbers of the shape {shape}")
            arrays[name] = array
        return cls(encoder=encoder, pairs=tuple(pairs), **arrays)


def to_logit(scores: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)), at most `MAX_LOGIT` away from 0."""
    low = 1 / (1 + np.exp(MAX_LOGIT))
    clipped = np.clip(scores, low, 1 - low)
    return np.log(clipped / (1 - clipped))

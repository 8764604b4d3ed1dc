"""Train methods on the replicates of a study, choose a model, and save everything to a folder.

study = Study(load("adult"), get_protocol("heldout"), range(20))
trained = train_model(study, "fedgft-control", "sp")
trained.model().predict(frame, source="new rows")
trained.save(Path("fedgft-train"))
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType

import numpy as np
import polars as pl

from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.data.dataset import get_raw_scaling
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel
from fedgft.metrics import Metric, get_metric
from fedgft.models import ResNet18, get_model, named
from fedgft.store import atomic_write, make_folder, stage_files
from fedgft.study.figures import plot_rounds, save_figure
from fedgft.study.results import (
    Choice,
    Row,
    choose_replicate,
    client_rows,
    describe_training,
    round_rows,
    row,
)
from fedgft.study.study import Result, Study

MODEL_FILE = "model.safetensors"
TEXT_COLUMNS = ("rule", "target_of", "missed_because", "widest", "widest_federation")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several methods, trained on the same replicates; `rows` has one row per result."""

    study: Study
    results: list[Result]
    rows: list[Row]

    def save(
        self,
        folder: Path,
        *,
        models: Mapping[str, int] = MappingProxyType({}),
        why: str | None = None,
    ) -> list[Path]:
        """Write rows.parquet, rounds.parquet and the figure; all of them or none.

        Parameters
        ----------
        folder
            Where to; it is made if it does not exist.
        models
            File names, and the replicates of the last result whose models they hold.
        why
            The reason for the choice of the replicate in `MODEL_FILE`, which its header states.

        Returns
        -------
        The paths of the files.
        """
        make_folder(folder)
        with stage_files(folder) as place:
            for name, replicate in models.items():
                reason = why if name == MODEL_FILE else None
                save_model(self.study, self.results[-1], replicate, place / name, why=reason)
            write_rows(self.rows, place / "rows.parquet")
            lines = [line for result in self.results for line in round_rows(self.study, result)]
            write_rows(lines, place / "rounds.parquet")
            save_figure(plot_rounds(self.study, self.results), place, "rounds")
        names = (*models, "rows.parquet", "rounds.parquet", "rounds.png", "rounds.svg")
        return [folder / name for name in names]


def compare_methods(
    study: Study, methods: Sequence[str], metrics: Sequence[Metric], alphas: Sequence[float]
) -> Comparison:
    """Train every method for every metric at every alpha.

    Results are in the order alpha, metric, method. Missed targets stand in the rows, so there is
    no `TargetMissedWarning`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        results = [
            study.run(alpha, method, metric)
            for alpha in alphas
            for metric in metrics
            for method in methods
        ]
    return Comparison(study, results, [row(study, result) for result in results])


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """One method, trained on all replicates, and the choice of one of them.

    `comparison` ends with the method; where the method has a target, FedAvg stands before it to
    show what the target costs.
    """

    comparison: Comparison
    choice: Choice

    @property
    def study(self) -> Study:
        return self.comparison.study

    @property
    def result(self) -> Result:
        return self.comparison.results[-1]

    @property
    def fedavg(self) -> Result | None:
        """FedAvg on the same replicates, where it was trained for comparison."""
        return self.comparison.results[0] if len(self.comparison.results) > 1 else None

    @property
    def summary(self) -> Row:
        """How the chosen replicate was trained, its accuracy and gap, and why it was chosen."""
        about = describe_training(self.study, self.result, self.choice.replicate)
        return {**about, "why": self.choice.reason}

    def clients(self) -> list[Row]:
        """Every client before and after, see `client_rows`."""
        return client_rows(
            self.study, self.result, replicate=self.choice.replicate, plain=self.fedavg
        )

    def model(self) -> FairModel:
        """The chosen model, as `load_model` would read it from the file."""
        return build_model(self.study, self.result, self.choice.replicate, why=self.choice.reason)

    def save(self, folder: Path, *, all_models: bool = False) -> list[Path]:
        """Write the chosen model, the rows and the figure; with `all_models` every replicate's."""
        models = {MODEL_FILE: self.choice.replicate}
        if all_models:
            models |= {f"model-{seed}.safetensors": i for i, seed in enumerate(self.study.seeds)}
        return self.comparison.save(folder, models=models, why=self.choice.reason)


def train_model(
    study: Study, method: str = "fedgft-control", metric: str | Metric = "sp", *, alpha: float = 0.5
) -> TrainedModel:
    """Train one method on all replicates of a study and choose the best replicate.

    Parameters
    ----------
    study
        Data, protocol (with `lam`, `beta` or `target`), replicates and model.
    method
        A key of `METHODS`.
    metric
        Whose gap.
    alpha
        Heterogeneity of a Dirichlet partition: small is heterogeneous.
    """
    methods = ["fedavg", method] if method == "fedgft-control" else [method]
    comparison = compare_methods(study, methods, [get_metric(metric)], [alpha])
    return TrainedModel(comparison, choose_replicate(study, comparison.results[-1]))


def build_model(
    study: Study, result: Result, replicate: int, *, why: str | None = None
) -> FairModel:
    """The model of one replicate: tensors by their torch names, the scaling, and the header.

    The header says how a raw table becomes features, how the model was trained and what gap it
    has. Raises `FedgftError` where the model has diverged.
    """
    data = study.dataset
    model = get_model(study.model)
    shapes = model.shapes(features=data.features.shape[1], classes=len(data.classes))
    flat = result.history.params[replicate]
    federation = result.history.federation
    finite = federation is None or np.isfinite(federation[-1].score[replicate]).all()
    if not (finite and np.isfinite(flat).all()):
        raise FedgftError(
            f"{result.method}: the model of seed {study.seeds[replicate]} has diverged, so it is "
            "not saved; try a smaller `lr`"
        )
    about = {
        "data": data.name,
        "method": result.method,
        "metric": result.metric.name,
        "protocol": study.protocol.name,
        "seed": int(study.seeds[replicate]),
        "trained": {**describe_training(study, result, replicate), "why": why},
        "columns": data.columns,
        "classes": data.classes,
        "groups": data.group_names,
        "model": model.name,
        "encoder": None if data.encoder is None else data.encoder.to_json(),
    }
    if isinstance(study.model, ResNet18):
        about["network"] = {"norm": study.model.norm, "stem": study.model.stem}
    mean, spread = get_raw_scaling(result.federations[replicate])
    return FairModel(named(flat, shapes), mean, spread, json.loads(json.dumps(about)))


def save_model(
    study: Study, result: Result, replicate: int, path: Path, *, why: str | None = None
) -> Path:
    """Write the model of one replicate, see `build_model`."""
    return build_model(study, result, replicate, why=why).save(path)


def write_rows(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as Parquet that only its owner can read.

    Files with the same columns can be concatenated: a column that holds only nulls still has a
    type, and a value that is itself a table (rates by group) becomes JSON text.
    """
    flat = [
        {name: json.dumps(v) if isinstance(v, dict) else v for name, v in row.items()}
        for row in rows
    ]
    frame = pl.DataFrame(flat, infer_schema_length=None)
    empty = [name for name, kind in frame.schema.items() if kind == pl.Null]
    frame = frame.with_columns(
        pl.col(name).cast(pl.String if name in TEXT_COLUMNS else pl.Float64) for name in empty
    )
    buffer = BytesIO()
    frame.write_parquet(buffer)
    with atomic_write(path, private=True) as part:
        part.write_bytes(buffer.getvalue())
    return path

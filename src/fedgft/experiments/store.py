"""What a study leaves: rows as Parquet, and the models of its runs."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.data.scaling import raw_scaling
from fedgft.errors import FedgftError
from fedgft.experiments.rows import number
from fedgft.experiments.study import Result, Study
from fedgft.federated.control import NEAR
from fedgft.files import whole
from fedgft.metrics.decisions import collapsed
from fedgft.models import ResNet18, get_model, named
from fedgft.saved import write_model

# columns of text that may hold nothing but nulls
TEXT = ("rule", "target_of", "missed_because", "widest", "widest_federation")


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Rows as Parquet, which their owner alone can read.

    A column of nothing but nulls has a type too, so that files combine, and for the same reason
    what is itself a table (rates by group) becomes JSON text.
    """
    import polars as pl

    flat = [
        {name: json.dumps(v) if isinstance(v, dict) else v for name, v in row.items()}
        for row in rows
    ]
    frame, buffer = pl.DataFrame(flat, infer_schema_length=None), BytesIO()
    empty = [name for name, kind in frame.schema.items() if kind == pl.Null]
    frame = frame.with_columns(
        pl.col(name).cast(pl.String if name in TEXT else pl.Float64) for name in empty
    )
    frame.write_parquet(buffer)
    with whole(
        path, private=True
    ) as part:  # by ourselves: polars has its own ideas of paths and of errors
        part.write_bytes(buffer.getvalue())
    return path


def save_model(
    study: Study, result: Result, replicate: int, path: Path, *, why: str | None = None
) -> Path:
    """Parameters by their torch names, the scaler, and how a raw table becomes features; and how
    the model was trained, what came of its target, and `why` it is this replicate's."""
    data = study.dataset
    width, classes = data.features.shape[1], len(data.classes)
    shapes = get_model(study.model).shapes(features=width, classes=classes)
    flat = result.history.params[replicate]
    seen = result.history.federation
    lost = seen is not None and not np.isfinite(seen[-1].score[replicate]).all()
    if lost or not np.isfinite(flat).all():
        raise FedgftError(
            f"{result.method}: the model of seed {study.seeds[replicate]} has diverged, so it is "
            "not saved; try a smaller --lr"
        )
    about = {
        "data": data.name, "method": result.method, "metric": result.metric.name,
        "protocol": study.protocol.name, "seed": int(study.seeds[replicate]),
        "trained": {**trained(study, result, replicate), "why": why},
        "columns": data.columns,
        "classes": data.classes, "groups": data.group_names, "model": get_model(study.model).name,
        "encoder": None if data.encoder is None else data.encoder.to_json(),
        **_network(study.model),
    }  # fmt: skip
    return write_model(named(flat, shapes), raw_scaling(result.federations[replicate]), about, path)


def trained(study: Study, result: Result, replicate: int) -> dict[str, Any]:
    """How one replicate was trained and what came of it; gaps are those of the clients' rows and of
    the test rows, of decisions unless the target is one for scores."""
    history, metric = result.history, result.metric
    assert history.federation is not None
    own, test = history.federation[-1][replicate], history.test[-1][replicate]
    aimed = result.method == "fedgft-control"
    kind = study.protocol.control if aimed else "hard"
    gap = float(own.gap(metric, kind))
    target = float(result.strength[replicate]) if aimed else None
    return {
        "seed": int(study.seeds[replicate]),
        "rounds": int(result.rounds[replicate]),
        "lr": float(result.lr[replicate]),
        "target": target,
        "gap_of": {"hard": "decisions", "soft": "scores"}[kind],
        "gap": number(gap),
        "gap_test": number(test.gap(metric, kind)),
        "reached": None if target is None else bool(gap <= target + NEAR),
        "collapsed": bool(collapsed(own)),
        "accuracy": number(own.accuracy()),
        "accuracy_test": number(test.accuracy()),
    }


def _network(model: Any) -> dict[str, Any]:
    if not isinstance(model, ResNet18):
        return {}
    return {"network": {"norm": model.norm, "stem": model.stem}}

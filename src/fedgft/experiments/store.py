"""What a study leaves: rows as Parquet, and the models of its runs."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.data.scaling import raw_scaling
from fedgft.errors import FedgftError
from fedgft.experiments.study import Result, Study
from fedgft.files import whole
from fedgft.models import ResNet18, get_model, named
from fedgft.saved import write_model

TEXT = ("rule", "target_of")  # columns of text that may hold nothing but nulls


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Rows as Parquet, which their owner alone can read.

    A column of nothing but nulls has a type too, so that files combine.
    """
    import polars as pl

    frame, buffer = pl.DataFrame(rows, infer_schema_length=None), BytesIO()
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


def save_model(study: Study, result: Result, replicate: int, path: Path) -> Path:
    """Parameters by their torch names, the scaler, and how a raw table becomes features."""
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
        "columns": data.columns,
        "classes": data.classes, "groups": data.group_names, "model": get_model(study.model).name,
        "encoder": None if data.encoder is None else data.encoder.to_json(),
        **_network(study.model),
    }  # fmt: skip
    return write_model(named(flat, shapes), raw_scaling(result.federations[replicate]), about, path)


def _network(model: Any) -> dict[str, Any]:
    if not isinstance(model, ResNet18):
        return {}
    return {"network": {"norm": model.norm, "stem": model.stem}}

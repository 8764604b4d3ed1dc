"""Targets: what a run left on disk, for a later run or for `predict`."""

import json
import warnings
from functools import cache, partial
from typing import Any

import polars as pl
import torch

from fedgft.algorithms import fedgft
from fedgft.data.dataset import standardize
from fedgft.data.partition import partition
from fedgft.data.schema import Schema
from fedgft.data.table import Roles, from_frame
from fedgft.engine.simulate import simulate
from fedgft.fair_model import load_model
from fedgft.metrics import get_metric
from fedgft.paper.cells import Cell
from fedgft.paper.convergence import DescentPath
from fedgft.paper.runner import DAMAGED, _read_record
from fedgft.paper.section import FORMAT, read_section, write_page
from fedgft.resnet import load_weights
from fedgft.settings import Settings
from fedgft.store import dump_checksummed
from fedgft.study.cache import Checkpoints, ResultCache
from fuzzing import Target
from fuzzing.temporary_files import each, file

KEY = "a" * 32
ROWS = pl.DataFrame(
    {
        "x": [0.1, 0.5, -1.0, 2.0] * 6,
        "word": ["a", "b", "a", None] * 6,
        "g": ["f", "m", "m", "f"] * 6,
        "y": ["no", "yes", "yes", "no"] * 6,
    }
)


@cache
def federation():
    data = from_frame(ROWS, "rows", roles=Roles("y", "g", keep_group=True))
    return standardize(partition(data, clients=2, alpha=100.0, seed=0, test_share=0.3))


def model(data: bytes) -> None:
    """`fedgft predict`, and a start for training."""
    saved = load_model(file("model.safetensors", data))
    each(
        lambda: saved.add_predictions(ROWS, source="rows"),
        lambda: trained(init=saved.initial_parameters(federation())[None]),
    )


def trained(**how: Any):
    algorithm = fedgft(get_metric("sp"), 1.0, penalty="l2")
    settings = Settings(
        schedule="constant", state="reset", rounds=3, batch_size=8, executor="fused"
    )
    return simulate([federation()], "logistic", algorithm, settings, seeds=[0], lr=0.1, **how)


def checkpoint(data: bytes) -> None:
    """Found and gone on from, whatever its checksum says."""
    place = file(f"rounds/{KEY}.safetensors", data).parent
    snapshot = Checkpoints(place).get(KEY)
    trained(resume=snapshot)


class Small(torch.nn.Module):
    """With a name of each kind that a ResNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = torch.nn.BatchNorm2d(2)
        self.fc = torch.nn.Linear(2, 3)


def weights(ending: str, data: bytes) -> None:
    load_weights(Small(), file(f"weights{ending}", data))


def shelf(data: bytes) -> None:
    """A finished cell, sealed anew so that more than its seal is read; what is wrong is computed
    again, so nothing may be raised at all."""
    cell = Cell(data="compas", protocol="paper", method="fedgft", metric="sp")
    kept = ResultCache(file(f"cells/{KEY}.json", data).parent)
    for value in (kept.get(KEY), _resealed(data, KEY, kept)):
        for make in (partial(_read_record, cell), DescentPath.from_json):
            try:
                make(value or {})
            except DAMAGED:  # what the runner takes for "not there"
                continue


def _resealed(data: bytes, key: str, kept: ResultCache) -> Any:
    try:
        value = {k: v for k, v in json.loads(data).items() if k not in ("key", "digest")}
        text = dump_checksummed(value, key)
    except (ValueError, AttributeError, RecursionError, TypeError):
        return None
    file(f"cells/{key}.json", text.encode())
    return kept.get(key)


def section(data: bytes) -> None:
    """A section of the page, as it is and sealed anew, with the page that it makes."""
    texts = [data]
    try:
        found = {k: v for k, v in json.loads(data).items() if k not in ("key", "digest")}
        texts.append(dump_checksummed(found, FORMAT).encode())
    except (ValueError, AttributeError, RecursionError, TypeError):
        pass
    for text in texts:
        path = file("page/table1.json", text)
        file("page/table1.md", data[:2000])
        read_section(path)
        write_page(path.parent)


def schema(data: bytes) -> None:
    """The agreement on columns, in a file or in a message."""
    made = Schema.from_file(file("schema.json", data))
    made.read(ROWS, source="rows")
    Schema.from_json(made.to_json())


TARGETS = [
    Target("model", model, "safetensors"),
    Target("checkpoint", checkpoint, "safetensors"),
    Target("weights-safetensors", partial(weights, ".safetensors"), "safetensors"),
    Target("weights-torch", partial(weights, ".pth")),
    Target("shelf-cell", shelf, "json"),
    Target("section", section, "json"),
    Target("schema", schema, "json"),
]
warnings.filterwarnings("ignore", category=RuntimeWarning)

"""Makes seeds/TARGET/good-...: small files, each by the writer whose reader the target is.

PYTHONPATH=tests python -m fuzzing.make_seeds
"""

import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import polars as pl
import torch
from flwr.app import ConfigRecord, RecordDict

from fedgft.auditing import audit
from fedgft.data.schema import describe_table
from fedgft.deploy.init import copy_app
from fedgft.fair_model import FairModel
from fedgft.formatting import Table
from fedgft.paper.claims import Finding
from fedgft.paper.section import FORMAT, Section
from fedgft.store import dump_checksummed
from fedgft.study.cache import Checkpoints
from fedgft.study.results import CURVES
from fuzzing import SEEDS, messages, saved_files, site_files, tables

Seeds = Iterator[tuple[str, bytes]]  # target/name, content


def all_seeds() -> Seeds:
    for make in (_tables, _images, _audits, _files, _messages, _deployed):
        yield from make()


def _tables() -> Seeds:
    n = 24
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "y": ["no", "yes"] * 12,
            "g": ["f", "m", "f"] * 8,
            "c": ["north", "south"] * 12,
            "s": ["train"] * 16 + ["test"] * 8,
            "p": rng.random(n).round(3),
            "d": ["no", "yes"] * 12,
            "x": [None, *rng.normal(size=n - 1).round(2).tolist()],
            "word": ["a", "b", None] * 8,
            "i": list(tables.NAMES) * 8,
        }
    )
    yield "table-csv/good.csv", frame.write_csv().encode()
    for how in ("uncompressed", "snappy"):
        buffer = io.BytesIO()
        frame.write_parquet(buffer, compression=how)
        yield f"table-parquet/good-{how}.parquet", buffer.getvalue()
    buffer = io.BytesIO()
    typed = frame.with_columns(pl.col("g").cast(pl.Categorical), pl.col("x").cast(pl.Float32))
    typed.write_parquet(buffer, row_group_size=8)
    yield "table-parquet/good-typed.parquet", buffer.getvalue()
    yield "table-parquet/other-kinds.parquet", _kinds(frame)


def _kinds(frame: pl.DataFrame) -> bytes:
    """Every type that a file may bring, most of which are refused by name."""
    n = frame.height
    buffer = io.BytesIO()
    day = pl.Series("g", [0] * n).cast(pl.Date)
    made = frame.with_columns(
        day,
        pl.Series("p", [[0.5]] * n),
        pl.Series("x", [{"a": 1}] * n),
        pl.Series("word", [b"x"] * n),
        pl.Series("s", [None] * n, pl.Null),
        pl.Series("d", [True, False] * (n // 2)),
        pl.Series("i", ["1.50"] * n).cast(pl.Decimal(9, 2)),
    )
    made.write_parquet(buffer)
    return buffer.getvalue()


def _images() -> Seeds:
    from PIL import Image

    pixels = np.arange(16 * 12 * 3, dtype=np.uint8).reshape(12, 16, 3)
    for kind in ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        yield f"image/good.{kind.lower()}", buffer.getvalue()
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert("P").save(buffer, "PNG", transparency=3)
    yield "image/good-palette.png", buffer.getvalue()
    yield (
        "image-lists/good-attributes.txt",
        (b"3\nSmiling Male\na.ppm 1 -1\nb.ppm -1 1\nc.ppm 1 1\n"),
    )
    yield "image-lists/good-partition.txt", b"a.ppm 0\nb.ppm 0\nc.ppm 2\n"
    yield "image-lists/good-identity.txt", b"a.ppm 1\nb.ppm 2\nc.ppm 2\n"
    made = tables.album()
    tables.journal(b"")
    text = made.path("journal").read_bytes().replace(made.key.encode(), b"THE-KEY")
    yield "image-journal/good.journal", text
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("toy/toy.txt"), b"some rows\n" * 20)
        archive.writestr(zipfile.ZipInfo("../escaped.txt"), b"outside")
    yield "data-wheel/good.whl", buffer.getvalue()


def _audits() -> Seeds:
    plain = site_files.site("north")
    small = site_files.site("north", min_cell=3)
    noisy = site_files.site("north", epsilon=1.0)
    for name, sums in (("plain", plain), ("min-cell", small), ("noisy", noisy)):
        yield f"site-file/good-{name}.json", sums.to_json().encode()
    yield "audit-json/good.json", audit(plain).to_json().encode()


def _files() -> Seeds:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = saved_files.federation()
        data = made.dataset
        about = {
            "columns": data.columns,
            "classes": data.classes,
            "groups": data.group_names,
            "encoder": data.encoder.to_json(),
        }
        width = len(data.columns)
        tensors = {"weight": np.zeros((2, width), np.float32), "bias": np.zeros(2, np.float32)}
        model = FairModel(tensors, np.zeros(width), np.ones(width), about)
        path = model.save(folder / "model.safetensors")
        yield "model/good.safetensors", path.read_bytes()
        keep = Checkpoints(folder / "rounds")
        saved_files.trained(on_state=lambda done, take: keep.put(saved_files.KEY, done, take))
        yield "checkpoint/good.safetensors", keep.found()[0].read_bytes()
        from safetensors.torch import save

        state = saved_files.Small().state_dict()
        yield "weights-safetensors/good.safetensors", save(state)
        torch.save(state, folder / "w.pth")
        yield "weights-torch/good.pth", (folder / "w.pth").read_bytes()
        torch.save(state, folder / "w.pth", _use_new_zipfile_serialization=False)
        yield "weights-torch/good-old.pth", (folder / "w.pth").read_bytes()
    yield from _sealed()


def _sealed() -> Seeds:
    cell = {
        "curves": {name: [[0.5] * 20] for name in CURVES},
        "rounds": [0],
        "row": {"x": 1},
        "chosen": [],
        "notes": ["a"],
    }
    yield "shelf-cell/good.json", dump_checksummed(cell, saved_files.KEY).encode()
    table = Table("t", ("a", "b"), (("x", "1"),), 1, ("note",))
    found = (Finding("it holds", True), Finding("it does not", False), Finding("who knows"))
    section = Section("table1", "t", "c", "n", "h", found, (table,), (), ("lr 1",), ("note",))
    whole = {"stamp": "s", "files": [], **asdict(section)}
    yield "section/good.json", dump_checksummed(json.loads(json.dumps(whole)), FORMAT).encode()
    from fedgft.data.schema import agree_on_schema

    said = describe_table(saved_files.ROWS, label="y", group="g", min_rows=1, source="rows")
    schema, _ = agree_on_schema({"one": said}, label="y", group="g")
    yield "schema/good.json", schema.to_json().encode()
    yield "site-description/good.json", json.dumps(said).encode()


def _messages() -> Seeds:
    yield "client-reply/good.json", messages.packed(messages.honest())
    for name, request in messages.REQUESTS.items():
        config = {f"fedgft.{k}": v for k, v in {"version": 1, **request}.items()}
        content = {"arrays": messages.start(), "config": ConfigRecord(config)}
        yield f"server-request/{name}.json", messages.packed(RecordDict(content))
    yield "secure-reply/good.json", b'{"keys": {"version": 1}, "masked": {"version": 1}}'
    yield "secure-reply/lies.json", json.dumps(messages.lies()).encode()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "c.safetensors"
        strategy = messages.fair(checkpoint=path)
        strategy.aggregate_train(1, [messages.answered(100 + k) for k in range(3)])
        yield "server-checkpoint/good.safetensors", path.read_bytes()


def _deployed() -> Seeds:
    yield "ledger/good.json", json.dumps({"rho": 0.01, "epsilon": 0.5, "delta": 1e-5}).encode()
    with tempfile.TemporaryDirectory() as name:
        copy_app(Path(name) / "app")
        yield "app-settings/good.toml", (Path(name) / "app" / "pyproject.toml").read_bytes()
    found = json.loads(audit(site_files.site("north")).to_json())
    row = {"round": 3, "accuracy": 0.7, "gap_soft": 0.1, "gap_hard": 0.2}
    held = {key: found[key] for key in ("rows", "accuracy", "metrics")}
    about = {"measured": row, "metric": "sp"}
    history = {"about": about, "sites": ["north"], "history": [row], "held_out": held}
    yield "run-outcome/good-history.json", json.dumps(history).encode()
    lines = [row, {"note": "n"}, {"error": "e"}]
    yield "run-outcome/progress.jsonl", "\n".join(map(json.dumps, lines)).encode() + b"\n"


if __name__ == "__main__":
    for name, content in all_seeds():
        path = SEEDS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(f"{len(content):7,} {name}")

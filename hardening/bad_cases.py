"""What a case of `bad_inputs.py` is, the good files that cases spoil, and all cases together."""

import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

Make = Callable[[Path, Path], None]  # the file to make, and the folder of good files
TABLE = "--data table.csv --label ok --group sex"
QUICK = "--method fedavg --rounds 1 --seeds 1 --lr 0.01 --clients 2"  # if it runs, not for long


@dataclass(frozen=True)
class Case:
    """A command line; files that it names and the pantry has are put beside it."""

    arguments: tuple[str, ...]
    says: tuple[str, ...]  # what its one line of error must contain
    about: str = ""
    files: Mapping[str, str | bytes | Make] = field(default_factory=dict)
    code: int = 2
    powerless: bool = False  # run as a user who may not do everything

    @property
    def command(self) -> str:
        first = self.arguments[0] if self.arguments else ""
        known = (
            "demo",
            "train",
            "compare",
            "frontier",
            "predict",
            "measure",
            "audit",
            "adjust",
            "decide",
            "reproduce",
            "data",
            "deploy",
        )
        return first if first in known else "fedgft"

    @property
    def shown(self) -> str:
        return shlex.join(a if len(a) < 60 else f"{a[:40]}..." for a in self.arguments)


def case(line: str, *says: str, about: str = "", **files: Any) -> Case:
    """`files`: what is made beside it, with _csv for .csv and so on."""
    named = {
        name.replace("__", "/")
        .replace("_csv", ".csv")
        .replace("_parquet", ".parquet")
        .replace("_json", ".json")
        .replace("_safetensors", ".safetensors")
        .replace("_png", ".png"): made
        for name, made in files.items()
    }
    return Case(tuple(shlex.split(line)), says, about, named)


def cases() -> list[Case]:
    """All of them, those of one command together."""
    import bad_options
    import bad_rules
    import bad_sums
    import bad_tables

    order = {
        name: i
        for i, name in enumerate(
            (
                "fedgft",
                "demo",
                "train",
                "compare",
                "frontier",
                "predict",
                "measure",
                "audit",
                "adjust",
                "decide",
                "reproduce",
                "data",
                "deploy",
            )
        )
    }
    found = [*bad_options.cases(), *bad_tables.cases(), *bad_sums.cases(), *bad_rules.cases()]
    once = {(each.arguments, each.about): each for each in found}
    return sorted(once.values(), key=lambda each: order[each.command])


def taken(name: str) -> Make:
    """The pantry's file of this name."""
    return lambda path, pantry: path.write_bytes((pantry / name).read_bytes()) and None


def cut(name: str, share: float) -> Make:
    """The beginning of a good file."""

    def make(path: Path, pantry: Path) -> None:
        whole = (pantry / name).read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])

    return make


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Make:
    """A good JSON file with something else in it."""

    def make(path: Path, pantry: Path) -> None:
        held = json.loads((pantry / name).read_text("utf-8"))
        change(held)
        path.write_text(json.dumps(held), "utf-8")

    return make


def folder(path: Path, pantry: Path) -> None:
    path.mkdir()


def fifo(path: Path, pantry: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path, pantry: Path) -> None:
    path.symlink_to("nothing-here")


def locked(name: str) -> Make:
    def make(path: Path, pantry: Path) -> None:
        if name:
            path.write_bytes((pantry / name).read_bytes())
        else:
            path.mkdir()
        path.chmod(0)

    return make


def stock(place: Path) -> None:
    """Good files of every kind."""
    stock_tables(place)
    stock_sums(place)
    given = TABLE.replace("table.csv", shlex.quote(str(place / "table.csv")))
    _run(f"train {given} {QUICK} --out {shlex.quote(str(place / 'made'))}")
    (place / "made/model.safetensors").rename(place / "model.safetensors")


def stock_sums(place: Path) -> None:
    for name in ("north", "south"):
        said, out = (shlex.quote(str(place / file)) for file in ("said.csv", f"{name}.json"))
        _run(f"measure {said} --label y --group g --score p --min-bin 1 --name {name} --out {out}")
    for name, how in {"rule": "", "coins": "--randomized", "sites": "--per-site"}.items():
        files, out = (f"{shlex.quote(str(place))}/{file}" for file in ("*.json", f"{name}.json"))
        _run(f"adjust {files} --target sp=0.1 --quiet {how} --out {out}")
    said, out = (shlex.quote(str(place / file)) for file in ("said.csv", "few.json"))
    _run(f"measure {said} --label y --group g --score p --min-cell 10 --name few --out {out}")


def stock_tables(place: Path) -> None:
    """And images."""
    import polars as pl
    from PIL import Image

    (place / "faces").mkdir(parents=True)
    rng = Random(0)
    rows = [
        (
            f"{rng.gauss(0, 1):.4f}",
            rng.choice(("Ulm", "Bonn")),
            rng.choice("fm"),
            rng.choice("01"),
            rng.choice(("north", "south")),
        )
        for _ in range(200)
    ]
    lines = ["x,town,sex,ok,site", *map(",".join, rows)]
    (place / "table.csv").write_text("\n".join(lines) + "\n")
    pl.read_csv(place / "table.csv").write_parquet(place / "table.parquet")
    lists = pl.DataFrame({"x": [[1.0], [2.0]], "sex": ["f", "m"], "ok": [0, 1]})
    lists.write_parquet(place / "nested.parquet")
    lists.clear().write_parquet(place / "none.parquet")
    said = [f"{rng.choice('01')},{row[2]},{rng.random():.3f},{rng.choice('01')}" for row in rows]
    (place / "said.csv").write_text("\n".join(["y,g,p,d", *said]) + "\n")
    for i in range(12):
        Image.new("RGB", (16, 16), (20 * i, 0, 0)).save(place / f"faces/{i}.png")
    named = [f"{i}.png,{'fm'[i % 2]},{i // 2 % 2},{i}" for i in range(12)]
    (place / "faces.csv").write_text("\n".join(["image,sex,ok,n", *named]) + "\n")


def _run(line: str) -> None:
    from fedgft.cli import main

    with suppress(SystemExit):
        main(shlex.split(line))

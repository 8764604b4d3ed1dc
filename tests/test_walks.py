"""The walks in CONTRIBUTING.md: the actions call the functions that the page lists, in order."""

import re
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft.cli import main

ROOT = Path(__file__).parents[1]
SOURCES = str(Path(fedgft.__file__).parent)
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def trace(action) -> list[str]:
    """Run `action` and return the functions of fedgft in the order of their first calls."""
    called: dict[str, None] = {}

    def note(frame, event, _) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and "<" not in code.co_name:
            module = Path(code.co_filename[len(SOURCES) + 1 :]).with_suffix("")
            name = ".".join(part for part in module.parts if part != "__init__")
            called.setdefault(f"{name}.{code.co_qualname}".lstrip("."))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return list(called)


def write_predictions(path: Path) -> Path:
    generator = np.random.default_rng(0)
    score = generator.random(300).round(3)
    label = (generator.random(300) < score).astype(int)
    group = generator.choice(["f", "m"], 300)
    pl.DataFrame({"y": label, "g": group, "p": score}).write_csv(path)
    return path


def train(folder: Path) -> None:
    options = "train --data synthetic --method fedgft-control --seeds 1 --rounds 2 --quiet"
    main([*options.split(), "--out", str(folder / "out")])


def measure(folder: Path) -> None:
    table = write_predictions(folder / "north.csv")
    options = "--label y --group g --score p --quiet"
    main(["measure", str(table), *options.split(), "--out", str(folder / "north.json")])
    main(["audit", str(folder / "north.json"), "--out", str(folder / "report"), "--quiet"])


def metric(folder: Path) -> None:
    table = write_predictions(folder / "north.csv")
    frame = pl.read_csv(table)
    decisions = (frame["p"] > 0.5).cast(int)
    fedgft.audit(fedgft.measure(frame["y"], decisions, sensitive_features=frame["g"]))


def deployed_round(folder: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.serverapp.strategy import FedAvg

    from fedgft.flower import FedGFT
    from in_process_grid import biased, grid_of, options, start_of, train_config

    made = biased()
    strategy = FedGFT(FedAvg(**options()), "sp", target=0.02)
    strategy.start(grid_of(made), start_of(made), 1, train_config=train_config())


ACTIONS = {action.__name__: action for action in (metric, train, measure, deployed_round)}


def listed(name: str) -> list[str]:
    """The functions that CONTRIBUTING.md lists for a walk."""
    text = PAGE.partition(f"<!-- walk: {name} -->")[2].partition("<!-- end of walk -->")[0]
    return re.findall(r"^\d+\. `([\w.]+)`", text, re.MULTILINE)


def test_the_page_has_the_walks_that_are_tested():
    assert set(re.findall(r"<!-- walk: (\w+) -->", PAGE)) == set(ACTIONS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
@pytest.mark.parametrize("name", ACTIONS)
def test_a_walk_calls_its_functions_in_order(name, tmp_path):
    # A process of its own: what was computed once is cached, and not called again.
    command = [sys.executable, "-W", "ignore", __file__, name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    called = done.stdout.partition(f"## {name}\n")[2].splitlines()
    functions = listed(name)
    assert len(functions) > 10
    missing = [function for function in functions if function not in called]
    assert not missing
    assert functions == sorted(functions, key=called.index)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for walk in sys.argv[1:] or list(ACTIONS):
            called = trace(partial(ACTIONS[walk], Path(place)))
            print(f"## {walk}", *called, sep="\n")

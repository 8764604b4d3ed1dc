"""What somebody does who has the README alone, in a fresh folder and environment, and how long.

python hardening/newcomer.py                    # into results/hardening/newcomer.md

Clones this repository, builds its environment from nothing, and runs what the README says, as it
says it, on a table that the newcomer brings along. Seconds are those of a clock; most of the first
step is the download and installation of PyTorch, unless pip has it in its cache.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

ROOT = Path(__file__).parents[1]
TABLE = "--label repaid --group sex"
KEPT = ("LANG", "TERM", "TMPDIR")  # of the environment, beside where pip finds packages


@dataclass(frozen=True)
class Step:
    does: str
    command: str
    brings: str  # the file that must be there then


FEDGFT = ".venv/bin/fedgft"
STEPS = (
    Step("clone", "git clone -q {source} fedgft && cd fedgft", "fedgft/README.md"),
    Step("the demo's figure", "make demo", "fedgft/fedgft-demo/sites.svg"),
    Step("the same, once everything is installed", "make demo", "fedgft/fedgft-demo/sites.svg"),
    Step(
        "a report on an own CSV",
        f"{FEDGFT} measure mine.csv {TABLE} --score p --report report",
        "fedgft/report/report.html",
    ),
    Step(
        "a fair model for it",
        f"{FEDGFT} train --data mine.csv {TABLE} --client bank --leave-out p --target 0.02",
        "fedgft/fedgft-train/model.safetensors",
    ),
    Step(
        "what it says of everybody",
        f"{FEDGFT} predict fedgft-train/model.safetensors mine.csv --out scored.csv",
        "fedgft/scored.csv",
    ),
)


def own_table(path: Path, rows: int = 6000) -> None:
    """Loans, the score of an earlier model, and three banks."""
    rng = np.random.default_rng(7)
    sex = rng.choice(["f", "m"], rows)
    income = rng.normal(3.0, 1.0, rows).round(2)
    chance = 1 / (1 + np.exp(2.2 - 0.6 * income - 0.7 * (sex == "m")))
    pl.DataFrame(
        {
            "income": income,
            "years": rng.integers(0, 30, rows),
            "sex": sex,
            "bank": rng.choice(["north", "south", "east"], rows),
            "p": chance.round(3),
            "repaid": (rng.random(rows) < chance).astype(int),
        }
    ).write_csv(path)


def walk(place: Path) -> list[tuple[Step, float]]:
    env = {n: value for n, value in os.environ.items() if n in KEPT or n.startswith("PIP_")}
    ours = str(Path(sys.prefix) / "bin")
    env["PATH"] = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if p != ours)
    env["HOME"] = str(place / "home")  # and with it every cache
    (place / "home").mkdir()
    took = []
    for step in STEPS:
        folder = place / "fedgft" if (place / "fedgft").exists() else place
        command = step.command.format(source=shlex.quote(str(ROOT)))
        began = time.monotonic()
        done = subprocess.run(
            command, shell=True, cwd=folder, env=env, capture_output=True, text=True
        )
        took.append((step, time.monotonic() - began))
        print(f"{took[-1][1]:7.1f} s  {step.does}", flush=True)
        if done.returncode or not (place / step.brings).is_file():
            sys.exit(f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        if step is STEPS[0]:
            own_table(place / "fedgft" / "mine.csv")
    return took


def page(took: list[tuple[Step, float]]) -> str:
    rows = "\n".join(
        f"| {step.does} | `{step.command.format(source='REPOSITORY')}` | {seconds:.1f} |"
        for step, seconds in took
    )
    return (
        "# A newcomer's way\n\nMade by `python hardening/newcomer.py`: a fresh folder, a fresh "
        "environment, empty caches, the commands of the README on a table of one's own (6,000 "
        "rows, three banks), and how long each took on two cores."
        f"\n\n| | command | seconds |\n|---|---|---:|\n{rows}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results/hardening/newcomer.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        took = walk(Path(place))
    args.out.write_text(page(took), "utf-8")


if __name__ == "__main__":
    main()

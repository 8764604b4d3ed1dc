"""Train a fair model for your own CSV on the command line.

    python examples/own_csv.py [FOLDER]

One table has the loans of three banks. The script prints each command and runs it: it trains plain
FedAvg, trains with a target for the gap, and lets both models decide about new applicants. You see
the gap between men and women in these decisions, before and after.
"""

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

import fedgft
from fedgft.cli import main

rng = np.random.default_rng(0)


def loans(rows):
    """Make loans: women have lower incomes, and repay like men with the same income."""
    sex = np.where(rng.random(rows) < 0.5, "f", "m")
    income = rng.normal(np.where(sex == "f", 32, 40), 8).round(1)
    amount = rng.gamma(4, 5, rows).round(1)
    repaid = rng.random(rows) < 1 / (1 + np.exp(-(income - 30) / 5 + (amount - 20) / 10))
    bank = rng.choice(["city", "rural", "online"], rows)
    paid = np.where(repaid, "yes", "no")
    return pl.DataFrame(dict(income=income, amount=amount, sex=sex, bank=bank, repaid=paid))


def run(command):
    """Run a command in this process and hide its output."""
    print("$", command)
    aside = io.StringIO()
    with contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside):
        main(command.split()[1:])


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
loans(8000).write_csv(folder / "loans.csv")
loans(8000).write_csv(folder / "applicants.csv")

os.chdir(folder)
loans_of = "--data loans.csv --label repaid --group sex --client bank --seeds 1"
for name, how in {"before": "--method fedavg", "after": "--target 0.02"}.items():
    run(f"fedgft train {loans_of} {how} --out {name}")
    run(f"fedgft predict {name}/model.safetensors applicants.csv --out {name}.csv")
    scored = pl.read_csv(f"{name}.csv")
    y, decided, sex = (scored[column].to_numpy() for column in ("repaid", "decision", "sex"))
    gap = fedgft.statistical_parity_difference(y, decided, sensitive_features=sex)
    print(f"{name}: accuracy {np.mean(y == decided):.3f}, gap {gap:.3f}")

"""Train a fair model on your own CSV file, and apply it to new rows.

One table has the loans of three banks, which may not pool them. The script trains plain federated
averaging, then a model with a target for the gap, and lets both decide about new applicants. You
see the gap between men and women in these decisions, before and after, and what the model card
says.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

import fedgft

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


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
loans(8000).write_csv(folder / "loans.csv")
loans(8000).write_csv(folder / "applicants.csv")

table = pl.read_csv(folder / "loans.csv")
new = pl.read_csv(folder / "applicants.csv")
features = ["income", "amount", "sex"]
plain = fedgft.FairClassifier(method="fedavg")
fair = fedgft.FairClassifier("sp", target=0.02)
for name, classifier in {"before": plain, "after": fair}.items():
    groups = {"sensitive_features": table["sex"], "clients": table["bank"]}
    classifier.fit(table[features], table["repaid"], **groups)
    decided = classifier.predict(new[features])
    gap = fedgft.statistical_parity_difference(
        new["repaid"], decided, sensitive_features=new["sex"]
    )
    accuracy = classifier.score(new[features], new["repaid"])
    print(f"{name}: accuracy {accuracy:.3f}, gap {gap:.3f}")
print(classifier.model_.card())
classifier.save(folder / "model.safetensors")

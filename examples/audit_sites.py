"""Audit a scikit-learn model across sites: UCI Adult, with one site per occupation.

    python examples/audit_sites.py [FOLDER]

The audit needs only predictions, so any model works. A site keeps its rows (FOLDER/OCCUPATION.csv)
and sends a few kilobytes of sums (FOLDER/sums/OCCUPATION.json); the audit sees only these sums. You
see one sentence per metric, and the warnings. FOLDER/report.html is the complete report.
"""

import sys
from pathlib import Path

import numpy as np
import polars as pl
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from fedgft.auditing import audit, measure_file, write_sums
from fedgft.auditing.site_file import gather
from fedgft.data import prepared_frame

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "adult-sites")
(folder / "sums").mkdir(parents=True, exist_ok=True)

# Train a model on half of the people. Race and sex are not features.
people = prepared_frame("adult")
features = people.drop("income", "race", "sex").to_dummies(
    ["workclass", "marital-status", "occupation", "relationship", "native-country"]
)
half = np.random.default_rng(0).permutation(len(people))[: len(people) // 2]
train = np.isin(np.arange(len(people)), half)
x = StandardScaler().fit(features.to_numpy()[train]).transform(features.to_numpy())
model = LogisticRegression(max_iter=1000).fit(x[train], people["income"].to_numpy()[train])
score = model.predict_proba(x)[:, list(model.classes_).index(">50K")]

# Each site has its own people, whom the model has not seen, and their scores.
tested = people.with_columns(score=pl.Series(score)).filter(pl.Series(~train))
for (site,), rows in tested.partition_by("occupation", as_dict=True).items():
    name = "Not stated" if site == "?" else site
    rows.select("income", "race", "sex", "score").write_csv(folder / f"{name}.csv")
    sums = measure_file(
        folder / f"{name}.csv",
        label="income",
        group="sex",
        score="score",
        positive=">50K",
        classes=("<=50K", ">50K"),
    )
    write_sums(sums, folder / "sums" / f"{name}.json")

# The auditor combines the files of all sites.
made = audit(gather(sorted((folder / "sums").glob("*.json"))))
(folder / "report.html").write_text(made.to_html(), "utf-8")
for verdict in made.verdict():
    print(verdict.sign, verdict.text)
for text in made.warnings:
    print("!", text)
print("wrote", folder / "report.html")

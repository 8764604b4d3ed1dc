"""Audit a scikit-learn model across three hospitals, from sums alone.

You see the gap at each site, then the gap over all sites with a 95% interval. It equals the gap on
the pooled rows, which only this example has. Within every site, the model flags men and women at
the same rate. Over all sites it does not, because most women go to the hospital with few ill
people; the audit warns about this. Needs `pip install 'fedgft[references]'`.
"""

import numpy as np
from sklearn.ensemble import RandomForestClassifier

import fedgft
from fedgft.auditing import audit, measure

rng = np.random.default_rng(0)


def hospital(rows, women, level):
    """Make patients: age and blood pressure, which differs by hospital; sex is not a feature."""
    sex = np.where(rng.random(rows) < women, "f", "m")
    x = np.column_stack((rng.normal(60, 10, rows), rng.normal(level, 15, rows)))
    ill = rng.random(rows) < 1 / (1 + np.exp(-((x[:, 0] - 60) / 10 + (x[:, 1] - 140) / 10)))
    return x, ill.astype(int), sex


places = {"north": (2000, 0.2, 155), "south": (2000, 0.8, 125), "east": (1500, 0.5, 140)}
training = [hospital(*place) for place in places.values()]
model = RandomForestClassifier(50, min_samples_leaf=20, random_state=0).fit(
    np.concatenate([x for x, _, _ in training]), np.concatenate([y for _, y, _ in training])
)

# Each site measures rows that the model has not seen; only `sums` leave the site.
sums = []
pooled = []
for name, place in places.items():
    x, y, sex = hospital(*place)
    scores = model.predict_proba(x)[:, 1]
    sums.append(measure(y, scores, sensitive_features={"sex": sex}, site=name))
    pooled.append((y, scores >= 0.5, sex))
    gap = audit(sums[-1]).to_dict()["metrics"]["sp"]["gap"]
    print(f"{name} alone: gap {gap:.3f}")

# The auditor combines all sites.
made = audit(sums)
found = made.to_dict()["metrics"]["sp"]
print(f"all sites: gap {found['gap']:.3f}, 95% interval {found['low']:.3f} to {found['high']:.3f}")
y, decisions, sex = (np.concatenate(column) for column in zip(*pooled, strict=True))
gap = fedgft.statistical_parity_difference(y, decisions, sensitive_features=sex)
print(f"pooled rows: gap {gap:.3f}")
for warning in made.warnings:
    print("!", warning)

"""Audit a scikit-learn model across three hospitals.

You see the gap at each site, then the gap over all sites with a 95% interval. It equals the gap on
the pooled rows, which only this example has. Within every site, the model flags men and women at
the same rate. Over all sites it does not, because most women go to the hospital with few ill
people; the audit warns about this. Needs `pip install 'fedgft[references]'`.
"""

import numpy as np
from sklearn.ensemble import RandomForestClassifier

import fedgft

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

# Every site has rows that the model has not seen: labels, scores and groups.
sites = {}
for name, place in places.items():
    x, y, sex = hospital(*place)
    sites[name] = (y, model.predict_proba(x)[:, 1], {"sex": sex})

# Here the rows are in one process, so `audit` measures each site on the spot. Where they are not,
# each site calls `fedgft.measure` and sends what it returns, and `audit` takes a list of those.
made = fedgft.audit(sites)
for name, site in made.sites.items():
    print(f"{name} alone: gap {site.gaps['sp'].value:.3f}")
gap = made.gaps["sp"]
print(f"all sites: gap {gap.value:.3f}, 95% interval {gap.low:.3f} to {gap.high:.3f}")
y, scores = (np.concatenate([rows[i] for rows in sites.values()]) for i in (0, 1))
sex = np.concatenate([rows[2]["sex"] for rows in sites.values()])
pooled = fedgft.statistical_parity_difference(y, scores >= 0.5, sensitive_features=sex)
print(f"pooled rows: gap {pooled:.3f}")
for warning in made.warnings:
    print("!", warning)

"""FedGFT in your own script with XGBoost and LightGBM: a custom objective, one more line.

You see accuracy and gap (equal opportunity of decisions about new rows) of plain boosting, of trees
whose prices follow from the rows that they are grown on, and of trees whose prices follow from rows
that they have not seen. Only the last ones are fair to new people: deep trees know their own rows.
"""

import lightgbm as lgb
import numpy as np
import xgboost as xgb

import fedgft

TREES = 80
data = fedgft.data.synthetic(rows=10_000, features=6, gap=0.3, seed=1)
train, test = slice(0, 5000), slice(5000, None)
X, y, group = data.features, data.labels, data.groups
sex = np.array(["f", "m"])[group]


def make_objective(**how):
    return fedgft.price_objective("eop", y=y[train], sensitive_features=sex[train], lr=0.1, **how)


def report(name, decisions):
    right = np.mean(decisions == y[test])
    gap = fedgft.equal_opportunity_difference(y[test], decisions, sensitive_features=sex[test])
    print(f"{name}: accuracy {right:.3f}, gap {gap:.3f}")


rows = xgb.DMatrix(X[train], y[train])
params = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 6, "nthread": 1}
objective = make_objective(target=0.02)
boosters = {
    "plain": xgb.train(params, rows, TREES),
    "own rows": xgb.train(params, rows, TREES, obj=objective, callbacks=[objective.callback(rows)]),
    "unseen rows": make_objective(target=0.02).train_out_of_fold(params, rows, TREES),
}
for name, booster in boosters.items():
    report(f"XGBoost, {name}", booster.predict(xgb.DMatrix(X[test])) > 0.5)

params = {"learning_rate": 0.1, "num_leaves": 31, "num_threads": 1, "verbose": -1}
objective = make_objective(target=0.02)
usual = lgb.Dataset(X[train], y[train])
booster = lgb.train(params | {"objective": "binary"}, usual, TREES)
report("LightGBM, plain", booster.predict(X[test], raw_score=True) > 0)
booster = objective.train_out_of_fold(params, lgb.Dataset(X[train], y[train]), TREES)
report("LightGBM, unseen rows", booster.predict(X[test], raw_score=True) > 0)
print(objective.report.reason())

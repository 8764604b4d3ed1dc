"""Make a finished scikit-learn model fair: one threshold per group, from the sums of three banks.

You see accuracy and gap (statistical parity) among new customers, before and after. Each bank
counts the scores of its own customers. Only these counts leave the bank, and the model stays as it
is. The rule needs the sex of each customer at decision time; the law may forbid this.
"""

from sklearn.ensemble import RandomForestClassifier

import fedgft

train, known, new = (fedgft.data.make_loans(seed=seed) for seed in range(3))
columns = ["income", "rent", "years"]
model = RandomForestClassifier(50, min_samples_leaf=50, random_state=0)
model.fit(train[columns].to_numpy(), train["repaid"] == "yes")


def score(rows):
    return model.predict_proba(rows[columns].to_numpy())[:, 1]


def report(name, approved):
    repaid = new["repaid"].to_numpy() == "yes"
    right = (approved == repaid).mean()
    gap = fedgft.statistical_parity_difference(repaid, approved, sensitive_features=new["sex"])
    print(f"{name}: accuracy {right:.3f}, gap {gap:.3f}")


sums = [  # at each bank
    fedgft.measure(rows["repaid"], score(rows), sensitive_features=rows[["sex"]], site=bank)
    for (bank,), rows in known.group_by("bank", maintain_order=True)
]
rule = fedgft.adjust(sums, target={"sp": 0.02})  # by the auditor, who has no rows
rule.save("rule.json")
report("before", score(new) >= 0.5)
report("after", fedgft.load_rule("rule.json").decide(score(new), new[["sex"]]))
print(rule)

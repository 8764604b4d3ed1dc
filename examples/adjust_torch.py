"""Make a finished PyTorch model fair: equalized odds, by a randomized rule from sums.

You see accuracy and gap (equalized odds) among new customers, before and after. Between two
thresholds, a coin decides: a keyed hash of the customer's number. A customer who asks again gets
the same answer. Whoever knows the key knows all coins, so the file of the rule must stay secret.
"""

import torch

import fedgft

tables = (fedgft.data.make_loans(seed=seed) for seed in range(3))
train, known, new = (table.with_row_index("customer") for table in tables)
torch.set_num_threads(1)  # small tensors
torch.manual_seed(0)
layers = torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), *layers, torch.nn.Sigmoid())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)


def score(rows):
    return model(torch.tensor(rows[["income", "rent", "years"]].to_numpy()).float())[:, 0]


for _ in range(200):
    repaid = torch.tensor((train["repaid"] == "yes").to_numpy()).float()
    loss = torch.nn.functional.binary_cross_entropy(score(train), repaid)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval().requires_grad_(False)
banks = {bank: (t["repaid"], score(t), t[["sex"]]) for (bank,), t in known.group_by("bank")}
rule = fedgft.adjust(banks, target={"eo": 0.01}, randomized=True)  # measures each bank alone
fair = rule.decide(score(new), new[["sex"]], ids=new["customer"])
for name, approved in {"before": (score(new) >= 0.5).numpy(), "after": fair}.items():
    repaid = (new["repaid"] == "yes").to_numpy()
    gap = fedgft.equalized_odds_difference(repaid, approved, sensitive_features=new["sex"])
    print(f"{name}: accuracy {(approved == repaid).mean():.3f}, gap {gap:.3f}")
print(rule)

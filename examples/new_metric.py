"""Define a metric in one line, measure it and train for it.

The metric is the benefit of a decision for an applicant: 1 for a loan that will be repaid, 1/4 for
a loan that will not be repaid, 0 for no loan. You see the gap in this benefit between two groups,
for decisions on held-out rows: with FedAvg, with training for statistical parity, and with training
for benefit parity, which leaves the smallest gap.
"""

import fedgft
from fedgft.algorithms import fedavg, fedgft_control

benefit = fedgft.Metric("benefit", "benefit parity", lambda p, y: p[:, 1:] * (1 + 3 * y[:, 1:]) / 4)

# Measure it on rows, with the predictions of any model.
fedgft.metrics.CATALOG["benefit"] = benefit  # now it has a name, also in audits
repaid = [1, 1, 0, 0, 1, 0]
accepted = [1, 1, 0, 0, 1, 1]
sex = list("fffmmm")
site = fedgft.measure(repaid, accepted, sensitive_features=sex, site="north")
found = fedgft.audit(site).to_dict()["metrics"]["benefit"]
print(f"an audit of six rows: benefit gap {found['gap']:.3f}")

# Train for it in the simulator; in your own loop, use `fedgft.Penalty(benefit, lam)`.
data = fedgft.data.synthetic(rows=6000, features=4, gap=0.4)
federations = [fedgft.partition(data, clients=5, alpha=0.5, seed=seed) for seed in range(8)]
settings = fedgft.Settings(rounds=40, schedule="cosine", eval_every=0)
for name, method in {
    "FedAvg": fedavg(),
    "statistical parity": fedgft_control("sp"),
    "benefit parity": fedgft_control("benefit"),
}.items():
    history = fedgft.simulate(federations, "logistic", method, settings, seeds=range(8), lr=0.02)
    last = history.test[-1]
    gaps = [last.gap(fedgft.get_metric(m), "hard").mean() for m in ("sp", "benefit")]
    print(
        f"{name}: accuracy {last.accuracy().mean():.3f}, statistical-parity gap {gaps[0]:.3f}, "
        f"benefit gap {gaps[1]:.3f}"
    )

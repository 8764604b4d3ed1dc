"""A metric of your own in one line: measured, and trained for.

What is a loan worth to whoever asks for it? One that is repaid 1, one that is not 1/4, none 0. You
see the gap between two groups in that benefit, of decisions on rows nobody trained on, for FedAvg,
for statistical parity, and for benefit parity itself, which leaves the smallest.
"""

import fedgft

benefit = fedgft.Metric("benefit", "benefit parity", lambda p, y: p[:, 1:] * (1 + 3 * y[:, 1:]) / 4)

# From here on it is a metric like any other. On rows, with anybody's predictions:
fedgft.CATALOG["benefit"] = benefit  # known by name now, in an audit too
repaid = [1, 1, 0, 0, 1, 0]
accepted = [1, 1, 0, 0, 1, 1]
sex = list("fffmmm")
site = fedgft.audit.measure(repaid, accepted, sensitive_features=sex, site="north")
found = fedgft.audit.audit(site).to_dict()["metrics"]["benefit"]
print(f"an audit of six rows: benefit gap {found['gap']:.3f}")

# In the simulator, and in training (`fedgft.Penalty(benefit, lam)` is the same in your own loop):
data = fedgft.synthetic(rows=6000, features=4, gap=0.4)
federations = [fedgft.partition(data, clients=5, alpha=0.5, seed=seed) for seed in range(8)]
settings = fedgft.Settings(rounds=40, schedule="cosine", eval_every=0)
for name, method in {
    "FedAvg": fedgft.fedavg(),
    "statistical parity": fedgft.fedgft_control("sp"),
    "benefit parity": fedgft.fedgft_control("benefit"),
}.items():
    history = fedgft.simulate(federations, "logistic", method, settings, seeds=range(8), lr=0.02)
    last = history.test[-1]
    gaps = [last.gap(fedgft.get_metric(m), "hard").mean() for m in ("sp", "benefit")]
    print(
        f"{name}: accuracy {last.accuracy().mean():.3f}, statistical-parity gap {gaps[0]:.3f}, "
        f"benefit gap {gaps[1]:.3f}"
    )

"""A site that did not take part.

Sites have 60 to about 20,000 rows (log-normal; median 600), and 20% to 80% of them belong to one of
two groups. The true gap in selection rates and the true accuracy vary between sites with a standard
deviation of 4 points: normally; with the heavy tails of Student's t with 3 degrees of freedom;
between two values that are equally frequent; between two values of which one holds at every fifth
site; or not at all. Prediction intervals must contain the *true* gap or accuracy of one more site.
Distribution-free limits must contain the *observed* one of one more site; they need 39 sites, a
single limit 19.

The prediction interval is conservative if sites do not differ, or if there are two kinds of sites
that are equally frequent. It is too narrow for a few sites that are all alike and far from the
others: no normal distribution describes them. The distribution-free limits contain them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from rows import Row

from fedgft.auditing.between_sites import estimate_metric
from fedgft.auditing.next_site import NextSiteSummary, summarize_next_site
from fedgft.auditing.rates import View, estimate_rates
from fedgft.auditing.summary import _merge_groups
from fedgft.metrics import get_metric
from fedgft.site_sums import MeasurementSpec
from fedgft.sums import Sums

Draw = Callable[[np.random.Generator, int], np.ndarray]
SPREAD = 0.04  # standard deviation of the gaps, and of the accuracies
SITES = (5, 10, 20, 40)
EFFECTS: dict[str, Draw] = {  # with mean 0 and variance 1
    "normal": lambda rng, n: rng.standard_normal(n),
    "t with 3 degrees of freedom": lambda rng, n: rng.standard_t(3, n) / np.sqrt(3),
    "two values, equally frequent": lambda rng, n: rng.choice([-1.0, 1.0], n),
    "every fifth site apart": lambda rng, n: (5 * (rng.random(n) < 0.2) - 1) / 2,
    "no differences": lambda rng, n: np.zeros(n),
}
NOTES = {  # of prediction intervals
    "two values, equally frequent": "conservative: two kinds of sites",
    "every fifth site apart": "may be too narrow: a few sites far from the others",
    "no differences": "conservative",
}
SPEC = MeasurementSpec(classes=("no", "yes"), attributes=("sex",))
SP = get_metric("sp")
ACC = get_metric("acc")


def run(federations: int) -> list[Row]:
    """Return one row per kind of interval."""
    rows = []
    for name, draw in EFFECTS.items():
        for sites in SITES:
            rng = np.random.default_rng([sites, len(rows)])
            rows += _simulate(name, draw, sites, federations, rng)
    return rows


def _simulate(
    name: str, draw: Draw, sites: int, federations: int, rng: np.random.Generator
) -> list[Row]:
    """Simulate federations of `sites` sites and one more; return the coverage of each interval."""
    covered: dict[str, list[bool]] = {}
    for _ in range(federations):
        gaps, accuracies, counts = _draw_sites(draw, sites + 1, rng)
        found, sign = _forecast(counts[:-1])
        gap, accuracy = found["gaps"]["sp"], found["accuracy"]
        decided = counts[-1, :, :, 1].sum(0) / counts[-1].sum((0, 2))  # selection rates
        observed = decided[1] - decided[0]
        rows = counts[-1].sum()
        observed_accuracy = (counts[-1, 1, :, 1] + counts[-1, 0, :, 0]).sum() / rows
        holds = {
            "prediction interval, gap": _contains(gap, "low", "high", sign * gaps[-1]),
            "prediction interval, accuracy": _contains(accuracy, "low", "high", accuracies[-1]),
            "distribution-free, gap": _contains(
                gap, "observed_low", "observed_high", sign * observed
            ),
            "distribution-free, accuracy": _contains(
                accuracy, "observed_low", "observed_high", observed_accuracy
            ),
            "distribution-free limit, largest gap": _contains(
                gap, None, "observed_limit", abs(observed)
            ),
            "distribution-free limit, accuracy": _contains(
                accuracy, "observed_limit", None, observed_accuracy
            ),
        }
        for kind, each in holds.items():
            if each is not None:
                covered.setdefault(kind, []).append(each)
    setting = f"{name}, {sites} sites"
    return [
        Row(setting, kind, sum(each), len(each), NOTES.get(name, "") if "pred" in kind else "")
        for kind, each in covered.items()
    ]


def _draw_sites(
    draw: Draw, sites: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw sites: their true gaps and accuracies, and their counts (site, label, group, decision).

    Half of each group has the positive label. With the selection rate s and the accuracy a, the
    true-positive rate is s + a - 1/2 and the false-positive rate is s - a + 1/2.
    """
    gap = 0.04 + SPREAD * draw(rng, sites)
    accuracy = 0.75 + SPREAD * draw(rng, sites)
    selected = 0.4 + gap[:, None] * np.array([-0.5, 0.5])  # (site, group)
    rates = np.stack(
        (selected - accuracy[:, None] + 0.5, selected + accuracy[:, None] - 0.5), 1
    )  # (site, label, group)
    rates = np.clip(rates, 0.0, 1.0)
    rows = 60 + np.exp(rng.normal(np.log(540), 1.0, sites)).astype(int)
    first = np.maximum((rows * rng.uniform(0.2, 0.8, sites)).astype(int), 12)
    sizes = np.stack((first, np.maximum(rows - first, 12)), 1)
    positive = rng.binomial(sizes, 0.5)
    labels = np.stack((sizes - positive, positive), 1)  # (site, label, group)
    accepted = rng.binomial(labels, rates)
    counts = np.stack((labels - accepted, accepted), -1).astype(float)
    gaps = rates.mean(1)[:, 1] - rates.mean(1)[:, 0]
    right = np.stack((1 - rates[:, 0], rates[:, 1]), 1).mean(1)  # (site, group)
    accuracies = (right * sizes).sum(1) / sizes.sum(1)
    return gaps, accuracies, counts


def _forecast(counts: np.ndarray) -> tuple[NextSiteSummary, float]:
    """Return what the audit says about the next site, and the sign of its gap."""
    decision = np.concatenate((counts, np.zeros_like(counts[:, :, :1])), 2)  # rows of no group
    nothing = np.zeros_like(decision)
    count = decision.sum(-1)
    view = View(
        spec=SPEC,
        attributes=("sex",),
        groups=("woman", "man"),
        sums=Sums(count, nothing, decision),
        noise=nothing,
        slack=nothing,
        histogram=np.zeros((2, 3, 1, 1)),
    )
    estimate = estimate_metric(SP, view)
    right = estimate_rates(ACC, _merge_groups(view), "hard", by_site=True)[:, 0, 0]
    names = [str(k) for k in range(len(counts))]
    found = summarize_next_site(view, {"sp": estimate}, right, names)
    return found, 1.0 if estimate.gap.pair == (1, 0) else -1.0


def _contains(found: Any, low: str | None, high: str | None, truth: float) -> bool | None:
    """Return whether the limits contain the truth; None if there are no limits."""
    limits = [None if name is None else found[name] for name in (low, high)]
    if all(limit is None for limit in limits):
        return None
    above = limits[0] is None or truth >= limits[0] - 1e-12
    return bool(above and (limits[1] is None or truth <= limits[1] + 1e-12))

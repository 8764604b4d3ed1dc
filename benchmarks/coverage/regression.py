"""Gaps of models that predict numbers.

Three sites with different numbers of rows; errors have a mean and a scale by group. The true value
is that of the two groups with the largest true difference; the interval is that of the largest gap,
or of a pair. Intervals for the largest of several gaps hold for all pairs at once, so they are
conservative. Lognormal errors are exp(s z) minus their mean, with s = 0.5: their kurtosis is 9. If
such groups have few rows and different variances, intervals of mean absolute and squared errors
are too short; the note counts the audits that warn of it.
"""

from collections.abc import Iterator

import numpy as np
from rows import Row

from fedgft.auditing import RegressionAudit, audit_regression, measure_regression
from fedgft.auditing.regression_estimates import METRICS

SITES = ("north", "south", "east")
SIGMA = 0.5  # of lognormal errors
SETTINGS = (  # name, kind of errors, rows per group, scales of the errors
    ("2 groups, normal, 100 and 100 rows", "normal", (100, 100), (1, 1)),
    ("2 groups, normal, 160 and 40 rows, variances 1 and 9", "normal", (160, 40), (1, 3)),
    ("2 groups, normal, 90 rows, weighted", "weighted", (90, 90), (1, 2)),
    ("5 groups, normal, 30 to 150 rows, variances 1 to 4", "normal", (150, 30, 60, 90, 120), (1, 2, 1, 1.5, 1)),  # noqa: E501
    ("2 groups, lognormal, 400 and 1,600 rows", "lognormal", (400, 1600), (1, 1)),
    ("5 groups, lognormal, 300 rows", "lognormal", (300,) * 5, (1,) * 5),
    ("2 groups, lognormal, 160 and 40 rows, variances 1 and 9", "lognormal", (160, 40), (1, 3)),
)  # fmt: skip
NAMES = "abcde"
SHIFT = 0.5  # of the mean error of the group a


def run(federations: int) -> Iterator[Row]:
    """Yield the coverage of the intervals of each metric in each setting."""
    for i, (title, kind, rows, scales) in enumerate(SETTINGS):
        truth = find_truth(kind, scales)
        covered = dict.fromkeys([*METRICS, "standardized"], 0)
        warned = 0
        for k in range(federations):
            found = audit_once(np.random.default_rng((i, k)), kind, rows, scales)
            warned += any("too short" in text for text in found.warnings)
            for name, values in truth.items():
                gap = found.gaps[name]
                largest = np.ptp(values)
                covered[name] += gap.low <= largest <= gap.high
            covered["standardized"] += covers_standardized(found, scales)
        for name in METRICS:
            if len(rows) > 2:
                note = "conservative: the largest of several"
            elif kind == "lognormal" and METRICS[name].has_ratio:
                note = f"warned of in {100 * warned / federations:.0f}% of the audits"
            else:
                note = ""
            yield Row(title, METRICS[name].title, covered[name], federations, note)
        if kind == "normal" and len(rows) == 2:
            note = "of the mean outcome"
            yield Row(title, "standardized difference", covered["standardized"], federations, note)


def draw_errors(generator: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """Return errors with mean 0 and, if they are normal, variance 1."""
    z = generator.normal(size=n)
    return np.exp(SIGMA * z) - np.exp(SIGMA**2 / 2) if kind == "lognormal" else z


def find_truth(kind: str, scales: tuple[float, ...]) -> dict[str, np.ndarray]:
    """Return the true mean of each metric by group, from many draws and from formulas."""
    errors = draw_errors(np.random.default_rng(0), kind, 4_000_000)
    errors = errors - errors.mean()
    shift = np.array([SHIFT] + [0.0] * (len(scales) - 1))
    residuals = [s * errors + d for s, d in zip(scales, shift, strict=True)]
    outcome = np.arange(len(scales)) * 0.2
    return {
        "mean-prediction": outcome - shift,
        "mean-outcome": outcome,
        "mean-error": shift,
        "mean-absolute-error": np.array([abs(r).mean() for r in residuals]),
        "mean-squared-error": np.array([(r**2).mean() for r in residuals]),
    }


def audit_once(
    generator: np.random.Generator, kind: str, rows: tuple[int, ...], scales: tuple[float, ...]
) -> RegressionAudit:
    """Return the audit of one simulated federation.

    With weights, rows are drawn with unequal probabilities from a group in which the outcome
    depends on the probability, and weighted by its inverse.
    """
    parts = []
    for i, (n, scale) in enumerate(zip(rows, scales, strict=True)):
        residual = scale * draw_errors(generator, kind, n) + (SHIFT if i == 0 else 0.0)
        y = 0.2 * i + generator.normal(size=n)
        weights = np.ones(n)
        if kind == "weighted":
            population = 40 * n
            y = 0.2 * i + generator.normal(size=population)
            chance = 1 / (1 + np.exp(-y))  # rows with large outcomes are drawn more often
            chosen = generator.random(population) < chance * n / chance.sum()
            y, weights = y[chosen], 1 / chance[chosen]
            residual = scale * generator.normal(size=len(y)) + (SHIFT if i == 0 else 0.0)
        parts.append((y, y - residual, [NAMES[i]] * len(y), weights))
    y, p, group, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
    site = generator.choice(SITES, len(y), p=[0.5, 0.3, 0.2])
    return audit_regression(
        measure_regression(
            y[site == name],
            p[site == name],
            sensitive_features=group[site == name],
            sample_weight=weights[site == name] if kind == "weighted" else None,
            site=name,
            min_cell=0,
        )
        for name in SITES
    )


def covers_standardized(found: RegressionAudit, scales: tuple[float, ...]) -> bool:
    """Return whether the standardized difference of outcomes, 0.2 per group, is covered."""
    gap = found.gaps["mean-outcome"]
    if len(scales) > 2 or gap.pair is None:
        return False
    sign = 1 if gap.pair == ("b", "a") else -1
    return gap.standardized.low <= 0.2 * sign <= gap.standardized.high

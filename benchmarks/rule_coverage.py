"""How often the intervals of a decision rule hold on new people: simulated federations.

python benchmarks/rule_coverage.py [--federations 500] [--rows 2000] [--bins 50] [--seed 0]

The population is known: two groups at three sites, scores on a grid, labels by a logistic curve of
the score that differs by group. Each federation is a sample of it. A rule is fitted on the sample,
and its true accuracy and its true gap, exact values over the population, are compared with the 95%
intervals that were computed on the sample. Prints a table in Markdown.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedgft.auditing.rates import estimate_difference
from fedgft.formatting import Table
from fedgft.metrics import CATALOG, Metric
from fedgft.metrics.intervals import Z95
from fedgft.rules.counts import RuleCounts
from fedgft.rules.decision_rule import Acceptance
from fedgft.rules.expect import RuleOutcome, Shrinkage, describe_gap, estimate_shrinkage
from fedgft.rules.rule_problem import RuleProblem, Target
from fedgft.site_sums import MeasurementSpec

SITES = ("east", "north", "south")
WOMEN = (0.35, 0.5, 0.6)  # their share at each site
GROUPS = (("f",), ("m",))


class Case(NamedTuple):
    """A kind of rule, and its targets."""

    metric: str
    target: float
    local: float | None = None
    per_site: bool = False
    randomized: bool = False

    def describe(self) -> str:
        """Return the kind of rule in words."""
        kind = "randomized" if self.randomized else "fixed"
        return f"{kind} by {'group and site' if self.per_site else 'group'}"


class Covered(NamedTuple):
    """Of one federation: which intervals hold, and how far the estimates are off.

    Parameters
    ----------
    accuracy, signed, largest
        Whether the interval holds: of the accuracy, of the signed gap (the share of the metric's
        conditions), of the largest gap.
    naive
        Whether the interval of the accuracy would hold if the rule had not been chosen on its rows.
    shrinkage
        By how much the accuracy on the rows exceeds the true one.
    excess
        By how much the true largest gap exceeds that on the rows.
    """

    accuracy: float
    signed: float
    largest: float
    naive: float
    shrinkage: float
    excess: float


CASES = (
    Case("sp", 0.02),
    Case("sp", 0.02, per_site=True),
    Case("sp", 0.02, local=0.1, per_site=True),
    Case("eop", 0.02),
    Case("eo", 0.05),
    Case("acc", 0.02),
    Case("sp", 0.0, randomized=True),
    Case("sp", 0.0, local=0.05, randomized=True, per_site=True),
    Case("eop", 0.0, randomized=True),
    Case("eo", 0.0, randomized=True),
    Case("eo", 0.02, randomized=True, per_site=True),
)


def draw_population(bins: int, seed: int) -> np.ndarray:
    """Return the share of each (site, group, label, bin)."""
    generator = np.random.default_rng(seed)
    score = (np.arange(bins) + 0.5) / bins
    logit = np.log(score / (1 - score))
    share = generator.dirichlet(np.full(len(SITES), 8.0))
    out = np.empty((len(SITES), 2, 2, bins))
    for s in range(len(SITES)):
        for g in range(2):
            center = -0.5 + 0.6 * g + generator.normal(0, 0.3)
            density = np.exp(-((logit - center) ** 2) / (2 * 1.3**2)) / (score * (1 - score))
            positive = 1 / (1 + np.exp(-(1.2 * logit + 0.4 * g - 0.2)))
            weight = share[s] * (WOMEN[s] if g == 0 else 1 - WOMEN[s]) * density / density.sum()
            out[s, g, 1] = weight * positive
            out[s, g, 0] = weight * (1 - positive)
    return out / out.sum()


def count_rows(table: np.ndarray, *, merge: bool) -> RuleCounts:
    """Return the counts of a sample, or of the population; with all sites added up if `merge`."""
    bins = table.shape[-1]
    spec = MeasurementSpec(("0", "1"), ("sex",), 0.5, scored=True, bins=bins)
    decided = table[..., bins // 2 :].sum(-1)
    found = RuleCounts(spec, "score", SITES, GROUPS, table, decided, None, None, {})
    return found.merged() if merge else found


def simulate(case: Case, *, federations: int, rows: int, bins: int, seed: int) -> Iterator[Covered]:
    """Fit a rule on each federation, and compare its intervals with the population."""
    truth = draw_population(bins, seed)
    generator = np.random.default_rng(seed + 1)
    metric = CATALOG[case.metric]
    targets = [Target(metric, (0,), case.target)]
    if case.local is not None:
        targets.append(Target(metric, (0,), case.local, is_local=True))
    merge = not case.per_site and case.local is None
    population = count_rows(truth * 1e9, merge=merge)
    for _ in range(federations):
        drawn = generator.multinomial(rows, truth.ravel()).reshape(truth.shape)
        problem = RuleProblem(
            count_rows(drawn.astype(float), merge=merge),
            tuple(targets),
            per_site=case.per_site,
            is_random=case.randomized,
        )
        fitted = problem.solve()
        found = RuleOutcome.of(problem.counts, fitted.acceptances, Acceptance())
        true = RuleOutcome.of(population, fitted.acceptances, Acceptance())
        yield compare(found, true, metric, estimate_shrinkage(problem, fitted))


def compare(found: RuleOutcome, true: RuleOutcome, metric: Metric, shrinkage: Shrinkage) -> Covered:
    """Compare the estimates with the truth."""
    right = true.accuracy()[0]
    value, *limits = found.accuracy(shrinkage)
    _, *naive = found.accuracy()
    _, rates = found.rates(metric, (0,))
    _, known = true.rates(metric, (0,))
    signed = estimate_difference(rates[:, 0], rates[:, 1], Z95)
    apart = known.rate[:, 0] - known.rate[:, 1]
    gap = describe_gap(rates)
    largest = float(np.abs(apart).max())
    return Covered(
        holds(limits, right),
        float(np.mean((signed.low <= apart) & (apart <= signed.high))),
        holds((gap["low"], gap["high"]), largest),
        holds(naive, right),
        value - right,
        largest - gap["gap"],
    )


def holds(limits: Sequence[float | None], value: float) -> float:
    """Return 1.0 if the value is within the limits, else 0.0."""
    low, high = limits
    assert low is not None and high is not None, "too few rows for an interval"
    return float(low <= value <= high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--federations", type=int, default=500)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--bins", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        found = np.array(list(simulate(case, **vars(args)))).mean(0)
        shares = [f"{100 * share:.1f}%" for share in found[:4]]
        points = [f"{100 * each:+.2f}" for each in found[4:]]
        targets = f"{case.target:g}" + (f", local {case.local:g}" if case.local is not None else "")
        rows.append((case.metric, case.describe(), targets, *shares, *points))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    header = (
        *("metric", "rule", "target", "accuracy", "signed gap", "largest gap"),
        *("accuracy without cross-validation", "accuracy too high by", "gap too low by"),
    )
    title = (
        f"Share of {args.federations} federations of {args.rows:,} people in which the 95% "
        "interval holds on new people"
    )
    note = "The last two columns are means in points: on the rows of the rule, against the truth."
    print(Table(title, header, tuple(rows), stubs=3, notes=(note,)).markdown())


if __name__ == "__main__":
    main()

"""Sections about the paper's theory: Simpson's table, and convergence."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedgft.experiments.convergence import RESIDUE, SMALL, Descent, Path, summary
from fedgft.layout import Table
from fedgft.metrics import get_metric
from fedgft.report import plots
from fedgft.report.claims import Finding
from fedgft.report.section import Made, Section
from fedgft.report.tables import DASH, DATA
from fedgft.theory import (
    Example,
    analyse,
    locally_fair_globally_unfair,
    locally_unfair_globally_fair,
    simpson,
)

GROUPS = ("women", "men")


def simpsons() -> Made:
    """Table 2 of the paper, and both directions of Theorem 4.1 for several C."""
    tally, metric = simpson().tally(), get_metric("sp")
    sums = np.concatenate((tally.statistics(metric, "hard"),
                           tally.sum(0).statistics(metric, "hard")[None]))[:, :, 0]  # fmt: skip
    names, lines = ("department 1", "department 2", "both together"), []
    for name, (accepted, applied) in zip(names, sums, strict=True):
        rates = accepted / applied
        cells = (f"{a:.0f} of {n:.0f} ({100 * r:.0f}%)"
                 for a, n, r in zip(accepted, applied, rates, strict=True))  # fmt: skip
        lines.append((name, *cells, f"{abs(rates[0] - rates[1]):.2f}"))
    rows = _examples()
    section = Section(
        name="simpson", title="Simpson's table: fair everywhere, unfair together",
        claim="Local fairness does not imply global fairness, nor the other way round.",
        note="", how="No training: the rows are constructed.", findings=_paradoxes(rows),
        tables=(Table("Accepted applicants", ("", *GROUPS, "SP gap"), tuple(lines), 1),
                _constructions(rows)),
        figures=(("simpson", "Acceptance rates by department and overall."),),
    )  # fmt: skip
    return Made(section, rows, {"simpson": plots.paradox})


def _examples() -> list[dict[str, Any]]:
    rows = [_example("simpson", None, simpson())]
    for gap in (0.5, 0.9, 0.99):
        rows.append(_example("locally fair, globally unfair", gap,
                             locally_fair_globally_unfair(3, gap)))  # fmt: skip
        rows.append(_example("locally unfair, globally fair", gap,
                             locally_unfair_globally_fair(3, gap)))  # fmt: skip
    return rows


def _paradoxes(rows: Sequence[dict[str, Any]]) -> tuple[Finding, ...]:
    bounds = all(r["gap"] <= r["bound"] + 1e-12 for r in rows)
    first, fair, unfair = rows[0], rows[1::2], rows[2::2]
    return (
        Finding(f"SP is {first['largest_local_gap']:.2f} in each department and {first['gap']:.2f} "
                "overall.", first["largest_local_gap"] == 0 and round(first["gap"], 2) == 0.48),
        Finding("Theorem 4.1: with all local gaps 0 the global gap exceeds C for C = 0.5, 0.9 and "
                "0.99; with all local gaps at least C it is 0.",
                all(r["largest_local_gap"] == 0 and r["gap"] >= r["C"] for r in fair)
                and all(r["smallest_local_gap"] >= r["C"] and r["gap"] < 1e-12 for r in unfair)),
        Finding("The bound α(1 − TV) + TV, sharper than the paper's α + DH, holds in every one of "
                "them.", bounds),
    )  # fmt: skip


def _example(name: str, gap: float | None, example: Example) -> dict[str, Any]:
    found = analyse(get_metric("sp"), example.tally(), "hard")
    local = found.local_gaps
    return {
        "experiment": "simpson", "example": name, "C": gap, "clients": len(found.weights),
        "rows": len(example.labels), "smallest_local_gap": float(local.min()),
        "largest_local_gap": float(local.max()), "gap": found.gap,
        "total_variation": found.total_variation, "bound": found.bound_tight,
    }  # fmt: skip


def _constructions(rows: Sequence[dict[str, Any]]) -> Table:
    lines = tuple(
        (r["example"], DASH if r["C"] is None else f"{r['C']:g}", str(r["clients"]), str(r["rows"]),
         f"{r['smallest_local_gap']:.3f} to {r['largest_local_gap']:.3f}", f"{r['gap']:.3f}",
         f"{r['total_variation']:.3f}", f"{r['bound']:.3f}")
        for r in rows
    )  # fmt: skip
    header = ("example", "C", "clients", "rows", "local gaps", "global gap", "TV", "bound")
    return Table("Theorem 4.1, both directions, as rows of data (SP)", header, lines, 1)


def convergence(paths: Mapping[Descent, Sequence[Path]], *, seeds: int) -> Made:
    rows = [row for spec, each in paths.items() for path in each
            for row in summary(spec, path, seeds=seeds)]  # fmt: skip
    steps = max(path.smoothness * spec.rate for spec, each in paths.items() for path in each)
    section = Section(
        name="convergence", title="Theorem 5.2 and Corollary 5.3: convergence, measured",
        claim="min ‖∇L‖² is O(1/T) for gradient descent with a constant step, O(log T/√T) for "
        "steps t^(-1/2) and O(1/log T) for steps 1/t.",
        note="J = x² and statistical parity, alpha 5, one local step a round, everybody takes "
        "part, features standardised. Gradients are exact, of the pooled objective.",
        how=f"{seeds} replicates; {DATA[next(iter(paths)).data]}.",
        findings=_converged(rows, steps),
        tables=tuple(_rates(spec, [r for r in rows if r["lam"] == spec.lam]) for spec in paths),
        figures=tuple((_name(spec), f"Measured and bound, λ = {spec.lam:g}.") for spec in paths),
    )  # fmt: skip
    drawn = {_name(spec): partial(plots.descents, spec, each) for spec, each in paths.items()}
    return Made(section, rows, drawn)


def _converged(rows: Sequence[dict[str, Any]], steps: float) -> tuple[Finding, ...]:
    under = [r["gradient"] <= r["bound"] for r in rows]
    late = [r for r in rows if r["promised"] is not None]
    slow = [r for r in late if r["decline"] > r["promised"]]
    each = (f"λ = {r['lam']:g}, {r['mode']}, {plots.RULES[r['rule']]}, T = {r['rounds']} "
            f"(×{r['decline']:.2f} against ×{r['promised']:.2f})" for r in slow)  # fmt: skip
    still = "and still below the bound" if all(under) else "as far as the bound goes"
    but = f"; slower, {still}: {'; '.join(each)}" if slow else ""
    return (
        Finding(f"The smallest squared gradient is below the bound with its constants in "
                f"{sum(under)} of {len(under)} rows.", all(under)),
        Finding(f"Over the last tenfold of rounds it fell at least as fast as Corollary 5.3's rate "
                f"in {len(late) - len(slow)} of {len(late)} rows{but}."),
        Finding(f"The largest step times the smoothness seen is at most {steps:.2f}; the proof "
                "asks for no more than 1.", steps <= 1),
        Finding("B, the dissimilarity the proof assumes bounded, is "
                f"{max(r['dissimilarity'] for r in rows):.2g} at most where ‖∇L‖² is above "
                f"{SMALL:g}, and grows on: where the gradient of L vanishes those of the clients "
                "do not, unless all clients agree. Full participation does not need it."),
    )  # fmt: skip


def _name(spec: Descent) -> str:
    return f"convergence-{spec.data}-{spec.lam:g}"


def _rates(spec: Descent, rows: Sequence[dict[str, Any]]) -> Table:
    times = lambda x: DASH if x is None else f"×{x:.2g}"  # noqa: E731
    lines = tuple(
        (r["mode"], plots.RULES[r["rule"]], str(r["rounds"]), _small(r["gradient"]),
         f"{r['bound']:.2g}", times(r["decline"]), times(r["promised"]), f"{r['smoothness']:.3g}",
         f"{r['sigma']:.3g}", f"{r['dissimilarity']:.3g}")
        for r in rows
    )  # fmt: skip
    header = ("mode", "steps", "T", "min ‖∇L‖²", "bound", "since T/10", "promised", "smoothness",
              "σ", "B")  # fmt: skip
    return Table(f"λ = {spec.lam:g}, largest step {spec.rate:g}", header, lines, 2)


def _small(square: float) -> str:
    return f"{square:.2g}" if square > RESIDUE else f"below {RESIDUE:g}"

"""What was found, in words: sentences made from rows, and from nothing else."""

from collections.abc import Sequence
from typing import Any

from fedgft.report.figures import NAMES

Row = dict[str, Any]


def findings(rows: Sequence[Row], *, groups: Sequence[str], title: str) -> str:
    """Two sentences about one cell: what FedGFT changes (with a target, if that was trained), and
    what the local methods do."""
    by = {row["method"]: row for row in rows}
    found = [by[method] for method in ("fedgft-control", "fedgft") if method in by]
    if "fedavg" not in by or not found:
        return ""
    plain, fair = by["fedavg"], found[0]
    if plain["gap_hard_test"] is None or fair["gap_hard_test"] is None:
        return (
            f"The held-out gap in {title} is not estimable: a group has no test row of the event."
        )
    chance, right = 100 * fair["floor"], 100 * fair["accuracy"]
    first = (
        f"On people nobody trained on, FedAvg's decisions differ between {_join(groups)} by "
        f"{_points(plain)} ({title}); those of {NAMES[fair['method']]} differ by {_points(fair)}, "
        f"where a perfectly fair model would show about {chance:.1f} by chance, and it is right in "
        f"{right:.1f}% of cases against {100 * plain['accuracy']:.1f}%."
    )
    local = [
        by[m] for m in ("lrw", "lft", "fairfed") if by.get(m, {}).get("gap_hard_test") is not None
    ]
    if not local:
        return first
    best = min(local, key=lambda row: row["gap_hard_test"])
    name, gap = NAMES[best["method"]], 100 * best["gap_hard_test"]
    rest = f"{gap:.1f} points at {100 * best['accuracy']:.1f}% accuracy"
    if best["gap_hard_test"] <= fair["gap_hard_test"]:
        return f"{first} Here making each client fair on its own does as well: {name}, {rest}."
    return (
        f"{first} Making each client fair on its own is not the same thing: of the local methods "
        f"compared here ({_join([NAMES[row['method']] for row in local])}) the best, {name}, "
        f"leaves {rest}."
    )


def reached(row: Row, plain: Row) -> str:
    """What was asked of fedgft-control, what came of it, and what it cost."""
    kind = {"decisions": "gap_hard", "scores": "gap_soft"}[row["target_of"]]
    if row[kind] is None or row["accuracy"] is None:
        return "The gap is not estimable, so nothing can be said about the target."
    rows = "Held-out decisions" if row["protocol"] == "heldout" else "Decisions on test rows"
    seen = f"{rows}: not estimable"
    if row["gap_hard_test"] is not None:
        apart, chance = 100 * row["gap_hard_test"], 100 * row["floor"]
        seen = f"{rows} differ by {apart:.1f} points (chance alone: {chance:.1f})"
    before = "not estimable" if plain[kind] is None else f"{100 * plain[kind]:.1f}"
    less = 100 * (plain["accuracy"] - row["accuracy"])
    price = f"{abs(less):.1f} points of accuracy {'less' if less >= 0 else 'more'} than"
    return (
        f"Asked for a gap of {row['target_of']} of at most {100 * row['target']:.1f} points: "
        f"reached on the clients' own rows (within 0.3 points) in {row['reached']} of "
        f"{row['seeds']} replicates: mean gap {100 * row[kind]:.1f}, where FedAvg has {before}. "
        f"{seen}. The price: {price} FedAvg."
    )


def _points(row: Row) -> str:
    low, high = 100 * row["gap_hard_test_low"], 100 * row["gap_hard_test_high"]
    return f"{100 * row['gap_hard_test']:.1f} points (95% interval {low:.1f} to {high:.1f})"


def _join(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]

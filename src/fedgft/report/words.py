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
        f"{right:.1f}% of cases against {100 * plain['accuracy']:.1f}% (always predicting the most "
        f"frequent class: {100 * fair['accuracy_constant']:.1f}%)."
    )
    if fair["collapsed"]:
        first = f"{first} {collapse(fair)}"
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


def reached(row: Row, plain: Row | None = None) -> str:
    """What was asked of fedgft-control, what came of it, and what it cost.

    `plain`: FedAvg's row of the same cell, where it was trained.
    """
    kind = {"decisions": "gap_hard", "scores": "gap_soft"}[row["target_of"]]
    if row[kind] is None or row["accuracy"] is None:
        return "The gap is not estimable, so nothing can be said about the target."
    said = [
        f"Asked for a gap of {row['target_of']} of at most {100 * row['target']:.1f} points: "
        f"{_counted(row)}: mean gap {100 * row[kind]:.1f}"
    ]
    if plain is not None:
        fedavg = "not estimable" if plain[kind] is None else f"{100 * plain[kind]:.1f}"
        said[0] += f", where FedAvg has {fedavg}"
    said[0] += "."
    if row["collapsed"]:
        said.append(collapse(row))
    said.append(_seen(row))
    said.append(_accuracy(row, plain))
    return " ".join(said)


def missed(row: Row) -> int:
    """Replicates that did not meet the target, or met it with a collapsed model; 0 without one."""
    if row["reached"] is None:
        return 0
    return row["seeds"] - row["reached"] + row["reached_collapsed"]


def collapse(row: Row) -> str:
    """Of a row with collapsed models: how many, and what that is."""
    times, seeds = row["collapsed"], row["seeds"]
    rates = [
        f"{100 * rate:.2f}% of {group}"
        for group, rate in row["selection_rates_federation"].items()
        if isinstance(rate, float)
    ]
    who = f" (selected on the clients' rows: {_join(rates)})" if 0 < len(rates) <= GROUPS else ""
    models = f"The model has collapsed in {times} of {seeds} replicates"
    return (
        f"{models}: it gives nearly everybody the same decision{who}. Such a model has no gap and "
        "no use."
    )


def advice(row: Row, *, python: bool = False) -> str:
    """What may help where a target was missed, in the words of the command line or of Python; empty
    where every replicate met it."""
    if not missed(row):
        return ""
    longest = max(map(int, row["rounds"]))
    names = PYTHON if python else COMMAND
    tried = [
        names["rounds"].format(more=2 * longest, rounds=longest),
        names["lr"].format(lr=row["lr"]),
        names["target"],
    ]
    if row["collapsed"]:
        tried = [names["target"], names["lr"].format(lr=row["lr"]), names["metric"]]
    why = "" if row["missed_because"] is None else f"{row['missed_because']} "
    said = f"{why}What to try: {'; '.join(tried)}. {names['frontier']}"
    if row["floor"] is not None and row["target"] < row["floor"]:
        said += (
            f" On as many test rows as these a perfectly fair model shows "
            f"{100 * row['floor']:.1f} points by chance, so a smaller target cannot be checked."
        )
    return said


COMMAND = {
    "rounds": "more rounds (--rounds {more}; {rounds} were tried)",
    "lr": "another learning rate (--lr; {lr:.3g} on average)",
    "target": "a larger --target",
    "metric": "another --metric",
    "frontier": "`fedgft frontier` shows which gaps can be reached, and at what price.",
}
PYTHON = {
    "rounds": "more rounds (Settings(rounds={more}); {rounds} were tried)",
    "lr": "another learning rate (lr=; {lr:.3g} on average)",
    "target": "a larger target=",
    "metric": "another metric",
    "frontier": "`fedgft.experiments.frontier.sweep` shows which gaps can be reached, and at what "
    "price.",
}
GROUPS = 4  # whose rates are told in a sentence; a table has all
WHY = {
    "met": "the most accurate of the {met} that met the target on their clients' rows",
    "nearest": "none met the target on its clients' rows, and this one is nearest to it",
    "first": "the first that did not diverge, since there is no target to choose by",
}


def saved(about: Row, why: str) -> str:
    """Of the model that is on disk: whose it is, and what its gap is (`store.trained`)."""
    own, test = (
        "not estimable" if about[name] is None else f"{100 * about[name]:.1f} points"
        for name in ("gap", "gap_test")
    )
    said = (
        f"The saved model is that of seed {about['seed']}: {why}. Its gap of {about['gap_of']} is "
        f"{own} on its clients' rows"
    )
    if about["target"] is not None:
        verdict = "met" if about["reached"] else "missed"
        said += f" (target {100 * about['target']:.1f}: {verdict})"
    said += f" and {test} on test rows; {about['rounds']} rounds."
    return f"{said} It has collapsed." if about["collapsed"] else said


def widest(found: Row | None, replicates: int) -> str:
    """The pair of groups behind a gap, and the condition."""
    if found is None:
        return "not estimable"
    times = found["replicates"]
    often = "" if times == replicates else f", in {times} of {replicates} replicates"
    return f"{found['high']} (the higher rate) and {found['low']}, {found['condition']}{often}"


def balance(row: Row) -> str:
    """Balanced accuracy, who is selected, and what a constant model reaches; on test rows."""
    rates = [
        f"{100 * rate:.1f}% of {group}"
        for group, rate in row["selection_rates"].items()
        if isinstance(rate, float)
    ]
    who = f", it selects {_join(rates)}" if 0 < len(rates) <= GROUPS else ""
    return (
        f"Its balanced accuracy is {100 * row['balanced_accuracy']:.1f}%{who}; always predicting "
        f"the most frequent class is right in {100 * row['accuracy_constant']:.1f}%."
    )


def _counted(row: Row) -> str:
    times, seeds = row["reached"], row["seeds"]
    where = "on the clients' own rows (within 0.3 points)"
    if not times:
        return f"missed {where} in all {seeds} replicates"
    said = f"reached {where} in {times} of {seeds} replicates"
    if row["reached_collapsed"]:
        lost = row["reached_collapsed"]
        models = "models has" if lost == 1 else "models have"
        return f"{said}, but {lost} of these {models} collapsed"
    return said if times == seeds else f"{said}, missed in {seeds - times}"


def _seen(row: Row) -> str:
    rows = "Held-out decisions" if row["protocol"] == "heldout" else "Decisions on test rows"
    if row["gap_hard_test"] is None:
        return f"{rows}: not estimable."
    apart, chance = 100 * row["gap_hard_test"], 100 * row["floor"]
    pair = widest(row["widest"], row["seeds"])
    return (
        f"{rows} differ by {apart:.1f} points (chance alone: {chance:.1f}), widest between {pair}."
    )


def _accuracy(row: Row, plain: Row | None) -> str:
    said = f"Accuracy {100 * row['accuracy']:.1f}%"
    balanced = f"balanced accuracy {100 * row['balanced_accuracy']:.1f}%"
    if plain is not None and plain["accuracy"] is not None:
        less = 100 * (plain["accuracy"] - row["accuracy"])
        more = "less" if less >= 0 else "more"
        said += f", {abs(less):.1f} points {more} than FedAvg"
        balanced += f" (FedAvg {100 * plain['balanced_accuracy']:.1f}%)"
    constant = f"{100 * row['accuracy_constant']:.1f}%"
    return f"{said}; {balanced}; always predicting the most frequent class is right in {constant}."


def _points(row: Row) -> str:
    low, high = row["gap_hard_test_low"], row["gap_hard_test_high"]
    sure = FEW_ROWS
    if low is not None and high is not None:
        sure = f"95% interval {100 * low:.1f} to {100 * high:.1f}"
    return f"{100 * row['gap_hard_test']:.1f} points ({sure})"


FEW_ROWS = "95% interval not estimable: fewer than ten rows"


def _join(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]

"""Results in words: sentences made from rows (`results.row`)."""

from collections.abc import Sequence

from fedgft.algorithms.registry import METHOD_LABELS, METHODS
from fedgft.study.results import Row
from fedgft.study.tradeoff import Frontier

MAX_GROUPS = 4  # groups whose rates a sentence names; a table has all
FEW_ROWS = "95% interval not estimable: fewer than ten rows"
COMMAND_HINTS = {
    "rounds": "more rounds (--rounds {more}; {rounds} were tried)",
    "lr": "another learning rate (--lr; {lr:.3g} on average)",
    "target": "a larger --target",
    "metric": "another --metric",
    "frontier": "`fedgft frontier` shows which gaps can be reached, and at what price.",
}
PYTHON_HINTS = {
    "rounds": "more rounds (Settings(rounds={more}); {rounds} were tried)",
    "lr": "another learning rate (lr=; {lr:.3g} on average)",
    "target": "a larger target=",
    "metric": "another metric",
    "frontier": "`fedgft.study.tradeoff.trace_frontier` shows which gaps can be reached.",
}


def compare_sentences(rows: Sequence[Row], *, groups: Sequence[str], title: str) -> str:
    """Two sentences about one cell: what FedGFT changes, and what the local methods do.

    Parameters
    ----------
    rows
        The methods of one cell. fedgft-control stands for FedGFT if it is there.
    groups, title
        Names of the groups, and of the metric.

    Returns
    -------
    The sentences; empty where FedAvg or FedGFT is missing.
    """
    by = {row["method"]: row for row in rows}
    found = [by[method] for method in ("fedgft-control", "fedgft") if method in by]
    if "fedavg" not in by or not found:
        return ""
    plain = by["fedavg"]
    fair = found[0]
    if plain["gap_hard_test"] is None or fair["gap_hard_test"] is None:
        return (
            f"The held-out gap in {title} is not estimable: a group has no test row of the event."
        )
    chance = 100 * fair["floor"]
    right = 100 * fair["accuracy"]
    first = (
        f"On people nobody trained on, FedAvg's decisions differ between {_join(groups)} by "
        f"{_points(plain)} ({title}); those of {METHOD_LABELS[fair['method']]} differ by "
        f"{_points(fair)}, where a perfectly fair model would show about {chance:.1f} by chance, "
        f"and it is right in {right:.1f}% of cases against {100 * plain['accuracy']:.1f}% (always "
        f"predicting the most frequent class: {100 * fair['accuracy_constant']:.1f}%)."
    )
    if fair["collapsed"]:
        first = f"{first} {describe_collapse(fair)}"
    local = [
        by[m] for m in ("lrw", "lft", "fairfed") if by.get(m, {}).get("gap_hard_test") is not None
    ]
    if not local:
        return first
    best = min(local, key=lambda row: row["gap_hard_test"])
    name = METHOD_LABELS[best["method"]]
    gap = 100 * best["gap_hard_test"]
    rest = f"{gap:.1f} points at {100 * best['accuracy']:.1f}% accuracy"
    if best["gap_hard_test"] <= fair["gap_hard_test"]:
        return f"{first} Here making each client fair on its own does as well: {name}, {rest}."
    return (
        f"{first} Making each client fair on its own is not the same thing: of the local methods "
        f"compared here ({_join([METHOD_LABELS[row['method']] for row in local])}) the best, "
        f"{name}, leaves {rest}."
    )


def describe_target(row: Row, plain: Row | None = None) -> str:
    """The target of fedgft-control, how many replicates reached it, and what it cost.

    `plain`: FedAvg's row of the same cell, where it was trained.
    """
    kind = {"decisions": "gap_hard", "scores": "gap_soft"}[row["target_of"]]
    if row[kind] is None or row["accuracy"] is None:
        return "The gap is not estimable, so nothing can be said about the target."
    text = [
        f"Asked for a gap of {row['target_of']} of at most {100 * row['target']:.1f} points: "
        f"{_count_reached(row)}: mean gap {100 * row[kind]:.1f}"
    ]
    if plain is not None:
        fedavg = "not estimable" if plain[kind] is None else f"{100 * plain[kind]:.1f}"
        text[0] += f", where FedAvg has {fedavg}"
    text[0] += "."
    if row["collapsed"]:
        text.append(describe_collapse(row))
    text.append(_describe_test(row))
    text.append(_describe_accuracy(row, plain))
    return " ".join(text)


def count_missed(row: Row) -> int:
    """Replicates that did not meet the target, or met it with a collapsed model; 0 without one."""
    if row["reached"] is None:
        return 0
    return row["seeds"] - row["reached"] + row["reached_collapsed"]


def describe_collapse(row: Row) -> str:
    """How many models have collapsed, and what that means."""
    times = row["collapsed"]
    seeds = row["seeds"]
    rates = [
        f"{100 * rate:.2f}% of {group}"
        for group, rate in row["selection_rates_federation"].items()
        if isinstance(rate, float)
    ]
    who = (
        f" (selected on the clients' rows: {_join(rates)})" if 0 < len(rates) <= MAX_GROUPS else ""
    )
    models = f"The model has collapsed in {times} of {seeds} replicates"
    return (
        f"{models}: it gives nearly everybody the same decision{who}. Such a model has no gap and "
        "no use."
    )


def suggest_changes(row: Row, *, python: bool = False) -> str:
    """What to try where a target was missed; empty where every replicate met it.

    `python`: in terms of Python arguments instead of command-line options.
    """
    if not count_missed(row):
        return ""
    longest = max(map(int, row["rounds"]))
    names = PYTHON_HINTS if python else COMMAND_HINTS
    tried = [
        names["rounds"].format(more=2 * longest, rounds=longest),
        names["lr"].format(lr=row["lr"]),
        names["target"],
    ]
    if row["collapsed"]:
        tried = [names["target"], names["lr"].format(lr=row["lr"]), names["metric"]]
    why = "" if row["missed_because"] is None else f"{row['missed_because']} "
    text = f"{why}What to try: {'; '.join(tried)}. {names['frontier']}"
    if row["floor"] is not None and row["target"] < row["floor"]:
        text += (
            f" On as many test rows as these a perfectly fair model shows "
            f"{100 * row['floor']:.1f} points by chance, so a smaller target cannot be checked."
        )
    return text


def describe_saved_model(about: Row) -> str:
    """Which replicate's model was saved, why, and its gap (`TrainedModel.summary`)."""
    own, test = (
        "not estimable" if about[name] is None else f"{100 * about[name]:.1f} points"
        for name in ("gap", "gap_test")
    )
    text = (
        f"The saved model is that of seed {about['seed']}: {about['why']}. Its gap of "
        f"{about['gap_of']} is {own} on its clients' rows"
    )
    if about["target"] is not None:
        verdict = "met" if about["reached"] else "missed"
        text += f" (target {100 * about['target']:.1f}: {verdict})"
    text += f" and {test} on test rows; {about['rounds']} rounds."
    return f"{text} It has collapsed." if about["collapsed"] else text


def describe_widest(found: Row | None, replicates: int) -> str:
    """The pair of groups behind a gap and the condition, from a row's `widest`."""
    if found is None:
        return "not estimable"
    times = found["replicates"]
    often = "" if times == replicates else f", in {times} of {replicates} replicates"
    return f"{found['high']} (the higher rate) and {found['low']}, {found['condition']}{often}"


def describe_balance(row: Row) -> str:
    """Balanced accuracy, selection rates, and what a constant model reaches, on test rows."""
    rates = [
        f"{100 * rate:.1f}% of {group}"
        for group, rate in row["selection_rates"].items()
        if isinstance(rate, float)
    ]
    who = f", it selects {_join(rates)}" if 0 < len(rates) <= MAX_GROUPS else ""
    return (
        f"Its balanced accuracy is {100 * row['balanced_accuracy']:.1f}%{who}; always predicting "
        f"the most frequent class is right in {100 * row['accuracy_constant']:.1f}%."
    )


def describe_choice(found: Frontier, tested: str) -> list[str]:
    """What was chosen from a frontier and which replicate was saved, with accuracy and gap.

    `tested` names the test rows. There must be a choice. A second text follows where models have
    collapsed.
    """
    chosen = found.chosen
    saved = found.replicate
    assert chosen is not None and saved is not None
    metric = found.metric
    accuracy, gap = chosen.mean(metric, "test")
    own, test = (100 * float(chosen.values(metric, w)[1][saved]) for w in ("federation", "test"))
    strength = METHODS[chosen.method].strength
    setting = "" if strength is None else f" with {strength} {chosen.strength:.3g}"
    row = found.rows()[found.spots.index(chosen)]
    texts = [
        f"Chosen: {METHOD_LABELS[chosen.method]}{setting}. On {tested} it is right in "
        f"{100 * accuracy:.1f}% of cases, gap {100 * gap:.1f} points, on average over the "
        f"replicates. Saved is the model of seed {found.study.seeds[saved]} ({found.why}): gap "
        f"{own:.1f} on its clients' rows, {test:.1f} on {tested}. {describe_balance(row)} The gap "
        f"is widest between {describe_widest(row['widest'], row['seeds'])}."
    ]
    lost = int(chosen.collapsed().sum())
    if lost:
        texts.append(
            f"It has collapsed in {lost} of {len(found.study.seeds)} replicates: the model gives "
            "nearly everybody the same decision."
        )
    return texts


def _count_reached(row: Row) -> str:
    times = row["reached"]
    seeds = row["seeds"]
    where = "on the clients' own rows (within 0.3 points)"
    if not times:
        return f"missed {where} in all {seeds} replicates"
    text = f"reached {where} in {times} of {seeds} replicates"
    if row["reached_collapsed"]:
        lost = row["reached_collapsed"]
        models = "models has" if lost == 1 else "models have"
        return f"{text}, but {lost} of these {models} collapsed"
    return text if times == seeds else f"{text}, missed in {seeds - times}"


def _describe_test(row: Row) -> str:
    rows = "Held-out decisions" if row["protocol"] == "heldout" else "Decisions on test rows"
    if row["gap_hard_test"] is None:
        return f"{rows}: not estimable."
    apart = 100 * row["gap_hard_test"]
    chance = 100 * row["floor"]
    pair = describe_widest(row["widest"], row["seeds"])
    return (
        f"{rows} differ by {apart:.1f} points (chance alone: {chance:.1f}), widest between {pair}."
    )


def _describe_accuracy(row: Row, plain: Row | None) -> str:
    text = f"Accuracy {100 * row['accuracy']:.1f}%"
    balanced = f"balanced accuracy {100 * row['balanced_accuracy']:.1f}%"
    if plain is not None and plain["accuracy"] is not None:
        less = 100 * (plain["accuracy"] - row["accuracy"])
        more = "less" if less >= 0 else "more"
        text += f", {abs(less):.1f} points {more} than FedAvg"
        balanced += f" (FedAvg {100 * plain['balanced_accuracy']:.1f}%)"
    constant = f"{100 * row['accuracy_constant']:.1f}%"
    return f"{text}; {balanced}; always predicting the most frequent class is right in {constant}."


def _points(row: Row) -> str:
    low = row["gap_hard_test_low"]
    high = row["gap_hard_test_high"]
    sure = FEW_ROWS
    if low is not None and high is not None:
        sure = f"95% interval {100 * low:.1f} to {100 * high:.1f}"
    return f"{100 * row['gap_hard_test']:.1f} points ({sure})"


def _join(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]

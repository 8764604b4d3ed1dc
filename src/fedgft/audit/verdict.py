"""The verdict: one sentence a metric, made from the summary and from nothing else."""

from typing import Any

from fedgft.audit.alerts import points, span
from fedgft.metrics import CATALOG

Plain = dict[str, Any]
FOUR_FIFTHS = 0.8
RATIOS = ("sp", "eop")  # what the rule is about; of more classes, each has its own
VERDICT = ("sp", "eop", "fpr", "cal", "acc")  # eo is the larger of two that are there
WHAT = {
    "sp": ("", "are decided {positive}"),
    "eop": ("of those who are {positive}, ", "are decided so"),
    "fpr": ("of those who are not {positive}, ", "are decided so all the same"),
    "cal": ("of those decided {positive}, ", "really are"),
    "acc": ("", "are decided rightly"),
}


def verdict(summary: Plain) -> list[tuple[bool | None, str]]:
    """One sentence a metric. True: no gap beyond chance; False: a gap; None: cannot be said."""
    return [_with_attributes(name, summary, *_judged(name, summary)) for name in VERDICT]


def _with_attributes(
    name: str, summary: Plain, good: bool | None, said: str
) -> tuple[bool | None, str]:
    """Of many cells less is known than of single attributes: a gap between those is a gap."""
    for title, view in summary["attributes"].items():
        found = view["metrics"][name]
        numbers = found if found["gap"] is not None else found["among_estimable"]
        if good is not False and numbers is not None and (numbers["low"] or 0.0) > 0:
            size = span(numbers["gap"], numbers["low"], numbers["high"])
            return False, f"{said} But by {title} alone there is a gap of {size}."
    return good, said


def _judged(name: str, summary: Plain) -> tuple[bool | None, str]:
    found, title = summary["metrics"][name], CATALOG[name].title.capitalize()
    numbers = found if found["gap"] is not None else found["among_estimable"]
    if numbers is None or found["pair"] is None:
        return None, f"{title}: not estimable. That is not the same as fair."
    first, second = found["pair"]
    rate = lambda group: f"{points(found['groups'][group]['rate'])}% of {group}"  # noqa: E731
    positive = f"“{summary['classes'][-1]}”"
    whose, what = (text.format(positive=positive) for text in WHAT[name])
    if len(summary["classes"]) > 2:
        whose, what = "", f"({found['condition']})"
    said = f"{title}: {whose}{rate(first)} and {rate(second)} {what}, a gap of "
    said += span(numbers["gap"], numbers["low"], numbers["high"])
    if numbers["low"] is None:
        return None, f"{said}. Too few rows for an interval, so nothing can be claimed."
    if found["gap"] is None:
        said += ", among the groups that have a rate at all"
    if numbers["high"] is None:
        said += f"; beyond chance it is at least {points(numbers['low'])} points"
    said += _four_fifths(numbers) if name in RATIOS and len(summary["classes"]) == 2 else ""
    if numbers["low"] > 0:
        return False, f"{said}."
    if found["gap"] is None or numbers["high"] is None:
        return None, f"{said}. No gap beyond chance, but not all groups can be compared."
    most = points(numbers["high"])
    return True, f"{said}. No gap beyond chance, though it may be as large as {most} points."


def _four_fifths(numbers: Plain) -> str:
    ratio, low, high = numbers["ratio"], numbers["ratio_low"], numbers["ratio_high"]
    if ratio is None:
        return ""
    if ratio < FOUR_FIFTHS:
        sure = high is not None and high < FOUR_FIFTHS
        return f"; the ratio {ratio:.3f} is below four fifths" + (
            "" if sure else " (chance could do it)"
        )
    sure = low is not None and low >= FOUR_FIFTHS
    return f"; the ratio {ratio:.3f} meets four fifths" + ("" if sure else " (chance could do it)")


def leading(summary: Plain) -> str:
    """The metric that sites are compared by: the first of the verdict's that can be estimated."""
    known = [name for name in VERDICT if summary["metrics"][name]["pair"] is not None]
    return known[0] if known else VERDICT[0]

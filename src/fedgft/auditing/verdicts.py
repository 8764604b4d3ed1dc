"""Judge every gap by a stated tolerance, and say the result in sentences.

A gap is *within* its tolerance if its whole 95% interval is below it, and it *exceeds* the
tolerance if the whole interval is above it. It is *inconclusive* if the interval contains the
tolerance, and *not estimable* if a group has no rows, or too few for an interval.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from fedgft.auditing.summary import GapSummary, MetricSummary, Summary, estimable_gap, views_of
from fedgft.errors import FedgftError
from fedgft.formatting import Verdict, format_gap, format_points
from fedgft.metrics import CATALOG
from fedgft.metrics.catalog import resolve_name
from fedgft.validation import check_number, format_value

State = Literal["exceeds", "not estimable", "inconclusive", "within"]
STATES: tuple[State, ...] = get_args(State)  # of several views, the first of these counts
DEFAULT_TOLERANCE = 0.05
FIELD = "tolerance"  # the argument, for messages
PASSES = {"within": True, "exceeds": False, "inconclusive": None, "not estimable": None}
LEGEND = (
    "✓ within: the whole 95% interval of the gap is below the tolerance",
    "✗ exceeds: the whole interval is above the tolerance",
    "? inconclusive: the interval contains the tolerance, so the data do not decide",
    "· not estimable: a group has no rows, or too few for an interval; this does not mean fair",
    "Equalized odds has no line of its own: its gap is the larger one of equal opportunity and "
    "false-positive-rate parity",
)
# Equalized odds is the larger of eop and fpr.
VERDICT_METRICS = ("sp", "eop", "fpr", "predictive-parity", "acc")
RATE_NAMES = {  # what is compared between groups; equalized odds compares two rates
    "sp": "selection rate",
    "eop": "true-positive rate",
    "fpr": "false-positive rate",
    "predictive-parity": "precision",
    "acc": "accuracy",
    "eo": "true- or false-positive rate",
}
SENTENCES = {  # the rates of a pair of groups, such as "12.3% of women and 4.5% of men"
    "sp": "{rates} {decided}",
    "eop": "of those whose true outcome is “{positive}”, {rates} {decided}",
    "fpr": "of those whose true outcome is not “{positive}”, {rates} {wrongly}",
    "predictive-parity": "the true outcome is “{positive}” for {rates} among those {selected}",
    "acc": "the decision is right for {rates}",
}
QUESTIONS = {  # what a metric compares, in plain words
    "sp": "who {decided}",
    "eop": "who {decided} of those whose true outcome is “{positive}”",
    "fpr": "who {wrongly}",
    "predictive-parity": "how many {selected} have the true outcome “{positive}”",
    "acc": "how often the decision is right",
}
PLURALS = {"man": "men", "woman": "women", "male": "males", "female": "females"}
PLURALS |= {name: name for name in PLURALS.values()}
RATIO_METRICS = ("sp",)  # the metrics that the 80% rule is about
FOUR_FIFTHS = 0.8
MAX_FACTOR = 20  # no larger multiple of the rows is proposed
MAX_VIEWS = 4  # views whose own verdict a sentence adds


class Tolerance(NamedTuple):
    """The largest acceptable gap of each metric, and the metrics for which somebody stated it."""

    gaps: dict[str, float]
    stated: tuple[str, ...]


def check_tolerance(tolerance: Any) -> Tolerance:
    """Return the tolerance of every metric, or raise a `FedgftError`.

    Parameters
    ----------
    tolerance
        One gap for all metrics, or a mapping from names of metrics to gaps. None, and metrics
        that the mapping leaves out: `DEFAULT_TOLERANCE`.
    """
    if tolerance is None:
        tolerance = {}
    if isinstance(tolerance, str):
        raise FedgftError(f"must be like {{'sp': 0.02}} or 0.02, not {tolerance!r}", field=FIELD)
    if not isinstance(tolerance, Mapping):
        gap = check_number(FIELD, tolerance)
        _check_gap(gap, FIELD)
        tolerance = dict.fromkeys(CATALOG, gap)
    stated = check_gaps(tolerance, field=FIELD)
    gaps = dict.fromkeys(CATALOG, DEFAULT_TOLERANCE) | stated
    if "eo" not in stated and ("eop" in stated or "fpr" in stated):
        gaps["eo"] = max(gaps["eop"], gaps["fpr"])
    return Tolerance(gaps, tuple(stated))


def _check_gap(gap: float, field: str) -> None:
    """Raise a `FedgftError` unless the number can be a gap."""
    if not 0 <= gap < 1:
        named = f"`{field}`" if field.isidentifier() else field
        raise FedgftError(f"{named} must be a gap, 0 or more and below 1, not {gap:g}")


def check_gaps(gaps: Mapping[str, Any], *, field: str) -> dict[str, float]:
    """Return gaps by the short names of metrics; raise a `FedgftError` about a wrong one."""
    found = {}
    for name, gap in gaps.items():
        metric = resolve_name(name) if isinstance(name, str) else ""
        if metric not in CATALOG:
            text = f"{format_value(name)} is no metric; choose from {', '.join(CATALOG)}"
            raise FedgftError(text, field=field)
        if metric in found:
            raise FedgftError(f"{format_value(name)}: {metric} is given twice", field=field)
        argument = f"{field}[{name!r}]" if field == FIELD else name
        found[metric] = check_number(argument, gap)
        _check_gap(found[metric], argument)
    return found


# Verdicts


def judge_gap(found: MetricSummary, tolerance: float) -> State:
    """Return the verdict on one gap of one view.

    A gap between the groups that have a rate can exceed the tolerance even if another group has
    no rate.
    """
    numbers = estimable_gap(found)
    if numbers is None or found["pair"] is None or numbers["low"] is None:
        return "not estimable"
    if numbers["low"] > tolerance:
        return "exceeds"
    if found["gap"] is None:
        return "not estimable"
    high = numbers["high"]
    return "within" if high is not None and high < tolerance else "inconclusive"


def judge_metric(summary: Summary, name: str) -> tuple[State, str]:
    """Return the verdict on one metric over all views, and the title of the view that decides it.

    One view that exceeds the tolerance decides, then one that is not estimable, then one that is
    inconclusive. Of several such views, the one with the largest gap decides.
    """
    tolerance = summary["tolerance"][name]
    ranked = []
    for title, view in views_of(summary).items():
        found = view["metrics"][name]
        numbers = estimable_gap(found)
        size = 0.0 if numbers is None else numbers["gap"] or 0.0
        state = judge_gap(found, tolerance)
        ranked.append((STATES.index(state), -size, state, title))
    _, _, state, title = min(ranked, key=lambda each: each[:2])
    return state, title


def list_states(summary: Summary) -> dict[str, State]:
    """Return the verdict on every metric, over all views."""
    return {name: judge_metric(summary, name)[0] for name in CATALOG}


def list_verdicts(summary: Summary) -> list[Verdict]:
    """Return one verdict per metric of `VERDICT_METRICS`.

    Its sentence begins with the state, and gives the rates of the two groups that differ most,
    their gap with its interval, and, for two classes, the ratio of the rates.
    """
    return [_judge(summary, name) for name in VERDICT_METRICS]


def _judge(summary: Summary, name: str) -> Verdict:
    """Return the verdict on one metric: a sentence about the view that decides it."""
    state, title = judge_metric(summary, name)
    found = views_of(summary)[title]["metrics"][name]
    tolerance = format_tolerance(summary["tolerance"][name])
    verb = {"within": "is within", "exceeds": "exceeds", "inconclusive": "is inconclusive at"}
    start = f"The gap in {CATALOG[name].title} "
    start += f"{verb[state]} {tolerance}" if state in verb else "is not estimable"
    text = f"{start}{_name_view(summary, title)}: {_describe_gap(summary, name, title)}."
    numbers = estimable_gap(found)
    if numbers is not None and name in RATIO_METRICS and len(summary["classes"]) == 2:
        text += _judge_ratio(numbers)
    return Verdict(PASSES[state], text + _list_other_views(summary, name, title), state)


def _name_view(summary: Summary, title: str) -> str:
    """Return ``, by sex`` if there are several attributes, else ""."""
    return f", by {title}" if summary["attributes"] else ""


def _describe_gap(summary: Summary, name: str, title: str) -> str:
    """Return rates and gap of a metric in one view, and what is missing for a verdict."""
    found = views_of(summary)[title]["metrics"][name]
    numbers = estimable_gap(found)
    if numbers is None or found["pair"] is None or numbers["gap"] is None:
        alone = len(found["groups"]) == 1
        reason = "there is only one group" if alone else "a group has no rows to take a rate from"
        return f"{reason}, which does not mean that it is fair"
    text = f"{describe_rates(summary, name, found)}, a gap of {_gap_text(numbers)}"
    if numbers["low"] is None:
        return f"{text}, with too few rows for an interval"
    if found["gap"] is None:
        text += ", among the groups that have a rate; not all groups can be compared"
    if numbers["high"] is None:
        text += f"; at least {format_points(numbers['low'])} points (95%), with no upper limit"
    return text


def rate_name(metric: str) -> str:
    """Return the name of the rate that a metric compares; for a metric of users, its title."""
    return RATE_NAMES.get(metric, CATALOG[metric].title)


def describe_rates(summary: Summary, name: str, found: MetricSummary) -> str:
    """Return ``12.3% of women and 4.5% of men are approved``, or the same for another metric."""
    rates = [(f"{format_points(found['groups'][g]['rate'])}%", g) for g in found["pair"] or ()]
    if len(summary["classes"]) > 2 or name not in SENTENCES:
        listed = " and ".join(f"{rate} for {name_group(g)}" for rate, g in rates)
        condition = "" if name == "acc" else f" ({found['condition']})"
        return f"the {rate_name(name)}{condition} is {listed}"
    sentence = SENTENCES[name]
    listed = " and ".join(f"{rate} of {name_group(g)}" for rate, g in rates)
    words = describe_decision(summary) | {"positive": summary["classes"][-1]}
    return sentence.format(rates=listed, **words)


def describe_decision(summary: Summary) -> dict[str, str]:
    """Return how a positive decision is called, in three forms."""
    outcome = summary["about"].get("outcome")
    if outcome:
        return {
            "decided": f"are {outcome}",
            "wrongly": f"are wrongly {outcome}",
            "selected": outcome,
        }
    called = f"the decision “{summary['classes'][-1]}”"
    return {
        "decided": f"get {called}",
        "wrongly": f"wrongly get {called}",
        "selected": f"with {called}",
    }


def name_group(group: str) -> str:
    """Return ``men`` for the group man, and ``group “A”`` for the group A."""
    return PLURALS.get(group.lower(), f"group “{group}”")


def name_all(group: str) -> str:
    """Return ``all men`` for the group man, and ``group “A”`` for the group A."""
    name = name_group(group)
    return f"all {name}" if group.lower() in PLURALS else name


def name_in(group: str) -> str:
    """Return ``men`` for the group man, and ``in group “A”`` for the group A."""
    name = name_group(group)
    return name if group.lower() in PLURALS else f"in {name}"


def ask_metric(summary: Summary, name: str) -> str:
    """Return what a metric compares in plain words, with its title in brackets."""
    title = CATALOG[name].title
    if len(summary["classes"]) > 2 or name not in QUESTIONS:
        return title
    outcome = summary["about"].get("outcome")
    called = f"the decision “{summary['classes'][-1]}”"
    words = {
        "decided": f"is {outcome}" if outcome else f"gets {called}",
        "wrongly": f"is wrongly {outcome}" if outcome else f"wrongly gets {called}",
        "selected": f"of those {outcome or f'with {called}'}",
        "positive": summary["classes"][-1],
    }
    return f"{QUESTIONS[name].format(**words)} ({title})"


def _list_other_views(summary: Summary, name: str, decided: str) -> str:
    """Return a sentence with the verdicts of the other views; "" if there are none."""
    tolerance = summary["tolerance"][name]
    parts = []
    for title, view in views_of(summary).items():
        numbers = estimable_gap(view["metrics"][name])
        if title != decided and numbers is not None and numbers["gap"] is not None:
            state = judge_gap(view["metrics"][name], tolerance)
            gap = f"{format_points(numbers['gap'])} points"
            parts.append(f"by {title} {gap} ({state})")
    if not parts:
        return ""
    more = f" and {len(parts) - MAX_VIEWS} more" if len(parts) > MAX_VIEWS else ""
    return f" Also: {', '.join(parts[:MAX_VIEWS])}{more}."


def _gap_text(numbers: GapSummary) -> str:
    """The gap in points with its interval."""
    assert numbers["gap"] is not None  # `estimable_gap` returns only summaries that have a gap
    return format_gap(numbers["gap"], numbers["low"], numbers["high"])


def format_tolerance(gap: float) -> str:
    """Return a tolerance in points, as ``5 points`` or ``2.5 points``."""
    number = f"{100 * gap:.4g}"
    return f"{number} point{'s' * (number != '1')}"


def _judge_ratio(numbers: GapSummary) -> str:
    """Return a sentence that compares the ratio with the 80% rule; "" if it is not estimable."""
    ratio = numbers["ratio"]
    if ratio is None:
        return ""
    below = ratio < FOUR_FIFTHS
    limit = numbers["ratio_high"] if below else numbers["ratio_low"]
    certain = limit is not None and (limit < FOUR_FIFTHS) == below
    where = "is below" if below else "meets"
    end = "" if certain else ", but not significantly so"
    digits = 3 if round(ratio, 2) == FOUR_FIFTHS else 2  # never "0.80, below the 80% rule"
    return f" The ratio of {ratio:.{digits}f} {where} the 80% rule{end}."


# The summary in words


def leading_verdict(summary: Summary) -> str:
    """Return the metric of the headline.

    It is the first one for which somebody stated a tolerance, if it has a gap; else the first one
    that has a gap.
    """
    stated = [name for name in VERDICT_METRICS if name in summary["tolerance_stated"]]
    everything = len(stated) == len(VERDICT_METRICS)
    for name in (*(() if everything else stated), *VERDICT_METRICS):
        if judge_metric(summary, name)[0] != "not estimable":
            return name
    return VERDICT_METRICS[0]


def write_headline(summary: Summary) -> str:
    """Return one sentence for readers without statistics: rates, gap, interval and tolerance."""
    name = leading_verdict(summary)
    state, title = judge_metric(summary, name)
    found = views_of(summary)[title]["metrics"][name]
    numbers = estimable_gap(found)
    where = _name_sites(summary)
    tolerance = format_tolerance(summary["tolerance"][name])
    default = "" if name in summary["tolerance_stated"] else "default "
    if numbers is None or found["pair"] is None:
        return f"{where}, no gap is estimable, which does not mean that the model is fair."
    text = f"{where}, {describe_rates(summary, name, found)}: a gap of {_gap_text(numbers)}"
    end = {
        "exceeds": f"more than the {default}tolerance of {tolerance}",
        "within": f"less than the {default}tolerance of {tolerance}",
        "inconclusive": f"which may be above or below the {default}tolerance of {tolerance}",
        "not estimable": f"which cannot be compared with the {default}tolerance of {tolerance}",
    }
    return f"{text}, {end[state]}."


def _name_sites(summary: Summary) -> str:
    """Return ``Across the 3 sites``, or the name of the only site."""
    sites = list(summary["sites"])
    if len(sites) > 1:
        return f"Across the {len(sites):,} sites"
    return f"At the only site, {sites[0]}" if sites and sites[0] else "At the only site"


def rows_needed(numbers: GapSummary, tolerance: float) -> int | None:
    """Return how many times as many rows would decide an inconclusive gap, if it stays as it is.

    None if this is not known, or more than `MAX_FACTOR` times.
    """
    gap, low, high = numbers["gap"], numbers["low"], numbers["high"]
    if gap is None or low is None or high is None or gap == tolerance:
        return None
    half = high - gap if gap < tolerance else gap - low
    factor = math.ceil((half / (gap - tolerance)) ** 2)
    return max(2, factor) if factor <= MAX_FACTOR else None


# Limits of a gate


class Exceeded(NamedTuple):
    """A gap that is above its limit, or that cannot be judged."""

    metric: str
    reason: str  # a sentence whose subject is the metric


def check_limits(limits: Mapping[str, Any]) -> dict[str, float]:
    """Return limits of gaps by the short names of metrics, or raise a `FedgftError`."""
    if not limits:
        raise FedgftError("name at least one metric and its limit: check(sp=0.05)", kind="missing")
    return check_gaps(limits, field="metric")


def find_exceeded(summary: Summary, limits: Mapping[str, float]) -> list[Exceeded]:
    """Return the gaps that exceed their limit, and those that are not estimable.

    These are the verdicts "exceeds" and "not estimable" for the limits as tolerances; a gap that
    is inconclusive passes. Every view counts: a gap between single attributes can be surer than
    one between intersections.

    Parameters
    ----------
    summary
        The results of the audit.
    limits
        The largest gap to accept, by the short name of the metric.
    """
    exceeded = []
    for name, limit in limits.items():
        for title, view in views_of(summary).items():
            found = view["metrics"][name]
            state = judge_gap(found, limit)
            numbers = estimable_gap(found)
            if state == "exceeds" and numbers is not None:
                gap = f"is at least {format_points(numbers['low'])} points (95%; the gap is "
                gap += f"{format_points(numbers['gap'])}), above {format_tolerance(limit)}"
                exceeded.append(Exceeded(name, f"by {title} {gap}"))
            elif state == "not estimable":
                reason = f"by {title} is not estimable: no pass at {format_tolerance(limit)}"
                exceeded.append(Exceeded(name, reason))
    return exceeded

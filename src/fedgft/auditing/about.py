"""What a report says besides its numbers: about the audit, the answers, definitions and limits."""

import datetime
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgft.auditing.findings import (
    MIN_CONTRIBUTION,
    describe_shares,
    rank_sites,
    rate_at_site,
    split_contribution,
)
from fedgft.auditing.next_site_report import answer_elsewhere
from fedgft.auditing.summary import Summary, estimable_gap, views_of
from fedgft.auditing.verdicts import (
    DEFAULT_TOLERANCE,
    STATES,
    VERDICT_METRICS,
    ask_metric,
    describe_decision,
    format_tolerance,
    judge_metric,
    leading_verdict,
    list_states,
    name_group,
    name_in,
    rate_name,
    rows_needed,
)
from fedgft.errors import FedgftError
from fedgft.formatting import (
    MAX_NAMES,
    format_gap,
    format_interval,
    format_points,
    join_names,
    one_line,
    printable,
)
from fedgft.metrics import CATALOG
from fedgft.metrics.intervals import FEW
from fedgft.site_sums import MeasurementSpec
from fedgft.site_sums.dates import describe_dates
from fedgft.store import expand_user
from fedgft.sums import is_text
from fedgft.validation import check_choice, format_value

TITLE = "Fairness audit"
DEFAULT_THRESHOLD = 0.5  # of `measure`
KEYS = ("title", "model", "version", "date", "prepared_by", "purpose", "label", "outcome")
KEYS += ("decided_by", "relies_on", "period")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September")
MONTHS += ("October", "November", "December")
MAX_TEXT = 500  # characters of a text in `about`
MAX_FILES = 40  # input files that a page lists
LARGE_PART = 0.5  # of the gap: from this part on, the gap comes from the mix of the sites
SMALL_PART = 1 / 3  # of the gap: a site with a smaller part does not stand out
MOST = 0.6  # of the gap: clearly more than half
ALMOST_ALL = 0.9
PROTECTIONS = {"none": "exact counts", "min cell": "small counts withheld"}
NUMBERS = ("No", "One", "Two", "Three")  # of sites, up to MAX_NAMES
DIGEST = re.compile(r"[0-9a-f]{64}")

DEFINITIONS = (
    (
        "Selection rate",
        "the share of a group that gets a positive decision. Statistical parity "
        "(also called demographic parity) compares it.",
    ),
    (
        "True-positive rate",
        "of those in a group whose true outcome is positive, the share with a "
        "positive decision. Equal opportunity compares it.",
    ),
    (
        "False-positive rate",
        "of those in a group whose true outcome is not positive, the share "
        "that wrongly gets a positive decision. False-positive-rate parity compares it.",
    ),
    (
        "Precision",
        "of those in a group with a positive decision, the share whose true outcome is "
        "positive. Predictive parity compares it.",
    ),
    ("Accuracy", "the share of a group with a right decision. Accuracy parity compares it."),
    (
        "Equalized odds",
        "compares true-positive and false-positive rates; its gap is the larger one.",
    ),
    (
        "Gap",
        "the difference between the rates of the two groups that differ most, in percentage "
        "points.",
    ),
    (
        "95% interval",
        "the values of the true gap that the data support. In 95 of 100 such audits "
        "the interval contains the true gap. Few rows make it wide.",
    ),
    (
        "Tolerance",
        "the largest acceptable gap. People decide on it; it does not follow from the data.",
    ),
    ("Overall gap", "the gap over the rows of all sites together."),
    (
        "Gap within sites",
        "the average gap inside the sites (Mantel-Haenszel). It can differ from "
        "the overall gap if the groups are spread unevenly over the sites.",
    ),
    (
        "Contribution",
        "what a site adds to the overall gap or takes from it. It has two parts: the "
        "site's own gap, and the mix of groups at a site that decides otherwise than the others.",
    ),
    ("80% rule", "the lower selection rate should be at least four fifths of the higher one."),
    (
        "Binning error",
        "of the area under a curve: the order of scores within a range is unknown. It is no "
        "interval: sampling error is not included.",
    ),
)
LIMITS = (
    "The audit describes the rows of the input files. It says nothing about people who are not in "
    "them, nor about other periods.",
    "The metrics cannot all be met at once: if the true outcomes of groups differ, a model that is "
    "not perfect cannot have equal precision and equal true- and false-positive rates. Which "
    "metric matters is a decision about the use of the model.",
    "“Within” is a statement about the size of a gap, not a proof that the model is fair or "
    "lawful. “Inconclusive” and “not estimable” do not mean that a "
    "gap is acceptable.",
    "The true outcomes are those in the files. If they were recorded unfairly, the rates that "
    "depend on them are wrong, and so is accuracy.",
    "A gap is not a cause. The audit does not say why groups differ, nor that a site did wrong.",
    "Intervals cover sampling error only: not errors in the data, and not later changes of the "
    "people or of the model.",
    "The numbers come from sums of rows. fedgft did not check the rows behind them.",
)


def check_about(about: Any) -> dict[str, Any]:
    """Return what is known about the audit, as texts; raise a `FedgftError` for anything else.

    Parameters
    ----------
    about
        Texts by the names in `KEYS`, and ``"files"``: paths of the input files, or a mapping from
        their names to their SHA-256. The title and today's date are added if they are missing.
    """
    if about is not None and not isinstance(about, Mapping):
        text = f"must be like {{'title': 'Credit model'}}, not {format_value(about)}"
        raise FedgftError(text, field="about")
    given = dict(about or {})
    files = _read_digests(given.pop("files", {}))
    found: dict[str, Any] = {"title": TITLE, "date": datetime.date.today().isoformat()}
    for name, text in given.items():
        check_choice("about", name, (*KEYS, "files"))
        if text is None:
            continue
        if not is_text(text):
            raise FedgftError(f"about[{name!r}] must be a text, not {format_value(text)}")
        if text.strip():
            found[name] = one_line(text, MAX_TEXT)
    ordered: dict[str, Any] = {name: found[name] for name in KEYS if name in found}
    return ordered | ({"files": files} if files else {})


def add_facts(about: Mapping[str, Any], spec: MeasurementSpec) -> dict[str, Any]:
    """Return what is known about the audit, with what the files of the sites state.

    Parameters
    ----------
    about
        What `check_about` returned. What it states has precedence over the files, except for the
        version of the model: another version than that of the files raises a `FedgftError`.
    spec
        What the sites measured.
    """
    version = about.get("version", spec.model_version)
    if spec.model_version not in ("", version):
        text = f"{version!r} is not the version in the files, {spec.model_version!r}"
        raise FedgftError(text, field="model_version", kind="conflict")
    found = {"label": spec.label, "version": version, "period": describe_dates(spec.date)}
    return {name: printable(text) for name, text in found.items() if text} | dict(about)


def _read_digests(files: Any) -> dict[str, str]:
    """Return the SHA-256 of files by name; `files` are paths, or a mapping that is checked."""
    if isinstance(files, Mapping):
        for name, digest in files.items():
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                text = f"about['files'] {format_value(name)}: must be a SHA-256, 64 digits"
                raise FedgftError(text)
        return {printable(str(name)): digest for name, digest in files.items()}
    if isinstance(files, str) or not isinstance(files, Iterable):
        raise FedgftError(f"about['files'] must list paths, not {format_value(files)}")
    digests: dict[str, str] = {}
    for path in files:
        try:
            content = expand_user(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: no path at all
            why = error.strerror if isinstance(error, OSError) else "not the name of a file"
            text = f"about['files'] {printable(str(path))}: cannot be read ({why})"
            raise FedgftError(text, kind="file") from None
        name = Path(path).name.encode("utf-8", "replace").decode("utf-8")
        digests[printable(name if name not in digests else str(path))] = hashlib.sha256(
            content
        ).hexdigest()
    return digests


# The head of a report


def name_model(name: str | None, version: str | None) -> str:
    """Return the name and the version of a model; empty if neither is known."""
    if not name and version:
        return f"version {version}"
    return " ".join(filter(None, (name, version)))


def write_byline(summary: Summary) -> str:
    """Return the model, who prepared the report, and the date, in one line."""
    about = summary["about"]
    model = name_model(about.get("model"), about.get("version"))
    author = f"prepared by {about['prepared_by']}" if "prepared_by" in about else ""
    return " · ".join(filter(None, (model, author, _write_date(about.get("date", "")))))


def _write_date(date: str) -> str:
    """Return ``4 May 2026`` for 2026-05-04; another text stays as it is."""
    try:
        found = datetime.date.fromisoformat(date)
    except ValueError:
        return date
    return f"{found.day} {MONTHS[found.month - 1]} {found.year}"


def list_facts(summary: Summary) -> list[tuple[str, str]]:
    """Return names and texts about the audit: who, what, when, and from which data."""
    about = summary["about"]
    known = about.get
    positive = summary["classes"][-1]
    sites = [site or "(no name)" for site in summary["sites"]]
    facts = [
        ("Model", name_model(known("model"), known("version")) or "not stated"),
        ("Prepared by", known("prepared_by") or "not stated"),
        ("Date", known("date") or "not stated"),
        ("Purpose", known("purpose") or "not stated"),
        ("True outcome", _describe_label(summary)),
        ("Positive decision", f"“{positive}”: {known('outcome') or 'meaning not stated'}"),
        ("Decided by", describe_threshold(summary)),
        *([("Relies on", about["relies_on"])] if "relies_on" in about else []),
        *([("Period", about["period"])] if "period" in about else []),
        ("Rows", _describe_rows(summary)),
        ("Sites", f"{len(sites):,}: {_join(sites)}"),
        ("Groups", f"{summary['groups']}: {_join(list(summary['metrics']['acc']['groups']))}"),
        ("Tolerance", _describe_tolerance(summary)),
    ]
    return facts if len(summary["classes"]) == 2 else [f for f in facts if f[0] != NO_BINARY]


NO_BINARY = "Positive decision"  # a fact about two classes only


def _join(names: list[str]) -> str:
    """Return up to eight names, and how many more there are."""
    most = 8
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _describe_label(summary: Summary) -> str:
    """Return the column of the label, if it is known, and its classes."""
    classes = " or ".join(f"“{name}”" for name in summary["classes"][:6])
    column = summary["about"].get("label")
    return f"column “{column}”: {classes}" if column else f"{classes}; column not stated"


def describe_threshold(summary: Summary) -> str:
    """Return how decisions were made. Whether somebody chose the threshold is not known."""
    threshold = summary["threshold"]
    if "decided_by" in summary["about"]:
        return summary["about"]["decided_by"]
    if threshold is None:
        return "decisions in the data"
    default = ", which is also the default of fedgft" if threshold == DEFAULT_THRESHOLD else ""
    return f"threshold: a score of at least {threshold:g}{default}"


def describe_privacy(summary: Summary) -> str:
    """Return how many sites protected their counts, and how."""
    parts = [
        f"{number:,} site{'s' * (number != 1)}: {PROTECTIONS.get(mechanism, mechanism + ' noise')}"
        for mechanism, number in summary["privacy"]["sites"].items()
    ]
    epsilon = summary["privacy"]["largest_epsilon"]
    spent = "" if epsilon is None else f"; the largest epsilon of one row is {epsilon:g}"
    return "; ".join(parts) + spent


def _describe_rows(summary: Summary) -> str:
    """Return the number of rows, and how many were left out and why."""
    rows = summary["rows"]
    text = f"{rows['counted']:,.0f}"
    about = "about " if summary["privacy"]["approximate"] else ""
    left_out = {
        "without a group": rows["not_recorded"],
        "without a label (not counted)": rows["label_missing"],
        "without a prediction (not counted)": rows["prediction_missing"],
    }
    parts = [f"{number:,.0f} {what}" for what, number in left_out.items() if number]
    return f"{about}{text}" + (f"; {', '.join(parts)}" if parts else "")


def _describe_tolerance(summary: Summary) -> str:
    """Return the tolerance, by metric if they differ, and whether somebody stated it."""
    gaps = {name: summary["tolerance"][name] for name in VERDICT_METRICS}
    stated = summary["tolerance_stated"]
    if not stated:
        default = format_tolerance(next(iter(gaps.values())))
        return f"{default}, the default of fedgft and not a legal limit; nobody stated another"
    if len(set(gaps.values())) == 1 and set(gaps) <= set(stated):
        return f"{format_tolerance(next(iter(gaps.values())))} for every metric"
    parts = [
        f"{CATALOG[name].title} {format_tolerance(gap)}{'' if name in stated else ' (default)'}"
        for name, gap in gaps.items()
    ]
    return "; ".join(parts)


def name_groups(summary: Summary) -> str:
    """Return ``groups by sex``, or the names of the groups if their attribute has no name."""
    if summary["groups"] != "group":
        return f"groups by {summary['groups']}"
    return f"the groups {_join(list(summary['metrics']['acc']['groups']))}"


def list_files(summary: Summary) -> list[tuple[str, str]]:
    """Return the input files with their SHA-256, at most `MAX_FILES` of them."""
    return list(summary["about"].get("files", {}).items())[:MAX_FILES]


# The first screen


def list_answers(summary: Summary) -> list[tuple[str, str]]:
    """Return questions and their answers, for readers without statistics."""
    elsewhere = answer_elsewhere(summary)
    return [
        ("What was audited?", _answer_what(summary)),
        ("What was found?", _answer_found(summary)),
        ("Who must act?", _answer_who(summary)),
        ("What is uncertain?", _answer_uncertain(summary)),
        *([("What about other sites?", elsewhere)] if elsewhere else []),
    ]


def _answer_what(summary: Summary) -> str:
    about = summary["about"]
    named = name_model(about.get("model"), about.get("version"))
    model = f"The decisions of {named}" if named else "The decisions of a model that is not named"
    number = len(summary["sites"])
    sites = f"{number:,} sites" if number > 1 else "one site"
    purpose = f" Purpose: {about['purpose']}." if "purpose" in about else ""
    return (
        f"{model}, on {_describe_rows(summary).partition(';')[0]} rows of {sites} "
        f"({_join([site or 'no name' for site in summary['sites']])}), compared between "
        f"{name_groups(summary)}.{purpose}"
    )


def _answer_found(summary: Summary) -> str:
    """Return the headline in numbers of people, and which metrics have which verdict."""
    states = list_states(summary)
    asked = {
        state: [ask_metric(summary, m) for m in VERDICT_METRICS if states[m] == state]
        for state in STATES
    }
    starts = {
        "exceeds": "Too far apart",
        "within": "Close enough",
        "inconclusive": "Not decided by these rows",
    }
    parts = [
        f"{starts.get(state, state.capitalize())}: {'; '.join(names)}."
        for state, names in asked.items()
        if names
    ]
    return " ".join([*_in_hundreds(summary), *parts])


def _in_hundreds(summary: Summary) -> Iterator[str]:
    """Yield ``Of 100 men, 57 are approved; of 100 women, 39.`` if decisions are compared."""
    name = leading_verdict(summary)
    _, title = judge_metric(summary, name)
    found = views_of(summary)[title]["metrics"][name]
    if name == "sp" and found["pair"] and len(summary["classes"]) == 2:
        (first, one), (second, other) = (
            (name_in(g), 100 * (found["groups"][g]["rate"] or 0.0)) for g in found["pair"]
        )
        decided = describe_decision(summary)["decided"]
        yield f"Of 100 {first}, about {one:.0f} {decided}; of 100 {second}, about {other:.0f}."
    yield from _compare_true_outcomes(summary, title, name)


def _compare_true_outcomes(summary: Summary, title: str, name: str) -> Iterator[str]:
    """Yield how many of 100 in each group have the positive true outcome.

    The groups are the two that differ most in the metric `name`, in the view `title`.
    """
    metrics = views_of(summary)[title]["metrics"]
    pair = metrics[name]["pair"]
    if not pair or len(summary["classes"]) != 2:
        return
    rows = [metrics["acc"]["groups"][g]["n"] for g in pair]
    positives = [metrics["eop"]["groups"][g]["n"] for g in pair]
    if min(rows) < FEW:
        return
    one, other = (min(max(hits / n, 0.0), 1.0) for hits, n in zip(positives, rows, strict=True))
    label = summary["about"].get("label")
    column = f" (column “{label}”)" if label else ""
    first, second = map(name_in, pair)
    yield (
        f"The true outcome is “{summary['classes'][-1]}”{column} for about {100 * one:.0f} of 100 "
        f"{first} and {100 * other:.0f} of 100 {second}."
    )


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _answer_who(summary: Summary) -> str:
    """Return who must act, and which sites the gap comes from."""
    name = leading_verdict(summary)
    state, title = judge_metric(summary, name)
    view = views_of(summary)[title]
    numbers = estimable_gap(view["metrics"][name])
    others = [CATALOG[m].title for m in VERDICT_METRICS if judge_metric(summary, m)[0] == "exceeds"]
    if state == "within" and not others:
        return "Nobody for now. Repeat the audit when the model or the people change."
    gaps = "gaps" if len(others) > 1 else "gap"
    verb = "exceed" if len(others) > 1 else "exceeds"
    owner = ""
    if others:
        owner = (
            f"The owner of the model, because the {gaps} in {_and(others)} {verb} the tolerance."
        )
    if state == "within":
        return owner
    if state == "not estimable":
        text = "The sites: without rows of every group, nobody can decide."
        return f"{owner} {text}".strip()
    if state == "inconclusive":
        factor = None if numbers is None else rows_needed(numbers, summary["tolerance"][name])
        more = f"about {factor} times as many" if factor else "many more"
        text = f"The sites: {more} rows are needed to decide, if the gap stays as it is. "
        if numbers is not None and numbers["gap"] is not None:
            exceeds = numbers["gap"] > summary["tolerance"][name]
            text += f"It would then {'exceed' if exceeds else 'be within'} the tolerance. "
        text += "Until then, nobody can say that the gap is acceptable."
        return f"{owner} {text}".strip()
    text = "The owner of the model."
    if len(summary["sites"]) > 1 and title == summary["groups"]:
        text = " ".join([text, *describe_origin(summary, name)])
    return text


def describe_origin(summary: Summary, name: str) -> Iterator[str]:
    """Yield sentences that say whether a gap is inside the sites or comes from their mix.

    The first decision is by the average gap inside the sites (Mantel-Haenszel) and its interval,
    the second by the parts of the contributions: see `fedgft.auditing.findings.explain_site`.

    Parameters
    ----------
    summary
        The results of the audit of several sites.
    name
        The metric. Its gap is the one by all attributes together.
    """
    found = summary["metrics"][name]
    parts = [split_contribution(site, name) for site in summary["sites"].values()]
    known = [part for part in parts if part is not None]
    total = found.get("signed_gap")
    if not total or found["pair"] is None or len(known) < len(parts):
        return
    first, second = map(name_group, found["pair"])
    if all(site["local"][name]["gap"] is None for site in summary["sites"].values()):
        yield f"No site has rows of both {first} and {second}, so no site can see the gap alone."
        return
    own = sum(part[0] for part in known)
    mix = sum(part[1] for part in known)
    within = summary["within"][name]
    low, high = within["low"], within["high"]
    margin = min(summary["tolerance"][name], DEFAULT_TOLERANCE)
    alike = low is not None and high is not None and -margin <= low and high <= margin
    alike = alike and not any(_exceeding_sites(summary, name))  # gaps of two signs can cancel
    average = "" if within["gap"] is None else format_gap(within["gap"], low, high)
    if alike and mix >= LARGE_PART * total:
        same = f"the {rate_name(name)}s of {first} and {second} are almost the same"
        if name == "sp":
            same = f"{first} and {second} are treated almost alike"
        yield f"Inside the sites, {same} (average gap {average.replace(' (', ', ').rstrip(')')})."
        yield "The gap comes from how they are spread over the sites."
    else:
        if average:
            yield f"Inside the sites, the average gap is {average}."
        yield _describe_parts(total, own, mix)
    yield from _describe_single_sites(summary, name, own / total)
    yield from _describe_largest_sites(summary, name)


def _describe_parts(total: float, own: float, mix: float) -> str:
    """Return how much of the overall gap is due to the sites' own gaps, and to their mix."""

    def amount(part: float, add: str, take: str) -> str:
        if abs(part) < MIN_CONTRIBUTION:
            return f"{add} nothing"
        return f"{add if part > 0 else take} {format_points(abs(part))}"

    inside = amount(own, "add", "take")
    between = amount(mix, "adds", "takes")
    return (
        f"Of the overall {format_points(total)} points, the gaps inside the sites {inside}, and "
        f"how the groups are spread over the sites {between}."
    )


def _exceeding_sites(summary: Summary, name: str) -> tuple[list[str], list[str]]:
    """Return the sites whose own gap exceeds the tolerance, and those with an opposite one."""
    tolerance = summary["tolerance"][name]
    local = {site: each["local"][name] for site, each in summary["sites"].items()}
    above = [s for s, gap in local.items() if gap["low"] is not None and gap["low"] > tolerance]
    below = [s for s, gap in local.items() if gap["high"] is not None and gap["high"] < -tolerance]
    return above, below


def _describe_single_sites(summary: Summary, name: str, part: float) -> Iterator[str]:
    """Yield which sites have a gap above the tolerance themselves, or why none is shown to.

    `part` is the part of the overall gap that comes from the gaps inside the sites.
    """
    above, below = _exceeding_sites(summary, name)
    if above:
        yield f"The gap inside the site alone exceeds the tolerance at {join_names(above)}."
    if below:
        yield f"The other way round, it exceeds the tolerance at {join_names(below)}."
    if not above and not below and part >= SMALL_PART:
        yield "No single site has enough rows to show a gap above the tolerance."


def _describe_largest_sites(summary: Summary, name: str) -> Iterator[str]:
    """Yield which sites make up the gap, and how."""
    amounts = {s: each["contribution"][name] or 0.0 for s, each in summary["sites"].items()}
    adding = {s: amounts[s] for s in rank_sites(summary, name) if amounts[s] > 0}
    total = sum(adding.values())
    if not adding:
        return
    taken = -sum(amount for amount in amounts.values() if amount < 0)
    whole = "it" if taken < (1 - ALMOST_ALL) * total else "what adds to it"
    reached = 0.0
    names = []
    while reached < ALMOST_ALL * total and len(names) < len(adding):
        names.append(list(adding)[len(names)])
        reached += adding[names[-1]]
    site, amount = next(iter(adding.items()))
    points = f"{format_points(amount)} points"
    if len(names) <= MAX_NAMES and len(names) < len(amounts):
        several = len(names) > 1
        start = f"{NUMBERS[len(names)]} site{'s make' if several else ' makes'} up almost all of"
        start = f"{start} {whole}"
    elif amount > MOST * total:
        start, names = f"Most of {whole}, {points}, comes from one site", [site]
    elif amount < SMALL_PART * total:
        yield f"No single site stands out: none adds more than {points}."
        return
    else:
        start, names = f"The largest part of {whole}, {points}, comes from one site", [site]
    reasons = (_describe_site(summary, name, each) for each in names)
    yield f"{start}: {'; '.join(reasons)}."


def _describe_site(summary: Summary, name: str, site: str) -> str:
    """Return ``east, where 82% are approved, holds 41% of all men but 12% of all women``."""
    found = summary["metrics"][name]
    gap = summary["sites"][site]["local"][name]["gap"]
    own, mix = split_contribution(summary["sites"][site], name) or (0.0, 0.0)
    if abs(own) > abs(mix) and gap is not None:
        return f"the gap inside {site} is {format_points(gap)} points and adds {format_points(own)}"
    rate = f"{100 * (rate_at_site(summary, name, site) or 0.0):.0f}%"
    both = " of the two groups" if len(found["groups"]) > 2 else ""
    where = f"the {rate_name(name)}{both} is {rate}"
    if name == "sp" and len(summary["classes"]) == 2:
        where = f"{rate}{both} {describe_decision(summary)['decided']}"
    return f"{site}, where {where}, holds {describe_shares(summary, name, site)}"


def _answer_uncertain(summary: Summary) -> str:
    """Return the interval of the headline's gap, open verdicts, and the number of caveats."""
    name = leading_verdict(summary)
    _, title = judge_metric(summary, name)
    numbers = estimable_gap(views_of(summary)[title]["metrics"][name])
    parts = []
    if numbers is not None and numbers["low"] is not None and numbers["high"] is not None:
        limits = format_interval(numbers["low"], numbers["high"])
        parts.append(
            f"The data fit a true gap of {limits} points (95% interval); a gap outside is "
            "unlikely, not impossible."
        )
    else:
        parts.append("The size of the gap: there are too few rows for an interval.")
    states = list_states(summary)
    for state in ("inconclusive", "not estimable"):
        if names := [CATALOG[m].title for m in VERDICT_METRICS if states[m] == state]:
            parts.append(f"{_and(names).capitalize()}: {state}.")
    if caveats := len(summary["warnings"]):
        parts.append(f"{caveats} caveat{'s' * (caveats > 1)} below.")
    parts.append("The audit does not say why the groups differ.")
    return " ".join(parts)

"""The numbers that New York City's Local Law 144 of 2021 asks of a bias audit.

The law (Administrative Code, title 20, chapter 5, subchapter 25, §§ 20-870 to 20-874) and the rules
of the Department of Consumer and Worker Protection (6 RCNY §§ 5-300 to 5-304, City Record of 6
April 2023, in force since 6 May 2023) are about automated employment decision tools (AEDT). What
this module takes from them was read on 20 November 2026 in a stored copy of the published sections
(codelibrary.amlegal.com, retrieved on 9 September 2026: the files of `reference/` in the public
repository jmarielee/LocalLaw144-auditor), and compared with stored pages of codelibrary.amlegal.com
(§ 5-301 (a), (b)) and of nacmiaslaw.com (§§ 5-300, 5-302):

- § 5-300: *selection rate* (those selected, of all in the category); *scoring rate* (the share of
  the category with a score above the sample's median score); *impact ratio* (a rate divided by that
  of the most selected, or highest scoring, category); *category* (component 1 of the EEO-1 report);
  *distribution date*; *independent auditor*; *historical data* and *test data*.
- § 5-301(b), (c): rates and ratios by sex, by race/ethnicity, and by both together; for each group
  into which a tool classifies people; the median of "the full sample of applicants"; the number of
  people of an unknown category. § 5-301(d): a category below 2% of the data may be left out of the
  impact ratios, with a justification, its number of applicants and its rate.
- § 5-302: historical data, or test data with an explanation. § 5-303: what is published.

The examples of § 5-301 are tests (`tests/test_form_ll144.py`). Neither the law nor these sections
name a threshold for an impact ratio. § 5-304 (notices to candidates) has no numbers and was not
used. The names of the categories in the EEO-1 report itself were not read; those of the examples
of § 5-301 were.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.auditing.about import describe_privacy, describe_threshold, list_files, write_byline
from fedgft.auditing.form_page import Fact, Form, Section
from fedgft.auditing.impact_ratios import (
    SMALL,
    Categories,
    count_selected,
    list_categories,
    score_table,
)
from fedgft.auditing.median_score import AboveMedian, count_above_median
from fedgft.auditing.summary import as_count, to_plain
from fedgft.errors import FedgftError
from fedgft.formatting import DASH, Table, format_interval, format_points
from fedgft.site_sums import COUNT

if TYPE_CHECKING:
    from fedgft.auditing.report import Audit

FACTS = {
    "auditor": "Independent auditor",
    "distribution_date": "Distribution date of the AEDT",
    "data_source": "Source and explanation of the data",
    "data_kind": "Historical or test data",
    "test_data_reason": "Why test data, and how they were made",
    "exclusion": "Justification for leaving out categories below 2%",
    "score_step": "Step of the scores",
}
KINDS_OF_DATA = ("historical", "test")
NAMES = {  # of columns, without case, spaces and signs
    "sex": ("sex", "gender"),
    "race": ("race", "ethnicity", "raceethnicity", "ethnicityrace", "ethnicgroup"),
}
UNKNOWN = re.compile(
    r"(?i)\s*(unknown|not (known|stated|recorded|disclosed|specified)|undisclosed|missing|n/?a|"
    r"(prefer|decline|choose)[sd]? not to .*|declined?( to .*)?)\s*"
)
TITLE = "Bias audit numbers under New York City Local Law 144"
OPEN = "to be completed by the employer, the agency or the auditor"
NOT_ESTIMABLE = "not estimable"
INTERVAL = "95% interval (not in the rule)"
DEFINITIONS = (
    Fact(
        "Selection rate",
        "of the people in a category, the share that the tool selects to move forward, or to whom "
        "it assigns the classification (6 RCNY § 5-300).",
    ),
    Fact(
        "Scoring rate",
        "of the people in a category, the share with a score above the median score of the full "
        "sample (6 RCNY §§ 5-300, 5-301(c)). A score equal to the median is not above it.",
    ),
    Fact(
        "Impact ratio",
        "the rate of a category divided by the rate of the category with the highest rate "
        "(6 RCNY § 5-300). These sections of the rules set no threshold for it.",
    ),
    Fact(
        "95% interval",
        "an addition of fedgft, which the rules do not ask for: the ratios that the data support. "
        "It is about this category and the one with the highest rate, and does not account for the "
        "choice of that category. With fewer than ten people in a category there is none.",
    ),
    Fact(
        "Unknown category",
        "people whose sex or race/ethnicity is not recorded. They are in no table that needs it, "
        "and their number is stated (6 RCNY § 5-301(b)(5), (c)(5)).",
    ),
)
LIMITS = (
    "A bias audit is an impartial evaluation by an independent auditor (Administrative Code "
    "§ 20-870): not somebody who was involved in using, developing or distributing the tool, is "
    "employed by its user or vendor, or has a financial interest in them (6 RCNY § 5-300). A "
    "program cannot be that auditor.",
    "The categories are the values of the two columns as the sites recorded them. Whether they are "
    "those of component 1 of the EEO-1 report is for the auditor to check.",
    "The tool may not be used if its most recent bias audit is more than one year old "
    "(6 RCNY § 5-301(a)). What must be published, where and how long, is in 6 RCNY § 5-303.",
    "Notices to candidates and employees (Administrative Code § 20-871(b)) are not part of this "
    "page.",
    "The numbers come from sums of rows. fedgft did not check the rows behind them.",
)


def build(audit: "Audit", *, columns: Mapping[str, str], facts: Mapping[str, str]) -> Form:
    """Fill the form from an audit.

    Parameters
    ----------
    audit
        The audit, with a column of sex and one of race or ethnicity among its columns of groups.
    columns
        The names of these columns, as "sex" and "race"; those left out are guessed.
    facts
        What a person stated, by the names in `FACTS`.
    """
    _check_people(audit)
    step = _check_facts(facts)
    found = {role: _find_column(audit.pool.spec.attributes, role, columns) for role in NAMES}
    if found["sex"] == found["race"]:
        raise FedgftError(f"`form_columns` sex and race are both {found['sex']}", kind="conflict")
    tables = list_categories(audit, found)
    exclude = "exclusion" in facts
    selection = count_selected(audit, tables, exclude=exclude)
    reason = _find_obstacle(audit)
    above = None if reason else count_above_median(audit.views[-1], step=step)
    scoring = []
    if above is not None:
        scoring = [score_table(each, step, exclude=exclude) for each in tables]
    people = _count_people(audit, found)
    numbers = {
        "columns": found,
        "people": people,
        "selection": selection,
        "median": above and {"low": above.median_low, "high": above.median_high},
        "scoring": scoring or None,
    }
    return Form(
        name="ll144",
        title=TITLE,
        byline=write_byline(audit.summary),
        date=audit.about["date"],
        sections=[
            Section("Summary of results", facts=_list_facts(audit, facts, people)),
            *_list_selection(selection, audit, tables),
            _describe_scores(audit, above, reason, scoring, tables),
            Section("Definitions", facts=DEFINITIONS),
            Section("What this page cannot say", items=LIMITS),
        ],
        numbers=to_plain(numbers),
        files=list_files(audit.summary),
        warnings=[*_list_warnings(audit, tables, people), *_warn_about_small(selection, facts)],
    )


# What the user stated


def _check_people(audit: "Audit") -> None:
    """Raise a `FedgftError` if the sums are no numbers of people."""
    spec = audit.pool.spec
    reasons = {
        f"rows have weights ({spec.weight})": spec.weight,
        "groups are given as probabilities": spec.proxy,
        "groups were randomized": spec.randomized,
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        text = f"`form` ll144 states numbers of people, and here {found[0]}: measure without it"
        raise FedgftError(text, kind="unsupported")


def _check_facts(facts: Mapping[str, str]) -> float | None:
    """Check the facts that are no free text; return the step of the scores, if it is stated."""
    kind = facts.get("data_kind", KINDS_OF_DATA[0])
    if kind not in KINDS_OF_DATA:
        raise FedgftError(f"`form_facts` data_kind: write historical or test, not {kind[:40]!r}")
    if "score_step" not in facts:
        return None
    try:
        step = float(facts["score_step"])
    except ValueError:
        step = math.nan
    if not 0 < step <= 1:
        raise FedgftError("`form_facts` score_step: must be a number above 0 and at most 1")
    return step


def _find_column(attributes: Sequence[str], role: str, columns: Mapping[str, str]) -> str:
    """Return the name of the column of sex or of race: the one that is given, or a guess."""
    listed = ", ".join(attributes)
    if role in columns:
        if columns[role] in attributes:
            return columns[role]
        problem = f"{role}={columns[role]}: no such column of groups; there are {listed}"
        raise FedgftError(f"`form_columns` {problem}")
    found = [each for each in attributes if re.sub(r"[\W_]", "", each.lower()) in NAMES[role]]
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"{' and '.join(found)} could both be {role}: name one with {role}=COLUMN"
        raise FedgftError(f"`form_columns` {problem}", kind="conflict")
    problem = f"ll144 needs a column of {role}, and the audit has {listed}: name it with"
    raise FedgftError(f"`form_columns` {problem} {role}=COLUMN", kind="missing")


# People and scores


def _count_people(audit: "Audit", found: Mapping[str, str]) -> dict[str, float]:
    """Return how many people were counted, are of an unknown category, or were left out."""
    pool = audit.pool
    sizes = pool.tables[..., COUNT].sum((0, 2, 3))
    places = {role: pool.spec.attributes.index(name) for role, name in found.items()}
    missing = {
        role: np.array([group[i] is None for group in pool.groups]) for role, i in places.items()
    }
    return {
        "counted": as_count(pool.rows),
        "unknown_sex": as_count(sizes[missing["sex"]].sum()),
        "unknown_race": as_count(sizes[missing["race"]].sum()),
        "unknown": as_count(sizes[missing["sex"] | missing["race"]].sum()),
        "label_missing": as_count(pool.label_missing),
        "prediction_missing": as_count(pool.prediction_missing),
    }


def _find_obstacle(audit: "Audit") -> str:
    """Return why there are no scoring rates; "" if there are."""
    view = audit.views[-1]
    if not view.spec.scored:
        return "The sites sent no scores, so there are no scoring rates."
    if len(view.spec.classes) > 2:
        return "The tool has several classes, each with a score; scoring rates are for one score."
    if view.noise.any():
        return "Sites added noise to the histograms of scores, so there are no scoring rates."
    if not view.has_histograms:
        return "A site withheld its histograms of scores, so there are no scoring rates."
    return ""


# Texts


def _list_facts(
    audit: "Audit", facts: Mapping[str, str], people: Mapping[str, float]
) -> list[Fact]:
    """Return the facts of the summary of results; those that nobody stated are open."""
    about = audit.about

    def state(name: str, more: str = "") -> Fact:
        return Fact(FACTS[name], facts.get(name, OPEN + more), name not in facts)

    tool = " ".join(filter(None, (about.get("model"), about.get("version"))))
    about_word = "about " if audit.summary["privacy"]["approximate"] else ""
    unknown = (
        f"{about_word}{people['unknown']:,.0f} (sex {people['unknown_sex']:,.0f}, race/ethnicity "
        f"{people['unknown_race']:,.0f})"
    )
    left_out = (
        f"{people['label_missing']:,.0f} without a label, {people['prediction_missing']:,.0f} "
        "without a prediction"
    )
    kind = facts.get("data_kind")
    listed = [
        Fact("Date of the bias audit", about["date"]),
        Fact("Automated employment decision tool", tool or OPEN, not tool),
        state("distribution_date", ": when the employer or agency began to use the tool"),
        state("auditor"),
        Fact("Numbers prepared by", about.get("prepared_by", "not stated")),
        state("data_source"),
        state("data_kind", ": historical data, or test data with an explanation"),
        *([state("test_data_reason")] if kind == "test" else []),
        *([Fact("Period of the data", about["period"])] if "period" in about else []),
        Fact("Sites", f"{len(audit.summary['sites']):,}"),
        Fact("People in the data", f"{about_word}{people['counted']:,.0f}"),
        Fact("People of an unknown category", unknown),
        Fact("People not counted by the sites", left_out),
        Fact("Selected", _describe_selected(audit)),
        Fact("Protection of the counts", describe_privacy(audit.summary)),
    ]
    if "exclusion" in facts:
        listed.append(state("exclusion"))
    return listed


def _describe_selected(audit: "Audit") -> str:
    """Return which class means that a person is selected, and how it was decided."""
    classes = audit.pool.spec.classes
    how = describe_threshold(audit.summary)
    if len(classes) > 2:
        return f"assigned to a class ({how}); a table for each class"
    meaning = audit.about.get("outcome")
    return f"the decision “{classes[1]}”{f', {meaning}' if meaning else ''} ({how})"


def _list_warnings(
    audit: "Audit", tables: Sequence[Categories], people: Mapping[str, float]
) -> list[str]:
    """Return sentences that a reader must know before the numbers."""
    found = []
    if people["label_missing"]:
        found.append(
            f"{people['label_missing']:,.0f} people have no label (true outcome) and were not "
            "counted by the sites. The law needs no label: measure again with a label column that "
            "has a value for everybody, such as a copy of the decision."
        )
    if people["prediction_missing"]:
        found.append(
            f"{people['prediction_missing']:,.0f} people have no decision or score and are in no "
            "number."
        )
    for table in tables[:2]:
        odd = [name for (name,) in table.names if UNKNOWN.fullmatch(name)]
        if odd:
            found.append(
                f"{', '.join(f'“{name}”' for name in odd)} is counted as a category of "
                f"{table.columns[0]}. If it means that the category is unknown, leave these cells "
                "empty and measure again."
            )
    if audit.summary["privacy"]["approximate"]:
        found.append(
            "Counts are approximate, because sites added noise or withheld small counts; the rules "
            "ask for numbers of people."
        )
    return found


def _warn_about_small(
    selection: Sequence[Mapping[str, Any]], facts: Mapping[str, str]
) -> list[str]:
    """Return a sentence about categories below 2% of the data, if there are any."""
    tables = selection[0]["tables"]
    small = [
        " ".join(row["category"])
        for table in tables
        for row in table["rows"]
        if row["applicants"] > 0 and row["share"] < SMALL
    ]
    if not small:
        return []
    end = "They were left out; the justification is below."
    if "exclusion" not in facts:
        end = "They are included here."
    return [
        f"Below 2% of the people in their table: {', '.join(small)}. An independent auditor may "
        f"leave such categories out of the impact ratios (6 RCNY § 5-301(d)). {end}"
    ]


def _list_selection(
    selection: Sequence[Mapping[str, Any]], audit: "Audit", tables: Sequence[Categories]
) -> list[Section]:
    """Return the sections with the tables of selection rates."""
    sections = []
    for found in selection:
        several = f" for “{found['class']}”" if len(selection) > 1 else ""
        shown = [
            _show_table(table, each["rows"], "selection rate", f"Selection rates{several}")
            for table, each in zip(tables, found["tables"], strict=True)
        ]
        sections.append(Section(f"Selection rates and impact ratios{several}", tables=shown))
    return sections


def _describe_scores(
    audit: "Audit",
    above: AboveMedian | None,
    reason: str,
    scoring: Sequence[Mapping[str, Any]],
    tables: Sequence[Categories],
) -> Section:
    """Return the section with the scoring rates, or with the reason why there are none."""
    title = "Scoring rates and impact ratios"
    if above is None:
        return Section(title, [reason])
    if above.median_low == above.median_high:
        median = f"The median score of the full sample is {above.median_low:g}."
    else:
        median = (
            f"The median score of the full sample is at least {above.median_low:g} and "
            f"{'at most' if above.median_high == 1 else 'below'} {above.median_high:g}: the sites "
            "sent counts of people by ranges of the score."
        )
    parts = [f"{median} The full sample includes people of an unknown category."]
    if any(
        math.isnan(row["rate"]) for each in scoring for row in each["rows"] if row["applicants"]
    ):
        parts.append(
            "A rate with two numbers lies between them: where people in the range of the median "
            "are is not known. Narrower ranges (fedgft measure --bins 1000 --min-bin 1) tell more. "
            "The rate is exact if the step of the scores is stated (score_step) and the range of "
            "the median holds one possible score."
        )
    shown = [
        _show_table(table, each["rows"], "scoring rate", "Scoring rates")
        for table, each in zip(tables, scoring, strict=True)
    ]
    return Section(title, parts, tables=shown)


def _show_table(
    table: Categories, rows: Sequence[Mapping[str, Any]], rate: str, title: str
) -> Table:
    """Return one table as texts."""
    counted = rate == "selection rate"
    header = (*table.columns, "# of applicants", *(["# selected"] if counted else []))
    header += (f"{rate}, %", "impact ratio", INTERVAL)
    shown = []
    for row in rows:
        cells = [*row["category"], f"{row['applicants']:,.0f}"]
        cells += [f"{row['selected']:,.0f}"] if counted else []
        shown.append((*cells, *_show_rates(row)))
    notes = ()
    if any(row["is_excluded"] for row in rows):
        notes = ("Excluded: below 2% of the people in this table.",)
    name = f"{title}, {table.title[0].lower()}{table.title[1:]}"
    return Table(name, header, tuple(shown), len(table.columns), notes)


def _show_rates(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the texts of a rate, its impact ratio, and the interval of the ratio."""
    if math.isnan(row["rate_low"]):
        return NOT_ESTIMABLE, "excluded" if row["is_excluded"] else NOT_ESTIMABLE, DASH
    rate = format_interval(row["rate_low"], row["rate_high"])
    if not math.isnan(row["rate"]):
        rate = format_points(row["rate"])
    if row["is_excluded"]:
        return rate, "excluded", DASH
    if math.isnan(row["ratio_from"]):
        return rate, NOT_ESTIMABLE, DASH
    ratio = format_interval(row["ratio_from"], row["ratio_to"], scale=1, digits=3)
    if not math.isnan(row["ratio"]):
        ratio = f"{row['ratio']:.3f}"
    limits = (x if math.isfinite(x) else None for x in (row["ratio_low"], row["ratio_high"]))
    return rate, ratio, format_interval(*limits, scale=1, digits=3)

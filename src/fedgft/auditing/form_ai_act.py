"""An annex to the technical documentation of the EU AI Act, as far as an audit can fill it.

Regulation (EU) 2024/1689, as amended by Regulation (EU) 2026/1744 of 8 July 2026 (Official Journal
of 24 July 2026, in force since 27 July 2026). What this module takes from it was read on 20
November 2026 in stored copies, because the Official Journal itself is not at hand:

- Articles 10, 11, 13 and 15: a transcription of EUR-Lex's consolidated text 02024R1689-20260727
  ("Docket 07 - Operative text, verbatim from EUR-Lex"), which marks what the amendment changed:
  Article 10(1) and (6) and Article 11(1); not Article 10(2) to (4), 13 and 15; Article 10(5) is
  gone. The stored pages overview.legal/laws/ai-act/art-13 and art-15, whisperly.ai (Article 10) and
  mishcon.com (Article 13) agree for what was not changed.
- Article 4a: the agreed text PE789.081 of 13 May 2026, and descriptions of the published text (that
  it holds what was Article 10(5), for the same purpose and under six conditions). The wording of
  the published text was not read; the page therefore names the article and does not quote it.
- Annex IV, points 1 to 4: three stored copies of the text of 2024 (springlex.eu,
  aiact.annotated.nl, one public repository). The transcription does not list Annex IV among the
  annexes that the amendment changed.
- Dates of application (2 December 2027 for Annex III, 2 August 2028 for Annex I): Article 113 as
  amended, by two public repositories that read it and by law firms' notes of July 2026.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedgft.auditing.about import (
    DEFINITIONS,
    LIMITS,
    describe_privacy,
    describe_threshold,
    list_files,
    write_byline,
)
from fedgft.auditing.form_page import Fact, Form, Section
from fedgft.auditing.form_tables import list_accuracy, list_gaps, list_group_rates, list_numbers
from fedgft.auditing.summary import Summary
from fedgft.auditing.verdicts import VERDICT_METRICS, rate_name
from fedgft.formatting import format_interval, format_percent
from fedgft.metrics import CATALOG

if TYPE_CHECKING:
    from fedgft.auditing.report import Audit

FACTS = {
    "provider": "Provider",
    "intended_purpose": "Intended purpose of the system",
    "test_data": "Validation and testing data: origin and main characteristics",
    "responsible": "Responsible persons who sign the test reports",
    "unintended_outcomes": "Foreseeable unintended outcomes and sources of risk",
    "metrics_rationale": "Why these metrics are appropriate",
    "mitigation": "Measures to prevent and mitigate biases",
    "special_categories": "Conditions for special categories of personal data",
    "accuracy_circumstances": "Circumstances that may change the accuracy",
}
TITLE = "EU AI Act: what an audit adds to the technical documentation"
OPEN = "to be completed by the provider"
TEXT = (
    "The items are those of Regulation (EU) 2024/1689 as amended by Regulation (EU) 2026/1744 "
    "(consolidated version of 27 July 2026), as far as numbers about groups of people can fill "
    "them. They are about high-risk AI systems, to which these requirements apply from 2 December "
    "2027 (Annex III) or 2 August 2028 (Annex I). Whether a system is one is not decided here."
)
NOT_HERE = (
    "Annex IV, point 1 except purpose and version; point 2(a) to (f) and (h): elements of the "
    "system and its development, among them training data, human oversight and cybersecurity.",
    "Annex IV, points 5 to 9: risk management, changes, standards, declaration of conformity, "
    "post-market monitoring.",
    "Article 10(2)(a) to (e), Article 13(3) except point (b)(ii) and (v), and Article 15 except "
    "paragraph 3.",
)


def build(audit: "Audit", *, columns: Mapping[str, str], facts: Mapping[str, str]) -> Form:
    """Fill the annex from an audit.

    Parameters
    ----------
    audit
        The audit.
    columns
        Not used: the annex has all columns of groups of the audit.
    facts
        What a person stated, by the names in `FACTS`.
    """
    summary = audit.summary

    def state(name: str) -> Fact:
        return Fact(FACTS[name], facts.get(name, OPEN), name not in facts)

    about = audit.about
    tool = " ".join(filter(None, (about.get("model"), about.get("version"))))
    purpose = about.get("purpose")
    return Form(
        name="ai-act",
        title=TITLE,
        byline=write_byline(summary),
        date=about["date"],
        sections=[
            Section(
                "General description (Annex IV, point 1(a))",
                [TEXT],
                [
                    Fact("System and version", tool or OPEN, not tool),
                    state("provider"),
                    Fact("Purpose of this audit", purpose or "not stated"),
                    state("intended_purpose"),
                ],
            ),
            _describe_testing(audit, state("test_data"), state("responsible")),
            Section(
                "Degrees of accuracy for groups of persons (Annex IV, point 3; Article "
                "13(3)(b)(v))",
                [_describe_accuracy(summary)],
                [state("unintended_outcomes")],
                tables=list_accuracy(summary),
            ),
            Section(
                "Appropriateness of the performance metrics (Annex IV, point 4)",
                [LIMITS[1]],
                [state("metrics_rationale")],
            ),
            _describe_biases(summary, state("mitigation")),
            _describe_gaps_in_data(audit),
            _describe_special_categories(audit, state("special_categories")),
            Section(
                "Level of accuracy in the instructions for use (Article 13(3)(b)(ii), Article "
                "15(3))",
                [_describe_accuracy(summary)],
                [state("accuracy_circumstances")],
            ),
            Section("Not part of this page", items=NOT_HERE),
            Section("Definitions", facts=[Fact(*pair) for pair in DEFINITIONS]),
            Section("What this page cannot say", items=LIMITS),
        ],
        numbers=list_numbers(summary),
        files=list_files(summary),
        warnings=audit.warnings,
    )


def _describe_testing(audit: "Audit", data: Fact, responsible: Fact) -> Section:
    """Return the section about procedures, data, metrics and discriminatory impacts."""
    summary = audit.summary
    metrics = ", ".join(f"{CATALOG[name].title} ({rate_name(name)})" for name in VERDICT_METRICS)
    return Section(
        "Validation and testing (Annex IV, point 2(g))",
        [
            "Each site counted its own rows by group, true outcome and decision. The counts were "
            "added up, and rates, gaps and intervals were computed from the totals. No row left a "
            "site."
        ],
        [
            Fact("Date of this test report", audit.about["date"]),
            responsible,
            Fact("Rows", f"{summary['rows']['counted']:,.0f}"),
            Fact("Period of the rows", audit.about.get("period", "not stated")),
            Fact("Sites", f"{len(summary['sites']):,}"),
            Fact("Groups by", ", ".join(audit.pool.spec.attributes)),
            Fact("True outcome", " or ".join(f"“{name}”" for name in summary["classes"])),
            Fact("Decided by", describe_threshold(summary)),
            data,
            Fact("Metrics of discriminatory impact", f"{metrics}; each with its 95% interval"),
            Fact("Intervals", summary["interval"]),
        ],
        tables=list_gaps(summary),
    )


def _describe_accuracy(summary: Summary) -> str:
    """Return the accuracy over all rows, with its interval."""
    found = summary["accuracy"]
    limits = format_interval(found["low"], found["high"])
    return (
        f"Over all {found['n']:,.0f} rows, {format_percent(found['rate'], unknown='–')} of the "
        f"decisions are right (95% interval {limits}%)."
    )


def _describe_biases(summary: Summary, mitigation: Fact) -> Section:
    """Return the section about the examination for biases, and measures against them."""
    states = summary["verdicts"]
    listed = [
        f"{CATALOG[name].title}: {states[name]} at a tolerance of "
        f"{100 * summary['tolerance'][name]:.4g} points."
        for name in VERDICT_METRICS
    ]
    return Section(
        "Examination for possible biases, and measures (Article 10(2)(f) and (g))",
        [
            "This audit is one examination: of the decisions, on the rows above. The verdicts "
            "compare each gap with a tolerance that people chose. “Not estimable” and "
            "“inconclusive” do not mean that there is no bias."
        ],
        [mitigation],
        listed,
        list_group_rates(summary),
    )


def _describe_gaps_in_data(audit: "Audit") -> Section:
    """Return the section about gaps in the data that the audit found."""
    summary = audit.summary
    rows = summary["rows"]
    facts = [
        Fact("Rows without a recorded group", f"{rows['not_recorded']:,.0f}"),
        Fact("Rows without a true outcome, not counted", f"{rows['label_missing']:,.0f}"),
        Fact("Rows without a prediction, not counted", f"{rows['prediction_missing']:,.0f}"),
    ]
    few = [
        f"{group} ({title}): {rate['n']:,.0f} rows"
        for title, view in _views(summary)
        for group, rate in view["metrics"]["acc"]["groups"].items()
        if rate["low"] is None
    ]
    items = [f"Too few rows for an interval: {text}." for text in few]
    return Section(
        "Gaps in the data (Article 10(2)(h))",
        items=items or ["Every group has enough rows for an interval of its accuracy."],
        facts=facts,
    )


def _views(summary: Summary) -> Sequence[tuple[str, Mapping]]:
    return [*summary["attributes"].items(), (summary["groups"], summary)]


def _describe_special_categories(audit: "Audit", conditions: Fact) -> Section:
    """Return the section about personal data: what left the sites, and how it was protected."""
    return Section(
        "Special categories of personal data (Article 4a, until 27 July 2026 Article 10(5))",
        [
            "Groups such as ethnic origin are special categories of personal data. Article 4a "
            "allows providers of high-risk systems to process them where it is strictly necessary "
            "to detect and correct biases, under conditions that the provider documents."
        ],
        [
            Fact(
                "What left the sites",
                "counts and sums of scores by group, true outcome and decision; no rows and no "
                "identifiers",
            ),
            Fact("Protection of the counts", describe_privacy(audit.summary)),
            conditions,
        ],
    )

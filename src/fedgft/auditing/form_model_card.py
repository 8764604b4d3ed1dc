"""A model card: what a model is for, and how it performs by group and by intersections of groups.

The sections are those of Mitchell et al., "Model Cards for Model Reporting" (FAT* 2019), sections
4.1 to 4.9; their titles were compared on 20 November 2026 with the stored page of mlr3fairness
(mlr3fairness.mlr-org.com, article "modelcard"), which has a template of them. The header in YAML
follows the stored specification of model cards of Hugging Face (`modelcard.md` in
huggingface/hub-docs, read on the same day): `model-index` with `task.type`, `dataset.type`,
`dataset.name`, `metrics.type` and `metrics.value`, which are required. It was not uploaded there.

`fedgft train` writes a card of its own, MODEL.md (`fedgft.fair_model.FairModel.card`): about the
features, the training and a comparison with FedAvg, none of which an audit knows. This card says
what was measured; `training_data` can refer to that file.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedgft.auditing.about import (
    LIMITS,
    describe_privacy,
    describe_threshold,
    list_files,
    write_byline,
)
from fedgft.auditing.form_page import Fact, Form, Section
from fedgft.auditing.form_tables import list_gaps, list_group_rates, list_numbers
from fedgft.auditing.summary import Summary, estimable_gap, views_of
from fedgft.auditing.verdicts import VERDICT_METRICS, rate_name
from fedgft.formatting import format_interval, format_percent
from fedgft.metrics import CATALOG

if TYPE_CHECKING:
    from fedgft.auditing.report import Audit

FACTS = {
    "owner": "Person or organization that develops the model",
    "model_type": "Type of the model",
    "license": "License",
    "contact": "Where to send questions",
    "intended_use": "Intended uses",
    "intended_users": "Intended users",
    "out_of_scope": "Uses that are out of scope",
    "relevant_factors": "Groups, instruments and environments that could matter",
    "evaluation_data": "Why these data, and how they were prepared",
    "training_data": "Training data",
    "ethics": "Ethical considerations",
    "caveats": "Caveats and recommendations",
}
TITLE = "Model card"
OPEN = "to be completed by the developers"


def build(audit: "Audit", *, columns: Mapping[str, str], facts: Mapping[str, str]) -> Form:
    """Fill the card from an audit.

    Parameters
    ----------
    audit
        The audit.
    columns
        Not used: the card has all columns of groups of the audit.
    facts
        What a person stated, by the names in `FACTS`.
    """
    summary = audit.summary
    about = audit.about

    def state(*names: str) -> list[Fact]:
        return [Fact(FACTS[name], facts.get(name, OPEN), name not in facts) for name in names]

    name = about.get("model", "")
    unitary = [title for title in views_of(summary) if title in audit.pool.spec.attributes]
    return Form(
        name="model-card",
        title=f"{TITLE}: {name}" if name else TITLE,
        byline=write_byline(summary),
        date=about["date"],
        sections=[
            Section(
                "Model details",
                facts=[
                    Fact("Name", name or OPEN, not name),
                    Fact("Version", about.get("version", OPEN), "version" not in about),
                    *state("owner", "model_type", "license", "contact"),
                    Fact("Card prepared by", about.get("prepared_by", "not stated")),
                ],
            ),
            Section("Intended use", facts=state("intended_use", "intended_users", "out_of_scope")),
            Section(
                "Factors",
                facts=[
                    *state("relevant_factors"),
                    Fact("Groups that were evaluated", ", ".join(audit.pool.spec.attributes)),
                ],
            ),
            _describe_metrics(summary),
            _describe_data(audit, state("evaluation_data")),
            Section("Training data", facts=state("training_data")),
            Section(
                "Quantitative analyses: unitary results",
                [_describe_accuracy(summary)],
                tables=_list_tables(summary, unitary),
            ),
            _describe_intersections(summary, unitary),
            Section("Ethical considerations", facts=state("ethics")),
            Section("Caveats and recommendations", facts=state("caveats"), items=LIMITS),
        ],
        numbers=list_numbers(summary),
        files=list_files(summary),
        warnings=audit.warnings,
        header=_write_header(audit, facts),
    )


def _describe_metrics(summary: Summary) -> Section:
    """Return the section about performance measures, thresholds and intervals."""
    metrics = [f"{CATALOG[m].title}: compares the {rate_name(m)}." for m in VERDICT_METRICS]
    facts = [
        Fact("Decision threshold", describe_threshold(summary)),
        Fact("Intervals", f"{summary['interval']}; 95%"),
    ]
    return Section("Metrics", facts=facts, items=metrics)


def _describe_data(audit: "Audit", stated: list[Fact]) -> Section:
    """Return the section about the evaluation data."""
    summary = audit.summary
    rows = summary["rows"]
    facts = [
        Fact("Rows", f"{rows['counted']:,.0f}"),
        Fact("Rows without a recorded group", f"{rows['not_recorded']:,.0f}"),
        Fact("Rows without a true outcome, not counted", f"{rows['label_missing']:,.0f}"),
        Fact("Rows without a prediction, not counted", f"{rows['prediction_missing']:,.0f}"),
        Fact("Period of the rows", audit.about.get("period", "not stated")),
        Fact("Sites", f"{len(summary['sites']):,}; only sums left them"),
        Fact("True outcome", " or ".join(f"“{name}”" for name in summary["classes"])),
        Fact("Protection of the counts", describe_privacy(summary)),
        *stated,
    ]
    return Section("Evaluation data", facts=facts)


def _describe_accuracy(summary: Summary) -> str:
    """Return the accuracy over all rows, with its interval."""
    found = summary["accuracy"]
    limits = format_interval(found["low"], found["high"])
    return f"Accuracy over all rows: {format_percent(found['rate'])} (95% interval {limits}%)."


def _list_tables(summary: Summary, titles: list[str]) -> list[Any]:
    """Return the gaps and the rates of the views with these titles."""
    order = list(views_of(summary))
    gaps = list_gaps(summary)
    rates = list_group_rates(summary)
    return [made[order.index(title)] for title in titles for made in (gaps, rates)]


def _describe_intersections(summary: Summary, unitary: list[str]) -> Section:
    """Return the section with the results by combinations of columns."""
    title = "Quantitative analyses: intersectional results"
    combined = [each for each in views_of(summary) if each not in unitary]
    if not combined:
        return Section(title, ["The groups are those of one column, so there are none."])
    return Section(title, tables=_list_tables(summary, combined))


def _write_header(audit: "Audit", facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the header in YAML: accuracy, and the gap of every metric by all columns together.

    A gap that is not estimable is left out.
    """
    summary = audit.summary
    metrics = []
    if summary["accuracy"]["rate"] is not None:
        accuracy = float(summary["accuracy"]["rate"])
        metrics.append({"type": "accuracy", "value": accuracy, "name": "Accuracy"})
    for name in VERDICT_METRICS:
        found = summary["metrics"][name]
        numbers = estimable_gap(found)
        if found["gap"] is None or numbers is None:
            continue
        title = f"Gap in {CATALOG[name].title} by {summary['groups']}"
        limits = format_interval(numbers["low"], numbers["high"], scale=1, digits=4)
        value = float(found["gap"])
        metrics.append({"type": f"{name}_gap", "value": value, "name": f"{title} ({limits})"})
    sites = len(summary["sites"])
    data = facts.get("evaluation_data", f"rows of {sites} site{'s' * (sites != 1)}, not pooled")
    result = {
        "task": {"type": "other", "name": "Decisions about people, by group"},
        "dataset": {"type": "other", "name": data},
        "metrics": metrics,
    }
    found = {"license": facts["license"]} if "license" in facts else {}
    name = audit.about.get("model", "not named")
    return {**found, "tags": ["fairness"], "model-index": [{"name": name, "results": [result]}]}

"""The report of an audit of a model of numbers: sentences, tables and charts.

All numbers have the unit of the outcome, which only the reader knows; those of squared errors have
its square. The page is the same `fedgft.formatting.Report` as that of decisions, and the charts are
those of ``templates/charts.json`` with other titles of axes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedgft.auditing.about import write_byline
from fedgft.auditing.audit_results import Estimate
from fedgft.auditing.regression_estimates import METRICS, MeanGap, RegressionResults
from fedgft.auditing.regression_findings import (
    INTERVAL,
    Findings,
    count_rows,
    format_exactly,
    format_limits,
    format_number,
    judge_gap,
)
from fedgft.auditing.tables_and_charts import Spec, fill_chart
from fedgft.auditing.verdicts import PASSES, name_group
from fedgft.formatting import DASH, Figure, Report, Table, Verdict, printable
from fedgft.site_sums.regression_sums import describe_clip

MARK = "<!-- fedgft audit -->"  # the first line of report.md
MAX_SITES = 40  # in tables and charts
MAX_SITES_ON_TERMINAL = 10
MAX_NAMES = 8  # in a fact
SHORT_GAP_COLUMNS = ("metric", "farthest apart", "gap", "95% interval", "average within sites")
LEGEND = (
    "✓ within: the whole 95% interval of the gap is below the tolerance",
    "✗ exceeds: the whole interval is above the tolerance",
    "? inconclusive: the interval contains the tolerance, so the data do not decide",
    "· not judged, because no tolerance is stated, or not estimable, because a group has no sums "
    "or too few rows for an interval; neither means fair",
)
DEFINITIONS = (
    ("Mean prediction", "the mean of what the model predicts for a group."),
    ("Mean outcome", "the mean of the true outcome, for comparison: it is no property of a model."),
    (
        "Mean error",
        "the mean of outcome minus prediction. If it is positive, the model predicts too low. Also "
        "called bias, or calibration in the large.",
    ),
    ("Mean absolute error", "the mean distance between outcome and prediction."),
    (
        "Mean squared error",
        "the mean of the squared distance, in the square of the unit; RMSE is its root.",
    ),
    ("R²", "1 minus the squared errors over those of the group's own mean outcome."),
    ("Gap", "the difference between the means of the two groups that differ most."),
    (
        "Standardized difference",
        "a difference of means divided by the standard deviation within groups, without a unit.",
    ),
    ("Ratio", "the smaller mean error of two groups divided by the larger one."),
    (
        "95% interval",
        "the values of the true number that the data support. In 95 of 100 such audits the "
        "interval contains it. Few rows make it wide.",
    ),
    ("Tolerance", "the largest acceptable gap. People decide on it; it has the unit of the gap."),
    (
        "Average within sites",
        "the mean of the differences inside the sites, weighted as in the method of Mantel and "
        "Haenszel.",
    ),
    (
        "Contribution",
        "what a site adds to the overall gap or takes from it: by its own gap, and by its mix of "
        "groups where its mean differs from the overall one.",
    ),
)
LIMITS = (
    "The audit describes the rows of the input files. It says nothing about people who are not in "
    "them, nor about other periods.",
    "Groups may differ in mean prediction because their outcomes differ; then no accurate model "
    "has equal means. Which gap matters is a decision about the use of the model.",
    "“Within” is a statement about the size of a gap, not a proof that the model is fair or "
    "lawful. “Inconclusive” and “not estimable” do not mean that a gap is acceptable.",
    "The true outcomes are those in the files. If they were recorded unfairly, errors are wrong.",
    "A gap is not a cause. The audit does not say why groups differ, nor that a site did wrong.",
    "Intervals cover sampling error only. They assume that a mean of so many rows is roughly "
    "normal, which a few very large values can make wrong.",
    "The numbers come from sums of rows. fedgft did not check the rows behind them.",
)
CAPTIONS = {
    "forest": "Every site's own view of the difference between the two groups that are farthest "
    "apart overall, with 95% intervals. The last row is all sites together.",
    "means": "The mean of every group over all sites, with its 95% interval.",
}


def write_report(found: Findings, *, figures: bool) -> Report:
    """Return the whole report.

    Parameters
    ----------
    found
        The results of the audit.
    figures
        Whether to draw the figures.
    """
    name, _ = found.leading()
    return Report(
        mark=MARK,
        title=found.about["title"],
        lead=write_lead(found),
        scope=write_scope(found),
        byline=write_byline({"about": found.about}),  # type: ignore[typeddict-item]
        state=found.judge(name)[0] if name in found.tolerance else "",
        answers=_list_answers(found),
        facts=_list_facts(found),
        files=list(found.about.get("files", {}).items())[:MAX_SITES],
        verdicts=list_mean_verdicts(found),
        legend=LEGEND,
        warnings=found.warnings,
        tables=list(list_mean_tables(found)),
        figures=draw_mean_figures(found) if figures else (),
        definitions=DEFINITIONS,
        limits=LIMITS,
        foot=f"Intervals: {INTERVAL}; 95% throughout.",
    )


# Sentences


def write_lead(found: Findings) -> str:
    """Return one sentence: the gap that matters most, its interval, and its tolerance."""
    name, title = found.leading()
    results = found.results[title]
    sites = found.sites
    where = f"Across the {len(sites):,} sites" if len(sites) > 1 else "At the only site"
    where += f", {sites[0]}" if len(sites) == 1 and sites[0] else ""
    gap = results.gaps[name]
    if gap.pair is None:
        return f"{where}, no gap is estimable, which does not mean that the model is fair."
    text = f"{where}, the {describe_means(results, name)}"
    if name not in found.tolerance:
        return f"{text}. No tolerance is stated."
    end = {
        "exceeds": "more than the tolerance of",
        "within": "less than the tolerance of",
        "inconclusive": "which may be above or below the tolerance of",
        "not estimable": "which cannot be compared with the tolerance of",
    }
    limit = format_exactly(found.tolerance[name])
    return f"{text}, {end[judge_gap(gap, found.tolerance[name])]} {limit}."


def describe_means(results: RegressionResults, name: str) -> str:
    """Return ``mean prediction is 52 for women and 49 for men: a gap of 3 (95% ...)``."""
    gap = results.gaps[name]
    means = results.means[name]
    listed = " and ".join(
        f"{format_limits(means[g].value, means[g].low, means[g].high)[0]} for {name_group(g)}"
        for g in gap.pair or ()
    )
    return f"{gap.title} is {listed}: a gap of {format_estimate(gap.estimable())}"


def format_estimate(found: Estimate) -> str:
    """Return a number with its interval where it has one."""
    value, limits = format_limits(found.value, found.low, found.high)
    return value if limits == DASH else f"{value} (95% interval {limits})"


def write_scope(found: Findings) -> str:
    """Return one sentence that says what was audited."""
    sites = len(found.sites)
    return (
        f"{found.sums.rows():,} rows of {sites:,} site{'s' * (sites != 1)}, groups by "
        f"{found.groups}; numbers have the unit of the outcome."
    )


def list_mean_verdicts(found: Findings) -> list[Verdict]:
    """Return one verdict per metric; without a tolerance, it states the gap and judges nothing."""
    return [_judge(found, name) for name in METRICS]


def _judge(found: Findings, name: str) -> Verdict:
    """Return the verdict on one metric."""
    title = METRICS[name].title
    if name not in found.tolerance:
        results = found.results[found.groups]
        gap = results.gaps[name]
        if gap.pair is None:
            return Verdict(None, f"{title.capitalize()}: no gap is estimable.")
        text = describe_means(results, name)
        return Verdict(None, f"{text[0].upper()}{text[1:]}; no tolerance is stated.")
    state, view = found.judge(name)
    results = found.results[view]
    verb = {"within": "is within", "exceeds": "exceeds", "inconclusive": "is inconclusive at"}
    limit = format_exactly(found.tolerance[name])
    start = f"The gap in {title} " + (
        f"{verb[state]} {limit}" if state in verb else "is not estimable"
    )
    start += f", by {view}" if len(found.results) > 1 else ""
    if results.gaps[name].pair is None:
        reason = "fewer than two groups have sums, which does not mean that it is fair"
        return Verdict(PASSES[state], f"{start}: {reason}.", state)
    text = f"{start}: the {describe_means(results, name)}."
    if results.gaps[name].value is None:
        text += " Not all groups can be compared: some have no sums."
    return Verdict(PASSES[state], text, state)


def _list_answers(found: Findings) -> list[tuple[str, str]]:
    """Return questions and answers for readers without statistics."""
    about = found.about
    model = " ".join(filter(None, (about.get("model"), about.get("version"))))
    sites = f"{len(found.sites):,} sites" if len(found.sites) > 1 else "one site"
    what = f"The predictions of {model or 'a model that is not named'}, on {found.sums.rows():,} "
    what += f"rows of {sites} ({_join(found.sites)}), compared between groups by {found.groups}."
    if "purpose" in about:
        what += f" Purpose: {about['purpose']}."
    answers = [("What was audited?", what), ("What was found?", write_lead(found))]
    if len(found.sites) > 1:
        answers.append(("Where does the gap come from?", _answer_where(found)))
    return [*answers, ("What is uncertain?", _answer_uncertain(found))]


def _answer_where(found: Findings) -> str:
    """Return how much of the leading gap lies inside the sites, and which site adds most."""
    name, title = found.leading()
    results = found.results[title]
    parts = {site: each.gaps[name] for site, each in results.sites.items()}
    known = {site: part for site, part in parts.items() if part.contribution is not None}
    if not known:
        return "This is not known, because there is no gap."
    own = sum(part.own or 0.0 for part in known.values())
    mix = sum(part.mix or 0.0 for part in known.values())
    largest = max(known, key=lambda site: abs(known[site].contribution or 0.0))
    amount = format_number(known[largest].contribution)
    return (
        f"Of the gap in {METRICS[name].title}, {format_number(own)} comes from differences inside "
        f"the sites, and {format_number(mix)} from how the groups are spread over the sites. The "
        f"site that moves it most is {largest or 'the one without a name'}, by {amount}."
    )


def _answer_uncertain(found: Findings) -> str:
    """Return the interval of the headline's gap, and the number of caveats."""
    name, title = found.leading()
    gap = found.results[title].gaps[name].estimable()
    parts = ["The size of the gap: there are too few rows for an interval."]
    if gap.low is not None and gap.high is not None:
        limits = format_limits(gap.value, gap.low, gap.high)[1]
        parts = [f"The data fit a true gap of {limits} (95% interval)."]
    if caveats := len(found.warnings):
        parts.append(f"{caveats} caveat{'s' * (caveats > 1)} below.")
    return " ".join([*parts, "The audit does not say why the groups differ."])


def _list_facts(found: Findings) -> list[tuple[str, str]]:
    """Return names and texts about the audit: who, what, when, and from which data."""
    known = found.about.get
    spec = found.sums.require_spec()
    rows = count_rows(found.sums)
    gaps = ((METRICS[n].title, format_exactly(gap)) for n, gap in found.tolerance.items())
    unit = f": {known('outcome')}" if known("outcome") else ""
    column = f"column “{printable(spec.target)}”" if spec.target else "column not stated"
    predicted = f"column “{printable(spec.prediction)}”" if spec.prediction else "column not stated"
    facts = [
        ("Model", " ".join(filter(None, (known("model"), known("version")))) or "not stated"),
        ("Prepared by", known("prepared_by") or "not stated"),
        ("Date", known("date") or "not stated"),
        ("Purpose", known("purpose") or "not stated"),
        ("True outcome", column + unit),
        ("Prediction", predicted),
        ("Values", describe_clip(spec.clip)),
        ("Rows", f"{rows['counted']:,}"),
        ("Sites", f"{len(found.sites):,}: {_join(found.sites)}"),
        ("Groups", f"{found.groups}: {_join(found.views[-1].groups)}"),
        ("Tolerance", "; ".join(f"{title} {gap}" for title, gap in gaps) or "nobody stated one"),
    ]
    weights = [("Weights", f"column “{printable(spec.weight)}”")] if spec.weight else []
    period = [("Period", str(known("period")))] if known("period") else []
    return [*facts[:3], *period, *facts[3:7], *weights, *facts[7:]]


def _join(names: Sequence[str]) -> str:
    """Return up to `MAX_NAMES` names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(name or "(no name)" for name in names[:MAX_NAMES]) + more


# Tables


def list_mean_tables(found: Findings, *, short: bool = False) -> Iterator[Table]:
    """Yield the tables of the report, or a `short` selection for a terminal."""
    several = len(found.sites) > 1
    titles = list(found.results) if short else list(found.results)[::-1]
    for title in titles:
        table = _gap_table(found, title)
        yield _choose(table, SHORT_GAP_COLUMNS if several else SHORT_GAP_COLUMNS[:-1], short)
        if not short:
            yield _mean_table(found.results[title], title)
            yield _fit_table(found.results[title], title)
    if short:
        yield _mean_table(found.results[found.groups], found.groups)
        yield _fit_table(found.results[found.groups], found.groups)
    else:
        yield from _reference_tables(found)
    if several:
        yield _site_table(found, MAX_SITES_ON_TERMINAL if short else MAX_SITES)


def _choose(table: Table, names: Sequence[str], short: bool) -> Table:
    """Return the table with these columns only, and narrow cells, if it is for a terminal."""
    if not short:
        return table
    kept = [table.header.index(name) for name in names]
    rows = tuple(
        tuple(row[i].partition(" (")[0] if i >= table.stubs else row[i] for i in kept)
        for row in table.rows
    )
    return Table(table.title, tuple(names), rows, sum(i < table.stubs for i in kept))


def _gap_table(found: Findings, title: str) -> Table:
    """Return the table of the gaps of one view, with one row per metric."""
    header = ("metric", "verdict", "farthest apart", "gap", "95% interval", "tolerance")
    header += ("standardized", "ratio", "average within sites")
    gaps = found.results[title].gaps
    rows = tuple(_gap_row(found, gap) for gap in gaps.values())
    notes = ["Standardized: the gap divided by the standard deviation within groups."]
    if any(gap.value is None and gap.pair for gap in gaps.values()):
        notes.append("*: among the groups that have sums; over all groups it is not estimable.")
    return Table(f"Gaps by {title}", header, rows, 3, tuple(notes))


def _gap_row(found: Findings, gap: MeanGap) -> tuple[str, ...]:
    """Return the cells of one metric; a star marks a gap that covers only some of the groups."""
    numbers = gap.estimable()
    value, limits = format_limits(numbers.value, numbers.low, numbers.high)
    if numbers.value is None:
        value = "not estimable"
    star = "*" if gap.value is None and gap.pair else ""
    limit = found.tolerance.get(gap.metric)
    return (
        gap.title,
        DASH if limit is None else judge_gap(gap, limit),
        " / ".join(gap.pair or (DASH,)),
        value + star,
        limits,
        format_exactly(limit),
        _format_cell(gap.standardized),
        _format_cell(gap.ratio),
        _format_cell(gap.within),
    )


def _format_cell(found: Estimate) -> str:
    """Return ``12.3 (9.8 to 15.4)``, or a dash."""
    value, limits = format_limits(found.value, found.low, found.high)
    return value if limits == DASH else f"{value} ({limits})"


def _mean_table(results: RegressionResults, title: str) -> Table:
    """Return the table of the means of one view: a row per metric and group."""
    rows = []
    for name, groups in results.means.items():
        for group, mean in groups.items():
            value, limits = format_limits(mean.value, mean.low, mean.high)
            value = "not estimable" if mean.value is None else value
            rows.append((METRICS[name].title, group, value, limits, f"{mean.rows:,}"))
    header = ("mean", "group", "value", "95% interval", "rows")
    notes = ("Mean error: outcome minus prediction.",)
    return Table(f"Means by {title}", header, tuple(rows), 2, notes)


def _fit_table(results: RegressionResults, title: str) -> Table:
    """Return the table of how well predictions fit, by group."""
    rows = tuple(
        (
            group,
            _format_cell(fit.rmse),
            DASH if fit.r_squared is None else f"{fit.r_squared:.3f}",
            format_number(fit.deviation),
        )
        for group, fit in results.fit.items()
    )
    header = ("group", "root mean squared error", "R²", "standard deviation of the outcome")
    notes = ("R² has no interval. It is small where a group's outcomes hardly differ.",)
    return Table(f"Fit by {title}", header, rows, 1, notes)


def _reference_tables(found: Findings) -> Iterator[Table]:
    """Yield a table for each view with a reference group: each group minus it."""
    for title, results in found.results.items():
        rows = tuple(
            (METRICS[name].title, group, *format_limits(each.value, each.low, each.high))
            for name, groups in results.against_reference.items()
            for group, each in groups.items()
        )
        if rows:
            caption = f"{title}: every group against {results.reference}"
            header = ("metric", "group", "difference", "95% interval")
            yield Table(caption, header, rows, 2, ("Each interval holds for itself.",))


def _site_table(found: Findings, most: int) -> Table:
    """Return the table of the sites that move the leading metric's gap most."""
    name, title = found.leading()
    results = found.results[title]
    ranked = rank_mean_sites(results.sites, name)
    rows = []
    for site in ranked[:most]:
        gap = results.sites[site].gaps[name]
        numbers = (gap.contribution, gap.own, gap.mix)
        cells = (f"{results.sites[site].rows:,}", _format_cell(gap.local))
        rows.append((site or "(no name)", *cells, *map(format_number, numbers)))
    header = ("site", "rows", "gap at the site", "adds to the overall gap")
    header += ("by its own gap", "by its mix of groups")
    pair = " minus ".join(map(name_group, results.gaps[name].pair or (DASH,)))
    notes = [f"{METRICS[name].title.capitalize()} by {title}, {pair}."]
    if len(ranked) > most:
        notes.append(f"The {most} that move the gap most, of {len(ranked):,} sites.")
    return Table("Sites", header, tuple(rows), 1, tuple(notes))


def rank_mean_sites(sites: Mapping[str, Any], name: str) -> list[str]:
    """Return the names of the sites, those that move the gap of a metric most first."""
    return sorted(sites, key=lambda site: -abs(sites[site].gaps[name].contribution or 0.0))


# Charts


def draw_mean_figures(found: Findings) -> list[Figure]:
    """Return the charts: the gap at every site, if there are several, and every group."""
    kinds = [("means", "Every group", _mean_rows(found))]
    if len(found.sites) > 1:
        kinds.insert(0, ("forest", "The gap at every site", _forest_rows(found)))
    figures = []
    for kind, title, rows in kinds:
        if rows:
            caption = CAPTIONS[kind]
            described = {"description": f"{title}. {caption}"}
            spec = described | _draw_points(found, rows, is_gap=kind == "forest")
            figures.append(Figure(kind, title, caption, spec))
    return figures


def _chart_row(metric: str, name: str, n: int, kind: str, found: Any) -> Spec:
    row = {"metric": metric, "name": name, "n": n, "kind": kind}
    return row | {"gap": found.value, "low": found.low, "high": found.high}


def _forest_rows(found: Findings) -> list[Spec]:
    """Return the difference at each site and overall, by metric, between the groups of its pair."""
    results = found.results[found.groups]
    total = "all sites" if "all sites" not in results.sites else "(all sites)"
    rows = []
    for name, gap in results.gaps.items():
        if gap.pair is None:
            continue
        for site in rank_mean_sites(results.sites, found.leading()[0])[:MAX_SITES]:
            each = results.sites[site]
            rows.append(_chart_row(name, site, each.rows, "site", each.gaps[name].local))
        n = sum(results.means[name][group].rows for group in gap.pair)
        rows.append(_chart_row(name, total, n, "all", gap.estimable()))
    return rows


def _mean_rows(found: Findings) -> list[Spec]:
    """Return the mean of every group, by metric."""
    means = found.results[found.groups].means
    return [
        _chart_row(name, group, mean.rows, "group", mean)
        for name, groups in means.items()
        for group, mean in groups.items()
    ]


def _draw_points(found: Findings, rows: list[Spec], *, is_gap: bool) -> Spec:
    """Return the chart "forest" of templates/charts.json with these rows, and without points.

    Parameters
    ----------
    found
        The results of the audit.
    rows
        The data of all metrics.
    is_gap
        Whether the chart shows gaps, with lines at zero and at the tolerance.
    """
    spec = fill_chart("forest", rows)
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    titles = {name: METRICS[name].title for name in metrics}
    leading = found.leading()[0]
    menu = spec["params"][0]
    menu["value"] = leading if leading in metrics else metrics[0]
    menu["bind"] |= {"options": metrics, "labels": list(titles.values())}
    known = {name: found.tolerance.get(name, 0.0) for name in metrics}
    by_metric = {"metric_title": {n: t.capitalize() for n, t in titles.items()}, "tolerance": known}
    for param in spec["params"][1:]:
        param["expr"] = f"{json.dumps(by_metric[param['name']])}[metric]"
    if not is_gap:  # no lines at zero and at the tolerance, and notes at the left edge
        spec["layer"] = spec["layer"][2:]
        spec["layer"][-1]["encoding"]["x"] = {"value": 0}
    names = list(dict.fromkeys(row["name"] for row in rows))
    spec["height"] = 24 * max(1, len(names))
    axis = (
        "difference, in the unit of the outcome" if is_gap else "mean, in the unit of the outcome"
    )
    for layer in spec["layer"]:
        encoding = layer["encoding"]
        if "y" in encoding:
            encoding["y"]["sort"] = names
        if "title" in encoding["x"]:
            encoding["x"] |= {"title": axis, "scale": {"zero": is_gap}}
        for part in encoding.get("tooltip", ()):
            part |= {"format": ",.6~g"} if part.get("format") == ".1f" else {}
        if "text" in encoding and "value" in encoding["text"]:
            encoding["text"]["value"] = "  not estimable: no sums of a group here"
    return spec

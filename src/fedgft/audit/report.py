"""`audit`: from the sums of all sites to a report, as numbers, tables, Markdown and a web page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgft.audit.between_sites import check_bootstrap, estimate_metric
from fedgft.audit.charts import draw_figures
from fedgft.audit.findings import (
    MAX_SITES,
    VERDICT_METRICS,
    describe_contributions,
    leading_metric,
    list_verdicts,
    list_warnings,
    rank_sites,
)
from fedgft.audit.rates import (
    Pool,
    View,
    estimate_difference,
    estimate_rates,
    find_reference_group,
    list_views,
    pool_sites,
)
from fedgft.audit.summary import (
    GapInterval,
    GapSummary,
    GroupRate,
    MetricSummary,
    Number,
    ReferenceComparison,
    Summary,
    ViewSummary,
    estimable_gap,
    summarize,
    to_json,
    views_of,
)
from fedgft.audit.thresholds import (
    COARSE_HISTOGRAM_WARNING,
    GROUP_THRESHOLDS_WARNING,
    adjust_thresholds,
)
from fedgft.errors import FedgftError
from fedgft.formatting import (
    DASH,
    Report,
    Table,
    Verdict,
    format_interval,
    format_percent,
    format_points,
)
from fedgft.metrics import CATALOG, get_metric
from fedgft.sums import SiteSums, merge
from fedgft.validation import check_integer, check_name_list, format_value

MARK = "<!-- fedgft audit -->"  # the first line of report.md
OVER_ROWS = "Wilson (rates), Newcombe and Tukey (differences), Donner & Zou (ratios)"
OVER_SITES = "rates, gaps and ratios: bootstrap over sites, {} draws; all else over rows"
LEGEND = (
    "no gap beyond chance, which does not prove there is none",
    "a gap beyond chance",
    "cannot be said",
)
MAX_SITES_ON_TERMINAL = 10
COLUMNS_NOTE = (
    "Gaps in percentage points. Within sites: the gap a person sees who stays within sites "
    "(Mantel-Haenszel). TV and DH: how differently the groups are spread over the sites. Bound: "
    "with α the largest local gap, the gap is at most α(1 − TV) + TV."
)


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of `audit`: a summary, and the views it was made from.

    Parameters
    ----------
    summary
        All results: see `fedgft.audit.summary.Summary`.
    pool
        The sums of all sites.
    views
        The groups by each attribute and by their intersections, all attributes together last.
    """

    summary: Summary
    pool: Pool
    views: tuple[View, ...]

    @property
    def view(self) -> View:
        """The view by all attributes together."""
        return self.views[-1]

    @property
    def warnings(self) -> list[str]:
        """What a reader should know before the numbers."""
        return self.summary["warnings"]

    def difference(self, metric: str, first: str, second: str) -> tuple[float, float, float]:
        """rate(first) - rate(second) and its 95% interval, for a metric with one condition."""
        rates = estimate_rates(get_metric(metric), self.view, "hard")
        if len(rates.rate) != 1:
            raise FedgftError(f"{metric} compares several rates; name one with a single one")
        one, other = (rates[0, self.view.index(name)] for name in (first, second))
        value, low, high = (float(x) for x in estimate_difference(one, other))
        return value, low, high

    def lead(self) -> str:
        """What was audited, in one sentence."""
        about = "About " if self.summary["privacy"]["approximate"] else ""
        sites = len(self.summary["sites"])
        return (
            f"{about}{self.summary['rows']['counted']:,.0f} rows of {sites:,} "
            f"site{'s' * (sites != 1)}, groups by {self.summary['groups']}; "
            f"{format_percent(self.summary['accuracy']['rate'])} of decisions are right. All gaps "
            "are those of decisions, not of scores."
        )

    def verdict(self) -> list[Verdict]:
        """One sentence per metric: True if there is no gap beyond chance."""
        return list_verdicts(self.summary)

    def tables(self) -> list[Table]:
        """The tables for a terminal; the report has more."""
        return list(list_tables(self.summary, short=True))

    def report(self, *, figures: bool = False) -> Report:
        """The whole report; drawing the figures takes time."""
        return Report(
            mark=MARK,
            title="Fairness audit",
            lead=self.lead(),
            verdicts=self.verdict(),
            legend=LEGEND,
            warnings=self.warnings,
            tables=list(list_tables(self.summary)),
            figures=draw_figures(self.summary, self.view) if figures else (),
            foot=f"Intervals: {self.summary['interval']}; 95% throughout.",
        )

    def to_dict(self) -> Summary:
        """All results as values that JSON can hold."""
        return self.summary

    def to_json(self) -> str:
        """The text of audit.json."""
        return to_json(self.summary)

    def to_markdown(self) -> str:
        """The text of report.md."""
        return self.report().to_markdown()

    def to_html(self) -> str:
        """The text of report.html: one page that needs no network and no other file."""
        return self.report(figures=True).to_html()


def audit(
    sums: SiteSums | Iterable[SiteSums],
    *,
    reference_groups: Sequence[str] = (),
    bootstrap: int = 0,
    adjust_to: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Audit:
    """Measure all metrics over all sites and site by site, from sums alone.

    Parameters
    ----------
    sums
        The sums of the sites, from `measure` or `read_sums`.
    reference_groups
        Groups to compare all others with: ``["White"]`` or ``["race=White", "sex=Male"]``.
    bootstrap
        The number of draws of sites, for intervals over sites instead of rows; 0: over rows.
    adjust_to
        The largest gaps to allow, by metric, such as ``{"sp": 0.02}``: look for thresholds by group
        that meet them.
    seed
        The seed of the bootstrap.

    >>> from fedgft.audit import measure
    >>> site = measure([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> audit(site).to_dict()["metrics"]["sp"]["gap"]
    0.5
    """
    if isinstance(sums, str | Path):
        raise FedgftError(f"audit takes sums, not a path: read_sums({str(sums)!r})")
    if not isinstance(sums, Iterable | SiteSums):
        raise FedgftError(f"sums must be Sums or a list of them, not {format_value(sums)}")
    if isinstance(reference_groups, Mapping):
        raise FedgftError(
            f"reference_groups must be a list of names, not {format_value(reference_groups)}"
        )
    if adjust_to is not None and not isinstance(adjust_to, Mapping):
        raise FedgftError(f"adjust_to must be like {{'sp': 0.02}}, not {format_value(adjust_to)}")
    references = check_name_list("reference_groups", reference_groups)
    draws = check_integer("bootstrap", bootstrap, least=0)
    seed = check_integer("seed", seed, least=0)
    pool = pool_sites(sums if isinstance(sums, SiteSums) else merge(sums))
    if draws:
        check_bootstrap(pool)
    views = list_views(pool)
    _check_references(references, views)
    estimates = [
        {name: estimate_metric(m, view, draws=draws, seed=seed) for name, m in CATALOG.items()}
        for view in views
    ]
    adjusted = [
        adjust_thresholds(get_metric(name), views[-1], gap)
        for name, gap in (adjust_to or {}).items()
    ]
    warnings = list(list_warnings(pool, views, estimates, draws=draws))
    if adjusted:
        warnings.append(GROUP_THRESHOLDS_WARNING)
        if views[-1].blur is not None:
            warnings.append(COARSE_HISTOGRAM_WARNING)
    summary = summarize(
        pool,
        views,
        estimates,
        references=references,
        interval=OVER_SITES.format(draws) if draws else OVER_ROWS,
        adjusted=adjusted,
        warnings=warnings,
    )
    return Audit(summary, pool, views)


def _check_references(references: Sequence[str], views: Sequence[View]) -> None:
    """Raise an error for a reference that names a group of no view."""
    for name in references:
        if all(find_reference_group(view, [name]) is None for view in views):
            known = [group for view in views for group in view.groups]
            raise FedgftError(
                f"`reference_groups` {name}: no such group; there are: {', '.join(known[:12])}"
            )


def list_tables(summary: Summary, *, short: bool = False) -> Iterator[Table]:
    """The tables of the report, or a `short` selection for a terminal.

    The report begins with the view by all attributes and has the rates of every view. The terminal
    gets the gaps of every view, but only the last rates and the sites that move the gap most.
    """
    groups = summary["groups"]
    if short:
        yield from (_gap_table(view, title) for title, view in views_of(summary).items())
        yield _rate_table(summary, groups)
    else:
        gaps = _gap_table(summary, groups)
        yield replace(gaps, notes=(COLUMNS_NOTE, *gaps.notes))
        yield _rate_table(summary, groups)
        for title, view in summary["attributes"].items():
            yield _gap_table(view, title)
            yield _rate_table(view, title)
    yield from _reference_tables(summary)
    yield _site_table(summary, MAX_SITES_ON_TERMINAL if short else MAX_SITES)
    yield from _threshold_tables(summary)
    if not short:
        yield from _area_tables(summary)


def _gap_table(view: ViewSummary, title: str) -> Table:
    """The gaps of one view in points, with their sites: one row per metric.

    The columns "within sites", TV, bound and DH are explained in `COLUMNS_NOTE`.
    """
    interval = "95% interval"
    header = ("metric", "farthest apart", "gap", interval, "ratio", interval)
    header += ("within sites", "TV", "bound", "DH")
    rows = tuple(_gap_row(name, found, view) for name, found in view["metrics"].items())
    notes = ()
    if any("*" in row[2] for row in rows):
        notes = ("*: among the groups that have a rate; over all groups it is not estimable.",)
    return Table(f"Gaps by {title}", header, rows, 2, notes)


def _gap_row(name: str, found: MetricSummary, view: ViewSummary) -> tuple[str, ...]:
    """The cells of one metric; a star marks a gap among some of the groups only.

    The heterogeneity DH of a proper metric is infinite if no site has both groups; a metric that is
    not proper has none.
    """
    numbers = estimable_gap(found)
    cells = ["not estimable", DASH, DASH, DASH]
    if numbers is not None:
        cells = [format_points(numbers["gap"]), *_interval_cells(numbers)]
        cells[0] += "*" if found["gap"] is None else ""
    heterogeneity = view["heterogeneity"][name]
    infinite = heterogeneity is None and view["tv"][name] is not None and CATALOG[name].proper()
    return (
        CATALOG[name].title,
        " / ".join(found["pair"] or (DASH,)),
        *cells,
        _format_gap_cell(view["within"][name]),
        _format_short(view["tv"][name]),
        format_points(view["bound"][name]),
        "∞" if infinite else _format_short(heterogeneity),
    )


def _rate_table(view: ViewSummary, title: str) -> Table:
    """The rates of one view in per cent: one row per group, one column per metric.

    Metrics of several conditions have no single rate and are left out, unless all metrics have
    several (more than two classes): then the rates are those of the condition of the gap.
    """
    metrics = view["metrics"]
    single = [name for name, found in metrics.items() if "conditions" not in found]
    shown_metrics = single or list(metrics)
    rows = tuple(
        (
            group,
            f"{accuracy['n']:,.0f}",
            *(_format_rate_cell(metrics[name]["groups"][group]) for name in shown_metrics),
        )
        for group, accuracy in metrics["acc"]["groups"].items()
    )
    header = ("group", "rows", *(CATALOG[name].title for name in shown_metrics))
    return Table(f"Rates by {title}, per cent", header, rows, 1)


def _reference_tables(summary: Summary) -> Iterator[Table]:
    """For each view with a reference group, every group against it."""
    header = ("metric", "group", "difference", "95% interval", "ratio", "95% interval")
    for title, view in views_of(summary).items():
        rows = tuple(
            (
                CATALOG[name].title,
                group,
                format_points(compared["difference"]),
                *_interval_cells(compared),
            )
            for name, found in view["metrics"].items()
            for group, compared in found.get("against_reference", {}).items()
        )
        if rows:
            reference = next(iter(view["metrics"].values())).get("reference")
            caption = f"{title}: every group against {reference}"
            yield Table(caption, header, rows, 2, ("Each interval holds for itself.",))


def _site_table(summary: Summary, max_sites: int) -> Table:
    """The sites that move the gap of the leading metric most, and what they add to it.

    The notes below name the sites that cause the gap.
    """
    metric = leading_metric(summary)
    known = [n for n in VERDICT_METRICS if summary["metrics"][n]["pair"] is not None]
    sites = rank_sites(summary, metric)
    rows = []
    for name in sites[:max_sites]:
        site = summary["sites"][name]
        local = site["local"][metric]
        own = (format_points(site["gap"][n], unknown="not estimable") for n in known)
        added = format_points(site["contribution"][metric])
        rows.append((name, f"{site['n']:,.0f}", _format_gap_cell(local), added, *own))
    header = ("site", "rows", f"local gap, {CATALOG[metric].title}", "adds to the global gap")
    header += tuple(f"own gap, {CATALOG[n].title}" for n in known)
    pair = " minus ".join(summary["metrics"][metric]["pair"] or ())
    notes = [
        f"Rows: those with a recorded group. Local gap: {pair or DASH}, points. A site's own "
        "gap is the largest between the groups it has.",
        *describe_contributions(summary, metric),
    ]
    if len(sites) > max_sites:
        notes.append(f"The {max_sites} that move the gap most, of {len(sites):,} sites.")
    return Table("Sites", header, tuple(rows), 1, tuple(notes))


def _threshold_tables(summary: Summary) -> Iterator[Table]:
    """Thresholds by group, for each metric that was asked for."""
    for found in summary["adjusted"]:
        asked = f"gap at most {format_points(found['tolerance'])} points"
        met = asked if found["feasible"] else f"the smallest gap there is (asked: {asked})"
        notes = [
            f"Gap {format_points(found['gap_before'])} → {format_points(found['gap'])} points, "
            f"accuracy {format_percent(found['accuracy_before'])} → "
            f"{format_percent(found['accuracy'])}."
        ]
        if found["reason"]:
            notes.append(f"Not met: {found['reason']}.")
        yield Table(
            f"Thresholds by group for {get_metric(found['metric']).title}: {met}",
            ("group", "threshold"),
            tuple((g, "above 1" if t > 1 else f"{t:g}") for g, t in found["thresholds"].items()),
            1,
            tuple(notes),
        )


def _area_tables(summary: Summary) -> Iterator[Table]:
    """Areas under the ROC curves, where there are scores."""
    rows = tuple(
        (
            group,
            name,
            DASH if area["auc"] is None else f"{area['auc']:.3f} ± {area['bin_error']:.3f}",
        )
        for name, groups in (summary["auc"] or {}).items()
        for group, area in groups.items()
    )
    if rows:
        note = "±: what the width of the bins leaves open, not sampling."
        yield Table("Area under the ROC curve", ("group", "class", "area"), rows, 2, (note,))


def _format_rate_cell(found: GroupRate) -> str:
    """``12.3 (9.8 to 15.4)``, in per cent; with the number of rows if there is no interval."""
    if found["rate"] is None:
        return f"not estimable (n={found['n']:,.0f})"
    if found["low"] is None:
        return f"{format_points(found['rate'])} (n={found['n']:,.0f}: too few for an interval)"
    return f"{format_points(found['rate'])} ({format_interval(found['low'], found['high'])})"


def _format_gap_cell(found: GapInterval) -> str:
    """``12.3 (9.8 to 15.4)``, in points."""
    if found["gap"] is None:
        return "not estimable"
    limits = format_interval(found["low"], found["high"])
    return f"{format_points(found['gap'])} ({'no interval' if limits == DASH else limits})"


def _interval_cells(found: GapSummary | ReferenceComparison) -> tuple[str, str, str]:
    """The interval of a gap or difference, the ratio, and the interval of the ratio."""
    ratio = DASH if found["ratio"] is None else f"{found['ratio']:.2f}"
    ratios = format_interval(found["ratio_low"], found["ratio_high"], scale=1, digits=2)
    return format_interval(found["low"], found["high"]), ratio, ratios


def _format_short(value: Number) -> str:
    """A number that is no share, with three digits."""
    return DASH if value is None else f"{value:.3g}"

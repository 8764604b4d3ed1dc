"""`audit` makes a report from the sums of sites: an `Audit`.

An audit has tables and charts, objects and frames, and can be written as Markdown or as a web page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.auditing.about import (
    DEFINITIONS,
    LIMITS,
    add_facts,
    check_about,
    list_answers,
    list_facts,
    list_files,
    name_groups,
    write_byline,
)
from fedgft.auditing.audit_results import (
    Gap,
    Rate,
    Results,
    Site,
    make_frame,
    read_rate,
    read_results,
)
from fedgft.auditing.between_sites import check_bootstrap, estimate_metric
from fedgft.auditing.comparison import Comparison, compare
from fedgft.auditing.conditional import (
    ConditionalSummary,
    describe_reversals,
    pool_strata,
    summarize_strata,
)
from fedgft.auditing.findings import list_warnings
from fedgft.auditing.form_page import Form
from fedgft.auditing.forms import make_form
from fedgft.auditing.inputs import Sites, combine_sites
from fedgft.auditing.next_site import DEFAULT_CHANGE, NextSite
from fedgft.auditing.notebook import describe, render_in_notebook
from fedgft.auditing.ranking import Ranking
from fedgft.auditing.rates import (
    Pool,
    View,
    estimate_pair,
    estimate_rates,
    find_reference_group,
    list_views,
    pool_sites,
)
from fedgft.auditing.report_files import save_report
from fedgft.auditing.score_distributions import ScoreDistributions
from fedgft.auditing.score_tables import list_scan_tables
from fedgft.auditing.subgroup_scan import MIN_ROWS, SHOWN, Scan, scan_subgroups
from fedgft.auditing.summary import Summary, summarize, to_json, views_of
from fedgft.auditing.tables_and_charts import draw_figures, list_tables
from fedgft.auditing.thresholds import (
    COARSE_HISTOGRAM_WARNING,
    GROUP_THRESHOLDS_WARNING,
    adjust_thresholds,
)
from fedgft.auditing.verdicts import (
    LEGEND,
    check_limits,
    check_tolerance,
    find_exceeded,
    judge_metric,
    leading_verdict,
    list_states,
    list_verdicts,
    write_headline,
)
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import Report, Table, Verdict, format_percent
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.catalog import resolve_name
from fedgft.validation import (
    check_choice,
    check_integer,
    check_name_list,
    check_number,
    format_value,
)

if TYPE_CHECKING:
    from fedgft.auditing import plots
else:
    plots = LazyModule("fedgft.auditing.plots")  # an audit without a figure needs no matplotlib

OVER_ROWS = "Wilson (rates), Newcombe and Tukey (differences), Donner & Zou (ratios)"
OVER_SITES = "rates, gaps and ratios: bootstrap over sites, {} draws; all else over rows"


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """The result of `audit`: gaps, rates and sites as objects, frames, figures and reports.

    All numbers are those of decisions and are fractions. None means that a number is not estimable.

    Parameters
    ----------
    summary
        All results: see `fedgft.auditing.summary.Summary`.
    pool
        The sums of all sites.
    views
        The views by each attribute and by combinations of attributes; the view by all attributes
        together is last.

    Examples
    --------
    >>> import fedgft
    >>> found = fedgft.audit({"north": ([1, 0, 1, 0], [1, 1, 1, 0], list("ffmm"))})
    >>> found.gaps["sp"].value, found.gaps["sp"].pair, found.rates["sp"]["f"].value
    (0.5, ('f', 'm'), 1.0)
    """

    summary: Summary
    pool: Pool
    views: tuple[View, ...]

    def __repr__(self) -> str:
        return describe(self.lead(), self.verdict())

    def _repr_html_(self) -> str:
        return render_in_notebook(replace(self.report(), tables=self.tables()))

    @property
    def view(self) -> View:
        """The view by all attributes together."""
        return self.views[-1]

    @property
    def about(self) -> Mapping[str, Any]:
        """What is known about the audit: title, date, model, files, as `audit` got them."""
        return self.summary["about"]

    @property
    def tolerance(self) -> Mapping[str, float]:
        """The largest acceptable gap by the short name of the metric."""
        return self.summary["tolerance"]

    @property
    def verdicts(self) -> Mapping[str, str]:
        """The verdict by the short name of the metric, over all attributes.

        "within": the whole interval of the gap is below the tolerance; "exceeds": the whole
        interval is above it; "inconclusive": the interval contains it; "not estimable": a group
        has no rows, or too few for an interval.
        """
        return self.summary["verdicts"]

    @property
    def warnings(self) -> list[str]:
        """The warnings that a reader should see before the numbers."""
        return self.summary["warnings"]

    @cached_property
    def attributes(self) -> Mapping[str, Results]:
        """The results for the groups of each attribute and of their combinations.

        The keys are the names of attributes, such as ``"race"``, ``"sex"`` and ``"race & sex"``.
        The last entry is that of all attributes together.
        """
        return {title: read_results(view) for title, view in views_of(self.summary).items()}

    @property
    def gaps(self) -> Mapping[str, Gap]:
        """The gap of each metric by its short name, between the groups by all attributes."""
        return self.attributes[self.summary["groups"]].gaps

    @property
    def rates(self) -> Mapping[str, Mapping[str, Rate]]:
        """The rates by the short name of the metric and the name of the group.

        If a metric has several conditions, these are the rates under `Gap.condition`.
        """
        return self.attributes[self.summary["groups"]].rates

    @property
    def sites(self) -> Mapping[str, Site]:
        """The sites by name: rows, accuracy and gaps of each."""
        return self.attributes[self.summary["groups"]].sites

    @property
    def given(self) -> ConditionalSummary | None:
        """The gaps within strata, by view and metric; None if no strata were measured.

        ``audit.given["views"]["sex"]["sp"]["pooled"]`` is the gap of parity between the two sexes,
        averaged within strata. See `fedgft.auditing.conditional`.
        """
        return self.summary["given"]

    @property
    def accuracy(self) -> Rate:
        """The share of right decisions over all rows, also those whose group is not recorded."""
        return read_rate(self.summary["accuracy"])

    @property
    def next_site(self) -> NextSite:
        """What to expect at a site that did not take part, and of other mixes of today's sites.

        ``audit.next_site.gaps["sp"]["low"]`` is the lower limit of the gap in statistical parity at
        such a site.
        """
        return NextSite(**self.summary["next_site"])

    @property
    def distributions(self) -> Mapping[str, Mapping[str, ScoreDistributions]]:
        """Distances between the score distributions of groups, by attributes and class.

        The first keys are those of `attributes`, the second ones the names of classes: with two
        classes, the positive one. Empty if a site left out scores.
        """
        return self.summary["distributions"] or {}

    @property
    def ranking(self) -> Mapping[str, Mapping[str, Ranking]]:
        """Areas under ROC curves, cross-group areas and who is at the top, by the same keys."""
        return self.summary["ranking"] or {}

    def scan(self, *, min_rows: int = MIN_ROWS, shown: int = SHOWN) -> Scan:
        """Compare all subgroups by up to three attributes, with a correction for many looks.

        Parameters
        ----------
        min_rows
            The smallest number of rows that a rate is compared with.
        shown
            The largest number of subgroups, and of pairs of subgroups, to return; those with the
            largest differences that are certain.
        """
        found = scan_subgroups(self.views, min_rows=min_rows, shown=shown)
        if found is None:
            text = "a scan needs two attributes or more, and groups that are certain: see `gaps`"
            raise FedgftError(text, kind="data")
        return found

    def to_frame(
        self, table: str = "gaps", *, by: str | None = None, library: str = "polars"
    ) -> Any:
        """Return a tidy frame.

        Parameters
        ----------
        table
            ``"gaps"``: one row per metric. ``"rates"``: one row per metric and group. ``"sites"``:
            one row per metric and site.
        by
            The attribute, or the combination of attributes, whose groups are compared: a key of
            `attributes`. By default all attributes together.
        library
            ``"polars"`` or ``"pandas"``.
        """
        title = self.summary["groups"] if by is None else by
        check_choice("by", title, tuple(self.attributes))
        return make_frame(self.attributes[title], table, library)

    def plot(self, metric: str | None = None) -> Any:
        """Return a figure of matplotlib, in percentage points; `savefig` writes it.

        Parameters
        ----------
        metric
            The short name of a metric: the figure shows the rate of every group and, if there are
            several sites, the gap at each site. By default, the figure shows the gaps of all
            metrics and the noise floor.
        """
        if metric is None:
            return plots.plot_gaps(self)
        name = resolve_name(metric) if isinstance(metric, str) else metric
        check_choice("metric", name, tuple(CATALOG))
        return plots.plot_metric(self, name)

    def check(self, **limits: float) -> None:
        """Return if no gap exceeds its limit; raise a `FedgftError` of kind "data" otherwise.

        As `fedgft audit --fail-above`: a gap exceeds its limit if the lower end of its 95%
        interval does, for any attribute or combination of attributes. A gap that is not
        estimable, because a group has no row of the event or there is no interval, raises the
        error too. A gap that is inconclusive at this limit passes: see `verdicts`.

        Parameters
        ----------
        limits
            The largest gap to accept, by the short name of the metric: ``check(sp=0.05, eop=0.1)``.
        """
        exceeded = find_exceeded(self.summary, check_limits(limits))
        if exceeded:
            text = "; ".join(f"`{each.metric}` {each.reason}" for each in exceeded)
            raise FedgftError(text, kind="data")

    def compare(self, old: Any) -> Comparison:
        """Return the change from an older audit to this one.

        Parameters
        ----------
        old
            An `Audit`, or what `Audit.to_dict` returned, with the same classes and attributes.
        """
        return compare(old, self)

    def difference(self, metric: str, first: str, second: str) -> tuple[float, float, float]:
        """Return rate(first) - rate(second) and its limits (value, low, high).

        The interval is a 95% interval. The metric must have a single condition.
        """
        rates = estimate_rates(get_metric(metric), self.view, "hard")
        if len(rates.rate) != 1:
            raise FedgftError(f"{metric} compares several rates; name one with a single one")
        i, j = (self.view.index(name) for name in (first, second))
        value, low, high = (float(x) for x in estimate_pair(rates, 0, i, j))
        return value, low, high

    def form(
        self,
        name: str,
        *,
        columns: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Form:
        """Fill a form from this audit. It is no legal advice.

        Parameters
        ----------
        name
            ``"ll144"``: the numbers that New York City's Local Law 144 asks for. ``"ai-act"``: an
            annex to the technical documentation of the EU AI Act. ``"model-card"``: a model card.
        columns
            For "ll144", the columns of sex and of race or ethnicity, such as
            ``{"sex": "gender"}``. Those left out are guessed from the names of the columns.
        facts
            What only a person knows, such as ``{"distribution_date": "2026-01-05"}``. The form
            lists what is missing.
        """
        return make_form(self, name, columns=columns, facts=facts)

    def lead(self) -> str:
        """Return the headline: the gap that matters most, and its tolerance."""
        return write_headline(self.summary)

    def scope(self) -> str:
        """Return one sentence that says what was audited."""
        about = "About " if self.summary["privacy"]["approximate"] else ""
        sites = len(self.summary["sites"])
        return (
            f"{about}{self.summary['rows']['counted']:,.0f} rows of {sites:,} "
            f"site{'s' * (sites != 1)}, {name_groups(self.summary)}; "
            f"{format_percent(self.summary['accuracy']['rate'])} of decisions are right."
        )

    def verdict(self) -> list[Verdict]:
        """Return one verdict per metric; `passes` is True if the gap is within its tolerance."""
        return list_verdicts(self.summary)

    def tables(self) -> list[Table]:
        """Return the tables for a terminal; the report has more tables."""
        return list(list_tables(self.summary, short=True))

    def scan_tables(self) -> list[Table]:
        """Return the tables of `scan` for a terminal; none with a single attribute."""
        return list(list_scan_tables(self.summary, short=True))

    def report(self, *, figures: bool = False) -> Report:
        """Return the whole report, with figures if `figures` is True, which takes longer."""
        return Report(
            mark="<!-- fedgft audit -->",  # the first line of report.md
            title=self.about["title"],
            lead=self.lead(),
            scope=self.scope(),
            byline=write_byline(self.summary),
            state=judge_metric(self.summary, leading_verdict(self.summary))[0],
            answers=list_answers(self.summary),
            facts=list_facts(self.summary),
            files=list_files(self.summary),
            verdicts=self.verdict(),
            legend=LEGEND,
            warnings=self.warnings,
            tables=list(list_tables(self.summary)),
            figures=draw_figures(self.summary, self.view) if figures else (),
            definitions=DEFINITIONS,
            limits=LIMITS,
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

    def save(self, folder: str | Path) -> list[Path]:
        """Write audit.json, report.md and report.html to a folder; return their paths.

        The files are those of ``fedgft audit --out``. They are written together or not at all.

        Parameters
        ----------
        folder
            It is created if needed. Only the files of an earlier audit are replaced.
        """
        return save_report(self, folder, "audit")


def audit(
    sums: Sites,
    *,
    reference_groups: Sequence[str] = (),
    bootstrap: int = 0,
    adjust_to: Mapping[str, float] | None = None,
    tolerance: Mapping[str, float] | float | None = None,
    about: Mapping[str, Any] | None = None,
    worst_mix: float | int = DEFAULT_CHANGE,
    seed: int = 0,
    ignore_case: bool = False,
    scan: int = SHOWN,
) -> Audit:
    """Estimate all metrics over all sites and at each site, from the sums alone.

    Parameters
    ----------
    sums
        The sums of the sites, from `measure` or `read_sums`; or a mapping from the name of a site
        to its sums or to its rows: (y_true, y_pred or scores, sensitive_features), which are
        measured as by `measure` with the name of the site.
    reference_groups
        Groups to compare all others with: ``["White"]`` or ``["race=White", "sex=Male"]``.
    bootstrap
        The number of bootstrap draws of sites, for intervals over sites instead of rows. With 0,
        the intervals are over rows.
    adjust_to
        The largest gap to allow for each metric, such as ``{"sp": 0.02}``. The audit then searches
        for thresholds by group that keep the gap within it. None: no search.
    tolerance
        The largest acceptable gap, for all metrics (0.02) or by metric (``{"sp": 0.02}``). The
        verdicts compare each gap with it. The default is 0.05, which is 5 points.
    about
        What a reader must know about the audit, as texts: "title", "model", "version",
        "prepared_by", "purpose", "date" (default: today), "label" (the column of the true
        outcome), "outcome" (what a positive decision is called, such as "approved"),
        "decided_by" (who or what made the decisions), "relies_on" (what the decisions depend on
        most), "period" (of the rows), and "files", the paths of the site files, whose SHA-256 is
        stated.
    worst_mix
        The largest change of a site's share of the rows, as a fraction of the share, in the worst
        mix of today's sites: 0.2 (default) lets a site with 30% of the rows have 24% to 36%.
    seed
        The seed of the bootstrap.
    ignore_case
        Merge names of groups and classes that differ only in case or spaces, such as "Man" at one
        site and "man" at another. By default they are an error.
    scan
        With two attributes or more: the number of subgroups, and of pairs of subgroups, to list as
        those that differ most. See `Audit.scan`.

    Returns
    -------
    Audit
        The gaps, rates and sites, as objects, frames, figures and reports.

    Examples
    --------
    >>> import fedgft
    >>> y = [1, 0, 1, 0]
    >>> site = fedgft.measure(y, [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> fedgft.audit(site).gaps["sp"].value
    0.5
    >>> rows = (y, [0.9, 0.8, 0.7, 0.2], list("ffmm"))
    >>> found = fedgft.audit({"north": rows, "south": rows}, tolerance=0.1)
    >>> found.gaps["sp"].value, found.verdicts["sp"]
    (0.5, 'not estimable')
    """
    if isinstance(reference_groups, Mapping):
        problem = f"reference_groups must be a list of names, not {format_value(reference_groups)}"
        raise FedgftError(problem)
    if adjust_to is not None and not isinstance(adjust_to, Mapping):
        raise FedgftError(f"adjust_to must be like {{'sp': 0.02}}, not {format_value(adjust_to)}")
    references = check_name_list("reference_groups", reference_groups)
    draws = check_integer("bootstrap", bootstrap, least=0)
    seed = check_integer("seed", seed, least=0)
    scan = check_integer("scan", scan, least=0)
    limits = check_tolerance(tolerance)
    change = check_number("worst_mix", worst_mix)
    if not 0 <= change < 1:
        raise FedgftError(f"`worst_mix` must be 0 or more and below 1, got {change:g}")
    described = check_about(about)
    combined = combine_sites(sums, ignore_case=ignore_case)
    pool = pool_sites(combined)
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
    warnings = [*combined.notes, *list_warnings(pool, views, estimates, draws=draws)]
    strata = pool_strata(pool)
    given = None if strata is None else summarize_strata(strata, views, estimates)
    if given is not None:
        warnings += describe_reversals(given)
    if adjusted:
        warnings.append(GROUP_THRESHOLDS_WARNING)
        if views[-1].bin_error is not None:
            warnings.append(COARSE_HISTOGRAM_WARNING)
    summary = summarize(
        pool,
        views,
        estimates,
        references=references,
        interval=OVER_SITES.format(draws) if draws else OVER_ROWS,
        given=given,
        adjusted=adjusted,
        warnings=warnings,
        about=add_facts(described, pool.spec),
        tolerance=limits.gaps,
        stated=limits.stated,
        largest_change=change,
        scan=scan,
    )
    summary["verdicts"].update(list_states(summary))
    return Audit(summary, pool, views)


def _check_references(references: Sequence[str], views: Sequence[View]) -> None:
    """Raise an error if a reference is not the name of a group in any view."""
    for name in references:
        if all(find_reference_group(view, [name]) is None for view in views):
            known = ", ".join([group for view in views for group in view.groups][:12])
            raise FedgftError(f"`reference_groups` {name}: no such group; there are: {known}")

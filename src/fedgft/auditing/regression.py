"""`audit_regression` makes a report from the sums of sites: a `RegressionAudit`.

It is the audit of models that predict numbers, such as prices, pay or times. Its objects, tables,
files and page have the form of those of `fedgft.auditing.report`, for decisions.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from fedgft.auditing.about import check_about
from fedgft.auditing.audit_results import LIBRARIES, Estimate, convert_frame
from fedgft.auditing.notebook import describe, render_in_notebook
from fedgft.auditing.rates import find_reference_group
from fedgft.auditing.regression_estimates import (
    METRICS,
    Fit,
    MeanEstimate,
    MeanGap,
    RegressionResults,
    SiteMeans,
    estimate_regression,
    list_regression_views,
    to_estimate,
)
from fedgft.auditing.regression_findings import (
    Findings,
    check_mean_gaps,
    find_exceeded_gaps,
    list_regression_warnings,
    resolve_metric,
)
from fedgft.auditing.regression_measurement import measure_regression
from fedgft.auditing.regression_report import (
    list_mean_tables,
    list_mean_verdicts,
    write_lead,
    write_report,
    write_scope,
)
from fedgft.auditing.report_files import save_report
from fedgft.auditing.site_file import MAX_BYTES
from fedgft.errors import FedgftError
from fedgft.formatting import Report, Table, Verdict, printable
from fedgft.metrics.mean_intervals import difference_limits
from fedgft.site_sums import SiteSums, Spellings
from fedgft.site_sums.dates import combine_versions, describe_dates
from fedgft.site_sums.regression_json import PREFIX
from fedgft.site_sums.regression_sums import (
    RegressionSpec,
    RegressionSums,
    merge_regression,
    unify_spellings,
)
from fedgft.store import expand_user, read_text_file
from fedgft.validation import check_choice, check_instance, check_name_list, format_value

if TYPE_CHECKING:
    RegressionSites = (
        RegressionSums
        | Iterable[RegressionSums]
        | Mapping[str, RegressionSums | tuple[Any, Any, Any]]
    )
else:  # `_combine` checks what it gets, and its errors name the site
    RegressionSites = Any

ROWS = "(y_true, y_pred, sensitive_features)"
NUMBERS = {"value": pl.Float64, "low": pl.Float64, "high": pl.Float64}
COLUMNS: dict[str, dict[str, Any]] = {
    "gaps": {
        "metric": pl.String,
        "title": pl.String,
        **NUMBERS,
        "standardized": pl.Float64,
        "ratio": pl.Float64,
        "within": pl.Float64,
        "highest_group": pl.String,
        "lowest_group": pl.String,
    },
    "means": {"metric": pl.String, "group": pl.String, **NUMBERS, "rows": pl.Int64},
    "sites": {
        "metric": pl.String,
        "site": pl.String,
        "rows": pl.Int64,
        "local": pl.Float64,
        "local_low": pl.Float64,
        "local_high": pl.Float64,
        "contribution": pl.Float64,
    },
}
"The columns of each table."


@dataclass(frozen=True, eq=False, repr=False)
class RegressionAudit:
    """The result of `audit_regression`: gaps, means and sites as objects, frames and reports.

    All numbers have the unit of the outcome; those of squared errors have its square. None means
    that a number is not estimable.

    Parameters
    ----------
    found
        All results.

    Examples
    --------
    >>> from fedgft.auditing import audit_regression
    >>> pay, predicted = [30.0, 50.0] * 20, [32.0, 47.0] * 20
    >>> found = audit_regression({"north": (pay, predicted, ["f", "m"] * 20)})
    >>> found.gaps["mean-prediction"].value, found.gaps["mean-prediction"].pair
    (15.0, ('m', 'f'))
    >>> found.means["mean-error"]["f"].value
    -2.0
    """

    found: Findings

    def __repr__(self) -> str:
        return describe(self.lead(), self.verdict())

    def _repr_html_(self) -> str:
        return render_in_notebook(replace(self.report(), tables=self.tables()))

    @property
    def about(self) -> Mapping[str, Any]:
        """What is known about the audit, as `audit_regression` got it: title, date, model."""
        return self.found.about

    @property
    def tolerance(self) -> Mapping[str, float]:
        """The largest acceptable gap by the short name of the metric, where one is stated."""
        return self.found.tolerance

    @property
    def verdicts(self) -> Mapping[str, str]:
        """The verdict on each metric with a tolerance, over all attributes.

        "within", "exceeds", "inconclusive" or "not estimable", as in `fedgft.Audit`.
        """
        return self.found.verdicts()

    @property
    def warnings(self) -> list[str]:
        """The warnings that a reader should see before the numbers."""
        return self.found.warnings

    @property
    def attributes(self) -> Mapping[str, RegressionResults]:
        """The results for the groups of each attribute and of their combinations."""
        return self.found.results

    @property
    def gaps(self) -> Mapping[str, MeanGap]:
        """The gap of each metric by its short name, between the groups by all attributes."""
        return self.attributes[self.found.groups].gaps

    @property
    def means(self) -> Mapping[str, Mapping[str, MeanEstimate]]:
        """The means by the short name of the metric and the name of the group."""
        return self.attributes[self.found.groups].means

    @property
    def fit(self) -> Mapping[str, Fit]:
        """The root mean squared error and R² of each group."""
        return self.attributes[self.found.groups].fit

    @property
    def sites(self) -> Mapping[str, SiteMeans]:
        """The sites by name: rows and gaps of each."""
        return self.attributes[self.found.groups].sites

    def difference(
        self, metric: str, first: str, second: str, *, by: str | None = None
    ) -> Estimate:
        """Return mean(first) - mean(second) with Welch's 95% interval.

        Parameters
        ----------
        metric
            The short name of a metric.
        first, second
            The names of two groups.
        by
            The attribute, or the combination of attributes. By default all attributes together.
        """
        name = _check_metric(metric)
        title = self._check_title(by)
        view = next(view for view in self.found.views if view.title == title)
        means = view.means(name)
        a, b = (means[view.index(group)] for group in (first, second))
        return to_estimate(difference_limits(a, b))

    def to_frame(
        self, table: str = "gaps", *, by: str | None = None, library: str = "polars"
    ) -> Any:
        """Return a tidy frame.

        Parameters
        ----------
        table
            ``"gaps"``: one row per metric. ``"means"``: one row per metric and group. ``"sites"``:
            one row per metric and site.
        by
            The attribute, or the combination of attributes, whose groups are compared: a key of
            `attributes`. By default all attributes together.
        library
            ``"polars"`` or ``"pandas"``.
        """
        check_choice("table", table, tuple(COLUMNS))
        check_choice("library", library, LIBRARIES)
        rows = _list_rows(self.attributes[self._check_title(by)], table)
        return convert_frame(pl.DataFrame(rows, schema=COLUMNS[table], orient="row"), library)

    def _check_title(self, by: str | None) -> str:
        """Return the title of a view."""
        return self.found.groups if by is None else check_choice("by", by, tuple(self.attributes))

    def check(self, limits: Mapping[str, float]) -> None:
        """Return if no gap exceeds its limit; raise a `FedgftError` of kind "data" otherwise.

        As `fedgft audit --fail-above`: a gap exceeds its limit if the lower end of its 95% interval
        does, for any attribute or combination of attributes. A gap that is not estimable raises
        the error too.

        Parameters
        ----------
        limits
            The largest gap to accept, by metric: ``check({"mean-error": 500})``.
        """
        known = check_mean_gaps(limits, field="limits")
        if not known:
            text = "name at least one metric and its limit: check({'mean-error': 500})"
            raise FedgftError(text, kind="missing")
        exceeded = find_exceeded_gaps(self.found, known)
        if exceeded:
            text = "; ".join(f"{each.metric} {each.reason}" for each in exceeded)
            raise FedgftError(text, kind="data")

    def lead(self) -> str:
        """Return the headline: the gap that matters most."""
        return write_lead(self.found)

    def scope(self) -> str:
        """Return one sentence that says what was audited."""
        return write_scope(self.found)

    def verdict(self) -> list[Verdict]:
        """Return one verdict per metric; without a tolerance it judges nothing."""
        return list_mean_verdicts(self.found)

    def tables(self) -> list[Table]:
        """Return the tables for a terminal; the report has more tables."""
        return list(list_mean_tables(self.found, short=True))

    def report(self, *, figures: bool = False) -> Report:
        """Return the whole report, with figures if `figures` is True, which takes longer."""
        return write_report(self.found, figures=figures)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        return self.found.to_plain()

    def to_dict(self) -> dict[str, Any]:
        """All results as values that JSON can hold."""
        return self._summary

    def to_json(self) -> str:
        """The text of audit.json."""
        text = json.dumps(self._summary, indent=2, allow_nan=False, ensure_ascii=False)
        return f"{text}\n"

    def to_markdown(self) -> str:
        """The text of report.md."""
        return self.report().to_markdown()

    def to_html(self) -> str:
        """The text of report.html: one page that needs no network and no other file."""
        return self.report(figures=True).to_html()

    def save(self, folder: str | Path) -> list[Path]:
        """Write audit.json, report.md and report.html to a folder; return their paths.

        Parameters
        ----------
        folder
            It is created if needed. Only the files of an earlier audit are replaced.
        """
        return save_report(self, folder, "audit")


def _check_metric(metric: Any) -> str:
    """Return the short name of a metric, or raise a `FedgftError`."""
    name = resolve_metric(metric)
    return check_choice("metric", metric, tuple(METRICS)) if name is None else name


def _list_rows(results: RegressionResults, table: str) -> list[tuple]:
    """Return the rows of a tidy table."""
    if table == "gaps":
        return [
            (
                *(gap.metric, gap.title, gap.value, gap.low, gap.high),
                *(gap.standardized.value, gap.ratio.value, gap.within.value),
                *(gap.pair or (None, None)),
            )
            for gap in results.gaps.values()
        ]
    if table == "means":
        return [
            (name, group, mean.value, mean.low, mean.high, mean.rows)
            for name, groups in results.means.items()
            for group, mean in groups.items()
        ]
    return [
        (
            name,
            site.name,
            site.rows,
            gap.local.value,
            gap.local.low,
            gap.local.high,
            gap.contribution,
        )
        for site in results.sites.values()
        for name, gap in site.gaps.items()
    ]


def audit_regression(
    sums: RegressionSites,
    *,
    reference_groups: Sequence[str] = (),
    tolerance: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
    ignore_case: bool = False,
) -> RegressionAudit:
    """Compare the predictions and errors of a model of numbers between groups, over all sites.

    Parameters
    ----------
    sums
        The sums of the sites, from `measure_regression` or `read_regression_sums`; or a mapping
        from the name of a site to its sums or to its rows: (y_true, y_pred, sensitive_features).
    reference_groups
        Groups to compare all others with: ``["White"]`` or ``["race=White", "sex=Male"]``.
    tolerance
        The largest acceptable gap by metric, in the unit of the outcome (of squared errors: its
        square): ``{"mean-prediction": 1000}``. There is no default: a gap without a tolerance is
        stated, but not judged. The metrics are "mean-prediction", "mean-outcome", "mean-error",
        "mean-absolute-error" ("mae") and "mean-squared-error" ("mse").
    about
        What a reader must know, as texts: "title", "model", "version", "prepared_by", "purpose",
        "date", "outcome" (what the numbers are, such as "gross pay per year, in euros"), and
        "files", the paths of the site files, whose SHA-256 is stated.
    ignore_case
        Merge names of groups that differ only in case or spaces. By default they are an error.

    Returns
    -------
    RegressionAudit
        The gaps, means and sites, as objects, frames and reports.

    Examples
    --------
    >>> from fedgft.auditing import audit_regression
    >>> pay, predicted = [30.0, 50.0] * 20, [32.0, 47.0] * 20
    >>> rows = (pay, predicted, ["f", "m"] * 20)
    >>> found = audit_regression({"north": rows, "south": rows}, tolerance={"mean-error": 4})
    >>> found.gaps["mean-error"].value, found.verdicts["mean-error"]
    (5.0, 'exceeds')
    """
    references = check_name_list("reference_groups", reference_groups)
    limits = check_mean_gaps(tolerance, field="tolerance")
    described = check_about(about)
    combined = _combine(sums, Spellings(ignore_case=ignore_case))
    views = list_regression_views(combined)
    for name in references:
        if all(find_reference_group(view, [name]) is None for view in views):
            known = ", ".join([group for view in views for group in view.groups][:12])
            raise FedgftError(f"`reference_groups` {name}: no such group; there are: {known}")
    results = {
        view.title: estimate_regression(view, find_reference_group(view, references))
        for view in views
    }
    warnings = list_regression_warnings(combined, views, results)
    facts = _add_facts(described, combined.require_spec())
    return RegressionAudit(Findings(combined, views, results, limits, facts, warnings))


def _add_facts(about: Mapping[str, Any], spec: RegressionSpec) -> dict[str, Any]:
    """Return what is known about the audit, with the period and the version in the files."""
    version = combine_versions(about.get("version", ""), spec.model_version)
    found = {"version": version, "period": describe_dates(spec.date)}
    return {name: printable(text) for name, text in found.items() if text} | dict(about)


def _combine(sums: Any, spellings: Spellings) -> RegressionSums:
    """Return the sums of all sites: see `audit_regression`."""
    if isinstance(sums, RegressionSums):
        return unify_spellings(sums, spellings)
    if isinstance(sums, str | Path):
        text = f"`sums` takes sums, not a path: read_regression_sums({str(sums)!r})"
        raise FedgftError(text)
    kinds = f"RegressionSums, a list of them, or a mapping {{site name: {ROWS}}}"
    if isinstance(sums, SiteSums) or not isinstance(sums, Iterable):
        hint = "; those of `measure` are audited by `audit`" if isinstance(sums, SiteSums) else ""
        raise FedgftError(f"`sums` must be {kinds}, not {format_value(sums)}{hint}")
    parts = _measure_all(sums, spellings) if isinstance(sums, Mapping) else list(sums)
    if not parts:
        raise FedgftError("`sums` is empty: name at least one site", kind="missing")
    for part in parts:
        check_instance("sums", part, RegressionSums, f"give {kinds}")
    return merge_regression([unify_spellings(part, spellings) for part in parts])


def _measure_all(sites: Mapping[Any, Any], spellings: Spellings) -> list[RegressionSums]:
    """Return the sums of each site of a mapping, under its name."""
    found = []
    for name, given in sites.items():
        if not isinstance(name, str) or not name.strip():
            problem = f"has the site name {format_value(name)}: a site's name is a text, not empty"
            raise FedgftError(f"`sums` {problem}")
        if isinstance(given, RegressionSums):
            found.append(given.named(name))
            continue
        if not isinstance(given, tuple | list) or len(given) != 3:
            problem = f"must be {ROWS} or RegressionSums, not {format_value(given)}"
            raise FedgftError(f"`sums` of site '{name}': {problem}")
        y_true, y_pred, features = given
        try:
            sums = measure_regression(
                y_true,
                y_pred,
                sensitive_features=features,
                site=name,
                min_cell=0,  # the rows are here, so nothing is withheld from their owner
                ignore_case=spellings.ignore_case,
            )
        except FedgftError as error:
            text = f"`sums` of site '{name}': {error.message}"
            raise FedgftError(text, field="sums", kind=error.kind) from None
        found.append(sums)
    return found


# Files


def read_regression_sums(path: str | Path) -> RegressionSums:
    """Read and check the file of one site.

    Parameters
    ----------
    path
        A file that `RegressionSums.save` or `fedgft measure --target-column` wrote.

    Returns
    -------
    RegressionSums
        The sums of the site.
    """
    return _read_with_digest(path)[0]


def _read_with_digest(path: str | Path) -> tuple[RegressionSums, str]:
    """Return the sums in a file and the SHA-256 of its bytes, which are read once."""
    content = read_text_file(path, what="a file of sums that fedgft wrote", most=MAX_BYTES)
    sums = RegressionSums.from_json(content.decode("utf-8"), source=str(path))
    return sums, sha256(content).hexdigest()


def holds_regression(path: str | Path) -> bool:
    """Return whether a file begins as one with the sums of a numeric outcome."""
    file = expand_user(path)
    try:
        if not file.is_file():  # a pipe would wait for its other end
            return False
        with file.open("rb") as stream:
            return f'"format": "{PREFIX}'.encode() in stream.read(60)
    except OSError:  # reading it as a file of sums says why
        return False


def gather_regression(
    files: Sequence[Path],
    on_file: Callable[[int], None] | None = None,
    *,
    ignore_case: bool = False,
) -> tuple[RegressionSums, dict[str, str]]:
    """Read files of sites and merge their sums.

    Two files of the same site, or sites that measured different things, are errors.

    Parameters
    ----------
    files
        One file per site.
    on_file
        Called after each file with the number of files read.
    ignore_case
        Merge names of groups that differ only in case or spaces. By default they are an error.

    Returns
    -------
    sums, digests
        The sums, and the SHA-256 of each file by its path.
    """
    spellings = Spellings(ignore_case=ignore_case)
    parts: dict[str, tuple[Path, RegressionSums]] = {}
    digests: dict[str, str] = {}
    for file in files:
        sums, digests[str(file)] = _read_with_digest(file)
        (site,) = sums.sites
        if site in parts:
            problem = f"site '{site}' is in {parts[site][0]} already; a site counts once"
            text = f"{file}: {problem} (measure the other site under another name)"
            raise FedgftError(text, kind="conflict")
        sums = unify_spellings(sums, spellings, str(file))
        first, spec = next(iter(parts.values()), (file, sums))
        try:
            spec.require_spec().combine(sums.require_spec())
        except FedgftError as error:
            raise FedgftError(f"{first} and {file}: {error}", kind="conflict") from None
        parts[site] = file, sums
        if on_file:
            on_file(len(parts))
    return merge_regression(sums for _, sums in parts.values()), digests

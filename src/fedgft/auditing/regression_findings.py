"""What an audit of a model of numbers found: results, tolerances, verdicts and warnings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fedgft.auditing.regression_estimates import (
    ALIASES,
    METRICS,
    MeanGap,
    RegressionResults,
    RegressionView,
    error_kurtosis,
    is_constant,
)
from fedgft.auditing.verdicts import STATES, State
from fedgft.errors import FedgftError
from fedgft.formatting import DASH, format_count, format_interval, join_names, printable
from fedgft.metrics.intervals import FEW
from fedgft.site_sums.regression_sums import RegressionSums, describe_clip
from fedgft.validation import check_number, format_value

FORMAT = "fedgft-audit-regression-1"
INTERVAL = (
    "Welch (two groups), Games & Howell (the largest of several differences), Bonett "
    "(standardized differences)"
)
HEAVY_TAILS = 4.5  # kurtosis of errors; 3 if they are normal
ROWS_PER_SQUARE = 20  # with fewer rows per squared kurtosis, limits of squared errors are too short
EXAMPLE = "mean-prediction=1000"


@dataclass(frozen=True, eq=False)
class Findings:
    """All results of an audit of a model of numbers.

    Parameters
    ----------
    sums
        The sums of all sites.
    views
        The sums by the groups of each attribute and of their combinations.
    results
        The numbers of each view, by its title; those by all attributes together are last.
    tolerance
        The largest acceptable gap, by the short name of the metric, where one is stated.
    about
        What is known about the audit, as texts.
    warnings
        The warnings that a reader should see before the numbers.
    """

    sums: RegressionSums
    views: tuple[RegressionView, ...]
    results: Mapping[str, RegressionResults]
    tolerance: Mapping[str, float]
    about: Mapping[str, Any]
    warnings: list[str]

    @property
    def groups(self) -> str:
        """The title of the view by all attributes together."""
        return self.views[-1].title

    @property
    def sites(self) -> list[str]:
        """The printable names of the sites."""
        return list(self.views[-1].sites)

    def verdicts(self) -> dict[str, State]:
        """Return the verdict on each metric with a tolerance, over all views."""
        return {name: self.judge(name)[0] for name in self.tolerance}

    def judge(self, name: str) -> tuple[State, str]:
        """Return the verdict on a metric with a tolerance, and the title of the deciding view.

        One view that exceeds the tolerance decides, then one that is not estimable, then one that
        is inconclusive. Of several such views, the one with the largest gap decides.
        """
        ranked = []
        for title, results in self.results.items():
            gap = results.gaps[name]
            state = judge_gap(gap, self.tolerance[name])
            ranked.append((STATES.index(state), -(gap.estimable().value or 0.0), state, title))
        _, _, state, title = min(ranked, key=lambda each: each[:2])
        return state, title

    def leading(self) -> tuple[str, str]:
        """Return the metric of the headline and its view: the first that has a tolerance."""
        for name in self.tolerance:
            state, title = self.judge(name)
            if state != "not estimable":
                return name, title
        name = next(iter(self.tolerance), next(iter(METRICS)))
        known = [t for t, found in self.results.items() if found.gaps[name].pair]
        return name, known[-1] if known else self.groups

    def to_plain(self) -> dict[str, Any]:
        """Return everything as values that JSON can hold."""
        spec = self.sums.require_spec()
        return {
            "format": FORMAT,
            "about": dict(self.about),
            "target": printable(spec.target),
            "prediction": printable(spec.prediction),
            "weight": printable(spec.weight),
            "clip": None if spec.clip is None else list(spec.clip),
            "groups": self.groups,
            "rows": count_rows(self.sums),
            "interval": INTERVAL,
            "tolerance": dict(self.tolerance),
            "verdicts": self.verdicts(),
            "warnings": list(self.warnings),
            "views": {title: asdict(results) for title, results in self.results.items()},
        }


def count_rows(sums: RegressionSums) -> dict[str, int | None]:
    """Return the numbers of rows; None where a site withheld a number."""
    found: dict[str, int | None] = {"counted": sums.rows()}
    for name in ("target_missing", "prediction_missing"):
        numbers = [getattr(site, name) for site in sums.sites.values()]
        found[name] = None if None in numbers else sum(numbers)
    cells = [cell for site in sums.sites.values() for cell in site.cells.items()]
    found["not_recorded"] = sum(moments.rows for group, moments in cells if None in group)
    return found


# Tolerances and verdicts


def resolve_metric(name: Any) -> str | None:
    """Return the short name of a metric, or None if there is no such metric."""
    if not isinstance(name, str):
        return None
    plain = name.strip().lower().replace("_", "-")
    plain = ALIASES.get(plain, plain)
    return plain if plain in METRICS else None


def check_mean_gaps(gaps: Any, *, field: str) -> dict[str, float]:
    """Return gaps by the short names of metrics; raise a `FedgftError` about a wrong one.

    Parameters
    ----------
    gaps
        A mapping from metrics to gaps in the unit of the outcome. None: there are none.
    field
        The argument or option, for error messages.
    """
    if gaps is None:
        return {}
    if not isinstance(gaps, Mapping):
        problem = "there is no gap for all metrics, because their units differ"
        raise FedgftError(f"`{field}` {format_value(gaps)}: {problem}; write {EXAMPLE}")
    found: dict[str, float] = {}
    for name, gap in gaps.items():
        metric = resolve_metric(name)
        if metric is None:
            known = ", ".join(METRICS)
            raise FedgftError(f"`{field}` {format_value(name)}: is none of the metrics {known}")
        if metric in found:
            raise FedgftError(f"`{field}` {name}: {metric} is given twice")
        found[metric] = check_number(f"{field}[{name!r}]", gap)
        if found[metric] < 0:
            raise FedgftError(f"`{field}` {name}={gap:g}: a gap is 0 or more")
    return found


def judge_gap(gap: MeanGap, tolerance: float) -> State:
    """Return the verdict on one gap of one view, as `fedgft.auditing.verdicts.judge_gap` does."""
    numbers = gap.estimable()
    if numbers.value is None or numbers.low is None:
        return "not estimable"
    if numbers.low > tolerance:
        return "exceeds"
    if gap.value is None or numbers.high is None:
        return "not estimable"
    return "within" if numbers.high < tolerance else "inconclusive"


class ExceededGap(NamedTuple):
    """A gap that is above its limit, or that cannot be judged."""

    metric: str
    reason: str  # a sentence whose subject is the metric


def find_exceeded_gaps(found: Findings, limits: Mapping[str, float]) -> list[ExceededGap]:
    """Return the gaps that exceed their limit, and those that are not estimable, of every view.

    Parameters
    ----------
    found
        The results of the audit.
    limits
        The largest gap to accept, by the short name of the metric.
    """
    exceeded = []
    for name, limit in limits.items():
        for title, results in found.results.items():
            gap = results.gaps[name]
            state = judge_gap(gap, limit)
            numbers = gap.estimable()
            if state == "exceeds":
                reason = f"is at least {format_number(numbers.low)} (95%; the gap is "
                reason += f"{format_number(numbers.value)}), above {format_exactly(limit)}"
                exceeded.append(ExceededGap(name, f"by {title} {reason}"))
            elif state == "not estimable":
                reason = f"by {title} is not estimable: no pass at {format_exactly(limit)}"
                exceeded.append(ExceededGap(name, reason))
    return exceeded


# Warnings


def list_regression_warnings(
    sums: RegressionSums, views: Sequence[RegressionView], results: Mapping[str, RegressionResults]
) -> list[str]:
    """Return the warnings that a reader should see before the numbers."""
    return [
        *sums.notes,
        *_warn_about_rows(sums, views),
        *_warn_about_clipping(sums),
        *_warn_about_estimates(views, results),
    ]


def _warn_about_rows(sums: RegressionSums, views: Sequence[RegressionView]) -> Iterator[str]:
    """Yield what is missing: withheld groups, rows without a group, an outcome or a prediction."""
    withheld = sum(len(site.withheld) for site in sums.sites.values())
    if withheld:
        sites = sum(bool(site.withheld) for site in sums.sites.values())
        least = max(site.min_cell for site in sums.sites.values())
        limit = f"fewer than {least} rows"
        text = (
            f"{format_count(withheld, 'group')} with {limit} {'was' if withheld == 1 else 'were'}"
        )
        text += f" withheld by {format_count(sites, 'site')}"
        yield f"{text}: these rows are in no number, also where groups are put together"
    for view in views:
        names = [g for g, part in zip(view.groups, view.total, strict=True) if part is None]
        if names:
            yield f"by {view.title}, no site has enough rows of {join_names(names)} for sums"
        if len(view.groups) == 1:
            yield f"by {view.title}, there is one group only: nothing can be compared"
    rows = count_rows(sums)
    for name, text in (("target_missing", "outcome"), ("prediction_missing", "prediction")):
        if rows[name] != 0:
            number = "a few" if rows[name] is None else f"{rows[name]:,}"
            yield f"rows without {'an' if text == 'outcome' else 'a'} {text} are left out: {number}"
    if rows["not_recorded"]:
        yield f"rows whose group is not recorded: {rows['not_recorded']:,}"


def _warn_about_clipping(sums: RegressionSums) -> Iterator[str]:
    """Yield how many values were clipped: the sums are those of the clipped values."""
    clip = sums.require_spec().clip
    if clip is None:
        return
    parts = []
    for i, name in enumerate(("outcomes", "predictions")):
        numbers = [site.clipped[i] for site in sums.sites.values()]
        number = "a few" if None in numbers else f"{sum(filter(None, numbers)):,}"
        parts.append(f"{number} {name}")
    yield f"values are {describe_clip(clip)}: {' and '.join(parts)} were outside"


def _warn_about_estimates(
    views: Sequence[RegressionView], results: Mapping[str, RegressionResults]
) -> Iterator[str]:
    """Yield which groups are constant, too small for intervals, or ruled by a few large errors."""
    constant: dict[str, None] = {}
    small: dict[str, None] = {}
    heavy: dict[str, None] = {}
    for view in views:
        for group, part in zip(view.groups, view.total, strict=True):
            if part is None:
                continue
            if is_constant(part):
                constant[group] = None
            if part.rows < FEW:
                small[group] = None
            kurtosis = error_kurtosis(part) or 0.0
            rows = part.effective_rows
            if kurtosis > HEAVY_TAILS and rows < ROWS_PER_SQUARE * kurtosis**2:
                heavy[group] = None
    if constant:
        yield f"the outcome is constant in {join_names(list(constant))}: there is no R²"
    if small:
        yield f"fewer than {FEW} rows, so no interval: {join_names(list(small))}"
    if heavy:
        yield (
            f"a few large errors make up much of the squared error of {join_names(list(heavy))}: "
            "there, intervals of mean squared errors, and with few rows those of mean absolute "
            "errors, are too short"
        )


# Numbers with a unit


def format_number(value: float | None, width: float | None = None) -> str:
    """Return a number with thousands separators, and as many decimals as its size needs.

    Parameters
    ----------
    value
        The number; None if it is not known.
    width
        Half the width of its interval, which gets two digits. None: the number gets four.

    >>> format_number(52345.678), format_number(52345.678, 0.4), format_number(1e8, 250)
    ('52,346', '52,345.68', '100,000,000')
    """
    if value is None:
        return DASH
    if abs(value) >= 1e15 or 0 < abs(value) < 1e-9:
        return f"{value:.4g}"
    digits = count_decimals(abs(value) / 100 if width is None else width)
    return f"{value:z,.{digits}f}"


def format_exactly(value: float | None) -> str:
    """Return a number that a person chose, such as a tolerance.

    >>> format_exactly(1000.0), format_exactly(0.25), format_exactly(None)
    ('1,000', '0.25', '–')
    """
    return DASH if value is None else f"{value:,.10g}"


def count_decimals(width: float) -> int:
    """Return how many decimals show two digits of a number."""
    if not width > 0:
        return 0
    return min(12, max(0, 1 - math.floor(math.log10(width))))


def format_limits(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """Return a number and its limits, with the decimals that the width of the interval needs."""
    if low is None or high is None or not high > low:
        text = format_number(value)
        return text, format_interval(None, None)
    width = (high - low) / 2
    if max(abs(low), abs(high)) >= 1e15:
        return format_number(value), f"{low:.4g} to {high:.4g}"
    limits = f"{format_number(low, width)} to {format_number(high, width)}"
    return format_number(value, width), limits

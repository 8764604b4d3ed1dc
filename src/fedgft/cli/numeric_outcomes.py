"""`fedgft measure` and `fedgft audit` for models that predict numbers."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fedgft
from fedgft.cli.console import bar, note, warn, wrote
from fedgft.cli.options import require, split_columns
from fedgft.cli.sources import FileSource
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count, printable
from fedgft.store import make_folder, open_folder

if TYPE_CHECKING:
    from fedgft.auditing import RegressionAudit, RegressionSums
    from fedgft.cli.sources import Source

audits = LazyModule("fedgft.cli.audit")
measurement = LazyModule("fedgft.auditing.regression_measurement")
regression = LazyModule("fedgft.auditing.regression")
findings = LazyModule("fedgft.auditing.regression_findings")
report_files = LazyModule("fedgft.auditing.report_files")
site_file = LazyModule("fedgft.auditing.site_file")
sums_module = LazyModule("fedgft.site_sums.regression_sums")

MAX_SITES = 10  # listed in a note


class Place(NamedTuple):
    """Where the sums and the report go, as `fedgft measure` was told."""

    site: str | None
    name: str | None
    out: Path | None
    report: Path | None
    json: bool
    overwrite: bool


def measure_numbers(
    source: "Source | None", place: Place, task: dict[str, Any], refused: Mapping
) -> None:
    """Sum the predictions and errors of one site, or of each site in a table.

    Parameters
    ----------
    source
        What to measure: files.
    place
        Where the results go.
    task
        The arguments of `measure_regression_file`, without its path and its site; `min_cell` 0
        stands for the default.
    refused
        Options for classes, by name; those that are set are errors.
    """
    check_options(task, refused)
    if not isinstance(source, FileSource):
        text = "`target_column`: numbers are measured in files, not in databases"
        raise FedgftError(text, kind="unsupported")
    path = None
    name = source.name if place.name is None else place.name
    if place.site is None:
        if name is None:
            text = "`name` is missing: these files are one table of one site; name the site"
            raise FedgftError(text, kind="missing")
        path = choose_file(name, place.out, json=place.json)
    if place.report is not None:
        audits.check_site_report(place.report, path)
    task["min_cell"] = task["min_cell"] or sums_module.MIN_ROWS
    with nullcontext() if place.report is None else open_folder(place.report, "`report`"):
        with bar() as progress:
            table = source.table
            task["on_rows"] = partial(progress.rows, total=table.estimate_rows())
            if place.site is None:
                parts = [measurement.measure_regression_file(table, site=name, **task)]
            else:
                parts = measurement.measure_regression_sites(table, site_column=place.site, **task)
        contents = [part.to_json() for part in parts]
        paths: Sequence[Path | None] = [path]
        if place.site is not None:
            paths = audits.name_site_files(parts, place.out, read=read_site_name)
        texts = {at: text for at, text in zip(paths, contents, strict=True) if at is not None}
        if source.note:
            note(source.note)
        describe_sums(parts)
        if not place.overwrite:
            audits.refuse_changes(texts)
        made = None if place.report is None else audit_texts(texts)
        pages = []
        if made is not None:
            pages = report_files.write_report(
                made, place.report, "audit", field="report", overwrite=place.overwrite
            )
        for at, part in zip(paths, parts, strict=True):
            if at is not None:
                make_folder(at.parent)
                part.save(at)
        wrote([*texts, *pages])
        if made is not None:
            audits.print_report(made)
    if place.json:
        sys.stdout.write(contents[0])


def check_options(task: Mapping[str, Any], refused: Mapping[str, Any]) -> None:
    """Raise a `FedgftError` about a missing column, or an option that is for classes only."""
    for field, column, purpose in (
        ("target_column", task["target"], "the column with the true outcome, a number"),
        ("prediction", task["prediction"], "the column with the predicted number"),
    ):
        require(column, f"`{field}` is missing: {purpose}", kind="missing")
    for field, value in refused.items():
        if field == "epsilon" and value is not None:
            raise FedgftError(measurement.NO_NOISE, kind="unsupported")
        if value:
            text = f"`{field}` is for classes; with `target_column` there are numbers: leave it out"
            raise FedgftError(text, kind="conflict")


def choose_file(site: str, given: Path | None, *, json: bool) -> Path | None:
    """Return the path of a site's file, which may be written; None if no file is wanted."""
    return audits.choose_site_file(site, given, json=json, read=read_site_name)


def read_site_name(path: Path) -> str:
    """Return the name of the site in a file of sums of a numeric outcome."""
    (name,) = regression.read_regression_sums(path).sites
    return name


def audit_texts(texts: Mapping[Path, str]) -> "RegressionAudit":
    """Return the audit of the numbers in files of sites."""
    from hashlib import sha256

    parts = [
        sums_module.RegressionSums.from_json(text, source=str(path)) for path, text in texts.items()
    ]
    digests = {path.name: sha256(text.encode()).hexdigest() for path, text in texts.items()}
    return fedgft.auditing.audit_regression(parts, about={"files": digests})


def describe_sums(parts: Sequence["RegressionSums"]) -> None:
    """Print notes about rows, groups and missing values, and what the files reveal."""
    sites = {name: site for part in parts for name, site in part.sites.items()}
    groups = {group for site in sites.values() for group in site.cells if None not in group}
    counted = f"{sum(part.rows() for part in parts):,} rows in {format_count(len(groups), 'group')}"
    if len(sites) == 1:
        note(f"{next(iter(sites))}: {counted}")
    else:
        listed = [f"{name} {part.rows():,}" for part in parts for name in part.sites]
        more = f" and {len(listed) - MAX_SITES} more" if len(listed) > MAX_SITES else ""
        note(f"{len(sites)} sites, {counted}: {', '.join(listed[:MAX_SITES])}{more}")
    for what, name in (("outcome", "target_missing"), ("prediction", "prediction_missing")):
        numbers = [getattr(site, name) for site in sites.values()]
        if any(number != 0 for number in numbers):
            number = "a few" if None in numbers else f"{sum(numbers):,}"
            note(f"rows without {'an' if what == 'outcome' else 'a'} {what}, left out: {number}")
    clip = parts[0].require_spec().clip
    if clip is not None:
        numbers = [number for site in sites.values() for number in site.clipped]
        number = "a few" if None in numbers else f"{sum(filter(None, numbers)):,}"
        note(f"values {sums_module.describe_clip(clip)}: {number} were outside")
    least = max(site.min_cell for site in sites.values())
    smallest = min((m.rows for site in sites.values() for m in site.cells.values()), default=0)
    held = "the file holds" if len(parts) == 1 else f"the {len(parts)} files hold"
    note(f"{held} sums over at least {least} people each; the smallest group has {smallest:,}")
    if withheld := sum(len(site.withheld) for site in sites.values()):
        note(f"{format_count(withheld, 'group')} of fewer than {least} people withheld")
    for text in dict.fromkeys(text for part in parts for text in part.notes):
        warn(printable(text))


def parse_mean_limits(field: str, items: Sequence[str]) -> dict[str, float]:
    """Read METRIC=GAP, as in mean-prediction=1000, several with commas or spaces.

    Parameters
    ----------
    field
        The option, for messages.
    items
        What the user gave.
    """
    found: dict[str, Any] = {}
    parts = split_columns(items)
    require(parts or not items, f"`{field}` needs a value", kind="missing")
    for item in parts:
        name, equals, text = item.partition("=")
        example = f"write METRIC=GAP in the unit of the outcome, such as {findings.EXAMPLE}"
        require(equals, f"`{field}` {item}: {example}")
        require(name not in found, f"`{field}` {item}: {name} is given twice")
        try:
            found[name] = float(text)
        except ValueError:
            raise FedgftError(f"`{field}` {item}: {example}") from None
    return findings.check_mean_gaps(found, field=field)


def audit_numbers(
    files: Sequence[Path],
    *,
    limits: Sequence[str],
    tolerance: Sequence[str] | None,
    reference_groups: Sequence[str],
    about: Mapping[str, Any],
    ignore_case: bool,
    refused: Mapping[str, Any],
) -> tuple["RegressionAudit", list[str]]:
    """Return the audit of site files about numbers, and a sentence per gap above its limit.

    Parameters
    ----------
    files
        The files that `find_site_files` found.
    limits, tolerance
        The values of --fail-above and --tolerance.
    reference_groups, about, ignore_case
        As in `audit_regression`.
    refused
        Options for classes, by name; those that are set are errors.
    """
    for field, value in refused.items():
        if value:
            text = f"`{field}` is not available for a numeric outcome"
            raise FedgftError(text, kind="unsupported")
    parsed = parse_mean_limits("fail_above", limits)
    accepted = parsed if tolerance is None else parse_mean_limits("tolerance", tolerance)
    with bar() as progress:

        def show(done: int) -> None:
            progress.fetch("reading sites", done, len(files))

        sums, digests = regression.gather_regression(files, show, ignore_case=ignore_case)
    names = [Path(path).name for path in digests]
    unique = len(set(names)) == len(names)
    named = {
        name if unique else path: d for name, (path, d) in zip(names, digests.items(), strict=True)
    }
    found = fedgft.auditing.audit_regression(
        sums,
        reference_groups=reference_groups,
        tolerance=accepted,
        about={**about, "files": named},
        ignore_case=ignore_case,
    )
    exceeded = findings.find_exceeded_gaps(found.found, parsed)
    return found, [f"{each.metric} {each.reason}" for each in exceeded]

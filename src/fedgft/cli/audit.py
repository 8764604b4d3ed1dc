"""`fedgft measure`: the sums of one site; `fedgft audit`: the fairness over all sites."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

import fedgft
from fedgft.cli import sources
from fedgft.cli.console import (
    Bar,
    bar,
    discard_stdout,
    note,
    out,
    print_signs,
    print_table,
    say,
    warn,
    wrote,
)
from fedgft.cli.options import (
    Columns,
    Flag,
    Place,
    Some,
    Whole,
    require,
    require_values,
    split_columns,
)
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count, printable
from fedgft.settings import MAX_COUNT
from fedgft.store import make_folder, open_folder, refuse_link

if TYPE_CHECKING:
    from fedgft.auditing.form_page import Form
    from fedgft.auditing.report import Audit
    from fedgft.auditing.report_files import FormName, ReportKind
    from fedgft.auditing.summary import Summary
    from fedgft.site_sums import Privacy, SiteSums

# Loaded when a command runs, so that help is printed at once.
comparison = LazyModule("fedgft.auditing.comparison")
forms = LazyModule("fedgft.auditing.forms")
numbers = LazyModule("fedgft.cli.numeric_outcomes")
regression = LazyModule("fedgft.auditing.regression")
report_files = LazyModule("fedgft.auditing.report_files")
site_file = LazyModule("fedgft.auditing.site_file")
summaries = LazyModule("fedgft.auditing.summary")
site_sums = LazyModule("fedgft.site_sums")
verdicts = LazyModule("fedgft.auditing.verdicts")

EXIT_EXCEEDED = 3  # the exit code of a gap above a limit
MAX_COLUMNS = 12  # listed in a message
MAX_SITES = 10  # listed in a note
MIN_DRAWS = 100  # of a bootstrap
DEFAULT_SCAN = 10  # subgroups in a report
MAX_SCAN = 1_000  # subgroups that are printed
WORST_MIX = 0.2  # largest change of a site's share
MAX_FILE_NAME = 100  # bytes of the name of a site in the name of its file
RULE_NOTE = (
    "`fedgft adjust` finds the best thresholds by group and saves them as a rule, which "
    "`fedgft decide` and `fedgft predict --rule` apply"
)
FILE_WIDTH = 10_000  # characters per line of a table, where no terminal limits them


def measure(
    data: Annotated[tuple[str, ...], Some] = (),
    *,
    table: str | None = None,
    label: str | None = None,
    group: Columns | None = None,
    score: Columns | None = None,
    decision: str | None = None,
    weight: str | None = None,
    given: Columns | None = None,
    target_column: str | None = None,
    prediction: str | None = None,
    site: str | None = None,
    name: str | None = None,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    overwrite: Annotated[bool, Flag] = False,
    report: Place | None = None,
    json: Annotated[bool, Flag] = False,
    threshold: float = 0.5,
    positive: str | None = None,
    classes: Annotated[list[str] | None, Some] = None,
    ignore_case: Annotated[bool, Flag] = False,
    bins: Whole | None = None,
    min_bin: Whole = 5,
    min_cell: Whole = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    randomized_groups: float | None = None,
    group_probabilities: str | None = None,
    date: str | None = None,
    model_version: str | None = None,
    join: str | None = None,
    key: Columns | None = None,
    where: str | None = None,
    print_sql: Annotated[bool, Flag] = False,
    dialect: str | None = None,
    from_counts: Place | None = None,
    clip: Annotated[tuple[float, float] | None, Parameter(negative="")] = None,
) -> None:
    """Count the predictions of one site. The result is a file of sums; rows stay at the site.

    Parameters
    ----------
    data
        A CSV or Parquet file with one row per person; or a folder of such files, a pattern such as
        "scored-*.parquet", or several files. Required. The columns of a CSV file are separated by
        commas, semicolons or tabs. Folders may state a column, as in bank=north/rows.parquet.
        Or the URL of a database: postgresql://USER@HOST/DATABASE, duckdb:///FILE, sqlite:///FILE.
    table
        Table of the database, NAME or SCHEMA.NAME. The database counts its rows.
    label
        Column with the true outcome, a class. Required, unless the outcome is a number.
    group
        Column with the groups. Required. Several columns, such as `race sex`, are also combined
        into intersections. race=White,Black declares all values of a column.
    score
        Column with the probability of the positive class. With more than two classes: one column
        per class, in their order.
    decision
        Column with the decision, if it does not follow from the score.
    weight
        Column with the weight of each row, 0 or more, such as a survey weight.
    given
        One or two columns with strata, such as a department: groups are then compared within them
        too.
    target_column
        Column with the true outcome of a model that predicts numbers, instead of --label.
    prediction
        Column with the predicted number, with --target-column.
    site
        Column with the site of each row, if the table holds several sites. Each site gets a file.
    name
        Name of the site [default: the name of the file, folder or table].
    out
        File for the sums [default: NAME.json]. With --site, a folder [default: the current one].
        Folders are created. A file with other content is not replaced.
    overwrite
        Replace earlier sums and reports. Without it, they stay as they are.
    report
        Folder for a report on this table alone, as `fedgft audit` writes it.
    json
        Print the sums to stdout. A file is written only if --out names one.
    threshold
        Scores of at least this value are positive decisions.
    positive
        The positive one of two labels [default: the alphabetically last, or the larger number].
    classes
        All possible labels, in order (of two, the positive one last), if some do not occur here.
    ignore_case
        Merge names that differ only in case or spaces, such as "Man" and "man".
    bins
        Number of ranges of the score [default: 100; 20 with --epsilon].
    min_bin
        Merge ranges of the score until each holds at least this many people, or none.
    min_cell
        Withhold all counts below this number, such as 10, and everything about scores. With
        --target-column: withhold groups with fewer rows [default: 10].
    epsilon
        Add noise for differential privacy with this budget.
    delta
        With --epsilon: use discrete Gaussian noise with this delta, not discrete Laplace.
    date
        Date of the rows, or the last day of their period, such as 2026-03-31; `fedgft monitor`
        needs it.
    model_version
        Version of the model, such as 2.1. Sites with different versions are not audited together.
    randomized_groups
        The groups were randomized before they were stored, with this epsilon: every estimate is
        corrected for it. --group must list all values, as in sex=man,woman.
    group_probabilities
        In place of --group: columns with the probability of each group, as in
        sex=woman:p_woman,man:p_man.
    join
        A second table with other columns of the same rows, such as the groups; of the same
        database, or a file, which has to fit into memory.
    key
        With --join: columns that match the rows of both tables.
    where
        Count only the rows that meet a condition in SQL, such as "year = 2025".
    print_sql
        Print the statement that counts a table in a database, for a site without fedgft.
    dialect
        With --print-sql: postgres, duckdb, sqlite, spark, databricks, snowflake, bigquery, trino.
    from_counts
        In place of a table: a CSV with what the statement of --print-sql returned.
    clip
        With --target-column: replace values outside of these bounds, LOW HIGH, by the bound.

    Examples
    --------
    fedgft measure north.csv --label repaid --group sex --score probability
    fedgft measure survey.csv --label y --group sex --score p --weight w
    fedgft measure north.csv --label repaid --group sex age --score probability
    fedgft measure scored.csv --site bank --label repaid --group sex --score p
    fedgft measure scored/ --name north --label repaid --group sex --score p
    fedgft measure postgresql://host/db --table t --label y --group sex --score p
    fedgft measure pay.csv --target-column pay --prediction p --group sex
    """
    require_values(classes=classes, group=group, score=score, given=given, key=key)
    for field, value, least in (("min_bin", min_bin, 1), ("min_cell", min_cell, 0)):
        require(value >= least, f"`{field}` {value}: must be at least {least}")
        require(value <= MAX_COUNT, f"`{field}` {value}: must be at most {MAX_COUNT:,}")
    rows = {"table": table, "join": join, "key": key or (), "where": where}
    source = None if print_sql else sources.open_source(data, **rows, from_counts=from_counts)
    known = () if source is None else source.columns
    has_numbers = target_column is not None or prediction is not None or clip is not None
    columns, values = parse_groups(group or (), known)
    if from_counts is None and not has_numbers:
        require_column("label", label, "the column with the true outcome", known)
    if group_probabilities is None and from_counts is None:
        require_column("group", columns, "the column with the groups", known)
    if report is not None and json and out is None:
        raise FedgftError("`report` and --json exclude each other: give one", kind="conflict")
    if source is not None and source.site_column is not None:
        site = source.site_column
    if site is not None and source is not None:
        require(name is None and not json, "`site` excludes `name` and --json", kind="conflict")
        is_folder = out is None or not out.exists() or out.is_dir()
        require(is_folder, f"`out` {out}: with `site`, name a folder", kind="file")
    if has_numbers:
        task: dict[str, Any] = {"target": target_column, "prediction": prediction, "group": columns}
        task |= {"values": values, "min_cell": min_cell, "clip": clip, "ignore_case": ignore_case}
        task |= {"weight": weight, "date": date or "", "model_version": model_version or ""}
        refused = {"label": label, "score": score, "decision": decision, "positive": positive}
        refused |= {"classes": classes, "bins": bins, "epsilon": epsilon, "delta": delta}
        refused |= {"given": given, "randomized_groups": randomized_groups}
        refused |= {"group_probabilities": group_probabilities}
        place = numbers.Place(site, name, out, report, json, overwrite)
        numbers.measure_numbers(source, place, task, refused)
        return
    path = None
    if site is None and source is not None:
        name = source.name if name is None else name
        if name is None:
            text = "`name` is missing: these files are one table of one site; name the site"
            raise FedgftError(text, kind="missing")
        path = choose_site_file(name, out, json=json)
    if report is not None:
        check_site_report(report, path)
    task = {
        "label": label,
        "group": columns,
        "score": split_columns(score or (), known),
        "decision": decision,
        "weight": weight,
        "given": split_columns(given or (), known),
        "randomized_groups": randomized_groups,
        "group_probabilities": parse_probabilities(group_probabilities),
        "threshold": threshold,
        "bins": bins,
        "classes": classes or (),
        "positive": positive,
        "values": values,
        "min_cell": min_cell,
        "epsilon": epsilon,
        "delta": delta,
        "ignore_case": ignore_case,
        "date": date or "",
        "model_version": model_version or "",
    }
    if source is None:
        sources.print_statement(data, dialect, rows, site=site, task=task)
        return
    with nullcontext() if report is None else open_folder(report, "`report`"):
        with bar() as progress:
            parts = source.measure(progress, name=name, site=site, task=task)
        contents = [part.to_json(min_bin=min_bin) for part in parts]
        paths = name_site_files(parts, out) if path is None and not json else [path]
        texts = {place: text for place, text in zip(paths, contents, strict=True) if place}
        if source.note:
            note(source.note)
        for line in (*parts[0].notes, *describe_rows(parts)):
            note(line)
        print_disclosure(parts, contents)
        if not overwrite:
            refuse_changes(texts)
        made = None if report is None else audit_texts(texts)
        pages = []
        if report is not None:
            pages = report_files.write_report(
                made, report, "audit", field="report", overwrite=overwrite
            )
        for place, part in zip(paths, parts, strict=True):
            if place is not None:
                make_folder(place.parent)
                fedgft.auditing.write_sums(part, place, min_bin=min_bin)
        wrote([*texts, *pages])
        if made is not None:
            print_report(made)
    if json:
        sys.stdout.write(contents[0])


def audit(
    *files: Place,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
    wide: Annotated[bool, Flag] = False,
    overwrite: Annotated[bool, Flag] = False,
    reference_groups: Annotated[list[str] | None, Some] = None,
    fail_above: Annotated[list[str] | None, Some] = None,
    adjust: Annotated[list[str] | None, Some] = None,
    bootstrap: Whole = 0,
    worst_mix: float = WORST_MIX,
    scan: Whole | None = None,
    ignore_case: Annotated[bool, Flag] = False,
    compare: Annotated[tuple[Place, Place] | None, Parameter(negative="")] = None,
    tolerance: Annotated[list[str] | None, Some] = None,
    title: str | None = None,
    model_name: str | None = None,
    model_version: str | None = None,
    prepared_by: str | None = None,
    purpose: str | None = None,
    outcome: str | None = None,
    form: Annotated[list[str] | None, Some] = None,
    form_columns: Annotated[list[str] | None, Some] = None,
    form_facts: Annotated[list[str] | None, Some] = None,
) -> None:
    """Combine the sums of all sites into gaps with intervals, each site's share, and a report.

    Parameters
    ----------
    files
        Files that `fedgft measure` wrote, or folders of them.
    out
        Folder for report.html, report.md and audit.json. The folder is created. A report with other
        content is not replaced.
    overwrite
        Replace an earlier report. Without it, the report stays as it is.
    json
        Print only the audit, as JSON.
    wide
        Print all tables and columns [default: those that matter most].
    reference_groups
        Compare every group with this one: White, or race=White sex=Male.
    fail_above
        Exit with code 3 if the 95% interval of a gap lies above a limit, such as sp=0.05, or if
        the gap has no interval. Without --tolerance, the report uses these limits as tolerances.
    adjust
        Find one threshold per group that brings a gap within a target, such as sp=0.02.
    bootstrap
        Compute intervals by a bootstrap over sites, not rows, with this many draws: 2000.
    worst_mix
        Largest change of a site's share of the rows in the worst mix of sites: 0.2 is 20% of it.
    scan
        Print this many subgroups that differ most, by up to three attributes, and as many pairs of
        subgroups. Without it, the report lists 10.
    ignore_case
        Merge names that differ only in case or spaces, such as "Man" and "man".
    compare
        Compare two folders of site files or reports, old and new, and print how each gap changed.
    tolerance
        Largest acceptable gap, for all metrics or by metric: 0.02, 2% or sp=0.02,eop=0.05
        [default: 0.05, that is 5 points].
    title
        Title of the report [default: Fairness audit].
    model_name
        Name of the audited model.
    model_version
        Version of the audited model.
    prepared_by
        Person or office that prepared the report.
    purpose
        Purpose of the audit.
    outcome
        What a positive decision is called, such as approved.
    form
        Fill forms, written beside the report: ll144, ai-act, model-card. They are no legal advice.
    form_columns
        For ll144, the columns of sex and race: sex=gender race=ethnicity [default: by their names].
    form_facts
        What only people know, for the forms: distribution_date=2026-01-05 "auditor=A. Smith".

    Examples
    --------
    fedgft audit north.json south.json east.json --out report
    fedgft audit sums/ --fail-above sp=0.05 eop=0.1
    fedgft audit sums/ --tolerance sp=2% --outcome approved --out report
    fedgft audit sums/ --form ll144 model-card --out report
    """
    require_values(
        fail_above=fail_above, adjust=adjust, reference_groups=reference_groups, tolerance=tolerance
    )
    wanted = read_forms(form, form_columns, form_facts, out)
    is_enough = bootstrap == 0 or bootstrap >= MIN_DRAWS
    require(is_enough, f"`bootstrap` {bootstrap}: needs at least {MIN_DRAWS} draws")
    is_number = scan is None or 1 <= scan <= MAX_SCAN
    require(is_number, f"`scan` {scan}: must lie between 1 and {MAX_SCAN:,}")
    about = {
        "title": title,
        "model": model_name,
        "version": model_version,
        "prepared_by": prepared_by,
        "purpose": purpose,
        "outcome": outcome,
    }
    if compare is not None:
        named = any(text is not None for text in about.values())
        named |= scan is not None
        given = files or fail_above or adjust or bootstrap or reference_groups or tolerance
        given = given or worst_mix != WORST_MIX
        if given or named or wanted.names:
            raise FedgftError(
                "`compare` takes two folders, --out and --json, and nothing else", kind="conflict"
            )
        compare_folders(
            compare, out, json=json, wide=wide, overwrite=overwrite, ignore_case=ignore_case
        )
        return
    if out is not None:
        report_files.check_report_folder(out, "audit", field="out", forms=wanted.names)
    paths = site_file.find_site_files(files)
    if any(map(regression.holds_regression, paths)):
        report, exceeded = numbers.audit_numbers(
            paths,
            limits=fail_above or (),
            tolerance=tolerance,
            reference_groups=reference_groups or (),
            about=about,
            ignore_case=ignore_case,
            refused={
                "adjust": adjust,
                "bootstrap": bootstrap,
                "worst_mix": worst_mix != WORST_MIX,
                "form": form,
                "scan": scan,
            },
        )
        finish_audit(report, exceeded, out, json=json, wide=wide, overwrite=overwrite)
        return
    limits = parse_limits("fail_above", fail_above or ())
    targets = parse_limits("adjust", adjust or ())
    with bar() as progress:
        sums = read_sites(files, progress, ignore_case=ignore_case)
    report = fedgft.audit(
        sums,
        reference_groups=reference_groups or (),
        bootstrap=bootstrap,
        worst_mix=worst_mix,
        adjust_to=targets,
        tolerance=limits if tolerance is None else parse_tolerance(tolerance),
        scan=DEFAULT_SCAN if scan is None else scan,
        about=about | {"files": site_file.find_site_files(files)},
    )
    filled = forms.make_forms(report, *wanted) if wanted.names else []
    several = scan is None or report.to_dict()["scan"] is not None
    require(
        several, "`scan` needs two group columns or more, with groups that are certain", kind="data"
    )
    found = verdicts.find_exceeded(report.to_dict(), limits)
    exceeded = [f"{each.metric} {each.reason}" for each in found]
    finish_audit(
        report,
        exceeded,
        out,
        json=json,
        wide=wide,
        overwrite=overwrite,
        filled=filled,
        more=() if scan is None else report.scan_tables(),
        hints=(RULE_NOTE,) if targets and report.pool.spec.counts_people else (),
    )


# Reports


def finish_audit(
    report: Any,
    exceeded: Sequence[str],
    folder: Path | None,
    *,
    json: bool,
    wide: bool,
    overwrite: bool,
    filled: Sequence[Any] = (),
    more: Sequence[Any] = (),
    hints: Sequence[str] = (),
) -> None:
    """Write and print an audit; end with code 3 if gaps are above their limits.

    Parameters
    ----------
    report
        The `Audit` or `RegressionAudit`.
    exceeded
        A sentence per gap above its limit.
    folder
        The folder for the report, or None.
    json, wide, overwrite
        As in `audit`.
    filled
        The forms to write beside the report.
    more, hints
        Tables and notes that are printed after the report.
    """
    try:
        publish_report(
            report, folder, "audit", json=json, wide=wide, overwrite=overwrite, filled=filled
        )
        for table in () if json or wide else more:
            print_table(table)
        for text in () if json else hints:
            note(text)
    finally:  # also where the reader of the output has closed the pipe
        for text in exceeded:
            say(f"`fail_above`: {text}")
        if exceeded:
            raise SystemExit(EXIT_EXCEEDED)


def print_report(report: Any, *, wide: bool = False) -> None:
    """Print the findings of an `Audit` or a `Comparison`, and the tables behind them.

    Parameters
    ----------
    report
        The `Audit` or `Comparison`.
    wide
        Whether to print all tables and columns of the report. A line is as long as the terminal is
        wide, and as long as it has to be in a file or a pipe.
    """
    summary = report.to_dict()
    out.print(report.lead(), markup=False, highlight=False, emoji=False)
    print_signs(report.verdict())
    out.print()
    for table in report.report().tables if wide else report.tables():
        print_table(table, width=FILE_WIDTH if wide and not out.is_terminal else None)
    for text in summary["warnings"]:
        note(text)
    if "interval" in summary:
        note(f"95% intervals: {summary['interval']}")
    if not wide:
        note("--wide prints all tables and columns")


def publish_report(
    report: Any,
    folder: Path | None,
    kind: "ReportKind",
    *,
    json: bool,
    wide: bool,
    overwrite: bool,
    filled: Sequence["Form"] = (),
) -> None:
    """Write an audit with its forms, or a comparison, to a folder if one is named; print it."""
    if folder is not None:
        wrote(
            report_files.save_report(
                report, folder, kind, field="out", overwrite=overwrite, forms=filled
            )
        )
        for each in filled:
            if each.to_complete:
                listed = ", ".join(each.to_complete)
                note(f"{each.name}, to be completed (`form_facts` states facts): {listed}")
    if not json:
        print_report(report, wide=wide)
        return
    try:
        sys.stdout.write(report.to_json())
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


# Forms


class _Forms(NamedTuple):
    """The forms that the user asked for, and the columns and facts that were stated for them."""

    names: Sequence["FormName"] = ()
    columns: Mapping[str, str] = MappingProxyType({})
    facts: Mapping[str, str] = MappingProxyType({})


def read_forms(
    names: Sequence[str] | None,
    columns: Sequence[str] | None,
    facts: Sequence[str] | None,
    folder: Path | None,
) -> _Forms:
    """Check the values of --form, --form-columns and --form-facts, before any file is read."""
    if names is None:
        for field, given in (("form_columns", columns), ("form_facts", facts)):
            require(given is None, f"`{field}` needs `form`, such as ll144", kind="conflict")
        return _Forms()
    require_values(form=names, form_columns=columns, form_facts=facts)
    chosen = [forms.check_name(name) for name in dict.fromkeys(split_columns(names))]
    require(chosen, "`form` needs a value", kind="missing")
    require(folder, "`form` needs `out`: the folder for its files", kind="missing")
    found = _Forms(chosen, _parse_pairs("form_columns", columns), _parse_pairs("form_facts", facts))
    return found._replace(
        columns=forms.check_columns(chosen, found.columns),
        facts=forms.check_facts(chosen, found.facts),
    )


def _parse_pairs(field: str, items: Sequence[str] | None) -> dict[str, str]:
    """Read KEY=TEXT."""
    found: dict[str, str] = {}
    for item in items or ():
        key, equals, text = (part.strip() for part in item.partition("="))
        require(key and equals and text, f"`{field}` {item}: write KEY=VALUE")
        require(key not in found, f"`{field}` {item}: {key} is given twice", kind="conflict")
        found[key] = text
    return found


# Audits


def audit_texts(texts: Mapping[Path, str]) -> "Audit":
    """Return the audit of the numbers in files of sites, where sums are rounded."""
    parts = [fedgft.SiteSums.from_json(text, source=str(path)) for path, text in texts.items()]
    digests = {path.name: sha256(text.encode()).hexdigest() for path, text in texts.items()}
    return fedgft.audit(parts, about={"files": digests})


def parse_tolerance(items: Sequence[str]) -> dict[str, float] | float:
    """Read the tolerance: one gap for all metrics, or METRIC=GAP; several with commas or spaces."""
    parts = split_columns(items)
    require(parts, "`tolerance` needs a value", kind="missing")
    plain = [part for part in parts if "=" not in part]
    if len(parts) == 1 and plain:
        return parse_gap("tolerance", parts[0], parts[0])
    text = "give one gap for all metrics, such as 0.02, or METRIC=GAP, such as sp=0.02"
    require(not plain, f"`tolerance` {' '.join(items)}: {text}")
    return parse_limits("tolerance", parts)


def parse_gap(field: str, item: str, text: str) -> float:
    """Read a gap: 0.02 or 2%."""
    number = text.strip().removesuffix("%")
    try:
        gap = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        gap = -1.0
    is_gap = 0 <= gap < 1
    example = "such as 0.02 or 2%"
    require(is_gap, f"`{field}` {item}: the gap must be 0 or more and below 1, {example}")
    return gap


def parse_limits(field: str, items: Sequence[str]) -> dict[str, float]:
    """Read METRIC=GAP, as in sp=0.05, several with commas or spaces; return the gaps by metric."""
    limits: dict[str, float] = {}
    parts = split_columns(items)
    require(parts or not items, f"`{field}` needs a value", kind="missing")
    for item in parts:
        name, equals, value = item.partition("=")
        name = fedgft.metrics.catalog.resolve_name(name)
        known = ", ".join(fedgft.metrics.CATALOG)
        is_pair = equals and name in fedgft.metrics.CATALOG
        require(is_pair, f"`{field}` {item}: write METRIC=GAP, such as sp=0.05, of {known}")
        require(name not in limits, f"`{field}` {item}: {name} is given twice")
        limits[name] = parse_gap(field, item, value)
    return limits


def read_sites(files: Sequence[Path], progress: Bar, *, ignore_case: bool) -> "SiteSums":
    """Return the sums of all sites in the files and folders."""
    paths = site_file.find_site_files(files)

    def show(done: int) -> None:
        progress.fetch("reading sites", done, len(paths))

    return site_file.gather(paths, show, ignore_case=ignore_case)


def compare_folders(
    folders: tuple[Path, Path],
    folder: Path | None,
    *,
    json: bool,
    wide: bool,
    overwrite: bool,
    ignore_case: bool,
) -> None:
    """Compare two folders, old and new; write the comparison to `folder` and print it."""
    if folder is not None:
        report_files.check_report_folder(folder, "comparison", field="out")
    with bar() as progress:
        old, new = (_read_summary(each, progress, ignore_case=ignore_case) for each in folders)
    compared = comparison.compare(old, new)
    publish_report(compared, folder, "comparison", json=json, wide=wide, overwrite=overwrite)


def _read_summary(folder: Path, progress: Bar, *, ignore_case: bool) -> "Summary":
    """Return the summary in a report, or of the audit of a folder of site files."""
    report = folder / "audit.json" if folder.is_dir() else folder
    if report.is_file() and site_file.is_report(report):
        return summaries.read_summary(report)
    return fedgft.audit(read_sites([folder], progress, ignore_case=ignore_case)).to_dict()


# Sites


def require_column(field: str, given: object, purpose: str, known: Sequence[str]) -> None:
    """Raise a `FedgftError` that lists the columns of the table if no column is given."""
    listed = ", ".join(map(printable, known[:MAX_COLUMNS]))
    listed += f" and {len(known) - MAX_COLUMNS} more" if len(known) > MAX_COLUMNS else ""
    listed = f" (columns are: {listed})" if known else ""
    require(given, f"`{field}` is missing: {purpose}{listed}", kind="missing")


def parse_groups(
    items: Sequence[str], known: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the columns of groups, and the values of those columns that list them.

    `race=White,Black` is a column with its values; `race,sex` is two columns.

    Parameters
    ----------
    items
        The values of --group.
    known
        The columns of the table.
    """
    columns: list[str] = []
    values = {}
    for item in items:
        name, equals, listed = item.partition("=")
        if equals and item not in known:
            columns.append(name)
            values[name] = tuple(value.strip() for value in listed.split(",") if value.strip())
            require(values[name], f"`group` {item}: lists no values")
        else:
            columns += split_columns([item], known)
    return tuple(columns), values


def parse_probabilities(item: str | None) -> dict[str, dict[str, str]] | None:
    """Read sex=woman:p_woman,man:p_man: the columns with probabilities, by attribute and group."""
    if item is None:
        return None
    attribute, _, listed = item.partition("=")
    pairs = [pair.rpartition(":") for pair in listed.split(",")]
    is_valid = attribute.strip() and all(
        name.strip() and column.strip() for name, _, column in pairs
    )
    text = "write NAME=GROUP:COLUMN,GROUP:COLUMN, such as sex=woman:p_woman,man:p_man"
    require(is_valid, f"`group_probabilities` {item}: {text}")
    columns = {name.strip(): column.strip() for name, _, column in pairs}
    require(len(columns) == len(pairs), f"`group_probabilities` {item}: names a group twice")
    return {attribute.strip(): columns}


def site_file_name(site: str) -> str:
    """Return the name of a site's file: that of the site, without what file names cannot hold."""
    name = re.sub(r"[^\w.-]+", "-", site).strip(".-")
    short = name.encode()[:MAX_FILE_NAME].decode(errors="ignore")  # as file systems count
    return f"{short or 'site'}.json"


def read_site_name(path: Path) -> str:
    """Return the name of the site in a file of sums."""
    (name,) = fedgft.auditing.read_sums(path).sites
    return name


def choose_site_file(
    site: str, given: Path | None, *, json: bool, read: Callable[[Path], str] = read_site_name
) -> Path | None:
    """Return the path of a site's file, which may be written; None if no file is wanted.

    Parameters
    ----------
    site
        The name of the site.
    given
        A file, or an existing folder for NAME.json. None: NAME.json in the current folder.
    json
        Whether the sums are printed; then there is a file only if it is named.
    read
        Returns the name of the site in an existing file of the same kind.
    """
    is_text = site.strip() and site == site.encode("utf-8", "replace").decode("utf-8")
    require(is_text, f"`name` {printable(site)!r}: must be proper text, and not empty")
    if given is None and json:
        return None
    path = Path(site_file_name(site)) if given is None else given
    path = path / site_file_name(site) if path.is_dir() else path
    check_site_file(path, site, read)
    return path


def name_site_files(
    parts: Sequence[Any], folder: Path | None, *, read: Callable[[Path], str] = read_site_name
) -> list[Path]:
    """Return the path of the file of each site, in a folder; each may be written."""
    paths: dict[Path, str] = {}
    for part in parts:
        (site,) = part.sites
        path = (folder or Path()) / site_file_name(site)
        if path in paths:
            text = f"sites '{paths[path]}' and '{site}' would share the file {path}; rename one"
            raise FedgftError(text, field="site", kind="conflict")
        paths[path] = site
    for path, site in paths.items():
        check_site_file(path, site, read)
    return list(paths)


def check_site_file(path: Path, site: str, read: Callable[[Path], str]) -> None:
    """Raise a `FedgftError` if the path is taken by anything but a file of the same site."""
    require(not path.is_dir(), f"`out` {path}: is a folder; name a file in it", kind="file")
    refuse_link(path, "`out`")
    if not path.exists():
        return
    require(
        path.is_file(), f"`out` {path}: is not a regular file; --json prints the sums", kind="file"
    )
    try:
        found = read(path)
    except FedgftError:
        text = f"`out` {path}: exists and is not a file of sums; name another file"
        raise FedgftError(text, kind="file") from None
    text = f"`out` {path}: holds the sums of site '{found}'; name another file"
    require(found == site, text, kind="file")


def check_site_report(folder: Path, sums: Path | None) -> None:
    """Raise a `FedgftError` if the report would replace foreign files, or the sums."""
    report_files.check_report_folder(folder, "audit", field="report")
    written = [folder, *(folder / name for name in report_files.report_names("audit"))]
    is_apart = sums is None or sums.absolute() not in [path.absolute() for path in written]
    require(is_apart, f"`report` {folder}: the sums go to {sums}; name another folder")


def refuse_changes(texts: Mapping[Path, str]) -> None:
    """Raise a `FedgftError` for the first file that holds another text than the new one."""
    problem = "exists with other numbers; name another file, or replace it with `overwrite`"
    for path, text in texts.items():
        is_same = not path.exists() or path.read_bytes() == text.encode()
        require(is_same, f"`out` {path}: {problem}", kind="file")


def describe_rows(parts: Sequence["SiteSums"]) -> list[str]:
    """Return notes about the rows of the sites: groups, classes, missing values."""
    spec = parts[0].require_spec()
    sites = {name: site for part in parts for name, site in part.sites.items()}
    attributes = len(spec.attributes)
    found = {group[:attributes] for site in sites.values() for group in site.tables}
    groups = [group for group in found if None not in group]
    rows = sum(part.rows() for part in parts)
    counted = f"{rows:,.0f} rows in {format_count(len(groups), 'group')}"
    notes = [f"{next(iter(sites))}: {counted}"]
    if len(parts) > 1:
        listed = [f"{name} {part.rows():,.0f}" for part in parts for name in part.sites]
        more = f" and {len(listed) - MAX_SITES} more" if len(listed) > MAX_SITES else ""
        notes = [f"{len(parts)} sites, {counted}: {', '.join(listed[:MAX_SITES])}{more}"]
    if len(spec.classes) == 2:
        notes.append(f"the positive class is '{spec.classes[1]}' (`positive` names another)")
    else:
        notes.append(f"classes, in the order of the score columns: {', '.join(spec.classes)}")
    is_protected = any(site.privacy for site in sites.values())
    for what in ("label", "prediction"):
        missing = sum(getattr(site, f"{what}_missing") for site in sites.values())
        if missing > 0:
            number = "a few" if missing != int(missing) or is_protected else f"{missing:,.0f}"
            notes.append(f"rows without a {what}, counted separately: {number}")
    columns = {"group": slice(attributes), "stratum": slice(attributes, None)}
    for what, part in columns.items():
        unknown = sum(
            table[..., site_sums.ROWS if spec.is_weighted else site_sums.COUNT].sum()
            for site in sites.values()
            for group, table in site.tables.items()
            if None in group[part]
        )
        if unknown > 0:
            notes.append(f"rows without a recorded {what}: {unknown:,.0f}")
    return notes


def print_disclosure(parts: Sequence["SiteSums"], contents: Sequence[str]) -> None:
    """Print what the files reveal about few people, and how to reveal less.

    Parameters
    ----------
    parts
        The sums of each site.
    contents
        The texts of their files: the numbers that are printed are those in the files.
    """
    privacies = [each for part in parts for site in part.sites.values() for each in site.privacy]
    if privacies and privacies[0].mechanism != "none":
        for line in _describe_noise(privacies[0]):
            note(line)
        return
    found = site_file.combine_revealed(contents)
    holds = "the file holds" if len(parts) == 1 else f"the {len(parts)} files hold"
    few = site_sums.MIN_SUM_ROWS
    note(
        f"{holds} {format_count(found['cells'], 'count')} of people by group, label and decision; "
        f"the smallest is {found['smallest_cell']:,}"
    )
    if privacies:
        withheld = sum(each.suppressed for each in privacies)
        largest = privacies[0].min_cell - 1
        counts = format_count(withheld, "count")
        note(f"{counts} of 1 to {largest} people withheld, and all scores")
    elif found["cells_below_10"]:
        noise = "" if parts[0].require_spec().is_weighted else ", --epsilon 1 adds noise"
        verb = "is" if found["cells_below_10"] == 1 else "are"
        warn(
            f"{found['cells_below_10']:,} of these counts {verb} of fewer than {few} people, who "
            f"may be recognized; --min-cell {few} withholds such counts{noise}"
        )
    if not found["score_counts"]:
        return
    note(
        f"{holds} {format_count(found['score_counts'], 'count')} of people by range of the score; "
        f"the smallest is {found['smallest_score_count']:,}"
    )
    if found["score_counts_below_5"]:
        least = site_sums.MIN_BIN
        verb = "holds" if found["score_counts_below_5"] == 1 else "hold"
        warn(
            f"{found['score_counts_below_5']:,} of these ranges {verb} fewer than {least} people, "
            f"whose scores can be read from the file; --min-bin {least} merges such ranges"
        )


def _describe_noise(privacy: "Privacy") -> list[str]:
    """Return notes about what the noise in a file protects, and what it does not."""
    notes = [
        f"{privacy.mechanism} noise of scale {privacy.scale:.3g} is on every count: epsilon "
        f"{privacy.epsilon:g}, delta {privacy.delta:g} for one row; measuring again spends the "
        "same budget again"
    ]
    if privacy.names != "declared":
        notes.append(
            "the names of groups and classes come from the data and are not protected: list them "
            "(--group race=A,B --classes no yes)"
        )
    return notes

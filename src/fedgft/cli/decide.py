"""`fedgft decide`: apply a decision rule to scores; `fedgft predict`: apply a saved model."""

import math
import sys
from collections.abc import Sequence
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import fedgft
from fedgft.cli.console import note, print_json, wrote
from fedgft.cli.options import Columns, Flag, Place, require, require_values, split_columns
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count, join_names

if TYPE_CHECKING:
    import polars as pl

    from fedgft.fair_model import FairModel
    from fedgft.rules import DecisionRule
else:
    pl = LazyModule("polars")

# Loaded when a command runs, so that help is printed at once.
encode = LazyModule("fedgft.data.encode")
measurement = LazyModule("fedgft.auditing.measurement")
table_scan = LazyModule("fedgft.data.table_scan")
np = LazyModule("numpy")
tables = LazyModule("fedgft.data.table")


def decide(
    file: Place | None = None,
    /,
    *,
    rule: Place | None = None,
    data: Place | None = None,
    score: str | None = None,
    decision: str | None = None,
    group: Columns | None = None,
    site: str | None = None,
    site_name: str | None = None,
    id: str | None = None,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    decision_name: str = "decision",
    json: Annotated[bool, Flag] = False,
) -> None:
    """Decide about the people of a table by a rule: adds the column decision.

    The scores may be those of any model.

    Parameters
    ----------
    file
        A CSV or Parquet file with one row per person.
    rule
        The rule that `fedgft adjust` wrote. Required.
    data
        The same file as FILE, given as an option.
    score
        Column with the probability of the positive class.
    decision
        Column with the decision, for a rule that changes decisions.
    group
        Columns with the groups, in the order of the rule's columns [default: the columns of the
        rule's names].
    site
        Column with the site of each row, for a rule that differs by site.
    site_name
        Site of all rows, for a rule that differs by site.
    id
        Column with an identifier of each person, for a randomized rule. The same identifier always
        gets the same decision.
    out
        A .csv or .parquet file [default: CSV to stdout].
    decision_name
        Name of the new column, if the table has a column decision.
    json
        Print the table to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft decide people.csv --score p --rule rule.json --out decided.csv
    fedgft decide people.csv --score p --rule rule.json --site bank --id customer
    """
    require_values(group=group)
    file = _choose_file(file, data)
    if rule is None:
        raise FedgftError("is missing: a file of `fedgft adjust`", field="rule", kind="missing")
    if out is not None:
        tables.check_table_path(out)
        _check_earlier(out, "decisions", decision_name)
    loaded = fedgft.load_rule(rule)
    written = _read_as_written(file)
    _check_new_name(file, written.columns, decision_name)
    options = {"score": score, "decision": decision}
    other = "decision" if loaded.reads == "score" else "score"
    require(options[other] is None, f"`{other}`: the rule {rule} reads the {loaded.reads}s instead")
    column = options[loaded.reads]
    if column is None:
        known = join_names(written.columns)
        text = f"is missing: the column with the {loaded.reads}s (columns are: {known})"
        raise FedgftError(text, field=loaded.reads, kind="missing")
    scores = _get_values(written, column, file, loaded.reads)
    if loaded.reads == "score" and scores.dtype == pl.String:
        scores = encode.parse_numbers(scores, source=str(file))
    decided = apply_rule(
        loaded, scores, written, file, group=group, site=site, site_name=site_name, id=id
    )
    table = written if _writes_csv(out, json=json) else tables.read_frame(file)
    _publish(table.with_columns(decided.alias(decision_name)), out, json=json)


def predict(
    model: Place,
    file: Place | None = None,
    /,
    *,
    data: Place | None = None,
    rule: Place | None = None,
    group: Columns | None = None,
    site: str | None = None,
    site_name: str | None = None,
    id: str | None = None,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    score_name: str = "score",
    decision_name: str = "decision",
    json: Annotated[bool, Flag] = False,
) -> None:
    """Apply a saved model to a table; adds the columns score and decision.

    Parameters
    ----------
    model
        A model.safetensors that `fedgft train` wrote, or a .json of XGBoost that fedgft saved.
    file
        A CSV or Parquet file with the columns that the model was trained on.
    data
        The same file, given as an option.
    rule
        Decide by a rule of `fedgft adjust`, not by the most probable class.
    group
        With --rule: columns with the groups [default: the columns of the rule's names].
    site
        With --rule: column with the site of each row, if the rule differs by site.
    site_name
        With --rule: site of all rows, if the rule differs by site.
    id
        With --rule: column with an identifier of each person, if the rule is randomized.
    out
        A .csv or .parquet file [default: CSV to stdout].
    score_name
        Name of the new column with the score, if the table has a column score. With more than two
        classes: the start of the names.
    decision_name
        Name of the new column with the decision, if the table has a column decision.
    json
        Print the table to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft predict fedgft-train/model.safetensors people.csv --out scored.csv
    fedgft predict model.safetensors people.csv --rule rule.json --out decided.csv
    """
    require_values(group=group)
    file = _choose_file(file, data)
    options = {"group": group, "site": site, "site_name": site_name, "id": id}
    for name, value in options.items():
        require(rule is not None or value is None, f"`{name}` is for `rule`: give both")
    if out is not None:
        tables.check_table_path(out)
        _check_earlier(out, "predictions", decision_name, score_name)
    loaded = fedgft.load_model(model)
    found = None
    if rule is not None:
        found = fedgft.load_rule(rule)
        _check_classes(loaded, model, found, rule)
    frame = tables.read_frame(file)
    table, notes = loaded.add_predictions(
        frame, source=str(file), score_name=score_name, decision_name=decision_name
    )
    for text in notes:
        note(text)
    written = _read_as_written(file)
    if found is not None:
        values = table[score_name if found.reads == "score" else decision_name]
        decided = apply_rule(found, values, written, file, features=frame, **options)
        table = table.with_columns(decided.alias(decision_name))
    if _writes_csv(out, json=json):
        table = written.with_columns(table.select(pl.exclude(frame.columns)))
    _publish(table, out, json=json)


# Rules


def apply_rule(
    rule: "DecisionRule",
    scores: "pl.Series",
    written: "pl.DataFrame",
    file: Path,
    *,
    group: Sequence[str] | None,
    site: str | None,
    site_name: str | None,
    id: str | None,
    features: "pl.DataFrame | None" = None,
) -> "pl.Series":
    """Return the decision of a rule about each row, as names of classes; errors name the file.

    Parameters
    ----------
    rule
        The rule.
    scores
        The scores, or the decisions if the rule reads decisions.
    written
        The table, whose columns of groups, sites and identifiers are read as `fedgft measure`
        reads them.
    file
        The file of the table.
    group, site, site_name, id
        The options of the command.
    features
        The table with types, for a group-blind rule [default: it is read].
    """
    names = _choose_groups(rule, group, written.columns)
    groups = {
        own: _get_values(written, name, file, "group")
        for own, name in zip(rule.attributes, names, strict=False)
    }
    sites = _choose_sites(rule, site, site_name, written, file)
    ids = None if id is None else _get_values(written, id, file, "id")
    if rule.is_random and ids is None:
        text = "`id` is missing: the rule is randomized, and its coin is a hash of an identifier"
        raise FedgftError(f"{text}; name the column with one", kind="missing")
    if rule.is_blind and features is None:
        features = tables.read_frame(file)
    try:
        accepted = rule.decide(
            scores,
            None if rule.is_blind else groups,
            sites=sites,
            ids=ids,
            features=features if rule.is_blind else None,
        )
    except FedgftError as error:
        text = f"{file}: {error.message.removeprefix('features: ')}"
        raise FedgftError(text, field=error.field, kind=error.kind) from None
    absent = pl.DataFrame(groups).select(pl.any_horizontal(pl.all().is_null())).to_series()
    if absent.any():
        rows = format_count(int(absent.sum()), "row")
        how = rule.unrecorded.describe() if rule.reads == "score" else "as before"
        note(f"{rows} without a recorded group: decided {rule.classes[1]} {how}")
    if ids is not None and not rule.is_random:
        note("the rule has no coins: `id` is not used")
    share = accepted.mean() if len(accepted) else 0.0
    note(f"{format_count(len(accepted), 'row')}: {100 * share:.1f}% decided {rule.classes[1]}")
    return pl.Series(rule.classes).gather(accepted.astype(np.int64))


def _choose_groups(
    rule: "DecisionRule", group: Sequence[str] | None, known: Sequence[str]
) -> Sequence[str]:
    """Return the columns of the table that stand for the columns of the rule."""
    if rule.is_blind:
        text = "`group`: the rule is group-blind and must not see groups; leave it out"
        require(group is None, text, kind="conflict")
        return ()
    if group is None:
        return rule.attributes
    names = split_columns(group, known)
    listed = ", ".join(rule.attributes)
    text = (
        f"`group` {' '.join(names)}: the rule reads {format_count(len(rule.attributes), 'column')}"
    )
    require(len(names) == len(rule.attributes), f"{text}, {listed}")
    if set(names) == set(rule.attributes):
        return rule.attributes
    for own, name in zip(rule.attributes, names, strict=True):
        text = f"`group` {' '.join(names)}: name the columns in the order of the rule, {listed}"
        require(own == name or name not in rule.attributes, text)
    return names


def _choose_sites(
    rule: "DecisionRule",
    site: str | None,
    site_name: str | None,
    written: "pl.DataFrame",
    file: Path,
) -> Any:
    """Return the sites of the rows, one name for all, or None for a rule that needs none."""
    given = [
        name for name, value in (("site", site), ("site_name", site_name)) if value is not None
    ]
    if not rule.per_site:
        for name in given:
            text = f"`{name}`: the rule is the same at all sites; leave it out"
            raise FedgftError(text, kind="conflict")
        return None
    require(len(given) < 2, "`site` and `site_name` exclude each other: give one", kind="conflict")
    if not given:
        text = "`site` is missing: the rule differs by site; name the column with the site, or the "
        raise FedgftError(f"{text}site of all rows with `site_name`", kind="missing")
    if site is not None:
        return _get_values(written, site, file, "site")
    text = f"`site_name` {site_name}: the rule was fitted at {join_names(list(rule.sites))} only"
    require(site_name in rule.sites, text)
    return site_name


def _check_classes(model: "FairModel", path: Path, rule: "DecisionRule", rule_path: Path) -> None:
    """Raise a `FedgftError` unless the rule is about the classes of the model."""
    count = len(model.classes)
    text = f"{path}: has {count} classes, and the rule {rule_path} decides between two"
    require(count == 2, text, kind="unsupported")
    own, other = (
        f"{positive} (not {negative})" for negative, positive in (model.classes, rule.classes)
    )
    text = f"{rule_path}: the rule is about {other}, the model {path} about {own}"
    require(model.classes == rule.classes, text, kind="conflict")


# Tables


def _choose_file(file: Path | None, data: Path | None) -> Path:
    """Return the table, which may be given with or without --data."""
    require(file is None or data is None, "`data` names a second table: give one", kind="conflict")
    file = data if file is None else file
    if file is None:
        raise FedgftError("is missing: a CSV or Parquet file", field="file", kind="missing")
    return file


def _read_as_written(file: Path) -> "pl.DataFrame":
    """Return the table; the cells of a CSV file as the texts that they are."""
    if not _is_csv(file):
        return tables.read_frame(file)
    place = tables.check_table_file(file)
    with tables.report_read_errors(place):
        separator = tables.detect_separator(place)
        frame = pl.read_csv(place, glob=False, separator=separator, infer_schema=False)
    if frame.height == 0:
        raise encode.data_error(str(file), "the file has no rows")
    return frame


def _get_values(frame: "pl.DataFrame", name: str, file: Path, option: str) -> "pl.Series":
    """Return a column with null for the values that `fedgft measure` takes as missing."""
    series = encode.get_column(frame, name, source=str(file), option=f"`{option}`")
    if _is_csv(file):
        return series.set(series.is_in(table_scan.MISSING_VALUES), None)
    return series.fill_nan(None) if series.dtype.is_float() else series


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _writes_csv(out: Path | None, *, json: bool) -> bool:
    """Return whether the table is written as CSV: cells of a CSV file then stay as they are."""
    return not json if out is None else _is_csv(out)


def _check_new_name(file: Path, columns: Sequence[str], name: str) -> None:
    """Raise a `FedgftError` if the table has the column that would be added."""
    require(name.strip(), "`decision_name` must not be empty")
    text = f"{file}: has a column '{name}' already; give another `decision_name`"
    require(name not in columns, text, kind="conflict")


def _check_earlier(out: Path, what: str, decision_name: str, score_name: str | None = None) -> None:
    """Raise a `FedgftError` if the file exists and does not hold what the command writes."""
    if not out.is_file():
        return
    try:
        columns = measurement.read_header(out)
        has_score = score_name is None or any(name.startswith(score_name) for name in columns)
        is_earlier = has_score and decision_name in columns
    except FedgftError:  # it is no table
        is_earlier = False
    text = f"`out` {out}: exists and holds no {what}; name another file"
    require(is_earlier, text, kind="file")


def _publish(table: "pl.DataFrame", out: Path | None, *, json: bool) -> None:
    """Write the table to a file or to stdout."""
    is_csv = _writes_csv(out, json=json)
    escaped, changed = tables.escape_formulas(table) if is_csv else (table, 0)
    if changed:
        note(
            f"{format_count(changed, 'text')} that a spreadsheet would run as a formula: written "
            "to CSV with an apostrophe in front (not to Parquet or JSON)"
        )
    if out is not None:
        wrote([tables.write_table(escaped, out)])
    if json:
        rows = table.iter_rows(named=True)
        print_json([{name: _to_json_value(value) for name, value in row.items()} for row in rows])
    elif out is None:
        sys.stdout.write(escaped.write_csv())


def _to_json_value(value: Any) -> Any:
    """Return a value that JSON can represent: JSON has neither dates nor NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float | None) else str(value)

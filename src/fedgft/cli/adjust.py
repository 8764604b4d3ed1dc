"""`fedgft adjust`: the best fair decision rule for a finished model, from the sums of sites."""

import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import fedgft
from fedgft.cli.audit import parse_limits
from fedgft.cli.console import bar, note, out, paragraph, print_signs, print_table, wrote
from fedgft.cli.options import (
    Columns,
    Flag,
    Number,
    Place,
    Some,
    require,
    require_values,
    split_columns,
)
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import (
    Table,
    format_count,
    format_interval,
    format_percent,
    format_points,
    join_names,
)
from fedgft.store import make_folder, refuse_link

if TYPE_CHECKING:
    from fedgft.rules import Acceptance, DecisionRule
    from fedgft.site_sums import SiteSums

# Loaded when a command runs, so that help is printed at once.
np = LazyModule("numpy")
adjustment = LazyModule("fedgft.rules.adjustment")
blind_rules = LazyModule("fedgft.rules.blind")
site_file = LazyModule("fedgft.auditing.site_file")

DEFAULT_RULE = Path("rule.json")
MAX_CELLS = 20  # lines of the table of thresholds
MIN_GROWTH = 0.005  # of the largest gap of a site, which a warning mentions
GROUP_WARNING = (
    "The rule needs the group of every person at decision time, which the law may forbid "
    "(treating people differently by group). From the tables themselves, `fedgft adjust --blind` "
    "finds a rule that decides without the group."
)
ESTIMATED_WARNING = (
    "The site files join score ranges with few people, withhold small counts or have noise, so "
    "accuracy and gaps are estimates. `fedgft measure --min-bin 1` keeps every range."
)
COIN_NOTE = (
    "{file} holds the key of the coins: keep it secret. The same identifier always gets the same "
    "decision, as long as the key stays the same."
)


def adjust(
    *files: Place,
    target: Annotated[list[str] | None, Some] = None,
    local: Annotated[list[str] | None, Some] = None,
    group: Columns | None = None,
    per_site: Annotated[bool, Flag] = False,
    randomized: Annotated[bool, Flag] = False,
    decisions: Annotated[bool, Flag] = False,
    blind: Annotated[bool, Flag] = False,
    label: str | None = None,
    score: str | None = None,
    positive: str | None = None,
    leave_out: Columns | None = None,
    benefit: Number = 1.0,
    cost: Number = 1.0,
    nearest: Annotated[bool, Flag] = False,
    ignore_case: Annotated[bool, Flag] = False,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    overwrite: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Find the best fair decision rule for a finished model, from the sums of all sites.

    The rule is the most accurate one whose gaps are within the targets. `fedgft decide` applies it
    to scores, `fedgft predict --rule` to a model of fedgft.

    Parameters
    ----------
    files
        Files that `fedgft measure` wrote, or folders of them. With --blind: the tables themselves.
    target
        Largest gap over all sites, by metric, such as sp=0.02 or sp=2%. Required, unless --local is
        given.
    local
        Largest gap at every site, by metric, such as sp=0.05.
    group
        Group columns to compare: sex, or "race & sex" for their combinations [default: each group
        column alone].
    per_site
        Thresholds of its own for each site.
    randomized
        Decide by a coin between thresholds. It reaches targets that no fixed thresholds reach.
    decisions
        Change decisions by a coin, without the scores. Needs --randomized.
    blind
        A rule that decides without the group: a threshold that bends with the other columns. It is
        fitted on tables, which must be on this computer, with --label, --group and --score.
    label
        With --blind: the column with the true outcome.
    score
        With --blind: the column with the probability of the positive class.
    positive
        With --blind: the positive one of the two labels.
    leave_out
        With --blind: columns that the rule must not read.
    benefit
        Value of a right positive decision. With --cost: the rule of the largest value.
    cost
        Cost of a wrong positive decision.
    nearest
        If no rule meets the targets: the nearest one, instead of an error.
    ignore_case
        Merge names that differ only in case or spaces, such as "Man" and "man".
    out
        File for the rule [default: rule.json]. A file with other content is not replaced.
    overwrite
        Replace an earlier rule. Without it, the rule stays as it is.
    json
        Print the rule to stdout, without the key of its coins. A file is written only if --out
        names one.

    Examples
    --------
    fedgft adjust north.json south.json --target sp=0.02
    fedgft adjust sums/ --target sp=2% eop=5% --group "race & sex" --out rule.json
    fedgft adjust sums/ --target sp=0.02 --local sp=0.05 --per-site --randomized
    fedgft adjust --blind a.csv --label y --group sex --score p --target sp=2%
    """
    require_values(target=target, local=local, group=group)
    groups = split_columns(group or ())
    require(groups or group is None, "`group` needs a value", kind="missing")
    targets = parse_limits("target", target or ())
    local_targets = parse_limits("local", local or ())
    if not targets and not local_targets:
        text = "`target` is missing: the largest gap to allow, such as sp=0.02"
        raise FedgftError(text, kind="missing")
    path = out if out is not None or json else DEFAULT_RULE
    columns = {"label": label, "score": score, "positive": positive, "leave_out": leave_out}
    if blind:
        rates = {"local": local, "per_site": per_site, "randomized": randomized}
        for option, value in {**rates, "decisions": decisions, "ignore_case": ignore_case}.items():
            text = f"`{option}` and `blind` exclude each other: give one"
            require(not value, text, kind="conflict")
        for option, value in {"label": label, "group": groups, "score": score}.items():
            require(value, f"`{option}` is missing: `blind` reads tables", kind="missing")
        require(files, "name the tables: CSV or Parquet files", kind="missing")
        earlier = None if path is None else read_earlier_rule(path)
        with bar() as progress:
            progress.fetch("searching for the best rule", 0, None)
            rule = blind_rules.fit_blind_rule_to_tables(
                files,
                label=label or "",
                group=groups,
                score=score or "",
                target=targets,
                positive=positive,
                leave_out=split_columns(leave_out or ()),
                benefit=benefit,
                cost=cost,
                nearest=nearest,
            )
        _finish(rule, path, earlier, overwrite=overwrite, json=json)
        return
    for option, value in columns.items():
        require(value is None, f"`{option}` is only for `blind`, which reads tables")
    paths = site_file.find_site_files(files)
    for option, given in (("local", local_targets), ("per_site", per_site)):
        text = f"`{option}` compares sites, and there is one file only, {paths[0]}"
        require(not given or len(paths) > 1, f"{text}: name the file of each site", kind="missing")
    if json and randomized and out is None:
        text = "is missing: the rule has a secret key, which only goes into a file"
        raise FedgftError(text, field="out", kind="missing")
    earlier = None if path is None else read_earlier_rule(path)
    digests: dict[str, str] = {}
    notes: dict[str, None] = {}
    may_lack_scores = randomized or decisions
    with bar() as progress:

        def show(done: int) -> None:
            progress.fetch("reading sites", done, len(paths))
            if done == len(paths):
                progress.fetch("searching for the best rule", 0, None)

        sites = site_file.read_each_site(paths, show, ignore_case=ignore_case, digests=digests)
        checked = _check_each(sites, notes, may_lack_scores=may_lack_scores)
        rule = fedgft.adjust(
            list(checked) if len(paths) <= adjustment.MAX_SITES_APART else checked,
            target=targets,
            local=local_targets,
            groups=groups,
            per_site=per_site,
            randomized=randomized,
            decisions=decisions,
            benefit=benefit,
            cost=cost,
            nearest=nearest,
            key=None if earlier is None or not earlier.key else earlier.key,
            digests=digests,
        )
    _finish(rule, path, earlier, overwrite=overwrite, json=json, notes=notes)


def _finish(
    rule: "DecisionRule",
    path: Path | None,
    earlier: "DecisionRule | None",
    *,
    overwrite: bool,
    json: bool,
    notes: Iterable[str] = (),
) -> None:
    """Save and print a rule."""
    if path is not None:
        save_rule(rule, path, earlier, overwrite=overwrite)
    for text in notes:
        note(text)
    if json:
        sys.stdout.write(replace(rule, key="").to_json())
    else:
        print_rule(rule, path or DEFAULT_RULE)


def _check_each(
    sites: Iterator["SiteSums"], notes: dict[str, None], *, may_lack_scores: bool
) -> Iterator["SiteSums"]:
    """Yield the sums, put their notes into `notes`, and refuse those without scores."""
    lacking = ""
    for sums in sites:
        notes |= dict.fromkeys(sums.notes)
        if not sums.histogram and sums.rows() > 0 and not lacking:
            (lacking,) = sums.sites
            text = f"the sums of site '{lacking}' have no histograms of scores: "
            if not may_lack_scores:
                text += "measure it again with `score` and without `min_cell`, or give `randomized`"
                raise FedgftError(f"{text} to change decisions by a coin", kind="data")
            notes[f"{text}the rule changes decisions by a coin, at all sites"] = None
        yield sums


# Files


def read_earlier_rule(path: Path) -> "DecisionRule | None":
    """Return the rule in a file; None if there is no file, an error if there is another one."""
    require(not path.is_dir(), f"`out` {path}: is a folder; name a file in it", kind="file")
    refuse_link(path, "`out`")
    if not path.exists():
        return None
    try:
        return fedgft.load_rule(path)
    except FedgftError:
        text = f"`out` {path}: exists and is not a decision rule; name another file"
        raise FedgftError(text, kind="file") from None


def save_rule(
    rule: "DecisionRule", path: Path, earlier: "DecisionRule | None", *, overwrite: bool
) -> None:
    """Write the rule, unless the file holds it; without `overwrite`, another rule is an error."""
    if earlier is not None:
        dated = replace(rule, fitted={**rule.fitted, "date": earlier.fitted.get("date")})
        if dated.to_json() == earlier.to_json():
            note(f"{path} holds this rule already")
            return
        text = f"`out` {path}: holds another rule; name another file, or replace it with"
        require(overwrite, f"{text} `overwrite`", kind="file")
    make_folder(path.parent)
    wrote([rule.save(path)])


# Output


def print_rule(rule: "DecisionRule", path: Path) -> None:
    """Print what to expect of a rule, what it decides, its warnings, and what to type next."""
    print_signs(list_verdicts(rule))
    out.print()
    print_table(tabulate_expected(rule))
    print_table(tabulate_costs(rule) if rule.is_blind else tabulate_cells(rule, path))
    for text in list_warnings(rule):
        note(text)
    if rule.key:
        note(COIN_NOTE.format(file=path))
    paragraph(f"Next:  {' '.join(_next_command(rule, path))}", wrap=False)
    paragraph(f"       {' '.join(_measure_command(rule))}", wrap=False)


def list_verdicts(rule: "DecisionRule") -> list[tuple[bool | None, str]]:
    """Return whether the targets are met, whether new people may see more, and what is proven."""
    found: list[tuple[bool | None, str]] = []
    tolerance = blind_rules.TOLERANCE if rule.is_blind else 1e-6
    for gap in rule.expected["gaps"]:
        if gap["target"] is None:
            continue
        if gap["after"] is None:
            found.append((None, f"{_name_gap(gap)}: not estimable"))
            continue
        reached = f"{_name_gap(gap)}: {format_points(gap['after'])} points"
        is_met = gap["after"] <= gap["target"] + tolerance
        text = f"{reached}, {'within' if is_met else 'above'} the target of "
        text += f"{format_points(gap['target'])}"
        limits = (gap["low"], gap["high"])
        text += "; no interval" if None in limits else f"; 95% interval {format_interval(*limits)}"
        found.append((is_met, text))
    for gap in rule.expected["local"]:
        if gap["target"] is None:
            continue
        if gap["after"] is None:
            found.append((None, f"{_name_gap(gap)} at every site: not estimable"))
            continue
        is_met = gap["after"] <= gap["target"] + 1e-6
        found.append(
            (
                is_met,
                f"{_name_gap(gap)} at every site: at most {format_points(gap['after'])} points "
                f"({gap['site']}), {'within' if is_met else 'above'} the target of "
                f"{format_points(gap['target'])}",
            )
        )
    if not rule.fitted["met"]:
        found.append((False, "no rule of this kind meets the targets: this is the nearest one"))
    if rule.is_blind:
        by_group = format_percent(rule.expected["accuracy"]["by_group"])
        text = f"thresholds by group, which use the group to decide, would be {by_group} accurate"
        found.append((None, text))
    elif rule.fitted["proven"]:
        best = "most accurate" if "value" not in rule.expected else "most valuable"
        text = f"the {best} rule of this kind with such gaps on these sums (proven)"
        found.append((True, text))
    else:
        text = "a better rule of this kind may exist: the search stopped at its time limit"
        found.append((None, text))
    return found


def tabulate_expected(rule: "DecisionRule") -> Table:
    """Return the table of accuracy and gaps, before and after."""
    expected = rule.expected
    accuracy = expected["accuracy"]
    selected = expected["selected"]
    limits = format_interval(accuracy["low"], accuracy["high"])
    new = f"{format_points(accuracy.get('new', accuracy['after']))} ({limits})"
    rows = [
        ("accuracy, %", format_points(accuracy["before"]), format_points(accuracy["after"]), ""),
        ("accuracy for new people, %", "", new, ""),
    ]
    if value := expected.get("value"):
        rows.append(("value per person", f"{value['before']:.4f}", f"{value['after']:.4f}", ""))
    decided = f"decided {rule.classes[1]}, %"
    rows.append((decided, format_points(selected["before"]), format_points(selected["after"]), ""))
    for gap in expected["gaps"]:
        after = f"{format_points(gap['after'])} ({format_interval(gap['low'], gap['high'])})"
        before = format_points(gap["before"])
        rows.append((f"gap, {_name_gap(gap)}", before, after, _format_target(gap)))
    for gap in expected["local"]:
        after = format_points(gap["after"])
        after += "" if gap["site"] is None else f" ({gap['site']})"
        name = f"largest gap at a site, {gap['metric']} by {gap['groups']}"
        rows.append((name, format_points(gap["before"]), after, _format_target(gap)))
    header = ("gaps in points", "before", "after", "target")
    sites = format_count(len(rule.fitted["sums"]), "table" if rule.is_blind else "site")
    title = f"What to expect, from {rule.fitted['rows']:,.0f} rows of {sites}"
    return Table(title, header, tuple(rows), 1, ("In brackets: 95% intervals for new people.",))


def tabulate_cells(rule: "DecisionRule", path: Path) -> Table:
    """Return the table of what each group, or each group at a site, is decided by."""
    sites = ("site",) if rule.per_site else ()
    is_score = rule.reads == "score"
    before = describe_acceptance(rule, rule.unrecorded)
    rows = []
    for (site, values), acceptance in list(rule.cells.items())[:MAX_CELLS]:
        named = () if site is None else (site,)
        group = " & ".join(map(str, values))
        rows.append((*named, group, before, describe_acceptance(rule, acceptance)))
    rest = len(rule.cells) - len(rows)
    notes = (f"{format_count(rest, 'more line')}: see {path}",) if rest else ()
    title = f"Scores decided {rule.classes[1]}" if is_score else "Changes of decisions"
    header = (*sites, " & ".join(rule.attributes), "before", "after")
    return Table(title, header, tuple(rows), len(header), notes)


def tabulate_costs(rule: "DecisionRule") -> Table:
    """Return the table of how the threshold of a group-blind rule bends."""
    model = rule.group_model
    assert model is not None
    rows = tuple(
        (" & ".join(map(str, group)), rule.classes[label], f"{cost:+.3f}")
        for (label, group), cost in zip(model.pairs, model.costs.tolist(), strict=True)
    )
    (acceptance,) = rule.cells.values()
    (threshold,) = acceptance.thresholds
    title = f"Threshold of a person: {threshold:g} plus the sum of change x probability"
    note_ = "Probabilities of label and group are estimated from the other columns and the score."
    return Table(title, (rule.fitted["groups"][0], "label", "change"), rows, 2, (note_,))


def describe_acceptance(rule: "DecisionRule", acceptance: "Acceptance") -> str:
    """Return in words which scores, or which decisions, lead to a positive decision."""
    if rule.reads == "score":
        return acceptance.describe()
    negative, positive = rule.classes
    added, kept = acceptance(np.array([0.0, 1.0])).tolist()
    parts = [f"{format_percent(added)} of {negative} become {positive}"] * (added > 0)
    parts += [f"{format_percent(1 - kept)} of {positive} become {negative}"] * (kept < 1)
    return ", ".join(parts) or "as they are"


def list_warnings(rule: "DecisionRule") -> list[str]:
    """Return what a user of the rule must know."""
    found = [] if rule.is_blind else [GROUP_WARNING]
    if not rule.expected["exact"]:
        found.append(ESTIMATED_WARNING)
    for gap in rule.expected["local"]:
        if gap["target"] is None and gap["after"] is not None and gap["before"] is not None:
            if gap["after"] > gap["before"] + MIN_GROWTH:
                found.append(
                    f"the rule makes {_name_gap(gap)} larger at some sites: up to "
                    f"{format_points(gap['after'])} points ({gap['site']}), before at most "
                    f"{format_points(gap['before'])}; `local` {gap['metric']}=0.05 limits it"
                )
            continue
        if sites := gap["not_estimable"]:
            found.append(
                f"{_name_gap(gap)} is not estimable at {format_count(len(sites), 'site')} "
                f"({join_names(sites)}): fewer than two groups have rows there"
            )
    return found


def _name_gap(gap: dict[str, Any]) -> str:
    return f"{fedgft.get_metric(gap['metric']).title} by {gap['groups']}"


def _format_target(gap: dict[str, Any]) -> str:
    return "" if gap["target"] is None else format_points(gap["target"])


def _next_command(rule: "DecisionRule", path: Path) -> list[str]:
    """Return the command that applies the rule to a table."""
    column = "score" if rule.reads == "score" else "decision"
    words = ["fedgft decide TABLE.csv", f"--{column} {column.upper()}"]
    words += ["--decision-name new_decision"] if rule.reads == "decision" else []
    words += ["--site SITE"] if rule.per_site else []
    words += ["--id ID"] if rule.is_random else []
    return [*words, f"--rule {shlex.quote(str(path))}", "--out decided.csv"]


def _measure_command(rule: "DecisionRule") -> list[str]:
    """Return the command that measures the decisions of the rule."""
    label = rule.fitted.get("label") or "LABEL"
    return [
        "fedgft measure decided.csv",
        f"--label {shlex.quote(label)}",
        f"--group {shlex.join(rule.attributes or rule.fitted['groups'][0].split(' & '))}",
        f"--positive {shlex.quote(rule.classes[1])}",
        f"--decision {'decision' if rule.reads == 'score' else 'new_decision'}",
    ]

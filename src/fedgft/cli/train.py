"""`fedgft train`: train one method and save its model."""

import shlex
from collections.abc import Callable, Collection, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import fedgft
from fedgft.cli.console import (
    MISSED,
    clients,
    note,
    out,
    output,
    paragraph,
    print_json,
    render,
    warn,
    wrote,
)
from fedgft.cli.options import (
    Flag,
    Method,
    MetricName,
    Number,
    Options,
    Place,
    choose_method,
    require,
    split_columns,
)
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count

if TYPE_CHECKING:
    from fedgft.study import Study, TrainedModel

# Loaded when a command runs, so that help is printed at once.
session = LazyModule("fedgft.cli.study_session")
tables = LazyModule("fedgft.data.table")
measurement = LazyModule("fedgft.auditing.measurement")
training = LazyModule("fedgft.study.training")
fair_model = LazyModule("fedgft.fair_model")

MAX_LINE = 80  # letters of a printed command
MAX_NEXT = 2  # tables whose next commands are printed
REPORT_NAMES = ("report.html", "report.md", "audit.json")
SCORED = (
    "{scored} will contain the rows that the model was trained on; {report} is about held-out "
    "rows only."
)


def train(
    options: Options | None = None,
    *,
    method: Method | None = None,
    metric: MetricName = "sp",
    alpha: Number = 0.5,
    init: Place | None = None,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-train"),
    all_models: Annotated[bool, Flag] = False,
    strict: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Train a fair model, save it, and compare it with FedAvg, client by client.

    Training is repeated with different seeds (--seeds). The saved model is the most accurate one
    that met the target on its clients' rows; if none did, it is the one nearest to the target.

    Parameters
    ----------
    method
        fedgft-control (reaches a target), fedgft (as published), or another one of `fedgft compare`
        [default: fedgft-control; fedgft with --lam, --penalty, --spread, --protocol paper, sp@all].
    metric
        sp, eop, eo, predictive-parity, acc or fpr, or a weighted sum of several: sp+0.5*eop;
        sp@all or eop@all: at every threshold of the scores, with fedgft.
    alpha
        How evenly rows are dealt to simulated clients: 0.5 is very uneven, 100 nearly even.
    init
        Start from a model that an earlier `fedgft train` saved.
    out_
        Folder for the model, the table of results and the figure.
    all_models
        Save the models of all replicates, not only one.
    strict
        Exit with code 4 if the saved model misses the target or has collapsed.
    json
        Print the result to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft train --data adult --target 0.02
    fedgft train --data loans.csv --label repaid --group sex --client bank
    fedgft train --data adult --group race,sex --metric sp+0.5*eop --base scaffold
    fedgft train --data celeba --images ~/celeba --device cuda --precision bf16
    """

    options = options or Options()
    is_one_start = init is None or options.weights is None
    require(is_one_start, "`init` and `weights` exclude each other: give one", kind="conflict")
    start = None if init is None else fedgft.load_model(init)
    method = choose_method(method, options, metric)
    has_target = method == "fedgft-control"
    why = f"`strict` is for fedgft-control, which has a target, not for {method}"
    require(has_target or not strict, why)
    methods = list(dict.fromkeys(("fedavg", method)))

    def work(study: "Study") -> int:
        return study.work([alpha], methods, [metric])

    asked = {"method": method, "metric": metric, "alpha": alpha, "init": init}
    metrics = session.check_cells(options, [method], [metric], [alpha])
    with session.open_results(out_, "train", options, **asked, all_models=all_models) as finish:
        with session.open_study(
            options, metrics, [alpha], folder=out_, work=work, start=start
        ) as study:
            trained = training.train_model(study, method, metrics[0], alpha=alpha)
        paths = trained.save(out_, all_models=all_models)
        planned = [out_ / session.REPORT_FOLDER / name for name in REPORT_NAMES]
        finish([*paths, *planned])  # if the run is killed from here on, it may be repeated
        paths += _save_report(trained, options, out_)
        finish(paths)
        session.clear_checkpoints(study)
    if json:
        print_json({**_to_json(trained), "files": [str(path) for path in paths]})
    else:
        _print(trained, options, paths)
    session.print_notes(study, metrics, features=json)
    if text := training.describe_earlier_scores(study.dataset):
        note(text)
    if strict and (trained.choice.why != "met" or trained.choice.collapsed):
        raise SystemExit(MISSED)


def _save_report(trained: "TrainedModel", options: Options, folder: Path) -> list[Path]:
    """Write the audit of the held-out rows; without one, a note says why."""
    if options.images is not None:
        return []  # a network would read all images again
    about = {} if options.label is None else {"label": options.label}
    group = " & ".join(split_columns(options.group or ()))
    if not group and options.source in session.SOURCES:
        group = session.SOURCES[options.source].group
    try:
        found = trained.audit(group=group, about=about)
        return found.save(folder / session.REPORT_FOLDER)
    except FedgftError as error:
        note(f"no audit of the held-out rows: {error}")
        return []


def _to_json(trained: "TrainedModel") -> dict[str, object]:
    rows = trained.comparison.rows
    return {
        **rows[-1],
        "accuracy_fedavg": rows[0]["accuracy"],
        "fedavg": rows[0],
        "saved": trained.summary,
        "clients": trained.clients(),
    }


def _print(trained: "TrainedModel", options: Options, paths: Sequence[Path]) -> None:
    """Print the result in a few lines, what to open and what to type next; then the details."""
    rows = trained.comparison.rows
    first, last = rows[0], rows[-1]
    data = trained.study.dataset
    title = trained.result.metric.title
    for line in training.list_results(rows, groups=data.group_names, title=title):
        paragraph(line)
    if last["target"] is not None:
        paragraph(training.state_target(last, first))
    if last["collapsed"]:
        paragraph(training.describe_collapse(last))
    if last["target"] is not None and trained.choice.why != "met":
        paragraph(training.suggest_changes(last))
    paragraph(render(training.describe_saved_model(trained.summary)))
    if text := trained.warn_useless():
        warn(text)
    out.print()
    paragraph(render(session.describe_clients(trained.study, options, [trained.result.alpha])))
    paragraph(training.describe_features(data, all_names=output.verbose))
    model = trained.model()
    if model.has_trees:
        is_out_of_fold = trained.study.is_out_of_fold
        paragraph(render(training.describe_trees(model, out_of_fold=is_out_of_fold)))
    if output.verbose:
        _print_details(trained)
        wrote(paths)
    out.print()
    for line in _list_next_steps(trained, options, paths):
        paragraph(line, wrap=False)
    report = [path.parent for path in paths if path.name == "report.html"]
    if report and options.source.lower().endswith(tables.TABLE_ENDINGS):
        scored = " and ".join(f"{name}.csv" for name in _list_scored(options))
        paragraph(SCORED.format(scored=scored, report=f"{report[0]}/"))


def _print_details(trained: "TrainedModel") -> None:
    """Print all tables and sentences about the replicates, the saved one, and its clients."""
    rows = trained.comparison.rows
    about = trained.summary
    out.print()
    session.print_comparison(trained.comparison)
    paragraph(" ".join(training.describe_details(rows[-1], rows[0])))
    name = training.label_methods([trained.result.method])[trained.result.method]
    out.print(clients(trained.clients(), seed=about["seed"], method=name))


def _list_next_steps(trained: "TrainedModel", options: Options, paths: Sequence[Path]) -> list[str]:
    """Return which files to open, and the commands that use and audit the model."""
    model = next(path for path in paths if path.name == training.MODEL_FILE)
    opened = {
        "before-after.png": "the result as a figure",
        "report.html": "audit of the held-out rows",
        training.CARD_FILE: "model card",
    }
    files = {path: opened[path.name] for path in paths if path.name in opened}
    files = dict(sorted(files.items(), key=lambda pair: list(opened).index(pair[0].name)))
    width = max(len(str(path)) for path in files)
    lines = [f"       {path!s:<{width}}  {what}" for path, what in files.items()]
    if max(map(len, lines)) > MAX_LINE:
        lines = [f"       {path}" for path in files]
    lines[0] = f"Open:  {lines[0].lstrip()}"
    if options.images is not None:
        return lines
    commands = _list_commands(trained, options, model)
    lines += [line for command in commands for line in _break_command(command)]
    first = len(files)
    lines[first] = f"Next:  {lines[first].lstrip()}"
    return lines


def _list_commands(trained: "TrainedModel", options: Options, model: Path) -> list[list[str]]:
    """Return the commands after training, each as a list of parts that stay on one line."""
    is_file = options.source.lower().endswith(tables.TABLE_ENDINGS)
    start = ["fedgft predict", _quote(str(model))]
    if not is_file:
        return [[*start, "TABLE.csv", "--out scored.csv"]]
    known = {name for path in options.data for name in measurement.read_header(Path(path))}
    classes = trained.study.dataset.classes
    score = _choose_name("score", lambda name: fair_model.list_score_columns(classes, name), known)
    decision = _choose_name("decision", lambda name: [name], known)
    names = [f"--score-name {score}"] if score != "score" else []
    names += [f"--decision-name {decision}"] if decision != "decision" else []
    roles = {name: getattr(options, name) for name in ("label", "group", "positive")}
    given = [f"--{name} {_quote(value)}" for name, value in roles.items() if value is not None]
    given.append(f"--score {_quote(fair_model.list_score_columns(classes, score))}")
    if options.weight is not None:
        given.append(f"--weight {_quote(options.weight)}")
    if trained.study.dataset.given:
        given.append(f"--given {_quote(','.join(trained.study.dataset.given))}")
    if options.randomized_groups is not None:
        given.append(f"--randomized-groups {options.randomized_groups:g}")
    sums = [f"{stem}.json" for stem in _list_scored(options)]
    if options.client is not None:
        sums = ["sums"]
        given += [f"--site {_quote(options.client)}", "--out sums"]
    commands = []
    scored = {f"{stem}.csv": table for stem, table in _list_scored(options).items()}
    for name, table in scored.items():
        commands.append([*start, _quote(table), f"--out {_quote(name)}", *names])
        commands.append([f"fedgft measure {_quote(name)}", *given])
    rest = len(options.data) - len(scored)
    if rest > 0:
        commands.append([f"# and so on, for {format_count(rest, 'more table')}"])
    return [*commands, ["fedgft audit", *map(_quote, sums), "--out audit"]]


def _list_scored(options: Options) -> dict[str, str]:
    """Return the first tables by the names that predictions about them get, without endings."""
    if len(options.data) == 1:
        return {"scored": options.source}
    return {f"{Path(table).stem}-scored": table for table in options.data[:MAX_NEXT]}


def _choose_name(
    name: str, list_columns: Callable[[str], Sequence[str]], known: Collection[str]
) -> str:
    """Return the name, or a longer one, so that the table has none of its columns."""
    names = chain((name, f"new_{name}"), (f"new_{name}_{number}" for number in count(2)))
    return next(each for each in names if not set(list_columns(each)) & set(known))


def _break_command(parts: Sequence[str]) -> list[str]:
    """Return a command in lines of at most `MAX_LINE` letters, as a shell reads them."""
    lines = [f"       {parts[0]}"]
    for part in parts[1:]:
        if len(f"{lines[-1]} {part} \\") <= MAX_LINE:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"         {part}")
    return lines


def _quote(value: str | Sequence[str]) -> str:
    """Return the values of an option as a shell takes them."""
    return shlex.join([value] if isinstance(value, str) else map(str, value))

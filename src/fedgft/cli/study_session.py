"""From the shared options to a study: checks, data, protocol, progress bar, notes and tables.

The commands that train import this module when they run: it loads NumPy, polars and Numba.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedgft.auditing.measurement import read_header
from fedgft.auditing.report_files import check_report_folder, report_names
from fedgft.cli.console import Bar, bar, comparison, decisions, note, out, output, print_table
from fedgft.cli.options import TABLE_ENDINGS, Options, require, require_values, split_columns
from fedgft.data import SOURCES, Dataset, Progress, load, load_celeba, load_images
from fedgft.data.encode import Categorical
from fedgft.data.features import NOT_FEATURES, split_words
from fedgft.data.generated import synthetic
from fedgft.engine.executors import check_devices
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel
from fedgft.formatting import printable
from fedgft.metrics import Metric, get_metric
from fedgft.models import ResNet18, Trees
from fedgft.settings import MAX_SEED, OPTIONS, check_settings
from fedgft.store import atomic_write, expand_user, open_folder, parse_json
from fedgft.study import Comparison, Protocol, Study, choices, compare_methods, get_protocol
from fedgft.study.cache import Checkpoints
from fedgft.study.post_processing import RULE_METHODS
from fedgft.study.protocol import contradiction, describe_lone_strata, empty_groups, without_groups
from fedgft.study.unseen_clients import make_unseen_table

COLUMN_ROLES = ("label", "group", "client", "split", "positive", "weight")
TABLE_OPTIONS = ("weight", "randomized_groups")
COLUMN_LISTS = ("group", "leave_out", "keep", "categorical")
FEATURE_OPTIONS = (
    "leave_out",
    "keep_group",
    "keep",
    "categorical",
    "missing",
)  # which columns are features, and how
RUN_FILE = "run.json"  # what was run, beside the results
RESULT_FILES = (  # of train, compare, frontier and demo, in an output folder
    *("model.safetensors", "MODEL.md", "rows.parquet", "rounds.parquet", "frontier.parquet"),
    "unseen.parquet",
    *(
        f"{name}.{ending}"
        for name in ("before-after", "rounds", "frontier", "methods", "sites")
        for ending in ("png", "svg")
    ),
)
REPORT_FOLDER = "report"  # of the audit of the held-out rows
MODEL_NAME = re.compile(r"model-\d+\.safetensors")  # of --all-models
UNRECORDED = {"threads", "cache", "checkpoint_every", "resume", "overwrite"}  # same results
CELEBA_ROLES = {"label": "Smiling", "group": "Male"}  # the paper's
CLIENT_WORDS = (  # of columns that often name the client of a row
    "agency bank branch center centre clinic client company department employer hospital "
    "institution location office organisation organization practice region school site state "
    "store university ward"
)
IMAGE_OPTIONS = ("size", "crop", "image", "skip_bad", "valid", "cache", "augment")
RESNET_OPTIONS = ("norm", "stem", "weights", "fedbn")
TREE_OPTIONS = tuple(OPTIONS["Trees"])
GRADIENT_OPTIONS = (  # of local training by gradients
    *("epochs", "batch_size", "steps", "optimizer", "state", "schedule", "weight_decay"),
    *("mu", "server_lr", "device", "precision", "executor", "lanes", "deterministic"),
)
SERVER_BASES = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")  # they have a learning rate
PROTOCOL_CANDIDATES = (
    "lr",
    "lam",
    "beta",
    "target",
    "max_depth",
)  # a protocol holds several values of these


def check_options(options: Options) -> None:
    """Raise a `FedgftError` for everything that can be seen to be wrong before data is read."""
    check_settings(vars(options))
    _check_tables(options)
    has_room = options.seed + options.replicates <= MAX_SEED
    require(has_room, f"`seed` must be below 2^63 - `seeds`, got {options.seed}")
    _check_images(options)
    _check_trees(options)
    settings = make_protocol(options).settings
    if options.client is None:
        settings.check_cohort(options.clients)
    if options.device not in (None, "cpu"):
        check_devices(settings)
    require(
        not options.pick or (options.cohort is None and not options.noise),
        "`pick` needs the exact sums of all clients: not with `cohort` or `noise`",
        kind="conflict",
    )
    require(
        options.server_lr is None or options.base in SERVER_BASES,
        f"`server_lr` is for `base` {', '.join(SERVER_BASES)}",
        kind="conflict",
    )
    require(
        options.partition != "column" or _names_clients(options),
        "`partition` column needs `client`, the column that names the client",
        kind="missing",
    )


def _names_clients(options: Options) -> bool:
    """Whether a column, the data set or the list of files says which client holds a row."""
    source = SOURCES.get(options.source)
    has_clients = source is not None and source.client is not None
    return options.client is not None or has_clients or len(options.data) > 1


def _check_tables(options: Options) -> None:
    """Raise a `FedgftError` for lists without values, and for several tables that do not fit."""
    lists = {name: getattr(options, name) for name in ("data", "missing", *COLUMN_LISTS)}
    require_values(**lists)
    require(
        options.source != "acs",
        "`data`: write a table of acs first, as by `fedgft data get acs --states CA NY --out "
        "acs.parquet`, and name it",
    )
    if len(options.data) == 1:
        return
    for name in options.data:
        is_table = name.lower().endswith(TABLE_ENDINGS)
        require(is_table, f"`data` {name}: several names must be .csv or .parquet files")
    options.refuse(["images"], ": give one table that lists all images")


def _check_images(options: Options) -> None:
    """Raise a `FedgftError` where data, images and model do not go together."""
    model = options.model_name
    has_images = options.images is not None
    if options.source == "celeba" and not has_images:
        raise FedgftError(
            "`data` celeba: `images` must name the folder that holds img_align_celeba and its "
            "lists; its makers give CelebA out for research, we cannot",
            field="images",
            kind="missing",
        )
    require(
        not has_images or options.source not in (*SOURCES, "synthetic"),
        f"`images`: the data set '{options.source}' has none; `data` must be celeba, "
        "or a table that names images in a column",
        kind="conflict",
    )
    if not has_images:
        options.refuse(IMAGE_OPTIONS, " is for images; `images` names their folder")
    if model != "resnet18":
        options.refuse(RESNET_OPTIONS, f" is for `model` resnet18, and it is {model}")
    is_file = options.weights is None or options.weights.is_file()
    require(is_file, f"`weights` {options.weights}: no such file", kind="file")
    if model == "resnet18":
        require(has_images, "`model` resnet18 is for images; `images` names their folder")
    else:
        require(not has_images, f"`model` {model} is for tables; images take resnet18")


def _check_trees(options: Options) -> None:
    """Raise a `FedgftError` for options that go with trees only, or never with trees."""
    model = options.model_name
    if model != "trees":
        options.refuse(TREE_OPTIONS, f" is for `model` trees, and it is {model}")
        return
    options.refuse(GRADIENT_OPTIONS, ": trees grow from sums, without local steps of gradients")
    if options.base not in (None, "fedavg"):
        text = f"`base` {options.base} corrects or averages gradients; trees grow from sums"
        raise FedgftError(text, field="base", kind="conflict")


def check_cells(
    options: Options, methods: Sequence[str], metrics: Sequence[str], alphas: Sequence[float]
) -> list[Metric]:
    """Check everything that can be checked before any data is read; return the metrics.

    Prints a note for each option that none of the methods reads.
    """
    check_options(options)
    require_values(methods=methods, metrics=metrics, alpha=alphas)
    for alpha in alphas:
        require(0 < alpha < float("inf"), f"`alpha` must be a positive number, got {alpha:g}")
    trained = [name for name in methods if name not in RULE_METHODS]
    rules = ["fedgft-control"] if len(trained) < len(methods) else []  # they take its target
    for text in options.unused([*trained, *rules]):
        note(text)
    return [get_metric(name) for name in metrics]


# Data


def load_dataset(options: Options, on_fetch: Progress, metrics: Sequence[Metric] = ()) -> Dataset:
    """Read the table, the images or the public data set that the options name.

    `metrics`: those within whose strata groups are compared name the columns of strata.
    """
    given = _list_strata_columns(metrics)
    if options.source == "synthetic":
        options.refuse((*COLUMN_ROLES, *FEATURE_OPTIONS), ": the synthetic set has its own columns")
        require(not given, "`metric`: the synthetic set has no column to divide it by")
        return _note_randomized(options, synthetic(seed=options.seed))
    roles = {name: getattr(options, name) for name in COLUMN_ROLES} | _read_columns(options)
    if options.images is None:
        data = load(options.data, **roles, given=given, on_progress=on_fetch)
        return _note_randomized(options, data)
    options.refuse((*FEATURE_OPTIONS, *TABLE_OPTIONS), " is for tables; images have pixels only")
    require(not given, "`metric`: images are not divided into strata; leave out what follows `|`")
    roles.pop("weight")
    how: dict[str, Any] = {
        "size": 64 if options.size is None else options.size,
        "crop": options.crop,
        "skip_bad": options.skip_bad,
        "cache": options.cache,
        "on_progress": on_fetch,
    }
    if options.source == "celeba":
        options.refuse(("split", "positive", "image"), ": the data set 'celeba' has its own")
        given = {name: roles[name] for name in options.given("label", "group", "client")}
        celeba_roles: dict[str, Any] = CELEBA_ROLES | given
        return load_celeba(options.images, **celeba_roles, valid=options.valid or "drop", **how)
    for name in ("label", "group"):
        text = f"{options.source}: `{name}` must name a column of the table"
        require(roles[name] is not None, text, kind="missing")
    options.refuse(["valid"], " is for CelebA; a table says train or test (`split`)")
    return load_images(options.images, options.source, image=options.image, **roles, **how)


def _list_strata_columns(metrics: Sequence[Metric]) -> tuple[str, ...]:
    """Return the columns that divide rows into strata; raise if metrics name different ones."""
    found = list(dict.fromkeys(metric.columns for metric in metrics if metric.columns))
    text = "`metrics` must all name the same columns after `|`"
    require(len(found) <= 1, text, kind="conflict")
    return found[0] if found else ()


def _note_randomized(options: Options, dataset: Dataset) -> Dataset:
    """Mark groups as randomized, with a note, where the options say so."""
    epsilon = options.randomized_groups
    if epsilon is None:
        return dataset
    text = f"groups were randomized with epsilon {epsilon:g}: gaps are estimates, without intervals"
    notes = (*dataset.notes, f"{dataset.name}: {text}")
    return replace(dataset, randomized=epsilon, notes=notes)


def _read_columns(options: Options) -> dict[str, Any]:
    """Return the options that list columns, and those about features, as `load` takes them."""
    is_table = options.source.lower().endswith(TABLE_ENDINGS)
    known = read_header(options.source) if is_table else ()
    found = options.given("group", *FEATURE_OPTIONS)
    lists = {n: split_columns(found[n], known) for n in COLUMN_LISTS if n in found}
    found |= lists
    if len(lists.get("group", ())) == 1:
        (found["group"],) = lists["group"]
    return found


def _note_weights(options: Options, dataset: Dataset) -> Dataset:
    """Check that a file of weights fits, and note which tensors it does not hold."""
    if options.weights is None:
        return dataset
    from fedgft.resnet import load_weights

    features = dataset.features.shape[1]
    module = make_network(options).module(features=features, classes=len(dataset.classes))
    return replace(dataset, notes=(*dataset.notes, *load_weights(module, options.weights)))


# Output folder


@contextmanager
def open_results(
    folder: Path, command: str, options: Options, **arguments: object
) -> Iterator[Callable[[Sequence[Path]], None]]:
    """Create and lock the output folder of a run; yield a function that records what has run.

    Call the function with the paths of the results once they are written. Of an earlier run that
    `options` allow to overwrite, it removes the results that are not among them.

    Raises a `FedgftError` if the folder holds the results of another run, unless the options ask
    to overwrite them. The same command on the same tables may run again: its results are the same.

    Parameters
    ----------
    folder
        The folder.
    command
        The name of the command.
    options
        The shared options of the command.
    **arguments
        Its other arguments that determine the results.
    """
    with open_folder(folder):
        record = _describe_run(command, options, arguments)
        is_file = not (folder / RUN_FILE).is_dir()
        require(is_file, f"`out` {folder}: its {RUN_FILE} is a folder; name another", kind="file")
        if not options.overwrite:
            _check_results(folder, record)

        def finish(paths: Sequence[Path]) -> None:
            for path in set(_find_results(folder)) - set(paths):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the report folder holds something else, or is not there
                (folder / REPORT_FOLDER).rmdir()
            with atomic_write(folder / RUN_FILE, private=True) as part:
                part.write((json.dumps(record, indent=2) + "\n").encode())

        yield finish


def _find_results(folder: Path) -> list[Path]:
    """Return the files in an output folder that a run writes; reports only if they are ours."""
    found = [folder / name for name in RESULT_FILES]
    found += [path for path in folder.glob("model-*") if MODEL_NAME.fullmatch(path.name)]
    report = folder / REPORT_FOLDER
    with suppress(FedgftError):
        check_report_folder(report, "audit", field="out")
        if not report.is_symlink():
            found += [report / name for name in report_names("audit")]
    return [path for path in found if path.is_file()]


def _describe_run(command: str, options: Options, arguments: dict[str, object]) -> dict[str, Any]:
    """Return what determines the results: version, command, options and digests of files."""
    given = options.given(*(set(vars(options)) - UNRECORDED)) | arguments
    given = {name: value for name, value in given.items() if value not in (None, False)}
    files = {}
    for name in (*options.data, options.weights, arguments.get("init")):
        path = expand_user(str(name))
        if name is not None and path.is_file():
            with path.open("rb") as file:
                files[str(name)] = hashlib.file_digest(file, "sha256").hexdigest()
    record = {
        "fedgft": version("fedgft"),
        "command": command,
        "options": {name: given[name] for name in sorted(given)},
        "files": files,
    }
    return json.loads(json.dumps(record, default=str))


def _check_results(folder: Path, record: dict[str, Any]) -> None:
    """Raise a `FedgftError` if the folder holds results of a run with another record."""
    if not (folder / RUN_FILE).exists() and not _find_results(folder):
        return
    try:
        found = parse_json((folder / RUN_FILE).read_bytes())
        found["options"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = None
    if found == record:
        return
    why = ""
    if found is not None and found.get("command") != record["command"]:
        why = f" (of `fedgft {printable(str(found.get('command')))}`)"
    elif found is not None:
        old, new = found["options"], record["options"]
        differ = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
        if not differ and found.get("files") != record["files"]:
            differ = ["content of the tables"]
        named = [f"`{n}`" if n.isidentifier() else printable(n) for n in differ]
        why = f" (other {', '.join(named)})" if differ else ""
    text = f"`out` {folder}: holds the results of another run{why}; name another folder, or give "
    raise FedgftError(f"{text}`overwrite`", kind="conflict")


# Study


def make_protocol(options: Options) -> Protocol:
    """Return the protocol with the settings that were given in place of its own.

    A candidate that was given (`lr`, `lam`, `beta`, `target`) is the only one, so that nothing
    is chosen on inner splits; rounds that were given are not extended for fedgft-control.
    """
    protocol = get_protocol(
        options.protocol,
        images=options.images is not None,
        trees=options.model_name == "trees",
        data=options.source,
    )
    settings = options.given(*_shared_fields(protocol.settings, options))
    optimizer = options.given("weight_decay")
    if options.optimizer is not None:
        optimizer["rule"] = options.optimizer
    settings["optimizer"] = replace(protocol.settings.optimizer, **optimizer)
    if options.fedbn:
        settings["norms"] = "local"
    given = options.given(*_shared_fields(protocol, options))
    fixed = tuple(name for name in PROTOCOL_CANDIDATES if name in given)
    given |= {name: (given[name],) for name in fixed} | {"fixed": fixed}
    given["settings"] = replace(protocol.settings, **settings)
    given["control"] = "soft" if options.control == "scores" else "hard"
    if options.rounds is not None:
        given["round_factors"] = ()
    return replace(protocol, **given)


def _shared_fields(record: Any, options: Options) -> set[str]:
    return {each.name for each in fields(record)} & set(vars(options))


def make_network(options: Options) -> Any:
    """Return the model as `Study` takes it: its name, a `ResNet18` or `Trees`."""
    if options.model_name == "trees":
        return Trees(**options.given(*TREE_OPTIONS))
    if options.model_name != "resnet18":
        return options.model_name
    weights = None if options.weights is None else str(options.weights)
    return ResNet18(options.norm or "batch", options.stem or "imagenet", weights)


def _make_checkpoints(options: Options, folder: Path | None) -> Checkpoints | None:
    """Return the store of checkpoints in the output folder; None if none are to be written."""
    usual = 1 if options.resume or options.images is not None else 0
    every = usual if options.checkpoint_every is None else options.checkpoint_every
    is_possible = every or not options.resume
    require(is_possible, "`resume` goes with checkpoints, and `checkpoint_every` is 0")
    has_place = folder is not None or not (options.resume or options.checkpoint_every)
    require(has_place, "`resume` and `checkpoint_every` need `out`, a folder for them")
    if folder is None or not every:
        return None
    return Checkpoints(folder / "checkpoints", every, options.resume)


def _make_study(
    options: Options,
    dataset: Dataset,
    progress: Bar,
    *,
    start: FairModel | None,
    checkpoints: Checkpoints | None,
) -> Study:
    kind = options.partition or ("dirichlet" if dataset.clients is None else "column")
    clients = len(dataset.client_names) if kind == "column" else options.clients
    dataset, protocol = _draw_available(options, dataset, make_protocol(options))
    protocol.settings.check_cohort(clients)
    return Study(
        dataset,
        protocol,
        range(options.seed, options.seed + options.replicates),
        clients=clients,
        kind=kind,
        model=make_network(options),
        on_progress=progress.advance,
        init=None if start is None else start.initial_parameters,
        checkpoints=checkpoints,
    )


def _draw_available(
    options: Options, dataset: Dataset, protocol: Protocol
) -> tuple[Dataset, Protocol]:
    """Use all images, with a note, where there are fewer than the protocol draws.

    A number that was given stays: the study raises an error if it is too large.
    """
    if dataset.test is None or not protocol.own_test:
        return dataset, protocol
    notes = list(dataset.notes)
    drawn: dict[str, Any] = {}
    parts = {"train_rows": ("training", ~dataset.test), "test_rows": ("test", dataset.test)}
    for name, (title, is_part) in parts.items():
        rows = int(is_part.sum())
        if getattr(options, name) is None and (getattr(protocol, name) or 0) > rows:
            notes.append(f"{dataset.name}: all {rows:,} {title} images are used")
            drawn[name] = None
    return replace(dataset, notes=tuple(notes)), replace(protocol, **drawn)


def _exclude_empty(
    dataset: Dataset, study: Study, metrics: Sequence[Metric], alphas: Sequence[float]
) -> Dataset:
    """Return the data without groups that lack a row that a metric needs in some replicate."""
    empty = {
        group
        for alpha in alphas
        for federation in study.federations(alpha)
        for metric in map(study.bind, metrics)
        for group in empty_groups(federation, metric)
    }
    if not empty:
        return dataset
    remaining = without_groups(dataset, sorted(empty))
    names = ", ".join(repr(dataset.group_names[g]) for g in sorted(empty))
    is_comparable = len(remaining.group_names) >= 2
    require(is_comparable, f"`exclude_empty` leaves out {names}: nothing is left to compare")
    return remaining


def _check_start(options: Options, start: FairModel) -> None:
    """Raise a `FedgftError` if a saved model is not of the kind that is to be trained."""
    kind = start.about["model"]
    require(
        kind == options.model_name,
        f"`init` {start.path}: holds a {kind} model, and `model` is {options.model_name}",
    )
    layers = {}
    if kind == "resnet18":
        layers = {"norm": options.norm or "batch", "stem": options.stem or "imagenet"}
    require(
        start.about.get("network", {}) == layers,
        f"`init` {start.path}: its network has other layers; `norm` and `stem` must be its",
    )


@contextmanager
def open_study(
    options: Options,
    metrics: Sequence[Metric],
    alphas: Sequence[float],
    *,
    folder: Path | None,
    work: Callable[[Study], int],
    start: FairModel | None = None,
) -> Iterator[Study]:
    """The study that the options describe, under one progress bar; see also `print_notes`.

    Parameters
    ----------
    metrics, alphas
        With --exclude-empty, a group is left out if it lacks a row that one of the metrics needs in
        any replicate at any of the concentrations.
    folder
        For checkpoints, if the options ask for them. It stays locked until the study ends.
    work
        Returns the run-rounds that will be done: the length of the progress bar.
    start
        The model that training starts from.
    """
    checkpoints = _make_checkpoints(options, folder)
    if start is not None:
        _check_start(options, start)
    with _mention_checkpoints(checkpoints), bar() as progress:
        dataset = _note_weights(options, load_dataset(options, progress.fetch, metrics))
        study = _make_study(options, dataset, progress, start=start, checkpoints=checkpoints)
        if options.exclude_empty:
            remaining = _exclude_empty(dataset, study, metrics, alphas)
            if remaining is not dataset:
                study = _make_study(
                    options, remaining, progress, start=start, checkpoints=checkpoints
                )
        can_vary = len(alphas) == 1 or study.concentration(alphas[0]) is not None
        require(can_vary, f"`alpha`: a partition by {study.kind} has no concentration to vary")
        images = study.rows_per_round(alphas[0]) if study.dataset.images else None
        progress.expect(work(study), images=images)
        yield study


def print_notes(study: Study, metrics: Sequence[Metric], *, features: bool = True) -> None:
    """Print what was filled in, left out or cannot hold: after the results, which come first.

    `features`: whether the columns that are not features are among the notes.
    """
    for text in study.dataset.notes:
        if features or NOT_FEATURES not in text:
            note(text)
    for metric in metrics:
        if text := contradiction(study.dataset, metric):
            note(text)
        if text := describe_lone_strata(study.dataset, metric):
            note(text)
    if study.protocol.settings.norms == "local":
        note("--fedbn: test rows, and a saved model, have the mean of the clients' BatchNorm")


def describe_clients(study: Study, options: Options, alphas: Sequence[float]) -> str:
    """Return which clients train: those of a column, or simulated ones and how to name a column."""
    text = f"Federation: {study.describe_federation(*alphas[: len(alphas) == 1])}"
    if study.kind == "column":
        return f"{text}, from the column {options.client}." if options.client else f"{text}."
    if not options.source.lower().endswith(TABLE_ENDINGS):
        return f"{text}."
    likely = [name for name in _list_categories(study.dataset) if _may_name_clients(name)]
    if not likely:
        return f"{text}; `client` names the column of your own clients."
    return f"{text}. {likely[0]} is a feature; if it names your clients, give `client` {likely[0]}."


def _list_categories(dataset: Dataset) -> list[str]:
    fields = () if dataset.encoder is None else dataset.encoder.fields
    return [field.name for field in fields if isinstance(field, Categorical)]


def _may_name_clients(column: str) -> bool:
    return not set(CLIENT_WORDS.split()).isdisjoint(split_words(column))


@contextmanager
def _mention_checkpoints(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Lock the checkpoints; after an interrupt, say where they are."""
    with nullcontext() if checkpoints is None else checkpoints.guarded():
        try:
            yield
        except KeyboardInterrupt:
            if checkpoints is not None and checkpoints.found():
                note(f"checkpoints are kept in {checkpoints.folder}: --resume goes on from there")
            raise


def clear_checkpoints(study: Study) -> None:
    """Delete the checkpoints of a study whose results are written."""
    if study.checkpoints is not None:
        study.checkpoints.clear()


def run_comparison(
    options: Options,
    methods: Sequence[str],
    metrics: Sequence[str],
    alphas: Sequence[float],
    *,
    folder: Path | None,
    leave_one_client_out: bool = False,
) -> Comparison:
    """Check the options and train all cells under one progress bar; duplicates count once.

    With `leave_one_client_out`, also train them without each client in turn.
    """
    methods, names = (list(dict.fromkeys(values)) for values in (methods, metrics))
    alphas = list(dict.fromkeys(alphas))
    wanted = check_cells(options, methods, names, alphas)

    trained = [name for name in methods if name not in RULE_METHODS]
    if not trained:  # a rule changes the decisions of FedAvg
        trained = ["fedavg"]
        methods = [*trained, *methods]

    def work(study: Study) -> int:
        times = 1 + study.clients if leave_one_client_out else 1
        return times * study.work(alphas, trained, names)

    with open_study(options, wanted, alphas, folder=folder, work=work) as study:
        return compare_methods(
            study, methods, wanted, alphas, leave_one_client_out=leave_one_client_out
        )


def print_comparison(found: Comparison) -> None:
    """Print both tables; with --verbose, note what was chosen on inner splits."""
    alphas = list(dict.fromkeys(result.alpha for result in found.results))
    clients = found.study.describe_federation(*alphas[: len(alphas) == 1])
    out.print(comparison(found.rows, clients=clients))
    out.print(decisions(found.rows))
    if found.unseen:
        out.print()
        print_table(make_unseen_table(found.rows))
    if output.verbose:
        for text in choices(found.study, found.results):
            note(f"chosen on inner splits of the training rows, {text}")

"""The server of a whole run, from the configuration of a Flower app (`examples/flower`).

`serve` lets the sites agree on how they read their tables, trains, collects the sites' reports,
fits a decision rule if one is asked for, and writes everything into the run's folder:

    progress.jsonl           one JSON object per line: rounds, notes and, at the end, an error
    schema.json              how the sites read their tables
    checkpoint.safetensors   from which an interrupted run continues
    model.safetensors        for `fedgft predict`; model.json for model xgboost
    sites/, report.html, report.md, audit.json    the sites' sums and their audit
    scores/, rule.json       the sums that the rule was fitted to, and the rule
    history.json             all rounds; written last, so that it marks a finished run
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgft.auditing import audit
from fedgft.auditing.site_file import gather
from fedgft.data.dataset import get_raw_scaling
from fedgft.data.schema import Schema, agree_on_schema
from fedgft.engine.history import ModelInputs
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel
from fedgft.flower.boosters import TREE_LR, Booster
from fedgft.flower.client import FOREST, TREES, first_arrays
from fedgft.flower.client_app import (
    DESCRIBE,
    MakeModule,
    choose_model,
    divide_public_data,
    name_public_roles,
    schema_shape,
    split_names,
)
from fedgft.flower.histogram_strategy import FOREST_LR, GrowingFedGFT, MeasuredTrees, read_options
from fedgft.flower.histogram_trees import Cells
from fedgft.flower.messages import (
    VERSION,
    Replies,
    RosterGrid,
    check_version,
    log,
    make_query,
    wait_for_nodes,
    warn,
)
from fedgft.flower.rule_fitting import RuleFitter, RulePlan, rule_releases
from fedgft.flower.site_reports import FinalModel, collect_reports
from fedgft.flower.strategy import FairFed, FairStrategy, FedGFT, MeasuredStrategy
from fedgft.flower.tree_rounds import BOOSTING
from fedgft.formatting import one_line
from fedgft.metrics import CATALOG
from fedgft.metrics.robust_aggregation import SiteLimits
from fedgft.models import Trees
from fedgft.privacy.noise import Budget
from fedgft.settings import HISTOGRAM_KEYS, TRAINING_KEYS, TREE_KEYS, check_run_config
from fedgft.store import (
    atomic_write,
    make_folder,
    make_private_folder,
    open_private_file,
    parse_json,
    refuse_link,
)
from fedgft.sums import CategoryNames
from fedgft.validation import check_choice

PROGRESS = "progress.jsonl"
CHECKPOINT = "checkpoint.safetensors"
HISTORY = "history.json"
SCHEMA = "schema.json"
BOOSTER = "model.json"
LR = 0.01
"The learning rate of models of parameters where a run gives none."
METHODS = ("fedgft", "fedgft-control", "fairfed", "measured")
TRAINING_SETTINGS = (*TRAINING_KEYS, "rounds", "seed")
"The settings that clients receive."
TREE_SETTINGS = (*TREE_KEYS, "rounds", "seed")
"The settings that clients receive where they grow trees."
FOREST_SETTINGS = (*HISTOGRAM_KEYS, "rounds", "seed")
"The settings that clients receive where they grow trees together."
Config = Mapping[str, Any]


def serve(
    grid: Grid, context: Context, strategy: Strategy, *, make_module: MakeModule | None = None
) -> None:
    """Run the server's part of a Flower app.

    Parameters
    ----------
    grid, context
        Flower's grid and context; `context.run_config` holds the settings of the app's
        pyproject.toml.
    strategy
        Any strategy of `flwr.serverapp.strategy`, without our wrappers.
    make_module
        `make_module(features, classes)` makes the `nn.Module` of a run with `model = "own"`.
    """
    config: Config = dict(context.run_config)
    folder = Path(str(config["out"])).expanduser()
    with ProgressLog(folder) as progress, RosterGrid(grid) as grid:
        config = _complete(config, strategy)
        check_run_config(config)
        plan = RulePlan.read(config)
        _check_folder(folder, resume=bool(config["resume"]))
        nodes = wait_for_nodes(grid, int(config["sites"]), float(config["node-timeout"]))
        agreement = _agree_on_schema(grid, config, nodes)
        schema = agreement.schema
        if plan is not None:
            plan.check_schema(CategoryNames(schema.classes, schema.groups))
        _write_text(folder / SCHEMA, schema.to_json(), private=True)
        fair = make_strategy(strategy, config, schema, progress)
        fair.aggregator.validator.owners |= agreement.owners
        name = str(config["model"])
        keys = {TREES: TREE_SETTINGS, FOREST: FOREST_SETTINGS}.get(name, TRAINING_SETTINGS)
        settings = ConfigRecord({key: config[key] for key in keys})
        settings["schema"] = schema.to_json()
        settings["left-out"] = json.dumps(agreement.left_out)
        shape = schema_shape(schema)
        model = choose_model(config, make_module, **shape)
        levels = schema.encoder.level_counts
        first = first_arrays(model, **shape, seed=int(config["seed"]), levels=levels)
        timeout = float(config["timeout"])
        configs = {"train_config": settings, "evaluate_config": ConfigRecord({**settings})}
        result = fair.start(grid, first, int(config["rounds"]), timeout, **configs)
        final = FinalModel(grid, result.arrays, fair, settings, timeout)
        # secure sums hide each site's own sums
        reports = {} if fair.secure else collect_reports(final)
        described = ("data", "method", "metric", "strategy", "channel", "model", "seed")
        about = {key: config[key] for key in described} | {"measured": fair.measured}
        write = {TREES: _write_booster, FOREST: _write_forest}.get(name, _write_model)
        if name == FOREST:
            about["trees"] = asdict(read_options(config))
        write(folder, result.arrays, schema, about)
        rule = {}
        if plan is not None:
            names = CategoryNames(schema.classes, schema.groups)
            fitter = RuleFitter(final, plan, names, schema.group, folder, agreement.left_out)
            rule = {"rule": fitter.run(reports)}
        described = _describe_audit(config, schema, len(reports))
        texts = {site: file.text for site, file in reports.items()}
        _write_results(folder, fair.history, texts, about, described, rule)


class ProgressLog(logging.Handler):
    """Writes progress.jsonl inside its `with` block, including our warnings in Flower's log."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self.folder = folder

    def write(self, row: dict[str, Any]) -> None:
        """Append a round's row, {"note": ...} or {"error": ...}."""
        with open_private_file(self.folder / PROGRESS, "ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("fedgft: "):
            self.write({"note": text.removeprefix("fedgft: ")})

    def __enter__(self) -> "ProgressLog":
        refuse_link(self.folder, "out")
        make_folder(self.folder)
        log.addHandler(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        log.removeHandler(self)
        if error is not None:
            name = "" if isinstance(error, FedgftError) else f"{type(error).__name__}: "
            self.write({"error": " ".join(f"{name}{error}".split())})


def _complete(config: Config, strategy: Strategy) -> Config:
    """Return the configuration with the model's own learning rate if `lr` is 0.

    The sums of model trees always travel in messages of their own. Raises an error unless model and
    strategy fit: trees cannot be averaged.
    """
    if config["model"] == FOREST:
        config = {**config, "channel": "query", "lr": config["lr"] or FOREST_LR}
    is_boosting = config["model"] == TREES
    if is_boosting != isinstance(strategy, BOOSTING):
        names = " or ".join(kind.__name__ for kind in BOOSTING)
        text = (
            f"{type(strategy).__name__}: model xgboost needs {names}, and other models need others"
        )
        raise FedgftError(text, field="strategy", kind="conflict")
    return {**config, "lr": config["lr"] or (TREE_LR if is_boosting else LR)}


def _check_folder(folder: Path, *, resume: bool) -> None:
    """Raise an error if the folder holds a run, unless it is unfinished and `resume` is True."""
    problem = ""
    if (folder / HISTORY).exists():
        problem = "a finished run already; name another folder"
    elif (folder / CHECKPOINT).exists() and not resume:
        problem = "an unfinished run; resume=true continues it, or name another folder"
    if problem:
        raise FedgftError(f"`out` {folder}: holds {problem}", kind="file")


class Agreement(NamedTuple):
    """The result of the agreement on a schema.

    Attributes
    ----------
    schema
        How all sites read their tables.
    left_out
        Names of sites that cannot take part.
    owners
        Name of a site -> its node.
    """

    schema: Schema
    left_out: list[str]
    owners: dict[str, int]


def _agree_on_schema(grid: Grid, config: Config, nodes: list[int]) -> Agreement:
    """Read the schema from a file, from the sites' descriptions or from a public data set."""
    if config["data"] == "csv" and config["schema"]:
        schema = Schema.from_file(Path(str(config["schema"])).expanduser())
        return Agreement(schema, [], {})
    if config["data"] == "csv":
        return _ask_for_schema(grid, config, nodes)
    parts = divide_public_data(config, int(config["sites"]))
    data = parts.dataset
    assert data.encoder is not None
    names = (data.classes, data.group_names)
    label, group = name_public_roles(config)
    schema = Schema(label, (group,), *names, data.encoder, *get_raw_scaling(parts))
    return Agreement(schema, [], {})


def _ask_for_schema(grid: Grid, config: Config, nodes: Sequence[int]) -> Agreement:
    request = {"version": VERSION}
    kind = f"query.{DESCRIBE}"
    messages = [make_query(None, ConfigRecord(), request, node, kind) for node in nodes]
    replies = Replies.of(grid.send_and_receive(messages, timeout=float(config["timeout"])))
    descriptions, owners = read_descriptions(replies.take())
    if not descriptions:
        raise FedgftError(f"no site described its table: {replies.explain()}")
    schema, misfits = agree_on_schema(
        descriptions,
        label=str(config["label"]),
        group=str(config["group"]),
        positive=str(config["positive"]) or None,
        classes=split_names(config["classes"]),
        groups=split_names(config["groups"]),
        keep_group=bool(config.get("keep-group", False)),
        keep=split_names(config.get("keep", "")),
        missing=split_names(config.get("missing", "")),
        scaling=str(config.get("scaling", "pooled")),
        warn=warn,
    )
    for site, reason in misfits.items():
        warn(f"site '{site}' cannot take part: {reason}")
    fits = f"{len(descriptions) - len(misfits)} of {len(descriptions)} sites fit"
    names = f"classes {', '.join(schema.classes)}, groups {', '.join(schema.groups)}"
    log.info("fedgft: %s: %d features, %s", fits, len(schema.encoder.columns), names)
    log.info("fedgft: the schema's fingerprint is %s", schema.fingerprint())
    return Agreement(schema, sorted(misfits), owners)


def read_descriptions(records: dict[int, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the sites' descriptions of their tables, and the node of each site.

    Records that cannot be read are left out, and so are nodes that use another node's name.
    """
    descriptions: dict[str, Any] = {}
    owners: dict[str, int] = {}
    for node, record in sorted(records.items()):
        try:
            check_version(record, f"node {node}")
            name = one_line(record["site"], 100)
            description = parse_json(str(record["description"]))
        except (FedgftError, KeyError, ValueError, TypeError, AttributeError) as error:
            warn(f"node {node} is left out: {one_line(error)}")
            continue
        if owners.setdefault(name, node) != node:
            taken = f"it calls itself '{name}', the name of node {owners[name]}"
            warn(f"node {node} is left out: {taken}: set site=... in each node's configuration")
            continue
        descriptions[name] = description
    return descriptions, owners


def make_strategy(
    strategy: Strategy, config: Config, schema: Schema, progress: ProgressLog
) -> FairStrategy:
    """Wrap a strategy in the method that the configuration names.

    "fedgft" is the penalty of strength `lam`; "fedgft-control" is the controller with `target`. As
    in version 0.1, "fedgft" with a negative `lam` also selects the controller.
    """
    method = str(config["method"])
    lam = float(config["lam"])
    check_choice("method", method, METHODS)
    if method == "fedgft-control" and lam >= 0:
        raise FedgftError("`lam` is for method fedgft; fedgft-control takes target")
    if method == "fedgft" and lam < 0:
        warn("method fedgft without lam runs fedgft-control, the method for targets")
        method = "fedgft-control"
    rounds = int(config["rounds"])
    for_rule = rule_releases(rounds) if RulePlan.read(config) is not None else 0
    budget = Budget(
        float(config["epsilon"]) or None,
        float(config["delta"]),
        releases=rounds + 1 + for_rule,
        min_count=int(config["min-count"]),
    )
    common: dict[str, Any] = {
        "metric": str(config["metric"]),
        "classes": schema.classes,
        "groups": schema.groups,
        "channel": str(config["channel"]),
        "budget": budget,
        "secure": bool(config["secure"]),
        "node_timeout": float(config["node-timeout"]),
        "on_round": progress.write,
        "checkpoint": progress.folder / CHECKPOINT,
        "limits": SiteLimits(influence_most=float(config.get("max-influence", 1.0))),
        "counts": _read_agreed_counts(str(config.get("counts", ""))),
    }
    if config["model"] == FOREST:
        return _grow_together(strategy, method, config, common | {"cells": Cells.of(schema)})
    if method == "fairfed":
        return FairFed(strategy, beta=float(config["beta"]), **common)
    if method == "measured":
        return MeasuredStrategy(strategy, **common)
    if method == "fedgft":
        return FedGFT(strategy, lam=lam, penalty=str(config["penalty"]), **common)
    return FedGFT(strategy, target=float(config["target"]), **common)


def _grow_together(
    strategy: Strategy, method: str, config: Config, common: dict[str, Any]
) -> FairStrategy:
    """Return the strategy of a run whose sites grow trees together."""
    if method == "fairfed":
        text = "fairfed weighs models, and model trees has one for all sites: choose another"
        raise FedgftError(text, field="method", kind="unsupported")
    if method == "measured":
        return MeasuredTrees(strategy, **common)
    if method == "fedgft":
        lam, penalty = float(config["lam"]), str(config["penalty"])
        return GrowingFedGFT(strategy, lam=lam, penalty=penalty, **common)
    return GrowingFedGFT(strategy, target=float(config["target"]), **common)


def _read_agreed_counts(path: str) -> dict[str, Any] | None:
    """Read each site's rows by label and group: {"north": [[310, 95], [120, 40]], ...}."""
    if not path:
        return None
    file = Path(path).expanduser()
    try:
        counts = parse_json(file.read_text("utf-8"))
        if not isinstance(counts, dict):
            raise ValueError("it must hold one table of rows by label and group per site")
        return counts
    except (OSError, ValueError) as error:
        raise FedgftError(f"`counts` {file}: cannot be read ({error})", kind="file") from None


def _write_text(path: Path, text: str, *, private: bool = False) -> None:
    with atomic_write(path, private=private) as part:
        part.write(text.encode())


def _write_model(folder: Path, arrays: ArrayRecord, schema: Schema, about: dict[str, Any]) -> None:
    tensors = {name: array.numpy().copy(order="C") for name, array in arrays.items()}
    known = {
        "columns": schema.encoder.columns,
        "classes": schema.classes,
        "groups": schema.groups,
        "encoder": schema.encoder.to_json(),
    }
    model = FairModel(tensors, schema.mean, schema.spread, about | known)
    model.save(folder / "model.safetensors")


def _write_forest(folder: Path, arrays: ArrayRecord, schema: Schema, about: dict[str, Any]) -> None:
    """Write trees as a model of the simulator."""
    names = (schema.encoder.columns, schema.classes, schema.groups)
    scaling = (np.zeros_like(schema.mean), np.ones_like(schema.spread))
    inputs = ModelInputs(str(about["data"]), *names, schema.encoder, *scaling)
    model = Trees(**about["trees"])
    inputs.build(model, arrays["forest"].numpy(), about).save(folder / "model.safetensors")


def _write_booster(
    folder: Path, arrays: ArrayRecord, schema: Schema, about: dict[str, Any]
) -> None:
    """Write a booster as XGBoost's JSON, with our record in its attributes."""
    booster = Booster.from_arrays(arrays, source="the final model")
    known = {"classes": schema.classes, "groups": schema.groups}
    data = booster.to_json().encode()
    model = FairModel.from_xgboost(data, schema.encoder, about=about | known)
    model.save(folder / BOOSTER)


def _write_results(
    folder: Path,
    history: list[dict[str, Any]],
    reports: dict[str, str],
    about: dict[str, Any],
    described: dict[str, Any],
    rule: dict[str, Any],
) -> None:
    """Write the sites' sums, their audit and history.json, to which `rule` is added."""
    try:
        held_out = _write_audit(folder, reports, described)
    except FedgftError as error:  # the model is kept even if the report fails
        warn(f"there is no report: {error}")
        held_out = {}
    clipped: dict[str, float] = {}  # site -> its largest value in any round
    leverage: dict[str, float] = {}  # site -> its value in the last measured round
    for row in history:
        leverage = row.get("leverage", leverage)
        for site, value in row.get("clipped", {}).items():
            clipped[site] = max(value, clipped.get(site, 0.0))
    summary = {
        "about": about,
        "sites": sorted(reports),
        "history": history,
        "held_out": held_out,
        "leverage": leverage,
        "clipped": clipped,
        **rule,
    }
    _write_text(folder / HISTORY, json.dumps(summary, indent=1), private=True)


def _describe_audit(config: Config, schema: Schema, sites: int) -> dict[str, Any]:
    """Return what `audit` must know about the run: the model, and the target as the tolerance."""
    method = str(config["method"])
    is_controlled = method == "fedgft-control" or (method == "fedgft" and float(config["lam"]) < 0)
    has_target = is_controlled and config["metric"] in CATALOG
    return {
        "tolerance": {str(config["metric"]): float(config["target"])} if has_target else None,
        "about": {
            "title": "Fairness of a federated model on held-out rows",
            "model": f"{config['model']} model trained by {method} at {sites} sites",
            "purpose": "judge the model on rows that no site trained on",
            "label": schema.label,
        },
    }


def _write_audit(
    folder: Path, reports: dict[str, str], described: dict[str, Any]
) -> dict[str, Any]:
    """Write the sites' files and their audit; return the main numbers of the audit.

    `described` holds keywords of `audit`, to which the files are added.
    """
    if not reports:
        warn("no site sent its sums: there is no report")
        return {}
    place = make_private_folder(folder / "sites")
    files = []
    for number, (_, text) in enumerate(sorted(reports.items())):
        files.append(place / f"site-{number}.json")  # a site's name need not be a file name
        _write_text(files[-1], text, private=True)
    about = described["about"] | {"files": files}
    sums = gather(files, ignore_case=True)
    result = audit(sums, about=about, tolerance=described["tolerance"])
    summary = result.to_json()
    _write_text(folder / "report.html", result.to_html())
    _write_text(folder / "report.md", result.to_markdown())
    _write_text(folder / "audit.json", summary)
    numbers = json.loads(summary)
    return {key: numbers[key] for key in ("rows", "accuracy", "metrics", "scores")}

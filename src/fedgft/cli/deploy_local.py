"""What `fedgft deploy local` does: check its options, run the federation, print every round.

The command imports this module when it runs: it loads Flower, NumPy and polars.
"""

import json as json_format
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp import strategy as flower_strategies

from fedgft.algorithms.controller import Controller
from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.audit.measurement import read_header
from fedgft.cli import interrupt_on_termination
from fedgft.cli.console import err, note, out, wrote
from fedgft.cli.options import parse_settings, require, require_values
from fedgft.data import SOURCES
from fedgft.data.encode import suggest_name
from fedgft.data.schema import Schema
from fedgft.data.table import split_group_columns
from fedgft.deploy.init import read_app_config
from fedgft.deploy.local_run import (
    LocalRunPlan,
    format_closing_line,
    format_share,
    run_local,
    site_arguments,
)
from fedgft.errors import FedgftError
from fedgft.flower.aggregator import StatisticsOptions
from fedgft.flower.server_app import METHODS
from fedgft.metrics import get_metric
from fedgft.privacy.noise import Budget
from fedgft.settings import check_run_config, check_settings
from fedgft.store import expand_user
from fedgft.validation import check_choice

if TYPE_CHECKING:
    from fedgft.cli.deploy import LocalRun

MAX_LOCAL_SITES = 100
MAX_LOCAL_ROUNDS = 10_000
MIN_SECURE_SITES = 3  # among fewer, a sum does not hide any of its parts
SITE_NAMES = ("north", "south", "east", "west", "center")
CHANNELS = ("train", "query", "evaluate")
STRATEGIES = ("Fed", "Krum", "Multi", "QFed", "Bulyan")  # how their class names begin
CHECKED = ("alpha", "seed", "lam", "target", "timeout", "sites", "rounds", "epsilon")
CONFIGURED = (  # options that the app takes under the same name
    *("rounds", "label", "group", "positive", "metric"),
    *("strategy", "channel", "alpha", "seed", "resume"),
)
RESULT_FILES = ("model.safetensors", "history.json", "report.html")


def run_federation(options: "LocalRun", *, json: bool) -> None:
    """Check the options, run the federation and print the result; `json`: as one line of JSON."""
    _check(options)
    files = _find_site_files(options)
    names = _site_names(len(files) or (3 if options.sites is None else options.sites))
    folder = options.out_.resolve()
    plan = LocalRunPlan(
        names,
        site_arguments(names, files),
        _make_config(options, sites=len(names), from_files=bool(files)),
        folder,
        port=options.port,
        app=None if options.app_ is None else options.app_.resolve(),
        limit=options.timeout,
        resume=options.resume,
    )
    interrupt_on_termination()
    notes: set[str] = set()
    on_row = partial(_print_row, rounds=options.rounds, metric=options.metric, notes=notes)
    result = run_local(plan, on_row, note)
    if json:
        sys.stdout.write(json_format.dumps(result) + "\n")
        sys.stdout.flush()
    status = result["status"]
    why = f"the run ended as {status}: {result.get('why')} (logs in {folder / 'logs'})"
    require(status == "finished:completed", why)
    if not json:
        text = format_closing_line(result, options.metric)
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    wrote([path for name in RESULT_FILES if (path := folder / name).exists()])


def _site_names(count: int) -> tuple[str, ...]:
    if count <= len(SITE_NAMES):
        return SITE_NAMES[:count]
    return tuple(f"site-{k + 1}" for k in range(count))


# Early checks of errors that the processes would report a minute later


def _check(options: "LocalRun") -> None:
    """Raise a `FedgftError` for an option that is wrong whatever the data are."""
    require_values(data=options.data, set=options.set_)
    is_one = options.target is None or options.lam is None
    require(is_one, "`target` or `lam`: choose one of the two", kind="conflict")
    check_settings({name: getattr(options, name) for name in CHECKED})
    is_short = options.rounds <= MAX_LOCAL_ROUNDS
    require(is_short, f"`rounds` must be at most {MAX_LOCAL_ROUNDS}, got {options.rounds}")
    is_small = (options.sites or 0) <= MAX_LOCAL_SITES
    require(is_small, f"`sites` must be at most {MAX_LOCAL_SITES} on one host, got {options.sites}")
    is_port = options.port is None or 1 <= options.port <= 65535
    require(is_port, f"`port` {options.port}: must lie between 1 and 65535")
    method = _choose_method(options)
    check_choice("method", method, METHODS)
    lam_fits = (method == "fedgft") == (options.lam is not None)
    require(lam_fits, "`lam` belongs to method fedgft: give both or neither", kind="conflict")
    target_fits = options.target is None or method == "fedgft-control"
    require(target_fits, "`target` belongs to method fedgft-control", kind="conflict")
    check_choice("channel", options.channel, CHANNELS)
    known = [name for name in flower_strategies.__all__ if name.startswith(STRATEGIES)]
    check_choice("strategy", options.strategy, known)
    metric = get_metric(options.metric)
    Controller(metric, options.target or 0.0)
    if options.lam is not None:
        LinearizedPenalty(metric, options.lam)
    require(
        options.epsilon is None or method != "fairfed",
        "`epsilon`: FairFed needs every client's own sums, without noise",
        kind="conflict",
    )


def _choose_method(options: "LocalRun") -> str:
    """Return the method that was given, or the one that fits the other options."""
    if options.method is not None:
        return options.method
    return "fedgft-control" if options.lam is None else "fedgft"


def _find_site_files(options: "LocalRun") -> list[Path]:
    """Return the sites' files; none if --data names a public data set."""
    paths = [expand_user(name) for name in options.data or []]
    tables = [path for path in paths if path.suffix.lower() in (".csv", ".parquet")]
    if not tables:
        _check_public_set(options)
        return []
    for path in paths:
        require(path in tables, f"`data` {path}: the ending must be .csv or .parquet")
        require(path.is_file(), f"`data` {path}: no such file", kind="file")
    is_one_each = options.sites in (None, len(paths))
    text = f"`sites` {options.sites}: there are {len(paths)} files, one for every site"
    require(is_one_each, text)
    for name in ("label", "group"):
        is_named = getattr(options, name)
        require(is_named, f"`{name}` must name a column of the files", kind="missing")
    for path in paths:
        known = read_header(path)
        groups = split_group_columns(options.group, known)
        for option, name in (("label", options.label), *(("group", group) for group in groups)):
            text = f"{path}: no column '{name}' (`{option}`){suggest_name(name, known)}"
            require(name in known, text, kind="data")
    return paths


def _check_public_set(options: "LocalRun") -> None:
    names = options.data or ["adult"]
    require(len(names) == 1, "`data`: one public data set, or a file for every site")
    is_known = names[0] in SOURCES
    require(is_known, f"`data` {names[0]}: choose from {', '.join(SOURCES)}, or files")
    if options.label or options.positive:
        note("`label` and `positive` are for files of your own: a public data set has its own")


# Configuration of the app


def _make_config(options: "LocalRun", *, sites: int, from_files: bool) -> dict[str, Any]:
    """Return the configuration of the app: options of this command and what --set adds."""
    config = {name: getattr(options, name) for name in CONFIGURED} | {
        "method": _choose_method(options),
        "sites": sites,
        "out": str(options.out_.resolve()),
        "data": "csv" if from_files else (options.data or ["adult"])[0],
        "target": options.target or 0.0,
        "lam": -1.0 if options.lam is None else options.lam,
        "epsilon": options.epsilon or 0.0,
    }
    own_app = None if options.app_ is None else options.app_.resolve()
    config |= parse_app_settings(options.set_ or [], own_app, reserved=config)
    if config.get("schema"):
        Schema.from_file(Path(config["schema"]))
    is_secure = bool(config.get("secure"))
    require(
        not is_secure or sites >= MIN_SECURE_SITES,
        f"`set` secure=true: a sum hides no site among fewer than {MIN_SECURE_SITES} sites",
    )
    if options.epsilon is not None:
        Budget(options.epsilon, releases=options.rounds).noise("soft")
    min_count = int(config.get("min-count", 0))
    budget = Budget(options.epsilon, config.get("delta", 1e-6), min_count=min_count)
    StatisticsOptions(channel=options.channel, secure=is_secure, budget=budget)
    return config


def parse_app_settings(
    pairs: Sequence[str], own_app: Path | None, *, reserved: Mapping[str, Any]
) -> dict[str, Any]:
    """Read KEY=VALUE pairs that must be settings of an app, of the type of its defaults.

    Parameters
    ----------
    pairs
        The values of --set.
    own_app
        The folder of the user's own app; None: the app that ships.
    reserved
        Keys that have options of their own and are refused.
    """
    known = read_app_config(own_app)
    found = parse_settings(pairs, reserved=reserved)
    for key, value in found.items():
        require(key in known, f"`set` {key}: no such setting{suggest_name(key, list(known))}")
        if isinstance(known[key], float) and type(value) is int:
            found[key] = float(value)
        is_alike = type(found[key]) is type(known[key])
        require(is_alike, f"`set` {key}={value}: must be like {known[key]!r}")
        try:
            check_run_config({key: found[key]})
        except FedgftError as error:
            raise FedgftError(f"`set` {key}={value}: {error}") from None
    for key in ("schema", "counts"):  # the server's working folder is not the user's
        if found.get(key):
            found[key] = str(expand_user(found[key]).resolve())
    return found


# Progress


def _print_row(row: dict[str, Any], *, rounds: int, metric: str, notes: set[str]) -> None:
    """Print a row of the run's progress on stderr: a round, or a note that is not in `notes`."""
    text = row.get("note")
    if "round" in row:
        _print_round(row, rounds=rounds, metric=metric)
    elif text is not None and text not in notes:
        notes.add(text)
        note(text)


def _print_round(row: dict[str, Any], *, rounds: int, metric: str) -> None:
    is_private = "epsilon" in row  # then only the requested numbers are known
    values = {
        "accuracy": (row["accuracy"], "%"),
        f"{metric} gap of decisions": (row["gap_hard"], " points"),
        f"{metric} gap of scores": (row["gap_soft"], " points"),
    }
    texts = [
        f"{name} {format_share(value, unit)}"
        for name, (value, unit) in values.items()
        if not (is_private and value is None)
    ]
    text = (
        f"round {row['round']} of {rounds}: {', '.join(texts)} on the sites' training "
        f"rows; {row['clients']} sites heard, {row['alive']} of {row['sites']} alive"
    )
    if is_private:
        text += (
            f"\n  epsilon {row['epsilon']:.3g} so far (delta {row['delta']:g}); the noise puts a "
            f"standard error of {format_share(row['gap_error'])} points on the gap"
        )
    err.print(text, markup=False, soft_wrap=True)

"""`fedgft deploy local`: a federation of real processes on this host."""

import json as json_format
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedgft.algorithms.controller import Controller
from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.audit.measurement import read_header
from fedgft.cli import interrupt_on_termination
from fedgft.cli.console import err, note, out, wrote
from fedgft.cli.options import (
    Flag,
    MetricName,
    Pairs,
    Place,
    Some,
    Whole,
    parse_settings,
    require_values,
)
from fedgft.data import SOURCES
from fedgft.data.encode import suggest_name
from fedgft.data.schema import Schema
from fedgft.data.table import split_group_columns
from fedgft.deploy.init import read_app_config
from fedgft.errors import FedgftError, import_extra
from fedgft.flower.run_config import check_run
from fedgft.metrics import get_metric
from fedgft.settings import check_settings
from fedgft.store import expand_user

MAX_LOCAL_SITES = 100
MAX_LOCAL_ROUNDS = 10_000
MIN_SECURE_SITES = 3  # among fewer, a sum does not hide any of its parts
SITE_NAMES = ("north", "south", "east", "west", "center")
METHODS = ("fedgft", "fairfed", "measured")
CHANNELS = ("train", "query", "evaluate")
STRATEGIES = ("Fed", "Krum", "Multi", "QFed", "Bulyan")  # how their class names begin
RESULT_FILES = ("model.safetensors", "history.json", "report.html")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The options of `fedgft deploy local`.

    Parameters
    ----------
    sites
        How many sites [default: 3, or one for every file of --data].
    rounds
        Rounds of training.
    data
        A public data set to cut between sites [default: adult], or a CSV or Parquet file per site.
    label
        Of such files: the column with what is true.
    group
        The column with the group; "race,sex" for intersections.
    positive
        Which of two labels is the positive one.
    method
        fedgft, fairfed, or measured (the strategy as it is, its gap measured).
    metric
        sp, eop, eo, cal, acc or fpr; several at once with weights: sp+0.5*eop.
    target
        The gap of decisions that is to be reached [default: 0].
    lam
        Instead of a target: the strength of the paper's penalty.
    strategy
        Any of flwr.serverapp.strategy: FedAvg, FedAdam, FedProx, Krum, ...
    channel
        train (no further message), query (exact, one more per round) or evaluate.
    alpha
        Dirichlet concentration of the cut: small is heterogeneous.
    seed
        Of the cut, the start and the order of rows.
    epsilon
        Noise on the statistics, with this budget for the whole run.
    set_
        More settings of the app: --set lr=0.005 'model="mlp"' min-count=10.
    app_
        Your own app instead of the one that ships.
    port
        The server's port [default: one that is free].
    timeout
        Seconds after which the run is given up.
    out_
        A new folder for the model, the history, the report and the logs.
    resume
        Go on in --out from the last round that was finished there.
    """

    sites: Whole | None = None
    rounds: Whole = 5
    data: Annotated[list[str] | None, Some] = None
    label: str = ""
    group: str = ""
    positive: str = ""
    method: str = "fedgft"
    metric: MetricName = "sp"
    target: float | None = None
    lam: float | None = None
    strategy: str = "FedAvg"
    channel: str = "train"
    alpha: float = 0.5
    seed: Whole = 0
    epsilon: float | None = None
    set_: Pairs = None
    app_: Annotated[Place | None, Parameter(name="--app")] = None
    port: Whole | None = None
    timeout: float = 3600.0
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-deploy")
    resume: Annotated[bool, Flag] = False

    def check(self) -> None:
        """Raise a `FedgftError` for what the processes would report a minute later."""
        require_values(data=self.data, set=self.set_)
        if self.target is not None and self.lam is not None:
            raise FedgftError("`target` or `lam`: choose one of the two", kind="conflict")
        numbers = ("alpha", "seed", "lam", "target", "timeout", "sites", "rounds", "epsilon")
        check_settings({name: getattr(self, name) for name in numbers})
        if self.rounds > MAX_LOCAL_ROUNDS:
            raise FedgftError(f"`rounds` must be at most {MAX_LOCAL_ROUNDS}, got {self.rounds}")
        if self.sites is not None and self.sites > MAX_LOCAL_SITES:
            raise FedgftError(
                f"`sites` must be at most {MAX_LOCAL_SITES} on one host, got {self.sites}"
            )
        if self.port is not None and not 1 <= self.port <= 65535:
            raise FedgftError(f"`port` {self.port}: must lie between 1 and 65535")
        _check_choice("method", self.method, METHODS)
        _check_choice("channel", self.channel, CHANNELS)
        strategies = import_extra("flwr.serverapp.strategy", "fedgft deploy").__all__
        known = [name for name in strategies if name.startswith(STRATEGIES)]
        _check_choice("strategy", self.strategy, known)
        metric = get_metric(self.metric)
        Controller(metric, self.target or 0.0)
        if self.lam is not None:
            LinearizedPenalty(metric, self.lam)
        if self.epsilon is not None and self.method == "fairfed":
            raise FedgftError(
                "`epsilon`: FairFed needs every client's own sums, without noise", kind="conflict"
            )

    def site_files(self) -> list[Path]:
        """Return the sites' files; none if --data names a public data set."""
        paths = [expand_user(name) for name in self.data or []]
        tables = [path for path in paths if path.suffix.lower() in (".csv", ".parquet")]
        if not tables:
            self._check_public_set()
            return []
        for path in paths:
            if path not in tables:
                raise FedgftError(f"`data` {path}: the ending must be .csv or .parquet")
            if not path.is_file():
                raise FedgftError(f"`data` {path}: no such file", kind="file")
        if self.sites is not None and self.sites != len(paths):
            raise FedgftError(
                f"`sites` {self.sites}: there are {len(paths)} files, one for every site"
            )
        for name, column in (("label", self.label), ("group", self.group)):
            if not column:
                raise FedgftError("must name a column of the files", field=name, kind="missing")
        for path in paths:
            self._check_columns(path)
        return paths

    def _check_public_set(self) -> None:
        if len(self.data or []) > 1:
            raise FedgftError("`data`: one public data set, or a file for every site")
        if self.data and self.data[0] not in SOURCES:
            raise FedgftError(f"`data` {self.data[0]}: choose from {', '.join(SOURCES)}, or files")
        if self.label or self.positive:
            note("`label` and `positive` are for files of your own: a public data set has its own")

    def _check_columns(self, path: Path) -> None:
        known = read_header(path)
        wanted = [("label", self.label)]
        wanted += [("group", name) for name in split_group_columns(self.group, known)]
        for option, name in wanted:
            if name not in known:
                hint = suggest_name(name, known)
                raise FedgftError(f"{path}: no column '{name}' (`{option}`){hint}", kind="data")

    def configuration(self, *, sites: int, from_files: bool, folder: Path) -> dict[str, Any]:
        """Return the configuration of the app: options of this command and what --set adds."""
        config: dict[str, Any] = {
            "rounds": self.rounds,
            "sites": sites,
            "out": str(folder),
            "label": self.label,
            "group": self.group,
            "data": "csv" if from_files else (self.data or ["adult"])[0],
            "positive": self.positive,
            "method": self.method,
            "metric": self.metric,
            "target": self.target or 0.0,
            "lam": -1.0 if self.lam is None else self.lam,
            "strategy": self.strategy,
            "channel": self.channel,
            "alpha": self.alpha,
            "seed": self.seed,
            "epsilon": self.epsilon or 0.0,
            "resume": self.resume,
        }
        own_app = None if self.app_ is None else self.app_.resolve()
        config |= parse_app_settings(self.set_ or [], own_app, reserved=config)
        self._check_statistics(config)
        return config

    def _check_statistics(self, config: dict[str, Any]) -> None:
        """Check the settings about what sites report, which depend on one another."""
        from fedgft.flower.aggregator import StatisticsOptions
        from fedgft.privacy.noise import Budget

        if config.get("schema"):
            Schema.from_file(Path(config["schema"]))
        is_secure = bool(config.get("secure"))
        if is_secure and config["sites"] < MIN_SECURE_SITES:
            raise FedgftError(
                f"`set` secure=true: a sum hides no site among fewer than {MIN_SECURE_SITES} sites"
            )
        if self.epsilon is not None:
            Budget(self.epsilon, releases=self.rounds).noise("soft")
        min_count = int(config.get("min-count", 0))
        budget = Budget(config["epsilon"] or None, config.get("delta", 1e-6), min_count=min_count)
        StatisticsOptions(channel=self.channel, secure=is_secure, budget=budget)


def local(*, json: Annotated[bool, Flag] = False, options: LocalRun | None = None) -> None:
    """Run a whole federation on this host: one server and N sites as processes of their own, with
    TLS and node authentication, as it would run between organizations.

    For example: fedgft deploy local --sites 3 --rounds 5

    Parameters
    ----------
    json
        Print one line of JSON at the end, and nothing else, to stdout.
    """
    import_extra("flwr", "fedgft deploy")
    from fedgft.deploy.local_run import LocalRunPlan, format_closing_line, run_local, site_arguments

    options = options or LocalRun()
    options.check()
    files = options.site_files()
    names = _site_names(len(files) or (3 if options.sites is None else options.sites))
    folder = options.out_.resolve()
    plan = LocalRunPlan(
        names,
        site_arguments(names, files),
        options.configuration(sites=len(names), from_files=bool(files), folder=folder),
        folder,
        options.port,
        None if options.app_ is None else options.app_.resolve(),
        options.timeout,
        options.resume,
    )
    interrupt_on_termination()
    result = run_local(plan, RoundPrinter(options.rounds, options.metric), note)
    if json:
        sys.stdout.write(json_format.dumps(result) + "\n")
        sys.stdout.flush()
    if result["status"] != "finished:completed":
        logs = folder / "logs"
        raise FedgftError(f"the run ended as {result['status']}: {result['why']} (logs in {logs})")
    if not json:
        out.print(
            format_closing_line(result, options.metric),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    wrote([path for name in RESULT_FILES if (path := folder / name).exists()])


def _site_names(count: int) -> tuple[str, ...]:
    if count <= len(SITE_NAMES):
        return SITE_NAMES[:count]
    return tuple(f"site-{k + 1}" for k in range(count))


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise FedgftError(f"{value!r} is not known: {', '.join(known)}", field=name)


class RoundPrinter:
    """Prints a line per round on stderr, and what the server notes, each note once."""

    def __init__(self, rounds: int, metric: str) -> None:
        self.rounds = rounds
        self.metric = metric
        self.notes: set[str] = set()

    def __call__(self, row: dict[str, Any]) -> None:
        """Print a row of the run's progress: a round, or a note."""
        if "round" in row:
            self._print_round(row)
        elif row.get("note") is not None and row["note"] not in self.notes:
            self.notes.add(row["note"])
            note(row["note"])

    def _print_round(self, row: dict[str, Any]) -> None:
        is_private = "epsilon" in row  # then only what was asked for is known
        values = {
            "accuracy": (row["accuracy"], "%"),
            f"{self.metric} gap of decisions": (row["gap_hard"], " points"),
            f"{self.metric} gap of scores": (row["gap_soft"], " points"),
        }
        texts = [
            f"{name} {_percent(value, unit)}"
            for name, (value, unit) in values.items()
            if not (is_private and value is None)
        ]
        _print_line(
            f"round {row['round']} of {self.rounds}: {', '.join(texts)} on the sites' training "
            f"rows; {row['clients']} sites heard, {row['alive']} of {row['sites']} alive"
        )
        if is_private:
            _print_line(
                f"  epsilon {row['epsilon']:.3g} so far (delta {row['delta']:g}); the noise puts a "
                f"standard error of {_percent(row['gap_error'])} points on the gap"
            )


def _print_line(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def _percent(value: float | None, unit: str = "") -> str:
    return "not estimable" if value is None else f"{100 * value:.1f}{unit}"


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
        if key not in known:
            raise FedgftError(f"`set` {key}: no such setting{suggest_name(key, list(known))}")
        if isinstance(known[key], float) and type(value) is int:
            found[key] = float(value)
        elif type(value) is not type(known[key]):
            raise FedgftError(f"`set` {key}={value}: must be like {known[key]!r}")
        try:
            check_run({key: found[key]})
        except FedgftError as error:
            raise FedgftError(f"`set` {key}={value}: {error}") from None
    for key in ("schema", "counts"):  # the server's working folder is not the user's
        if found.get(key):
            found[key] = str(expand_user(found[key]).resolve())
    return found

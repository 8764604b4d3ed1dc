"""`fedgft deploy`: set up the hosts of a federation and run them, on Flower."""

import json as json_module
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

import fedgft
from fedgft.cli import interrupt_on_termination
from fedgft.cli.console import note, paragraph, print_indented, wrote
from fedgft.cli.options import (
    Columns,
    Flag,
    Fraction,
    Many,
    MetricName,
    Number,
    Pairs,
    Place,
    Some,
    Whole,
    parse_settings,
    require,
    require_values,
    split_columns,
)
from fedgft.errors import FedgftError, LazyModule, import_extra
from fedgft.settings import (
    HISTOGRAM_KEYS,
    TRAINING_KEYS,
    TREE_KEYS,
    check_run_config,
    check_settings,
)
from fedgft.store import expand_user, make_folder

# Loaded when a command runs, so that help is printed at once.
flower_strategies = LazyModule("flwr.serverapp.strategy")
aggregator = LazyModule("fedgft.flower.aggregator")
audit_command = LazyModule("fedgft.cli.audit")
controller = LazyModule("fedgft.algorithms.controller")
encode = LazyModule("fedgft.data.encode")
federation_files = LazyModule("fedgft.deploy.init")
histogram_trees = LazyModule("fedgft.flower.histogram_trees")
local_runs = LazyModule("fedgft.deploy.local_run")
measurement = LazyModule("fedgft.auditing.measurement")
metrics = LazyModule("fedgft.metrics")
noise = LazyModule("fedgft.privacy.noise")
objectives = LazyModule("fedgft.algorithms.objectives")
rule_fitting = LazyModule("fedgft.flower.rule_fitting")
schema = LazyModule("fedgft.data.schema")
server_app = LazyModule("fedgft.flower.server_app")
services = LazyModule("fedgft.deploy.server")
site_runs = LazyModule("fedgft.deploy.site")
validation = LazyModule("fedgft.validation")

POLL_SECONDS = (0.05, 60)
MAX_LOCAL_SITES = 100
MAX_LOCAL_ROUNDS = 10_000
MIN_SECURE_SITES = 3  # among fewer, a sum does not hide any of its parts
SITE_NAMES = ("north", "south", "east", "west", "center")
CHANNELS = ("train", "query", "evaluate")
STRATEGIES = ("Fed", "Krum", "Multi", "QFed", "Bulyan")  # how their class names begin
CHECKED = ("alpha", "seed", "lam", "target", "timeout", "sites", "rounds", "epsilon")
CONFIGURED = (  # options that the app takes under the same name
    *("rounds", "metric", "alpha", "seed", "resume"),
)
TEXTS = ("label", "positive")  # likewise; empty where they are not given
XGBOOST = "xgboost"
FOREST = "trees"
BOOSTING = "FedXgb"  # how the names of strategies begin whose sites grow trees
RESULT_FILES = ("model.safetensors", "model.json", "rule.json", "history.json", "report.html")
FederationFolder = Annotated[Place, Parameter(help="The folder that `fedgft deploy init` made.")]
Gaps = Annotated[list[str] | None, Some]  # METRIC=GAP
BindAddress = Annotated[
    str | None, Parameter(help="The address on which the gate listens [default: all addresses].")
]

app = App(
    name="deploy",
    help="Train between organizations with Flower: set up hosts, or try it on this host.",
    help_epilogue="Examples:\n  fedgft deploy local --sites 3 --rounds 5\n"
    "  fedgft deploy init federation --sites north=north.pub --host fair.example.org",
)


@Parameter(name="*")
@dataclass(frozen=True)
class LocalRunOptions:
    """The options of `fedgft deploy local`.

    Parameters
    ----------
    data
        A public data set to divide between sites [default: adult], or one CSV or Parquet file per
        site.
    sites
        Number of sites [default: 3, or one per file of --data].
    rounds
        Rounds of training.
    label
        With files: the column with the true outcome.
    group
        The column with the groups; several for their intersections.
    positive
        The positive one of two labels [default: the alphabetically last, or the larger number].
    method
        fedgft-control (reaches --target), fedgft (the paper's penalty, with --lam), fairfed, or
        measured (the unchanged strategy, whose gap is only measured) [default: fedgft-control;
        fedgft with --lam].
    metric
        sp, eop, eo, predictive-parity, acc or fpr, or a weighted sum of several: sp+0.5*eop.
    target
        For fedgft-control: the largest gap of decisions, as a fraction [default: 0].
    lam
        For fedgft: the strength of the paper's penalty.
    model
        logistic, mlp, xgboost (each site grows trees), trees (all sites grow each tree together,
        from exact sums), or own with --app [default: logistic].
    base
        Federated algorithm: a strategy of flwr.serverapp.strategy, such as fedavg, fedadam,
        fedprox or krum; for xgboost fedxgbbagging or fedxgbcyclic; not for trees
        [default: fedavg; fedxgbbagging].
    channel
        How sums travel: train (no extra message), query (exact; one extra message per round) or
        evaluate [default: train; query with fedxgbcyclic and with trees].
    alpha
        How evenly rows are dealt to the sites: 0.5 is very uneven, 100 nearly even.
    seed
        Seed of the division into sites, the initial model and the order of rows.
    epsilon
        Add noise to the statistics, with this privacy budget for the whole run.
    adjust
        At the end, fit the most accurate decision rule whose gaps are at most these, as in sp=0.02
        eop=5%, to sums of the sites' scores, and save it as rule.json.
    adjust_local
        The largest gaps of the rule at every site, as in sp=0.05.
    adjust_per_site
        Each site gets thresholds of its own.
    adjust_randomized
        A coin may decide between thresholds: reaches gaps that no fixed thresholds reach.
    set_
        More settings of the app: --set lr=0.005 'model="mlp"' min-cell=10.
    app_
        Your own app, in place of the one that comes with fedgft.
    port
        The server's port [default: a free one].
    timeout
        Stop the run after this many seconds.
    out_
        A new folder for the model, the history, the report and the logs.
    resume
        Continue in --out after the last finished round.
    """

    data: Annotated[list[str] | None, Some] = None
    _: KW_ONLY
    sites: Whole | None = None
    rounds: Whole = 5
    label: str | None = None
    group: Columns | None = None
    positive: str | None = None
    method: str | None = None
    metric: MetricName = "sp"
    target: Fraction | None = None
    lam: Number | None = None
    model: str | None = None
    base: str | None = None
    channel: str | None = None
    alpha: Number = 0.5
    seed: Whole = 0
    epsilon: Number | None = None
    adjust: Gaps = None
    adjust_local: Gaps = None
    adjust_per_site: Annotated[bool, Flag] = False
    adjust_randomized: Annotated[bool, Flag] = False
    set_: Pairs = None
    app_: Annotated[Place | None, Parameter(name="--app")] = None
    port: Whole | None = None
    timeout: Number = 3600.0
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-deploy")
    resume: Annotated[bool, Flag] = False


@app.command
def local(options: LocalRunOptions | None = None, *, json: Annotated[bool, Flag] = False) -> None:
    """Run a whole federation on this host: a server and N sites as separate processes, with TLS
    and node authentication, as between organizations.

    Parameters
    ----------
    json
        Print one line of JSON to stdout at the end, and nothing else.

    Examples
    --------
    fedgft deploy local --sites 3 --rounds 5
    fedgft deploy local --data north.csv south.csv --label repaid --group sex
    """
    import_extra("flwr", "fedgft deploy")
    run_federation(options or LocalRunOptions(), json=json)


@app.command
def keys(site: str, /, *, out: Annotated[Place, Parameter(name="--out")] = Path(".")) -> None:
    """Make the key pair of a site, at the site: the private key stays there, the public key goes
    to the server.

    Parameters
    ----------
    site
        The site's name: letters, digits, '-', '_' and '.'.
    out
        The folder for SITE.key and SITE.pub.

    Examples
    --------
    fedgft deploy keys north
    """
    federation_files.check_site_names([site])
    folder = make_folder(out)
    federation_files.create_node_key(folder, site)
    public_key = folder / f"{site}.pub"
    wrote([folder / f"{site}.key", public_key])
    fingerprint = federation_files.fingerprint(federation_files.read_public_key(public_key))
    sys.stdout.write(
        f"Send {site}.pub to the server's operator, and compare its fingerprint by telephone:\n"
        f"{fingerprint}\nKeep {site}.key secret, on this host.\n"
    )


@app.command
def init(
    folder: Place,
    /,
    *,
    sites: Annotated[tuple[str, ...], Many],
    host: str,
    port: Whole = 9093,
    alias: Annotated[tuple[str, ...] | None, Some] = None,
    make_keys: Annotated[bool, Flag] = False,
) -> None:
    """Make a certificate authority, the server's certificate, the list of sites and the app.

    Parameters
    ----------
    folder
        A new folder, for the server's host. It holds secrets: give sites only the file ca.crt.
    sites
        The sites and their public keys, NAME=FILE each; `fedgft deploy keys NAME` makes one.
    host
        The server's name or address, as sites reach it.
    port
        The port that sites connect to; the next port is used on loopback only.
    alias
        More names and addresses of the server, for its certificate.
    make_keys
        Also make the keys of sites that have no file. For trials only: the server then knows them.

    Examples
    --------
    fedgft deploy init federation --sites north=north.pub --host fair.example.org
    """
    require_values(alias=alias)
    pairs = [site.partition("=") for site in sites]
    made = federation_files.create_federation(
        folder,
        sites=[name for name, _, _ in pairs],
        host=host,
        port=port,
        aliases=alias or (),
        public_keys={name: expand_user(file) for name, equals, file in pairs if equals},
        make_keys=make_keys,
    )
    wrote([made.path])
    sys.stdout.write(federation_files.format_instructions(made))


@app.command
def server(folder: FederationFolder, /, *, bind: BindAddress = None) -> None:
    """Start the server of a federation: a SuperLink on loopback, and the gate for the sites.

    Examples
    --------
    fedgft deploy server federation
    """
    _serve("run_server", folder, bind)


@app.command
def gate(folder: FederationFolder, /, *, bind: BindAddress = None) -> None:
    """Start only the gate, in front of a SuperLink that is already running.

    Examples
    --------
    fedgft deploy gate federation
    """
    _serve("run_gate", folder, bind)


@app.command
def site(
    name: str,
    /,
    *,
    server: str,
    ca: Place = Path("ca.crt"),
    key: Place | None = None,
    peers: Place | None = None,
    data: Place | None = None,
    set_: Pairs = None,
    app_: Annotated[Place | None, Parameter(name="--app")] = None,
    poll: Number = 1.0,
) -> None:
    """Join a federation as a site, with the app that is installed here; needs no open port.

    Parameters
    ----------
    name
        The site's name.
    server
        HOST:PORT of the server.
    ca
        The certificate of the federation's authority (ca.crt), from the server's operator.
    key
        The site's private key [default: NAME.key].
    peers
        A folder with the public keys of all sites (*.pub), for secure sums.
    data
        The site's table, CSV or Parquet.
    set_
        More settings of this site: --set max-epsilon=1 min-cell=10.
    app_
        Your own Flower app, in place of the installed one. Code that comes with a run is never
        executed.
    poll
        Seconds between requests for work.

    Examples
    --------
    fedgft deploy site north --server fair.example.org:9093 --data /srv/north.csv
    """
    import_extra("flwr", "fedgft deploy")
    require_values(set=set_)
    federation_files.check_site_names([name])
    low, high = POLL_SECONDS
    is_usual = low <= poll <= high
    require(is_usual, f"`poll` must lie between {low:g} and {high:g} seconds, got {poll:g}")
    is_folder = peers is None or peers.is_dir()
    require(is_folder, f"`peers` {peers}: no such folder", kind="file")
    require(data is None or data.is_file(), f"`data` {data}: no such file", kind="file")
    private_key = key or Path(f"{name}.key")
    paths = {"key": private_key, "peers": peers, "data": data}
    node: dict[str, Any] = {"site": name}
    node |= {option: str(path.resolve()) for option, path in paths.items() if path is not None}
    node |= parse_settings(set_ or [], reserved=node)
    plan = site_runs.SitePlan(
        server,
        ca.resolve(),
        private_key.resolve(),
        local_runs.format_config(node),
        app=federation_files.packaged_app() if app_ is None else app_.resolve(),
        poll=poll,
    )
    _run_until_terminated(lambda: site_runs.run_site(plan, note))


def _serve(name: str, folder: Path, bind: str | None) -> None:
    """Run a service of `fedgft.deploy.server` for the federation in the folder."""
    import_extra("flwr", "fedgft deploy")
    made = federation_files.load_federation(folder)
    address = bind or ("::" if ":" in made.host else "0.0.0.0")
    _run_until_terminated(lambda: getattr(services, name)(made, bind=address))


def _run_until_terminated(service: Callable[[], None]) -> None:
    """Run a service; SIGTERM, SIGHUP and Ctrl-C end it in good order."""
    interrupt_on_termination()
    try:
        service()
    except KeyboardInterrupt:
        note("ended")


# A federation on this host: checks, configuration, progress


def run_federation(options: LocalRunOptions, *, json: bool) -> None:
    """Check the options, run the federation and print the result; `json`: as one line of JSON."""
    _check(options)
    files = _find_site_files(options)
    names = _site_names(len(files) or (3 if options.sites is None else options.sites))
    folder = options.out_.resolve()
    plan = local_runs.LocalRunPlan(
        names,
        local_runs.site_arguments(names, files),
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
    result = local_runs.run_local(plan, on_row, note)
    if json:
        sys.stdout.write(json_module.dumps(result) + "\n")
        sys.stdout.flush()
    status = result["status"]
    why = f"the run ended as {status}: {result.get('why')} (logs in {folder / 'logs'})"
    require(status == "finished:completed", why)
    if not json:
        for text in local_runs.list_closing_lines(result, options.metric):
            paragraph(text)
    wrote([path for name in RESULT_FILES if (path := folder / name).exists()])


def _site_names(count: int) -> tuple[str, ...]:
    if count <= len(SITE_NAMES):
        return SITE_NAMES[:count]
    return tuple(f"site-{k + 1}" for k in range(count))


# Early checks of errors that the processes would report a minute later


def _check(options: LocalRunOptions) -> None:
    """Raise a `FedgftError` for an option that is wrong whatever the data are."""
    require_values(data=options.data, set=options.set_, group=options.group)
    require_values(adjust=options.adjust, adjust_local=options.adjust_local)
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
    validation.check_choice("method", method, server_app.METHODS)
    has_strength = method != "fedgft" or options.lam is not None
    require(
        has_strength, "`method` fedgft needs `target`, or `lam` as in the paper", kind="missing"
    )
    lam_fits = method == "fedgft" or options.lam is None
    require(lam_fits, f"`lam` is for `method` fedgft, not for {method}", kind="conflict")
    target_fits = options.target is None or method == "fedgft-control"
    require(
        target_fits, f"`target` is for `method` fedgft-control, not for {method}", kind="conflict"
    )
    validation.check_choice("channel", _choose_channel(options), CHANNELS)
    _check_model(options)
    metric = metrics.check_over_all_rows(fedgft.get_metric(options.metric))
    controller.Controller(metric, options.target or 0.0)
    if options.lam is not None:
        objectives.LinearizedPenalty(metric, options.lam)
    require(
        options.epsilon is None or method != "fairfed",
        "`epsilon`: FairFed needs every client's own sums, without noise",
        kind="conflict",
    )


def _choose_method(options: LocalRunOptions) -> str:
    """Return the method that was given, or the one that fits the other options."""
    if options.method == "fedgft" and options.lam is None:  # it needs one of the two
        return "fedgft" if options.target is None else "fedgft-control"
    if options.method is not None:
        return options.method
    return "fedgft-control" if options.lam is None else "fedgft"


def _check_model(options: LocalRunOptions) -> None:
    """Raise a `FedgftError` if the model is not known or does not fit the strategy."""
    if options.model is not None:
        check_run_config({"model": options.model})
    is_boosting = options.model == XGBOOST
    strategy = _find_strategy(options)
    fits = is_boosting == strategy.startswith(BOOSTING)
    text = f"`base` {strategy}: `model` xgboost needs fedxgbbagging or fedxgbcyclic"
    require(fits, f"{text}, and other models need others", kind="conflict")
    is_asked = strategy != "FedXgbCyclic" or _choose_channel(options) == "query"
    text = "`channel`: fedxgbcyclic trains one site per round, and only query asks all for sums"
    require(is_asked, text, kind="conflict")
    if is_boosting:
        import_extra("xgboost", "`model` xgboost")
    if options.model == FOREST:
        text = "`base` does not apply to `model` trees: it averages nothing"
        require(strategy == "FedAvg", text, kind="conflict")
        text = "`channel` must be query for `model` trees: its sums travel in messages of their own"
        require(_choose_channel(options) == "query", text, kind="conflict")
        text = "`method` fairfed weighs models, and `model` trees has one for all sites"
        require(_choose_method(options) != "fairfed", text, kind="conflict")


def _choose_channel(options: LocalRunOptions) -> str:
    """Return the channel that was given, or the one that the strategy needs."""
    if options.channel is not None:
        return options.channel
    asks_first = options.model == FOREST or _find_strategy(options) == "FedXgbCyclic"
    return "query" if asks_first else "train"


def _find_strategy(options: LocalRunOptions) -> str:
    """Return the class of Flower's strategy with the name that was given, in any case."""
    base = options.base or ("fedxgbbagging" if options.model == XGBOOST else "fedavg")
    known = [name for name in flower_strategies.__all__ if name.startswith(STRATEGIES)]
    names = {name.lower(): name for name in known}
    validation.check_choice("base", base.lower(), tuple(names))
    return names[base.lower()]


def _find_site_files(options: LocalRunOptions) -> list[Path]:
    """Return the sites' files; none if --data names a public data set."""
    paths = [expand_user(name) for name in options.data or []]
    files = [path for path in paths if path.suffix.lower() in (".csv", ".parquet")]
    if not files:
        _check_public_set(options)
        return []
    for path in paths:
        require(path in files, f"`data` {path}: the ending must be .csv or .parquet")
        require(path.is_file(), f"`data` {path}: no such file", kind="file")
    is_one_each = options.sites in (None, len(paths))
    text = f"`sites` {options.sites}: there are {len(paths)} files, one for every site"
    require(is_one_each, text)
    for name in ("label", "group"):
        is_named = getattr(options, name)
        require(is_named, f"`{name}` must name a column of the files", kind="missing")
    for path in paths:
        known = measurement.read_header(path)
        groups = split_columns(options.group or (), known)
        for option, name in (("label", options.label), *(("group", group) for group in groups)):
            text = f"{path}: no column '{name}' (`{option}`){encode.suggest_name(name, known)}"
            require(name in known, text, kind="data")
    return paths


def _check_public_set(options: LocalRunOptions) -> None:
    names = options.data or ["adult"]
    require(len(names) == 1, "`data`: one public data set, or a file for every site")
    is_known = names[0] in fedgft.data.SOURCES
    require(is_known, f"`data` {names[0]}: choose from {', '.join(fedgft.data.SOURCES)}, or files")
    if options.label or options.positive:
        note("`label` and `positive` are for your own files: a public data set defines both")


# Configuration of the app


def _make_config(options: LocalRunOptions, *, sites: int, from_files: bool) -> dict[str, Any]:
    """Return the configuration of the app: options of this command and what --set adds."""
    config = {name: getattr(options, name) or "" for name in TEXTS}
    config |= {name: getattr(options, name) for name in CONFIGURED} | {
        "group": ",".join(options.group or ()),
        "method": _choose_method(options),
        "strategy": _find_strategy(options),
        "channel": _choose_channel(options),
        "sites": sites,
        "out": str(options.out_.resolve()),
        "data": "csv" if from_files else (options.data or ["adult"])[0],
        "target": options.target or 0.0,
        "lam": -1.0 if options.lam is None else options.lam,
        "epsilon": options.epsilon or 0.0,
    }
    if options.model is not None:
        config["model"] = options.model
    own_app = None if options.app_ is None else options.app_.resolve()
    config |= _rule_settings(options, own_app)
    given = parse_app_settings(options.set_ or [], own_app, reserved=config)
    config |= given
    _check_model_settings(str(options.model), given)
    if config.get("schema"):
        schema.Schema.from_file(Path(config["schema"]))
    is_secure = bool(config.get("secure"))
    require(
        not is_secure or sites >= MIN_SECURE_SITES,
        f"`set` secure=true: a sum hides no site among fewer than {MIN_SECURE_SITES} sites",
    )
    if options.epsilon is not None:
        noise.Budget(options.epsilon, releases=options.rounds).noise("soft")
    min_count = int(config.get("min-count", 0))
    rule_fitting.RulePlan.read(config)  # raises an error for a rule that no run can fit
    budget = noise.Budget(options.epsilon, config.get("delta", 1e-6), min_count=min_count)
    aggregator.StatisticsOptions(channel=config["channel"], secure=is_secure, budget=budget)
    if options.model == FOREST:
        histogram_trees.check_exact(noise.Budget(options.epsilon), secure=False)
        text = "`set` min-count and secure do not protect the histograms of `model` trees"
        require(not (min_count or is_secure), f"{text}: use xgboost", kind="unsupported")
    return config


def _rule_settings(options: LocalRunOptions, own_app: Path | None) -> dict[str, Any]:
    """Return the settings of the app for a decision rule, those that were given."""
    given: dict[str, Any] = {
        "adjust": _format_gaps("adjust", options.adjust),
        "adjust-local": _format_gaps("adjust_local", options.adjust_local),
        "adjust-per-site": options.adjust_per_site,
        "adjust-randomized": options.adjust_randomized,
    }
    given = {key: value for key, value in given.items() if value}
    unknown = given.keys() - federation_files.read_app_config(own_app)
    require(not unknown, f"`app` {own_app}: has no setting {min(unknown, default='')}")
    return given


def _format_gaps(name: str, gaps: Sequence[str] | None) -> str:
    """Return gaps as the app takes them: "sp=2%" is sp=0.02."""
    limits = audit_command.parse_limits(name, gaps or ())
    return ",".join(f"{metric}={gap:.12g}" for metric, gap in limits.items())


def _check_model_settings(model: str, given: Mapping[str, Any]) -> None:
    """Raise a `FedgftError` for a setting that belongs to another model."""
    keys_of = {XGBOOST: TREE_KEYS, FOREST: HISTOGRAM_KEYS}
    used = keys_of.get(model, TRAINING_KEYS)
    for key in sorted(
        {*TRAINING_KEYS, *TREE_KEYS, *HISTOGRAM_KEYS}.difference(used) & given.keys()
    ):
        models = [f"`model` {name}" for name, keys in keys_of.items() if key in keys]
        only = " and ".join(models) or "models without trees"
        raise FedgftError(f"`set` {key}: is for {only}", kind="conflict")


def parse_app_settings(
    pairs: Sequence[str], own_app: Path | None, *, reserved: Mapping[str, Any]
) -> dict[str, Any]:
    """Read KEY=VALUE pairs that must be settings of an app, of the type of its defaults.

    Parameters
    ----------
    pairs
        The values of --set.
    own_app
        The folder of the user's own app; None: the app that comes with fedgft.
    reserved
        Keys that have options of their own and are refused.
    """
    known = federation_files.read_app_config(own_app)
    found = parse_settings(pairs, reserved=reserved)
    for key, value in found.items():
        require(
            key in known, f"`set` {key}: no such setting{encode.suggest_name(key, list(known))}"
        )
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
        if row["round"] == rounds:
            note("the sites measure the rows that they held out, for the report")
    elif text is not None and text not in notes:
        notes.add(text)
        note(text)


def _print_round(row: dict[str, Any], *, rounds: int, metric: str) -> None:
    """Print one round in one line of about 80 characters."""
    note(f"on the sites' training rows, accuracy and {metric} gap of decisions, of scores:")
    is_private = "epsilon" in row  # then only the requested numbers are known
    share = local_runs.format_share
    texts = {
        "accuracy": f"accuracy {share(row['accuracy'], '%')}",
        "gap_hard": f"gap {share(row['gap_hard'], ' points')}",
        "gap_soft": f"of scores {share(row['gap_soft'])}",
    }
    known = [text for name, text in texts.items() if not is_private or row[name] is not None]
    text = f"{', '.join(known)}; {row['clients']}/{row['sites']} sites reported"
    if row["alive"] < row["sites"]:
        text += f", {row['alive']} still running"
    if is_private:
        text += (
            f"\nepsilon {row['epsilon']:.3g} so far (delta {row['delta']:g}); the noise puts a "
            f"standard error of {local_runs.format_share(row['gap_error'])} points on the gap"
        )
    print_indented(f"round {row['round']}/{rounds}: ", text)

"""`fedgft deploy`: a federation of real processes, here or between hosts."""

import json as encoding
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedgft.cli.console import err, note, out, wrote
from fedgft.cli.names import Flag, Many, MetricName, Some
from fedgft.files import expanded
from fedgft.types import FedgftError

app = App(
    name="deploy", help="Train between organisations, on Flower: set up hosts, or try it here."
)
SITES = ("north", "south", "east", "west", "centre")
STRATEGIES = ("FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedYogi", "FedAdagrad", "FedMedian",
              "FedTrimmedAvg", "Krum", "MultiKrum", "QFedAvg")  # fmt: skip


@app.command
def init(
    folder: Path,
    /,
    *,
    sites: Annotated[tuple[str, ...], Many],
    host: str,
    port: int = 9093,
    alias: Annotated[tuple[str, ...], Many] = (),
) -> None:
    """Make a certificate authority, the server's certificate, a key for every site and the app.

    For example: fedgft deploy init federation --sites north south --host fair.example.org

    Parameters
    ----------
    folder
        A new folder, for the server's host. It holds secrets: of its files a site gets ca.crt and
        those in nodes/ that bear its name, and nothing else.
    sites
        Names of the sites: letters, digits, '-', '_' and '.'.
    host
        The server's name or address, as sites reach it.
    port
        The one port that sites connect to.
    alias
        More names and addresses of the server, for its certificate.
    """
    from fedgft.deploy.commands import instructions
    from fedgft.deploy.folder import make_folder

    made = make_folder(expanded(folder), sites=sites, host=host, port=port, aliases=alias)
    wrote([made.path])
    sys.stdout.write(instructions(made))


@app.command
def local(
    *,
    sites: int | None = None,
    rounds: int = 5,
    data: Annotated[list[str] | None, Some] = None,
    label: str = "",
    group: str = "",
    positive: str = "",
    method: str = "fedgft",
    metric: MetricName = "sp",
    target: float | None = None,
    lam: float | None = None,
    strategy: str = "FedAvg",
    channel: str = "train",
    alpha: float = 0.5,
    seed: int = 0,
    epsilon: float | None = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", consume_multiple=True, negative="")
    ] = None,
    app_: Annotated[Path | None, Parameter(name="--app")] = None,
    port: int | None = None,
    timeout: float = 3600.0,
    out_: Annotated[Path, Parameter(name="--out")] = Path("fedgft-deploy"),
    resume: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Run a whole federation on this host: one server and N sites as processes of their own, with
    TLS and node authentication, as it would run between organisations.

    For example: fedgft deploy local --sites 3 --rounds 5

    Parameters
    ----------
    sites
        How many sites [default: 3, or one for every file of --data].
    rounds
        Rounds of training.
    data
        A public data set, which is cut between the sites [default: adult], or one CSV or Parquet
        file for every site.
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
        train (no further message), query (exact, one more a round) or evaluate.
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
    json
        Print one line of JSON at the end, and nothing else, to stdout.
    """
    from fedgft.deploy.local import Plan, nodes_of, run_local

    if data == [] or set_ == []:
        raise FedgftError(f"{'--data' if data == [] else '--set'} needs a value")
    if target is not None and lam is not None:
        raise FedgftError("--target or --lam: choose one of the two")
    files = _files(data, sites)
    names = _names(len(files) or (3 if sites is None else sites))
    if not files and (label or positive):
        note("--label and --positive are for files of your own: a public data set has its own")
    place = expanded(out_).resolve()
    config: dict[str, Any] = {
        "rounds": rounds, "sites": len(names), "out": str(place), "label": label, "group": group,
        "data": "csv" if files else (data or ["adult"])[0], "positive": positive, "method": method,
        "metric": metric, "target": target or 0.0, "lam": -1.0 if lam is None else lam,
        "strategy": strategy, "channel": channel, "alpha": alpha, "seed": seed,
        "epsilon": epsilon or 0.0,
    }  # fmt: skip
    _check(config, files=bool(files), lam=lam, epsilon=epsilon)
    own = None if app_ is None else expanded(app_).resolve()
    config["resume"] = resume
    config |= _settings(set_ or [], own, taken=config)
    _check_terms(config, len(names))
    plan = Plan(names, nodes_of(names, files), config, place, port, own, timeout, resume)
    signal.signal(signal.SIGTERM, _ended)
    said: set[str] = set()
    made = run_local(plan, lambda row: _told(row, rounds, metric, said), note)
    if json:
        sys.stdout.write(encoding.dumps(made) + "\n")
        sys.stdout.flush()
    if made["status"] != "finished:completed":
        logs = place / "logs"
        raise FedgftError(f"the run ended as {made['status']}: {made['why']} (logs in {logs})")
    if not json:
        out.print(_closing(made, metric), markup=False, highlight=False, soft_wrap=True)
    wrote([place / name for name in ("model.safetensors", "history.json", "report.html")
           if (place / name).exists()])  # fmt: skip


def _ended(*_: Any) -> None:
    """A polite request to end is answered like Ctrl-C: the processes are ended first."""
    raise KeyboardInterrupt


def _files(data: list[str] | None, sites: int | None) -> list[Path]:
    """The sites' files, if --data names files."""
    named = [expanded(name) for name in data or []]
    tables = [path for path in named if path.suffix.lower() in (".csv", ".parquet")]
    if not tables:
        if len(named) > 1:
            raise FedgftError("--data: one public data set, or a file for every site")
        return []
    for path in named:
        if path not in tables or not path.is_file():
            raise FedgftError(f"--data {path}: no such file" if path in tables else
                              f"--data {path}: the ending must be .csv or .parquet")  # fmt: skip
    if sites is not None and sites != len(named):
        raise FedgftError(f"--sites {sites}: there are {len(named)} files, one for every site")
    return named


def _names(count: int) -> tuple[str, ...]:
    if not 1 <= count <= 100:
        raise FedgftError(f"--sites must lie between 1 and 100 on one host, got {count}")
    return (
        tuple(SITES[:count])
        if count <= len(SITES)
        else tuple(f"site-{k + 1}" for k in range(count))
    )


def _check(
    config: dict[str, Any], *, files: bool, lam: float | None, epsilon: float | None
) -> None:
    """What would otherwise be found out by processes, a minute later."""
    from fedgft.data import SOURCES
    from fedgft.federated.control import Controlled
    from fedgft.federated.penalty import Linearised
    from fedgft.metrics import get_metric

    _check_strategy(config["strategy"])
    from fedgft.flower.private import Budget

    for name in ("label", "group") if files else ():
        if not config[name]:
            raise FedgftError(f"--{name} must name a column of the files")
    if not files and config["data"] not in SOURCES:
        raise FedgftError(f"--data {config['data']}: choose from {', '.join(SOURCES)}, or files")
    if not 0 < config["alpha"] < float("inf"):
        raise FedgftError(f"--alpha must be a positive number, got {config['alpha']:g}")
    if not 1 <= config["rounds"] <= 10_000:
        raise FedgftError(f"--rounds must lie between 1 and 10000, got {config['rounds']}")
    metric = get_metric(config["metric"])
    Controlled(metric, config["target"])
    if lam is not None:
        Linearised(metric, lam)
    if epsilon is not None:
        Budget(epsilon, releases=config["rounds"]).noise("soft")
        if config["method"] == "fairfed":
            raise FedgftError("--epsilon: FairFed needs every client's own sums, without noise")
    for name, known in (("method", ("fedgft", "fairfed", "measured")),
                        ("channel", ("train", "query", "evaluate"))):  # fmt: skip
        if config[name] not in known:
            raise FedgftError(f"--{name} {config[name]!r} is not known: {', '.join(known)}")


def _check_terms(config: dict[str, Any], sites: int) -> None:
    """What the settings together amount to."""
    from fedgft.flower.private import Budget
    from fedgft.flower.terms import Terms

    if config.get("secure") and sites < 3:
        raise FedgftError("--set secure=true: a sum hides nobody among fewer than 3 sites")
    budget = Budget(config["epsilon"] or None, min_count=int(config.get("min-count", 0)))
    Terms(channel=config["channel"], secure=bool(config.get("secure")), budget=budget)


def _check_strategy(name: str) -> None:
    try:
        from flwr.serverapp import strategy
    except ModuleNotFoundError as error:
        raise FedgftError("fedgft deploy needs Flower: pip install 'fedgft[flower]'") from error
    known = [
        n for n in strategy.__all__ if n.startswith(("Fed", "Krum", "Multi", "QFed", "Bulyan"))
    ]
    if name not in known:
        raise FedgftError(f"--strategy {name!r} is not known: {', '.join(known)}")


def _settings(given: list[str], own: Path | None, taken: dict[str, Any]) -> dict[str, Any]:
    """KEY=VALUE, the value as in TOML; the app must have such a setting."""
    import tomllib
    from math import inf

    from fedgft.data.columns import suggestion
    from fedgft.deploy.folder import app_settings

    known, found = app_settings(own), {}
    for item in given:
        key, equals, value = item.partition("=")
        try:
            held = tomllib.loads(f"x = {value}")["x"] if equals and key.strip() else None
        except tomllib.TOMLDecodeError:
            held = value  # a word without quotes, as shells leave it
        if not isinstance(held, (str, int, float, bool)) or held in (inf, -inf) or held != held:
            raise FedgftError(f"--set {item}: write KEY=VALUE, such as lr=0.005")
        if key.strip() in taken:
            raise FedgftError(f"--set {item}: there is an option --{key.strip()}")
        if key.strip() not in known:
            raise FedgftError(
                f"--set {item}: no such setting{suggestion(key.strip(), list(known))}"
            )
        found[key.strip()] = _typed(item, held, known[key.strip()])
    return found


def _typed(item: str, value: Any, usual: Any) -> Any:
    """Of the type that the app's own value has: the engine is strict about it."""
    if isinstance(usual, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(usual):
        raise FedgftError(f"--set {item}: must be like {usual!r}")
    return value


def _told(row: dict[str, Any], rounds: int, metric: str, said: set[str]) -> None:
    """One line a round, on stderr; and whatever the server noticed."""
    if "round" not in row:
        text = row.get("note")  # an error is said at the end, and the same thing once
        if text is not None and text not in said:
            said.add(text)
            note(text)
        return
    private = "epsilon" in row  # then only what was asked for is known at all
    told = {
        "accuracy": (row["accuracy"], "%"),
        f"{metric} gap of decisions": (row["gap_hard"], " points"),
        f"{metric} gap of scores": (row["gap_soft"], " points"),
    }
    said_now = [f"{name} {_share(*value)}" for name, value in told.items()
                if not (private and value[0] is None)]  # fmt: skip
    err.print(
        f"round {row['round']} of {rounds}: {', '.join(said_now)} on the sites' training rows; "
        f"{row['clients']} sites heard, {row['alive']} of {row['sites']} alive",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if "epsilon" in row:
        err.print(
            f"  epsilon {row['epsilon']:.3g} so far (delta {row['delta']:g}); the noise puts a "
            f"standard error of {_share(row['gap_error'])} points on the gap",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def _share(value: float | None, unit: str = "") -> str:
    return "not estimable" if value is None else f"{100 * value:.1f}{unit}"


def _closing(made: dict[str, Any], metric: str) -> str:
    said = _share(made["gap_hard"], " points")
    text = f"{metric} gap of decisions on the training rows of {made['sites']} site(s): {said}."
    held = made.get("held_out")
    if held is not None and held["gap_hard"] is not None:
        low, high = _share(held["gap_hard_low"]), _share(held["gap_hard_high"])
        right = f"{_share(held['accuracy_low'])} to {_share(held['accuracy_high'])}"
        text += (f" On the rows that they held out: {_share(held['gap_hard'], ' points')} (95% "
                 f"interval {low} to {high}), accuracy {_share(held['accuracy'], '%')} "
                 f"({right}).")  # fmt: skip
    elif held is not None:
        text += " On the rows that they held out it is not estimable: too few rows, or noise."
    return text + f" {made['rounds']} round(s), {made['seconds']:.0f} s."

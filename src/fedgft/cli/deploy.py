"""`fedgft deploy`: a federation of real processes, here or between hosts."""

import json as encoding
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedgft.cli.console import err, note, out, wrote
from fedgft.cli.deploying import (
    check_config,
    check_files,
    check_numbers,
    check_terms,
    more_settings,
    node_settings,
    site_files,
    site_names,
)
from fedgft.cli.names import Flag, Many, MetricName, Place, Some, Whole
from fedgft.errors import FedgftError
from fedgft.files import expanded

app = App(
    name="deploy", help="Train between organisations, on Flower: set up hosts, or try it here."
)


@app.command
def keys(site: str, /, *, out: Annotated[Place, Parameter(name="--out")] = Path(".")) -> None:
    """Make a site's key pair, at the site: the private half stays there, the public half goes to
    the server.

    For example: fedgft deploy keys north

    Parameters
    ----------
    site
        The site's name: letters, digits, '-', '_' and '.'.
    out
        The folder for SITE.key and SITE.pub.
    """
    from fedgft.deploy.folder import check_names
    from fedgft.deploy.keys import fingerprint, node_key, public_key
    from fedgft.files import make_folder

    check_names([site])
    folder = make_folder(out)
    node_key(folder, site)
    wrote([folder / f"{site}.key", folder / f"{site}.pub"])
    sys.stdout.write(
        f"Hand {site}.pub to the server's operator, and compare by telephone: "
        f"{fingerprint(public_key(folder / f'{site}.pub'))}\n"
        f"Keep {site}.key here.\n"
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

    For example: fedgft deploy init federation --sites north=north.pub --host fair.example.org

    Parameters
    ----------
    folder
        A new folder, for the server's host. It holds secrets: of its files a site gets ca.crt and
        nothing else.
    sites
        The sites and their public keys, NAME=FILE each; `fedgft deploy keys NAME` makes one.
    host
        The server's name or address, as sites reach it.
    port
        The one port that sites connect to; the next one is used on loopback.
    alias
        More names and addresses of the server, for its certificate.
    make_keys
        Make the keys of sites without a file here: for trials, since then the server has them.
    """
    from fedgft.deploy.commands import instructions
    from fedgft.deploy.folder import make_folder

    if alias == ():
        raise FedgftError("--alias needs a value")
    names, files = _named_keys(sites)
    made = make_folder(
        folder,
        sites=names,
        host=host,
        port=port,
        aliases=alias or (),
        public_keys=files,
        make_keys=make_keys,
    )
    wrote([made.path])
    sys.stdout.write(instructions(made))


def _named_keys(sites: tuple[str, ...]) -> tuple[list[str], dict[str, Path]]:
    """Names, and the files of those that have one: "north=north.pub"."""
    pairs = [site.partition("=") for site in sites]
    files = {name: expanded(file) for name, equals, file in pairs if equals}
    return [name for name, _, _ in pairs], files


@app.command
def server(folder: Place, /, *, bind: str = "") -> None:
    """Start a federation's server: a SuperLink on loopback, and the gate that sites connect to.

    For example: fedgft deploy server federation

    Parameters
    ----------
    folder
        The folder that `fedgft deploy init` made.
    bind
        The address on which the gate listens [default: all of this host].
    """
    from fedgft.deploy.folder import load_folder
    from fedgft.deploy.server import run_server

    made = load_folder(folder)
    with _until_ended():
        run_server(made, bind=bind or ("::" if ":" in made.host else "0.0.0.0"))


@app.command
def gate(folder: Place, /, *, bind: str = "") -> None:
    """Start the gate alone, in front of a SuperLink that was started otherwise.

    For example: fedgft deploy gate federation

    Parameters
    ----------
    folder
        The folder that `fedgft deploy init` made.
    bind
        The address on which the gate listens [default: all of this host].
    """
    from fedgft.deploy.folder import load_folder
    from fedgft.deploy.server import run_gate

    made = load_folder(folder)
    with _until_ended():
        run_gate(made, bind=bind or ("::" if ":" in made.host else "0.0.0.0"))


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
    set_: Annotated[
        list[str] | None, Parameter(name="--set", consume_multiple=True, negative="")
    ] = None,
    app_: Annotated[Place | None, Parameter(name="--app")] = None,
    poll: float = 1.0,
) -> None:
    """Take part as a site, with the app that is installed here; it needs no open port.

    For example: fedgft deploy site north --server fair.example.org:9093 --data /srv/north.csv

    Parameters
    ----------
    name
        The site's name.
    server
        HOST:PORT of the server.
    ca
        The certificate of the federation's authority, from the server's operator.
    key
        The site's private key [default: NAME.key].
    peers
        A folder with the public keys of all sites (*.pub), by which they know each other in secure
        sums.
    data
        The site's table, CSV or Parquet.
    set_
        More of the node's settings: --set max-epsilon=1 min-count=10.
    app_
        A Flower app of your own to run instead of the installed one. What a run is submitted with
        is never run.
    poll
        Seconds between questions for work.
    """
    from fedgft.deploy.folder import check_names, shipped_app
    from fedgft.deploy.local import configuration
    from fedgft.deploy.site import SitePlan, run_site

    if set_ == []:
        raise FedgftError("--set needs a value")
    check_names([name])
    if not 0.05 <= poll <= 60:
        raise FedgftError(f"--poll must lie between 0.05 and 60 seconds, got {poll:g}")
    private = (key or Path(f"{name}.key")).resolve()
    told: dict[str, Any] = {"site": name, "key": str(private)}
    if peers is not None:
        if not peers.is_dir():
            raise FedgftError(f"--peers {peers}: no such folder")
        told["peers"] = str(peers.resolve())
    if data is not None:
        if not data.is_file():
            raise FedgftError(f"--data {data}: no such file")
        told["data"] = str(data.resolve())
    told |= node_settings(set_ or [], taken=told)
    plan = SitePlan(
        server,
        ca.resolve(),
        private,
        configuration(told),
        app=shipped_app() if app_ is None else app_.resolve(),
        poll=poll,
    )
    with _until_ended():
        run_site(plan, note)


@contextmanager
def _until_ended() -> Iterator[None]:
    """A service ends in good order when it is told to, by SIGTERM or Ctrl-C."""
    for sign in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sign) != signal.SIG_IGN:  # nohup means it
            signal.signal(sign, _ended)
    try:
        yield
    except KeyboardInterrupt:
        note("ended")


@app.command
def local(
    *,
    sites: Whole | None = None,
    rounds: Whole = 5,
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
    seed: Whole = 0,
    epsilon: float | None = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", consume_multiple=True, negative="")
    ] = None,
    app_: Annotated[Place | None, Parameter(name="--app")] = None,
    port: Whole | None = None,
    timeout: float = 3600.0,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-deploy"),
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
    from fedgft.deploy.outcome import closing

    if data == [] or set_ == []:
        raise FedgftError(f"{'--data' if data == [] else '--set'} needs a value")
    if target is not None and lam is not None:
        raise FedgftError("--target or --lam: choose one of the two")
    files = site_files(data, sites)
    names = site_names(len(files) or (3 if sites is None else sites))
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
    check_numbers(config, port=port, timeout=timeout)
    check_config(config, files=bool(files), lam=lam, epsilon=epsilon)
    check_files(files, label, group)
    own = None if app_ is None else expanded(app_).resolve()
    config["resume"] = resume
    config |= more_settings(set_ or [], own, taken=config)
    check_terms(config, len(names))
    plan = Plan(names, nodes_of(names, files), config, place, port, own, timeout, resume)
    for sign in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sign) != signal.SIG_IGN:  # nohup means it
            signal.signal(sign, _ended)
    said: set[str] = set()
    made = run_local(plan, lambda row: _told(row, rounds, metric, said), note)
    if json:
        sys.stdout.write(encoding.dumps(made) + "\n")
        sys.stdout.flush()
    if made["status"] != "finished:completed":
        logs = place / "logs"
        raise FedgftError(f"the run ended as {made['status']}: {made['why']} (logs in {logs})")
    if not json:
        out.print(closing(made, metric), markup=False, highlight=False, soft_wrap=True)
    wrote([place / name for name in ("model.safetensors", "history.json", "report.html")
           if (place / name).exists()])  # fmt: skip


def _ended(*_: Any) -> None:
    """A polite request to end is answered like Ctrl-C: the processes are ended first."""
    raise KeyboardInterrupt


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

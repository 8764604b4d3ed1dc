"""`fedgft deploy`: set up the hosts of a federation and run them, on Flower."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedgft.cli import interrupt_on_termination
from fedgft.cli.console import note, wrote
from fedgft.cli.options import (
    Flag,
    Many,
    MetricName,
    Pairs,
    Place,
    Some,
    Whole,
    parse_settings,
    require,
    require_values,
)
from fedgft.errors import import_extra
from fedgft.store import expand_user, make_folder

POLL_SECONDS = (0.05, 60)

app = App(
    name="deploy",
    help="Train between organizations, on Flower: set up hosts, or try it here.",
    help_epilogue="Examples:\n  fedgft deploy local --sites 3 --rounds 5\n"
    "  fedgft deploy init federation --sites north=north.pub --host fair.example.org",
)


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
        fedgft-control (reaches --target), fedgft (the paper's penalty, with --lam), fairfed, or
        measured (the strategy as it is, its gap measured) [default: fedgft-control, or fedgft where
        --lam is given].
    metric
        sp, eop, eo, cal, acc or fpr; several at once with weights: sp+0.5*eop.
    target
        Of fedgft-control: the gap of decisions that is to be reached [default: 0].
    lam
        Of fedgft: the strength of the paper's penalty.
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
    method: str | None = None
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


@app.command
def local(*, json: Annotated[bool, Flag] = False, options: LocalRun | None = None) -> None:
    """Run a whole federation on this host: one server and N sites as processes of their own, with
    TLS and node authentication, as it would run between organizations.

    Parameters
    ----------
    json
        Print one line of JSON at the end, and nothing else, to stdout.

    Examples
    --------
    fedgft deploy local --sites 3 --rounds 5
    fedgft deploy local --data north.csv south.csv --label repaid --group sex
    """
    import_extra("flwr", "fedgft deploy")
    from fedgft.cli.deploy_local import run_federation

    run_federation(options or LocalRun(), json=json)


@app.command
def keys(site: str, /, *, out: Annotated[Place, Parameter(name="--out")] = Path(".")) -> None:
    """Make a site's key pair, at the site: the private half stays there, the public half goes to
    the server.

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
    from fedgft.deploy.init import check_site_names, create_node_key, fingerprint, read_public_key

    check_site_names([site])
    folder = make_folder(out)
    create_node_key(folder, site)
    public_key = folder / f"{site}.pub"
    wrote([folder / f"{site}.key", public_key])
    sys.stdout.write(
        f"Hand {site}.pub to the server's operator, and compare by telephone: "
        f"{fingerprint(read_public_key(public_key))}\nKeep {site}.key here.\n"
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

    Examples
    --------
    fedgft deploy init federation --sites north=north.pub --host fair.example.org
    """
    from fedgft.deploy.init import create_federation, format_instructions

    require_values(alias=alias)
    pairs = [site.partition("=") for site in sites]
    made = create_federation(
        folder,
        sites=[name for name, _, _ in pairs],
        host=host,
        port=port,
        aliases=alias or (),
        public_keys={name: expand_user(file) for name, equals, file in pairs if equals},
        make_keys=make_keys,
    )
    wrote([made.path])
    sys.stdout.write(format_instructions(made))


@app.command
def server(folder: Place, /, *, bind: str = "") -> None:
    """Start a federation's server: a SuperLink on loopback, and the gate that sites connect to.

    Parameters
    ----------
    folder
        The folder that `fedgft deploy init` made.
    bind
        The address on which the gate listens [default: all of this host].

    Examples
    --------
    fedgft deploy server federation
    """
    _serve("run_server", folder, bind)


@app.command
def gate(folder: Place, /, *, bind: str = "") -> None:
    """Start the gate alone, in front of a SuperLink that was started otherwise.

    Parameters
    ----------
    folder
        The folder that `fedgft deploy init` made.
    bind
        The address on which the gate listens [default: all of this host].

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
    poll: float = 1.0,
) -> None:
    """Take part as a site, with the app that is installed here; it needs no open port.

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

    Examples
    --------
    fedgft deploy site north --server fair.example.org:9093 --data /srv/north.csv
    """
    import_extra("flwr", "fedgft deploy")
    from fedgft.deploy.init import check_site_names, packaged_app
    from fedgft.deploy.local_run import format_config
    from fedgft.deploy.site import SitePlan, run_site

    require_values(set=set_)
    check_site_names([name])
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
    plan = SitePlan(
        server,
        ca.resolve(),
        private_key.resolve(),
        format_config(node),
        app=packaged_app() if app_ is None else app_.resolve(),
        poll=poll,
    )
    _run_until_terminated(lambda: run_site(plan, note))


def _serve(name: str, folder: Path, bind: str) -> None:
    """Run a service of `fedgft.deploy.server` for the federation in the folder."""
    import_extra("flwr", "fedgft deploy")
    from fedgft.deploy import server
    from fedgft.deploy.init import load_federation

    made = load_federation(folder)
    address = bind or ("::" if ":" in made.host else "0.0.0.0")
    _run_until_terminated(lambda: getattr(server, name)(made, bind=address))


def _run_until_terminated(service: Callable[[], None]) -> None:
    """Run a service; SIGTERM, SIGHUP and Ctrl-C end it in good order."""
    interrupt_on_termination()
    try:
        service()
    except KeyboardInterrupt:
        note("ended")

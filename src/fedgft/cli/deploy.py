"""`fedgft deploy`: set up the hosts of a federation and run them, on Flower."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedgft.cli import interrupt_on_termination
from fedgft.cli.console import note, wrote
from fedgft.cli.options import Flag, Many, Pairs, Place, Some, Whole, parse_settings, require_values
from fedgft.deploy.certificates import create_node_key, fingerprint, read_public_key
from fedgft.deploy.init import (
    FederationFolder,
    check_site_names,
    create_federation,
    format_instructions,
    load_federation,
    packaged_app,
)
from fedgft.errors import FedgftError, import_extra
from fedgft.store import expand_user
from fedgft.store import make_folder as make_plain_folder

POLL_SECONDS = (0.05, 60)

app = App(
    name="deploy", help="Train between organizations, on Flower: set up hosts, or try it here."
)
app.command(
    "fedgft.cli.deploy_local:local",
    name="local",
    help="Run a whole federation on this host: one server and N sites as processes of their own, "
    "with TLS and node authentication, as it would run between organizations.",
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
    check_site_names([site])
    folder = make_plain_folder(out)
    create_node_key(folder, site)
    wrote([folder / f"{site}.key", folder / f"{site}.pub"])
    sys.stdout.write(
        f"Hand {site}.pub to the server's operator, and compare by telephone: "
        f"{fingerprint(read_public_key(folder / f'{site}.pub'))}\n"
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

    For example: fedgft deploy server federation

    Parameters
    ----------
    folder
        The folder that `fedgft deploy init` made.
    bind
        The address on which the gate listens [default: all of this host].
    """
    _require_flower()
    from fedgft.deploy.server import run_server

    made = load_federation(folder)
    with _until_terminated():
        run_server(made, bind=bind or _any_address(made))


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
    _require_flower()
    from fedgft.deploy.server import run_gate

    made = load_federation(folder)
    with _until_terminated():
        run_gate(made, bind=bind or _any_address(made))


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
    _require_flower()
    from fedgft.deploy.local_run import format_config
    from fedgft.deploy.site import SitePlan, run_site

    require_values(set=set_)
    check_site_names([name])
    low, high = POLL_SECONDS
    if not low <= poll <= high:
        raise FedgftError(f"`poll` must lie between {low:g} and {high:g} seconds, got {poll:g}")
    private_key = (key or Path(f"{name}.key")).resolve()
    node: dict[str, Any] = {"site": name, "key": str(private_key)}
    if peers is not None:
        if not peers.is_dir():
            raise FedgftError(f"`peers` {peers}: no such folder", kind="file")
        node["peers"] = str(peers.resolve())
    if data is not None:
        if not data.is_file():
            raise FedgftError(f"`data` {data}: no such file", kind="file")
        node["data"] = str(data.resolve())
    node |= parse_settings(set_ or [], reserved=node)
    plan = SitePlan(
        server,
        ca.resolve(),
        private_key,
        format_config(node),
        app=packaged_app() if app_ is None else app_.resolve(),
        poll=poll,
    )
    with _until_terminated():
        run_site(plan, note)


def _require_flower() -> None:
    import_extra("flwr", "fedgft deploy")


def _any_address(folder: FederationFolder) -> str:
    return "::" if ":" in folder.host else "0.0.0.0"


@contextmanager
def _until_terminated() -> Iterator[None]:
    """Run a service; SIGTERM, SIGHUP and Ctrl-C end it in good order."""
    interrupt_on_termination()
    try:
        yield
    except KeyboardInterrupt:
        note("ended")

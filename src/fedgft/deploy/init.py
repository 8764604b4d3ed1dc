"""The folder of a federation on the server: keys, certificates, Flower's state, the app.

federation.json  ca.crt  ca.key  server.crt  server.tls  nodes/SITE.pub  engine/  app/
"""

import ipaddress
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedgft.deploy.certificates import (
    PUBLIC,
    create_authority,
    create_node_key,
    fingerprint,
    issue_certificate,
    read_public_key,
    read_site_keys,
    write_new,
)
from fedgft.deploy.processes import FLOWER_ENVIRONMENT, format_options
from fedgft.errors import FedgftError
from fedgft.store import atomic_write, open_folder, parse_json

CONNECTION = "federation"
MAX_SITES = 1000
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # with a leading hyphen it would be an option
HOST = rf"(?![0-9.]+$){LABEL}(\.{LABEL})*"
LOOPBACK_NAMES = ("127.0.0.1", "localhost")
SETTINGS = "federation.json"
DATABASE = "state.db"  # the SuperLink's: registered sites, runs and their messages


@dataclass(frozen=True)
class FederationFolder:
    """The folder of a federation.

    Parameters
    ----------
    path
        The folder.
    host
        Name or address under which sites reach the server.
    port
        Port of the gate, which sites connect to.
    inner
        Port of the SuperLink, on loopback.
    """

    path: Path
    host: str
    port: int
    inner: int

    @property
    def address(self) -> str:
        """HOST:PORT of the gate."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def app(self) -> Path:
        """Folder of the Flower app, which the user may change."""
        return self.path / "app"

    @property
    def nodes(self) -> Path:
        """Folder of the sites' public keys, NAME.pub each. Removing a key locks the site out."""
        return self.path / "nodes"

    @property
    def engine(self) -> Path:
        """Flower's home folder: its configuration and state."""
        return self.path / "engine"

    @property
    def names(self) -> Path:
        """File that holds the site of each node of the SuperLink."""
        return self.engine / "nodes.json"

    def sites(self) -> tuple[str, ...]:
        """Return the names of the sites whose keys are in the folder."""
        return tuple(read_site_keys(self.nodes).values())

    def superlink_command(self) -> list[str]:
        """Return the command of Flower's SuperLink: loopback, TLS, node keys, persistent state."""
        options = {
            "ssl-ca-certfile": "ca.crt",
            "ssl-certfile": "server.crt",
            "ssl-keyfile": "server.tls",
            "database": self.engine / DATABASE,
            "host": "127.0.0.1",
            "port": self.inner,
        }
        flags = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        command = [sys.executable, "-m", "fedgft.deploy.processes", "superlink"]
        return [*command, *flags, *format_options(options)]


def load_federation(path: Path) -> FederationFolder:
    """Read a folder that `create_federation` wrote."""
    file = path / SETTINGS
    try:
        held = parse_json(file.read_text("utf-8"))
        port = int(held["port"])
        made = FederationFolder(path.resolve(), str(held["host"]), port, int(held["inner"]))
    except OSError as error:
        raise FedgftError(
            f"{file}: cannot be read ({error.strerror}); fedgft deploy init makes "
            "the folder of a federation"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise FedgftError(f"{file}: not the settings of a federation") from None
    _check((), (made.host,), made.port)
    return made


def create_federation(
    path: Path,
    *,
    sites: Sequence[str],
    host: str,
    port: int,
    inner: int | None = None,
    aliases: Sequence[str] = (),
    public_keys: Mapping[str, Path] | None = None,
    make_keys: bool = False,
) -> FederationFolder:
    """Create the folder of a federation with everything its server needs.

    Parameters
    ----------
    path
        A folder that does not exist or is empty.
    sites
        Names of the sites.
    host, aliases
        Names and addresses under which sites reach the server.
    port, inner
        Ports of the gate and of the SuperLink (default: the next port).
    public_keys
        Public key file of each site.
    make_keys
        Whether to create key pairs for sites without a public key, for a federation on one host.
    """
    if not sites:
        raise FedgftError(f"`sites`: name 1 to {MAX_SITES} sites, not 0")
    _check(sites, (host, *aliases), port)
    if re.search(r"[\x00-\x1f\"'\\]", str(path.resolve())):
        raise FedgftError(
            f"{str(path)!r}: quotes, backslashes and line ends in a path confuse shells and the "
            "engine; name another folder"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedgftError(
            f"{path}: exists and is not empty; keys are not written over: name another"
        )
    given = public_keys or {}
    for site in sites:
        if site in given:
            read_public_key(given[site])
        elif not make_keys:
            raise FedgftError(
                f"sites: '{site}' has no public key; the site makes one with 'fedgft deploy keys "
                f"{site}' and hands over {site}.pub: write {site}={site}.pub"
            )
    other = port + 1 if port < 65535 else port - 1
    folder = FederationFolder(path.resolve(), host, port, other if inner is None else inner)
    with open_folder(path):
        try:
            _write_folder(folder, sites, aliases, given)
        except BaseException:  # remove the keys of an unfinished folder
            for part in path.iterdir():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            raise
    return folder


def _write_folder(
    folder: FederationFolder,
    sites: Sequence[str],
    aliases: Sequence[str],
    public_keys: Mapping[str, Path],
) -> None:
    """Write the certificates, keys, configuration and app of a federation."""
    folder.path.chmod(0o700)
    hosts = list(dict.fromkeys((folder.host, *aliases, *LOOPBACK_NAMES)))
    issue_certificate(folder.path, "server", create_authority(folder.path), hosts)
    folder.nodes.mkdir(mode=0o700)
    for site in sites:
        if site in public_keys:
            write_new(folder.nodes / f"{site}.pub", public_keys[site].read_bytes(), mode=PUBLIC)
        else:
            create_node_key(folder.nodes, site)
    read_site_keys(folder.nodes)  # raises an error if a key appears twice
    folder.engine.mkdir(mode=0o700)
    with atomic_write(folder.engine / "config.toml", private=True) as part:
        part.write(_connection(folder).encode())
    with atomic_write(folder.path / SETTINGS) as part:
        addresses = {"host": folder.host, "port": folder.port, "inner": folder.inner}
        part.write((json.dumps(addresses) + "\n").encode())
    copy_app(folder.app)


def copy_app(target: Path) -> None:
    """Copy the library's Flower app to a new folder, where the user can change it."""
    shutil.copytree(packaged_app(), target, ignore=shutil.ignore_patterns("__pycache__", "*.fab"))


def read_app_config(own: Path | None) -> dict[str, Any]:
    """Return the default run configuration of a Flower app.

    Parameters
    ----------
    own
        Folder of the app; None: the app of this library.
    """
    path = (own or packaged_app()) / "pyproject.toml"
    try:
        held = tomllib.loads(path.read_text("utf-8"))
        return dict(held["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedgftError(f"`app` {own}: no Flower app there ({path.name}: {error})") from None


def packaged_app() -> Path:
    """Return the folder of the Flower app that is installed with this library."""
    return Path(str(files("fedgft") / "templates" / "flower")).resolve()


def _connection(folder: FederationFolder) -> str:
    """Return Flower's connection file, for runs that are submitted on the server itself."""
    return (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{folder.inner}"\n'
        f'root-certificates = "{folder.path / "ca.crt"}"\n'
    )


def check_site_names(sites: Sequence[str]) -> None:
    """Raise an error unless every site's name can name a file and no name appears twice."""
    if len(sites) > MAX_SITES:
        raise FedgftError(f"`sites`: name 1 to {MAX_SITES} sites, not {len(sites)}")
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", site):
            raise FedgftError(
                f"`sites` {site!r}: use letters, digits, '-', '_' and '.': it names files"
            )
    if len(set(map(str.casefold, sites))) < len(sites):
        raise FedgftError("`sites`: two sites have the same name")


def _check(sites: Sequence[str], hosts: Sequence[str], port: int) -> None:
    """Raise an error unless the names of sites and hosts and the port can be used."""
    check_site_names(sites)
    for host in hosts:
        if not (re.fullmatch(HOST, host) or _is_address(host)) or len(host) > 253:
            raise FedgftError(
                f"`host` or `alias` {host!r}: neither an address nor a host name "
                "(without a port or a scheme)"
            )
    if not 1 <= port <= 65535:
        raise FedgftError(f"`port` {port}: must lie between 1 and 65535")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def format_instructions(folder: FederationFolder) -> str:
    """Return the text that `fedgft deploy init` prints: commands to copy, host by host."""
    place = shlex.quote(str(folder.path))
    keys = read_site_keys(folder.nodes)
    lines = [
        "# On every host: Python 3.11 or newer, and  pip install 'fedgft[flower]'.",
        "",
        f"# 1. On the server ({folder.host}). Sites must reach port {folder.port}, which passes",
        "#    signed requests of these sites alone; the engine listens on 127.0.0.1, port",
        f"#    {folder.inner}. Compare the keys with the sites by telephone:",
        *(f"#      {name}  {fingerprint(key)}" for key, name in keys.items()),
        shlex.join(["fedgft", "deploy", "server", str(folder.path)]),
        "",
    ]
    for number, site in enumerate(keys.values(), 2):
        own = folder.nodes / f"{site}.key"
        made_here = f" and nodes/{site}.key, which was made here (chmod 600)" * own.exists()
        command = ["fedgft", "deploy", "site", site, "--server", folder.address]
        lines += [
            f"# {number}. At {site}, in a folder with ca.crt{made_here or f' and its {site}.key'};",
            "#    --set max-epsilon=1 or min-count=10 refuse to tell more; for secure sums add",
            "#    --peers FOLDER, with the public keys of all sites (nodes/*.pub):",
            shlex.join([*command, "--data", f"/path/to/{site}.csv"]),
            "",
        ]
    exported = [name for name in FLOWER_ENVIRONMENT if name.startswith("FLWR_")]
    config = f'data="csv" label="..." group="..." sites={len(keys)} rounds=20'
    lines += [
        f"# {len(keys) + 2}. On the server, in a second shell: train. Success is what",
        f"#    `flwr list {CONNECTION}` says; model and report come into {place}/fedgft-run",
        "#    (the setting out; one folder per run).",
        f"cd {place}",
        f"export FLWR_HOME={shlex.quote(str(folder.engine))}",
        *(f"export {name}={FLOWER_ENVIRONMENT[name]}" for name in exported),
        shlex.join(["flwr", "run", "app", CONNECTION, "--stream", "--run-config", config]),
        "",
    ]
    return "\n".join(lines)

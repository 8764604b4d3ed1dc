"""The folder of a federation on the server: authority, the sites' public keys, the engine's
configuration and state, the app.

federation.json  ca.crt  ca.key  server.crt  server.tls  nodes/SITE.pub  engine/  app/
"""

import ipaddress
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedgft.deploy.keys import (
    authority,
    certificate_for,
    node_key,
    public_key,
    registered_keys,
    write_public,
)
from fedgft.errors import FedgftError
from fedgft.files import open_folder, parsed, whole

CONNECTION = "federation"
MOST_SITES = 1000
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # a hyphen at its start would be an option
HOST = rf"(?![0-9.]+$){LABEL}(\.{LABEL})*"
HERE = ("127.0.0.1", "localhost")
SETTINGS = "federation.json"
DATABASE = "state.db"  # of the SuperLink: which sites are registered, runs and their messages
NAMES = "nodes.json"  # which node of the SuperLink is which site


@dataclass(frozen=True)
class Folder:
    """`port` is the gate's, which sites reach; `inner` the SuperLink's, on loopback."""

    path: Path
    host: str
    port: int
    inner: int

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def app(self) -> Path:
        return self.path / "app"

    @property
    def nodes(self) -> Path:
        """The sites' public keys, NAME.pub each. A key that is taken away is refused."""
        return self.path / "nodes"

    @property
    def engine(self) -> Path:
        """The engine's own home: its configuration and state."""
        return self.path / "engine"

    @property
    def names(self) -> Path:
        return self.engine / NAMES

    def sites(self) -> tuple[str, ...]:
        return tuple(registered_keys(self.nodes).values())

    def superlink_arguments(self) -> list[str]:
        """For Flower's SuperLink: on loopback, with TLS, node keys, and state that is kept."""
        return [
            "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt",
            "--ssl-keyfile", "server.tls", "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
            "--database", str(self.engine / DATABASE),
            "--host", "127.0.0.1", "--port", str(self.inner),
        ]  # fmt: skip

    def superlink_command(self) -> list[str]:
        return [sys.executable, "-m", "fedgft.deploy.engine", "superlink",
                *self.superlink_arguments()]  # fmt: skip


def load_folder(path: Path) -> Folder:
    """The folder that `make_folder` made."""
    file = path / SETTINGS
    try:
        held = parsed(file.read_text("utf-8"))
        made = Folder(path.resolve(), str(held["host"]), int(held["port"]), int(held["inner"]))
    except OSError as error:
        raise FedgftError(f"{file}: cannot be read ({error.strerror}); fedgft deploy init makes "
                          "the folder of a federation") from None  # fmt: skip
    except (ValueError, KeyError, TypeError):
        raise FedgftError(f"{file}: not the settings of a federation") from None
    _check((), (made.host,), made.port)
    return made


def make_folder(
    path: Path,
    *,
    sites: Sequence[str],
    host: str,
    port: int,
    inner: int | None = None,
    aliases: Sequence[str] = (),
    public_keys: Mapping[str, Path] | None = None,
    make_keys: bool = False,
) -> Folder:
    """Everything the server of a federation needs, in a folder that did not exist or was empty.

    `public_keys` holds the file that each site handed over. With `make_keys` the private keys of
    the other sites are made here too, as a federation on one host wants it.
    """
    if not sites:
        raise FedgftError(f"--sites: name 1 to {MOST_SITES} sites, not 0")
    _check(sites, (host, *aliases), port)
    if re.search(r"[\x00-\x1f\"'\\]", str(path.resolve())):
        raise FedgftError(f"{str(path)!r}: quotes, backslashes and line ends in a path confuse "
                          "shells and the engine; name another folder")  # fmt: skip
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedgftError(
            f"{path}: exists and is not empty; keys are not written over: name another"
        )
    given = {site: public_key(place) for site, place in (public_keys or {}).items()}
    for site in sites:
        if site not in given and not make_keys:
            raise FedgftError(
                f"sites: '{site}' has no public key; the site makes one with 'fedgft deploy keys "
                f"{site}' and hands over {site}.pub: write {site}={site}.pub"
            )
    other = port + 1 if port < 65535 else port - 1
    with open_folder(path):
        try:
            path.chmod(0o700)
            made = Folder(path.resolve(), host, port, other if inner is None else inner)
            issuer = authority(path)
            hosts = list(dict.fromkeys((host, *aliases, *HERE)))
            certificate_for(path, "server", issuer, hosts)
            made.nodes.mkdir(mode=0o700)
            for site in sites:
                if site in given:
                    content = (public_keys or {})[site].read_bytes()
                    write_public(made.nodes / f"{site}.pub", content)
                else:
                    node_key(made.nodes, site)
            registered_keys(made.nodes)  # no key twice
            made.engine.mkdir(mode=0o700)
            with whole(made.engine / "config.toml", private=True) as part:
                part.write_text(_connection(made), "utf-8")
            with whole(path / SETTINGS) as part:
                told = {"host": host, "port": port, "inner": made.inner}
                part.write_text(json.dumps(told) + "\n", "utf-8")
            copy_app(made.app)
        except BaseException:  # half of it, with keys, is worse than nothing
            for part in path.iterdir():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            raise
    return made


def copy_app(target: Path) -> None:
    """The app that ships with this library, as files of the user's own."""
    shutil.copytree(shipped_app(), target, ignore=shutil.ignore_patterns("__pycache__", "*.fab"))


def app_settings(own: Path | None) -> dict[str, Any]:
    """What an app can be told, and its usual values."""
    path = (own or shipped_app()) / "pyproject.toml"
    try:
        held = tomllib.loads(path.read_text("utf-8"))
        return dict(held["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedgftError(f"--app {own}: no Flower app there ({path.name}: {error})") from None


def shipped_app() -> Path:
    """The Flower app that is installed with this library."""
    return Path(str(files("fedgft") / "templates" / "flower")).resolve()


def _connection(folder: Folder) -> str:
    """Runs are submitted on the server's host, past the gate."""
    certificate = str(folder.path / "ca.crt")
    return (f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{folder.inner}"\n'
            f'root-certificates = "{certificate}"\n')  # fmt: skip


def check_names(sites: Sequence[str]) -> None:
    """Names of sites name files."""
    if len(sites) > MOST_SITES:
        raise FedgftError(f"--sites: name 1 to {MOST_SITES} sites, not {len(sites)}")
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", site):
            raise FedgftError(
                f"--sites {site!r}: use letters, digits, '-', '_' and '.': it names files"
            )
    if len(set(map(str.casefold, sites))) < len(sites):
        raise FedgftError("--sites: two sites have the same name")


def _check(sites: Sequence[str], hosts: Sequence[str], port: int) -> None:
    check_names(sites)
    for host in hosts:
        if not (re.fullmatch(HOST, host) or _address(host)) or len(host) > 253:
            raise FedgftError(f"--host or --alias {host!r}: neither an address nor a host name "
                              "(without a port or a scheme)")  # fmt: skip
    if not 1 <= port <= 65535:
        raise FedgftError(f"--port {port}: must lie between 1 and 65535")


def _address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

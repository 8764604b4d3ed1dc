"""The folder of a federation: authority, keys, engine configuration, app; and who needs what.

ca.crt  ca.key  server.crt  server.tls  nodes/SITE.{key,pub,crt,tls}  engine/config.toml  app/
"""

import ipaddress
import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedgft.deploy.keys import authority, certificate_for, node_key
from fedgft.errors import FedgftError
from fedgft.files import open_folder, whole

CONNECTION = "federation"
MOST_SITES = 1000
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # a hyphen at its start would be an option
HOST = rf"(?![0-9.]+$){LABEL}(\.{LABEL})*"
HERE = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Folder:
    path: Path
    host: str
    port: int
    sites: tuple[str, ...]

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def app(self) -> Path:
        return self.path / "app"

    @property
    def engine(self) -> Path:
        """The engine's own home: its configuration and state."""
        return self.path / "engine"

    def server_command(self, *, bind: str = "", python: str = "") -> list[str]:
        bind = bind or ("::" if ":" in self.host else "0.0.0.0")
        return [
            f"{python}flower-superlink",
            "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt",
            "--ssl-keyfile", "server.tls", "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--host", bind, "--port", str(self.port),
        ]  # fmt: skip

    def node_command(
        self, site: str, config: str, *, port: int = 9094, python: str = ""
    ) -> list[str]:
        return [
            f"{python}flower-supernode", "--root-certificates", "ca.crt",
            "--superlink", self.address,
            "--auth-supernode-private-key", f"nodes/{site}.key",
            "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", f"nodes/{site}.crt",
            "--ssl-keyfile", f"nodes/{site}.tls", "--port", str(port),
            "--node-config", config,
        ]  # fmt: skip


def make_folder(
    path: Path, *, sites: Sequence[str], host: str, port: int, aliases: Sequence[str] = ()
) -> Folder:
    """Everything a federation needs, in a folder that did not exist or was empty."""
    _check(sites, (host, *aliases), port)
    if re.search(r"[\x00-\x1f\"'\\]", str(path.resolve())):
        raise FedgftError(f"{str(path)!r}: quotes, backslashes and line ends in a path confuse "
                          "shells and the engine; name another folder")  # fmt: skip
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedgftError(
            f"{path}: exists and is not empty; keys are not written over: name another"
        )
    with open_folder(path):
        try:
            path.chmod(0o700)
            made = Folder(path.resolve(), host, port, tuple(sites))
            issuer = authority(path)
            hosts = list(dict.fromkeys((host, *aliases, *HERE)))
            certificate_for(path, "server", issuer, hosts)
            (path / "nodes").mkdir(mode=0o700)
            for site in sites:
                node_key(path / "nodes", site)
                certificate_for(path / "nodes", site, issuer, HERE)
            (path / "engine").mkdir(mode=0o700)
            with whole(path / "engine" / "config.toml", private=True) as part:
                part.write_text(_connection(made), "utf-8")
            copy_app(made.app)
        except BaseException:  # half of it, with keys, is worse than nothing
            for part in path.iterdir():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            raise
    return made


def copy_app(target: Path) -> None:
    """The app that ships with this library, as files of the user's own."""
    shutil.copytree(_shipped(), target, ignore=shutil.ignore_patterns("__pycache__", "*.fab"))


def app_settings(own: Path | None) -> dict[str, Any]:
    """What an app can be told, and its usual values."""
    path = (own or _shipped()) / "pyproject.toml"
    try:
        held = tomllib.loads(path.read_text("utf-8"))
        return dict(held["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedgftError(f"--app {own}: no Flower app there ({path.name}: {error})") from None


def _shipped() -> Path:
    return Path(str(files("fedgft") / "templates" / "flower"))


def _connection(folder: Folder) -> str:
    address = f"127.0.0.1:{folder.port}" if folder.host in HERE else folder.address
    certificate = str(folder.path / "ca.crt")
    return (f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{address}"\nroot-certificates = "{certificate}"\n')  # fmt: skip


def _check(sites: Sequence[str], hosts: Sequence[str], port: int) -> None:
    if not 1 <= len(sites) <= MOST_SITES:
        raise FedgftError(f"--sites: name 1 to {MOST_SITES} sites, not {len(sites)}")
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", site):
            raise FedgftError(
                f"--sites {site!r}: use letters, digits, '-', '_' and '.': it names files"
            )
    if len(set(map(str.casefold, sites))) < len(sites):
        raise FedgftError("--sites: two sites have the same name")
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

"""The folder of a federation on the server: keys, certificates, Flower's state, the app.

federation.json  ca.crt  ca.key  server.crt  server.tls  nodes/SITE.pub  engine/  app/

Sites authenticate the server by its certificate (TLS); the server authenticates sites by their
public keys. A site creates its own key pair and hands over the public key. Private keys
can be read by their owner only, and they never appear in a log or on a command line.
"""

import ipaddress
import json
import os
import re
import shlex
import shutil
import stat
import sys
import tomllib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from fedgft.deploy.processes import FLOWER_ENVIRONMENT, LOOPBACK, format_options
from fedgft.errors import FedgftError
from fedgft.store import BINARY, atomic_write, open_folder, parse_json

CONNECTION = "federation"
MAX_SITES = 1000
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # with a leading hyphen it would be an option
HOST = rf"(?![0-9.]+$){LABEL}(\.{LABEL})*"
SETTINGS = "federation.json"
DATABASE = "state.db"  # the SuperLink's: registered sites, runs and their messages
SECRET = 0o600  # permissions of files that only their owner can read
PUBLIC = 0o644  # permissions of files that every user of the host can read
VALID_FOR = timedelta(days=365)
CLOCK_SKEW = timedelta(days=1)


# The folder


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
    superlink_port
        Port of the SuperLink, which only processes on the server's host can reach.
    """

    path: Path
    host: str
    port: int
    superlink_port: int

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
    def node_names(self) -> Path:
        """File that holds the name of the site behind each node of the SuperLink."""
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
            "host": LOOPBACK,
            "port": self.superlink_port,
        }
        flags = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        command = [sys.executable, "-m", "fedgft.deploy.processes", "superlink"]
        return [*command, *flags, *format_options(options)]


def load_federation(path: Path) -> FederationFolder:
    """Read a folder that `create_federation` wrote."""
    file = path / SETTINGS
    try:
        settings = parse_json(file.read_text("utf-8"))
        ports = (int(settings["port"]), int(settings["inner"]))
        folder = FederationFolder(path.resolve(), str(settings["host"]), *ports)
    except OSError as error:
        raise FedgftError(
            f"{file}: cannot be read ({error.strerror}); fedgft deploy init makes "
            "the folder of a federation"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise FedgftError(f"{file}: not the settings of a federation") from None
    _check_names((), (folder.host,), folder.port)
    return folder


def create_federation(
    path: Path,
    *,
    sites: Sequence[str],
    host: str,
    port: int,
    superlink_port: int | None = None,
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
    port, superlink_port
        Ports of the gate and of the SuperLink (default: the next port).
    public_keys
        Public key file of each site.
    make_keys
        Whether to create key pairs for sites without a public key, for a federation on one host.
    """
    if not sites:
        raise FedgftError(f"`sites`: name 1 to {MAX_SITES} sites, not 0")
    _check_names(sites, (host, *aliases), port)
    if re.search(r"[\x00-\x1f\"'\\]", str(path.resolve())):
        raise FedgftError(
            f"{str(path)!r}: quotes, backslashes and line ends in a path confuse shells and the "
            "engine; name another folder"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedgftError(
            f"{path}: exists and is not empty; keys are not written over: name another"
        )
    key_files = public_keys or {}
    for site in sites:
        if site in key_files:
            read_public_key(key_files[site])
        elif not make_keys:
            raise FedgftError(
                f"sites: '{site}' has no public key; the site makes one with 'fedgft deploy keys "
                f"{site}' and hands over {site}.pub: write {site}={site}.pub"
            )
    if superlink_port is None:
        superlink_port = port + 1 if port < 65535 else port - 1
    folder = FederationFolder(path.resolve(), host, port, superlink_port)
    with open_folder(path):
        try:
            _write_folder(folder, sites, aliases, key_files)
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
    hosts = list(dict.fromkeys((folder.host, *aliases, LOOPBACK, "localhost")))
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
        part.write(_connection_settings(folder).encode())
    with atomic_write(folder.path / SETTINGS) as part:
        addresses = {"host": folder.host, "port": folder.port, "inner": folder.superlink_port}
        part.write((json.dumps(addresses) + "\n").encode())
    copy_app(folder.app)


def copy_app(target: Path) -> None:
    """Copy the library's Flower app to a new folder, where the user can change it."""
    shutil.copytree(packaged_app(), target, ignore=shutil.ignore_patterns("__pycache__", "*.fab"))


def read_app_config(app: Path | None) -> dict[str, Any]:
    """Return the default run configuration of a Flower app.

    Parameters
    ----------
    app
        Folder of the app; None: the app of this library.
    """
    path = (app or packaged_app()) / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text("utf-8"))
        return dict(project["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedgftError(f"`app` {app}: no Flower app there ({path.name}: {error})") from None


def packaged_app() -> Path:
    """Return the folder of the Flower app that is installed with this library."""
    return Path(str(files("fedgft") / "templates" / "flower")).resolve()


def _connection_settings(folder: FederationFolder) -> str:
    """Return Flower's connection file, for runs that are submitted on the server itself."""
    return (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{LOOPBACK}:{folder.superlink_port}"\n'
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


def _check_names(sites: Sequence[str], hosts: Sequence[str], port: int) -> None:
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
        f"#    {folder.superlink_port}. Compare the keys with the sites by telephone:",
        *(f"#      {name}  {fingerprint(key)}" for key, name in keys.items()),
        shlex.join(["fedgft", "deploy", "server", str(folder.path)]),
        "",
    ]
    for number, site in enumerate(keys.values(), 2):
        own_key = f" and its {site}.key"
        if (folder.nodes / f"{site}.key").exists():
            own_key = f" and nodes/{site}.key, which was made here (chmod 600)"
        command = ["fedgft", "deploy", "site", site, "--server", folder.address]
        lines += [
            f"# {number}. At {site}, in a folder with ca.crt{own_key};",
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


# Certificates and keys


def create_authority(folder: Path) -> tuple[Any, Any]:
    """Create the federation's own certificate authority.

    Writes ca.crt, which every site needs, and ca.key, which stays secret.

    Returns
    -------
    certificate, key
        The authority's certificate and private key, as `issue_certificate` takes them.
    """
    denied_usages = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
        "digital_signature",
    )
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(denied_usages, False))
    basic = x509.BasicConstraints(ca=True, path_length=0)
    authority = _certify("fedgft federation authority", None, {basic: True, usage: True})
    _write_certificate(folder / "ca.crt", folder / "ca.key", *authority)
    return authority


def issue_certificate(
    folder: Path, name: str, issued_by: tuple[Any, Any], hosts: Sequence[str]
) -> None:
    """Write NAME.crt and its private key NAME.tls.

    Parameters
    ----------
    folder
        Where the files go.
    name
        Name of the files and of the certificate's subject.
    issued_by
        Certificate and key of the authority (`create_authority`).
    hosts
        All host names and addresses under which the server is reached.
    """
    extensions = {
        x509.SubjectAlternativeName([_general_name(host) for host in hosts]): False,
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]): False,
    }
    certificate, key = _certify(f"fedgft {name}"[:64], issued_by, extensions)
    _write_certificate(folder / f"{name}.crt", folder / f"{name}.tls", certificate, key)


def _certify(
    subject: str, issued_by: tuple[Any, Any] | None, extensions: dict[Any, bool]
) -> tuple[Any, Any]:
    """Return a certificate and its new key.

    Parameters
    ----------
    subject
        Common name of the certificate.
    issued_by
        Certificate and key of the authority; None: the certificate signs itself.
    extensions
        Further extensions, and whether each is critical.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, subject)])
    issuer, signing = (name, key) if issued_by is None else (issued_by[0].subject, issued_by[1])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALID_FOR)
    )
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    for extension, critical in {key_id: False, **extensions, issuer_id: False}.items():
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signing, hashes.SHA384()), key


def _write_certificate(path: Path, secret: Path, certificate: Any, key: Any) -> None:
    """Write a certificate and its private key."""
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    write_new(secret, private)
    write_new(path, certificate.public_bytes(form.Encoding.PEM), mode=PUBLIC)


def _general_name(host: str) -> Any:
    """Return an address or a host name as certificates hold it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def create_node_key(folder: Path, site: str) -> None:
    """Write the key pair of a site: SITE.key stays at the site, SITE.pub goes to the server."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write_new(folder / f"{site}.key", private)
    write_new(folder / f"{site}.pub", public + b"\n", mode=PUBLIC)


def read_public_key(path: Path) -> bytes:
    """Read the public key of a site (OpenSSH) and return it as Flower sends it (PEM)."""
    key = _read_key(path, form.load_ssh_public_key, "public")
    return key.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


def _read_key(path: Path, load: Callable[[bytes], Any], kind: str) -> Any:
    """Read a "public" or "private" key of a site."""
    try:
        key = load(path.read_bytes())
    except OSError as error:
        raise FedgftError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception:  # cryptography raises several kinds of exceptions
        key = None
    key_types = (ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey)
    if not isinstance(key, key_types) or key.curve.name != ec.SECP384R1.name:
        raise FedgftError(f"{path}: not the {kind} key of a site (fedgft deploy keys makes one)")
    return key


def read_site_keys(folder: Path) -> dict[bytes, str]:
    """Read all NAME.pub files of a folder.

    Returns
    -------
    dict
        Public key -> name of the site. The same key under two names is an error.
    """
    found: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        key = read_public_key(path)
        if key in found:
            raise FedgftError(f"{path}: the same key as that of site '{found[key]}'")
        found[key] = path.name.removesuffix(".pub")
    return found


def read_private_key(path: Path) -> Any:
    """Read the private key of a site; raise an error if other users can read the file."""
    key = _read_key(path, partial(form.load_ssh_private_key, password=None), "private")
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise FedgftError(f"{path}: other users can read this private key: chmod 600 {path}")
    return key


def fingerprint(public: bytes) -> str:
    """Return the SHA-256 fingerprint of a public key (PEM), as `ssh-keygen -l` prints it.

    Operators compare fingerprints by telephone.
    """
    key = form.load_pem_public_key(public)
    text = key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).split()[1]
    return "SHA256:" + b64encode(sha256(b64decode(text)).digest()).decode().rstrip("=")


def write_new(path: Path, content: bytes, *, mode: int = SECRET) -> None:
    """Create a file with this mode whatever the umask; fail if the path exists, even as a link."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, mode)
    except FileExistsError:
        raise FedgftError(f"{path}: exists already; a key is not written over") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    path.chmod(mode)

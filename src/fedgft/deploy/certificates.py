"""Certificates and keys: an authority, server certificates, and one key pair per site.

Sites authenticate the server by its certificate (TLS); the server authenticates sites by their
public keys. A site creates its own key pair and hands over the public key. Private keys
can be read by their owner only, and they never appear in a log or on a command line.
"""

import ipaddress
import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from fedgft.errors import FedgftError
from fedgft.store import BINARY

SECRET = 0o600  # permissions of files that only their owner can read
PUBLIC = 0o644  # permissions of files that every user of the host can read
VALID_FOR = timedelta(days=365)
CLOCK_SKEW = timedelta(days=1)


def create_authority(folder: Path) -> tuple[Any, Any]:
    """Create the federation's own certificate authority.

    Writes ca.crt, which every site needs, and ca.key, which stays secret.

    Returns
    -------
    certificate, key
        The authority's certificate and private key, as `issue_certificate` takes them.
    """
    off = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
        "digital_signature",
    )
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(off, False))
    basic = x509.BasicConstraints(ca=True, path_length=0)
    made = _certify("fedgft federation authority", None, {basic: True, usage: True})
    _write_certificate(folder / "ca.crt", folder / "ca.key", *made)
    return made


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
    made = _certify(f"fedgft {name}"[:64], issued_by, extensions)
    _write_certificate(folder / f"{name}.crt", folder / f"{name}.tls", *made)


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
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    for extension, critical in {own: False, **extensions, authority: False}.items():
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
    wanted = (ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey)
    if not isinstance(key, wanted) or key.curve.name != ec.SECP384R1.name:
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

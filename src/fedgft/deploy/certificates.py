"""Certificates and keys: an authority, server certificates, and one key pair per site.

Sites authenticate the server by its certificate (TLS); the server authenticates sites by their
public keys. A site creates its own key pair and hands over the public key. Only their owner can
read private keys, and they never appear in a log or on a command line.
"""

import ipaddress
import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from fedgft.errors import FedgftError
from fedgft.store import BINARY

VALID_FOR = timedelta(days=365)
CLOCK_SKEW = timedelta(days=1)


def create_authority(folder: Path) -> tuple[Any, Any]:
    """Create the federation's own certificate authority.

    Writes ca.crt, which every site needs, and ca.key, which stays secret.

    Returns
    -------
    certificate, key
        For `issue_certificate`.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedgft federation authority")
    builder = _builder(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(sign=True), critical=True)
    certificate = _signed(builder, key)
    write_secret(folder / "ca.key", _pem(key))
    write_public(folder / "ca.crt", _encoded(certificate))
    return certificate, key


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
    certificate, signing = issued_by
    key = ec.generate_private_key(ec.SECP384R1())
    builder = _builder(_name(f"fedgft {name}"[:64]), certificate.subject, key.public_key())
    names = x509.SubjectAlternativeName([_general(host) for host in hosts])
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    write_secret(folder / f"{name}.tls", _pem(key))
    write_public(folder / f"{name}.crt", _encoded(_signed(builder, signing)))


def create_node_key(folder: Path, site: str) -> None:
    """Write the key pair of a site: SITE.key stays there, SITE.pub goes to the server."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write_secret(folder / f"{site}.key", private)
    write_public(folder / f"{site}.pub", public + b"\n")


def read_public_key(path: Path) -> bytes:
    """Read the public key of a site (OpenSSH) and return it as Flower sends it (PEM)."""
    try:
        key = form.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise FedgftError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception:  # cryptography raises several kinds
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP384R1.name:
        raise FedgftError(f"{path}: not the public key of a site (fedgft deploy keys makes one)")
    return key.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


def read_site_keys(folder: Path) -> dict[bytes, str]:
    """Read all NAME.pub files of a folder.

    Returns
    -------
    dict
        Name of the site by public key. The same key under two names is an error.
    """
    found: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        key = read_public_key(path)
        if key in found:
            raise FedgftError(f"{path}: the same key as that of site '{found[key]}'")
        found[key] = path.name.removesuffix(".pub")
    return found


def read_private_key(path: Path) -> Any:
    """Read the private key of a site; an error if other users of the host can read the file."""
    open_to = 0
    try:
        open_to = stat.S_IMODE(path.stat().st_mode) & 0o077
        key = form.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise FedgftError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception:  # cryptography raises several kinds
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedgftError(f"{path}: not the private key of a site (fedgft deploy keys makes one)")
    if os.name == "posix" and open_to:
        raise FedgftError(f"{path}: other users can read this private key: chmod 600 {path}")
    return key


def fingerprint(public: bytes) -> str:
    """The SHA-256 fingerprint of a public key (PEM), as `ssh-keygen -l` prints it.

    Operators compare it by telephone.
    """
    key = form.load_pem_public_key(public)
    text = key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).split()[1]
    return "SHA256:" + b64encode(sha256(b64decode(text)).digest()).decode().rstrip("=")


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; an existing file is an error."""
    _write_new(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a new file that everyone can read; an existing file is an error."""
    _write_new(path, content, 0o644)
    path.chmod(0o644)  # regardless of the umask


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Create a file; fail if the name exists, also as a symbolic link."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, mode)
    except FileExistsError:
        raise FedgftError(f"{path}: exists already; a key is not written over") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _builder(subject: Any, issuer: Any, public: Any) -> Any:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _signed(builder: Any, key: Any) -> Any:

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return builder.add_extension(issuer, critical=False).sign(key, hashes.SHA384())


def _usage(*, sign: bool) -> Any:

    off = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
        "digital_signature",
    )
    return x509.KeyUsage(key_cert_sign=sign, crl_sign=sign, **dict.fromkeys(off, False))


def _general(host: str) -> Any:

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(common: str) -> Any:

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _pem(key: Any) -> bytes:

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _encoded(certificate: Any) -> bytes:

    return certificate.public_bytes(form.Encoding.PEM)

"""Certificates and keys: an authority, certificates, and one key pair per site.

Sites check the server by its certificate (TLS), the server knows the sites by their public keys. A
site makes its own key pair and hands over the public half. Private keys are readable by their owner
alone, and are in no log and no command line.
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

from fedgft.errors import FedgftError
from fedgft.files import BINARY

VALID = timedelta(days=365)
SKEW = timedelta(days=1)  # clocks differ


def authority(folder: Path) -> tuple[Any, Any]:
    """A certificate authority of this federation's own: ca.crt for everybody, ca.key for nobody."""
    x509, ec, _ = _cryptography()
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedgft federation authority")
    builder = _builder(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(sign=True), critical=True)
    certificate = _signed(builder, key)
    write_secret(folder / "ca.key", _pem(key))
    write_public(folder / "ca.crt", _encoded(certificate))
    return certificate, key


def certificate_for(
    folder: Path, name: str, issued_by: tuple[Any, Any], hosts: Sequence[str]
) -> None:
    """NAME.crt and NAME.tls, its key, for all names and addresses by which it is reached."""
    x509, ec, _ = _cryptography()
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


def node_key(folder: Path, site: str) -> None:
    """SITE.key for the site, SITE.pub for the server's list of sites."""
    _, ec, form = _cryptography()
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write_secret(folder / f"{site}.key", private)
    write_public(folder / f"{site}.pub", public + b"\n")


def public_key(path: Path) -> bytes:
    """A site's public key file (OpenSSH), in the form (PEM) in which Flower sends it."""
    _, ec, form = _cryptography()
    try:
        key = form.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise FedgftError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception:  # cryptography raises several kinds
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP384R1.name:
        raise FedgftError(f"{path}: not the public key of a site (fedgft deploy keys makes one)")
    return key.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


def registered_keys(folder: Path) -> dict[bytes, str]:
    """{public key: name of the site} of all NAME.pub files in a folder.

    Two names for one key are an error: each site has its own.
    """
    found: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        key = public_key(path)
        if key in found:
            raise FedgftError(f"{path}: the same key as that of site '{found[key]}'")
        found[key] = path.name.removesuffix(".pub")
    return found


def private_key(path: Path) -> Any:
    """A site's private key; refused where other users of the host can read it."""
    _, ec, form = _cryptography()
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
    """A short name for a public key (as `public_key` returns it), to compare by telephone: the one
    that `ssh-keygen -l` prints."""
    _, _, form = _cryptography()
    key = form.load_pem_public_key(public)
    text = key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).split()[1]
    return "SHA256:" + b64encode(sha256(b64decode(text)).digest()).decode().rstrip("=")


def write_secret(path: Path, content: bytes) -> None:
    """Nobody else can read it, from its first byte on; nothing is written over."""
    _write_new(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """For everybody to read; nothing is written over."""
    _write_new(path, content, 0o644)
    path.chmod(0o644)  # whatever the umask


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """A file that was not there, nor a symbolic link of that name."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, mode)
    except FileExistsError:
        raise FedgftError(f"{path}: exists already; a key is not written over") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _builder(subject: Any, issuer: Any, public: Any) -> Any:
    x509, *_ = _cryptography()
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _signed(builder: Any, key: Any) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return builder.add_extension(issuer, critical=False).sign(key, hashes.SHA384())


def _usage(*, sign: bool) -> Any:
    from cryptography import x509

    off = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
           "encipher_only", "decipher_only", "digital_signature")  # fmt: skip
    return x509.KeyUsage(key_cert_sign=sign, crl_sign=sign, **dict.fromkeys(off, False))


def _general(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(common: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _encoded(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return certificate.public_bytes(form.Encoding.PEM)


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise FedgftError("fedgft deploy needs Flower: pip install 'fedgft[flower]'") from error
    return x509, ec, serialization

"""TLS certificates of the server: the operator's, or a generated self-signed one."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.core.errors import InputError
from isthmus.core.state_folder_lock import unwritable_folder_error

_VALID_DAYS = 397


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate and its key as PEM files."""

    cert: Path
    key: Path

    @property
    def fingerprint(self) -> str:
        """SHA-256 fingerprint of the certificate, `AB:CD:...`."""
        digest = _load_certificate(self.cert).fingerprint(hashes.SHA256()).hex().upper()
        return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))

    def check(self) -> None:
        """Raise `InputError` if the two files are not a certificate and its key."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"{self.cert} and {self.key} are not a certificate and its key: {error}",
                hint="give PEM files that match and that the server may read",
            ) from error


def self_signed_certificate(folder: Path, hosts: tuple[str, ...], now: datetime.datetime) -> Certificate:
    """Return the self-signed certificate in `folder`; replace it unless valid for all `hosts` and a day more.

    The key has mode 0600. `now` is in UTC; a new certificate is valid for 397 days.
    """
    certificate = Certificate(cert=folder / "cert.pem", key=folder / "key.pem")
    if _is_valid_for(certificate, hosts, now):
        return certificate
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        _write_private(certificate.key, _private_key_pem(key))
        _write_private(certificate.cert, _build_certificate(key, hosts, now).public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise unwritable_folder_error(folder, error) from error
    return certificate


def _build_certificate(
    key: ec.EllipticCurvePrivateKey, hosts: tuple[str, ...], now: datetime.datetime
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([_subject_alt_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _subject_alt_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _is_valid_for(certificate: Certificate, hosts: tuple[str, ...], now: datetime.datetime) -> bool:
    """Tell whether the files exist, remain valid for a day, and name every host."""
    try:
        found = _load_certificate(certificate.cert)
        certificate.check()
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InputError, x509.ExtensionNotFound):
        return False
    covered = all(_subject_alt_name(host) in names for host in hosts)
    return covered and found.not_valid_after_utc > now + datetime.timedelta(days=1)


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a certificate in PEM format: {error}") from error


def _private_key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)

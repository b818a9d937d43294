"""TLS certificates of the server: the operator's, or one signed by a CA that the server generates for itself.

Clients trust the generated CA, which stays the same while the server's certificate follows its addresses and is
renewed before it expires.
"""

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
from isthmus.core.process.state_folder_lock import unwritable_folder_error

_VALID_DAYS = 397
_CA_VALID_DAYS = 3650


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate and its key as PEM files; `trust` is the file that clients must trust.

    `trust` is None for a certificate that another CA signed: the operator has that CA's file.
    """

    cert: Path
    key: Path
    trust: Path | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 fingerprint of the file that clients trust, else of the certificate, `AB:CD:...`."""
        digest = _load_certificate(self.trust or self.cert).fingerprint(hashes.SHA256()).hex().upper()
        return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))

    @property
    def expires_s(self) -> float:
        """When the certificate ends, in seconds since the epoch."""
        return _load_certificate(self.cert).not_valid_after_utc.timestamp()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names and addresses for which the certificate is valid; a wildcard name is left out."""
        try:
            names = _load_certificate(self.cert).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return ()
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        return tuple(host for host in hosts if "*" not in host)

    def check(self) -> None:
        """Raise `InputError` if the two files are not a certificate and its key."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"{self.cert} and {self.key} are not a certificate and its key: {error}",
                hint="give PEM files that match and that the server may read",
            ) from error


def given_certificate(cert: Path, key: Path) -> Certificate:
    """Return the operator's certificate; clients trust the file itself if it is self-signed.

    Raises `InputError` if the two files are not a certificate and its key.
    """
    given = Certificate(cert=cert, key=key)
    given.check()
    found = _load_certificate(cert)
    return Certificate(cert=cert, key=key, trust=cert if found.issuer == found.subject else None)


def self_signed_certificate(folder: Path, hosts: tuple[str, ...], now: datetime.datetime) -> Certificate:
    """Return the certificate in `folder`; replace it unless valid for all `hosts` and a day more.

    It is signed by the CA in `folder`, which clients trust and which lasts ten years. Keys have mode 0600. `now` is
    in UTC; a new certificate is valid for 397 days.
    """
    known = _known_certificate(folder)
    if _is_valid_for(known, hosts, now):
        return known
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, authority_key = _load_or_create_ca(folder, now)
        key = ec.generate_private_key(ec.SECP256R1())
        found = _build_certificate(key.public_key(), hosts, now, authority, authority_key)
        _write_private(folder / "key.pem", _private_key_pem(key))
        _write_private(folder / "cert.pem", found.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise unwritable_folder_error(folder, error) from error
    return _known_certificate(folder)


def _known_certificate(folder: Path) -> Certificate:
    """Return the certificate of `folder`, which need not exist; one from before the CA is trusted itself."""
    cert, ca = folder / "cert.pem", folder / "ca.pem"
    return Certificate(cert=cert, key=folder / "key.pem", trust=ca if ca.exists() else cert)


def _load_or_create_ca(folder: Path, now: datetime.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the CA of `folder` and its key; create them unless they outlive another certificate."""
    cert, key_file = folder / "ca.pem", folder / "ca-key.pem"
    try:
        found = _load_certificate(cert)
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        matches = isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == found.public_key()
        if matches and found.not_valid_after_utc > now + datetime.timedelta(days=_VALID_DAYS):
            return found, key  # type: ignore[return-value]
    except (InputError, OSError, ValueError):
        pass  # missing or damaged: a new one
    new_key = ec.generate_private_key(ec.SECP256R1())
    # Names of two CAs differ, so that a client that trusts an earlier one reports an unknown issuer.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"isthmus CA {x509.random_serial_number() % 10**8:08d}")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    new = (
        _unsigned(name, name, new_key.public_key(), now, _CA_VALID_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(new_key, hashes.SHA256())
    )
    _write_private(key_file, _private_key_pem(new_key))
    _write_private(cert, new.public_bytes(serialization.Encoding.PEM))
    return new, new_key


def _build_certificate(
    key: ec.EllipticCurvePublicKey,
    hosts: tuple[str, ...],
    now: datetime.datetime,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _unsigned(name, authority.subject, key, now, _VALID_DAYS)
        .add_extension(x509.SubjectAlternativeName([_subject_alt_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _unsigned(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, valid_days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=valid_days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject_alt_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _is_valid_for(certificate: Certificate, hosts: tuple[str, ...], now: datetime.datetime) -> bool:
    """Tell whether the files exist, remain valid for a day, name every host, and come from the trusted CA."""
    try:
        found = _load_certificate(certificate.cert)
        authority = _load_certificate(certificate.trust or certificate.cert)
        certificate.check()
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InputError, x509.ExtensionNotFound):
        return False
    covered = all(_subject_alt_name(host) in names for host in hosts)
    return (
        covered and found.issuer == authority.subject and found.not_valid_after_utc > now + datetime.timedelta(days=1)
    )


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

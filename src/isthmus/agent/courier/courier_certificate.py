"""`courier_certificate`: the self-signed certificate that workers pin; made once in the agent's state folder."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from isthmus.core.messages.worker_folder import write_atomically

_VALID_DAYS = 36500
"""Longer than any agent lives: a ticket names this certificate alone, and a new state folder has a new one."""


def courier_certificate(folder: Path, now: datetime.datetime) -> Path:
    """Return the PEM file with key and certificate in `folder`; make it if it is not there. `now` is in UTC."""
    file = folder / "courier.pem"
    if file.exists():
        return file
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus courier")])
    day = datetime.timedelta(days=1)
    found = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 365 * day)
        .not_valid_after(now + _VALID_DAYS * day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomically(file, private + found.public_bytes(serialization.Encoding.PEM), mode=0o600)
    return file


def public_part(file: Path) -> str:
    """Return the certificate in PEM without its key."""
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

"""`CentreConfig`: where a decision centre listens, and who may ask it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.datagram import Address

MIN_TOKEN_CHARS = 32


@dataclass(frozen=True, kw_only=True)
class CentreConfig:
    """Raises `InputError` for a port beyond loopback without a token or without TLS."""

    listen: Address
    token: str = field(default="", repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("TLS needs both a certificate and its key", hint="--tls-cert FILE --tls-key FILE")
        if is_loopback(self.listen[0]):
            return
        if not self.token:
            raise InputError(
                f"a decision centre at {self.listen[0]} would book for any caller",
                hint="--token-file FILE; create it: (umask 077; openssl rand -hex 32 > centre.token)",
            )
        if self.tls_cert is None:
            raise InputError(
                f"the token of a decision centre at {self.listen[0]} would cross the network in the clear",
                hint="--tls-cert FILE --tls-key FILE, or listen at 127.0.0.1",
            )

    def tls(self) -> ssl.SSLContext | None:
        """Return what connections begin with; None without TLS. Raise `FileError` for files that cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise FileError(
                f"certificate or key cannot be used: {error}", file=str(self.tls_cert), hint="PEM files of one pair"
            ) from error
        return context


def read_centre_token(file: Path) -> str:
    """Return the token in `file`; raise `FileError` if others may read it or it is short."""
    try:
        mode, text = file.stat().st_mode, read_within(file, 1024).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("cannot be read as a token", file=str(file), hint="one line of ASCII") from error
    if mode & 0o077:
        raise FileError("other accounts may read or write the token", file=str(file), hint=f"chmod 600 {file}")
    if not MIN_TOKEN_CHARS <= len(text) <= 256:
        raise FileError(
            f"a token of {len(text)} characters", file=str(file), hint="openssl rand -hex 32 makes one of 64"
        )
    return text

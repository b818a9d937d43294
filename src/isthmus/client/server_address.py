"""Server URLs and TLS settings for sending tokens safely."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from isthmus.core.errors import InputError
from isthmus.core.loopback import is_loopback


def require_secure_server(server: str) -> None:
    """Raise `InputError` if URL `server` would receive the token unencrypted over a network."""
    url = parse_server_url(server)
    if url.scheme == "http" and not is_loopback(url.host):
        raise InputError(
            f"{server} would receive the token unencrypted",
            hint="use https (`isthmus serve --tls-cert … --tls-key …`), or a tunnel to a loopback address",
        )


def parse_server_url(server: str) -> httpx.URL:
    """Return the parsed server URL; raise `InputError` if invalid."""
    try:
        url = httpx.URL(server)
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"'{server}' is not a server address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(f"'{server}' is not a server address", hint="for example http://127.0.0.1:8470")
    return url


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the PEM file `ca` (None: the system's CAs)."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"cannot load certificate file {ca}: {error}") from error

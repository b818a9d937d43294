"""A server's address, and what makes it safe to send a token there."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from isthmus.core.errors import InputError
from isthmus.core.loopback import is_loopback


def require_private(server: str) -> None:
    """Raise `InputError` where a token sent to URL `server` could be read on its way."""
    url = parse_server(server)
    if url.scheme == "http" and not is_loopback(url.host):
        raise InputError(
            f"{server} would receive the token unencrypted",
            hint="use https (`isthmus serve --tls-cert … --tls-key …`), or a tunnel to a loopback address",
        )


def parse_server(server: str) -> httpx.URL:
    """Return the URL of a server; raise `InputError` where it is none."""
    try:
        url = httpx.URL(server)
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"'{server}' is not a server address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(f"'{server}' is not a server address", hint="for example http://127.0.0.1:8470")
    return url


def authority(ca: Path | None) -> ssl.SSLContext:
    """Return what vouches for servers: the PEM file `ca` (None: the system's authorities)."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"the certificate file {ca} cannot be used: {error}") from error

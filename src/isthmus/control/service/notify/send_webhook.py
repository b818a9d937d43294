"""`send_webhook`: one signed POST to a URL that a user has named, as Standard Webhooks 1.0 describe it.

The name is resolved here and the address that was checked is dialled, so that a name which resolves to another one a
moment later changes nothing. Redirects are not followed, answers are read up to their head, and all of it ends by a
deadline.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import isthmus
from isthmus.core.errors import InputError, IsthmusError, UnavailableError
from isthmus.core.network.address_rules import Resolve, allowed_address

TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 8192
OPERATOR_HINT = "the operator may allow a network in networks of notify.yaml"


class DeliveryError(UnavailableError):
    """The receiver did not take a message; it is repeated, not before `retry_after_s`."""

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem, hint="the message is repeated for a day")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class _Target:
    host: str
    port: int
    path: str
    is_tls: bool


def send_webhook(
    url: str,
    body: bytes,
    message_id: str,
    secret: bytes,
    now_s: float,
    networks: Sequence[str] = (),
    *,
    resolve: Resolve | None = None,
    timeout_s: float = TIMEOUT_S,
    monotonic: Callable[[], float] = time.monotonic,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Post `body`; return once the receiver has answered 2xx. `networks` are those that the operator allows.

    Raises `DeliveryError` if it did not, `InputError` for a host without an allowed address.
    """
    target, deadline_s = _target(url), monotonic() + timeout_s
    address = allowed_address(target.host, target.port, networks, resolve, hint=OPERATOR_HINT)
    if not target.is_tls and not _is_listed(address, networks):
        raise InputError(
            f"'{target.host}' is not in a network that is reached by http", hint="use https, or ask the operator"
        )
    request = _request(target, body, message_id, secret, now_s)

    def left_s() -> float:
        left = deadline_s - monotonic()
        if left <= 0:
            raise DeliveryError(f"{target.host} did not answer within {timeout_s:g} s")
        return left

    try:
        with closing(socket.create_connection((address, target.port), left_s())) as plain:
            connection = plain
            if target.is_tls:
                context = tls or ssl.create_default_context()
                connection = context.wrap_socket(plain, server_hostname=target.host)
            with closing(connection):
                connection.settimeout(left_s())
                connection.sendall(request)
                head = _read_head(connection, left_s)
    except IsthmusError:
        raise
    except (OSError, ValueError) as error:
        raise DeliveryError(f"{target.host} cannot be reached: {error}") from error
    _require_success(target.host, head)


def sign(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`."""
    digest = hmac.new(secret, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def _target(url: str) -> _Target:
    parts = urlsplit(url)
    is_tls, host = parts.scheme == "https", parts.hostname or ""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Target(host, parts.port or (443 if is_tls else 80), path, is_tls)


def _request(target: _Target, body: bytes, message_id: str, secret: bytes, now_s: float) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    port = "" if target.port == (443 if target.is_tls else 80) else f":{target.port}"
    timestamp = int(now_s)
    head = [
        f"POST {target.path} HTTP/1.1", f"Host: {host}{port}", "Content-Type: application/json",
        f"Content-Length: {len(body)}", f"User-Agent: isthmus/{isthmus.__version__}", "Connection: close",
        f"webhook-id: {message_id}", f"webhook-timestamp: {timestamp}",
        f"webhook-signature: {sign(secret, message_id, timestamp, body)}",
    ]  # fmt: skip
    return "\r\n".join([*head, "", ""]).encode("ascii") + body


def _read_head(connection: socket.socket, left_s: Callable[[], float]) -> bytes:
    """Return the first bytes of an answer, up to its head."""
    found = b""
    while b"\r\n\r\n" not in found and len(found) < MAX_HEAD_BYTES:
        connection.settimeout(left_s())
        part = connection.recv(MAX_HEAD_BYTES - len(found))
        if not part:
            break
        found += part
    return found


def _require_success(host: str, head: bytes) -> None:
    line, *headers = head.partition(b"\r\n\r\n")[0].split(b"\r\n")
    words = line.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
        raise DeliveryError(f"{host} did not answer in HTTP")
    status = int(words[1])
    if 200 <= status < 300:
        return
    raise DeliveryError(f"{host} answered {status}", _retry_after_s(headers))


def _retry_after_s(headers: Sequence[bytes]) -> float:
    for header in headers:
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"retry-after" and value.strip().isdigit() and len(value) < 8:
            return float(value)
    return 0.0


def _is_listed(address: str, networks: Sequence[str]) -> bool:
    found = ipaddress.ip_address(address)
    listed = map(ipaddress.ip_network, networks)
    return any(found.version == network.version and found in network for network in listed)

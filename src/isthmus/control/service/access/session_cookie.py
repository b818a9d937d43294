"""`credentials`: what a request shows of its caller: a token, or the two halves of a session of the console.

The secret of a session is cut in two. One half is a cookie that no script can read; the other half is known to the
pages of the server's own origin and travels in a header, which no form, link or frame of another origin can add. So a
request that another site makes a browser send has half a secret (cross-site request forgery), and so has another
service at the same host, which browsers send the cookie to whatever its port is (RFC 6265, section 8.5).
"""

from __future__ import annotations

from collections.abc import Iterable

COOKIE = "isthmus-session"
SECURE_COOKIE = "__Host-isthmus-session"
"""The cookie's name under TLS: browsers take it from this host alone, for all paths (RFC 6265bis, 4.1.3.2)."""
KEY_HEADER = "isthmus-session-key"
"""Header with the other half of a session's secret."""
SESSION_SCHEME = "session"
"""How `credentials` marks a session; a client that sends it as its own scheme is a stranger."""
MAX_COOKIE_BYTES = 4096
"""Longest header `Cookie` that is read; a longer one holds no session."""


def cookie_name(*, secure: bool) -> str:
    """Return the name of the session's cookie on a server with or without TLS."""
    return SECURE_COOKIE if secure else COOKIE


def credentials(headers: Iterable[tuple[bytes, bytes]], *, secure: bool) -> bytes | None:
    """Return the header `Authorization` of a request, or its session as `session COOKIE.KEY`; None without either.

    A header `Authorization` comes first. Two cookies of the name, or a cookie without the key, are no session.
    """
    found = {name.lower(): value for name, value in headers}
    given = found.get(b"authorization")
    if given is not None:
        return None if given.lower().startswith(SESSION_SCHEME.encode()) else given
    key, half = found.get(KEY_HEADER.encode()), _cookie(found.get(b"cookie", b""), cookie_name(secure=secure).encode())
    if key is None or half is None:
        return None
    return b"%s %s.%s" % (SESSION_SCHEME.encode(), half, key.strip())


def _cookie(header: bytes, name: bytes) -> bytes | None:
    """Return the value of the one cookie `name`, None if there is none, or more than one."""
    if len(header) > MAX_COOKIE_BYTES:
        return None
    pairs = (pair.strip().partition(b"=") for pair in header.split(b";"))
    values = [value for key, _, value in pairs if key == name]
    return values[0] if len(values) == 1 and values[0] else None

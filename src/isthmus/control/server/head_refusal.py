"""`refusal`: the answer to a request of a flood, from its bytes alone.

It costs much less than a request that is parsed, so a flood of invalid tokens leaves the server its time. A request
that it does not refuse takes the ordinary way, which decides again.
"""

from __future__ import annotations

import functools
import re

from isthmus.control.rest.middleware import needs_token
from isthmus.control.service.access.session_cookie import credentials
from isthmus.control.service.access.token_gate import TokenGate

MAX_HEAD_BYTES = 16 * 1024
"""Largest head of a request."""
HEAD_END = b"\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
"""Answer to a larger head."""
_CREDENTIALS = re.compile(rb"(?<=\r\n)(authorization|cookie|isthmus-session-key):[ \t]*([^\r\n]*)", re.IGNORECASE)
_BODY = (
    b'{"error":"RateLimitError","message":"too many requests without a valid token",'
    b'"hint":"wait, then send a token that an admin made"}'
)
_ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: %d\r\ncontent-length: %d\r\n\r\n%s"
)


def refusal(gate: TokenGate, address: str, data: bytes) -> bytes | None:
    """Return the answer that refuses the request at the start of `data`, None for one to be served.

    Refused is a complete head without a known token, for a path that needs one, from an address with too many failures.
    """
    if not gate.refuses_unknown(address):
        return None
    end = data.find(HEAD_END)
    words = data[:256].split(b" ", 2)
    if end < 0 or len(words) < 3 or not needs_token(words[1].decode("latin-1").partition("?")[0]):
        return None
    shown = [(found[1].lower(), found[2]) for found in _CREDENTIALS.finditer(data, 0, end + 2)]
    if any(gate.known(credentials(shown, secure=secure)) is not None for secure in (False, True)):
        return None
    return _answer(int(gate.count_failure(address)) or 1)


@functools.cache
def _answer(delay_s: int) -> bytes:
    return _ANSWER % (delay_s, len(_BODY), _BODY)

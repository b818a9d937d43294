"""`Word`: control messages between a worker and its transport process, sent over a socket pair.

Header (little-endian): kind (1 byte), text length (4), message number (8), peer (4), tag (8, signed),
offset (8), bytes (8), two times (8 each). The text follows in UTF-8.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.core.errors import IsthmusError, PeerError, ProtocolError, RestartError, UnavailableError

BEGIN, SEND, RECEIVE, CLOSE = 1, 2, 3, 4
"""Kinds that the worker sends: connect to all ranks (settings in the text); send the bytes at `offset` to
`peer`; receive from `peer` into `offset`; close, with the reason in the text."""

MET, REFUSED, SENT, ARRIVED, FAILED, LOST, LINK, CLOSED = 11, 12, 13, 14, 15, 16, 17, 18
"""Kinds that the transport process sends: connected, or the error; message `number` was acknowledged,
received (with send and arrival times), or failed; the transport is broken; the link to `peer` is down or
(no text) up again; closed, with the ranks that sent no CLOSE in the text."""

_HEAD = struct.Struct("<BIQIqQQdd")
_ERRORS: dict[str, type[IsthmusError]] = {
    one.__name__: one for one in (PeerError, RestartError, UnavailableError, ProtocolError)
}


@dataclass(frozen=True)
class Word:
    """One control message; `times_s` are epoch seconds, or a duration."""

    kind: int
    number: int = 0
    peer: int = 0
    tag: int = 0
    offset: int = 0
    num_bytes: int = 0
    times_s: tuple[float, float] = (0.0, 0.0)
    text: str = ""

    def packed(self) -> bytes:
        """Return the message as bytes."""
        text = self.text.encode()
        head = (self.kind, len(text), self.number, self.peer, self.tag, self.offset, self.num_bytes)
        return _HEAD.pack(*head, *self.times_s) + text


class Line:
    """One end of the control channel; any thread may `say`, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file = connection, connection.makefile("rb")
        self._lock = threading.Lock()

    def say(self, *words: Word) -> None:
        """Send messages; raises `OSError` if the other side is gone."""
        data = b"".join(one.packed() for one in words)
        with self._lock:
            self._connection.sendall(data)

    def hear(self) -> Iterator[Word]:
        """Yield received messages until the other side is gone."""
        while (message := self.next()) is not None:
            yield message

    def next(self) -> Word | None:
        """Return the next message; None if the other side is gone."""
        try:
            head = self._file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            kind, length, number, peer, tag, offset, num_bytes, first_s, second_s = _HEAD.unpack(head)
            text = self._file.read(length) if length else b""
        except OSError:
            return None
        if len(text) < length:
            return None
        return Word(kind, number, peer, tag, offset, num_bytes, (first_s, second_s), text.decode())

    def close(self) -> None:
        """Close the channel."""
        self._file.close()
        self._connection.close()


def packed_error(error: BaseException) -> str:
    """Return an error as JSON text for `unpacked_error`."""
    fields = {
        "kind": type(error).__name__,
        "message": getattr(error, "message", str(error)),
        "hint": getattr(error, "hint", None),
        "incarnation": getattr(error, "incarnation", 0),
    }
    return json.dumps(fields)


def unpacked_error(text: str) -> IsthmusError:
    """Return the error that `packed_error` wrote; an unknown kind becomes a `PeerError`."""
    fields = json.loads(text)
    kind = _ERRORS.get(fields["kind"], PeerError)
    if kind is RestartError:
        return RestartError(fields["message"], incarnation=fields["incarnation"], hint=fields["hint"])
    return kind(fields["message"], hint=fields["hint"])


def unpacked_loss(text: str) -> PeerError:
    """Return the error that `packed_error` wrote as a `PeerError`."""
    error = unpacked_error(text)
    return error if isinstance(error, PeerError) else PeerError(error.message, hint=error.hint)


def packed_ranks(ranks: Sequence[int]) -> str:
    """Return `ranks` as text."""
    return " ".join(map(str, ranks))


def unpacked_ranks(text: str) -> list[int]:
    """Return the ranks that `packed_ranks` wrote."""
    return [int(one) for one in text.split()]

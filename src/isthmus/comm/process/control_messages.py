"""`ControlMessage`: control messages between a worker and its transport process, sent over a socket pair.

Header (little-endian): kind (1 byte), text length (4), message number (8), peer (4), tag (8, signed),
offset (8), bytes (8), five times (8 each). The text follows in UTF-8.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError, IsthmusError, PeerError, ProtocolError, RestartError, UnavailableError

CONNECT, SEND, RECEIVE, CLOSE, RECEIVE_ANY = 1, 2, 3, 4, 5
"""Kinds that the worker sends: connect to all ranks (settings in the text); send the bytes at `offset` to
`peer`; receive from `peer` into `offset`; close, with the reason in the text; receive from any of several ranks, which
the text has in its first line, above the label."""

CONNECTED, CONNECT_FAILED, SENT, ARRIVED, FAILED, LOST, LINK, CLOSED, REFUSED = 11, 12, 13, 14, 15, 16, 17, 18, 19
"""Kinds that the transport process sends: connected, or the error; message `number` was acknowledged,
received from `peer` (with the times of its arrival), or failed; the transport is broken; the link to `peer` is down or
(no text) up again; closed, with the ranks that sent no CLOSE in the text; a caller at the address in the text was
turned away."""

_HEADER = struct.Struct("<BIQIqQQ5d")
_ERRORS: dict[str, type[IsthmusError]] = {
    one.__name__: one for one in (PeerError, RestartError, UnavailableError, ProtocolError, InputError)
}


@dataclass(frozen=True)
class ControlMessage:
    """One control message; `times_s` are the fields of an `Arrival`, or first a duration (s)."""

    kind: int
    number: int = 0
    peer: int = 0
    tag: int = 0
    offset: int = 0
    num_bytes: int = 0
    times_s: tuple[float, float, float, float, float] = (0.0,) * 5
    text: str = ""

    def pack(self) -> bytes:
        """Return the message as bytes."""
        text = self.text.encode()
        head = (self.kind, len(text), self.number, self.peer, self.tag, self.offset, self.num_bytes)
        return _HEADER.pack(*head, *self.times_s) + text


class ControlChannel:
    """One end of the control channel; any thread may `send`, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._reader = sock, sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, *messages: ControlMessage) -> None:
        """Send messages; raises `OSError` if the other side is gone."""
        data = b"".join(one.pack() for one in messages)
        with self._lock:
            self._socket.sendall(data)

    def receive_all(self) -> Iterator[ControlMessage]:
        """Yield received messages until the other side is gone."""
        while (message := self.receive()) is not None:
            yield message

    def receive(self) -> ControlMessage | None:
        """Return the next message; None if the other side is gone."""
        try:
            head = self._reader.read(_HEADER.size)
            if len(head) < _HEADER.size:
                return None
            kind, length, number, peer, tag, offset, num_bytes, *times_s = _HEADER.unpack(head)
            text = self._reader.read(length) if length else b""
        except OSError:
            return None
        if len(text) < length:
            return None
        return ControlMessage(kind, number, peer, tag, offset, num_bytes, tuple(times_s), text.decode())

    def close(self) -> None:
        """Close the channel."""
        self._reader.close()
        self._socket.close()


def pack_error(error: BaseException) -> str:
    """Return an error as JSON text for `unpack_error`, of an unknown kind as the kind above it."""
    kinds = [one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS]
    fields = {
        "kind": kinds[0] if kinds else "",
        "message": getattr(error, "message", str(error)),
        "hint": getattr(error, "hint", None),
        "incarnation": getattr(error, "incarnation", 0),
    }
    return json.dumps(fields)


def unpack_error(text: str) -> IsthmusError:
    """Return the error that `pack_error` wrote; an unknown kind becomes a `PeerError`."""
    fields = json.loads(text)
    kind = _ERRORS.get(fields["kind"], PeerError)
    if kind is RestartError:
        return RestartError(fields["message"], incarnation=fields["incarnation"], hint=fields["hint"])
    return kind(fields["message"], hint=fields["hint"])


def unpack_loss(text: str) -> PeerError:
    """Return the error that `pack_error` wrote as a `PeerError`."""
    error = unpack_error(text)
    return error if isinstance(error, PeerError) else PeerError(error.message, hint=error.hint)


def pack_ranks(ranks: Sequence[int]) -> str:
    """Return `ranks` as text."""
    return " ".join(map(str, ranks))


def unpack_ranks(text: str) -> list[int]:
    """Return the ranks that `pack_ranks` wrote."""
    return [int(one) for one in text.split()]

"""`Word`: what a worker and the process of its transport say to each other, beside shared memory.

A word has a head (little-endian): kind (1 byte), length of the text (4), number (8), peer (4), tag (8,
signed), offset (8), bytes (8), two times (8 each); then the text in UTF-8.
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
"""Told by the worker. Meet the others (the text says all); send what lies at `offset` to `peer`; receive from
it into what is there; end, for the reason in the text."""

MET, REFUSED, SENT, ARRIVED, FAILED, LOST, LINK, CLOSED = 11, 12, 13, 14, 15, 16, 17, 18
"""Told by the process. All have met, or why not; message `number` has arrived there, or here (sent and
arrived at those times), or failed; the transport is broken; the way to `peer` is cut or (no text) mended; it
has ended, and the text names who has not taken leave."""

_HEAD = struct.Struct("<BIQIqQQdd")
_ERRORS: dict[str, type[IsthmusError]] = {
    one.__name__: one for one in (PeerError, RestartError, UnavailableError, ProtocolError)
}


@dataclass(frozen=True)
class Word:
    """One of them; `times` are epoch seconds, or how long something lasted."""

    kind: int
    number: int = 0
    peer: int = 0
    tag: int = 0
    offset: int = 0
    num_bytes: int = 0
    times_s: tuple[float, float] = (0.0, 0.0)
    text: str = ""

    def packed(self) -> bytes:
        """Return the word as bytes."""
        text = self.text.encode()
        head = (self.kind, len(text), self.number, self.peer, self.tag, self.offset, self.num_bytes)
        return _HEAD.pack(*head, *self.times_s) + text


class Line:
    """One end of the line between the two, which it closes in the end; any thread may `say` something."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file = connection, connection.makefile("rb")
        self._lock = threading.Lock()

    def say(self, *words: Word) -> None:
        """Send words; raises `OSError` where the other side is gone."""
        data = b"".join(one.packed() for one in words)
        with self._lock:
            self._connection.sendall(data)

    def hear(self) -> Iterator[Word]:
        """Yield what the other side says, until it is gone."""
        while (word := self.next()) is not None:
            yield word

    def next(self) -> Word | None:
        """Return the next word, None where the other side is gone."""
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
        """Hang up."""
        self._file.close()
        self._connection.close()


def packed_error(error: BaseException) -> str:
    """Return an error as text, for `unpacked_error`."""
    told = {
        "kind": type(error).__name__,
        "message": getattr(error, "message", str(error)),
        "hint": getattr(error, "hint", None),
        "incarnation": getattr(error, "incarnation", 0),
    }
    return json.dumps(told)


def unpacked_error(text: str) -> IsthmusError:
    """Return the error that `packed_error` was given; one of no known kind is a `PeerError`."""
    told = json.loads(text)
    kind = _ERRORS.get(told["kind"], PeerError)
    if kind is RestartError:
        return RestartError(told["message"], incarnation=told["incarnation"], hint=told["hint"])
    return kind(told["message"], hint=told["hint"])


def unpacked_loss(text: str) -> PeerError:
    """Return the error that `packed_error` was given, as the loss of a peer."""
    error = unpacked_error(text)
    return error if isinstance(error, PeerError) else PeerError(error.message, hint=error.hint)


def packed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text."""
    return " ".join(map(str, ranks))


def unpacked_ranks(text: str) -> list[int]:
    """Return the ranks that `packed_ranks` was given."""
    return [int(one) for one in text.split()]

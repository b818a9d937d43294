"""`Reassembler`: reassembles one peer's messages, exactly once, from fragments of several connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isthmus.comm.tcp.wire_format import FrameHeader
from isthmus.comm.transport.receive_matching import IncomingMessage, ReceiveMatcher
from isthmus.comm.transport.transport import Arrival

MAX_PARTIAL_MESSAGES = 4096
"""Most messages of a peer that arrive at a time; a sender has 256 that are not acknowledged."""
MIN_FRAGMENT_BYTES, MAX_SHORT_FRAGMENTS = 1024, 64
"""A message has one fragment for each `MIN_FRAGMENT_BYTES` at most, and `MAX_SHORT_FRAGMENTS` more."""

SPACE_POLL_S = 1.0
"""How often a connection that waits for receive space checks whether it is still alive."""


@dataclass(eq=False)
class _PartialMessage:
    """A partially received message: per offset the connection that reads it, the offsets received, and their times.

    `reserved_bytes` are those of fragments that were received or are read.
    """

    message: IncomingMessage
    missing_bytes: int
    reserved_bytes: int = 0
    arrival: Arrival | None = None
    readers: dict[int, object] = field(default_factory=dict)
    received_offsets: set[int] = field(default_factory=set)


class Reassembler:
    """Reassembles the fragments of one peer's messages into its `ReceiveMatcher`. Thread-safe.

    A fragment is resent after its connection broke, so duplicates are discarded. `shut_connection(connection)` shuts
    down a connection that still reads a fragment which another one begins to deliver: only one may write
    a buffer.
    """

    def __init__(self, matcher: ReceiveMatcher, shut_connection: Callable[[Any], None]) -> None:
        self._matcher, self._shut_connection = matcher, shut_connection
        self._changed = threading.Condition()
        self._partial: dict[int, _PartialMessage] = {}
        self._complete: set[int] = set()
        self._complete_below = 0

    def begin_fragment(self, header: FrameHeader, connection: object, is_dead: Callable[[], bool]) -> memoryview | None:
        """Return the buffer for the fragment of `header`; None for a duplicate or once `is_dead()` is true.

        Blocks while too many received bytes wait for a receive call. Raises `ValueError` for a message length
        that contradicts an earlier fragment or is above every expected one, for fragments that overlap, for more of
        them than a message has, and for too many messages at a time: an honest sender cuts a message once.
        """
        while not self._is_known(header.number) and not self._matcher.wait_for_space(SPACE_POLL_S):
            if is_dead():
                return None
        with self._changed:
            if self._is_complete(header.number):
                return None
            partial = self._partial.get(header.number)
            if partial is None:
                if len(self._partial) >= MAX_PARTIAL_MESSAGES:
                    raise ValueError(f"more than {MAX_PARTIAL_MESSAGES} messages at a time")
                message = self._matcher.begin_message(header.tag, header.label, header.message_bytes)
                partial = self._partial[header.number] = _PartialMessage(message, header.message_bytes)
            if header.message_bytes != partial.message.num_bytes:
                raise ValueError(
                    f"message {header.number} has {partial.message.num_bytes} bytes, not {header.message_bytes}"
                )
            while header.offset in partial.readers:
                self._shut_connection(partial.readers[header.offset])
                self._changed.wait()
            if header.offset in partial.received_offsets:
                return None
            self._check_fragment(partial, header)
            partial.reserved_bytes += header.payload_bytes
            partial.readers[header.offset] = connection
            return partial.message.place(header.offset, header.payload_bytes)

    def end_fragment(self, header: FrameHeader, arrival: Arrival | None) -> Arrival | None:
        """Record a fragment, failed if `arrival` is None; return the times of its message if that is now complete."""
        with self._changed:
            partial = self._partial[header.number]
            del partial.readers[header.offset]
            self._changed.notify_all()
            if arrival is None:
                partial.reserved_bytes -= header.payload_bytes
                return None
            whole = partial.arrival = arrival if partial.arrival is None else partial.arrival.merged_with(arrival)
            partial.received_offsets.add(header.offset)
            partial.missing_bytes -= header.payload_bytes
            if partial.missing_bytes > 0:
                return None
            del self._partial[header.number]
            self._complete.add(header.number)
            while self._complete_below in self._complete:
                self._complete.remove(self._complete_below)
                self._complete_below += 1
        self._matcher.complete(partial.message, whole)
        return whole

    @staticmethod
    def _check_fragment(partial: _PartialMessage, header: FrameHeader) -> None:
        """Raise `ValueError` for a fragment that no cut of its message has.

        Of fragments that overlap one could be written after the message is complete, into memory in other use by then.
        """
        total = header.message_bytes
        if total and not header.payload_bytes:
            raise ValueError(f"message {header.number} of {total} bytes has an empty fragment")
        if partial.reserved_bytes + header.payload_bytes > total:
            raise ValueError(f"fragments of message {header.number} overlap")
        num_fragments = len(partial.received_offsets) + len(partial.readers)
        if num_fragments >= total // MIN_FRAGMENT_BYTES + MAX_SHORT_FRAGMENTS:
            raise ValueError(f"message {header.number} of {total} bytes has more than {num_fragments} fragments")

    def _is_known(self, number: int) -> bool:
        with self._changed:
            return number in self._partial or self._is_complete(number)

    def _is_complete(self, number: int) -> bool:
        return number < self._complete_below or number in self._complete

    def has_message(self, number: int) -> bool:
        """Return whether message `number` is complete."""
        with self._changed:
            return self._is_complete(number)

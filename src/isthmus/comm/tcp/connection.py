"""`Lane`: one TCP connection to a peer, with a send thread and a receive thread."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from isthmus.comm.tcp.reassembly import Inbox
from isthmus.comm.tcp.send_queue import QUEUE_MESSAGES, Outbox, Piece
from isthmus.comm.tcp.socket_readiness import Readiness
from isthmus.comm.tcp.wire_format import (
    DATA,
    HEARTBEAT,
    LEAVE,
    MAX_REASON_BYTES,
    RECEIVED,
    Head,
    pack_head,
    read_head,
    read_into,
    write,
)
from isthmus.comm.transport.transport import Arrival

_SMALL_BYTES = 64 * 2**10
_LITTLE_BYTES = 4 * 2**10
"""Fragments up to this size skip the readiness check: they fit in the first packets."""

_Broken = (OSError, ValueError, MemoryError)


class LaneOwner(Protocol):
    """The peer that owns the connections; its callbacks run on either connection thread."""

    inbox: Inbox
    outbox: Outbox
    farewell: str | None

    def heard(self) -> None:
        """Record that a frame arrived."""
        ...

    def sent(self, num_bytes: int) -> None:
        """Count a message that the peer acknowledged."""
        ...

    def received(self, num_bytes: int, arrival: Arrival) -> None:
        """Count a message that was received completely."""
        ...

    def left(self, reason: str) -> None:
        """Handle a CLOSE frame from the peer on one connection; `reason` is empty for an orderly close."""
        ...

    def took_leave(self) -> None:
        """Handle that this rank sent its CLOSE frame on one connection."""
        ...

    def broke(self, lane: Lane, error: Exception) -> None:
        """Handle a broken connection; called once per connection."""
        ...


class Lane:
    """Connection `number` to a peer whose clock is `offset_s` ahead of ours.

    Silence of `silence_s` counts as broken, except while the owner closes: the peer may still be
    finishing. When the connection breaks, its unacknowledged fragments return to the send queue.
    """

    def __init__(
        self,
        number: int,
        connection: socket.socket,
        offset_s: float,
        owner: LaneOwner,
        *,
        heartbeat_s: float,
        silence_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.number, self.dead = number, False
        self.peer_left = self.has_taken_leave = False
        self._connection, self._offset_s, self._owner = connection, offset_s, owner
        self._heartbeat_s, self._clock = heartbeat_s, clock
        self._carried: deque[Piece] = deque()
        self._noted: deque[Piece] = deque(maxlen=QUEUE_MESSAGES)
        self._lock = threading.Lock()
        self._readiness = Readiness(connection)
        connection.settimeout(silence_s)
        self._threads = [
            threading.Thread(target=loop, name=f"isthmus-connection-{number}-{what}", daemon=True)
            for loop, what in ((self._send_loop, "send"), (self._receive_loop, "receive"))
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """Break the connection and stop both threads."""
        self.dead = True
        self.shut()
        self._owner.outbox.wake()

    def shut(self) -> None:
        """Shut the socket down, as a network failure would."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Join both threads and close the socket."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def _break(self, error: Exception) -> None:
        with self._lock:
            known, self.dead = self.dead, True
        self.cut()
        if not known:
            self._owner.broke(self, error)

    def _send_loop(self) -> None:
        send_queue = self._owner.outbox
        fragment: Piece | None = None
        try:
            while not (self.dead or self.has_taken_leave):
                fragment = self._next()
                if fragment is not None:
                    self._write(fragment)
                    self._keep(fragment)
                    if fragment.head.kind == LEAVE:
                        self.has_taken_leave = True
                        self._owner.took_leave()
        except OSError as error:
            if fragment is not None:
                self._keep(fragment)
            self._break(error)
        send_queue.give_back([*self._noted, *self._carried])

    def _next(self) -> Piece | None:
        """Return the next fragment or, after an idle heartbeat interval, a heartbeat; None to check again."""
        owner = self._owner
        if owner.farewell is not None:
            reason = memoryview(owner.farewell.encode()[:MAX_REASON_BYTES])
            return Piece(Head(LEAVE, num_bytes=len(reason), size=len(reason)), reason)
        fragment = owner.outbox.take(at_most_bytes=_LITTLE_BYTES)
        if fragment is not None:
            return fragment
        if owner.outbox.has_pieces():
            return owner.outbox.take() if self._readiness.wait() else None
        if owner.outbox.wait_for_work(self._heartbeat_s, lambda: self.dead or owner.farewell is not None):
            return None
        return Piece(Head(HEARTBEAT), memoryview(b""))

    def _write(self, piece: Piece) -> None:
        start = pack_head(piece.head)
        if len(piece.payload) <= _SMALL_BYTES:
            write(self._connection, memoryview(start + bytes(piece.payload)), lambda: self.dead)
            return
        write(self._connection, memoryview(start), lambda: self.dead)
        write(self._connection, piece.payload, lambda: self.dead)

    def _keep(self, piece: Piece) -> None:
        """Remember a sent fragment or acknowledgement until a resend is ruled out."""
        if piece.head.kind == RECEIVED:
            self._noted.append(piece)
        elif piece.head.kind == DATA:
            self._carried.append(piece)
            while self._carried and not self._owner.outbox.is_under_way(self._carried[0].head.number):
                self._carried.popleft()

    def _receive_loop(self) -> None:
        try:
            while self._receive(read_head(self._connection, self._is_patient)):
                self._owner.heard()
        except _Broken as error:
            self._break(error)

    def _is_patient(self) -> bool:
        return self._owner.farewell is not None and not self.dead

    def _receive(self, head: Head) -> bool:
        """Receive one frame; return False after CLOSE."""
        owner = self._owner
        if head.kind == DATA:
            self._receive_piece(head)
        elif head.kind == RECEIVED:
            num_bytes = owner.outbox.arrived(head.number)
            if num_bytes is not None:
                owner.sent(num_bytes)
        elif head.kind == LEAVE:
            reason = bytearray(head.size)
            read_into(self._connection, memoryview(reason), self._is_patient)
            self.peer_left = True
            owner.left(reason.decode(errors="replace"))
            return False
        return True

    def _receive_piece(self, head: Head) -> None:
        owner = self._owner
        into = owner.inbox.begin(head, self, lambda: self.dead)
        if into is None:
            self._skip(head.size)
            if owner.inbox.has(head.number):
                owner.outbox.note(head.number)
            return
        try:
            read_into(self._connection, into, self._is_patient)
        except BaseException:
            owner.inbox.end(head, None)
            raise
        arrival = Arrival(head.sent_s - self._offset_s, self._clock())
        if owner.inbox.end(head, arrival):
            owner.received(head.num_bytes, arrival)
            owner.outbox.note(head.number)

    def _skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SMALL_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            read_into(self._connection, part, self._is_patient)
            num_bytes -= len(part)

"""`Lane`: one of the connections to a peer, with a thread that sends and a thread that receives."""

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
"""So much goes by any lane, ready or not: it is on its way with the first packets."""

_Broken = (OSError, ValueError, MemoryError)


class LaneOwner(Protocol):
    """The peer that a lane leads to, as the lane's threads see it; called from either."""

    inbox: Inbox
    outbox: Outbox
    farewell: str | None

    def heard(self) -> None:
        """Take note that something came."""
        ...

    def sent(self, num_bytes: int) -> None:
        """Count a message that has arrived there."""
        ...

    def received(self, num_bytes: int, arrival: Arrival) -> None:
        """Count a message that has arrived here."""
        ...

    def left(self, reason: str) -> None:
        """Take note that the peer has taken leave by one lane more."""
        ...

    def took_leave(self) -> None:
        """Take note that we have taken leave by one lane more."""
        ...

    def broke(self, lane: Lane, error: Exception) -> None:
        """Take note, once, that the lane is of no more use."""
        ...


class Lane:
    """Connection `number` to a peer whose clock runs `offset_s` ahead; silent for `silence_s`, it is broken.

    What it has taken to send and the peer has not confirmed goes back to the outbox when it breaks. Once the
    owner takes leave, silence does not break it: the peer may have to come to its end first.
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
            threading.Thread(target=loop, name=f"isthmus-lane-{number}-{what}", daemon=True)
            for loop, what in ((self._send_loop, "send"), (self._receive_loop, "receive"))
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """End the connection; both threads end soon."""
        self.dead = True
        self.shut()
        self._owner.outbox.wake()

    def shut(self) -> None:
        """Break the connection, as the network would."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until both threads have ended, and close."""
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
        outbox = self._owner.outbox
        piece: Piece | None = None
        try:
            while not (self.dead or self.has_taken_leave):
                piece = self._next()
                if piece is not None:
                    self._write(piece)
                    self._keep(piece)
                    if piece.head.kind == LEAVE:
                        self.has_taken_leave = True
                        self._owner.took_leave()
        except OSError as error:
            if piece is not None:
                self._keep(piece)
            self._break(error)
        outbox.give_back([*self._noted, *self._carried])

    def _next(self) -> Piece | None:
        """Return what to send next; a sign of life where there has been nothing for a while."""
        owner = self._owner
        if owner.farewell is not None:
            reason = memoryview(owner.farewell.encode()[:MAX_REASON_BYTES])
            return Piece(Head(LEAVE, num_bytes=len(reason), size=len(reason)), reason)
        piece = owner.outbox.take(at_most_bytes=_LITTLE_BYTES)
        if piece is not None:
            return piece
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
        """Remember what may have to be sent again by another lane."""
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
        """Take one frame in; False after the last."""
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

"""`Peer`: the connection to one other worker, with a thread that sends and a thread that receives."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from isthmus.comm.frame import (
    DATA,
    HEARTBEAT,
    LEAVE,
    MAX_REASON_BYTES,
    Head,
    pack_head,
    read_head,
    read_into,
    write,
)
from isthmus.comm.mailbox import Mailbox
from isthmus.comm.transport import Arrival, Traffic
from isthmus.core.errors import PeerError

QUEUE_MESSAGES = 256
"""Messages that may wait to be sent to one peer before `send` blocks."""

_SMALL_BYTES = 64 * 2**10
_Outgoing = tuple[Head, memoryview, Future[None]]


class Peer:
    """A greeted connection to rank `rank`, whose clock runs `offset_s` ahead of ours.

    `on_loss` is called once, from one of the threads, if the peer is lost without having taken leave,
    or left saying that the run has failed. A peer from which nothing comes for `timeout_s` is lost.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        offset_s: float,
        *,
        heartbeat_s: float,
        timeout_s: float,
        on_loss: Callable[[PeerError], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank, self.traffic, self.mailbox = rank, Traffic(), Mailbox(rank)
        self._connection, self._offset_s, self._clock = connection, offset_s, clock
        self._heartbeat_s, self._timeout_s, self._on_loss = heartbeat_s, timeout_s, on_loss
        self._queue: queue.Queue[_Outgoing | None] = queue.Queue(QUEUE_MESSAGES)
        self._error: PeerError | None = None
        self._leaving = False
        self._ended = threading.Event()
        self._left = threading.Event()
        self._lock = threading.Lock()
        connection.settimeout(timeout_s)
        names = (self._send_loop, "send"), (self._receive_loop, "receive")
        self._threads = [
            threading.Thread(target=loop, name=f"isthmus-{what}-{rank}", daemon=True) for loop, what in names
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def send(self, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue a message, stamped with the present time."""
        head = Head(DATA, tag, self._clock(), label, len(payload))
        future: Future[None] = Future()
        if self._error is not None:
            future.set_exception(self._error)
            return future
        self._queue.put((head, payload, future))
        if self._ended.is_set():  # the sender may have seen its last item before this one
            self._fail_queued()
        return future

    def fail(self, error: PeerError) -> None:
        """Fail everything that waits for this peer, now and from now on."""
        with self._lock:
            self._error = self._error or error
        self.mailbox.fail(self._error)

    def leave(self, reason: str = "") -> None:
        """Queue the leave-taking, once; what was queued before goes first."""
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
        payload = memoryview(reason.encode()[:MAX_REASON_BYTES])
        with suppress(queue.Full):
            self._queue.put((Head(LEAVE, 0, self._clock(), "", len(payload)), payload, Future()), timeout=1)

    def join(self, linger_s: float) -> None:
        """Wait until both sides have taken leave, for at most `linger_s`; then end threads and connection."""
        deadline_s = time.monotonic() + linger_s
        sender, receiver = self._threads
        self._left.wait(linger_s)
        receiver.join(max(deadline_s - time.monotonic(), 0.0))
        self.fail(_closed(self.rank))
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)
        sender.join()
        receiver.join()
        self._connection.close()

    def _send_loop(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._heartbeat_s)
            except queue.Empty:
                item = Head(HEARTBEAT, 0, self._clock(), "", 0), memoryview(b""), Future()
            if item is None:
                self._ended.set()
                self._fail_queued()
                return
            self._send_one(*item)
            if item[0].kind == LEAVE:
                self._left.set()

    def _fail_queued(self) -> None:
        """Fail what is queued behind the end of the sender."""
        with suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[2].set_exception(self._error or _closed(self.rank))

    def _send_one(self, head: Head, payload: memoryview, future: Future[None]) -> None:
        if head.kind == LEAVE:
            with suppress(OSError):
                self._write(head, payload)
        elif self._error is not None or self._left.is_set():
            future.set_exception(self._error or _closed(self.rank))
        else:
            try:
                self._write(head, payload)
            except OSError as error:
                self._lose(f"peer {self.rank} was lost while sending: {_why(error)}")
                future.set_exception(self._error or _closed(self.rank))
                return
            # Written is sent, even if the peer has read it, ended and been noted as gone by now.
            if head.kind == DATA:
                self.traffic.sent_bytes += len(payload)
                self.traffic.sent_messages += 1
            future.set_result(None)

    def _write(self, head: Head, payload: memoryview) -> None:
        start = pack_head(head)
        if len(payload) <= _SMALL_BYTES:
            write(self._connection, memoryview(start + bytes(payload)), self._stopped)
            return
        write(self._connection, memoryview(start), self._stopped)
        write(self._connection, payload, self._stopped)

    def _stopped(self) -> bool:
        return self._error is not None

    def _receive_loop(self) -> None:
        try:
            while self._receive_one():
                pass
        except TimeoutError:
            self._lose(f"peer {self.rank} has been silent for {self._timeout_s:g} s")
        except (OSError, ValueError) as error:
            self._lose(f"peer {self.rank} {_why(error)}")
        except MemoryError:
            self._lose(f"peer {self.rank} sent a message that this machine has no memory for")

    def _receive_one(self) -> bool:
        head = read_head(self._connection)
        if head.kind == LEAVE:
            self._take_leave(head)
            return False
        if head.kind == DATA:
            while not self.mailbox.wait_for_room(self._timeout_s):
                pass
            slot = self.mailbox.open(head.tag, head.label, head.num_bytes)
            read_into(self._connection, slot.buffer)
            arrival = Arrival(head.sent_s - self._offset_s, self._clock())
            self.traffic.received_bytes += head.num_bytes
            self.traffic.received_messages += 1
            self.traffic.last_transfer_s = arrival.transfer_s
            self.mailbox.complete(slot, arrival)
        return True

    def _take_leave(self, head: Head) -> None:
        reason = bytearray(head.num_bytes)
        read_into(self._connection, memoryview(reason))
        if reason:
            self._lose(f"peer {self.rank} gave up: {reason.decode(errors='replace')}")
        else:
            self.fail(PeerError(f"peer {self.rank} has ended"))
        self.leave()

    def _lose(self, why: str) -> None:
        with self._lock:
            known = self._error is not None
        error = PeerError(why, hint="its cluster's agent and its log say why; the job restarts by itself")
        self.fail(error)
        if not known and not self._leaving:
            self._on_loss(error)


def _closed(rank: int) -> PeerError:
    return PeerError(f"the connection to peer {rank} was closed here")


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return f"sent what is no frame: {error}"

"""`SharedMemoryQueue`: messages in flight between a worker and its transport process, in shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from isthmus.comm.process.control_messages import (
    FAILED,
    RECEIVE,
    RECEIVE_ANY,
    SEND,
    ControlMessage,
    pack_ranks,
    unpack_error,
)
from isthmus.comm.process.send_window import OutgoingMessage, SendWindow
from isthmus.comm.process.transport_process_handle import TransportProcessHandle
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError

_SMALL_BYTES = 64 * 2**10


@dataclass(eq=False)
class _PendingReceive:
    offset: int
    into: memoryview
    future: Future[tuple[int, Arrival]] = field(default_factory=Future)


class SharedMemoryQueue:
    """The messages of one transport, to and from `peers`. Thread-safe.

    Sends use a bounded share of the memory per peer (`SendWindow`); each posted receive uses its own length.
    """

    def __init__(self, process: TransportProcessHandle, peers: Iterable[int]) -> None:
        self._process, self._arena = process, process.arena
        self.traffic = {rank: Traffic() for rank in peers}
        self._windows = {rank: SendWindow(self._transmit) for rank in self.traffic}
        self._in_flight: dict[int, OutgoingMessage | _PendingReceive] = {}
        self._numbers, self._lock = count(), threading.Lock()
        self._error: PeerError | None = None

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`; the future is done when the peer acknowledges it."""
        message = OutgoingMessage(next(self._numbers), peer, tag, label, payload)
        self._windows[peer].put(message)
        return message.future

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        received: Future[Arrival] = Future()

        def pass_on(done: Future[tuple[int, Arrival]]) -> None:
            error = done.exception()
            if error is None:
                received.set_result(done.result(0)[1])
            else:
                received.set_exception(error)

        self._post(RECEIVE, peer, tag, label, into).add_done_callback(pass_on)
        return received

    def receive_any(self, peers: Sequence[int], tag: int, label: str, into: memoryview) -> Future[tuple[int, Arrival]]:
        """Post a receive for the next message of `tag` from any of `peers`."""
        return self._post(RECEIVE_ANY, 0, tag, f"{pack_ranks(peers)}\n{label}", into)

    def _post(self, kind: int, peer: int, tag: int, text: str, into: memoryview) -> Future[tuple[int, Arrival]]:
        number, message = next(self._numbers), _PendingReceive(0, into)
        if self._register(number, message, len(into)):
            self._process.send(ControlMessage(kind, number, peer, tag, message.offset, len(into), text=text))
        return message.future

    def complete(self, reply: ControlMessage) -> None:
        """Complete the future of the message that the transport process reports as done or failed."""
        with self._lock:
            message = self._in_flight.pop(reply.number)
        if isinstance(message, OutgoingMessage):
            self._free(message.offset, len(message.payload))
            self._windows[message.peer].release(message)
        if reply.kind == FAILED:  # a failed receive keeps its slot: a connection may still write to it
            message.future.set_exception(unpack_error(reply.text))
        elif isinstance(message, OutgoingMessage):
            self.traffic[message.peer].sent_bytes += len(message.payload)
            self.traffic[message.peer].sent_messages += 1
            message.future.set_result(None)
        else:
            self._complete_receive(message, reply.peer, Arrival(*reply.times_s))

    def wait_until_transmitted(self, timeout_s: float) -> None:
        """Block until the transport process has every queued message, at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for window in self._windows.values():
            window.wait_until_transmitted(max(deadline_s - time.monotonic(), 0.0))

    def fail_waiting(self, error: PeerError) -> None:
        """Fail messages that still wait for window space, and all future sends."""
        for window in self._windows.values():
            window.fail(error)

    def fail_all(self, error: PeerError) -> None:
        """Fail all messages in flight and all future ones with the first error given."""
        with self._lock:
            self._error = error = self._error or error
            under_way = list(self._in_flight.values())
            self._in_flight.clear()
        self.fail_waiting(error)
        for message in under_way:
            message.future.set_exception(error)

    def _register(self, number: int, message: OutgoingMessage | _PendingReceive, num_bytes: int) -> bool:
        """Allocate a slot for `message`; if the queue has failed, fail it and return False."""
        with self._lock:
            over = self._error
            if over is None:
                message.offset = self._arena.allocate(num_bytes)
                self._in_flight[number] = message
        if over is not None:
            message.future.set_exception(over)
        return over is None

    def _transmit(self, message: OutgoingMessage) -> None:
        """Copy `message` into shared memory and send the command for it."""
        size = len(message.payload)
        if self._register(message.number, message, size):
            _copy(self._arena.view(message.offset, size), message.payload)
            place = (message.number, message.peer, message.tag, message.offset, size)
            self._process.send(ControlMessage(SEND, *place, text=message.label))

    def _complete_receive(self, message: _PendingReceive, peer: int, arrival: Arrival) -> None:
        size, traffic = len(message.into), self.traffic[peer]
        _copy(message.into, self._arena.view(message.offset, size))
        self._free(message.offset, size)
        traffic.received_bytes += size
        traffic.received_messages += 1
        traffic.last_transfer_s = arrival.transfer_s
        message.future.set_result((peer, arrival))

    def _free(self, offset: int, num_bytes: int) -> None:
        with self._lock:
            self._arena.free(offset, num_bytes)


def _copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes; large copies use NumPy, which releases the GIL."""
    if len(source) <= _SMALL_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))

"""`Crossing`: messages in flight between a worker and its transport process, in shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from isthmus.comm.process.control_messages import FAILED, RECEIVE, SEND, Word, unpacked_error
from isthmus.comm.process.launch import CarrierProcess
from isthmus.comm.process.send_window import Sending, Window
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError

_SMALL_BYTES = 64 * 2**10


@dataclass(eq=False)
class _Receiving:
    peer: int
    offset: int
    into: memoryview
    future: Future[Arrival] = field(default_factory=Future)


class Crossing:
    """The messages of one transport, to and from `peers`. Thread-safe.

    Sends use a bounded share of the memory per peer (`Window`); each posted receive uses its own length.
    """

    def __init__(self, process: CarrierProcess, peers: Iterable[int]) -> None:
        self._process, self._arena = process, process.arena
        self.traffic = {rank: Traffic() for rank in peers}
        self._windows = {rank: Window(self._pass_on) for rank in self.traffic}
        self._under_way: dict[int, Sending | _Receiving] = {}
        self._numbers, self._lock = count(), threading.Lock()
        self._over: PeerError | None = None

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`; the future is done when the peer acknowledges it."""
        message = Sending(next(self._numbers), peer, tag, label, payload)
        self._windows[peer].put(message)
        return message.future

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        number, message = next(self._numbers), _Receiving(peer, 0, into)
        if self._begin(number, message, len(into)):
            self._process.say(Word(RECEIVE, number, peer, tag, message.offset, len(into), text=label))
        return message.future

    def finish(self, word: Word) -> None:
        """Complete the future of the message that the transport process reports as done or failed."""
        with self._lock:
            message = self._under_way.pop(word.number)
        if isinstance(message, Sending):
            self._give_back(message.offset, len(message.payload))
            self._windows[message.peer].done(message)
        if word.kind == FAILED:  # a failed receive keeps its slot: a connection may still write to it
            message.future.set_exception(unpacked_error(word.text))
        elif isinstance(message, Sending):
            self.traffic[message.peer].sent_bytes += len(message.payload)
            self.traffic[message.peer].sent_messages += 1
            message.future.set_result(None)
        else:
            self._hand_over(message, Arrival(*word.times_s))

    def wait_until_passed_on(self, timeout_s: float) -> None:
        """Block until the transport process has every queued message, at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for window in self._windows.values():
            window.wait_until_passed_on(max(deadline_s - time.monotonic(), 0.0))

    def fail_waiting(self, error: PeerError) -> None:
        """Fail messages that still wait for window space, and all future sends."""
        for window in self._windows.values():
            window.fail(error)

    def fail_all(self, error: PeerError) -> None:
        """Fail all messages in flight and all future ones with the first error given."""
        with self._lock:
            self._over = error = self._over or error
            under_way = list(self._under_way.values())
            self._under_way.clear()
        self.fail_waiting(error)
        for message in under_way:
            message.future.set_exception(error)

    def _begin(self, number: int, message: Sending | _Receiving, num_bytes: int) -> bool:
        """Allocate a slot for `message`; if the queue has failed, fail it and return False."""
        with self._lock:
            over = self._over
            if over is None:
                message.offset = self._arena.take(num_bytes)
                self._under_way[number] = message
        if over is not None:
            message.future.set_exception(over)
        return over is None

    def _pass_on(self, message: Sending) -> None:
        """Copy `message` into shared memory and send the command for it."""
        size = len(message.payload)
        if self._begin(message.number, message, size):
            _copy(self._arena.view(message.offset, size), message.payload)
            place = (message.number, message.peer, message.tag, message.offset, size)
            self._process.say(Word(SEND, *place, text=message.label))

    def _hand_over(self, message: _Receiving, arrival: Arrival) -> None:
        size, traffic = len(message.into), self.traffic[message.peer]
        _copy(message.into, self._arena.view(message.offset, size))
        self._give_back(message.offset, size)
        traffic.received_bytes += size
        traffic.received_messages += 1
        traffic.last_transfer_s = arrival.transfer_s
        message.future.set_result(arrival)

    def _give_back(self, offset: int, num_bytes: int) -> None:
        with self._lock:
            self._arena.give_back(offset, num_bytes)


def _copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes; large copies use NumPy, which releases the GIL."""
    if len(source) <= _SMALL_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))

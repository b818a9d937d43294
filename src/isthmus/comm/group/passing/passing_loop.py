"""`PassingLoop`: a `PassingWorker` over a UDP socket to the switches and the transport to the other workers."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.comm.group.transport_messages import TransportMessages
from isthmus.core.errors import PeerError
from isthmus.core.messages.datagram import Datagram
from isthmus.strategies import Message
from isthmus.switch import Actions, Begin, FromSwitch, FromWorker, Lost, PassingPhase, PassingWorker, Timer
from isthmus.wan import UdpSocket

MessagesOf = Callable[[PassingPhase], TransportMessages]

_Arrived = tuple[int, PassingPhase, torch.Tensor, Future[Any]]


class PassingLoop:
    """Runs the sums of `worker` one after the other, in one thread.

    `switches` are addresses; packets of other senders are dropped. `leaders[w]` is the rank of worker `w` in the group.
    """

    def __init__(
        self, worker: PassingWorker, udp: UdpSocket, switches: Sequence[tuple[str, int]], leaders: Sequence[int]
    ) -> None:
        self.worker = worker
        self._udp, self._switches, self._leaders = udp, tuple(switches), tuple(leaders)
        self._place = {address: place for place, address in enumerate(self._switches)}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._arrived: SimpleQueue[_Arrived] = SimpleQueue()

    def sum(self, values: NDArray[np.float32], messages_of: MessagesOf, limit_s: float) -> NDArray[np.float32]:
        """Return the sums of `values` [N] over the workers; raises as `PassingWorker` says."""
        worker = self.worker
        self._arrived = SimpleQueue()
        worker.timeout_s = limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._udp.fileno(), selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            wake_s = self._act(worker.handle(Begin(values), time.monotonic()), messages_of)
            while worker.running and wake_s is not None:
                ready = {key.fd for key, _ in selector.select(min(max(wake_s - time.monotonic(), 0.0), limit_s))}
                if not ready:
                    wake_s = self._act(worker.handle(Timer(), time.monotonic()), messages_of)
                if self._udp.fileno() in ready:
                    wake_s = self._read_packets(messages_of, wake_s)
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    wake_s = self._read_messages(messages_of, wake_s)
        if worker.error is not None:
            raise worker.error
        if worker.result is None:
            raise PeerError("the sum has ended without a result")
        return worker.result

    def close(self) -> None:
        """Free the slots, and close the socket."""
        for place, data, size in self.worker.leave():
            self._udp.send(Datagram(self._switches[place], data, size))
        self._udp.close()
        os.close(self._wake)

    def _read_packets(self, messages_of: MessagesOf, wake_s: float | None) -> float | None:
        for one in self._udp.receive():
            place = self._place.get(one.address)
            if place is not None:
                event = FromSwitch(place, one.data, one.packet_bytes)
                wake_s = self._act(self.worker.handle(event, time.monotonic()), messages_of)
        return wake_s

    def _read_messages(self, messages_of: MessagesOf, wake_s: float | None) -> float | None:
        while not self._arrived.empty():
            peer, phase, buffer, future = self._arrived.get_nowait()
            error = future.exception(0)
            event: FromWorker | Lost
            if error is None:
                event = FromWorker(peer, self.worker.number, phase, buffer.numpy().tobytes())
            else:
                event = Lost(peer, error.message if isinstance(error, PeerError) else str(error))
            wake_s = self._act(self.worker.handle(event, time.monotonic()), messages_of)
        return wake_s

    def _act(self, actions: Actions, messages_of: MessagesOf) -> float | None:
        """Send packets and messages, post receives; return when the next timer is due."""
        for place, data, size in actions.packets:
            self._udp.send(Datagram(self._switches[place], data, size))
        for peer, phase, num_bytes in actions.expected:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            future = messages_of(phase).receive(Message(self._leaders[peer], 0), buffer)
            future.add_done_callback(partial(self._take, self._arrived, peer, phase, buffer))
        for peer, phase, payload in actions.messages:
            tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            messages_of(phase).send(Message(self._leaders[peer], 0), tensor)
        return actions.wake_s

    def _take(
        self, queue: SimpleQueue[_Arrived], peer: int, phase: PassingPhase, buffer: torch.Tensor, future: Future[Any]
    ) -> None:
        queue.put((peer, phase, buffer, future))
        with suppress(OSError, ValueError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

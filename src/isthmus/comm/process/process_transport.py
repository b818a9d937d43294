"""`ProcessTransport`: a transport whose connections live in a separate process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict

from isthmus.comm.process.control_messages import (
    ARRIVED,
    BEGIN,
    CLOSE,
    CLOSED,
    FAILED,
    LINK,
    LOST,
    MET,
    SENT,
    Word,
    unpacked_error,
    unpacked_loss,
    unpacked_ranks,
)
from isthmus.comm.process.launch import END_S, CarrierProcess
from isthmus.comm.process.shared_memory_queue import Crossing
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.reconnect import OnLink
from isthmus.comm.tcp.shutdown import Ending
from isthmus.comm.tcp.tcp_transport import LINGER_S
from isthmus.comm.tcp.wire_format import Greeting
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError, RestartError


class ProcessTransport:
    """A `Transport` whose connections belong to the process `isthmus.comm.process.transport_process`.

    Payloads cross shared memory, one copy per direction. The constructor returns when all ranks are
    connected and raises what `connect` raises. If the process is killed, the transport fails with
    `RestartError`: the ranks reconnect with a new process.
    """

    def __init__(
        self,
        greeting: Greeting,
        endpoints: Sequence[Endpoint],
        listener: socket.socket,
        timeout_s: float,
        *,
        heartbeat_s: float = 2.0,
        peer_timeout_s: float = 30.0,
        on_loss: Callable[[PeerError], None] = lambda _: None,
        on_link: OnLink = lambda _rank, _why, _lasted_s: None,
    ) -> None:
        self.rank, self.size = greeting.rank, greeting.size
        self._on_loss, self._on_link, self._peer_timeout_s = on_loss, on_link, peer_timeout_s
        self._ending, self._ended = Ending(), threading.Event()
        self._stragglers = [rank for rank in range(self.size) if rank != self.rank]
        self._process = CarrierProcess(listener)
        self._crossing = Crossing(self._process, self._stragglers)
        self._reader = threading.Thread(target=self._listen, name="isthmus-carried", daemon=True)
        try:
            self._meet(
                greeting=asdict(greeting),
                endpoints=[asdict(one) for one in endpoints],
                timeout_s=timeout_s,
                heartbeat_s=heartbeat_s,
                peer_timeout_s=peer_timeout_s,
            )
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._process.close()
            raise
        self._reader.start()

    @property
    def process_id(self) -> int:
        """Id of the transport process."""
        return self._process.pid

    @property
    def shared_bytes(self) -> int:
        """Physical shared memory in use, in bytes."""
        return self._process.arena.held_bytes

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`; the future is done when the peer acknowledges it."""
        return self._crossing.send(peer, tag, label, payload)

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        return self._crossing.receive(peer, tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer: acknowledged sends and completed receives."""
        return self._crossing.traffic

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is intact."""
        return self._ending.loss(wait_s)

    def when_lost(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when a loss breaks the transport or it is aborted."""
        self._ending.when_over(wake)

    def close(self, reason: str = "") -> None:
        """Send all queued messages, exchange CLOSE and end the process.

        Waits for an active peer until it sends CLOSE too, for a silent one at most `LINGER_S`.
        """
        if self._ending.close() is None:
            return
        if not (reason or self._ending.lost):
            self._crossing.wait_until_passed_on(LINGER_S)
        self._process.say(Word(CLOSE, text=reason))
        self._ended.wait(END_S + self._peer_timeout_s)
        self._end()

    def stragglers(self) -> list[int]:
        """Return, after `close`, the ranks that sent no CLOSE."""
        return self._stragglers

    def abandon(self) -> None:
        """Kill the process and so all connections; a new transport may reconnect the ranks."""
        wakes = self._ending.close()
        if wakes is None:
            return
        self._process.kill()
        self._end()
        for wake in wakes:
            wake()

    def _end(self) -> None:
        """Wait for the process, fail unfinished messages and release what was shared."""
        self._process.wait()
        self._reader.join()
        self._crossing.fail_all(PeerError(f"rank {self.rank} closed its transport"))
        self._process.close()

    def _meet(self, **told: object) -> None:
        self._process.say(Word(BEGIN, text=json.dumps(told)))
        answer = self._process.line.next()
        if answer is None:
            raise self._death()
        if answer.kind != MET:
            raise unpacked_error(answer.text)

    def _listen(self) -> None:
        for message in self._process.line.hear():
            if message.kind in (SENT, ARRIVED, FAILED):
                self._crossing.finish(message)
            elif message.kind == LINK:
                self._on_link(message.peer, message.text, None if message.text else message.times_s[0])
            elif message.kind == LOST:
                self._lose(unpacked_loss(message.text))
            elif message.kind == CLOSED:
                self._stragglers = unpacked_ranks(message.text)
                self._ended.set()
        if not self._ending.closed:
            error = self._death()
            self._crossing.fail_all(error)
            self._lose(error)
        self._ended.set()

    def _death(self) -> PeerError:
        """Return the error for the exited process: `RestartError` if killed, since a new one replaces it."""
        self._process.wait()
        why = f"the transport process of rank {self.rank} {self._process.how_it_ended()}"
        if self._process.was_killed:
            return RestartError(why, hint="a new process starts and the ranks reconnect")
        return PeerError(why, hint="see the worker's log, or use transport: thread")

    def _lose(self, error: PeerError) -> None:
        wakes = self._ending.lose(error)
        if wakes is None:
            return
        self._crossing.fail_waiting(error)
        for wake in wakes:
            wake()
        self._on_loss(error)

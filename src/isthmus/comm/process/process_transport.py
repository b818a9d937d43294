"""`ProcessTransport`: a transport whose connections live in a separate process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.process.control_messages import (
    ARRIVED,
    CLOSE,
    CLOSED,
    CONNECT,
    CONNECTED,
    FAILED,
    LINK,
    LOST,
    REFUSED,
    SENT,
    ControlMessage,
    unpack_error,
    unpack_loss,
    unpack_ranks,
)
from isthmus.comm.process.shared_memory_queue import SharedMemoryQueue
from isthmus.comm.process.transport_process_handle import EXIT_TIMEOUT_S, TransportProcessHandle
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.reconnect import OnLink
from isthmus.comm.tcp.shutdown import BreakableTransport
from isthmus.comm.tcp.tcp_transport import LINGER_S
from isthmus.comm.transport.receive_matching import MAX_MESSAGE_BYTES
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError, RestartError
from isthmus.core.process.steady_clock import ANCHOR_S


class ProcessTransport(BreakableTransport):
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
        keys: LinkKeys | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(on_loss)
        self.rank, self.size = greeting.rank, greeting.size
        self._on_link, self._on_refused, self._peer_timeout_s = on_link, on_refused, peer_timeout_s
        self._process_closed = threading.Event()
        self._unclosed_peers = [rank for rank in range(self.size) if rank != self.rank]
        self._process = TransportProcessHandle(listener)
        self._queue = SharedMemoryQueue(self._process, self._unclosed_peers)
        self._reader = threading.Thread(target=self._receive_loop, name="isthmus-carried", daemon=True)
        try:
            self._connect(
                greeting=asdict(greeting),
                endpoints=[asdict(one) for one in endpoints],
                timeout_s=timeout_s,
                heartbeat_s=heartbeat_s,
                peer_timeout_s=peer_timeout_s,
                clock_anchor_s=ANCHOR_S,
                keys=keys and keys.as_dict(),
                max_message_bytes=max_message_bytes,
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
        return self._process.arena.allocated_bytes

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`; the future is done when the peer acknowledges it."""
        return self._queue.send(peer, tag, label, payload)

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        return self._queue.receive(peer, tag, label, into)

    def receive_any(self, peers: Sequence[int], tag: int, label: str, into: memoryview) -> Future[tuple[int, Arrival]]:
        """Post a receive for the next message of `tag` from any of `peers`."""
        return self._queue.receive_any(peers, tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer: acknowledged sends and completed receives."""
        return self._queue.traffic

    def close(self, reason: str = "") -> None:
        """Send all queued messages, exchange CLOSE and end the process.

        Waits for an active peer until it sends CLOSE too, for a silent one at most `LINGER_S`.
        """
        if self._shutdown.mark_closed() is None:
            return
        if not (reason or self._shutdown.lost):
            self._queue.wait_until_transmitted(LINGER_S)
        self._process.send(ControlMessage(CLOSE, text=reason))
        self._process_closed.wait(EXIT_TIMEOUT_S + self._peer_timeout_s)
        self._release()

    def unclosed_peers(self) -> list[int]:
        """Return, after `close`, the ranks that sent no CLOSE."""
        return self._unclosed_peers

    def abort(self) -> None:
        """Kill the process and so all connections; a new transport may reconnect the ranks."""
        wakes = self._shutdown.mark_closed()
        if wakes is None:
            return
        self._process.kill()
        self._release()
        for wake in wakes:
            wake()

    def _release(self) -> None:
        """Wait for the process, fail unfinished messages and release what was shared."""
        self._process.wait()
        self._reader.join()
        self._queue.fail_all(PeerError(f"rank {self.rank} closed its transport"))
        self._process.close()

    def _connect(self, **settings: object) -> None:
        self._process.send(ControlMessage(CONNECT, text=json.dumps(settings)))
        answer = self._process.channel.receive()
        while answer is not None and answer.kind == REFUSED:
            self._on_refused(answer.text)
            answer = self._process.channel.receive()
        if answer is None:
            raise self._exit_error()
        if answer.kind != CONNECTED:
            raise unpack_error(answer.text)

    def _receive_loop(self) -> None:
        for message in self._process.channel.receive_all():
            if message.kind in (SENT, ARRIVED, FAILED):
                self._queue.complete(message)
            elif message.kind == LINK:
                self._on_link(message.peer, message.text, None if message.text else message.times_s[0])
            elif message.kind == REFUSED:
                self._on_refused(message.text)
            elif message.kind == LOST:
                self._on_peer_lost(unpack_loss(message.text))
            elif message.kind == CLOSED:
                self._unclosed_peers = unpack_ranks(message.text)
                self._process_closed.set()
        if not self._shutdown.closed:
            error = self._exit_error()
            self._queue.fail_all(error)
            self._on_peer_lost(error)
        self._process_closed.set()

    def _exit_error(self) -> PeerError:
        """Return the error for the exited process: `RestartError` if killed, since a new one replaces it."""
        self._process.wait()
        why = f"the transport process of rank {self.rank} {self._process.exit_description()}"
        if self._process.was_killed:
            return RestartError(why, hint="a new process starts and the ranks reconnect")
        return PeerError(why, hint="see the worker's log, or use transport: thread")

    def _fail_messages(self, error: PeerError) -> None:
        self._queue.fail_waiting(error)

"""`connect_ranks`: connect to the other ranks of a run, or some: dial the lower ranks, accept the higher ones."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.comm.channel.channel import Channel
from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.rdma.upgrade_channel import UpgradeError
from isthmus.comm.tcp.endpoint import DIAL_TIMEOUT_S, Endpoint, dial_rank, is_transient, set_socket_options
from isthmus.comm.tcp.entrance import MAX_WAITING, Entrance
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.handshake import Handshake, make_handshake
from isthmus.comm.tcp.reconnect import GreetedChannel
from isthmus.comm.tcp.wire_format import CLOSE, MAX_REASON_BYTES, FrameHeader, frame_parts
from isthmus.core.errors import PeerError, RestartError, UnavailableError
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.wan import dial

ConnectionKey = tuple[int, int]
"""A peer's rank and the number of the connection to it."""

MAX_FAILED_UPGRADES = 3
"""Attempts to go on by RDMA on one connection after which a rank gives up, whether it dials or answers."""

_POLL_S = 0.2
_LISTEN_CHECK_S = 1.0
_REASON_TIMEOUT_S = 1.0


def connect_ranks(
    greeting: Greeting,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout_s: float,
    clock: Callable[[], float] = steady_time_s,
    keys: LinkKeys | None = None,
    on_refused: Callable[[str], None] = lambda _: None,
    neighbours: Collection[int] | None = None,
) -> dict[int, list[GreetedChannel]]:
    """Connect to `neighbours` (default: every other rank); return the connections by rank, ordered by their number.

    `endpoints[r]` is where rank `r` listens, `listener` this rank's own socket. The higher rank of a pair
    dials; it retries a peer that ends before answering, since that peer may be replaced. Without `keys`, connections
    are in the clear. Invalid greetings and duplicate ranks are rejected, and `on_refused` gets their addresses; a
    silent connection delays no other. Raises `PeerError`
    naming the rank that refused, was unreachable or missed `timeout_s`, which it tells the ranks that it is connected
    to; `RestartError` for a later incarnation; `ProtocolError` for another format version.
    """
    handshake = make_handshake(greeting, keys, clock, [one.rdma for one in endpoints])
    others = {rank for rank in range(greeting.size) if rank != greeting.rank}
    wanted = sorted(others if neighbours is None else others.intersection(neighbours))
    rendezvous = _Rendezvous(greeting, endpoints, wanted, time.monotonic() + timeout_s, handshake, on_refused)
    lower = [(rank, number) for rank in wanted if rank < greeting.rank for number in range(endpoints[rank].lanes)]
    with ThreadPoolExecutor(len(lower) + 2, thread_name_prefix="isthmus-connect") as pool:
        tasks = [pool.submit(rendezvous.accept, listener), pool.submit(rendezvous.check_listening)]
        tasks += [pool.submit(rendezvous.dial, *one) for one in lower]
        for task in tasks:
            task.add_done_callback(rendezvous.on_task_done)
    if rendezvous.errors:
        error = rendezvous.decisive_error()
        for connection, _ in rendezvous.connections.values():
            _close_because(connection, error)
        raise error
    return {rank: [rendezvous.connections[rank, number] for number in range(endpoints[rank].lanes)] for rank in wanted}


@dataclass
class _Rendezvous:
    """One rank's side of the rendezvous; the first error stops all of it."""

    greeting: Greeting
    endpoints: Sequence[Endpoint]
    wanted: Sequence[int]
    deadline_s: float
    handshake: Handshake
    on_refused: Callable[[str], None]
    connections: dict[ConnectionKey, GreetedChannel] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    all_accepted: threading.Event = field(default_factory=threading.Event)
    claimed: set[ConnectionKey] = field(default_factory=set)
    failed_upgrades: defaultdict[ConnectionKey, list[UpgradeError]] = field(default_factory=lambda: defaultdict(list))
    dialled: list[socket.socket] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def remaining_s(self) -> float:
        return max(self.deadline_s - time.monotonic(), 0.01)

    def on_task_done(self, task: Future[None]) -> None:
        error = task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record `error`, stop accepting and shut down the sockets that are being dialled."""
        self.errors.append(error)
        self.stopped.set()
        self.all_accepted.set()
        connected = [channel.socket for channel, _ in list(self.connections.values())]
        with self.lock:
            dialling = [sock for sock in self.dialled if sock not in connected]
        for sock in dialling:
            _shut_down(sock)

    def decisive_error(self) -> BaseException:
        """Return the error to raise: the `RestartError` of the latest incarnation, else the first error."""
        newer = [error for error in self.errors if isinstance(error, RestartError)]
        return max(newer, key=lambda error: error.incarnation) if newer else self.errors[0]

    def dial(self, rank: int, number: int) -> None:
        """Dial and greet a lower rank; retry while its route starts or its process is replaced.

        Ends with the `UpgradeError` if it was one `MAX_FAILED_UPGRADES` times, or when time is over.
        """
        endpoint, failed_upgrades = self.endpoints[rank], self.failed_upgrades[rank, number]
        while True:
            try:
                found = dial_rank(self.handshake, rank, number, endpoint, self.remaining_s, self._on_dialled)
                break
            except UnavailableError as error:
                if isinstance(error, PeerError) and not is_transient(error):
                    raise
                if isinstance(error, UpgradeError):
                    failed_upgrades.append(error)
                is_final = len(failed_upgrades) == MAX_FAILED_UPGRADES
                if is_final or self.stopped.wait(_POLL_S) or self.remaining_s <= _POLL_S:
                    if failed_upgrades:
                        raise failed_upgrades[-1] from None
                    raise
        self.connections[rank, number] = found

    def _on_dialled(self, sock: socket.socket) -> None:
        with self.lock:
            self.dialled.append(sock)
        if self.stopped.is_set():
            _shut_down(sock)

    def accept(self, listener: socket.socket) -> None:
        """Accept connections until all higher ranks are connected."""
        expected = self._expected_keys()
        entrance = Entrance(
            listener,
            self.handshake,
            self._admit,
            claim=self._claim,
            unclaim=self._unclaim,
            on_restart=self.fail,
            on_refused=self.on_refused,
            max_waiting=MAX_WAITING + len(expected),
        )
        try:
            while missing := expected - self.connections.keys():
                if self.stopped.is_set():
                    return
                if self.remaining_s <= _POLL_S:
                    ranks = ", ".join(map(str, sorted({rank for rank, _ in missing})))
                    gone = PeerError(f"rank {self.greeting.rank}: rank {ranks} never connected")
                    raise self._with_upgrade(gone, {rank for rank, _ in missing})
                entrance.poll(_POLL_S)
            self.all_accepted.set()
        finally:
            entrance.close()

    def check_listening(self) -> None:
        """Check periodically that the missing higher ranks still listen; raise `PeerError` if one is gone."""
        while not self.all_accepted.wait(_LISTEN_CHECK_S):
            for rank in sorted({rank for rank, _ in self._expected_keys() - self.connections.keys()}):
                endpoint = self.endpoints[rank]
                try:
                    dial((endpoint.host, endpoint.port), endpoint.route, min(DIAL_TIMEOUT_S, self.remaining_s)).close()
                except UnavailableError as error:
                    if isinstance(error, PeerError) and not is_transient(error):
                        gone = PeerError(f"rank {rank}: {error.message}", hint=error.hint)
                        raise self._with_upgrade(gone, {rank}) from error

    def _with_upgrade(self, error: PeerError, ranks: Collection[int]) -> PeerError:
        """Return `error`, with why a connection to one of `ranks` did not go on by RDMA, if one did not."""
        failed = [
            why for (rank, _), failures in sorted(self.failed_upgrades.items()) if rank in ranks for why in failures
        ]
        return PeerError(f"{error.message}; {failed[-1].message}", hint=failed[-1].hint) if failed else error

    def _expected_keys(self) -> set[ConnectionKey]:
        higher = [rank for rank in self.wanted if rank > self.greeting.rank]
        return {(rank, number) for rank in higher for number in range(self.endpoints[rank].lanes)}

    def _claim(self, rank: int, number: int) -> bool:
        if (rank, number) not in self._expected_keys():
            return False
        with self.lock:
            known = (rank, number) in self.claimed
            self.claimed.add((rank, number))
            return not known

    def _unclaim(self, rank: int, number: int, why: Exception) -> None:
        self.claimed.discard((rank, number))
        if isinstance(why, UpgradeError):
            self.failed_upgrades[rank, number].append(why)
            if len(self.failed_upgrades[rank, number]) == MAX_FAILED_UPGRADES:
                self.fail(why)

    def _admit(self, rank: int, number: int, greeted: GreetedChannel) -> bool:
        set_socket_options(greeted[0].socket, self.endpoints[rank].congestion_control)
        self.connections[rank, number] = greeted
        return True


def _close_because(connection: Channel, error: BaseException) -> None:
    """Close `connection`; unless ranks are to meet again, its peer learns which `error` ended the meeting."""
    if isinstance(error, PeerError) and not isinstance(error, RestartError):
        reason = error.message.encode()[:MAX_REASON_BYTES]
        header = FrameHeader(CLOSE, message_bytes=len(reason), payload_bytes=len(reason))
        connection.socket.settimeout(_REASON_TIMEOUT_S)
        with suppress(OSError):
            connection.write(frame_parts(header, reason), lambda: True)
    connection.close()


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

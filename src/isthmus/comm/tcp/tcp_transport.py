"""`TcpTransport`: TCP between the workers that exchange messages, with several connections between clusters."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.meeting.loss_report import pack_loss, unpack_loss
from isthmus.comm.meeting.rank_tree import TreePlace
from isthmus.comm.meeting.run_agreement import Notice, RunAgreement
from isthmus.comm.tcp.acceptor import Acceptor
from isthmus.comm.tcp.endpoint import Endpoint, dial_rank, is_transient, set_socket_options
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.handshake import make_handshake
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.reconnect import GreetedChannel, OnLink
from isthmus.comm.tcp.shutdown import BreakableTransport
from isthmus.comm.transport.receive_any import receive_any
from isthmus.comm.transport.receive_matching import MAX_MESSAGE_BYTES
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError, RestartError, UnavailableError
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.wan import dial

LINGER_S = 5.0
"""How long an orderly close waits for queued messages and silent peers; a failing one waits a fifth."""

REDIAL_TIMEOUT_S = 2.0
"""Longest time for one attempt to reopen a connection."""

FIRST_DIAL_TIMEOUT_S = 10.0
"""Longest time for one attempt to open a link: many ranks may dial at once, on a busy machine."""


MAX_FIRST_DIALS = 16
"""Links that a rank opens at a time: one that exchanges messages with all others would answer none of them in time."""


class TcpTransport(BreakableTransport):
    """A `Transport` over one or several connections per pair of ranks.

    `greeted_channels` are those that `connect_ranks` made to `endpoints`, with the same `keys`: to every other rank, or
    to the neighbours of `place` in the tree of ranks. A link to another rank is dialled at its first send or receive.
    `listener` stays open for links that others dial until the transport is closed; `on_refused` gets the address of
    each caller that is turned away. `max_message_bytes` bounds a message that arrives before its receive.
    """

    def __init__(
        self,
        greeting: Greeting,
        endpoints: Sequence[Endpoint],
        greeted_channels: Mapping[int, Sequence[GreetedChannel]],
        listener: socket.socket,
        *,
        heartbeat_s: float = 2.0,
        peer_timeout_s: float = 30.0,
        on_loss: Callable[[PeerError], None] = lambda _: None,
        on_link: OnLink = lambda _rank, _why, _lasted_s: None,
        linger_s: float = LINGER_S,
        peer_type: type[Peer] = Peer,
        clock: Callable[[], float] = steady_time_s,
        keys: LinkKeys | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        on_refused: Callable[[str], None] = lambda _: None,
        place: TreePlace | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(lambda error: on_loss(error) if self._agreement.has_met else None)
        self.rank, self.size, self.incarnation = greeting.rank, greeting.size, greeting.incarnation
        self._handshake = make_handshake(greeting, keys, clock, [one.rdma for one in endpoints])
        self._endpoints, self._linger_s, self._peer_timeout_s = endpoints, linger_s, peer_timeout_s
        self._make_peer = partial(
            peer_type,
            heartbeat_s=heartbeat_s,
            timeout_s=peer_timeout_s,
            on_link=on_link,
            redial=self._redial,
            clock=clock,
            max_message_bytes=max_message_bytes,
            on_notice=self._on_notice,
            on_peer_closed=self._on_peer_closed,
            is_joining=lambda: not self._agreement.has_met,
            jitter=jitter,
        )
        self._lock = threading.Lock()
        self._dialling: set[tuple[int, int]] = set()
        self._first_dials = threading.BoundedSemaphore(MAX_FIRST_DIALS)
        self._peers: dict[int, Peer] = {}
        # Set when all ranks have met, or a loss has broken the transport.
        self._met_or_lost = threading.Event()
        # Set when an orderly close need not wait any more for the answer of all ranks.
        self._end_settled = threading.Event()
        self._is_orderly = False
        self._agreement: RunAgreement = RunAgreement(place, self._notify)
        for rank, channels in greeted_channels.items():
            self._add_peer(rank, channels)
        for peer in list(self._peers.values()):
            peer.start()
        claim, refused = self._may_take, on_refused
        self._acceptor = Acceptor(listener, self._handshake, claim, self._admit, self._on_newer_incarnation, refused)
        self._agreement.meet()
        self._wake_waiters()
        self.add_loss_callback(self._met_or_lost.set)

    def wait_until_met(self, timeout_s: float) -> bool:
        """Wait until every rank is connected to its neighbours; return False after `timeout_s` or a loss."""
        self._met_or_lost.wait(timeout_s)
        return self._agreement.has_met and self.loss() is None

    @property
    def not_met(self) -> tuple[int, ...]:
        """The neighbours behind which a rank is missing, as far as this rank knows."""
        return self._agreement.not_met

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`; the future is done when the peer acknowledges it."""
        return self._linked_peer(peer).send(tag, label, payload)

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        return self._linked_peer(peer).receive(tag, label, into)

    def receive_any(self, peers: Sequence[int], tag: int, label: str, into: memoryview) -> Future[tuple[int, Arrival]]:
        """Post a receive for the next message of `tag` from any of `peers`, without dialling them."""
        return receive_any([self._known_peer(peer).matcher for peer in peers], tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per connected peer."""
        return {rank: peer.traffic for rank, peer in self._peers.items() if peer.is_linked}

    def close(self, reason: str = "") -> None:
        """Send all queued messages, exchange CLOSE and stop all threads.

        An orderly close first lets every rank answer, over the tree. Waits for an active peer until it sends CLOSE too,
        for a silent one at most `linger_s`.
        """
        if self._shutdown.mark_closed() is None:
            return
        self._is_orderly = not (reason or self._shutdown.lost)
        linger_s, silence_s = (self._linger_s, self._linger_s) if self._is_orderly else (self._linger_s / 5, 0.0)
        if self._is_orderly:
            self._wait_for_end()
        deadline_s = time.monotonic() + linger_s
        for peer in list(self._peers.values()):
            peer.close(reason, max(deadline_s - time.monotonic(), 0.0))
        for peer in list(self._peers.values()):
            peer.join(max(deadline_s - time.monotonic(), 0.0), silence_s)
        self._acceptor.close()
        for peer in list(self._peers.values()):  # one that has dialled meanwhile
            peer.join(max(deadline_s - time.monotonic(), 0.0))

    def unclosed_peers(self) -> list[int]:
        """Return, after `close`, the ranks that sent no CLOSE, or sent it without an answer of all behind them."""
        silent = [rank for rank, peer in self._peers.items() if peer.is_linked and not peer.has_closed]
        waited_for = self._agreement.not_ended if self._is_orderly else ()
        return sorted({*silent, *(rank for rank in waited_for if not self._peers[rank].has_failed)})

    def abort(self) -> None:
        """Break all connections without CLOSE; a new transport may reconnect the ranks."""
        wakes = self._shutdown.mark_closed()
        if wakes is None:
            return
        for peer in list(self._peers.values()):
            peer.begin_abort()
        for peer in list(self._peers.values()):
            peer.abort()
        for wake in wakes:
            wake()
        self._acceptor.close()
        for peer in list(self._peers.values()):
            peer.abort()

    def _linked_peer(self, rank: int) -> Peer:
        """Return a peer that is connected or dialled."""
        peer = self._known_peer(rank)
        peer.open()
        return peer

    def _known_peer(self, rank: int) -> Peer:
        """Return a peer, which may have no connection yet."""
        peer = self._peers.get(rank)
        if peer is None:
            if rank == self.rank or not 0 <= rank < self.size:
                raise PeerError(f"rank {rank} is no peer of rank {self.rank} among {self.size} ranks")
            peer = self._add_peer(rank)
            if self._shutdown.closed:
                peer.fail(PeerError(f"this rank closed the connection to peer {rank}"))
        return peer

    def _add_peer(self, rank: int, channels: Sequence[GreetedChannel] = ()) -> Peer:
        """Return the peer of `rank`, a new one if there is none; after a loss it fails at once."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is None:
                lanes, on_loss = self._endpoints[rank].lanes, partial(self._on_loss_of, rank)
                peer = self._make_peer(rank, channels, num_connections=lanes, on_loss=on_loss)
                self._peers = self._peers | {rank: peer}
        if (lost := self._shutdown.lost) is not None:
            peer.fail(lost)
        return peer

    def _may_take(self, rank: int, number: int) -> bool:
        """Return whether `rank` may dial its connection `number`: if both ranks dial, the higher one does."""
        return 0 <= number < self._endpoints[rank].lanes and (rank, number) not in self._dialling

    def _admit(self, rank: int, number: int, greeted: GreetedChannel) -> bool:
        set_socket_options(greeted[0].socket, self._endpoints[rank].congestion_control)
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._add_peer(rank)
            if self._shutdown.closed:
                peer.close("", 0.0)
        return peer.attach(number, greeted)

    def _redial(self, rank: int, number: int) -> GreetedChannel | None:
        """Open a connection; the dialled side of one that broke only checks that the peer listens and returns None."""
        endpoint, is_first = self._endpoints[rank], not self._peers[rank].has_connected(number)
        try:
            if is_first:
                return self._open_first(rank, number, endpoint)
            if rank < self.rank:
                return self._dial(rank, number, endpoint, REDIAL_TIMEOUT_S)
            dial((endpoint.host, endpoint.port), endpoint.route, REDIAL_TIMEOUT_S).close()
        except PeerError as error:
            if is_transient(error):
                raise UnavailableError(error.message, hint=error.hint) from error
            raise
        return None

    def _open_first(self, rank: int, number: int, endpoint: Endpoint) -> GreetedChannel:
        """Open a link, at most `MAX_FIRST_DIALS` at a time; `UnavailableError` if no other one ends in time."""
        if not self._first_dials.acquire(timeout=FIRST_DIAL_TIMEOUT_S):
            raise UnavailableError(f"{MAX_FIRST_DIALS} links are being opened before that to rank {rank}")
        try:
            return self._dial(rank, number, endpoint, FIRST_DIAL_TIMEOUT_S)
        finally:
            self._first_dials.release()

    def _dial(self, rank: int, number: int, endpoint: Endpoint, timeout_s: float) -> GreetedChannel:
        """Dial `rank`; a lower one that dials this rank meanwhile has to wait."""
        if rank > self.rank:
            return dial_rank(self._handshake, rank, number, endpoint, timeout_s)
        with self._lock:
            self._dialling.add((rank, number))
        try:
            return dial_rank(self._handshake, rank, number, endpoint, timeout_s)
        finally:
            with self._lock:
                self._dialling.discard((rank, number))

    def _notify(self, rank: int, notice: Notice) -> None:
        self._peers[rank].notify(notice)

    def _on_notice(self, rank: int, tag: int, text: bytes) -> None:
        """Handle what the peer `rank` tells about the run."""
        notice = Notice(tag)
        if notice is not Notice.LOST:
            self._agreement.receive(rank, notice)
            self._wake_waiters()
        elif self._shutdown.closed:
            self._end_settled.set()
        else:
            self._on_peer_lost(unpack_loss(text))

    def _wake_waiters(self) -> None:
        if self._agreement.has_met:
            self._met_or_lost.set()
        if self._agreement.has_ended:
            self._end_settled.set()

    def _on_peer_closed(self, rank: int) -> None:
        """Handle a CLOSE: if that peer had to answer for others, it does not any more."""
        if rank in self._agreement.not_ended:
            self._end_settled.set()

    def _wait_for_end(self) -> None:
        """Wait until all ranks have answered, or cannot: while those waited for are active, up to the peer timeout."""
        self._agreement.end()
        if self._agreement.has_ended:
            return
        start_s = time.monotonic()
        while not self._end_settled.is_set() and (missing := self._agreement.not_ended):
            heard_s = min(self._peers[rank].last_activity_s for rank in missing)
            left_s = max(start_s, min(heard_s, start_s + self._peer_timeout_s)) + self._linger_s - time.monotonic()
            if left_s <= 0:
                return
            self._end_settled.wait(left_s)

    def _on_loss_of(self, rank: int, error: PeerError) -> None:
        """Handle a lost peer: as the end of the run's agreement if this rank closes, else as a loss for all ranks."""
        peer = self._peers[rank]
        if self._shutdown.closed:
            self._end_settled.set()
        elif isinstance(error, RestartError) or not self._agreement.has_ended or peer.has_connected_once:
            self._on_peer_lost(error)

    def _on_newer_incarnation(self, error: RestartError) -> None:
        """Handle a restarted rank: as a loss, or, while closing, by not waiting for its CLOSE."""
        if self._shutdown.closed:
            self._end_settled.set()
            for peer in list(self._peers.values()):
                peer.stop_waiting()
        else:
            self._on_peer_lost(error)

    def _fail_messages(self, error: PeerError) -> None:
        report = pack_loss(error)
        for peer in list(self._peers.values()):
            if peer.has_connected_once:
                peer.notify(Notice.LOST, report)
            peer.fail(error)

"""`TcpTransport`: TCP between every pair of workers, with several connections between clusters."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.tcp.acceptor import Acceptor
from isthmus.comm.tcp.endpoint import Endpoint, dial_rank, is_transient, set_socket_options
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.handshake import make_handshake
from isthmus.comm.tcp.peer import Peer
from isthmus.comm.tcp.reconnect import GreetedChannel, OnLink
from isthmus.comm.tcp.shutdown import BreakableTransport
from isthmus.comm.transport.receive_matching import MAX_MESSAGE_BYTES
from isthmus.comm.transport.transport import Arrival, Traffic
from isthmus.core.errors import PeerError, RestartError, UnavailableError
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.wan import dial

LINGER_S = 5.0
"""How long an orderly close waits for queued messages and silent peers; a failing one waits a fifth."""

REDIAL_TIMEOUT_S = 2.0
"""Longest time for one attempt to reopen a connection."""


class TcpTransport(BreakableTransport):
    """A `Transport` over one or several connections per pair of ranks; the higher rank of a pair dials.

    `greeted_channels` are those that `connect` made to `endpoints`, with the same `keys`. `listener` stays open for
    reconnects until the transport is closed; `on_refused` gets the address of each caller that is turned away.
    `max_message_bytes` bounds a message that arrives before its receive.
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
    ) -> None:
        super().__init__(on_loss)
        self.rank, self.size, self.incarnation = greeting.rank, greeting.size, greeting.incarnation
        self._handshake = make_handshake(greeting, keys, clock)
        self._endpoints, self._linger_s = endpoints, linger_s
        self._peers = {
            rank: peer_type(
                rank,
                sockets,
                heartbeat_s=heartbeat_s,
                timeout_s=peer_timeout_s,
                on_loss=self._on_peer_lost,
                on_link=on_link,
                redial=self._redial,
                clock=clock,
                max_message_bytes=max_message_bytes,
            )
            for rank, sockets in greeted_channels.items()
        }
        for peer in self._peers.values():
            peer.start()
        self._acceptor = Acceptor(listener, self._handshake, self._admit, self._on_newer_incarnation, on_refused)

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        """Queue `payload` for `peer`; the future is done when the peer acknowledges it."""
        return self._peers[peer].send(tag, label, payload)

    def receive(self, peer: int, tag: int, label: str, into: memoryview) -> Future[Arrival]:
        """Post a receive for the next message of `tag` from `peer`."""
        return self._peers[peer].receive(tag, label, into)

    def traffic(self) -> dict[int, Traffic]:
        """Return the counters per peer."""
        return {rank: peer.traffic for rank, peer in self._peers.items()}

    def close(self, reason: str = "") -> None:
        """Send all queued messages, exchange CLOSE and stop all threads.

        Waits for an active peer until it sends CLOSE too, for a silent one at most `linger_s`.
        """
        if self._shutdown.mark_closed() is None:
            return
        orderly = not (reason or self._shutdown.lost)
        linger_s, silence_s = (self._linger_s, self._linger_s) if orderly else (self._linger_s / 5, 0.0)
        deadline_s = time.monotonic() + linger_s
        for peer in self._peers.values():
            peer.close(reason, max(deadline_s - time.monotonic(), 0.0))
        for peer in self._peers.values():
            peer.join(max(deadline_s - time.monotonic(), 0.0), silence_s)
        self._acceptor.close()

    def unclosed_peers(self) -> list[int]:
        """Return, after `close`, the ranks that sent no CLOSE."""
        return [rank for rank, peer in self._peers.items() if not peer.has_closed]

    def abort(self) -> None:
        """Break all connections without CLOSE; a new transport may reconnect the ranks."""
        wakes = self._shutdown.mark_closed()
        if wakes is None:
            return
        for peer in self._peers.values():
            peer.abort()
        for wake in wakes:
            wake()
        self._acceptor.close()

    def _admit(self, rank: int, number: int, greeted: GreetedChannel) -> bool:
        set_socket_options(greeted[0].socket, self._endpoints[rank].congestion_control)
        return self._peers[rank].attach(number, greeted)

    def _redial(self, rank: int, number: int) -> GreetedChannel | None:
        """Reopen a connection; the dialled side only checks that the peer still listens and returns None."""
        endpoint = self._endpoints[rank]
        try:
            if rank < self.rank:
                return dial_rank(self._handshake, rank, number, endpoint, REDIAL_TIMEOUT_S)
            dial((endpoint.host, endpoint.port), endpoint.route, REDIAL_TIMEOUT_S).close()
        except PeerError as error:
            if is_transient(error):
                raise UnavailableError(error.message, hint=error.hint) from error
            raise
        return None

    def _on_newer_incarnation(self, error: RestartError) -> None:
        """Handle a restarted rank: as a loss, or, while closing, by not waiting for its CLOSE."""
        if self._shutdown.closed:
            for peer in self._peers.values():
                peer.stop_waiting()
        else:
            self._on_peer_lost(error)

    def _fail_messages(self, error: PeerError) -> None:
        for peer in self._peers.values():
            peer.fail(error)

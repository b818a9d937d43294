"""`PeerProber`: checks that other sites reach the address where this site's workers listen, and that it reaches theirs.

On the server's order it opens a listener where a worker would, or dials the listeners of other sites through its
routes. Both sides prove that they know the listener's nonce, which the server passes on: a process that merely
happens to answer at the address does not count. Then it measures the link. Everything runs in the background and ends
within seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from isthmus.core.errors import IsthmusError
from isthmus.core.messages.agent_messages import AgentOrders, PeerAddress, PeerCheck, PeerToCheck
from isthmus.wan import PortRange, answer_probe, dial, listen, probe_link

CHECK_TIMEOUT_S = 3.0
"""Longest time to connect to a site, and longest time for the exchange on a connection."""

MAX_CONNECTIONS = 16
"""Most connections that the listener handles at a time; it closes further ones."""

MAX_GBPS = 1000.0
"""Highest rate that a report may name."""

_PROOF_BYTES = 32
_MAX_DETAIL_CHARS = 300
_log = logging.getLogger("isthmus.agent")


class PeerProber:
    """The checks of one site, whose workers listen at `host` and within `ports`; `read_routes` returns its routes."""

    def __init__(
        self,
        host: str,
        ports: PortRange | None,
        read_routes: Callable[[], Mapping[str, str]],
        timeout_s: float = CHECK_TIMEOUT_S,
    ) -> None:
        self._host, self._ports, self._read_routes, self._timeout_s = host, ports, read_routes, timeout_s
        self._listener: ProbeListener | None = None
        self._problem = ""
        self._dials: dict[PeerToCheck, Future[PeerCheck]] = {}
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="check-peer")

    @property
    def busy(self) -> bool:
        """Whether a check is under way, so that the next report should come soon."""
        return self._listener is not None or bool(self._dials)

    def address(self) -> PeerAddress:
        """Return the site's address for the report, with the open listener."""
        first, last = self._ports or (None, None)
        opened = self._listener
        return PeerAddress(
            host=self._host, first_port=first, last_port=last, problem=self._problem,
            port=opened.port if opened else None, nonce=opened.nonce if opened else None,
        )  # fmt: skip

    def checks(self) -> tuple[PeerCheck, ...]:
        """Return the finished checks; each is repeated until the server no longer orders it."""
        return tuple(one.result() for one in self._dials.values() if one.done())

    def apply_orders(self, orders: AgentOrders) -> None:
        """Open or close the listener; dial the sites that are not being dialled yet."""
        if orders.opens_listener and self._listener is None:
            self._open_listener()
        elif not orders.opens_listener:
            self._close_listener()
        wanted = {(peer.cluster, peer.number): peer for peer in orders.peers_to_check}
        self._dials = {peer: one for peer, one in self._dials.items() if (peer.cluster, peer.number) in wanted}
        known = {(peer.cluster, peer.number) for peer in self._dials}
        for peer in (peer for key, peer in wanted.items() if key not in known):
            self._dials[peer] = self._pool.submit(self._dial, peer)

    def close(self) -> None:
        """Close the listener and drop the checks."""
        self._close_listener()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open_listener(self) -> None:
        try:
            self._listener, self._problem = ProbeListener(self._host, self._ports, self._timeout_s), ""
        except IsthmusError as error:
            if error.message[:_MAX_DETAIL_CHARS] != self._problem:
                _log.error("%s", error)
            self._problem = error.message[:_MAX_DETAIL_CHARS]

    def _close_listener(self) -> None:
        self._problem = ""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _dial(self, peer: PeerToCheck) -> PeerCheck:
        """Return whether the site can be reached, with round trip and rate, or why not; never raises."""
        try:
            route = self._read_routes().get(peer.cluster)
            why, measured = check_peer((peer.host, peer.port), peer.nonce, route, self._timeout_s)
        except Exception as error:
            why, measured = str(error) or type(error).__name__, None
        if why:
            _log.warning("this site cannot reach site %s at %s port %d: %s", peer.cluster, peer.host, peer.port, why)
        round_trip_s, gbps = measured or (None, None)
        return PeerCheck(
            cluster=peer.cluster, number=peer.number, reached=not why, detail=why[:_MAX_DETAIL_CHARS],
            round_trip_s=round_trip_s, gbps=gbps,
        )  # fmt: skip


class ProbeListener:
    """A listener at the lowest free port of `ports` that proves its `nonce` to a caller that proves it first."""

    def __init__(self, host: str, ports: PortRange | None, timeout_s: float) -> None:
        self._socket = listen(host, ports=ports)
        self.port: int = self._socket.getsockname()[1]
        self.nonce = secrets.token_hex(16)
        self._timeout_s, self._slots = timeout_s, threading.BoundedSemaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="check-listener", daemon=True).start()

    def close(self) -> None:
        """Stop to listen; connections under way end within the timeout."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:
                return  # closed
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="check-answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(self._timeout_s)
                if hmac.compare_digest(_receive(connection), _proof(self.nonce, b"dial")):
                    connection.sendall(_proof(self.nonce, b"answer"))
                    answer_probe(connection, self._timeout_s)
        except OSError:
            pass  # the caller went away, sent nothing, or measured to its end
        finally:
            self._slots.release()


def check_peer(
    address: tuple[str, int], nonce: str, route: str | None, timeout_s: float
) -> tuple[str, tuple[float, float] | None]:
    """Return why the listener at `address` cannot be reached through `route`, or "" if it answers to `nonce`.

    With it come the round trip in seconds and the rate in Gbit/s, None if they could not be measured.
    """
    try:
        connection = dial(address, route, timeout_s)
    except IsthmusError as error:
        return _dial_failure(error, route, timeout_s), None
    try:
        with connection:
            connection.settimeout(timeout_s)
            connection.sendall(_proof(nonce, b"dial"))
            if hmac.compare_digest(_receive(connection), _proof(nonce, b"answer")):
                return "", _measure(connection, timeout_s)
            return "another process answers there", None
    except TimeoutError:
        return f"connected, but no answer within {timeout_s:g} s", None
    except OSError as error:
        return f"connected, then {(error.strerror or str(error)).lower()}", None


def _measure(connection: socket.socket, timeout_s: float) -> tuple[float, float] | None:
    """Return round trip and rate of the link, None for a listener of an older release or a link that is too slow."""
    try:
        round_trip_s, gbps = probe_link(connection, timeout_s)
    except OSError:
        return None
    return round_trip_s, min(gbps, MAX_GBPS)


def _dial_failure(error: IsthmusError, route: str | None, timeout_s: float) -> str:
    cause = error.__cause__
    if route is not None or not isinstance(cause, OSError):
        return error.message
    if isinstance(cause, TimeoutError):
        return f"timed out after {timeout_s:g} s"
    return (cause.strerror or str(cause)).lower()


def _receive(connection: socket.socket) -> bytes:
    """Return the 32 bytes of a proof, fewer if the peer closes before."""
    data = b""
    while len(data) < _PROOF_BYTES and (more := connection.recv(_PROOF_BYTES - len(data))):
        data += more
    return data


def _proof(nonce: str, role: bytes) -> bytes:
    return hmac.new(nonce.encode(), role, hashlib.sha256).digest()

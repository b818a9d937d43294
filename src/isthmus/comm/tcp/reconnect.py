"""`Mender`: reopens one peer's broken connections and reports when nothing arrives from it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from isthmus.core.errors import PeerError, RestartError, UnavailableError

Connection = tuple[socket.socket, float]
"""A socket after the greeting, and the peer's clock minus ours in seconds."""

Redial = Callable[[int, int], Connection | None]
"""(rank, number) -> a new connection; None if the other side must dial and its worker still listens.

Raises `UnavailableError` if there is currently no route, `PeerError` if the worker is gone,
`RestartError` if it has restarted.
"""

OnLink = Callable[[int, str, float | None], None]
"""Called with (rank, why, None) when an outage begins, with (rank, "", seconds) when it ends."""

_SILENT = "silent"

_RETRY_S = (0.1, 1.0)
"""Shortest and longest pause between two attempts to reopen a connection."""


class Mender:
    """Reopens the connections of `rank` until `over` is set or the peer is silent for `timeout_s`."""

    def __init__(
        self, rank: int, timeout_s: float, redial: Redial, on_link: OnLink, over: threading.Event
    ) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._redial, self._on_link, self._over = redial, on_link, over
        self.heard_s = time.monotonic()
        self._cut_s: float | None = None
        self._lock = threading.Lock()

    def heard(self) -> None:
        """Record that a frame arrived from the peer."""
        self.heard_s = time.monotonic()

    def mended(self) -> None:
        """Record a reopened connection; report the end of an outage."""
        with self._lock:
            cut_s, self._cut_s = self._cut_s, None
        self.heard()
        if cut_s is not None:
            self._on_link(self._rank, "", time.monotonic() - cut_s)

    def open_again(
        self,
        lane: int,
        error: Exception,
        still_broken: Callable[[], bool],
        attach: Callable[[int, Connection], bool],
    ) -> None:
        """Retry until connection `lane`, which broke by `error`, is open; `PeerError` if the peer is gone."""
        pause_s, longest_s = _RETRY_S
        why = _why(error)
        tried = why == _SILENT
        if tried:
            self._cut(why)
        while not self._over.is_set() and still_broken():
            try:
                connection = self._redial(self._rank, lane)
                if connection is not None:
                    if not attach(lane, connection):
                        connection[0].close()
                    return
            except RestartError:
                raise
            except PeerError as gone:
                raise loss_of_peer(f"peer {self._rank} is lost: {why}; {gone.message}") from gone
            except UnavailableError as closed:
                if tried:  # the first failure may only be a peer that is restarting
                    self._cut(closed.message)
                tried = True
            if time.monotonic() - self.heard_s > self._timeout_s:
                raise loss_of_peer(f"peer {self._rank} was silent for {self._timeout_s:g} s")
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _cut(self, why: str) -> None:
        """Report an outage once, until it ends."""
        with self._lock:
            known, self._cut_s = self._cut_s, self._cut_s or self.heard_s
        if known is None:
            self._on_link(self._rank, why, None)


def loss_of_peer(why: str) -> PeerError:
    """Return the error for a peer that is lost."""
    return PeerError(why, hint="see the worker's log and its agent; the job restarts automatically")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return _SILENT
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()

"""`Mender`: opens the broken lanes of one peer again, and tells when nothing comes from it any more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from isthmus.core.errors import PeerError, RestartError, UnavailableError

Connection = tuple[socket.socket, float]
"""A greeted connection, and how far the peer's clock is ahead of ours in seconds."""

Redial = Callable[[int, int], Connection | None]
"""Open lane `lane` to rank `rank` again; None where the other side must, and its worker lives.

Raises `UnavailableError` where there is no way just now, `PeerError` where there is no such worker any more,
`RestartError` where another one has taken its place.
"""

OnLink = Callable[[int, str, float | None], None]
"""Told that nothing comes from a rank any more, and why; or (no why) that it does again, after how long."""

_SILENT = "silent"

_RETRY_S = (0.1, 1.0)
"""Shortest and longest pause between two tries to mend a lane."""


class Mender:
    """For the lanes of `rank`, until `over` is set. A peer silent for `timeout_s` is given up."""

    def __init__(
        self, rank: int, timeout_s: float, redial: Redial, on_link: OnLink, over: threading.Event
    ) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._redial, self._on_link, self._over = redial, on_link, over
        self.heard_s = time.monotonic()
        self._cut_s: float | None = None
        self._lock = threading.Lock()

    def heard(self) -> None:
        """Take note that the peer lives."""
        self.heard_s = time.monotonic()

    def mended(self) -> None:
        """Take note that a lane is open again."""
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
        """Try to open `lane`, which broke by `error`, until it is; `PeerError` where the peer is gone."""
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
                if tried:  # the first may only have met a peer that is about to begin anew
                    self._cut(closed.message)
                tried = True
            if time.monotonic() - self.heard_s > self._timeout_s:
                raise loss_of_peer(f"peer {self._rank} was silent for {self._timeout_s:g} s")
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _cut(self, why: str) -> None:
        """Tell, once until it is mended, that nothing comes."""
        with self._lock:
            known, self._cut_s = self._cut_s, self._cut_s or self.heard_s
        if known is None:
            self._on_link(self._rank, why, None)


def loss_of_peer(why: str) -> PeerError:
    """Return the error of a peer that is lost for good, or as good as."""
    return PeerError(why, hint="its cluster's agent and its log say why; the job restarts by itself")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return _SILENT
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()

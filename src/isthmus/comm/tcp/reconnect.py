"""`Reconnector`: reopens one peer's broken connections and reports when nothing arrives from it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from isthmus.comm.channel.channel import Channel, RecordChannel
from isthmus.core.errors import PeerError, RestartError, UnavailableError

GreetedChannel = tuple[Channel, float]
"""A connection after the greeting, and the peer's clock minus ours in seconds."""

GreetedRecords = tuple[RecordChannel, float]
"""The same, of which the records may go on another way."""

Redial = Callable[[int, int], GreetedChannel | None]
"""(rank, number) -> a new connection; None if the other side must dial and its worker still listens.

Raises `UnavailableError` if there is currently no route, `PeerError` if the worker is gone,
`RestartError` if it has restarted.
"""

OnLink = Callable[[int, str, float | None], None]
"""Called with (rank, why, None) when an outage begins, with (rank, "", seconds) when it ends."""

_SILENT = "silent"

_RETRY_PAUSE_S = (0.1, 1.0)
"""Shortest and longest pause between two attempts to reopen a connection, each times 0.5 to 1.5."""

_FIRST_QUIET_TRIES = 5
"""Attempts to open a connection for the first time that are not reported: 2.5 s."""


class Reconnector:
    """Reopens the connections of `rank` until `stopped` is set or the peer is silent for `timeout_s`.

    `jitter` returns random numbers in [0, 1), by which ranks that dial at once spread their next attempts.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        redial: Redial,
        on_link: OnLink,
        stopped: threading.Event,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._rank, self._timeout_s, self._jitter = rank, timeout_s, jitter
        self._redial, self._on_link, self._stopped = redial, on_link, stopped
        self.last_activity_s = time.monotonic()
        self._cut_since_s: float | None = None
        self._lock = threading.Lock()

    def on_activity(self) -> None:
        """Record that a frame arrived from the peer."""
        self.last_activity_s = time.monotonic()

    def on_reconnected(self) -> None:
        """Record a reopened connection; report the end of an outage."""
        with self._lock:
            cut_s, self._cut_since_s = self._cut_since_s, None
        self.on_activity()
        if cut_s is not None:
            self._on_link(self._rank, "", time.monotonic() - cut_s)

    def reconnect(
        self,
        number: int,
        error: Exception,
        is_broken: Callable[[], bool],
        attach: Callable[[int, GreetedChannel], bool],
        *,
        is_first: bool = False,
    ) -> None:
        """Retry until connection `number`, which broke by `error`, is open; `PeerError` if the peer is gone.

        A connection that opens for the first time (`is_first`) may be refused while the peer dials too: the pauses of
        several retries pass before that counts as an outage.
        """
        pause_s, longest_s = _RETRY_PAUSE_S
        why, last = _failure_reason(error), ""
        quiet_tries = _FIRST_QUIET_TRIES if is_first else 1
        if why == _SILENT:
            quiet_tries = 0
            self._report_cut(why)
        while not self._stopped.is_set() and is_broken():
            try:
                connection = self._redial(self._rank, number)
                if connection is not None:
                    if not attach(number, connection):
                        connection[0].close()
                    return
            except RestartError:
                raise
            except PeerError as gone:
                raise peer_loss_error(f"peer {self._rank} is lost: {why}; {gone.message}") from gone
            except UnavailableError as closed:
                last = f": {closed.message}"
                if quiet_tries == 0:  # the first failure may only be a peer that is restarting
                    self._report_cut(closed.message)
                quiet_tries = max(quiet_tries - 1, 0)
            if time.monotonic() - self.last_activity_s > self._timeout_s:
                raise peer_loss_error(f"peer {self._rank} was silent for {self._timeout_s:g} s{last}")
            self._stopped.wait(pause_s * (0.5 + self._jitter()))
            pause_s = min(2 * pause_s, longest_s)

    def _report_cut(self, reason: str) -> None:
        """Report an outage once, until it ends."""
        with self._lock:
            known, self._cut_since_s = self._cut_since_s, self._cut_since_s or self.last_activity_s
        if known is None:
            self._on_link(self._rank, reason, None)


def peer_loss_error(reason: str) -> PeerError:
    """Return the error for a peer that is lost."""
    return PeerError(reason, hint="see the worker's log and its agent; the job restarts automatically")


def _failure_reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return _SILENT
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()

"""`Outage`: how long a server has been unreachable while a job is followed."""

from __future__ import annotations

from isthmus.client.job_events import Clock
from isthmus.core.errors import UnavailableError

MAX_OUTAGE_S = 60.0
"""Seconds that a server may be unreachable before following a job fails."""


class Outage:
    """Tracks how long the server has been unreachable, up to `MAX_OUTAGE_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seen_s = clock, clock.now()

    def reset(self) -> None:
        """Record a response of the server."""
        self._seen_s = self._clock.now()

    def raise_if_expired(self, error: UnavailableError) -> None:
        """Raise `error` if the server has been unreachable for longer than `MAX_OUTAGE_S`."""
        if self._clock.now() - self._seen_s > MAX_OUTAGE_S:
            raise error

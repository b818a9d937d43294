"""Which of the servers on one store plans and watches the time: `Alone`, and the rule in general.

Leadership is about work being done once and about time, never about safety: whatever a server wrongly thinks,
it appends only to the end of the log as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Leadership(Protocol):
    """This server's part in it. All calls may come from any thread."""

    def holds(self) -> bool:
        """Tell whether this server leads, trying to where nobody does; never waits for another server."""

    def hear(self, cluster: str) -> None:
        """Let the others know that a cluster's agent has reported here just now."""

    def heard(self) -> Mapping[str, float]:
        """Return how many seconds ago any of the others last heard each cluster, as far as that is known."""

    def give_up(self) -> None:
        """Let another server lead; may be called twice."""


class Alone:
    """The server on a store that no other server can open."""

    def holds(self) -> bool:
        """Lead always."""
        return True

    def hear(self, cluster: str) -> None:
        """Tell nobody."""

    def heard(self) -> Mapping[str, float]:
        """Hear of nothing."""
        return {}

    def give_up(self) -> None:
        """Leave nobody waiting."""

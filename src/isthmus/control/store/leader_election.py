"""`LeaderElection`: the interface of leader election among servers on one store, and `SingleServer` for one server.

The leader plans jobs and fires timers. Leadership avoids duplicate work; safety does not depend on it, since
every append is checked against the actual end of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class LeaderElection(Protocol):
    """Leader election as one server sees it; thread-safe."""

    def try_acquire(self) -> bool:
        """Tell whether this server leads; try to become leader if there is none. Never blocks on another."""

    def record_report(self, cluster: str) -> bool:
        """Publish to the other servers that a cluster's agent has just reported here; return whether they know.

        They may know it only of the second before.
        """

    def report_ages_s(self) -> Mapping[str, float]:
        """Return for each known cluster the seconds since its last report to any server."""

    def release(self) -> None:
        """Give up leadership; may be called twice."""


class SingleServer:
    """The leadership of a server whose store is exclusive to it."""

    def try_acquire(self) -> bool:
        """Return true: the only server always leads."""
        return True

    def record_report(self, cluster: str) -> bool:  # noqa: ARG002 - the interface's
        """Return true: there are no other servers."""
        return True

    def report_ages_s(self) -> Mapping[str, float]:
        """Return nothing: there are no other servers."""
        return {}

    def release(self) -> None:
        """Do nothing: there are no other servers."""

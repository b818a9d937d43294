"""`AgentTakeover`: accepts one agent incarnation per cluster, and fences off replaced ones."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.errors import ConflictError, UnavailableError

MAX_REPLACED = 1_000
"""Replaced incarnations of a cluster that are remembered; of those before them no report is on its way any more."""


class AgentTakeover:
    """The active agent incarnation of each cluster. A new incarnation takes over with its second report.

    An agent sends a report only after the previous one was answered or timed out. So a delayed report of a
    dead agent arrives alone and is rejected, whereas a live agent retries at once.

    `incarnations` holds the incarnations of each cluster so far, the active one last.
    """

    def __init__(self, incarnations: Mapping[str, tuple[str, ...]] | None = None) -> None:
        incarnations = incarnations or {}
        self._active = {cluster: past[-1] for cluster, past in incarnations.items()}
        self._replaced: dict[str, dict[str, None]] = {
            cluster: dict.fromkeys(past[:-1][-MAX_REPLACED:]) for cluster, past in incarnations.items()
        }
        self._candidates: dict[str, str] = {}

    def record_takeover(self, cluster: str, incarnation: str) -> None:
        """Make `incarnation` active: another server has accepted its report."""
        present = self._active.get(cluster)
        if present is not None and present != incarnation:
            self._replace(cluster, present)
        self._active[cluster] = incarnation

    def is_active(self, cluster: str, incarnation: str) -> bool:
        """Return whether `incarnation` is the active agent of `cluster`."""
        return self._active.get(cluster) == incarnation

    def end(self, cluster: str) -> None:
        """Reject the active agent of `cluster` from now on; the next one needs no takeover."""
        present = self._active.pop(cluster, None)
        if present is not None:
            self._replace(cluster, present)

    def _replace(self, cluster: str, incarnation: str) -> None:
        """Reject an incarnation from now on; forget the oldest one of too many."""
        replaced = self._replaced.setdefault(cluster, {})
        replaced[incarnation] = None
        if len(replaced) > MAX_REPLACED:
            del replaced[next(iter(replaced))]

    def check(self, cluster: str, incarnation: str) -> None:
        """Accept a report of the active agent of `cluster`.

        Raises `ConflictError` for a replaced incarnation, `UnavailableError` for a new one's first report.
        """
        if incarnation in self._replaced.get(cluster, ()):
            raise ConflictError(
                f"another agent of cluster '{cluster}' has taken over, or the site has left the pool",
                hint="run one agent for each cluster",
            )
        present = self._active.get(cluster)
        if present == incarnation:
            return
        if present is not None:
            if self._candidates.get(cluster) != incarnation:
                self._candidates[cluster] = incarnation
                raise UnavailableError(
                    f"cluster '{cluster}' already has an agent; this one takes over with its next report",
                    hint="report again",
                )
            self._replace(cluster, present)
        self._active[cluster] = incarnation
        self._candidates.pop(cluster, None)

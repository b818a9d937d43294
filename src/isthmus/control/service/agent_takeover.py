"""Which agent speaks for a cluster: one at a time, and never one that is long dead."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.errors import ConflictError, UnavailableError


class Incumbents:
    """The incarnation that speaks for each cluster. A new one takes over with its second report.

    An agent sends a report only once the one before was answered or given up, so a report that a dead agent
    left on its way comes alone: it is refused, and nothing follows. A living agent repeats itself at once.

    `known` are the incarnations of each cluster so far, the present one last.
    """

    def __init__(self, known: Mapping[str, tuple[str, ...]] | None = None) -> None:
        known = known or {}
        self._present = {cluster: past[-1] for cluster, past in known.items()}
        self._replaced = {(cluster, one) for cluster, past in known.items() for one in past[:-1]}
        self._candidates: dict[str, str] = {}

    def note(self, cluster: str, incarnation: str) -> None:
        """Another server of the pool has taken a report of this agent in: it speaks for `cluster`."""
        present = self._present.get(cluster)
        if present is not None and present != incarnation:
            self._replaced.add((cluster, present))
        self._present[cluster] = incarnation

    def check(self, cluster: str, incarnation: str) -> None:
        """Let the present agent of `cluster` pass.

        Raises `ConflictError` for one that was replaced, `UnavailableError` for the first report of another.
        """
        if (cluster, incarnation) in self._replaced:
            raise ConflictError(
                f"another agent of cluster '{cluster}' has taken over", hint="run one agent for each cluster"
            )
        present = self._present.get(cluster)
        if present == incarnation:
            return
        if present is not None:
            if self._candidates.get(cluster) != incarnation:
                self._candidates[cluster] = incarnation
                raise UnavailableError(
                    f"cluster '{cluster}' has an agent already; this one takes over with its next report",
                    hint="report again",
                )
            self._replaced.add((cluster, present))
        self._present[cluster] = incarnation
        self._candidates.pop(cluster, None)

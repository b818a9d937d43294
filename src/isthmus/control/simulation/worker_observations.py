"""Observations of simulated workers: one per worker, the same for all workers of a part."""

from __future__ import annotations

from typing import Any

from isthmus.core.messages.agent_messages import VerifiedCheckpoint, WorkerAddress
from isthmus.site import ObservedWorker, SitePart


def observe_running(part: SitePart, cluster: str, unsaved_s: float = 0.0) -> tuple[ObservedWorker, ...]:
    """Return observations that every worker of `part` runs and has checked in."""
    return tuple(
        ObservedWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state="running",
            address=worker.address or WorkerAddress(rank=rank, cluster=cluster, host="site", port=rank + 1),
            unsaved_s=unsaved_s,
        )
        for rank, worker in part.workers.items()
    )


def observe_saved(part: SitePart, checkpoint: VerifiedCheckpoint, unsaved_s: float) -> tuple[ObservedWorker, ...]:
    """Return observations that every worker of `part` has verified its share of a checkpoint."""
    share = checkpoint.model_copy(update={"num_bytes": checkpoint.num_bytes // len(part.workers)})
    return _observe(part, state="running", protection=share, unsaved_s=unsaved_s)


def observe_exited(part: SitePart, exit_status: int) -> tuple[ObservedWorker, ...]:
    """Return observations that every worker of `part` has exited."""
    return _observe(part, state="exited", exit_status=exit_status)


def observe_absent(part: SitePart) -> tuple[ObservedWorker, ...]:
    """Return observations that no worker of `part` was ever started."""
    return _observe(part, state="absent")


def _observe(part: SitePart, **observed: Any) -> tuple[ObservedWorker, ...]:
    return tuple(ObservedWorker(job=part.job, attempt=part.attempt, rank=rank, **observed) for rank in part.workers)

"""`pool_figures`: what the server's metrics say of jobs, queue, parts and links, read from the state at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.control.queries.forecast_inputs import JobProgress, ProgressByJob, awaits_choice, is_pending
from isthmus.control.state.job_records import JobRecord, PoolState

MAX_JOBS = 500
"""Jobs with series of their own, the first to have started; others are counted."""
MAX_LINKS = 2000
"""Links with series of their own."""
_ENDINGS = frozenset({"lost", "preempted", "moved", "stopping"})
"""Entries of a job's history at the end of an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """A job that runs. Times are seconds; None: not known."""

    id: str
    user: str
    steps_done: int
    steps: int
    attempt: int
    worker_restarts: int
    predicted_step_s: float | None
    step_s: float | None
    # See `_saved_s`, and how often it should save.
    saved_s: float
    save_interval_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """The pool at one moment."""

    jobs: tuple[JobFigures, ...]
    # Running jobs beyond `MAX_JOBS`.
    num_jobs_left_out: int
    # Seconds that the first of the waiting jobs has waited, without those whose user must choose; 0 without one.
    oldest_wait_s: float
    # Jobs that wait by priority.
    waiting: dict[str, int]
    # Parts by cluster, owner and state.
    parts: dict[tuple[str, str, str], int]
    # Measured rate by source and target of a link, in Gbit/s.
    measured_gbps: dict[tuple[str, str], float]


def pool_figures(state: PoolState, now_s: float, progress: ProgressByJob) -> PoolFigures:
    """Return the figures of the pool."""
    running = sorted(
        (job for job in state.live_jobs.values() if job.state == "running"), key=lambda job: (job.started_s, job.id)
    )
    pending = [job for job in state.live_jobs.values() if is_pending(job)]
    waits_s = (max(0.0, now_s - job.submitted_s) for job in pending if not awaits_choice(job))
    return PoolFigures(
        jobs=tuple(_job(job, progress.get(job.id, JobProgress(0))) for job in running[:MAX_JOBS]),
        num_jobs_left_out=max(0, len(running) - MAX_JOBS),
        oldest_wait_s=max(waits_s, default=0.0),
        waiting=dict(Counter(job.priority for job in pending)),
        parts=dict(Counter(_part_keys(state))),
        measured_gbps=dict(_measured(state)),
    )


def _job(job: JobRecord, progress: JobProgress) -> JobFigures:
    spec = job.spec
    predicted = job.plan.predicted if job.plan is not None else None
    predicted_s = predicted.iteration_s if predicted is not None and predicted.iteration_s > 0 else None
    step_s, every = progress.step_s or predicted_s, spec.checkpoints.every_steps
    return JobFigures(
        id=job.id, user=job.user, steps_done=progress.steps_done, steps=spec.training.steps, attempt=job.attempt,
        worker_restarts=job.worker_restarts, predicted_step_s=predicted_s, step_s=progress.step_s,
        saved_s=_saved_s(job), save_interval_s=every * step_s if every and step_s else None,
    )  # fmt: skip


def _saved_s(job: JobRecord) -> float:
    """Return when a running job last saved a checkpoint: so long ago as it has run since, in all attempts together.

    Without one its first start counts. A full disk ends each attempt at its first checkpoint, so none alone is late.
    """
    begun_s = job.started_s
    ended_s: float | None = None  # of the attempt whose entries are read; None: it runs
    for one in reversed(job.history.entries):
        if one.kind == "checkpoint":
            return one.time_s if ended_s is None else begun_s - max(0.0, ended_s - one.time_s)
        if one.kind == "started" and ended_s is not None:
            begun_s -= max(0.0, ended_s - one.time_s)
        elif one.kind in _ENDINGS and one.attempt < job.attempt:
            ended_s = one.time_s
    return begun_s


def _part_keys(state: PoolState) -> Iterator[tuple[str, str, str]]:
    for name, record in state.clusters.items():
        for part in record.parts.values():
            yield name, record.cluster.owner, part.state


def _measured(state: PoolState) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the rate that each site last measured towards another, which it reached."""
    count = 0
    for source, record in state.clusters.items():
        for target, result in record.peer_results.items():
            if result.reached and result.gbps is not None and count < MAX_LINKS:
                count += 1
                yield (source, target), result.gbps

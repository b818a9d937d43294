"""`restart_moved`: starts moved jobs again, ahead of all that wait, on the chips that the moves have left for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from isthmus.control.state import allocations
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState

RETURN_S = 600.0
"""How long chips are kept for a job that was moved; later it waits like any other."""


def restart_moved(state: PoolState, now_s: float, start: Callable[[JobRecord], None]) -> None:
    """Let `start` start each moved job that fits; forget those that run, have ended, or have waited too long."""
    for name, since_s in list(state.moved.items()):
        job = state.live_jobs.get(name)
        is_waiting = job is not None and job.state in WAITING_STATES
        if job is None or job.state == "running" or now_s - since_s >= RETURN_S:
            del state.moved[name]
            state.indexes.capacity_freed = True
        elif is_waiting and job.state_deadline_s is None and allocations.fits(state, job.needs or {}, {}):
            start(job)


def jobs_on_move(state: PoolState) -> Iterator[JobRecord]:
    """Yield the jobs for which chips are kept: those that will be stopped to be moved, and those that were."""
    for name in state.indexes.preemptors:
        mover = state.jobs[name]
        if mover.moves and mover.state == "preempting":
            yield from (state.jobs[one.job] for one in mover.victims if one.job in state.jobs)
    waiting = (state.live_jobs[name] for name in state.moved if name in state.live_jobs)
    yield from (job for job in waiting if job.state == "stopping" or job.state in WAITING_STATES)

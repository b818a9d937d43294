"""`make_room`: begins the moves that a site proposes, if they let the head of the queue start there.

A move is a joint preemption: the waiting job is held at all its sites, every moved job saves and verifies a checkpoint,
and only then is stopped. It goes on from there with the same plan, ahead of all waiting jobs (`restart_moved`).
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.coordinator.job_preflight import may_hold_chips
from isthmus.control.coordinator.joint_preemption import begin_preemption
from isthmus.control.coordinator.plan_requests import withdraw_plan_request
from isthmus.control.state import allocations
from isthmus.control.state.job_records import WAITING_STATES, ClusterVictim, JobRecord, PoolState
from isthmus.control.state.queue_order import queue_head
from isthmus.control.state.site_records import ClusterRecord
from isthmus.control.state.update_indexes import is_checking, job_at_key
from isthmus.core.messages.agent_messages import MoveProposal
from isthmus.core.pool_resource import PoolResource


def make_room(state: PoolState, now_s: float, may_start: Callable[[JobRecord], bool]) -> None:
    """Begin one proposal at each site that has any; `may_start` says whether only chips keep a job from starting."""
    for name in sorted(state.proposing):
        record = state.clusters[name]
        if not record.takes_parts or _is_moving(state, name):
            continue
        for proposal in record.moves:
            job = state.jobs.get(proposal.job)
            if job is None or not _is_useful(state, record, job, proposal) or not may_start(job):
                continue
            if may_hold_chips(state, job, now_s):
                withdraw_plan_request(state, job)
                victims = [ClusterVictim(cluster=name, job=one.job, attempt=one.attempt) for one in proposal.moved]
                begin_preemption(state, job, victims, now_s, moves=True)
                state.indexes.capacity_freed = True  # chips are kept for what moves
                break


def _is_moving(state: PoolState, cluster: str) -> bool:
    """Return whether jobs are on the way at a site: to where another one moved from, or back to work."""
    claiming = (state.jobs[name] for name in state.indexes.preemptors)
    moved = (state.jobs[name] for name in state.moved if name in state.jobs)
    return any(part.cluster == cluster for job in (*claiming, *moved) for part in job.plan_parts)


def _is_useful(state: PoolState, record: ClusterRecord, job: JobRecord, proposal: MoveProposal) -> bool:
    """Return whether the job is the first to wait for these chips and lacks no others, and the jobs can be moved."""
    if job.state not in WAITING_STATES or job.state_deadline_s is not None or job.capped_by or job.plan is None:
        return False
    if is_checking(job) or job.needs is None or not allocations.pool_can_hold(state, job):
        return False
    here = {key for key in allocations.chip_needs(job.needs) if key.cluster == record.cluster.name}
    lacking = allocations.missing_amounts(state, job.needs).keys()
    if not here or not lacking <= here or proposal.cost_card_s >= proposal.loss_card_s:
        return False
    return _is_first(state, job, here) and all(
        _can_move(state, record, one.job, one.attempt, job) for one in proposal.moved
    )


def _is_first(state: PoolState, job: JobRecord, keys: set[PoolResource]) -> bool:
    for key in queue_head(state, state.config.queue_window):
        other = job_at_key(state, key)
        if other is job:
            return True
        if other.state in WAITING_STATES and other.needs is not None and other.needs.keys() & keys:
            return False
    return False


def _can_move(state: PoolState, record: ClusterRecord, name: str, attempt: int, job: JobRecord) -> bool:
    """Return whether a job runs undisturbed, has a part at the site, and lets itself be stopped."""
    moved = state.jobs.get(name)
    if moved is None or moved is job or moved.attempt != attempt or (name, attempt) not in record.parts:
        return False
    if moved.state != "running" or not moved.preemptible or moved.preemptor is not None or moved.pause_reason:
        return False
    parts = moved.current_parts()
    return state.drained_site(moved) is None and all(
        part.state == "running" and not part.left and state.clusters[part.cluster].connected for part in parts
    )

"""Parts of a running job with `task: rl` that only decode: they leave, join again or join late; the job goes on.

A part that has left is ordered again, as a new part of the same attempt, once its site has forgotten the former one and
its chips are free beside what is reserved for waiting jobs. It is prepared and started by itself.
"""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import open_part
from isthmus.control.state import allocations
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.reconcile_log import may_start_now
from isthmus.control.state.site_records import PartRecord
from isthmus.control.state.update_indexes import index_elastic, set_state_deadline
from isthmus.core.plan import PlanPart


def let_part_go(state: PoolState, job: JobRecord, part: PartRecord, reason: str, now_s: float) -> bool:
    """Release a part that a running job can do without; return whether it can. Its samples go on at the others."""
    if not job.may_go_on_without((part.cluster,)):
        return False
    part.left, part.desired = True, "released"
    part.num_left, part.left_s = part.num_left + 1, now_s
    job.history.add("left", now_s, job.attempt, reason, cluster=part.cluster)
    state.changed_jobs.add(job.id)
    index_elastic(state, job)
    _wake_at(state, job, now_s + state.config.backoff_s(part.num_left))
    return True


def order_absent_parts(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Order the parts of a running job that have left, or were not there at its start, and could join now."""
    if job.plan is None or job.preemptor is not None or job.pause_reason or not may_start_now(state, job):
        return
    for cluster in job.absent_clusters():
        former, cut = job.parts.get((job.attempt, cluster)), PlanPart.from_plan(job.plan, cluster)
        if not _may_join(state, job, former, cut, now_s):
            continue
        part = open_part(state, job, job.plan, cut, "prepared")
        part.ordered_s, part.num_left = now_s, 0 if former is None else former.num_left
        allocations.allocate(state, [part])
        state.changed_jobs.add(job.id)
        _wake_at(state, job, now_s + state.config.reservation_timeout_s)
    index_elastic(state, job)


def start_joining_parts(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Start parts that are prepared while the job runs."""
    for part in job.remaining_parts():
        if part.state == "prepared" and not part.committed:
            part.desired, part.committed = "running", True
            job.history.add("joined", now_s, job.attempt, cluster=part.cluster)
            state.changed_jobs.add(job.id)


def end_late_joins(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Give up parts that were ordered while the job ran and are not prepared in time."""
    limit_s = state.config.reservation_timeout_s
    for part in job.remaining_parts():
        if part.ordered_s is None or part.committed:
            continue
        if now_s >= part.ordered_s + limit_s:
            let_part_go(state, job, part, f"{part.cluster} did not prepare within {limit_s:g} s", now_s)
        else:
            _wake_at(state, job, part.ordered_s + limit_s)


def _may_join(state: PoolState, job: JobRecord, former: PartRecord | None, cut: PlanPart, now_s: float) -> bool:
    record, key = state.clusters.get(cut.cluster), (job.id, job.attempt)
    if record is None or not record.takes_parts or record.probation is not None or key in record.parts:
        return False
    if former is not None and (
        former.state != "released"
        or key in record.reported_parts
        or now_s < former.left_s + state.config.backoff_s(former.num_left)
    ):
        return False
    return allocations.fits(state, allocations.chip_needs_of([cut]), state.indexes.reserved)


def _wake_at(state: PoolState, job: JobRecord, at_s: float) -> None:
    """Let the job be looked at again at `at_s`, or earlier as it was to be."""
    if job.state == "running" and (job.state_deadline_s is None or job.state_deadline_s > at_s):
        set_state_deadline(state, job, at_s)

"""Updates of the indexes whenever a job changes its state, plan or deadline."""

from __future__ import annotations

from sortedcontainers import SortedList

from isthmus.control.state.indexes import QueueKey
from isthmus.control.state.job_records import TERMINAL_STATES, WAITING_STATES, JobRecord, PoolState
from isthmus.core.owner.accounts import Project


def queue_key(job: JobRecord) -> QueueKey:
    """Return the job's place in the queue: by the priorities of project and job, then by arrival."""
    return job.rank, job.submitted_s, job.number


def job_at_key(state: PoolState, key: QueueKey) -> JobRecord:
    """Return the job of a queue key."""
    return state.jobs[state.indexes.ids_by_number[key[2]]]


def index_job(state: PoolState, job: JobRecord) -> None:
    """Add a new job to the indexes."""
    state.indexes.ids_by_number[job.number] = job.id
    state.indexes.numbers_by_user.setdefault(job.user, SortedList()).add(job.number)
    reindex_job(state, job)


def unindex_job(state: PoolState, job: JobRecord) -> None:
    """Remove a deleted job from the indexes."""
    del state.indexes.ids_by_number[job.number]
    state.indexes.numbers_by_user[job.user].remove(job.number)
    if not state.indexes.numbers_by_user[job.user]:
        del state.indexes.numbers_by_user[job.user]


def reindex_job(state: PoolState, job: JobRecord) -> None:
    """Update every index of the job; add it to the queue or remove it, as its state requires."""
    indexes, key = state.indexes, queue_key(job)
    wants_chips = belongs_in_queue(job)
    if job.state not in WAITING_STATES and job.state != "planning":
        indexes.parked.discard(job.number)
        _remove_cap(state, job)
        drop_claim(state, job)
    queued = wants_chips and job.number not in indexes.parked and not job.capped_by
    if queued != job.in_queue:
        (_join_queue if queued else _leave_queue)(state, job)
    if job.state == "waiting" and not job.auto_plan and job.plan is None:
        indexes.awaiting_choice[job.number] = None
    else:
        indexes.awaiting_choice.pop(job.number, None)
    if queued and job.state in WAITING_STATES and job.plan is not None and job.state_deadline_s is None:
        indexes.newly_queued[key] = None
    else:
        indexes.newly_queued.pop(key, None)
    index_preflight(state, job)
    for index, name in ((indexes.preparing, "preparing"), (indexes.preempting, "preempting")):
        if job.state == name:
            index[job.id] = None
        else:
            index.pop(job.id, None)
    index_elastic(state, job)
    _index_expected_end(state, job)


def index_elastic(state: PoolState, job: JobRecord) -> None:
    """Update whether more parts may join the job."""
    if job.state == "running" and job.absent_clusters():
        state.indexes.elastic[job.id] = None
    else:
        state.indexes.elastic.pop(job.id, None)


def _join_queue(state: PoolState, job: JobRecord) -> None:
    key = queue_key(job)
    state.indexes.order.add(key)
    for queues, name in _queues_of(state, job):
        queues.setdefault(name, SortedList()).add(key)
    job.in_queue = True
    mark_queue_changed(state, job)


def _leave_queue(state: PoolState, job: JobRecord) -> None:
    key = queue_key(job)
    state.indexes.order.remove(key)
    for queues, name in _queues_of(state, job):
        queues[name].remove(key)
        if not queues[name]:
            del queues[name]
    if job.number in state.indexes.reservers:
        state.indexes.capacity_freed = True
    job.in_queue = False
    mark_queue_changed(state, job)


def _queues_of(state: PoolState, job: JobRecord) -> tuple[tuple[dict[str, SortedList], str], ...]:
    indexes = state.indexes
    return (indexes.queued_by_user, job.user), (indexes.queued_by_share, job.share_account)


def cap(state: PoolState, job: JobRecord, account: str) -> None:
    """Take a job out of the queue until `account`, whose limit it would pass, has released something."""
    _remove_cap(state, job)
    job.capped_by = account
    state.indexes.capped.setdefault(account, SortedList()).add(queue_key(job))
    reindex_job(state, job)


def uncap(state: PoolState, job: JobRecord) -> None:
    """Return a job to the queue that a limit kept out of it."""
    _remove_cap(state, job)
    reindex_job(state, job)


def rank_job(state: PoolState, job: JobRecord, project: Project) -> None:
    """Let a job that holds nothing follow the priority of its project."""
    indexes, before = state.indexes, queue_key(job)
    requested = before in indexes.unplanned
    indexes.unplanned.discard(before)
    indexes.newly_queued.pop(before, None)
    if job.in_queue:
        _leave_queue(state, job)
    job.follow(project)
    if requested:
        indexes.unplanned.add(job.user, queue_key(job), in_turns=state.planner_turns)
    reindex_job(state, job)
    state.changed_jobs.add(job.id)


def claim_chips(state: PoolState, job: JobRecord, account: str) -> None:
    """Let a job claim chips of an account for when they are released; no job outside of a guarantee gets these."""
    drop_claim(state, job)
    state.accounts.claims.setdefault(account, {})[job.id] = job.num_chips
    job.claims_in = account


def drop_claim(state: PoolState, job: JobRecord) -> None:
    """End the claim of a job that has started or ended."""
    if job.claims_in:
        claims = state.accounts.claims[job.claims_in]
        del claims[job.id]
        if not claims:
            del state.accounts.claims[job.claims_in]
        if job.state in TERMINAL_STATES:
            state.indexes.released_accounts.add(job.claims_in)
        job.claims_in = ""


def _remove_cap(state: PoolState, job: JobRecord) -> None:
    if job.capped_by:
        keys = state.indexes.capped[job.capped_by]
        keys.remove(queue_key(job))
        if not keys:
            del state.indexes.capped[job.capped_by]
        job.capped_by = ""


def mark_queue_changed(state: PoolState, job: JobRecord) -> None:
    """Record that the queue has changed from the job's place on."""
    indexes, key = state.indexes, queue_key(job)
    indexes.queue_changed = True
    indexes.queue_changed_from = min(key, indexes.queue_changed_from or key)


def belongs_in_queue(job: JobRecord) -> bool:
    """Return whether a job belongs in the queue: it waits and has a plan or the policy `auto_plan`."""
    if job.state == "planning":
        return job.auto_plan
    return job.state in WAITING_STATES and (job.auto_plan or job.plan is not None)


def index_preflight(state: PoolState, job: JobRecord) -> None:
    """Update the index of the jobs that are checked."""
    if is_checking(job):
        state.indexes.checking[job.id] = None
    else:
        state.indexes.checking.pop(job.id, None)


def is_checking(job: JobRecord) -> bool:
    """Return whether the job waits until the sites of its plan have answered its checks."""
    return job.state in WAITING_STATES and job.preflight is not None and job.preflight.state == "pending"


def park(state: PoolState, job: JobRecord) -> None:
    """Remove a job from the queue until the pool grows: even the idle pool could not hold it."""
    state.indexes.parked.add(job.number)
    reindex_job(state, job)


def unpark(state: PoolState, job: JobRecord) -> None:
    """Return a parked job to the queue."""
    state.indexes.parked.discard(job.number)
    reindex_job(state, job)


def set_state_deadline(state: PoolState, job: JobRecord, deadline_s: float | None) -> None:
    """Set when the job's current state times out; None: never."""
    if job.state_deadline_s == deadline_s:
        return
    deadlines = state.indexes.deadlines.setdefault(job.state, SortedList())
    if job.state_deadline_s is not None:
        deadlines.remove((job.state_deadline_s, job.number))
    if deadline_s is not None:
        deadlines.add((deadline_s, job.number))
    job.state_deadline_s = deadline_s


def _index_expected_end(state: PoolState, job: JobRecord) -> None:
    """Update the expected end of a running job, if its plan predicts one."""
    ends_s = job.started_s + job.predicted_run_s if job.state == "running" and job.predicted_run_s else None
    if ends_s == job.expected_end_s:
        return
    if job.expected_end_s is not None:
        state.indexes.expected_ends.remove((job.expected_end_s, job.number))
    if ends_s is not None:
        state.indexes.expected_ends.add((ends_s, job.number))
    job.expected_end_s = ends_s

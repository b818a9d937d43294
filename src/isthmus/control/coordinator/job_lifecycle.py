"""The state machine of a job: a table `(from, to): action`. A transition that is not in it raises.

planning -> choosing -> waiting -> preparing -> starting -> running -> stopping -> succeeded
(plans; user's choice; chips allocated; held at all sites; checked in; trained; released at all sites)

waiting | blocked -> preempting -> preparing
(the user agrees to preempt; all sites ready and all victims' checkpoints verified; victims leave)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.control.state import allocations
from isthmus.control.state.job_records import MAX_PAST_PARTS, JobRecord, PoolState
from isthmus.control.state.reconcile_log import next_attempt
from isthmus.control.state.site_records import PartRecord
from isthmus.control.state.update_indexes import mark_queue_changed, reindex_job, set_state_deadline
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import DesiredState, RankMap, Victim
from isthmus.core.plan import Plan, PlanPart
from isthmus.core.views.api_views import HistoryKind, JobState

HOLDING_STATES = frozenset({"preempting", "preparing", "starting", "running", "stopping"})
"""States in which chips are allocated to a job."""
JobTransition = Callable[[PoolState, JobRecord, float], float | None]
"""Performs the transition; returns when the new state times out, None for never."""


def move_job(
    state: PoolState, job: JobRecord, to: JobState, now_s: float, reason: str = "", told: str | None = None
) -> None:
    """Move `job` to the state `to`; raise `IllegalTransitionError` if the table lacks the transition.

    `told` is the text of the history in place of `reason`.
    """
    step = JOB_TRANSITIONS.get((job.state, to))
    if step is None:
        raise IllegalTransitionError(
            f"job {job.id}: no step from {job.state} to {to}; its history: {job.history}",
            hint="this is a bug: please report it with the message",
        )
    set_state_deadline(state, job, None)
    held_parts = job.plan_parts if job.charged_chips else ()
    deadline_s = step(state, job, now_s)
    job.state, job.reason, job.changed_s = to, reason, now_s
    _charge_user(state, job, now_s, held_parts)
    _record_move(job, to, now_s, reason if told is None else told)
    set_state_deadline(state, job, deadline_s)
    reindex_job(state, job)
    state.changed_jobs.add(job.id)


def _charge_user(state: PoolState, job: JobRecord, now_s: float, held_parts: tuple[PlanPart, ...]) -> None:
    """Count the chips of a job that has got or released them as held by its user and its accounts.

    `held_parts` are those of the plan whose chips it held before.
    """
    held = job.num_chips if job.state in HOLDING_STATES else 0
    if held != job.charged_chips:
        state.shares.charge(job.share_account, held - job.charged_chips, now_s)
        accounts = state.accounts.tree.accounts_of(job.user, job.project)
        num_jobs = (held > 0) - (job.charged_chips > 0)
        state.accounts.hold(accounts, held - job.charged_chips, num_jobs, state.meter.now_ms)
        if state.accounts.tree.has_places:
            state.accounts.hold_at(accounts, allocations.chip_needs_of(held_parts), -1)
            state.accounts.hold_at(accounts, allocations.chip_needs_of(job.plan_parts if held else ()), 1)
        if held < job.charged_chips:
            state.indexes.released_accounts.update(accounts)
        job.charged_chips = held


def _record_move(job: JobRecord, to: JobState, now_s: float, text: str) -> None:
    """Add the new state to the job's history; `stopping` is added with its cause by `stop_attempt`."""
    kind = _HISTORY_OF_STATE.get(to)
    if kind is None:
        return
    if kind == "reserving" and job.plan is not None:
        text = f"{job.plan.id} on {', '.join(job.plan.clusters)}" + (f"; {text}" if text else "")
    job.history.add(kind, now_s, job.attempt, text)


_HISTORY_OF_STATE: Mapping[JobState, HistoryKind] = {
    "choosing": "planned",
    "waiting": "waiting",
    "blocked": "waiting",
    "preempting": "preempting",
    "preparing": "reserving",
    "starting": "held",
    "running": "started",
    "succeeded": "finished",
    "failed": "failed",
    "cancelled": "cancelled",
}


def open_attempt(state: PoolState, job: JobRecord, desired: DesiredState) -> None:
    """Open the next attempt: a part at every cluster of the plan."""
    if job.plan is None:
        raise IllegalTransitionError(f"job {job.id}: an attempt without a plan; its history: {job.history}")
    job.attempt = next_attempt(state, job)
    job.rank_map, job.fault, job.saved_step, job.lost_by = None, None, None, ""
    past = {key: part.ranks for key, part in job.parts.items() if part.state == "released" and part.committed}
    job.past_ranks = dict([*job.past_ranks.items(), *past.items()][-MAX_PAST_PARTS:])
    job.parts = {key: part for key, part in job.parts.items() if part.state != "released"}
    for cut in job.plan_parts:
        open_part(state, job, job.plan, cut, desired)


def open_part(state: PoolState, job: JobRecord, plan: Plan, cut: PlanPart, desired: DesiredState) -> PartRecord:
    """Open the part of the current attempt at a cluster."""
    part = PartRecord(
        job=job.id,
        attempt=job.attempt,
        cluster=cut.cluster,
        ranks=cut.ranks,
        chips=dict(cut.chips),
        storage_bytes=allocations.storage_bytes_at(plan, cut.cluster),
        desired=desired,
    )
    job.parts[job.attempt, cut.cluster] = part
    record = state.clusters[cut.cluster]
    record.parts[job.id, job.attempt] = part
    record.reported_parts.pop((job.id, job.attempt), None)
    return part


def join_site_queues(state: PoolState, job: JobRecord) -> None:
    """Put a part of the job into the queue of each of its sites; a queued part holds no chips."""
    open_attempt(state, job, "queued")
    job.in_site_queues = True
    state.changed_jobs.add(job.id)


def leave_site_queues(state: PoolState, job: JobRecord) -> None:
    """Remove the job from the queues of its sites."""
    if job.in_site_queues:
        job.in_site_queues = False
        _release_parts(state, job, 0.0)
        mark_queue_changed(state, job)
        state.changed_jobs.add(job.id)


def _no_action(_state: PoolState, _job: JobRecord, _now_s: float) -> None:
    """Do nothing; the new state has no timeout."""


def _discard_plan(state: PoolState, job: JobRecord, _now_s: float) -> None:
    """Discard the plan, so that the user can choose again."""
    leave_site_queues(state, job)
    allocations.assign_plan(state, job, None)


def _back_off(state: PoolState, job: JobRecord, now_s: float) -> float | None:
    """Wait after an attempt; with a back-off if a site refused."""
    _drop_claims(state, job)
    return now_s + state.config.backoff_s(job.refusals) if job.refusals else None


def _allocate(state: PoolState, job: JobRecord, now_s: float) -> float:
    """Allocate the resources of all parts at once."""
    _begin_attempt(state, job, "prepared")
    allocations.allocate(state, job.current_parts())
    allocations.allocate_links(state, job)
    return now_s + state.config.reservation_timeout_s


def _allocate_with_victims(state: PoolState, job: JobRecord, now_s: float) -> float:
    """Allocate the free chips, and order every site to keep its victims' chips for the job."""
    _begin_attempt(state, job, "ready")
    state.indexes.preemptors[job.id] = None
    for part in job.current_parts():
        _borrow_from_victims(state, job, part)
    allocations.allocate(state, job.current_parts())
    allocations.allocate_links(state, job)
    for one in job.victims:
        if one.attempt:
            state.jobs[one.job].preemptor = job.id
    return now_s + state.config.reservation_timeout_s


def _begin_attempt(state: PoolState, job: JobRecord, desired: DesiredState) -> None:
    """Continue with the attempt in the site queues, or open one."""
    if not job.in_site_queues:
        open_attempt(state, job, desired)
    job.in_site_queues = False
    for part in job.current_parts():
        part.desired = desired


def _borrow_from_victims(state: PoolState, job: JobRecord, part: PartRecord) -> None:
    """Choose the sources of a part's chips: free ones first, then pool victims, then local jobs."""
    record = state.clusters[part.cluster]
    named = [one for one in job.victims if one.cluster == part.cluster]
    part.victims = tuple(Victim(job=one.job, attempt=one.attempt) for one in named)
    from_pool = [record.parts[one.job, one.attempt] for one in named if one.attempt]
    for group, chips in part.chips.items():
        rest = chips - min(chips, record.free_in_group(group))
        available = sum(each.chips.get(group, 0) for each in from_pool)
        if rest:
            part.borrowed[group] = min(rest, available)
            part.local_chips[group] = rest - part.borrowed[group]


def _evict_victims(state: PoolState, job: JobRecord, now_s: float) -> float:
    """Order the sites to hold the chips as the victims leave."""
    for part in job.current_parts():
        part.desired = "prepared"
    return now_s + state.config.eviction_timeout_s


def _commit(state: PoolState, job: JobRecord, now_s: float) -> float:
    """Order every site to run its part."""
    job.refusals = 0
    for part in job.current_parts():
        part.desired, part.committed = "running", True
    return now_s + state.config.start_timeout_s


def _start_training(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Build the rank map from the workers that have checked in, and fix the plan."""
    workers = sorted((worker for part in job.current_parts() for worker in part.workers), key=lambda w: w.rank)
    job.rank_map, job.has_run, job.plan_fixed = RankMap(workers=tuple(workers)), True, True
    job.started_s, job.file_clusters = now_s, tuple(part.cluster for part in job.current_parts())
    job.num_file_clusters = len(job.file_clusters)
    _clear_victims(state, job)


def _release_parts(_state: PoolState, job: JobRecord, _now_s: float) -> None:
    """Order the release of every part."""
    for part in job.parts.values():
        part.desired = "released"


def _cancel_preemption(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Order the release of every part, and clear the victims, which continue to train."""
    _release_parts(state, job, now_s)
    _clear_victims(state, job)


def _finish(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Remove an ended job from the queue."""
    _release_parts(state, job, now_s)
    job.in_site_queues = False
    _drop_claims(state, job)
    job.needs, job.plan_parts, job.waiting_job = None, (), None
    del state.live_jobs[job.id]
    live = state.indexes.live_by_user
    live[job.user] -= 1
    if not live[job.user]:
        del live[job.user]


def _drop_claims(state: PoolState, job: JobRecord) -> None:
    """Release the attempt's links and victims."""
    allocations.release_links(state, job)
    _clear_victims(state, job)
    job.preemptor = None


def _clear_victims(state: PoolState, job: JobRecord) -> None:
    """Clear the job's victims, so that other jobs may preempt them."""
    for one in job.victims:
        victim = state.jobs.get(one.job) if one.attempt else None
        if victim is not None and victim.preemptor == job.id:
            victim.preemptor = None
            for part in victim.current_parts():
                part.checkpoint_requested = part.checkpoint_requested and state.drained_site(victim) is not None
            state.changed_jobs.add(victim.id)
    job.victims = ()
    state.indexes.preemptors.pop(job.id, None)


JOB_TRANSITIONS: Mapping[tuple[JobState, JobState], JobTransition] = {
    ("planning", "choosing"): _no_action,
    ("planning", "waiting"): _no_action,
    ("planning", "failed"): _finish,
    ("planning", "cancelled"): _finish,
    ("choosing", "waiting"): _no_action,
    ("choosing", "cancelled"): _finish,
    ("waiting", "choosing"): _discard_plan,
    ("waiting", "blocked"): _no_action,
    ("waiting", "preparing"): _allocate,
    ("waiting", "preempting"): _allocate_with_victims,
    ("waiting", "failed"): _finish,
    ("waiting", "cancelled"): _finish,
    ("blocked", "waiting"): _no_action,
    ("blocked", "preparing"): _allocate,
    ("blocked", "preempting"): _allocate_with_victims,
    ("blocked", "cancelled"): _finish,
    ("preempting", "preparing"): _evict_victims,
    ("preempting", "stopping"): _cancel_preemption,
    ("preparing", "starting"): _commit,
    ("preparing", "stopping"): _release_parts,
    ("starting", "running"): _start_training,
    ("starting", "stopping"): _release_parts,
    ("running", "stopping"): _release_parts,
    ("stopping", "waiting"): _back_off,
    ("stopping", "succeeded"): _finish,
    ("stopping", "failed"): _finish,
    ("stopping", "cancelled"): _finish,
}
"""Every transition of a job. Only `_allocate` and `_allocate_with_victims` allocate chips."""

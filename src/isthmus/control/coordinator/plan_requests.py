"""Planner requests: which jobs are planned, on which resources, and the effect of the answers.

A job is planned on the free resources. If no plan fits, it is planned on the whole pool, in use or not, so
that its shortages are known and it can join the queues of its sites. A waiting job with a plan is replanned
on the free resources, and keeps its plan until another one fits. The request on the free resources is left out
for an `auto_plan` job that may use none of the free chips, since its answer is known.
"""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import leave_site_queues, move_job
from isthmus.control.preflight.conflicts import excluded_clusters, valid_conflicts
from isthmus.control.queries.accounts.price_quotes import affordable_plans
from isthmus.control.queries.catalogue.bring_forecast import unable_to_fetch
from isthmus.control.queries.sites.probation_rules import sites_that_refuse
from isthmus.control.state import allocations
from isthmus.control.state.job_records import NO_PLAN_AT_ALL, FreeChips, JobRecord, PlannerInput, PoolState
from isthmus.control.state.update_indexes import job_at_key, park, queue_key, reindex_job
from isthmus.core.plan import SEARCH_ENDED_EARLY, PlanSet

PLANNED_WINDOWS = 4
"""Beyond the head of the queue jobs are planned until this many windows of planned jobs wait."""


def request_plans(state: PoolState, job: JobRecord, *, for_whole_pool: bool = False) -> None:
    """Request plans for a job: immediately if its user waits for them, otherwise in the job's turn."""
    job.for_whole_pool = for_whole_pool
    if job.auto_plan:
        state.indexes.unplanned.add(job.user, queue_key(job), in_turns=state.planner_turns)
    else:
        state.indexes.interactive[job.number] = None


def is_plan_requested(state: PoolState, job: JobRecord) -> bool:
    """Return whether a planner request for the job is open or queued."""
    if job.planner_input is not None:
        return True
    return queue_key(job) in state.indexes.unplanned if job.auto_plan else job.number in state.indexes.interactive


def take_due_requests(state: PoolState, now_s: float) -> list[JobRecord]:
    """Remove and return the jobs whose planner requests are sent now.

    `auto_plan` jobs are planned one at a time: each is planned on what the previous one left. Within a priority their
    users take turns.
    """
    indexes = state.indexes
    if not indexes.auto_planning:
        indexes.unplanned.forget_turns()
    found = [state.jobs[indexes.ids_by_number[number]] for number in indexes.interactive]
    indexes.interactive.clear()
    for job in found:
        _send_planner_request(state, job, now_s)
    while indexes.unplanned and not indexes.auto_planning and _may_plan_next(state):
        place = indexes.unplanned.pop()
        if place is None:
            break
        job = job_at_key(state, place)
        if _needs_planner(state, job, now_s):
            _send_planner_request(state, job, now_s)
            found.append(job)
    return found


def _needs_planner(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether an `auto_plan` job must be planned; ask for the whole pool if it may use no free chip.

    Without a free chip no plan fits: the job keeps a plan that the pool can hold, as after an answer without plans.
    """
    if not state.needs_free_chips or job.for_whole_pool:
        return True
    job.conflicts = valid_conflicts(job.conflicts, now_s, state.config.conflict_valid_s)
    chips = _plannable_chips(state, job)
    if chips == allocations.total_chips(state) or _may_use_some(state, job, chips):
        return True
    job.last_planned_free = chips
    if job.plan is not None and allocations.pool_can_hold(state, job):
        return False
    job.for_whole_pool, job.plans = True, None
    return True


def _may_use_some(state: PoolState, job: JobRecord, chips: FreeChips) -> bool:
    """Return whether the placement of a job allows any of these chips."""
    if not any(any(groups.values()) for groups in chips.values()):
        return False
    placement = job.spec.placement
    for name, groups in chips.items():
        cluster = state.clusters[name].cluster
        allowed = placement.admits(name, cluster.owner, cluster.region)
        kinds = {group.name: group.chip for group in cluster.node_groups} if allowed else {}
        if any(groups.get(group) and (not placement.chips or chip in placement.chips) for group, chip in kinds.items()):
            return True
    return False


def _may_plan_next(state: PoolState) -> bool:
    """Return whether the next job is near the head of the queue, or few planned jobs wait.

    The second admits the job of a user behind another user's many jobs, which are ahead in the queue only.
    """
    indexes, window = state.indexes, state.config.queue_window
    if indexes.in_head(indexes.unplanned.first(), window):
        return True
    return state.planner_turns and len(indexes.order) - len(indexes.unplanned) < PLANNED_WINDOWS * window


def withdraw_plan_request(state: PoolState, job: JobRecord) -> None:
    """Cancel the job's planner requests; a late answer is dropped."""
    job.planner_input = None
    state.indexes.auto_planning.discard(job.id)
    state.indexes.interactive.pop(job.number, None)
    if job.auto_plan:
        state.indexes.unplanned.discard(queue_key(job))


def apply_plans(state: PoolState, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Apply the planner's answer to the job."""
    asked, whole = job.planner_input, job.for_whole_pool
    withdraw_plan_request(state, job)
    plans = affordable_plans(state, job, plans)
    if whole:
        job.last_planned_total = asked.free_chips if asked else None
    else:
        job.last_planned_free = asked.free_chips if asked else None
    if not plans.plans:
        _handle_no_plan(state, job, plans, now_s)
    elif not job.auto_plan:
        _offer_plans(state, job, plans, now_s)
    else:
        _assign_fastest_plan(state, job, plans, now_s)
    if asked is not None and asked.freed_count != state.indexes.freed_count:
        state.indexes.capacity_freed = True  # capacity was freed after the request was sent


def has_more_free(before: FreeChips | None, now: FreeChips) -> bool:
    """Return whether some node group has more free chips than before, so that replanning could help."""
    return before is None or any(
        chips > before.get(cluster, {}).get(group, 0)
        for cluster, groups in now.items()
        for group, chips in groups.items()
    )


def _send_planner_request(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Open a planner request on the free resources, without those reserved for others, or the whole pool.

    Sites at which a check of the job has failed are left out.
    """
    storage, gbps = ({}, {}) if job.for_whole_pool else allocations.free_storage_and_links(state)
    job.conflicts = valid_conflicts(job.conflicts, now_s, state.config.conflict_valid_s)
    chips = _plannable_chips(state, job)
    job.round += 1
    job.planner_input = PlannerInput(
        free_chips=chips, free_storage_bytes=storage, free_gbps=gbps, freed_count=state.indexes.freed_count
    )
    if job.auto_plan:
        state.indexes.auto_planning.add(job.id)


def _plannable_chips(state: PoolState, job: JobRecord) -> dict[str, dict[str, int]]:
    """Return the chips on which the job is planned: all, or the free ones, of clusters that are not excluded."""
    if job.for_whole_pool:
        chips = allocations.total_chips(state)
    elif job.number in state.indexes.reservers:
        chips = allocations.copy_free_chips(state)
    else:
        chips = allocations.unreserved_chips(state)
    for name in _excluded_clusters(state, job):
        chips.pop(name, None)
    return chips


def _excluded_clusters(state: PoolState, job: JobRecord) -> set[str]:
    """Return the clusters on which the job is not planned.

    Its checks have failed there, they bring no versions, or they are on probation and refuse it.
    """
    found = (unable_to_fetch(state) if job.versions else set()) | sites_that_refuse(state, job)
    if not job.conflicts:
        return found
    sizes = {name: sum(groups.values()) for name, groups in allocations.total_chips(state).items()}
    return found | excluded_clusters(job.conflicts, sizes)


def _handle_no_plan(state: PoolState, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Handle an answer without plans: plan on the whole pool; if that failed too, wait or park."""
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in plans.refused)) or "no cluster is free"
    if job.plan is not None and allocations.pool_can_hold(state, job):
        return
    if not job.for_whole_pool and job.last_planned_free != allocations.total_chips(state):
        job.plans = plans
        request_plans(state, job, for_whole_pool=True)
        return
    if not job.for_whole_pool:
        job.last_planned_total = job.last_planned_free
    refused = job.plans.refused if job.for_whole_pool and job.plans and not job.plans.plans else plans.refused
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in refused)) or why
    if job.conflicts and job.state == "waiting" and not job.has_run:
        sites = ", ".join(sorted(_excluded_clusters(state, job)))
        allocations.assign_plan(state, job, None)
        move_job(state, job, "failed", now_s, f"{job.last_restart_reason}; no plan without {sites}: {why}")
        return
    job.plans = PlanSet(plans=(), refused=refused)
    leave_site_queues(state, job)
    allocations.assign_plan(state, job, None)
    reason = _no_plan_reason(state, job, plans, why)
    if job.state == "planning":
        move_job(state, job, "waiting", now_s, reason)
    elif reason != job.reason:
        job.reason = reason
        state.changed_jobs.add(job.id)
    if has_more_free(job.last_planned_total or job.last_planned_free, allocations.total_chips(state)):
        request_plans(state, job)  # the pool has grown since the request
        reindex_job(state, job)
    else:
        park(state, job)


def _no_plan_reason(state: PoolState, job: JobRecord, plans: PlanSet, why: str) -> str:
    """Return why a job waits without a plan: for free resources, or because the whole pool cannot hold it.

    The second is the answer to a request on all connected chips, in use or not, if the search came to its end.
    """
    reasons = tuple(dict.fromkeys(refusal.reason for refusal in plans.refused))
    whole = allocations.total_chips(state)
    asked_for_all = job.for_whole_pool or job.last_planned_free == whole
    if whole and asked_for_all and reasons and not any(one.startswith(SEARCH_ENDED_EARLY) for one in reasons):
        return f"{NO_PLAN_AT_ALL}: {'; '.join(reasons)}"
    return f"no plan fits the free resources: {why}"


def _offer_plans(state: PoolState, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Offer the plans to the user: plans that fit now, or plans that the job would have to wait for."""
    if not job.for_whole_pool:
        job.plans = plans
        move_job(state, job, "choosing", now_s, f"{len(plans.plans)} candidate plans: choose one")
        return
    refused = job.plans.refused if job.plans else ()
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in refused)) or "no cluster is free"
    job.plans = PlanSet(plans=plans.plans, refused=refused)
    reason = (
        f"no plan fits the free resources: {why}; {len(plans.plans)} plans fit the idle pool: choose one to "
        "wait for its chips"
    )
    if job.state == "planning":
        move_job(state, job, "waiting", now_s, reason)
    job.reason = reason
    state.changed_jobs.add(job.id)


def _assign_fastest_plan(state: PoolState, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Assign the fastest plan that fits; if none does, keep the job's plan or wait for the fastest."""
    reserved = {} if job.number in state.indexes.reservers else state.indexes.reserved
    fitting = next((plan for plan in plans.plans if allocations.plan_fits(state, job, plan, reserved)), None)
    before = job.plan
    if fitting is None and before is not None and allocations.pool_can_hold(state, job):
        return
    chosen = fitting or plans.plans[0]
    allocations.assign_plan(state, job, chosen)
    if not job.for_whole_pool or job.plans is None:
        job.plans = plans
    else:
        job.plans = PlanSet(plans=plans.plans, refused=job.plans.refused)
    leave_site_queues(state, job)
    if job.state == "planning":
        job.history.add("planned", now_s, job.attempt, f"{len(plans.plans)} candidate plans; uses {chosen.id}")
        move_job(state, job, "waiting", now_s)
    else:
        if job.has_run and (before is None or before.clusters != chosen.clusters):
            where = ", ".join(chosen.clusters)
            job.history.add("planned", now_s, job.attempt, f"planned again: {chosen.id} on {where}")
        reindex_job(state, job)
        state.changed_jobs.add(job.id)

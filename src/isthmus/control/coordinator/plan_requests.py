"""Planner requests: which jobs are planned, on which resources, and the effect of the answers.

A job is planned on the free resources. If no plan fits, it is planned on the whole pool, in use or not, so
that its shortages are known and it can join the queues of its sites. A waiting job with a plan is replanned
on the free resources, and keeps its plan until another one fits.
"""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import dequeue, move
from isthmus.control.state import ledger
from isthmus.control.state.job_records import Asked, FreeChips, JobRecord, State
from isthmus.control.state.queue_index import file_job, key_of, of_key, park
from isthmus.core.plan import Plan, PlanSet


def want_plans(state: State, job: JobRecord, *, whole: bool = False) -> None:
    """Request plans for a job: immediately if its user waits for them, otherwise in the job's turn."""
    job.whole = whole
    if job.auto:
        state.indexes.unplanned.add(key_of(job))
    else:
        state.indexes.curious[job.number] = None


def wants_plans(state: State, job: JobRecord) -> bool:
    """Return whether a planner request for the job is open or queued."""
    if job.asked is not None:
        return True
    return key_of(job) in state.indexes.unplanned if job.auto else job.number in state.indexes.curious


def next_requests(state: State) -> list[JobRecord]:
    """Remove and return the jobs whose planner requests are sent now.

    `auto` jobs are planned one at a time: each is planned on what the previous one left.
    """
    indexes = state.indexes
    found = [state.jobs[indexes.numbers[number]] for number in indexes.curious]
    indexes.curious.clear()
    if indexes.unplanned and not indexes.asked and indexes.is_head(indexes.unplanned[0], state.rules.window):
        found.append(of_key(state, indexes.unplanned.pop(0)))
    for job in found:
        _ask(state, job)
    return found


def withdraw(state: State, job: JobRecord) -> None:
    """Cancel the job's planner requests; a late answer is dropped."""
    job.asked = None
    state.indexes.asked.discard(job.id)
    state.indexes.curious.pop(job.number, None)
    if job.auto:
        state.indexes.unplanned.discard(key_of(job))


def take_plans(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Apply the planner's answer to the job."""
    asked, whole = job.asked, job.whole
    withdraw(state, job)
    if whole:
        job.tried_whole = asked.free_chips if asked else None
    else:
        job.tried_on = asked.free_chips if asked else None
    if not plans.plans:
        _without(state, job, plans, now_s)
    elif not job.auto:
        _let_choose(state, job, plans, now_s)
    else:
        _take(state, job, plans, now_s)
    if asked is not None and asked.growths != state.indexes.growths:
        state.indexes.grown = True  # capacity was freed after the request was sent


def could_help(before: FreeChips | None, now: FreeChips) -> bool:
    """Return whether some node group has more free chips than before, so that replanning could help."""
    return before is None or any(
        chips > before.get(cluster, {}).get(group, 0)
        for cluster, groups in now.items()
        for group, chips in groups.items()
    )


def _ask(state: State, job: JobRecord) -> None:
    """Open a planner request on the free resources, without those reserved for others, or the whole pool."""
    storage, gbps = ledger.left_of_pool(state)
    chips = ledger.whole_pool(state) if job.whole else state.free()
    if job.whole:
        storage, gbps = {}, {}
    elif job.number not in state.indexes.keepers:
        for key, kept in state.indexes.kept.items():
            cluster, _, group = key.partition("/")
            if group in chips.get(cluster, {}):
                chips[cluster] = chips[cluster] | {group: max(0, chips[cluster][group] - kept)}
    job.round += 1
    job.asked = Asked(
        free_chips=chips, free_storage_bytes=storage, free_gbps=gbps, growths=state.indexes.growths
    )
    if job.auto:
        state.indexes.asked.add(job.id)


def _without(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Handle an answer without plans: plan on the whole pool; if that failed too, wait or park."""
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in plans.refused)) or "no cluster is free"
    if job.plan is not None and ledger.holdable(state, job):
        return
    if not job.whole and job.tried_on != ledger.whole_pool(state):
        job.plans = plans
        want_plans(state, job, whole=True)
        return
    if not job.whole:
        job.tried_whole = job.tried_on
    refused = job.plans.refused if job.whole and job.plans and not job.plans.plans else plans.refused
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in refused)) or why
    job.plans = PlanSet(plans=(), refused=refused)
    dequeue(state, job)
    ledger.give_plan(state, job, None)
    reason = f"no plan fits the free resources: {why}"
    if job.state == "planning":
        move(state, job, "waiting", now_s, reason)
    elif reason != job.reason:
        job.reason = reason
        state.touched.add(job.id)
    if could_help(job.tried_whole or job.tried_on, ledger.whole_pool(state)):
        want_plans(state, job)  # the pool has grown since the request
        file_job(state, job)
    else:
        park(state, job)


def _let_choose(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Offer the plans to the user: plans that fit now, or plans that the job would have to wait for."""
    if not job.whole:
        job.plans = plans
        move(state, job, "choosing", now_s, f"{len(plans.plans)} candidate plans: choose one")
        return
    refused = job.plans.refused if job.plans else ()
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in refused)) or "no cluster is free"
    job.plans = PlanSet(plans=plans.plans, refused=refused)
    reason = (
        f"no plan fits the free resources: {why}; {len(plans.plans)} plans fit the idle pool: choose one to "
        "wait for its chips"
    )
    if job.state == "planning":
        move(state, job, "waiting", now_s, reason)
    job.reason = reason
    state.touched.add(job.id)


def _take(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Assign the fastest plan that fits; if none does, keep the job's plan or wait for the fastest."""
    before = job.plan, job.needs, job.cuts, job.run_s
    kept = {} if job.number in state.indexes.keepers else state.indexes.kept
    if not any(_fits(state, job, plan, kept) for plan in plans.plans):
        job.plan, job.needs, job.cuts, job.run_s = before
        job.request, job.holdable_in = None, -1
        if job.plan is not None and ledger.holdable(state, job):
            return
        ledger.give_plan(state, job, plans.plans[0])
    if not job.whole or job.plans is None:
        job.plans = plans
    else:
        job.plans = PlanSet(plans=plans.plans, refused=job.plans.refused)
    dequeue(state, job)
    if job.state == "planning":
        move(state, job, "waiting", now_s)
    else:
        file_job(state, job)
        state.touched.add(job.id)


def _fits(state: State, job: JobRecord, plan: Plan, kept: dict[str, int]) -> bool:
    """Assign a plan to the job; return whether it fits now."""
    ledger.give_plan(state, job, plan)
    return ledger.holdable(state, job) and ledger.fits(state, job.needs or {}, kept)

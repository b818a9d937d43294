"""Who the planner is asked about, on what, and what its answers do.

A job is planned on what is free. Where nothing fits that, it is planned on the whole pool, in use or not, so
that it knows what it waits for and can stand in the queues of its sites. One that has a plan and still waits
is planned again on what is free, but keeps its plan until a better one fits.
"""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import dequeue, move
from isthmus.control.state import ledger
from isthmus.control.state.job_records import Asked, FreeChips, JobRecord, State
from isthmus.control.state.queue_index import file_job, key_of, of_key, park
from isthmus.core.plan import Plan, PlanSet


def want_plans(state: State, job: JobRecord, *, whole: bool = False) -> None:
    """Have the planner asked about a job: at once where its user waits for the answer, else in its turn."""
    job.whole = whole
    if job.auto:
        state.indexes.unplanned.add(key_of(job))
    else:
        state.indexes.curious[job.number] = None


def wants_plans(state: State, job: JobRecord) -> bool:
    """Tell whether the planner is being asked about a job, or will be."""
    if job.asked is not None:
        return True
    return key_of(job) in state.indexes.unplanned if job.auto else job.number in state.indexes.curious


def next_requests(state: State) -> list[JobRecord]:
    """Return the jobs that the planner is to be asked about now.

    Jobs that take their plan by themselves are planned one at a time: each sees what the one before it left.
    """
    books = state.indexes
    found = [state.jobs[books.numbers[number]] for number in books.curious]
    books.curious.clear()
    if books.unplanned and not books.asked and books.is_head(books.unplanned[0], state.rules.window):
        found.append(of_key(state, books.unplanned.pop(0)))
    for job in found:
        _ask(state, job)
    return found


def withdraw(state: State, job: JobRecord) -> None:
    """Ask no more about a job: an answer that still comes is not wanted."""
    job.asked = None
    state.indexes.asked.discard(job.id)
    state.indexes.curious.pop(job.number, None)
    if job.auto:
        state.indexes.unplanned.discard(key_of(job))


def take_plans(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Settle a job whose plans are here."""
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
        state.indexes.grown = True  # what has become free meanwhile it was not planned on


def could_help(before: FreeChips | None, now: FreeChips) -> bool:
    """Tell whether planning again could find more: some node group has more free than before."""
    return before is None or any(
        chips > before.get(cluster, {}).get(group, 0)
        for cluster, groups in now.items()
        for group, chips in groups.items()
    )


def _ask(state: State, job: JobRecord) -> None:
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
    """No plan fits: see what one would need of the whole pool; where that is known, wait for more."""
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
    reason = f"no plan fits what is free: {why}"
    if job.state == "planning":
        move(state, job, "waiting", now_s, reason)
    elif reason != job.reason:
        job.reason = reason
        state.touched.add(job.id)
    if could_help(job.tried_whole or job.tried_on, ledger.whole_pool(state)):
        want_plans(state, job)  # the pool has grown while the planner thought
        file_job(state, job)
    else:
        park(state, job)


def _let_choose(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Offer the plans to the user: those that fit now, or those for which the job would have to wait."""
    if not job.whole:
        job.plans = plans
        move(state, job, "choosing", now_s, f"{len(plans.plans)} candidate plans: choose one")
        return
    refused = job.plans.refused if job.plans else ()
    why = "; ".join(dict.fromkeys(refusal.reason for refusal in refused)) or "no cluster is free"
    job.plans = PlanSet(plans=plans.plans, refused=refused)
    reason = (
        f"no plan fits what is free: {why}; {len(plans.plans)} plans fit the pool when it is empty: choose "
        "one to wait for its chips"
    )
    if job.state == "planning":
        move(state, job, "waiting", now_s, reason)
    job.reason = reason
    state.touched.add(job.id)


def _take(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Take the fastest plan that still fits; where none does, wait for what it has or the fastest."""
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
    """Give the job a plan, and tell whether it fits now."""
    ledger.give_plan(state, job, plan)
    return ledger.holdable(state, job) and ledger.fits(state, job.needs or {}, kept)

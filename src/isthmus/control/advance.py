"""What follows from what is known: a job moves on when its parts allow it, and the queue when chips do."""

from __future__ import annotations

from isthmus.control.lifecycle import move
from isthmus.control.records import Ending, FreeChips, JobRecord, PartRecord, State
from isthmus.core.messages import Fault, explains_more
from isthmus.core.plan import PlanSet


def advance(state: State, job: JobRecord, now_s: float) -> None:
    """Take `job` as far as the states of its parts allow."""
    if job.state == "preparing":
        _prepared(state, job, now_s)
    if job.state == "starting":
        _started(state, job, now_s)
    if job.state == "running":
        _ran(state, job, now_s)
    if job.state == "stopping":
        _explained(state, job, now_s)
    if job.state == "stopping":
        _stopped(state, job, now_s)


def _prepared(state: State, job: JobRecord, now_s: float) -> None:
    """All hold their parts: commit. One does not: all let go."""
    for part in job.present():
        if part.state not in ("ordered", "prepared"):
            refuse(state, job, f"{part.cluster} {_said(part)}", now_s)
            return
    if all(part.state == "prepared" for part in job.present()):
        move(state, job, "starting", now_s)


def _started(state: State, job: JobRecord, now_s: float) -> None:
    """Every rank has checked in: hand out the rank map."""
    if _failed_over(state, job, now_s) or job.plan is None:
        return
    ranks = {worker.rank for part in job.present() for worker in part.workers}
    if len(ranks) == len(job.plan.stages):
        move(state, job, "running", now_s)


def _ran(state: State, job: JobRecord, now_s: float) -> None:
    """Every part has succeeded: so has the job, once its cards are back."""
    if _failed_over(state, job, now_s):
        return
    if all(part.state == "succeeded" for part in job.present()):
        stop(state, job, "succeeded", "trained to the end", now_s)


def _stopped(state: State, job: JobRecord, now_s: float) -> None:
    """Leave once no process and no card is held that anyone could still give back or be harmed by.

    A part that was never told to run has no process and will never have one. Where its site is away it is
    not waited for; its chips stay promised until the site says `released`.
    """
    for part in job.unreleased():
        if part.committed or state.clusters[part.cluster].connected:
            return
    move(state, job, job.ending, now_s, job.reason)


def _explained(state: State, job: JobRecord, now_s: float) -> None:
    """Tell another reason where a site has since said what the failure really was.

    A site that merely lost a peer may be the first to report; before the attempt is over all have.
    """
    if job.fault is None or job.ending not in ("waiting", "failed"):
        return
    part = _culprit(job.present())
    if explains_more(part.fault, job.fault):
        job.restarts -= job.ending == "waiting"
        _blame(state, job, part, now_s)


def _failed_over(state: State, job: JobRecord, now_s: float) -> bool:
    """Stop the job where a part was lost after the commit; return whether one was."""
    lost = [part for part in job.present() if part.state in ("refused", "failed", "released")]
    if lost:
        _blame(state, job, _culprit(lost), now_s)
    return bool(lost)


def _culprit(parts: list[PartRecord]) -> PartRecord:
    """Return the part whose failure explains most: the first of those."""
    found = parts[0]
    for part in parts[1:]:
        found = part if explains_more(part.fault, found.fault) else found
    return found


def _blame(state: State, job: JobRecord, part: PartRecord, now_s: float) -> None:
    reason = f"{part.cluster} {_said(part)}"
    if part.fault == "permanent":
        reason += "; another attempt would end in the same way"
    fail(state, job, reason, now_s, part.fault or "own")


def _said(part: PartRecord) -> str:
    """Say what became of a part, in the site's own words where it gave any."""
    what = {"released": "gave its part up", "failed": "failed its part"}.get(part.state, "refused its part")
    return f"{what} (ranks {', '.join(map(str, part.ranks))}): {part.detail or 'no reason given'}"


def stop(state: State, job: JobRecord, ending: Ending, reason: str, now_s: float) -> None:
    """Release every part; the job then goes to `ending`."""
    job.ending = ending
    if job.state == "stopping":
        job.reason = reason
        state.touched.add(job.id)
    else:
        move(state, job, "stopping", now_s, reason)
    _stopped(state, job, now_s)


def refuse(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """Give the attempt up before its commit; the job is tried again after a back-off."""
    job.refusals += 1
    stop(state, job, "waiting", reason, now_s)


def fail(state: State, job: JobRecord, reason: str, now_s: float, fault: Fault = "own") -> None:
    """Give the attempt up after its commit; start again where that could help and restarts are left."""
    most = job.submission.job.max_restarts
    job.fault = fault
    if fault == "permanent":
        stop(state, job, "failed", reason, now_s)
    elif job.restarts < most:
        job.restarts += 1
        job.setback = f"restart {job.restarts} of {most}: {reason}"
        stop(state, job, "waiting", job.setback, now_s)
    else:
        stop(state, job, "failed", f"{reason}; restarts used: {job.restarts} of {most}", now_s)


def take_plans(state: State, job: JobRecord, plans: PlanSet, now_s: float) -> None:
    """Settle a job whose plans are here: the user chooses, or the fastest plan that still fits is taken."""
    job.plans = plans
    if not plans.plans:
        why = "; ".join(dict.fromkeys(refusal.reason for refusal in plans.refused)) or "no cluster is free"
        move(state, job, "waiting", now_s, f"no plan fits what is free: {why}")
    elif not job.auto:
        move(state, job, "choosing", now_s, f"{len(plans.plans)} candidate plans: choose one")
    else:
        job.plan = next((plan for plan in plans.plans if not state.shortfall(plan)), None)
        lacks = "" if job.plan else state.shortfall(plans.plans[0])
        move(state, job, "waiting", now_s, lacks)


def schedule(state: State, now_s: float) -> list[JobRecord]:
    """Try the waiting jobs in the order of their submission; return those the planner is to be asked about.

    Jobs that take their plan by themselves are planned one at a time: each sees what the one before it left.
    """
    free = state.free()
    asked: list[JobRecord] = []
    planner_taken = any(job.auto and job.asked for job in state.live.values())
    for job in list(state.live.values()):
        if job.state == "waiting" and job.deadline_s is None and _try(state, job, free, now_s):
            free = state.free()
        if job.state == "planning" and not job.asked and not (job.auto and planner_taken):
            job.round, job.asked, job.tried_on = job.round + 1, True, free
            planner_taken = planner_taken or job.auto
            asked.append(job)
    return asked


def _try(state: State, job: JobRecord, free: FreeChips, now_s: float) -> bool:
    """Hold the plan's chips if they are free, or else plan again if that could help; return whether held."""
    lacks = state.shortfall(job.plan) if job.plan else ""
    if job.plan and not lacks:
        move(state, job, "preparing", now_s)
        return True
    if job.plan and job.pinned:
        reason = f"plan {job.plan.id} does not fit now: {lacks}"
        if reason != job.reason:
            job.reason = reason
            state.touched.add(job.id)
    elif job.tried_on is None or _could_help(job, job.tried_on, free):
        move(state, job, "planning", now_s)
    return False


def _could_help(job: JobRecord, before: FreeChips, now: FreeChips) -> bool:
    """Tell whether planning again could find a plan: more is free, or plans that there were went stale."""
    if job.plans is not None and job.plans.plans:
        return before != now
    return any(
        chips > before.get(cluster, {}).get(group, 0)
        for cluster, groups in now.items()
        for group, chips in groups.items()
    )

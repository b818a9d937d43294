"""The lives of a job and of a part, as two tables: `(from, to): what happens on the way`.

A step that a table lacks is a bug of the coordinator and raises with the story of the thing. What an agent
reports is never trusted to be a step: `observe` takes it in, drops what is late and calls the rest by name.

    job   planning -> choosing -> waiting -> preparing -> starting -> running -> stopping -> succeeded
          (plans; the user's choice; chips; held everywhere; checked in; trained; released everywhere)
    part  ordered -> prepared -> running -> succeeded | failed -> released;  ordered -> refused -> released
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.control.records import JobRecord, PartLife, PartRecord, State
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages import ObservedPart, RankMap, explains_more
from isthmus.core.views import JobState

JobStep = Callable[[State, JobRecord, float], None]
PartStep = Callable[[PartRecord, ObservedPart], PartLife]


def move(state: State, job: JobRecord, to: JobState, now_s: float, reason: str = "") -> None:
    """Take `job` to the state `to`; raise `IllegalTransitionError` where the table has no such step."""
    step = JOB_STEPS.get((job.state, to))
    if step is None:
        raise IllegalTransitionError(
            f"job {job.id}: no step from {job.state} to {to}; its story: " + " | ".join(job.story),
            hint="this is a bug: please report it with the message",
        )
    job.story.append(f"{now_s:.3f} {job.state} -> {to} (attempt {job.attempt}) {reason}".rstrip())
    job.deadline_s = None
    step(state, job, now_s)
    job.state, job.reason, job.changed_s = to, reason, now_s
    state.touched.add(job.id)


def _plan(_state: State, job: JobRecord, _now_s: float) -> None:
    """Ask the planner anew: whatever plan there was is given up."""
    job.asked, job.plan, job.pinned = False, None, False


def _settle(_state: State, job: JobRecord, _now_s: float) -> None:
    """Stay, with nothing held and nothing due."""
    job.asked = False


def _wait_out(state: State, job: JobRecord, now_s: float) -> None:
    """Wait after an attempt: at once ready to go on, unless a site refused."""
    if job.refusals:
        job.deadline_s = now_s + state.rules.backoff_s(job.refusals)


def _hold(state: State, job: JobRecord, now_s: float) -> None:
    """Open the next attempt: promise every part of the plan its chips."""
    if job.plan is None:
        raise IllegalTransitionError(f"job {job.id}: an attempt without a plan; its story: {list(job.story)}")
    job.attempt += 1
    job.rank_map, job.fault = None, None
    job.parts = {key: part for key, part in job.parts.items() if part.state != "released"}
    for cut in job.plan.parts():
        part = PartRecord(
            job=job.id, attempt=job.attempt, cluster=cut.cluster, ranks=cut.ranks, chips=dict(cut.chips)
        )
        job.parts[job.attempt, cut.cluster] = part
        state.clusters[cut.cluster].promised[job.id, job.attempt] = part
    job.deadline_s = now_s + state.rules.reservation_s


def _commit(state: State, job: JobRecord, now_s: float) -> None:
    """Every site holds its part: have all of them run."""
    job.refusals = 0
    for part in job.present():
        part.desired, part.committed = "running", True
    job.deadline_s = now_s + state.rules.start_s


def _connect(_state: State, job: JobRecord, _now_s: float) -> None:
    """Every rank has checked in: hand out the rank map. The plan is now the one the job trains under."""
    workers = sorted((worker for part in job.present() for worker in part.workers), key=lambda w: w.rank)
    job.rank_map, job.ran, job.pinned = RankMap(workers=tuple(workers)), True, True


def _release(_state: State, job: JobRecord, _now_s: float) -> None:
    """Take every part back."""
    for part in job.parts.values():
        part.desired = "released"


def _end(state: State, job: JobRecord, _now_s: float) -> None:
    """Leave the queue for good."""
    job.asked = False
    del state.live[job.id]


JOB_STEPS: Mapping[tuple[JobState, JobState], JobStep] = {
    ("planning", "choosing"): _settle,
    ("planning", "waiting"): _settle,
    ("planning", "failed"): _end,
    ("planning", "cancelled"): _end,
    ("choosing", "waiting"): _settle,
    ("choosing", "cancelled"): _end,
    ("waiting", "planning"): _plan,
    ("waiting", "preparing"): _hold,
    ("waiting", "cancelled"): _end,
    ("preparing", "starting"): _commit,
    ("preparing", "stopping"): _release,
    ("starting", "running"): _connect,
    ("starting", "stopping"): _release,
    ("running", "stopping"): _release,
    ("stopping", "waiting"): _wait_out,
    ("stopping", "succeeded"): _end,
    ("stopping", "failed"): _end,
    ("stopping", "cancelled"): _end,
}
"""Every step a job can take. Chips are promised in one place, `_hold`, and nowhere else."""


def observe(state: State, part: PartRecord, seen: ObservedPart) -> bool:
    """Take in what a site says of a part; return whether anything about it changed.

    A state behind the known one, or another at the same height, comes from a late report: it is dropped.
    """
    if seen.state == part.state:
        if not (_check_in(part, seen) | _explain(part, seen)):
            return False
        state.touched.add(part.job)
        return True
    if _HEIGHT[seen.state] <= _HEIGHT[part.state]:
        return False
    step = PART_STEPS.get((part.state, seen.state))
    if step is None:
        raise IllegalTransitionError(
            f"part of job {part.job}, attempt {part.attempt} at {part.cluster}: no step from {part.state} "
            f"to {seen.state}; its story: " + " | ".join(part.story),
            hint="this is a bug: please report it with the message",
        )
    part.story.append(f"{part.state} -> {seen.state} {seen.detail}".rstrip())
    if not _explain(part, seen) and (seen.state != "released" or not part.detail):
        part.detail = seen.detail
    part.state = step(part, seen)
    _check_in(part, seen)
    if part.state == "released":
        del state.clusters[part.cluster].promised[part.job, part.attempt]
    state.touched.add(part.job)
    return True


def _check_in(part: PartRecord, seen: ObservedPart) -> bool:
    """Add the addresses of workers not yet known; a site speaks for its own ranks only."""
    known = {worker.rank for worker in part.workers}
    fresh = tuple(
        worker
        for worker in seen.workers
        if worker.rank in part.ranks and worker.rank not in known and worker.cluster == part.cluster
    )
    part.workers += fresh
    return bool(fresh)


def _explain(part: PartRecord, seen: ObservedPart) -> bool:
    """Take over what the site says of a failure where it explains more than what is known."""
    if not explains_more(seen.fault, part.fault):
        return False
    part.fault, part.detail = seen.fault, seen.detail
    return True


def _take(_part: PartRecord, seen: ObservedPart) -> PartLife:
    """Believe the site."""
    return seen.state


def _take_committed(part: PartRecord, seen: ObservedPart) -> PartLife:
    """Believe that it runs if it was told to; a part that runs untold has failed."""
    if part.committed:
        return seen.state
    part.detail = f"the site reports '{seen.state}' of a part that was never told to run"
    return "failed"


PART_STEPS: Mapping[tuple[PartLife, PartLife], PartStep] = {
    ("ordered", "queued"): _take,
    ("ordered", "ready"): _take,
    ("ordered", "prepared"): _take,
    ("ordered", "refused"): _take,
    ("ordered", "running"): _take_committed,
    ("ordered", "succeeded"): _take_committed,
    ("ordered", "failed"): _take,
    ("ordered", "released"): _take,
    ("queued", "ready"): _take,
    ("queued", "prepared"): _take,
    ("queued", "refused"): _take,
    ("queued", "running"): _take_committed,
    ("queued", "succeeded"): _take_committed,
    ("queued", "failed"): _take,
    ("queued", "released"): _take,
    ("ready", "prepared"): _take,
    ("ready", "refused"): _take,
    ("ready", "running"): _take_committed,
    ("ready", "succeeded"): _take_committed,
    ("ready", "failed"): _take,
    ("ready", "released"): _take,
    ("prepared", "refused"): _take,
    ("prepared", "running"): _take_committed,
    ("prepared", "succeeded"): _take_committed,
    ("prepared", "failed"): _take,
    ("prepared", "released"): _take,
    ("refused", "running"): _take_committed,
    ("refused", "succeeded"): _take_committed,
    ("refused", "failed"): _take,
    ("refused", "released"): _take,
    ("running", "succeeded"): _take,
    ("running", "failed"): _take,
    ("running", "released"): _take,
    ("succeeded", "released"): _take,
    ("failed", "released"): _take,
}
"""Every step a part can be seen to take: forward only; a report in between may have been lost."""

_HEIGHT: Mapping[PartLife, int] = {
    "ordered": 0,
    "queued": 1,
    "ready": 2,
    "prepared": 3,
    "refused": 4,
    "running": 5,
    "succeeded": 6,
    "failed": 6,
    "released": 7,
}

"""Joint preemption: at all owners or none; no victim is stopped before its checkpoint is verified.

    agreed     every site keeps the chips of its part: free ones, and those of the victims (`ready`)
    all ready  every part of every training victim saves and verifies a checkpoint
    verified   the parts of the victims are released; the sites hold the freed chips (`prepared`)

A failure before the last step undoes the first two; the victims have then only saved a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.coordinator.attempts import give_way, said, stop
from isthmus.control.coordinator.job_lifecycle import move
from isthmus.control.state.job_records import JobRecord, State, VictimAt
from isthmus.control.state.queue_index import set_deadline
from isthmus.control.state.site_records import PartRecord


def begin_preemption(state: State, job: JobRecord, victims: Sequence[VictimAt], now_s: float) -> None:
    """Begin to preempt `victims` for a waiting job."""
    job.victims = tuple(sorted(victims))
    names = ", ".join(dict.fromkeys(one.job for one in job.victims))
    move(state, job, "preempting", now_s, f"preempting {names}: waiting for its sites to be ready")


def advance_preemption(state: State, job: JobRecord, now_s: float) -> None:
    """Continue once all sites are ready and all checkpoints verified; abort if that became impossible."""
    why = _obstacle(state, job)
    if why:
        give_up(state, job, why, now_s)
        return
    if any(part.state != "ready" for part in job.present()):
        return
    training = [victim for victim in pool_victims(state, job) if victim.state == "running"]
    for victim in training:
        if not all(part.protect for part in victim.present()):
            _ask_protection(state, job, victim, now_s)
    if all(protected_step(victim) is not None for victim in training):
        _execute(state, job, now_s)


def give_up(state: State, job: JobRecord, why: str, now_s: float) -> None:
    """Abort a preemption before any victim was stopped; the job waits again."""
    job.setback = f"preemption aborted, no job was stopped: {why}"
    stop(state, job, "waiting", job.setback, now_s)


def pool_victims(state: State, job: JobRecord) -> list[JobRecord]:
    """Return the victims of a preempting job that are jobs of the pool."""
    names = dict.fromkeys(one.job for one in job.victims if one.attempt)
    return [state.jobs[name] for name in names if name in state.jobs]


def protected_step(victim: JobRecord) -> int | None:
    """Return the step of the checkpoint that every part of a job has verified; None if there is none."""
    steps = {part.protection.step if part.protection else None for part in victim.present()}
    return steps.pop() if len(steps) == 1 else None


def waits_for(state: State, job: JobRecord) -> str:
    """Describe what a preempting job still waits for."""
    slow = [part.cluster for part in job.present() if part.state != "ready"]
    if slow:
        return f"{', '.join(slow)} did not get ready within {state.rules.reservation_s:g} s"
    late = [v.id for v in pool_victims(state, job) if v.state == "running" and protected_step(v) is None]
    return f"no verified checkpoint of {', '.join(late)} within {state.rules.protect_s:g} s"


def _obstacle(state: State, job: JobRecord) -> str:
    """Return why the preemption must abort; empty if it can continue."""
    for part in job.present():
        if not state.clusters[part.cluster].connected:
            return f"{part.cluster} is not connected"
        if part.state not in ("ordered", "queued", "ready"):
            return f"{part.cluster} {said(part)}"
    for one in job.victims:
        if not _still_there(state, job, one):
            return f"{one.job} at {one.cluster} has already ended"
    return ""


def _still_there(state: State, job: JobRecord, one: VictimAt) -> bool:
    if not one.attempt:
        seen = state.clusters[one.cluster].local.get(one.job)
        return seen is not None and seen.running
    victim = state.jobs.get(one.job)
    if victim is None or victim.victim_of != job.id or victim.attempt != one.attempt:
        return False
    if victim.state == "running":
        return all(_alive(state, part) for part in victim.present())
    return victim.state in ("preparing", "starting")


def _alive(state: State, part: PartRecord) -> bool:
    return part.state == "running" and state.clusters[part.cluster].connected


def _ask_protection(state: State, job: JobRecord, victim: JobRecord, now_s: float) -> None:
    for part in victim.present():
        part.protect, part.protection = True, None
    set_deadline(state, job, now_s + state.rules.protect_s)
    job.reason = f"waiting for a verified checkpoint of {victim.id}"
    state.touched |= {job.id, victim.id}


def _execute(state: State, job: JobRecord, now_s: float) -> None:
    """Stop the victims, which wait again with their checkpoints, and hold their chips."""
    victims = pool_victims(state, job)
    names = ", ".join(dict.fromkeys(one.job for one in job.victims))
    move(state, job, "preparing", now_s, f"{names} is leaving")
    for victim in victims:
        victim.saved_step = protected_step(victim) or 0
        checkpoint = f", checkpoint at step {victim.saved_step}" if victim.saved_step else ""
        give_way(state, victim, f"job {job.id} of priority '{job.priority}' preempts it{checkpoint}", now_s)

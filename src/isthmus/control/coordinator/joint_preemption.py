"""Joint preemption: at all owners or none; no victim is stopped before its checkpoint is verified.

    agreed     every site keeps the chips of its part: free ones, and those of the victims (`ready`)
    all ready  every part of every training victim saves and verifies a checkpoint
    verified   the parts of the victims are released; the sites hold the freed chips (`prepared`)

A failure before the last step undoes the first two; the victims have then only saved a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.coordinator.attempts import abort_preemption, part_failure_text, preempt_job
from isthmus.control.coordinator.job_lifecycle import move_job
from isthmus.control.coordinator.sites.elastic_parts import let_part_go
from isthmus.control.state.job_records import ClusterVictim, JobRecord, PoolState
from isthmus.control.state.site_records import PartRecord
from isthmus.control.state.update_indexes import set_state_deadline


def begin_preemption(
    state: PoolState,
    job: JobRecord,
    victims: Sequence[ClusterVictim],
    now_s: float,
    *,
    reclaims: bool = False,
    moves: bool = False,
) -> None:
    """Begin to preempt `victims` for a waiting job; it `reclaims` what its project is guaranteed.

    With `moves` they are moved to other devices of their site, and go on there with the same plan.
    """
    job.victims, job.reclaims, job.moves = tuple(sorted(victims)), reclaims, moves
    names = ", ".join(dict.fromkeys(one.job for one in job.victims))
    text = f"moving {names} to other devices to make room" if moves else f"preempting {names}"
    move_job(state, job, "preempting", now_s, f"{text}: waiting for its sites to be ready")


def advance_preemption(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Continue once all sites are ready and all checkpoints verified; abort if that became impossible."""
    why = _abort_reason(state, job)
    if why:
        abort_preemption(state, job, why, now_s)
        return
    if any(part.state != "ready" for part in job.current_parts()):
        return
    training = [one for one in pool_victims(state, job) if one.state == "running" and not _goes_on(job, one)]
    for victim in training:
        if not all(part.checkpoint_requested for part in victim.training_parts()):
            _request_checkpoint(state, job, victim, now_s)
    if all(victim.verified_step() is not None for victim in training):
        _evict_victims(state, job, now_s)


def pool_victims(state: PoolState, job: JobRecord) -> list[JobRecord]:
    """Return the victims of a preempting job that are jobs of the pool."""
    names = dict.fromkeys(one.job for one in job.victims if one.attempt)
    return [state.jobs[name] for name in names if name in state.jobs]


def timeout_reason(state: PoolState, job: JobRecord) -> str:
    """Describe what a preempting job still waits for."""
    slow = [part.cluster for part in job.current_parts() if part.state != "ready"]
    if slow:
        return f"{', '.join(slow)} did not get ready within {state.config.reservation_timeout_s:g} s"
    running = [v for v in pool_victims(state, job) if v.state == "running" and not _goes_on(job, v)]
    late = [v.id for v in running if v.verified_step() is None]
    return f"no verified checkpoint of {', '.join(late)} within {state.config.checkpoint_timeout_s:g} s"


def _abort_reason(state: PoolState, job: JobRecord) -> str:
    """Return why the preemption must abort; empty if it can continue."""
    for part in job.current_parts():
        if not state.clusters[part.cluster].connected:
            return f"{part.cluster} is not connected"
        if part.state not in ("ordered", "queued", "ready"):
            return f"{part.cluster} {part_failure_text(part)}"
    for one in job.victims:
        if not _victim_valid(state, job, one):
            return f"{one.job} at {one.cluster} has already ended"
    return ""


def _victim_valid(state: PoolState, job: JobRecord, one: ClusterVictim) -> bool:
    if not one.attempt:
        seen = state.clusters[one.cluster].local_jobs.get(one.job)
        return seen is not None and seen.running
    victim = state.jobs.get(one.job)
    if victim is None or victim.preemptor != job.id or victim.attempt != one.attempt:
        return False
    if victim.state == "running":
        return all(_is_training(state, part) for part in victim.training_parts())
    return victim.state in ("preparing", "starting")


def _clusters_given(job: JobRecord, victim: JobRecord) -> list[str]:
    """Return the clusters at which a victim gives its chips to a job."""
    return [one.cluster for one in job.victims if one.job == victim.id and one.attempt == victim.attempt]


def _goes_on(job: JobRecord, victim: JobRecord) -> bool:
    """Return whether a victim trains on, since only parts that decode give their chips."""
    return victim.may_go_on_without(_clusters_given(job, victim))


def _is_training(state: PoolState, part: PartRecord) -> bool:
    return part.state == "running" and state.clusters[part.cluster].connected


def _request_checkpoint(state: PoolState, job: JobRecord, victim: JobRecord, now_s: float) -> None:
    for part in victim.training_parts():
        part.checkpoint_requested, part.verified_checkpoint = True, None
    set_state_deadline(state, job, now_s + state.config.checkpoint_timeout_s)
    job.reason = f"waiting for a verified checkpoint of {victim.id}"
    state.changed_jobs |= {job.id, victim.id}


def _evict_victims(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Stop the victims, which wait again with their checkpoints, and hold their chips."""
    victims = pool_victims(state, job)
    names = ", ".join(dict.fromkeys(one.job for one in job.victims))
    move_job(state, job, "preparing", now_s, f"{names} is leaving")
    for victim in victims:
        if _goes_on(job, victim):
            for part in victim.remaining_parts():
                if part.cluster in _clusters_given(job, victim):
                    let_part_go(
                        state, victim, part, f"job {job.id} of priority '{job.priority}' takes its chips", now_s
                    )
            continue
        victim.saved_step = victim.verified_step() or 0
        checkpoint = f", checkpoint at step {victim.saved_step}" if victim.saved_step else ""
        reason = f"job {job.id} of priority '{job.priority}' preempts it{checkpoint}"
        if job.reclaims:
            reason = f"project {job.project} takes back chips that it is guaranteed, for job {job.id}{checkpoint}"
        if job.moves:
            state.moved[victim.id] = now_s
            reason = f"to other devices, so that job {job.id} has a place{checkpoint}"
        preempt_job(state, victim, reason, now_s, by=job.id, moves=job.moves)

"""Reconciliation of a log that is older than the pool: the server was restored from a backup.

The epoch rises above every fence that an agent has obeyed, so that orders count again. Until every known site has
reported, no job of the backup starts or commits, since a later attempt of it may run somewhere. A running part that
the log does not have goes on: only its own end, the end of its job, or an operator releases it, and the site's report
of `released` is the proof. The next attempt of a job gets a number above all reported ones, so that no order of it
meets a part of an earlier one.
"""

from __future__ import annotations

from isthmus.control.state.events import AgentReported, LogRestored, UnknownJobEnded
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState
from isthmus.control.state.restored_log import MAX_ATTEMPTS_AHEAD, PartKey, RestoredLog
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.errors import NotFoundError


def admit_restored(state: PoolState, event: LogRestored) -> bool:
    """Return whether the log was restored, or a site has obeyed a later epoch than the log has."""
    return event.fence == 0 or event.fence > state.epoch


def begin_reconciliation(state: PoolState, event: LogRestored) -> None:
    """Raise the epoch; hold the jobs of the log until every other site has reported."""
    state.epoch = max(state.epoch, event.fence) + 1
    if event.fence and state.restored is not None and state.restored.unheard:
        state.restored.unheard.discard(event.cluster or "")
        return
    unheard = state.clusters.keys() - {event.cluster} - set(event.gone)
    known = state.restored
    state.restored = RestoredLog(at_s=event.now_s, last_job=state.num_submitted, unheard=unheard)
    if known is not None:
        state.restored.attempts |= known.attempts
    state.changed_jobs |= state.live_jobs.keys()


def note_report(state: PoolState, record: ClusterRecord, event: AgentReported) -> None:
    """Record that a site has reported since the restore, and what of it the log does not have."""
    restored, name = state.restored, event.cluster.name
    if restored is None:
        return
    before = name in restored.unheard, restored.unknown.get(name, [])
    restored.unheard.discard(name)
    strangers = [part for part in event.parts if _is_unknown(state, record, (part.job, part.attempt))]
    for part in strangers:
        job = state.jobs.get(part.job)
        if job is not None and part.attempt <= job.attempt + MAX_ATTEMPTS_AHEAD:
            restored.attempts[job.id] = max(part.attempt, restored.attempts.get(job.id, 0))
        if part.state in ("failed", "refused"):
            restored.ended.add((part.job, part.attempt))
    restored.unknown.pop(name, None)
    running = list(dict.fromkeys((part.job, part.attempt) for part in strangers if part.state == "running"))
    if running:
        restored.unknown[name] = running
    if before != (False, running):
        state.indexes.capacity_freed = True
        state.changed_jobs |= {job_id for job_id, _ in (*before[1], *running) if job_id in state.jobs}


def forget_site(state: PoolState, cluster: str) -> None:
    """Wait no longer for a site, and count its unknown parts as ended: an operator has declared it gone."""
    if state.restored is not None:
        state.restored.unheard.discard(cluster)
        state.restored.unknown.pop(cluster, None)
        state.indexes.capacity_freed = True


def is_awaited(state: PoolState, cluster: str) -> bool:
    """Return whether the log was restored and the site has not reported since."""
    return state.restored is not None and cluster in state.restored.unheard


def hold_reason(state: PoolState, job: JobRecord) -> str:
    """Return why a job must not start yet, since it may run already; "" if it may."""
    restored = state.restored
    if restored is None or job.number > restored.last_job:
        return ""
    if restored.unheard:
        awaited = ", ".join(sorted(restored.unheard))
        return f"the server was restored from a backup, and the job may run at {awaited}: waits until it has reported"
    for cluster, keys in restored.unknown.items():
        attempts = [attempt for job_id, attempt in keys if job_id == job.id]
        if attempts:
            return (
                f"attempt {attempts[0]} of the job, begun after the backup that the server was restored from, "
                f"runs at {cluster}: waits until it has ended"
            )
    return ""


def may_start_now(state: PoolState, job: JobRecord) -> bool:
    """Return whether a job may start; otherwise say why in its reason."""
    reason = hold_reason(state, job)
    if reason and job.reason != reason:
        job.reason = reason
        state.changed_jobs.add(job.id)
    return not reason


def next_attempt(state: PoolState, job: JobRecord) -> int:
    """Return the number of the job's next attempt, above all that any site has reported."""
    reported = state.restored.attempts.get(job.id, 0) if state.restored is not None else 0
    return max(job.attempt, reported) + 1


def admit_unknown_end(state: PoolState, event: UnknownJobEnded) -> bool:
    """Return True; raise `NotFoundError` if no site reports a running part of such a job."""
    if not _unknown_keys(state, event.job_id):
        raise NotFoundError(
            f"no site runs a job '{event.job_id}' that this server does not know", hint="`isthmus pool` lists them"
        )
    return True


def end_unknown_job(state: PoolState, event: UnknownJobEnded) -> None:
    """Release the unknown parts of a job at every site."""
    if state.restored is not None:
        state.restored.ended |= _unknown_keys(state, event.job_id)


def _unknown_keys(state: PoolState, job_id: str) -> set[PartKey]:
    found = state.restored.unknown.values() if state.restored is not None else ()
    return {key for keys in found for key in keys if key[0] == job_id}


def _is_unknown(state: PoolState, record: ClusterRecord, key: PartKey) -> bool:
    """Return whether the log has neither the part nor a later attempt of its job, and the job has not ended."""
    job = state.jobs.get(key[0])
    if key in record.parts:
        return False
    return job is None or (key[1] > job.attempt and job.state not in TERMINAL_STATES)

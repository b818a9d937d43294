"""`JobStateLogger`: logs every state change of a job and its parts, with their ids as record fields."""

from __future__ import annotations

import logging

from isthmus.control.queries.agent_orders import held_parts
from isthmus.control.service.coordinator_actor import AppliedEvent
from isthmus.control.state.events import AgentReported, LogRestored
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord
from isthmus.control.state.restored_log import PartKey

_log = logging.getLogger("isthmus.server")


class JobStateLogger:
    """Logs what changed in a job since its last call. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, str]] = {}
        self._parts: dict[str, dict[str, tuple[str, str]]] = {}
        self._strangers: dict[str, list[PartKey]] = {}

    def log_restore(self, applied: AppliedEvent) -> None:
        """Log that the log is that of a backup, or which running parts of a reporting site it does not have."""
        event, state = applied.event, applied.coordinator.state
        if isinstance(event, LogRestored) and state.restored is not None:
            cause = "it was restored"
            if event.cluster is not None:
                cause = f"the agent of {event.cluster} has obeyed orders of epoch {event.fence}"
            awaited = ", ".join(sorted(state.restored.unheard)) or "none"
            text = "the log of this server is older than the pool (%s): the epoch is now %d; no job of the log starts "
            text += "before these sites have reported: %s. `isthmus pool` shows what runs that the log does not have"
            _log.warning(text, cause, state.epoch, awaited)
        elif isinstance(event, AgentReported) and (state.restored is not None or self._strangers):
            cluster, found = event.cluster.name, held_parts(state, event.cluster.name)
            if found != self._strangers.get(cluster, []):
                self._strangers[cluster] = found
                names = ", ".join(f"{job}/{attempt}" for job, attempt in found) or "nothing more"
                text = "%s runs parts that this log does not have: %s. They go on until they end; "
                text += "`isthmus cancel JOB` ends a known job, `isthmus cancel JOB --unknown` another (admin)"
                _log.warning(text, cluster, names)

    def log_changes(self, applied: AppliedEvent, job_id: str) -> None:
        """Log what an event changed in a job: its state and reason, and the states of its parts."""
        job = applied.coordinator.state.jobs.get(job_id)
        if job is None or not _log.isEnabledFor(logging.INFO):
            return
        fields = {"job": job_id, "attempt": job.attempt, "event": applied.number}
        if self._jobs.get(job_id) != (job.state, job.reason):
            self._jobs[job_id] = (job.state, job.reason)
            reason = f" ({job.reason})" if job.reason else ""
            _log.info("job %s: %s%s", job_id, job.state, reason, extra=fields | {"state": job.state})
        self._log_part_changes(job, fields)
        if job.state in TERMINAL_STATES and not job.unreleased_parts():
            self.forget(job_id)

    def _log_part_changes(self, job: JobRecord, fields: dict[str, object]) -> None:
        known = self._parts.setdefault(job.id, {})
        for part in job.parts.values():
            name, seen = f"{job.id}/{part.attempt}@{part.cluster}", (part.desired, part.state)
            if known.get(name) == seen:
                continue
            known[name] = seen
            more = {"part": name, "cluster": part.cluster, "attempt": part.attempt, "observed": part.state}
            detail = f" ({part.detail})" if part.detail else ""
            _log.info("part %s: %s, desired %s%s", name, part.state, part.desired, detail, extra=fields | more)

    def forget(self, job_id: str) -> None:
        """Drop a job's last logged states."""
        self._jobs.pop(job_id, None)
        self._parts.pop(job_id, None)

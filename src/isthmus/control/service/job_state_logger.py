"""`JobStateLogger`: logs every state change of a job and its parts, with their ids as record fields."""

from __future__ import annotations

import logging

from isthmus.control.service.coordinator_actor import AppliedEvent
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord

_log = logging.getLogger("isthmus.server")


class JobStateLogger:
    """Logs what changed in a job since its last call. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, str]] = {}
        self._parts: dict[str, dict[str, tuple[str, str]]] = {}

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

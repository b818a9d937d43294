"""`DryRunChecks`: asks the sites of a plan for the checks of a job that is not submitted. In memory, without events."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection

from isthmus.control.preflight.preflight_record import PreflightRecord
from isthmus.control.queries.dry_run import DRY_RUN_JOB_ID
from isthmus.core.job import Job
from isthmus.core.messages.preflight import ANSWER_TIMEOUT_S, PreflightAnswer, PreflightOrder, SitePreflight
from isthmus.core.plan import Plan

MAX_DRY_RUNS = 8
"""Dry runs that wait for sites at once; further ones are answered without checks."""


class DryRunChecks:
    """The checks of the dry runs on this server. Agents that report to another server do not answer them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._records: dict[str, tuple[PreflightRecord, Job]] = {}
        self._closed = False

    def run(
        self, user: str, job: Job, plan: Plan, sites: Collection[str], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[SitePreflight, ...]:
        """Return what the sites of `plan` answer to `user` in time, the others as waiting.

        `sites` are those whose agents execute checks.
        """
        job_id = f"{DRY_RUN_JOB_ID}-{secrets.token_hex(16)}"
        with self._changed:
            asked = sites if len(self._records) < MAX_DRY_RUNS else ()
            record = PreflightRecord.begin(job_id, job, plan, self._clock(), user=user, sites=asked, temporary=True)
            self._records[job_id] = record, job
            try:
                self._changed.wait_for(lambda: self._closed or record.state != "pending", timeout_s)
            finally:
                del self._records[job_id]
            return record.views()

    def orders(self, cluster: str) -> tuple[PreflightOrder, ...]:
        """Return the checks that the cluster should execute."""
        with self._changed:
            records = [record for record, _ in self._records.values()]
            return tuple(record.orders[cluster] for record in records if cluster in record.orders)

    def add_answer(self, cluster: str, answer: PreflightAnswer) -> bool:
        """Add a cluster's answer; return whether it belongs to a dry run."""
        with self._changed:
            record, job = self._records.get(answer.job, (None, None))
            if record is None or job is None:
                return False
            if record.expects(cluster, answer):
                record.add_answer(cluster, answer, job, self._clock())
                self._changed.notify_all()
            return True

    def close(self) -> None:
        """End the waits of all dry runs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

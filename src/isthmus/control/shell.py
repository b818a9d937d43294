"""The server's shell around the coordinator: one event at a time, on disk before it is decided or answered.

The lock makes it an actor: whoever holds it admits, appends, handles. Planning runs beside it, and its answer
comes back as one more event. Metrics and logs never wait for the lock.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from isthmus.control.coordinator import Coordinator, Rules
from isthmus.control.events import (
    AgentReported,
    Event,
    ForgetJob,
    Instruction,
    JobCancelled,
    JobChanged,
    JobDeleted,
    JobSubmitted,
    MakePlans,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    Restarted,
)
from isthmus.control.incumbents import Incumbents
from isthmus.control.placement import check_placement
from isthmus.control.planner import PlanningEndedError
from isthmus.control.store import Store
from isthmus.core.errors import ConflictError, InputError, IsthmusError, NotFoundError
from isthmus.core.job import Job
from isthmus.core.messages import AgentOrders, AgentReport
from isthmus.core.model import Model
from isthmus.core.plan import PlanSet, Refusal
from isthmus.core.pool import Cluster, Pool
from isthmus.core.views import JobView, LogPage, MetricsPage, PoolView, Submission

Planner = Callable[[Job, Model, Pool, dict[str, dict[str, int]]], PlanSet]
"""What `isthmus.plan.make_plans` does: plans of a job on what is free, by cluster and node group."""

TICK_S = 0.5
"""Between two looks at what time alone has brought about."""

_log = logging.getLogger("isthmus.server")


class ControlShell:
    """The running control plane without its network side. `clock` gives seconds since the epoch.

    `pool` is the operator's file: its links, its owners, its own chips, and the owners of the clusters it
    names; clusters themselves come and go with their agents.
    """

    def __init__(
        self,
        store: Store,
        pool: Pool | None = None,
        *,
        planner: Planner,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.file, self.clock = store, pool, clock
        self._lock = threading.RLock()
        self._planner = planner
        self._planning = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        self._ended = threading.Event()
        self._seen_at: set[tuple[str, str]] = set()
        self._logged: dict[str, tuple[str, str]] = {}
        self._coordinator = Coordinator.replay((event for _, event in store.events()), rules)
        self._incumbents = Incumbents(self._coordinator.incarnations())
        self._ticking = threading.Thread(target=self._tick_until_ended, name="ticks", daemon=True)

    def start(self) -> None:
        """Take up what the last life left, and begin to tick."""
        with self._lock:
            self._act(self._coordinator.handle(Restarted(now_s=self.clock())))
        self._ticking.start()

    def close(self) -> None:
        """Stop ticking and planning; every acknowledged event is on disk already."""
        self._ended.set()
        if self._ticking.is_alive():
            self._ticking.join()
        self._planning.shutdown(wait=True, cancel_futures=True)

    # Users --------------------------------------------------------------------------------------------

    def submit(self, user: str, submission: Submission) -> JobView:
        """Take a job in, durably; the same user and key again return the job that is there.

        Raises `InputError` where its placement names what the pool does not know.
        """
        with self._lock:
            known = self._coordinator.job_of_key(user, submission.key)
            if known is not None:
                return self._same_job(known, submission)
            joined = tuple(view.cluster for view in self.pool().clusters)
            check_placement(submission.job.placement, joined, self.file)
            job_id = f"{submission.job.name[:50]}-{uuid.uuid4().hex[:8]}"
            self._take(JobSubmitted(now_s=self.clock(), job_id=job_id, user=user, submission=submission))
            return self._coordinator.job(job_id)

    def jobs(self, user: str | None) -> tuple[JobView, ...]:
        """Return all jobs (of one user), oldest first, without plans."""
        with self._lock:
            return self._coordinator.jobs(user)

    def job(self, job_id: str) -> JobView:
        """Return a job; raise `NotFoundError` if there is none."""
        with self._lock:
            return self._coordinator.job(job_id)

    def choose(self, job_id: str, plan_id: str) -> JobView:
        """Let a job run by one of its candidate plans."""
        with self._lock:
            self._take(PlanChosen(now_s=self.clock(), job_id=job_id, plan_id=plan_id))
            return self._coordinator.job(job_id)

    def cancel(self, job_id: str) -> JobView:
        """Stop a job at all sites."""
        with self._lock:
            self._take(JobCancelled(now_s=self.clock(), job_id=job_id))
            return self._coordinator.job(job_id)

    def delete(self, job_id: str) -> None:
        """Forget an ended job with its metrics and logs."""
        self._take(JobDeleted(now_s=self.clock(), job_id=job_id))

    def metrics(self, job_id: str, after: int, limit: int) -> MetricsPage:
        """Return a page of a job's step metrics."""
        return self.store.metrics(job_id, after=after, limit=limit)

    def logs(self, job_id: str, after: int, rank: int | None, limit: int) -> LogPage:
        """Return a page of a job's log text."""
        return self.store.logs(job_id, after=after, rank=rank, limit=limit)

    def pool(self) -> PoolView:
        """Return the pool as it stands."""
        with self._lock:
            return self._coordinator.pool(self.file.links if self.file else ())

    # Agents -------------------------------------------------------------------------------------------

    def owner_of(self, cluster: str) -> str | None:
        """Return the owner under whom the pool knows `cluster`: the operator's file, else its first agent."""
        if self.file is not None:
            for known in self.file.clusters:
                if known.name == cluster:
                    return known.owner
        return next((x.cluster.owner for x in self.pool().clusters if x.cluster.name == cluster), None)

    def sync(self, report: AgentReport) -> AgentOrders:
        """Take an agent's report in and answer with its orders.

        Metrics and logs are on disk first, so that a job which has succeeded has all its lines. Raises
        `InputError` for a chip or owner nobody knows, `ConflictError` for an agent that was replaced, and
        `UnavailableError` for the first report of one that takes over.
        """
        check_cluster(report.cluster, self.file)
        with self._lock:
            self._incumbents.check(report.cluster.name, report.incarnation)
        ours = {job_id for job_id in _jobs_of(report) if self._runs_at(job_id, report.cluster.name)}
        if ours:
            self.store.append_metrics([line for line in report.metrics if line.job in ours])
            self.store.append_logs([chunk for chunk in report.logs if chunk.job in ours])
        with self._lock:
            now_s = self.clock()
            self._take(AgentReported.of(report, now_s))
            self._coordinator.hear(report.cluster.name, now_s)
            parts = self._coordinator.orders(report.cluster.name)
        self._seen_at.update((part.job, report.cluster.name) for part in parts)
        return AgentOrders(parts=parts)

    def _runs_at(self, job_id: str, cluster: str) -> bool:
        """Tell whether a job has or had a part at `cluster`: lines of others are not taken from there."""
        try:
            plan = self.job(job_id).plan
        except NotFoundError:
            return False
        return (job_id, cluster) in self._seen_at or (plan is not None and cluster in plan.clusters)

    # The one way in -----------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        with self._lock:
            if self._coordinator.admit(event):
                self.store.append([event])
                self._act(self._coordinator.handle(event))

    def _act(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case MakePlans():
                    self._planning.submit(self._plan, instruction)
                case ForgetJob(job_id=job_id):
                    self.store.forget(job_id)
                    self._logged.pop(job_id, None)
                case JobChanged(job_id=job_id):
                    self._log_change(job_id)

    def _log_change(self, job_id: str) -> None:
        """Write a line where state or reason have changed since the last one."""
        job = self._coordinator.job(job_id)
        if self._logged.get(job_id) != (job.state, job.reason):
            self._logged[job_id] = (job.state, job.reason)
            _log.info("job %s: %s%s", job_id, job.state, f" ({job.reason})" if job.reason else "")

    def _same_job(self, job_id: str, submission: Submission) -> JobView:
        known = self._coordinator.job(job_id)
        if known.job != submission.job:
            raise ConflictError(
                f"key '{submission.key}' already stands for another job, '{job_id}'",
                hint="use a new key for a new job",
            )
        return known

    # Planning and time --------------------------------------------------------------------------------

    def _plan(self, request: MakePlans) -> None:
        """Answer a request for plans with an event; in the planner's thread."""
        answer = functools.partial(PlanningFailed, job_id=request.job_id, round=request.round)
        event: Event
        try:
            plans = self._plans(request)
            event = PlansMade(now_s=self.clock(), job_id=request.job_id, round=request.round, plans=plans)
        except PlanningEndedError:
            return
        except IsthmusError as error:
            event = answer(now_s=self.clock(), reason=str(error))
        except Exception as error:
            _log.exception("planning job %s", request.job_id)
            event = answer(now_s=self.clock(), reason=f"the planner broke: {error}")
        self._take_quietly(event)

    def _plans(self, request: MakePlans) -> PlanSet:
        if not request.clusters:
            return PlanSet(plans=(), refused=(Refusal(clusters=(), reason="no cluster is connected"),))
        pool = assemble(request.clusters, self.file)
        submission = request.submission
        return self._planner(submission.job, submission.model, pool, request.free_chips)

    def _take_quietly(self, event: Event) -> None:
        """Take an event that nobody waits for: one that came too late, or cannot be stored now, is logged."""
        try:
            self._take(event)
        except IsthmusError as error:
            _log.warning("%s: %s", event.kind, error)

    def _tick_until_ended(self) -> None:
        while not self._ended.wait(TICK_S):
            self.tick()

    def tick(self) -> None:
        """Take in what time alone has brought about."""
        with self._lock:
            due = self._coordinator.due(self.clock())
        for event in due:
            self._take_quietly(event)


def assemble(clusters: tuple[Cluster, ...], file: Pool | None) -> Pool:
    """Return the pool of `clusters` with the operator's chips and the links between them."""
    names = {cluster.name for cluster in clusters}
    links = tuple(link for link in file.links if {link.source, link.target} <= names) if file else ()
    return Pool(clusters=clusters, chips=file.chips if file else (), links=links)


def check_cluster(cluster: Cluster, file: Pool | None) -> None:
    """Raise `InputError` where an agent's cluster has a chip or an owner that the pool does not know."""
    try:
        Pool(clusters=(cluster,), chips=file.chips if file else (), owners=file.owners if file else ())
    except ValidationError as error:
        raise InputError(
            f"cluster '{cluster.name}' does not fit the pool: {error.errors()[0]['msg']}",
            hint="mend the cluster's file, or add the chip or owner to the server's pool file",
        ) from error


def _jobs_of(report: AgentReport) -> set[str]:
    return {line.job for line in report.metrics} | {chunk.job for chunk in report.logs}

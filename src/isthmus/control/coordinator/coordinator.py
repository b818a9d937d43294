"""`Coordinator`: every decision about jobs and chips, without I/O. Events in, instructions out.

The server uses it like this (`actor` batches many events into one append):

    if coordinator.admit(event):        # raises if the event is not allowed; False: no change
        instructions = coordinator.handle(event)
        store.append([event])           # on failure, the state is rebuilt by replaying the log
        act_on(instructions)            # act only after the append
    reply(coordinator.orders(cluster))

On every report the server also calls `record_report(cluster, now_s)`, and periodically it passes the events of
`due_events(now_s)` through the same steps. After a restart: `Coordinator.replay(events)`, then
`act_on(coordinator.handle(Restarted(now_s=...)))`.

`schedule_queue` decides the start order of waiting jobs. No event scans all jobs: its cost depends on the
reporting site or on the head of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.control.coordinator.accounting.meter_jobs import meter_jobs
from isthmus.control.coordinator.accounts.count_spending import count_spending
from isthmus.control.coordinator.admission import require_job
from isthmus.control.coordinator.agent_reports import record_unsaved_work
from isthmus.control.coordinator.event_rules import EVENT_RULES
from isthmus.control.coordinator.notices.notices_of import notices_of
from isthmus.control.coordinator.schedule_queue import schedule_queue
from isthmus.control.queries import agent_orders, peer_checks, user_views
from isthmus.control.queries.accounts.limit_refusals import free_within_limits, within_limits
from isthmus.control.queries.catalogue import catalogue_versions
from isthmus.control.queries.catalogue.bring_forecast import site_fetches
from isthmus.control.queries.enrolled_agent import admit_agent
from isthmus.control.queries.sites.measured_links import measured_links
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import (
    AgentReported,
    BudgetReached,
    Event,
    ForgetJob,
    Instruction,
    JobChanged,
    JobDeleted,
    MakePlans,
    Restarted,
)
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.catalogue import CopyKey
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.agent_messages import AgentReport, PartOrder, PeerToCheck
from isthmus.core.messages.preflight import PreflightOrder
from isthmus.core.pool import Link
from isthmus.core.views.api_views import JobFilter, JobView, PoolView

__all__ = ["Coordinator", "CoordinatorConfig"]


class Coordinator:
    """The pool state and its transitions. `state` is read-only, for validators and tests."""

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        self.state = PoolState(config=config or CoordinatorConfig())
        self.admitted: Event | None = None
        """The event that `admit` has accepted and `handle` has not applied yet."""

    @classmethod
    def from_state(cls, state: PoolState) -> Coordinator:
        """Return a coordinator that continues from `state`, such as that of a snapshot, and changes it from now on."""
        coordinator = cls(state.config)
        coordinator.state = state
        return coordinator

    @classmethod
    def replay(cls, events: Iterable[Event], config: CoordinatorConfig | None = None) -> Coordinator:
        """Rebuild the state from the log, which may have been written under other `config`.

        Raises `IsthmusError`, naming the event, if an event cannot be replayed; that is a bug.
        """
        coordinator = cls(config)
        for number, event in enumerate(events, start=1):
            try:
                coordinator.handle(event)
            except Exception as error:
                raise IsthmusError(
                    f"event {number} of the log, '{event.kind}', cannot be replayed: {type(error).__name__}: {error}",
                    hint="this is a bug: keep the state folder, start the version that wrote it, report it",
                ) from error
        return coordinator

    def admit(self, event: Event) -> bool:
        """Return whether `event` changes the state, so that it must be logged and handled. Read only.

        Raises `NotFoundError` for an unknown job or plan and `ConflictError` for a step that is not
        allowed now. `Restarted` is never admitted: pass it to `handle` without logging it.
        """
        admitted = EVENT_RULES[type(event)].admit(self.state, event)
        self.admitted = event if admitted else None
        return admitted

    def handle(self, event: Event) -> list[Instruction]:
        """Apply an event; return the instructions for the server. Raises like `admit`, before any change.

        After a restart the instructions repeat the open planner requests.
        """
        state, rule = self.state, EVENT_RULES[type(event)]
        if isinstance(event, Restarted):
            rule.handle(state, event)
            return [self._planner_request(job) for job in state.live_jobs.values() if job.planner_input]
        known, self.admitted = self.admitted is event, None
        if not known and not rule.admit(state, event):
            return []
        state.changed_jobs.clear()
        state.accounts.notices.clear()
        state.chip_use.advance(event.now_s)
        state.meter.advance(event.now_s)
        rule.handle(state, event)
        asked = schedule_queue(state, event.now_s)
        meter_jobs(state, event)
        count_spending(state)
        due = notices_of(state, event)
        forget = [ForgetJob(job_id=event.job_id)] if isinstance(event, JobDeleted) else []
        changed = [JobChanged(job_id=job_id) for job_id in sorted(state.changed_jobs)]
        reached = [
            BudgetReached(account=account, percent=percent, text=text)
            for account, percent, text in state.accounts.notices
        ]
        return [*forget, *changed, *due, *reached, *(self._planner_request(job) for job in asked)]

    def check_agent(self, event: AgentReported) -> None:
        """Raise `AuthError` for a report of an agent that is not the enrolled one of its cluster (`admit_agent`)."""
        admit_agent(self.state.clusters.get(event.cluster.name), event)

    def record_report(
        self, cluster: str, now_s: float, report: AgentReport | None = None, *, steady_s: float | None = None
    ) -> None:
        """Record the time of an agent's report and the unsaved work in it (neither is logged).

        `steady_s` is the time on a clock that is never set, which measures leases (default: `now_s`).
        """
        record = self.state.clusters.get(cluster)
        if record is not None:
            record.last_report_s = now_s
            record.last_contact_s = now_s if steady_s is None else steady_s
            if report is not None:
                record_unsaved_work(record, report.parts, report.local_jobs)

    @property
    def epoch(self) -> int:
        """Number of servers that have been leader; the fencing token of orders."""
        return self.state.epoch

    def due_events(self, now_s: float, steady_s: float | None = None) -> tuple[Event, ...]:
        """Return the due events: lost agents, ended run leases, checks without a result, and expired deadlines.

        `steady_s` is the time on the clock of `record_report` (default: `now_s`).
        """
        return agent_orders.due_events(self.state, now_s, now_s if steady_s is None else steady_s)

    def job_id_of_key(self, user: str, key: str) -> str | None:
        """Return the id of the job that this user submitted with `key`; None for a new or empty key."""
        return self.state.ids_by_key.get((user, key)) if key else None

    def awaits_plans(self, job_id: str, planner_round: int) -> bool:
        """Return whether the planner request of this round is the job's open one."""
        job = self.state.jobs.get(job_id)
        return job is not None and job.planner_input is not None and job.round == planner_round

    def agent_incarnations(self) -> dict[str, tuple[str, ...]]:
        """Return every agent incarnation of each cluster, the current one last."""
        return {
            name: (*sorted(record.incarnations - {record.incarnation}), record.incarnation)
            for name, record in self.state.clusters.items()
            if record.incarnation
        }

    def orders(self, cluster: str) -> tuple[PartOrder, ...]:
        """Return the orders for every part that the cluster should hold or release."""
        return agent_orders.part_orders(self.state, cluster)

    def preflight_orders(self, cluster: str) -> tuple[PreflightOrder, ...]:
        """Return the checks that the cluster should execute (`AgentOrders.preflights`)."""
        return agent_orders.preflight_orders(self.state, cluster)

    def orphaned_copies(self, cluster: str) -> tuple[CopyKey, ...]:
        """Return the site's copies of versions that the catalogue no longer has (`AgentOrders.drop_copies`)."""
        return catalogue_versions.orphaned_copies(self.state, cluster)

    def site_queue(self, cluster: str) -> tuple[str, ...]:
        """Return the required order of the pool's jobs in the site's queue (`AgentOrders.queue`)."""
        return agent_orders.site_queue(self.state, cluster)

    def opens_listener(self, cluster: str) -> bool:
        """Return whether the site's agent must listen for the checks of other sites (`AgentOrders.opens_listener`)."""
        return peer_checks.opens_listener(self.state, cluster)

    def may_leave(self, cluster: str) -> bool:
        """Return whether the site leaves and nothing of the pool is there any more (`AgentOrders.leaves`)."""
        record = self.state.clusters.get(cluster)
        return record is not None and record.drain is not None and record.drain.leaves and not record.parts

    def peers_to_check(self, cluster: str) -> tuple[PeerToCheck, ...]:
        """Return the sites that this one is to dial (`AgentOrders.peers_to_check`)."""
        return peer_checks.peers_to_check(self.state, cluster)

    def job_view(self, job_id: str) -> JobView:
        """Return a job with its plans and possible victims; raise `NotFoundError` if it does not exist."""
        return user_views.job_view(self.state, require_job(self.state, job_id), details=True)

    def list_jobs(
        self, user: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> tuple[JobView, ...]:
        """Return up to `limit` jobs (of one user) after job `after`, oldest first, without their plans.

        Raises `NotFoundError` if job `after` does not exist.
        """
        number = len(self.state.jobs)
        limit = number if limit is None else limit
        found, _ = self.find_jobs(user, JobFilter(), after=after, limit=limit, newest_first=False, max_examined=number)
        return found

    def find_jobs(
        self,
        user: str | None,
        wanted: JobFilter,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
        max_examined: int = user_views.MAX_EXAMINED_JOBS,
    ) -> tuple[tuple[JobView, ...], str | None]:
        """Return a page of the jobs that meet `wanted`, and the job after which the next page starts (None: no more).

        Raises `NotFoundError` if job `after` does not exist.
        """
        if after is not None:
            require_job(self.state, after)
        found, more = user_views.find_jobs(
            self.state,
            user,
            wanted,
            after=after,
            limit=limit,
            newest_first=newest_first,
            max_examined=max_examined,
        )
        return tuple(user_views.job_view(self.state, job, details=False) for job in found), more

    def list_waiting(self, *, after: str | None = None, limit: int = 100) -> tuple[JobView, ...]:
        """Return up to `limit` jobs of the queue after job `after`, first to start first.

        Raises `NotFoundError` if job `after` does not exist.
        """
        if after is not None:
            require_job(self.state, after)
        found = user_views.iterate_queue(self.state, after, limit)
        return tuple(user_views.job_view(self.state, job, details=False) for job in found)

    def pool_view(self, links: tuple[Link, ...] = ()) -> PoolView:
        """Return every cluster that ever reported, with the given `links` and those that were measured."""
        measured = measured_links(self.state, self.state.clusters)
        return user_views.pool_view(self.state, links).model_copy(update={"measured": measured})

    def _planner_request(self, job: JobRecord) -> MakePlans:
        """Return the open planner request as first sent: its answer refers to the resources free then."""
        asked = job.planner_input
        if asked is None:
            raise IsthmusError(f"job {job.id}: no planner request is open", hint="this is a bug: please report it")
        return MakePlans.model_construct(
            job_id=job.id,
            round=job.round,
            submission=within_limits(self.state, job),
            user=job.user,
            clusters=tuple(self.state.clusters[name].cluster for name in asked.free_chips),
            free_chips=free_within_limits(self.state, job, asked.free_chips),
            free_storage_bytes=asked.free_storage_bytes,
            free_gbps=asked.free_gbps,
            links=measured_links(self.state, asked.free_chips),
            fetches=site_fetches(self.state, job.versions, asked.free_chips, job),
        )

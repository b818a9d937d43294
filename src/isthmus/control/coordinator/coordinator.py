"""The coordinator: every decision about jobs and chips, as a pure object. Events in, instructions out.

A shell uses it like this (`actor`: many events at a time, with one append):

    if coordinator.admit(event):        # raises where the event is not allowed; False: it changes nothing
        asked = coordinator.handle(event)
        store.append([event])           # where this fails, the state is folded anew from the log
        act_on(asked)                   # only now is anything done
    reply(coordinator.orders(cluster))  # or said

On every report the shell also calls `hear(cluster, now_s)`, and now and then it passes each event of
`due(now_s)` through the same lines. After a restart: `Coordinator.replay(events)`, then
`act_on(coordinator.handle(Restarted(now_s=...)))`.

In which order waiting jobs start is `queueing`'s to say. No event looks through all jobs: what it costs
follows from the site that reports, or from the head of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.control.coordinator.admission import admit, find
from isthmus.control.coordinator.agent_reports import hear_unsaved
from isthmus.control.coordinator.handlers import HANDLERS
from isthmus.control.coordinator.run_queue import run_queue
from isthmus.control.queries import agent_orders, user_views
from isthmus.control.state.events import (
    Event,
    ForgetJob,
    Instruction,
    JobChanged,
    JobDeleted,
    MakePlans,
    Restarted,
)
from isthmus.control.state.job_records import JobRecord, State
from isthmus.control.state.rules import Rules
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.agent_messages import AgentReport, PartOrder
from isthmus.core.messages.api_views import JobView, PoolView
from isthmus.core.pool import Link

__all__ = ["Coordinator", "Rules"]


class Coordinator:
    """The state of the pool and what follows from it. `state` is for validators and tests: read only."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.state = State(rules=rules or Rules())
        self._admitted: Event | None = None

    @classmethod
    def replay(cls, events: Iterable[Event], rules: Rules | None = None) -> Coordinator:
        """Rebuild the state from the log. `rules` need not be those under which the log was written.

        Raises `IsthmusError` naming the event that cannot be taken in again, which is a bug.
        """
        coordinator = cls(rules)
        for number, event in enumerate(events, start=1):
            try:
                coordinator.handle(event)
            except Exception as error:
                raise IsthmusError(
                    f"event {number} of the log, '{event.kind}', cannot be taken in again: "
                    f"{type(error).__name__}: {error}",
                    hint="this is a bug: keep the state folder, start the version that wrote it, report this",
                ) from error
        return coordinator

    def admit(self, event: Event) -> bool:
        """Tell whether `event` changes anything and so must be logged and handled.

        Raises `NotFoundError` for an unknown job or plan and `ConflictError` for a step that is not
        allowed now. Changes nothing. `Restarted` is never admitted: hand it to `handle` unlogged.
        """
        admitted = admit(self.state, event)
        self._admitted = event if admitted else None
        return admitted

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event in; return what the shell must do. Raises as `admit` does, before any change."""
        state = self.state
        if isinstance(event, Restarted):
            return self._restart(event.now_s)
        known, self._admitted = self._admitted is event, None
        if not known and not admit(state, event):
            return []
        state.touched.clear()
        HANDLERS[type(event)](state, event)
        asked = run_queue(state, event.now_s)
        forget = [ForgetJob(job_id=event.job_id)] if isinstance(event, JobDeleted) else []
        changed = [JobChanged(job_id=job_id) for job_id in sorted(state.touched)]
        return [*forget, *changed, *(self._ask(job) for job in asked)]

    def hear(self, cluster: str, now_s: float, report: AgentReport | None = None) -> None:
        """Note that the cluster's agent has just reported, and what unsaved work it tells of (not logged)."""
        record = self.state.clusters.get(cluster)
        if record is not None:
            record.heard_s = now_s
            if report is not None:
                hear_unsaved(record, report.parts, report.local_jobs)

    @property
    def epoch(self) -> int:
        """How many servers have spoken for the pool so far; orders carry it as their fence."""
        return self.state.epoch

    def due(self, now_s: float) -> tuple[Event, ...]:
        """Return what time alone has brought about: `AgentLost` and `DeadlinePassed` events."""
        return agent_orders.due(self.state, now_s)

    def job_of_key(self, user: str, key: str) -> str | None:
        """Return the job that this user already submitted with `key`; None for a new or an empty key."""
        return self.state.keys.get((user, key)) if key else None

    def incarnations(self) -> dict[str, tuple[str, ...]]:
        """Return every agent that ever spoke for each cluster, the present one last."""
        return {
            name: (*sorted(record.incarnations - {record.incarnation}), record.incarnation)
            for name, record in self.state.clusters.items()
        }

    def orders(self, cluster: str) -> tuple[PartOrder, ...]:
        """Return every part that should exist at the cluster, or should no longer exist there."""
        return agent_orders.orders(self.state, cluster)

    def queue(self, cluster: str) -> tuple[str, ...]:
        """Return the order in which the pool's jobs should stand in the queue there (`AgentOrders.queue`)."""
        return agent_orders.queue(self.state, cluster)

    def job(self, job_id: str) -> JobView:
        """Return a job with its plans and its offer; raise `NotFoundError` if there is none."""
        return user_views.job_view(self.state, find(self.state, job_id), details=True)

    def jobs(
        self, user: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> tuple[JobView, ...]:
        """Return jobs (of one user), oldest first, without their plans: `limit` of them behind job `after`.

        Raises `NotFoundError` where there is no job `after`.
        """
        if after is not None:
            find(self.state, after)
        found = user_views.list_jobs(self.state, user, after, limit)
        return tuple(user_views.job_view(self.state, job, details=False) for job in found)

    def waiting(self, *, after: str | None = None, limit: int = 100) -> tuple[JobView, ...]:
        """Return `limit` jobs that wait for chips, first to start first, from the one behind job `after` on.

        Raises `NotFoundError` where there is no job `after`.
        """
        if after is not None:
            find(self.state, after)
        found = user_views.list_queue(self.state, after, limit)
        return tuple(user_views.job_view(self.state, job, details=False) for job in found)

    def pool(self, links: tuple[Link, ...] = ()) -> PoolView:
        """Return the clusters that have ever reported, with `links` as the shell knows them."""
        return user_views.pool_view(self.state, links)

    def _restart(self, now_s: float) -> list[Instruction]:
        """Give every agent time to report again, and ask the planner again what it was being asked."""
        for record in self.state.clusters.values():
            record.heard_s = now_s
        return [self._ask(job) for job in self.state.live.values() if job.asked]

    def _ask(self, job: JobRecord) -> MakePlans:
        """Return the request as it was first made: its answer is judged by what was free then."""
        asked = job.asked
        if asked is None:
            raise IsthmusError(
                f"job {job.id}: the planner is not asked", hint="this is a bug: please report it"
            )
        return MakePlans.model_construct(
            job_id=job.id,
            round=job.round,
            submission=job.submission,
            clusters=tuple(self.state.clusters[name].cluster for name in asked.free_chips),
            free_chips=asked.free_chips,
            free_storage_bytes=asked.free_storage_bytes,
            free_gbps=asked.free_gbps,
        )

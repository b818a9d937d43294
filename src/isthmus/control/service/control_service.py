"""`ControlShell`: the control plane without its network side. It turns calls into events and queries.

The planner runs in the background and returns its result as an event. Metrics and logs bypass the actor.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from isthmus.control.coordinator.admission import find
from isthmus.control.coordinator.coordinator import Coordinator, Rules
from isthmus.control.placement import check_degrees
from isthmus.control.queries.dry_run import about_dry_run, plans_of, requests
from isthmus.control.queries.explain_wait import Question, about_job, about_queue, answer
from isthmus.control.service.actor import Actor, Folded, Request
from isthmus.control.service.agent_sessions import SiteDesk
from isthmus.control.service.background_writes import Unhurried
from isthmus.control.service.change_feed import Change, Changes
from isthmus.control.service.job_log import JobLog
from isthmus.control.service.leader import Leader, quietly
from isthmus.control.service.planner_queue import Planner, PlanningDesk
from isthmus.control.service.progress import Progress
from isthmus.control.service.prometheus import Meters
from isthmus.control.service.submissions import Intake
from isthmus.control.state.events import (
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
    PreemptionAgreed,
    VictimNamed,
)
from isthmus.control.store.leadership import Alone, Leadership
from isthmus.control.store.snapshots import Snapshots
from isthmus.control.store.store import Store
from isthmus.core.errors import NotFoundError
from isthmus.core.messages.api_views import JobView, LogPage, MetricsPage, PoolView, Submission
from isthmus.core.messages.queue_status import DryRun, Standing
from isthmus.core.pool import Pool

SNAPSHOT_EVERY = 20_000
"""Minimum number of events between two snapshots; half the number of jobs where that is more."""
TICK_S = 0.5
"""Interval between ticks: a tick fires expired timers and reads what other servers appended."""

T = TypeVar("T")


class ControlShell:
    """The running control plane without its network side. `clock` returns seconds since the Unix epoch.

    `pool` is the operator's pool file: links, owners, chip definitions and the owners of named clusters.
    Clusters join and leave with their agents. Several servers may share one store: the one that holds
    `leadership` plans jobs and fires timers; users and agents may connect to any of them.
    """

    def __init__(
        self,
        store: Store,
        pool: Pool | None = None,
        *,
        planner: Planner,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.time,
        leadership: Leadership | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.store, self.file, self.clock = store, pool, clock
        self._made = False
        self.changes = Changes()
        self._leadership: Leadership = leadership or Alone()
        self._planning = PlanningDesk(planner, pool, clock, self._hand_in)
        self._ended = threading.Event()
        self._job_log, self.meters = JobLog(), Meters()
        self._progress = Progress()
        self._actor = Actor(store, self._observe, rules, self.meters.flushed, snapshots, self._resume)
        self._unhurried = Unhurried(self._actor)
        self._saved = self._actor.number
        self._leader = Leader(
            self._actor, self._leadership, pool, clock, functools.partial(self._act, own=True)
        )
        self.intake = Intake(self._actor, pool, clock)
        self.sites = SiteDesk(self._actor, store, pool, clock, self.changes, self._progress, self._leadership)
        self._ticking = threading.Thread(target=self._tick_until_ended, name="ticks", daemon=True)
        self._made = True

    def start(self) -> None:
        """Become leader if possible, resume pending planning requests, and start ticking."""
        self._leader.look()
        self._ticking.start()

    def close(self) -> None:
        """Stop ticking and planning. Every acknowledged event is already on disk."""
        self.changes.end()
        self._ended.set()
        if self._ticking.is_alive():
            self._ticking.join()
        self._leadership.give_up()
        self._planning.close()
        self._unhurried.close()

    def settle(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Execute requests; return once their events are on disk."""
        return self._actor.settle(requests)

    def jobs(self, user: str | None, after: str | None, limit: int) -> tuple[JobView, ...]:
        """Return up to `limit` jobs (of one user) that follow job `after`, oldest first, without plans.

        Raises `NotFoundError` if job `after` does not exist.
        """
        return self._ask(lambda coordinator: coordinator.jobs(user, after=after, limit=limit))

    def job(self, job_id: str) -> JobView:
        """Return a job; raise `NotFoundError` if it does not exist."""
        return self._ask(lambda coordinator: coordinator.job(job_id))

    def as_now(self, changes: Sequence[Change]) -> list[tuple[Change, JobView | None]]:
        """Return each change with the job's current view without plans, None for a deleted job."""

        def views(coordinator: Coordinator) -> list[tuple[Change, JobView | None]]:
            return [(change, _present(coordinator, change)) for change in changes]

        return self._ask(views) if changes else []

    def last_event(self) -> int:
        """Return the number of the last event applied on this server."""
        return self._actor.number

    def queue(self, user: str | None) -> tuple[Standing, ...]:
        """Return the queue status of waiting jobs (of one user), in expected starting order."""
        now_s, paces = self.clock(), self._progress.paces()
        return answer(self._ask(lambda coordinator: about_queue(coordinator.state, now_s, paces, user)))

    def standing(self, job_id: str, user: str | None) -> Standing:
        """Return a job's queue status as `user` may see it; None stands for an operator."""
        now_s, paces = self.clock(), self._progress.paces()

        def ask(coordinator: Coordinator) -> Question:
            return about_job(coordinator.state, find(coordinator.state, job_id), now_s, paces, user)

        return answer(self._ask(ask))[0]

    def dry_run(self, user: str, submission: Submission) -> DryRun:
        """Return the plans, queue status and preemption victims of a job without submitting it.

        Raises the errors of a submission, `PlanError` if the job cannot be planned and `ConflictError` if the
        planner is busy.
        """
        check_degrees(submission.job, submission.model)

        def ask(coordinator: Coordinator) -> tuple[MakePlans, MakePlans]:
            self.intake.check(coordinator, submission)
            return requests(coordinator.state, submission)

        plans = plans_of(self._ask(ask), self._planning.answer)
        now_s, paces = self.clock(), self._progress.paces()
        asked = self._ask(lambda c: about_dry_run(c.state, user, submission, plans, now_s, paces))
        return DryRun(plans=plans, standing=answer(asked.question)[0], victims=asked.victims)

    def choose(self, job_id: str, plan_id: str) -> JobView:
        """Choose one of a job's candidate plans."""
        event = PlanChosen(now_s=self.clock(), job_id=job_id, plan_id=plan_id)
        return self._actor.take(lambda _: event, lambda coordinator: coordinator.job(job_id))

    def preempt(self, job_id: str, victims: tuple[VictimNamed, ...]) -> JobView:
        """Give a waiting job the chips of exactly these victims, all or none."""
        event = PreemptionAgreed(now_s=self.clock(), job_id=job_id, victims=victims)
        return self._actor.take(lambda _: event, lambda coordinator: coordinator.job(job_id))

    def cancel(self, job_id: str) -> JobView:
        """Stop a job at all sites."""
        event = JobCancelled(now_s=self.clock(), job_id=job_id)
        return self._actor.take(lambda _: event, lambda coordinator: coordinator.job(job_id))

    def delete(self, job_id: str) -> None:
        """Delete an ended job with its metrics and logs."""
        self._take(JobDeleted(now_s=self.clock(), job_id=job_id))

    def metrics(self, job_id: str, after: int, limit: int) -> MetricsPage:
        """Return a page of a job's step metrics."""
        return self.store.metrics(job_id, after=after, limit=limit)

    def logs(self, job_id: str, after: int, rank: int | None, limit: int) -> LogPage:
        """Return a page of a job's log text."""
        return self.store.logs(job_id, after=after, rank=rank, limit=limit)

    def pool(self) -> PoolView:
        """Return the current state of the pool."""
        links = self.file.links if self.file else ()
        return self._ask(lambda coordinator: coordinator.pool(links))

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return this server's gauges: metric name to (help text, value)."""
        epoch = self._ask(lambda coordinator: coordinator.epoch)
        return {
            "isthmus_leader": ("1 while this server is the leader.", self._leader.leads),
            "isthmus_epoch": ("Number of leadership epochs so far.", epoch),
            "isthmus_last_event": ("Number of the last event in the log.", self.last_event()),
        }

    def _ask(self, question: Callable[[Coordinator], T]) -> T:
        return self._actor.ask(question)

    def _take(self, event: Event) -> None:
        self._actor.take(lambda _: event, lambda _: None)

    def _hand_in(self, event: Event) -> None:
        self._unhurried.put(event.kind, self._leader.request(event))

    def _resume(self, number: int, coordinator: Coordinator) -> None:
        """Restore from a snapshot what `_observe` derives from events."""
        for job in coordinator.state.jobs.values():
            self.changes.note_submitted(job.id, job.user)
            self.changes.note(job.id, number)
            self.meters.resume(job.id, job.state)

    def _observe(self, folded: Folded) -> None:
        """Update change feed, logs and metrics from a durable event, and execute its instructions.

        Events applied during construction only initialise the state, even if another server appended them.
        """
        live = folded.live and self._made
        self.meters.look(folded)
        if isinstance(folded.event, JobSubmitted):
            self.changes.note_submitted(folded.event.job_id, folded.event.user)
        for instruction in folded.asked:
            match instruction:
                case JobChanged(job_id=job_id):
                    self.changes.note(job_id, folded.number)
                    if live:
                        self._job_log.look(folded, job_id)
                case ForgetJob(job_id=job_id):
                    self.changes.note_deleted(job_id, folded.number)
                    self._job_log.forget(job_id)
                    self.meters.forget(job_id)
                    self._progress.forget(job_id)
        if live and not folded.own and isinstance(folded.event, AgentReported):
            self.sites.heard_elsewhere(folded.event)
        if live:
            self._act(folded.asked, own=folded.own)

    def _act(self, instructions: Iterable[Instruction], *, own: bool) -> None:
        for instruction in instructions:
            match instruction:
                case MakePlans() if self._leader.leads:
                    self._planning.ask(instruction)
                case ForgetJob(job_id=job_id) if own:
                    quietly(f"forget the lines of job {job_id}", lambda: self.store.forget(job_id))

    def _tick_until_ended(self) -> None:
        while not self._ended.wait(TICK_S):
            quietly("a tick", self.tick)

    def tick(self) -> None:
        """Save a snapshot if due, read the log, and fire expired timers if this server leads."""
        self._save_now_and_then()
        self._leader.tick()

    def _save_now_and_then(self) -> None:
        """Save a snapshot once enough events were applied since the last one."""
        since = self._actor.number - self._saved
        if (
            since >= SNAPSHOT_EVERY
            and since >= self._ask(lambda coordinator: len(coordinator.state.jobs)) // 2
        ):
            self._saved = self._actor.save()


def _present(coordinator: Coordinator, change: Change) -> JobView | None:
    """Return the current view of a changed job without its plans, None if it was deleted."""
    try:
        return coordinator.job(change.job_id).model_copy(update={"plans": None})
    except NotFoundError:
        return None

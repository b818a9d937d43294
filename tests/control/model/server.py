"""The server's side of the model: the real coordinator, its planner, its users; sites by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.preemption_victims import find_victims
from isthmus.control.state import allocations
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    DeadlinePassed,
    EpochBegan,
    Event,
    JobCancelled,
    JobSubmitted,
    MakePlans,
    PlanChosen,
    PlansMade,
    PreemptionAgreed,
    Restarted,
    VictimNamed,
)
from isthmus.control.state.invariants import violations
from isthmus.control.state.job_records import CoordinatorConfig
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.plan import PlanSet
from tests.control.model.canonical import Key, report_key
from tests.control.model.clone import clone
from tests.control.model.kinds import Kind
from tests.control.model.scenario import Scenario
from tests.control.model.site import CLUSTER, HERE
from tests.control.samples import plan, submission

RULES = CoordinatorConfig()
HOME = plan(HERE)
"""A plan as a site of the model sees it."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an event has done. `events` are those that were logged: none where it was no news.

    `ended` are the attempts that trained and whose end it has begun for a preemption.
    """

    coordinator: Coordinator
    events: tuple[Event, ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    wrong: str = ""


class Server:
    """What may happen to a coordinator, which is left as it is."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._said: dict[tuple[Key, str], AgentReported] = {}
        self.plans = {job: plan(*sites, name="p") for job, sites in scenario.jobs}
        self.clusters = {
            name: CLUSTER.model_copy(update={"name": name, "owner": f"owner-{name}"}) for name in scenario.sites
        }

    def start(self, report: AgentReport) -> Told:
        """All agents have made their first report, and all jobs but the urgent ones are submitted."""
        told, events = Told(coordinator=Coordinator(RULES)), list[Event]()
        first = [self.said(report, name) for name in self.scenario.sites]
        for event in (
            *first,
            *map(self.wish, [j for j, _ in self.scenario.jobs if j not in self.scenario.urgent]),
        ):
            told = self.tell(told.coordinator, event)
            events += told.events
        return Told(coordinator=told.coordinator, events=tuple(events))

    def tell(self, coordinator: Coordinator, event: Event) -> Told:
        """Admit and handle an event; the planner answers at once, with the one plan, and users choose."""
        if not coordinator.admit(event):
            return Told(coordinator=coordinator)
        after, todo = clone(coordinator), [event]
        coordinator.admitted = None
        events, ended, wrong = list[Event](), list[tuple[str, int]](), ""
        while todo:
            now = todo.pop(0)
            if events and not after.admit(now):
                continue
            events.append(now)
            before = {job.id: (job.state, job.attempt) for job in after.state.live_jobs.values()}
            for made in after.handle(now):
                if isinstance(made, MakePlans):
                    plans = PlanSet(plans=(self.plans[made.job_id],))
                    todo.append(PlansMade(now_s=0.0, job_id=made.job_id, round=made.round, plans=plans))
            wrong = wrong or _go_on(after, before, ended)
            todo = todo or _choice(after)
        return Told(coordinator=after, events=tuple(events), ended=tuple(ended), wrong=wrong)

    def hear(self, coordinator: Coordinator, name: str, report: AgentReport) -> Told:
        """Take in what the site `name` says."""
        return self.tell(coordinator, self.said(report, name))

    def said(self, report: AgentReport, name: str) -> AgentReported:
        """Return a site's report as one of the site `name`."""
        key = report_key(report), name
        if key not in self._said:
            self._said[key] = self._named(report, name)
        return self._said[key]

    def _named(self, report: AgentReport, name: str) -> AgentReported:
        places = dict(self.scenario.jobs)
        parts = []
        for part in report.parts:
            at = {"cluster": name, "rank": places[part.job].find(name)}
            workers = tuple(worker.model_copy(update=at) for worker in part.workers)
            parts.append(part.model_copy(update={"workers": workers}) if workers else part)
        update = {"cluster": self.clusters[name], "parts": tuple(parts)}
        return AgentReported.from_report(report.model_copy(update=update), 0.0)

    def orders(self, coordinator: Coordinator, name: str) -> AgentOrders:
        """Return the orders for the site `name`, as it sees them."""
        parts = tuple(
            order if order.plan is None else order.model_copy(update={"plan": HOME})
            for order in coordinator.orders(name)
        )
        return AgentOrders(fence=coordinator.epoch, parts=parts, queue=coordinator.site_queue(name))

    def restart(self, coordinator: Coordinator) -> Told:
        """Let the server die, and another fold its log and speak for the pool."""
        told = self.tell(coordinator, EpochBegan(now_s=0.0, epoch=coordinator.epoch + 1))
        told.coordinator.handle(Restarted(now_s=0.0))
        return told

    def steps(self, coordinator: Coordinator) -> Iterator[tuple[Kind, str, Told]]:
        """Yield what may happen to the server beside reports and faults: its kind, its name, what it does."""
        state = coordinator.state
        for job in state.live_jobs.values():
            if job.state_deadline_s is not None:
                event = DeadlinePassed(now_s=0.0, job_id=job.id, state=job.state, attempt=job.attempt)  # type: ignore[arg-type]
                yield (
                    Kind.TIMEOUT,
                    f"{job.id} has been {job.state} for too long",
                    self.tell(coordinator, event),
                )
        for name in self.scenario.urgent:
            if name not in state.jobs:
                yield Kind.SUBMIT, f"{name} is submitted", self.tell(coordinator, self.wish(name))
        for job in state.live_jobs.values():
            ends = job.state == "stopping" and job.state_after_stop in ("cancelled", "succeeded")
            if self.scenario.cancels and not ends:
                cancelled = JobCancelled(now_s=0.0, job_id=job.id)
                yield Kind.CANCEL, f"{job.id} is cancelled", self.tell(coordinator, cancelled)
            named = [at for one in find_victims(state, job) for at in one.victims] if self.scenario.agreements else []
            if named:
                victims = tuple(VictimNamed(cluster=at.cluster, job=at.job, attempt=at.attempt) for at in named)
                agreed = PreemptionAgreed(now_s=0.0, job_id=job.id, victims=victims)
                name = f"{job.id} may take the place of {victims[0].job}"
                yield Kind.AGREE, name, self.tell(coordinator, agreed)

    def faults(self, coordinator: Coordinator) -> Iterator[tuple[Kind, str, Told]]:
        """Yield what may go wrong at the server."""
        for name, record in coordinator.state.clusters.items():
            if record.connected:
                lost = AgentLost(now_s=0.0, cluster=name)
                yield Kind.FAULT, f"{name} is not heard of", self.tell(coordinator, lost)
        yield Kind.FAULT, "the server dies", self.restart(coordinator)

    def wish(self, job: str) -> JobSubmitted:
        """Return the submission of a job."""
        urgent = job in self.scenario.urgent
        wish = submission(job, restarts=self.scenario.restarts, policy="manual" if urgent else "auto")
        if urgent:
            wish = wish.model_copy(update={"job": wish.job.model_copy(update={"priority": "high"})})
        return JobSubmitted(now_s=0.0, job_id=job, user="u", submission=wish)


def wrong_in(coordinator: Coordinator) -> str:
    """Return the first invariant of the coordinator that does not hold, or ""."""
    state = coordinator.state
    for one in violations(state, 0.0):
        return one
    for record in state.clusters.values():
        noted, record.cached_free = record.cached_free, None
        if noted is not None and noted != record.free_by_group():
            return f"{record.cluster.name} notes {noted} as free, and {record.free_by_group()} is"
    for job in state.live_jobs.values():
        if job.fits_inventory_version == state.indexes.inventory_version:
            job.fits_inventory_version = -1
            if not allocations.pool_can_hold(state, job):
                return f"job {job.id} is noted as holdable, and is not"
    return ""


def _go_on(after: Coordinator, before: dict[str, tuple[str, int]], ended: list[tuple[str, int]]) -> str:
    """Note whose end has begun for a preemption; return what is wrong with the sites of who takes over."""
    for job in after.state.live_jobs.values():
        if before.get(job.id, ("", 0))[0] != "preempting" or job.state != "preparing":
            continue
        ended += [
            (one.job, one.attempt)
            for one in job.victims
            if one.attempt and before.get(one.job, ("", 0))[0] == "running"
        ]
        slow = [part.cluster for part in job.current_parts() if part.state != "ready"]
        if slow:
            return f"{job.id} has victims ended, and {slow} is not ready"
    return ""


def _choice(coordinator: Coordinator) -> list[Event]:
    for job in coordinator.state.live_jobs.values():
        if job.plans is not None and (job.state == "choosing" or (not job.auto_plan and job.plan is None)):
            return [PlanChosen(now_s=0.0, job_id=job.id, plan_id="p")]
    return []

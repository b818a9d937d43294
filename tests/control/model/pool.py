"""The model of the protocol: the real coordinator, its log, the real agents' machines, a failing network.

There is no time: `now_s` is 0 throughout, and whatever waits for a time may find it passed. Timeouts, losses,
delays and deaths are faults; a run of the model has so many of them (`Scenario.faults`). Where nothing else
is left to happen, a timeout is no fault: that is what it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from isthmus.agent.parts import LocalJob
from isthmus.agent.site import LEASED
from isthmus.agent.validators import InvariantError, validate
from isthmus.control.coordinator import Coordinator
from isthmus.control.events import (
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
from isthmus.control.offers import offer
from isthmus.control.records import ENDED, Rules
from isthmus.control.validators import violations
from isthmus.core.messages import AgentOrders, AgentReport
from isthmus.core.plan import Plan, PlanSet
from tests.control.model.canonical import Keyed, state_key
from tests.control.model.clone import clone
from tests.control.model.explore import Step
from tests.control.model.site import Process, Site
from tests.control.samples import plan, submission

RULES = Rules()
URGENT = LocalJob(name="x", command=("true",), node_group="g", chips=1, level="high")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is there, and how much may go wrong.

    `jobs` maps a job to the sites of its plan, one card at each; those of `urgent` have a high priority,
    may come at any time, and their user chooses their plan. `faults` is how many faults there may be,
    `cancels` how many jobs may be cancelled, `agreements` to how many preemptions users may agree,
    `evictions` at how many sites the owner's own urgent job may come; each job is restarted `restarts` times.
    """

    sites: tuple[str, ...] = ("a", "b", "c")
    jobs: tuple[tuple[str, str], ...] = (("j", "abc"), ("k", "abc"))
    urgent: tuple[str, ...] = ()
    faults: int = 1
    cancels: int = 0
    agreements: int = 0
    evictions: int = 0
    restarts: int = 1

    def __str__(self) -> str:
        jobs = " ".join(f"{job}:{places}" for job, places in self.jobs)
        counts = (
            (self.faults, "faults"),
            (self.cancels, "cancels"),
            (self.agreements, "preemptions"),
            (self.evictions, "evictions"),
        )
        return ", ".join(
            [f"{len(self.sites)} owners", jobs, *(f"{num} {what}" for num, what in counts if num)]
        )


_PREEMPTION = Scenario(urgent=("k",), agreements=1, faults=0)

QUICK = (
    Scenario(jobs=(("j", "abc"),), faults=1),
    Scenario(jobs=(("j", "abc"), ("k", "ab")), faults=0, cancels=1),
    Scenario(jobs=(("j", "abc"),), faults=0, evictions=1),
    replace(_PREEMPTION, sites=("a", "b"), jobs=(("j", "ab"), ("k", "ab"))),
)
"""What the tests run: about 20 s."""

WHOLE = (
    *QUICK,
    Scenario(faults=1),
    Scenario(faults=0, cancels=2),
    Scenario(faults=0, evictions=1),
    Scenario(jobs=(("j", "abc"),), faults=2),
    replace(_PREEMPTION, jobs=(("j", "abc"), ("k", "ab"))),
    _PREEMPTION,
    replace(_PREEMPTION, sites=("a", "b"), jobs=(("j", "ab"), ("k", "ab")), faults=1),
)
"""What `python -m benchmarks.model_check` runs."""


Log = tuple["Log", Event] | None


@dataclass(kw_only=True)
class World:
    """One state. `log` is the server's, the latest event last; what is left of each kind is counted down.

    Sites and the coordinator are never changed once they are in a world: a step copies those it changes.
    """

    coordinator: Coordinator
    sites: dict[str, Site]
    log: Log
    faults: int
    cancels: int
    agreements: int
    evictions: int
    wrong: str = ""
    keyed: Keyed = field(default_factory=Keyed)


class Pool:
    """The model (see `explore.Model`)."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.plans: dict[str, Plan] = {job: plan(*sites, name="p") for job, sites in scenario.jobs}

    def start(self) -> World:
        """All jobs are submitted, and every agent has reported once."""
        scenario = self.scenario
        world = World(
            coordinator=Coordinator(RULES),
            sites={name: Site.named(name) for name in scenario.sites},
            log=None,
            faults=scenario.faults,
            cancels=scenario.cancels,
            agreements=scenario.agreements,
            evictions=scenario.evictions,
        )
        for site in world.sites.values():
            self._tell(world, _said(site.look()))
        for job, _ in scenario.jobs:
            if job not in scenario.urgent:
                self._tell(world, self._wish(job))
        return world

    def steps(self, world: World) -> Iterator[Step[World]]:
        """Return every step from `world`."""
        ordinary = list(self._ordinary(world))
        yield from ordinary
        key = self.key(world)
        quiet = all(self.key(step.state) == key for step in ordinary)
        for name, after in self._timeouts(world):
            if quiet:
                yield Step(name, after)
            elif world.faults:
                yield Step(name, replace(after, faults=world.faults - 1), fault=True)
        if world.faults:
            for name, after in self._faults(world):
                yield Step(name, replace(after, faults=world.faults - 1), fault=True)
        yield from self._wishes(world)

    def key(self, world: World) -> tuple[object, ...]:
        """Return what the future of `world` depends on; the same for worlds that differ in owners' names."""
        key = world.keyed.key
        if key is None:
            key = world.keyed.key = state_key(world.coordinator, world.sites.values(), self.scenario.jobs)
        return (world.faults, world.cancels, world.agreements, world.evictions, *key)

    def is_goal(self, world: World) -> bool:
        """Every job has ended, and no site has a part or a card of it."""
        return all(job.state in ENDED for job in world.coordinator.state.jobs.values()) and not any(
            site.machine.parts or site.late or site.orders for site in world.sites.values()
        )

    def wrong(self, world: World) -> str:
        """Return the first invariant that does not hold, or ""."""
        found = [world.wrong, *violations(world.coordinator.state, 0.0), *self._broken(world)]
        return next((one for one in found if one), "")

    def _broken(self, world: World) -> Iterator[str]:
        for site in world.sites.values():
            yield site.wrong
            try:
                validate(site.machine)
            except InvariantError as error:
                yield f"{site.name}: {error}"
        for job in world.coordinator.state.jobs.values():
            alive = {
                attempt
                for site in world.sites.values()
                for (name, attempt, _), process in site.processes.items()
                if name == job.id and process.exit_status is None
            }
            if len(alive) > 1:
                yield f"processes of attempts {sorted(alive)} of job {job.id} are alive"
            for attempt in alive:
                parts = [part for part in job.parts.values() if part.attempt == attempt]
                if not parts or not all(part.committed for part in parts):
                    yield f"attempt {attempt} of job {job.id} has a process, but was not committed"

    def _ordinary(self, world: World) -> Iterator[Step[World]]:
        """What goes on while nothing fails."""
        for name, site in world.sites.items():
            if site.orders is None:
                yield Step(f"{name} exchanges", self._exchange(world, name, Site.obey))
            else:
                yield Step(f"{name} gets its orders", self._with(world, name, _take_orders))
            if site.late is not None:
                after = self._copy(world, name)
                late, after.sites[name].late = after.sites[name].late, None
                self._tell(after, _said(late))
                yield Step(f"a late report of {name} arrives", after)
            for key, process in site.processes.items():
                if process.asked and process.exit_status is None:
                    ends = self._ended(world, name, key, 143)
                    yield Step(f"{key[0]}/{key[1]} at {name} ends as asked", ends)
                elif key[1] == 0 and process.exit_status is None:
                    yield Step(f"local job {key[0]} ends", self._ended(world, name, key, 0))
        yield from self._training(world)

    def _training(self, world: World) -> Iterator[Step[World]]:
        """All ranks of a run come to the end together; all save together once one was asked."""
        for job in world.coordinator.state.jobs.values():
            if job.plan is None:
                continue
            key = (job.id, job.attempt, 0)
            places = list(job.plan.clusters)
            ranks = [world.sites[name].processes.get(key, Process()) for name in places]
            if not all(rank.trains and rank.exit_status is None for rank in ranks):
                continue
            after = self._copy(world, *places)
            for name in places:
                after.sites[name].processes[key].exit_status = 0
            yield Step(f"{key[0]}/{key[1]} has trained to its end", after)
            newest = max((rank.protected or 0 for rank in ranks), default=0)
            if any(rank.saves is not None and rank.saves >= newest for rank in ranks):
                after = self._copy(world, *places)
                for name in places:
                    after.sites[name].processes[key].protected = newest + 1
                yield Step(f"{key[0]}/{key[1]} has saved and verified its work", after)

    def _timeouts(self, world: World) -> Iterator[tuple[str, World]]:
        for job in world.coordinator.state.live.values():
            if job.deadline_s is not None:
                event = DeadlinePassed(now_s=0.0, job_id=job.id, state=job.state, attempt=job.attempt)  # type: ignore[arg-type]
                yield f"{job.id} has been {job.state} for too long", self._told(world, event)
        for name, site in world.sites.items():
            for key, part in site.machine.parts.items():
                if part.state in LEASED and not part.local:
                    yield f"the lease of {key} at {name} ends", self._with(world, name, _ends(key))
                if part.force_at_s is not None or part.evict_at_s is not None:
                    yield f"{name} waits no longer for {key}", self._with(world, name, _insists(key))

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        for name, site in world.sites.items():
            if world.coordinator.state.clusters[name].connected:
                yield f"{name} is not heard of", self._told(world, AgentLost(now_s=0.0, cluster=name))
            yield f"the agent of {name} dies", self._with(world, name, Site.reboot)
            if site.orders is None:
                yield f"{name} reports, the answer is lost", self._exchange(world, name, _lose)
                yield f"{name} reports, the answer takes its time", self._exchange(world, name, _delay)
                yield f"{name} dies while it obeys", self._exchange(world, name, Site.die_obeying)
                if site.late is None:
                    yield f"a report of {name} takes its time", self._with(world, name, _send_late)
            for key, process in site.processes.items():
                if key[1] and process.exit_status is None and not process.asked:
                    yield f"{key[0]}/{key[1]} at {name} dies", self._ended(world, name, key, 1)
        yield "the server dies", self._restarted(world)

    def _wishes(self, world: World) -> Iterator[Step[World]]:
        for name in self.scenario.urgent:
            if name not in world.coordinator.state.jobs:
                yield Step(f"{name} is submitted", self._told(world, self._wish(name)), fault=True)
        if world.cancels:
            for job in world.coordinator.state.live.values():
                if job.state != "stopping" or job.ending not in ("cancelled", "succeeded"):
                    after = self._told(world, JobCancelled(now_s=0.0, job_id=job.id))
                    yield Step(
                        f"{job.id} is cancelled", replace(after, cancels=world.cancels - 1), fault=True
                    )
        if world.agreements:
            for job in world.coordinator.state.live.values():
                named = [at for one in offer(world.coordinator.state, job) for at in one.at]
                if named:
                    victims = tuple(
                        VictimNamed(cluster=at.cluster, job=at.job, attempt=at.attempt) for at in named
                    )
                    after = self._told(world, PreemptionAgreed(now_s=0.0, job_id=job.id, victims=victims))
                    after.agreements -= 1
                    yield Step(f"{job.id} may take the place of {victims[0].job}", after, fault=True)
        if world.evictions:
            for name in world.sites:
                after = self._with(world, name, _want_local)
                after.evictions -= 1
                yield Step(f"{name}'s owner has an urgent job", after, fault=True)

    def _exchange(self, world: World, name: str, then: Callable[[Site, AgentOrders], None]) -> World:
        """Let a site report, and do `then` with what the server answers."""
        after = self._copy(world, name)
        site = after.sites[name]
        self._tell(after, _said(site.look()))
        coordinator = after.coordinator
        parts, queue = coordinator.orders(name), coordinator.queue(name)
        then(site, AgentOrders(fence=coordinator.epoch, parts=parts, queue=queue))
        return after

    def _ended(self, world: World, name: str, key: tuple[str, int, int], status: int) -> World:
        after = self._copy(world, name)
        after.sites[name].processes[key].exit_status = status
        return after

    def _with(self, world: World, name: str, change: Callable[[Site], None]) -> World:
        after = self._copy(world, name)
        change(after.sites[name])
        return after

    def _told(self, world: World, event: Event) -> World:
        after = self._copy(world)
        self._tell(after, event)
        return after

    def _copy(self, world: World, *names: str) -> World:
        sites = dict(world.sites)
        sites.update((name, sites[name].copy()) for name in names)
        return replace(world, sites=sites, keyed=Keyed())

    def _tell(self, world: World, event: Event) -> None:
        """Admit, log and handle an event; the planner answers at once, with the job's one plan."""
        if not world.coordinator.admit(event):
            return
        before, world.coordinator = world.coordinator, clone(world.coordinator)
        world.log = (world.log, event)
        instructions = world.coordinator.handle(event)
        world.wrong = world.wrong or _not_joint(before, world)
        for instruction in instructions:
            if isinstance(instruction, MakePlans):
                plans = PlanSet(plans=(self.plans[instruction.job_id],))
                self._tell(
                    world,
                    PlansMade(now_s=0.0, job_id=instruction.job_id, round=instruction.round, plans=plans),
                )
        for job in world.coordinator.state.live.values():
            if job.plans is not None and (job.state == "choosing" or (not job.auto and job.plan is None)):
                self._tell(world, PlanChosen(now_s=0.0, job_id=job.id, plan_id="p"))
                break

    def _wish(self, job: str) -> JobSubmitted:
        urgent = job in self.scenario.urgent
        wish = submission(job, restarts=self.scenario.restarts, policy="manual" if urgent else "auto")
        if urgent:
            wish = wish.model_copy(update={"job": wish.job.model_copy(update={"priority": "high"})})
        return JobSubmitted(now_s=0.0, job_id=job, user="u", submission=wish)

    def _restarted(self, world: World) -> World:
        """Let the server die: the one after it knows what the log says, and nothing else."""
        after = self._copy(world)
        after.coordinator = Coordinator.replay(_events(world.log), RULES)
        folded = state_key(after.coordinator, after.sites.values(), self.scenario.jobs)
        if folded != self.key(world)[4:]:
            after.wrong = "the fold of the log is not the state that the server had"
        self._tell(after, EpochBegan(now_s=0.0, epoch=after.coordinator.epoch + 1))
        after.coordinator.handle(Restarted(now_s=0.0))
        return after


def _not_joint(before: Coordinator, world: World) -> str:
    """Return what is wrong where a job begins to have its victims ended: its sites, and their processes."""
    for job in world.coordinator.state.live.values():
        known = before.state.jobs.get(job.id)
        if known is None or (known.state, job.state) != ("preempting", "preparing"):
            continue
        for one in job.victims:
            victim = before.state.jobs.get(one.job)
            if victim is None or victim.state != "running" or not one.attempt:
                continue
            steps = {
                process.protected
                for site in world.sites.values()
                for key, process in site.processes.items()
                if key[:2] == (one.job, one.attempt) and process.exit_status is None
            }
            if len(steps) != 1 or None in steps:
                return f"{one.job} is ended for {job.id}, and its processes have saved the steps {steps}"
        slow = [part.cluster for part in job.present() if part.state != "ready"]
        if slow:
            return f"{job.id} has victims ended, and {slow} is not ready"
    return ""


def _events(log: Log) -> Iterable[Event]:
    events = []
    while log is not None:
        log, event = log
        events.append(event)
    return reversed(events)


def _said(report: AgentReport | None) -> AgentReported:
    assert report is not None
    return AgentReported.of(report, 0.0)


def _take_orders(site: Site) -> None:
    orders, site.orders = site.orders, None
    assert orders is not None
    site.obey(orders)


def _send_late(site: Site) -> None:
    site.late = site.look()


def _want_local(site: Site) -> None:
    site.jobs[URGENT.name] = URGENT


def _lose(_site: Site, _orders: AgentOrders) -> None:
    """Nothing arrives."""


def _delay(site: Site, orders: AgentOrders) -> None:
    site.orders = orders


def _ends(key: tuple[str, int]) -> Callable[[Site], None]:
    return lambda site: site.end_lease(key)


def _insists(key: tuple[str, int]) -> Callable[[Site], None]:
    return lambda site: site.insist(key)

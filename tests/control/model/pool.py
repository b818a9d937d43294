"""The model of the protocol: the real coordinator, its log, the real agents' machines, a failing network.

There is no time: `now_s` is 0 throughout, and whatever waits for a time may find it passed. Timeouts, losses,
delays and deaths are faults; a run of the model has at most `Scenario.faults` of them. Where nothing else
is left to happen, a timeout is no fault: that is what it is for.

This is the plain form, whole states and nothing left out; `sweep` goes through the same steps faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import Event
from isthmus.control.state.job_records import TERMINAL_STATES
from isthmus.core.messages.agent_messages import AgentOrders
from isthmus.site.site_invariants import SiteInvariantError, check_site
from tests.control.model.canonical import Key, server_key, site_key
from tests.control.model.explore import Step
from tests.control.model.kinds import Kind
from tests.control.model.renumber import anew, known_at, known_to_server, server_anew, site_anew
from tests.control.model.scenario import Scenario
from tests.control.model.server import RULES, Server, Told, wrong_in
from tests.control.model.site import Site

Log = tuple["Log", Event] | None


@dataclass(kw_only=True)
class World:
    """One state. `log` is the server's, the latest event last; what is `left` of each kind is counted down.

    Sites and the coordinator are never changed once they are in a world: a step copies those it changes.
    """

    coordinator: Coordinator
    sites: dict[str, Site]
    log: Log
    left: Mapping[Kind, int]
    wrong: str = ""
    known: Key | None = None


class Pool:
    """The model (see `explore.Model`). Where it is `named`, states that differ in owners' names are two."""

    def __init__(self, scenario: Scenario, *, named: bool = False) -> None:
        self.scenario, self.named = scenario, named
        self.server = Server(scenario)

    def start(self) -> World:
        """All jobs are submitted, and every agent has reported once."""
        sites = {name: Site() for name in self.scenario.sites}
        told = self.server.start(Site().look())
        left = {Kind.FAULT: self.scenario.faults, **self.scenario.wishes}
        return World(coordinator=told.coordinator, sites=sites, log=_logged(None, told), left=left)

    def steps(self, world: World) -> Iterator[Step[World]]:
        """Return every step from `world`."""
        quiet = True
        timeouts = list[tuple[str, World]]()
        for kind, name, after in self._steps(world):
            if kind == Kind.ORDINARY:
                quiet = quiet and self.pure_key(after) == self.pure_key(world)
                yield Step(name, after)
            elif kind == Kind.TIMEOUT:
                timeouts.append((name, after))
            elif kind == Kind.SUBMIT:
                yield Step(name, after, fault=True)
            elif world.left[kind]:
                yield Step(name, _spend(after, kind), fault=True)
        for name, after in timeouts:
            if quiet:
                yield Step(name, after)
            elif world.left[Kind.FAULT]:
                yield Step(name, _spend(after, Kind.FAULT), fault=True)

    def key(self, world: World) -> Key:
        """Return what the future of `world` depends on; the same for worlds that differ in owners' names."""
        return (*world.left.values(), *self.pure_key(world))

    def pure_key(self, world: World) -> Key:
        """Return the key without what is left."""
        if world.known is None:
            sites = tuple(world.sites.values())
            world.known = whole_key(world.coordinator, sites, self.scenario.jobs, named=self.named)
        return world.known

    def is_goal(self, world: World) -> bool:
        """Every job has ended, and no site has a part or a device of it."""
        ended = all(job.state in TERMINAL_STATES for job in world.coordinator.state.jobs.values())
        return ended and all(site.is_empty for site in world.sites.values())

    def wrong(self, world: World) -> str:
        """Return the first invariant that does not hold, or ""."""
        if world.wrong or (found := wrong_in(world.coordinator)):
            return world.wrong or found
        for name, site in world.sites.items():
            if found := wrong_at(site):
                return f"{name}: {found}"
        return self._unlike(world) or next(self._broken(world), "")

    def _broken(self, world: World) -> Iterator[str]:
        for job in world.coordinator.state.jobs.values():
            alive = {key[1] for site in world.sites.values() for key, _ in site.running() if key[0] == job.id}
            if len(alive) > 1:
                yield f"processes of attempts {sorted(alive)} of job {job.id} are alive"
            for attempt in alive:
                if attempt not in committed(world.coordinator, job.id):
                    yield f"attempt {attempt} of job {job.id} has a process, but was not committed"

    def _unlike(self, world: World) -> str:
        """Say so where a server that dies now would leave the next one another state than it had."""
        if not world.left[Kind.FAULT]:
            return ""
        folded = Coordinator.replay(_events(world.log), RULES)
        jobs = self.scenario.jobs
        if server_key(folded, jobs) != server_key(world.coordinator, jobs):
            return "the fold of the log is not the state that the server has"
        return ""

    def _steps(self, world: World) -> Iterator[tuple[Kind, str, World]]:
        for name, site in world.sites.items():
            for kind, what, after in (*site.steps(), *site.faults()):
                yield kind, f"{name} {what}", _with(world, {name: after})
            if site.orders is None:
                yield from self._exchanges(world, name, site)
            if site.late is not None:
                after = site.copy()
                after.late = None
                told = self.server.hear(world.coordinator, name, site.late)
                yield (
                    Kind.ORDINARY,
                    f"a late report of {name} arrives",
                    _with(_told(world, told), {name: after}),
                )
        for what, sites in training(world.sites, self.scenario):
            yield Kind.ORDINARY, what, _with(world, sites)
        coordinator = world.coordinator
        for kind, what, told in (*self.server.steps(coordinator), *self.server.faults(coordinator)):
            yield kind, what, _told(world, told)

    def _exchanges(self, world: World, name: str, site: Site) -> Iterator[tuple[Kind, str, World]]:
        """Let a site report; then it obeys, or the answer is lost, or comes late, or a process dies."""
        looked = site.copy()
        told = self.server.hear(world.coordinator, name, looked.look())
        after = _told(world, told)
        orders = self.server.orders(after.coordinator, name)
        for kind, what, then in EXCHANGES:
            answered = looked.copy()
            then(answered, orders)
            yield kind, f"{name} {what}", _with(after, {name: answered})
        died = _told(after, self.server.restart(after.coordinator))
        yield Kind.FAULT, f"the server dies before it answers {name}", _with(died, {name: looked})


def whole_key(
    coordinator: Coordinator,
    sites: tuple[Site, ...],
    jobs: Iterable[tuple[str, str]],
    *,
    named: bool = False,
) -> Key:
    """Return the key of a whole state: numbers recounted, sites in no order, or in that of their names."""
    numbers = anew(known_to_server(coordinator), map(known_at, sites))
    if numbers is not None:
        coordinator = server_anew(coordinator, numbers)
        both = zip(sites, numbers.lives, strict=True)
        sites = tuple(site_anew(site, numbers, lives) for site, lives in both)
    own, seen = server_key(coordinator, jobs)
    of_sites = [(one, site_key(site)) for one, site in zip(seen, sites, strict=True)]
    return own, tuple(of_sites if named else sorted(of_sites, key=hash))


def wrong_at(site: Site) -> str:
    """Return the first invariant of a site that does not hold, or ""."""
    try:
        check_site(site.machine)
    except SiteInvariantError as error:
        return str(error)
    return site.wrong


def committed(coordinator: Coordinator, job: str) -> set[int]:
    """Return the attempts of a job that the server has ordered all their sites to run."""
    parts = coordinator.state.jobs[job].parts.values() if job in coordinator.state.jobs else ()
    every = {part.attempt for part in parts}
    return every - {part.attempt for part in parts if not part.committed}


def training(sites: Mapping[str, Site], scenario: Scenario) -> Iterator[tuple[str, dict[str, Site]]]:
    """Yield what the ranks of a run do together: come to the end, and save once one was asked to."""
    for job, places in scenario.jobs:
        attempts = [{key for key, rank in sites[name].running() if rank.trains and key[0] == job} for name in places]
        for key in sorted(set.intersection(*attempts)):
            yield f"{job}/{key[1]} has trained to its end", {n: sites[n].ended(key, 0) for n in places}
            ranks = [sites[name].processes[key] for name in places]
            newest = max(rank.protected or 0 for rank in ranks)
            if any(rank.saves is not None and rank.saves >= newest for rank in ranks):
                after = {name: sites[name].copy() for name in places}
                for site in after.values():
                    site.processes[key].protected = newest + 1
                yield f"{job}/{key[1]} has saved and verified its work", after


def badly_ended(ended: Iterable[tuple[str, int]], sites: Iterable[Site]) -> str:
    """Return what is wrong with those that are ended for a preemption: who has saved what.

    Whose processes have all ended by themselves, which the server has not heard yet, loses nothing.
    """
    sites = tuple(sites)
    for job, attempt in ended:
        steps = {one.protected for site in sites for key, one in site.running() if key[:2] == (job, attempt)}
        if len(steps) > 1 or None in steps:
            return f"{job} is ended for another, and its processes have saved the steps {steps}"
    return ""


def _lose(_site: Site, _orders: AgentOrders) -> None:
    """Nothing arrives."""


def _delay(site: Site, orders: AgentOrders) -> None:
    site.orders = orders


EXCHANGES: tuple[tuple[Kind, str, Callable[[Site, AgentOrders], None]], ...] = (
    (Kind.ORDINARY, "exchanges", Site.obey),
    (Kind.FAULT, "reports, the answer is lost", _lose),
    (Kind.FAULT, "reports, the answer takes its time", _delay),
    (Kind.FAULT, "dies while it obeys", Site.die_obeying),
)
"""What may become of the answer to a report."""


def _spend(world: World, kind: Kind) -> World:
    return replace(world, left={**world.left, kind: world.left[kind] - 1})


def _told(world: World, told: Told) -> World:
    wrong = world.wrong or told.wrong or badly_ended(told.ended, world.sites.values())
    return replace(world, coordinator=told.coordinator, log=_logged(world.log, told), wrong=wrong, known=None)


def _with(world: World, sites: Mapping[str, Site]) -> World:
    return replace(world, sites={**world.sites, **sites}, known=None)


def _logged(log: Log, told: Told) -> Log:
    for event in told.events:
        log = (log, event)
    return log


def _events(log: Log) -> Iterable[Event]:
    events = []
    while log is not None:
        log, event = log
        events.append(event)
    return reversed(events)

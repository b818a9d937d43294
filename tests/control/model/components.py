"""`Components`: the servers and sites that states are made of, each met once, with what each may do.

A state is a server's number and, by place, each site's number. What a step does depends on one site, on the
server, or on the server and one site: so it is worked out once for each of these and not for each state.

Servers that are the same but for the names of their sites have one number. `Placed.order` says where the
sites of the one that was met are in the one that is kept: site i there is site order[i] here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.job_history import JobHistory
from isthmus.core.messages.agent_messages import AgentReport
from tests.control.model.canonical import orders_key, report_key, server_key, site_key
from tests.control.model.clone import Shelf, share
from tests.control.model.facts import Facts, ServerFacts, SiteFacts
from tests.control.model.kinds import Kind
from tests.control.model.pool import EXCHANGES
from tests.control.model.renumber import known_at, known_to_server
from tests.control.model.scenario import Scenario
from tests.control.model.server import Server, Told
from tests.control.model.site import Site

Order = tuple[int, ...]


class Placed(NamedTuple):
    """The number of a server, and the position of its sites in the server that is kept under that number."""

    server: int
    order: Order


class Heard(NamedTuple):
    """What an event does to a server; `ended` are attempts that trained and that it now has end."""

    placed: Placed
    ended: tuple[tuple[str, int], ...]
    wrong: str


class Effect(NamedTuple):
    """A step of a server, of a site, or of both; None is what stays as it is."""

    kind: Kind
    name: str
    heard: Heard | None = None
    site: int | None = None


@dataclass(kw_only=True)
class Counted:
    """Things by number; two of one key have one number."""

    things: list[Any]
    numbers: dict[int, int]

    def number(self, key: Hashable, thing: Any) -> int:
        """Return the number of a thing, a new one where its key is new."""
        hashed = hash(key)
        found = self.numbers.get(hashed)
        if found is None:
            found = self.numbers[hashed] = len(self.things)
            self.things.append(thing)
        return found


class Components:
    """See above. Keys are kept as 64-bit hashes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rules = Server(scenario)
        self.servers, self.sites = Counted(things=[], numbers={}), Counted(things=[], numbers={})
        self.reports, self.orders = Counted(things=[], numbers={}), Counted(things=[], numbers={})
        self.known = Counted(things=[], numbers={})
        self.server_facts, self.site_facts = Facts[ServerFacts](), Facts[SiteFacts]()
        self.looks: dict[int, tuple[int, int]] = {}
        self.heard: dict[tuple[int, int, int], Heard] = {}
        self._ordered: dict[tuple[int, int], int] = {}
        self.answers: dict[tuple[int, int, int], int] = {}
        self._shelf: Shelf = {}
        self._restarts: dict[int, Heard] = {}

    def server(self, number: int) -> Coordinator:
        """Return the coordinator that is kept under a number."""
        found: Coordinator = self.servers.things[number]
        return found

    def site(self, number: int) -> Site:
        """Return the site that is kept under a number."""
        found: Site = self.sites.things[number]
        return found

    def place(self, coordinator: Coordinator) -> Placed:
        """Return the number of a coordinator."""
        own, seen = server_key(coordinator, self.scenario.jobs)
        hashes = [hash(one) for one in seen]
        number = self.servers.number((own, tuple(sorted(hashes))), coordinator)
        if number == len(self.server_facts):
            _forget_stories(coordinator)
            share(coordinator, self._shelf)
            known = known_to_server(coordinator)
            known_number = self.known.number(known, known)
            self.server_facts.add(ServerFacts.of(coordinator, self.scenario, tuple(hashes), known_number))
        return Placed(number, _match(tuple(hashes), self.server_facts[number].seen))

    def put(self, site: Site) -> int:
        """Return the number of a site."""
        number = self.sites.number(site_key(site), site)
        if number == len(self.site_facts):
            known = known_at(site)
            self.site_facts.add(SiteFacts.of(site, self.scenario, self.known.number(known, known)))
        return number

    def of_site(self, number: int, faulty: bool) -> list[Effect]:
        """Return the steps of a site alone: what goes wrong, or what else happens."""
        site = self.site(number)
        steps = site.faults() if faulty else site.steps()
        return [Effect(kind, name, site=self.put(after)) for kind, name, after in steps]

    def of_server(self, number: int, faulty: bool) -> list[Effect]:
        """Return the steps of a server alone."""
        steps = (self.rules.faults if faulty else self.rules.steps)(self.server(number))
        return [Effect(kind, name, heard=self.hear_told(number, told)) for kind, name, told in steps]

    def of_both(self, server: int, at: int, number: int, faulty: bool) -> list[Effect]:
        """Return the steps that are a message between a server and the site at one of its places."""
        site, found = self.site(number), list[Effect]()
        if site.orders is None:
            looked, report = self._look(number)
            heard = self._hear(server, at, report)
            after = heard.placed
            orders = self.order_at(after.server, after.order[at])
            for place, (kind, name, _) in enumerate(EXCHANGES):
                if (kind == Kind.FAULT) == faulty:
                    found.append(Effect(kind, name, heard, self._answer(looked, orders, place)))
            if faulty:
                died = self._restart(after.server)
                order = tuple(died.placed.order[place] for place in after.order)
                died = Heard(Placed(died.placed.server, order), heard.ended, heard.wrong or died.wrong)
                found.append(Effect(Kind.FAULT, "reports to a server that dies", died, looked))
        if site.late is not None and not faulty:
            report = self.reports.number(report_key(site.late), site.late)
            without = site.copy()
            without.late = None
            heard = self._hear(server, at, report)
            found.append(Effect(Kind.ORDINARY, "has a late report arrive", heard, self.put(without)))
        return found

    def hear_told(self, server: int, told: Told) -> Heard:
        if not told.events:
            return Heard(Placed(server, tuple(range(len(self.scenario.sites)))), (), "")
        return Heard(self.place(told.coordinator), told.ended, told.wrong)

    def _look(self, number: int) -> tuple[int, int]:
        """Return the site after its agent has looked, and its report."""
        if number not in self.looks:
            after = self.site(number).copy()
            report = after.look()
            self.looks[number] = self.put(after), self.reports.number(report_key(report), report)
        return self.looks[number]

    def _hear(self, server: int, at: int, report: int) -> Heard:
        key = server, at, report
        if key not in self.heard:
            said: AgentReport = self.reports.things[report]
            told = self.rules.hear(self.server(server), self.scenario.sites[at], said)
            self.heard[key] = self.hear_told(server, told)
        return self.heard[key]

    def order_at(self, server: int, at: int) -> int:
        key = server, at
        if key not in self._ordered:
            orders = self.rules.orders(self.server(server), self.scenario.sites[at])
            self._ordered[key] = self.orders.number(orders_key(orders), orders)
        return self._ordered[key]

    def _answer(self, looked: int, orders: int, place: int) -> int:
        """Return what becomes of a site that has looked where the answer fares as in `EXCHANGES[place]`."""
        key = looked, orders, place
        if key not in self.answers:
            site = self.site(looked).copy()
            EXCHANGES[place][2](site, self.orders.things[orders])
            self.answers[key] = self.put(site)
        return self.answers[key]

    def _restart(self, server: int) -> Heard:
        if server not in self._restarts:
            self._restarts[server] = self.hear_told(server, self.rules.restart(self.server(server)))
        return self._restarts[server]


def _forget_stories(coordinator: Coordinator) -> None:
    """Let go of what is only there to be told: there are many coordinators."""
    coordinator.admitted = None
    for job in coordinator.state.jobs.values():
        job.history = JobHistory()
        for part in job.parts.values():
            part.history, part.cached_order = [], None


def _match(met: tuple[int, ...], kept: tuple[int, ...]) -> Order:
    """Return for each of the keys `met` its place among those `kept`, which are the same in some order."""
    if met == kept:
        return tuple(range(len(met)))
    left, order = dict(enumerate(kept)), list[int]()
    for one in met:
        place = next(place for place, other in left.items() if other == one)
        del left[place]
        order.append(place)
    return tuple(order)

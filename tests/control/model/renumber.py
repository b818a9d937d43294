"""New numbers for those that only have to differ: attempts, lives of agents, epochs of servers.

Of a job's attempts and of the epochs only the order matters, of an agent's lives only whether two are the
same and whether the server knows them. So a state in which nothing remembers an old number is the same as
one in which it never was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, Victim
from isthmus.site import DeviceIdAllocator, PartKey
from isthmus.site.site_state import SiteState
from tests.control.model.clone import clone
from tests.control.model.site import Site, attempts_at


class Known(NamedTuple):
    """The numbers in a component. Of a server, `lives` are those of each site: the last, and all."""

    attempts: frozenset[PartKey]
    dead: frozenset[PartKey]
    fences: frozenset[int]
    lives: tuple[Any, ...]


@dataclass(frozen=True)
class Anew:
    """The new numbers: of attempts, fences, and each site's lives; what has none is forgotten."""

    attempts: Mapping[PartKey, int]
    fences: Mapping[int, int]
    lives: tuple[Mapping[str, str], ...]

    def key(self, part: PartKey) -> PartKey:
        """Return the new name of a part."""
        return part[0], self.attempts[part] if part[1] else 0


def known_to_server(coordinator: Coordinator) -> Known:
    """Return the numbers that a coordinator knows."""
    attempts, state = set[PartKey](), coordinator.state
    for job in state.jobs.values():
        attempts.add((job.id, job.attempt))
        attempts |= {(one.job, one.attempt) for one in job.victims}
        for part in job.parts.values():
            attempts.add((job.id, part.attempt))
            attempts |= {(one.job, one.attempt) for one in part.victims}
    for record in state.clusters.values():
        attempts |= record.reported_parts.keys()
    lives = tuple((record.incarnation, frozenset(record.incarnations)) for record in state.clusters.values())
    known = frozenset(key for key in attempts if key[1])
    return Known(known, frozenset(), frozenset((coordinator.epoch,)), lives)


def known_at(site: Site) -> Known:
    """Return the numbers that a site knows; `dead` are attempts of which it has an ended process only."""
    attempts = frozenset(attempts_at(site))
    fences = {site.machine.fence} | ({site.orders.fence} if site.orders else set())
    late = site.late.incarnation if site.late else None
    dead = frozenset(key[:2] for key in site.processes if key[1])
    return Known(attempts, dead - attempts, frozenset(fences), (str(site.life), late))


def anew(server: Known, sites: Iterable[Known]) -> Anew | None:
    """Return the new numbers of a whole state, counted from 1; None where they already are those."""
    sites = tuple(sites)
    known = server.attempts.union(*(site.attempts for site in sites))
    attempts, last = dict[PartKey, int](), dict[str, int]()
    for job, attempt in sorted(known):
        attempts[job, attempt] = last[job] = last.get(job, 0) + 1
    fences = {
        fence: number for number, fence in enumerate(sorted(server.fences.union(*(site.fences for site in sites))))
    }
    lives = tuple(_lives(*there, *here.lives) for there, here in zip(server.lives, sites, strict=True))
    same = all(key[1] == number for key, number in attempts.items())
    same = same and all(one == number for one, number in fences.items())
    same = same and all(one == other for names in lives for one, other in names.items())
    same = same and all(there[1] <= names.keys() for there, names in zip(server.lives, lives, strict=True))
    same = same and not any(site.dead - known for site in sites)
    return None if same else Anew(attempts, fences, lives)


def _lives(last: str, heard: frozenset[str], life: str, late: str | None) -> dict[str, str]:
    """Return new names for the lives of an agent: 1 the present, 0 the last heard, -1 a third."""
    names = {life: "1"}
    names.setdefault(last, "0")
    if late is not None:
        names.setdefault(late, "-1")
    return names


def server_anew(coordinator: Coordinator, numbers: Anew) -> Coordinator:
    """Return a copy of the coordinator with the new numbers."""
    copy: Coordinator = clone(coordinator)
    state = copy.state
    state.epoch = numbers.fences[state.epoch]
    for job in state.jobs.values():
        job.victims = tuple(replace(one, attempt=numbers.key((one.job, one.attempt))[1]) for one in job.victims)
        parts = {}
        for part in job.parts.values():
            part.attempt = numbers.key((job.id, part.attempt))[1]
            part.victims = _victims(part.victims, numbers)
            part.cached_order = None
            parts[part.attempt, part.cluster] = part
        job.parts = parts
        job.attempt = numbers.key((job.id, job.attempt))[1]
    for record, lives in zip(state.clusters.values(), numbers.lives, strict=True):
        record.parts = {numbers.key(key): part for key, part in record.parts.items()}
        seen = (_told_anew(part, numbers) for part in record.reported_parts.values())
        record.reported_parts = {(part.job, part.attempt): part for part in seen}
        record.incarnation = lives[record.incarnation]
        record.incarnations = {lives[one] for one in record.incarnations if one in lives}
    return copy


def site_anew(site: Site, numbers: Anew, lives: Mapping[str, str]) -> Site:
    """Return a copy of the site with the new numbers, without ended processes whose number no component knows."""
    copy = site.copy()
    own = copy.machine.site
    own.fence, own.rejected_fence = numbers.fences[own.fence], None
    for part in own.parts.values():
        part.attempt = numbers.key(part.key)[1]
        part.victims = tuple(numbers.key(key) for key in part.victims)
    own.parts = {part.key: part for part in own.parts.values()}
    _index(own)
    copy.processes = {
        (*numbers.key(key[:2]), key[2]): process
        for key, process in copy.processes.items()
        if not key[1] or key[:2] in numbers.attempts
    }
    copy.life = int(lives[str(site.life)])
    copy.late = site.late and _report_anew(site.late, numbers, lives)
    copy.orders = site.orders and _orders_anew(site.orders, numbers)
    return copy


def _index(own: SiteState) -> None:
    """Make the device book and the indexes of a site from its parts."""
    assert isinstance(own.devices, DeviceIdAllocator)
    own.devices = DeviceIdAllocator(own.devices.ids)
    for index in (own.queued_local, own.queued_pool, own.time_dependent):
        index.clear()
    for part in own.parts.values():
        own.devices.record_transition(part, "new", part.state)
        own.mark_changed(part)


def _report_anew(report: AgentReport, numbers: Anew, lives: Mapping[str, str]) -> AgentReport:
    parts = tuple(_told_anew(part, numbers) for part in report.parts)
    return report.model_copy(update={"parts": parts, "incarnation": lives[report.incarnation]})


def _orders_anew(orders: AgentOrders, numbers: Anew) -> AgentOrders:
    parts = tuple(
        _told_anew(order, numbers).model_copy(update={"victims": _victims(order.victims, numbers)})
        for order in orders.parts
    )
    return orders.model_copy(update={"parts": parts, "fence": numbers.fences[orders.fence]})


def _victims(victims: Iterable[Victim], numbers: Anew) -> tuple[Victim, ...]:
    return tuple(one.model_copy(update={"attempt": numbers.key((one.job, one.attempt))[1]}) for one in victims)


def _told_anew(part: Any, numbers: Anew) -> Any:
    return part.model_copy(update={"attempt": numbers.key((part.job, part.attempt))[1]})

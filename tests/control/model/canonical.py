"""`state_key`: what the future of a state depends on, the same for states that differ in names only.

Left out: texts and stories, times (only whether one is set), counters that only tell one round from another.
Attempts are counted anew from the oldest that anything still knows. Sites that play the same part in all jobs
may stand for each other: the keys of sites are sorted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from isthmus.control.coordinator import Coordinator
from isthmus.control.indexes import Indexes
from isthmus.control.records import JobRecord, PartRecord
from isthmus.core.messages import AgentOrders, AgentReport, ObservedPart, PartOrder, Protection
from tests.control.model.site import Site

Ranks = Mapping[tuple[str, int], int]
"""Attempts of jobs, counted anew."""

_TEXTS = {"story", "detail", "reason", "setback"}
_TIMES = {"submitted_s", "changed_s", "since_s", "claimed_s", "lease_s", "wrote_s", "unsaved_s"}
_JOB = _TEXTS | _TIMES | {
    "id", "number", "user", "packed", "round", "tried_on", "tried_whole", "parts", "plans", "attempt",
    "refusals", "needs", "cuts", "on_links", "began_s", "run_s", "ends_s", "due_s", "trained_at", "victims",
    "asked", "request",
}  # fmt: skip
_PART = _TEXTS | _TIMES | {
    "job", "attempt", "cluster", "ranks", "chips", "storage_bytes", "workers", "order", "spec", "plan",
    "place",
}  # fmt: skip
_WORKER = _TIMES | {"node_group", "chips", "num_bytes"}
_SET = {"deadline_s", "force_at_s", "evict_at_s", "address", "rank_map", "plan", "cards"}
"""Fields of which it only matters whether they are set."""


_NAMES: dict[type, tuple[str, ...]] = {}
"""The fields of each type that count."""


@dataclass
class Keyed:
    """A place to keep a key once it is worked out."""

    key: tuple[Hashable, ...] | None = None


def state_key(
    coordinator: Coordinator, sites: Iterable[Site], jobs: Iterable[tuple[str, str]]
) -> tuple[Hashable, ...]:
    """Return the key of a coordinator and its sites; `jobs` maps each job to the sites of its plan."""
    sites = tuple(sites)
    ranks = _ranks(coordinator, sites)
    state = coordinator.state
    own = (
        state.epoch,
        tuple(state.live),
        *(_job(job, ranks) for job in state.jobs.values()),
        *_books(state.indexes),
    )
    of_sites = sorted(
        (
            (tuple(site.name in places for _, places in jobs), _site(coordinator, site, ranks))
            for site in sites
        ),
        key=hash,
    )
    return own, tuple(of_sites)


def _books(books: Indexes) -> Iterator[Hashable]:
    """What the coordinator's books say beyond what follows from the jobs."""
    yield tuple(sorted(books.parked))
    yield tuple(sorted(books.keepers))
    yield tuple(books.curious)
    yield tuple(books.unplanned)
    yield books.pushed


def attempts_at(site: Site) -> frozenset[tuple[str, int]]:
    """Return the attempts of jobs that a site knows, or that are on the way from or to it."""
    known = set(site.machine.parts)
    known |= {key[:2] for key, process in site.processes.items() if process.exit_status is None}
    known |= {(part.job, part.attempt) for part in (*_parts(site.late), *_parts(site.orders))}
    return frozenset(known)


def _ranks(coordinator: Coordinator, sites: Iterable[Site]) -> Ranks:
    """Number the attempts of each job that anything but an ended process still knows."""
    known = {(job.id, job.attempt) for job in coordinator.state.jobs.values()}
    for job in coordinator.state.jobs.values():
        known |= {(job.id, attempt) for attempt, _ in job.parts}
    for site in sites:
        if site.attempts is None:
            site.attempts = attempts_at(site)
        known |= site.attempts
        known |= coordinator.state.clusters[site.name].reported.keys()
    ranks: dict[tuple[str, int], int] = {}
    last: dict[str, int] = {}
    for job, attempt in sorted(known):
        ranks[job, attempt] = last[job] = last.get(job, -1) + 1 if attempt else 0
    return ranks


def _parts(message: AgentReport | AgentOrders | None) -> tuple[ObservedPart | PartOrder, ...]:
    return message.parts if message else ()


def _job(job: JobRecord, ranks: Ranks) -> Hashable:
    asked = job.asked is not None
    return (ranks[job.id, job.attempt], min(job.refusals, 1), asked, _fields(job, _JOB, ranks))


def _site(coordinator: Coordinator, site: Site, ranks: Ranks) -> tuple[Hashable, ...]:
    state = coordinator.state
    record = state.clusters[site.name]
    parts = [
        (ranks[part.job, part.attempt], _part(part, ranks))
        for job in state.jobs.values()
        for part in job.parts.values()
        if part.cluster == site.name
    ]
    tried = [
        (before or {}).get(site.name, {}).get("g", -1)
        for job in state.jobs.values()
        for before in (job.tried_on, job.tried_whole)
    ]
    victims = [
        (job.id, one.job, ranks.get((one.job, one.attempt), -1))
        for job in state.jobs.values()
        for one in job.victims
        if one.cluster == site.name
    ]
    local = sorted((one.name, one.running, one.level, one.preemptible) for one in record.local.values())
    kept = state.indexes.kept.get(f"{site.name}/g", 0)
    known = str(site.lives) in record.incarnations, record.incarnation == str(site.lives)
    reported = (_observed(part, ranks) for part in record.reported.values())
    return (
        (*known, record.connected, record.free_chips.get("g", 0), kept, *tried, *victims, *local),
        tuple(parts),
        tuple(ranks[key] for key in record.parts),
        frozenset(reported),
        _agent_key(site, ranks),
    )


def _agent_key(site: Site, ranks: Ranks) -> Hashable:
    """Return the agent's half of a site's key; it is kept, since most steps change one site."""
    assert site.attempts is not None
    gone = {key[:2] for key in site.processes if key[:2] not in site.attempts}
    under = tuple((key, ranks.get(key)) for key in sorted(site.attempts | gone))
    if under not in site.keys:
        site.keys[under] = hash(tuple(_agent(site, ranks)))
    return site.keys[under]


def _agent(site: Site, ranks: Ranks) -> Iterator[Hashable]:
    own = site.machine.site
    yield own.fence, own.ending, own.is_open, tuple(site.jobs)
    yield tuple(
        (
            _key(part, ranks),
            _fields(part, _PART | {"arrived", "workers"}, ranks),
            tuple(_fields(worker, _WORKER, ranks) for worker in part.workers.values()),
        )
        for part in own.parts.values()
    )
    yield tuple(
        (job, ranks[job, attempt], run, _fields(process, set(), ranks))
        for (job, attempt, run), process in sorted(site.processes.items())
        if (job, attempt) in ranks
    )
    late = site.late
    yield (
        ()
        if late is None
        else (
            late.incarnation == str(site.lives),
            late.free_chips["g"],
            tuple(_observed(part, ranks) for part in late.parts),
        )
    )
    orders = site.orders
    yield () if orders is None else (orders.fence, tuple(_order(order, ranks) for order in orders.parts))


def _part(part: PartRecord, ranks: Ranks) -> Hashable:
    return part.job, len(part.workers), _fields(part, _PART, ranks)


def _observed(part: ObservedPart, ranks: Ranks) -> tuple[Any, ...]:
    protection = part.protection.step if part.protection else -1
    return (*_key(part, ranks), part.state, part.fault or "", len(part.workers), protection)


def _order(order: PartOrder, ranks: Ranks) -> Hashable:
    victims = tuple(_key(victim, ranks) for victim in order.victims)
    return (*_key(order, ranks), order.desired, order.protect, victims, order.rank_map is not None)


def _key(part: Any, ranks: Ranks) -> tuple[str, int]:
    return part.job, ranks.get((part.job, part.attempt), -1)


def _fields(thing: Any, left_out: set[str], ranks: Ranks) -> tuple[Hashable, ...]:
    kind = type(thing)
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(one.name for one in fields(thing) if one.name not in left_out)
    return tuple([_value(name, getattr(thing, name), ranks) for name in names])


def _value(name: str, value: Any, ranks: Ranks) -> Hashable:
    if name in _SET:
        return value is not None and value != ()
    if value is None:
        return "-"
    if isinstance(value, Protection):
        return value.step
    if name == "victims":
        keys = (key if isinstance(key, tuple) else (key.job, key.attempt) for key in value)
        return tuple((key[0], ranks.get(key, -1)) for key in keys)
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    if isinstance(value, bool | int | str | tuple):
        return value
    raise TypeError(f"the key does not know what to make of {name} = {value!r}")

"""Keys: what the future of a state depends on, the same for states that differ in names only.

Left out: texts and stories, times (only whether one is set, and has passed), counters that only tell one
round from another, whose output is accepted, accounts, and what is only noted down to save work.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields
from typing import Any

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.indexes import Indexes
from isthmus.control.state.job_records import JobRecord
from isthmus.core.messages.agent_messages import (
    AgentOrders,
    AgentReport,
    ObservedPart,
    PartOrder,
    VerifiedCheckpoint,
)
from isthmus.core.pool_resource import PoolResource
from isthmus.site.site_queue import queue_order
from tests.control.model.site import Site

Key = tuple[Hashable, ...]

_TEXTS = {"history", "last_events", "worker_restarts", "observation", "spec", "detail", "reason", "last_restart_reason"}
_TIMES = {"submitted_s", "changed_s", "pause_since_s", "since_s", "claimed_s", "lease_s", "last_write_s", "unsaved_s"}
_JOB = _TEXTS | _TIMES | {
    "id", "number", "user", "packed", "round", "last_planned_free", "last_planned_total", "parts", "plans",
    "refusals", "needs", "plan_parts", "allocated_kbps", "started_s", "predicted_run_s",
    "expected_end_s", "user_deadline_s", "file_clusters", "victims",
    "planner_input", "waiting_job", "fits_inventory_version", "past_ranks", "lost_by",
}  # fmt: skip
_PART = _TEXTS | _TIMES | {
    "job", "cluster", "ranks", "chips", "storage_bytes", "workers", "cached_order", "spec", "plan", "place",
    "arrived", "has_trained", "used_chips", "used_owner", "links",
}  # fmt: skip
_WORKER = _TIMES | {"node_group", "chips", "num_bytes"}
_SET = {"state_deadline_s", "address", "rank_map", "plan", "devices"}
"""Fields of which it only matters whether they are set."""
_DUE = {"force_at_s", "evict_at_s", "left_s"}
"""Times of which it matters whether they have passed."""

_NAMES: dict[tuple[type, int], tuple[str, ...]] = {}
"""The fields of each type that count."""


def server_key(coordinator: Coordinator, jobs: Iterable[tuple[str, str]]) -> tuple[Key, list[Key]]:
    """Return the key of what concerns no site, and that of what concerns each, in the order of their names.

    No name of a site is in either; `jobs` says at which sites each job has a place.
    """
    state = coordinator.state
    own = (
        state.epoch,
        tuple(state.live_jobs),
        *(_job(job) for job in state.jobs.values()),
        *_books(state.indexes),
    )
    return own, [
        (tuple([name in places for _, places in jobs]), *_seen_at(coordinator, name)) for name in state.clusters
    ]


def site_key(site: Site) -> Key:
    """Return the key of a site."""
    own = site.machine.site
    return (
        site.life,
        own.fence,
        own.shutting_down,
        own.is_open,
        tuple(site.jobs),
        tuple(part.key for part in queue_order(own)),
        tuple(
            (
                part.job,
                _fields(part, _PART),
                tuple(_fields(worker, _WORKER) for worker in part.workers.values()),
            )
            for part in own.parts.values()
        ),
        tuple((key, _fields(process, _NOTHING)) for key, process in sorted(site.processes.items())),
        () if site.late is None else report_key(site.late),
        () if site.orders is None else orders_key(site.orders),
        site.wrong,
    )


def report_key(report: AgentReport) -> Key:
    """Return the key of a report, whichever site makes it."""
    return (
        report.incarnation,
        report.free_chips["g"],
        tuple(_observed(part) for part in report.parts),
        tuple((one.name, one.running, one.level, one.preemptible) for one in report.local_jobs),
    )


def orders_key(orders: AgentOrders) -> Key:
    """Return the key of orders, whichever site they are for."""
    return orders.fence, orders.queue, tuple(_order(order) for order in orders.parts)


def _books(books: Indexes) -> Iterator[Hashable]:
    """What the coordinator's books say beyond what follows from the jobs."""
    yield tuple(sorted(books.parked))
    yield books.reservers
    yield tuple(books.interactive)
    yield tuple(books.unplanned)
    yield books.advertised


def _job(job: JobRecord) -> Hashable:
    victims = tuple(dict.fromkeys((one.job, one.attempt) for one in job.victims))
    return min(job.refusals, 1), job.planner_input is not None, victims, _fields(job, _JOB)


def _seen_at(coordinator: Coordinator, name: str) -> Key:
    state = coordinator.state
    record = state.clusters[name]
    tried, victims, parts = list[Hashable](), list[Hashable](), list[Hashable]()
    for job in state.jobs.values():
        tried += [
            (before or _NEVER).get(name, _NEVER).get("g", -1)
            for before in (job.last_planned_free, job.last_planned_total)
        ]
        victims += [(job.id, one.job, one.attempt) for one in job.victims if one.cluster == name]
        parts += [
            (part.job, len(part.workers), _fields(part, _PART)) for part in job.parts.values() if part.cluster == name
        ]
    local = sorted((one.name, one.running, one.level, one.preemptible) for one in record.local_jobs.values())
    return (
        record.incarnation,
        frozenset(record.incarnations),
        record.connected,
        record.free_chips.get("g", 0),
        state.indexes.reserved.get(PoolResource.chips(name, "g"), 0),
        tuple(tried),
        tuple(victims),
        tuple(local),
        tuple(parts),
        tuple(record.parts),
        tuple(key for key in record.reported_parts if key not in record.parts),
        frozenset([_observed(part) for part in record.reported_parts.values()]),
    )


_NEVER: dict[str, Any] = {}
_NOTHING: set[str] = set()


def _observed(part: ObservedPart) -> Key:
    protection = part.protection.step if part.protection else -1
    return part.job, part.attempt, part.state, part.fault or "", len(part.workers), protection


def _order(order: PartOrder) -> Key:
    victims = tuple((victim.job, victim.attempt) for victim in order.victims)
    return order.job, order.attempt, order.desired, order.protect, victims, order.rank_map is not None


_PLAIN = {str, int, bool, type(None)}


def _fields(thing: Any, left_out: set[str]) -> Key:
    kind = type(thing), id(left_out)
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(one.name for one in fields(thing) if one.name not in left_out)
    values = [(name, getattr(thing, name)) for name in names]
    return tuple([value if type(value) in _PLAIN else _value(name, value) for name, value in values])


def _value(name: str, value: Any) -> Hashable:
    if name in _SET:
        return value != ()
    if name in _DUE:
        return value > 0
    if isinstance(value, VerifiedCheckpoint):
        return value.step
    if name == "victims":
        return tuple(key if isinstance(key, tuple) else (key.job, key.attempt) for key in value)
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    if isinstance(value, tuple):
        return value
    raise TypeError(f"the key does not know what to make of {name} = {value!r}")

"""Invariants of a site machine, checked after every step of every test."""

from __future__ import annotations

from collections import Counter

from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.parts import CLAIMING, HOLDING, SitePart
from isthmus.site.site_report import observe_part
from isthmus.site.site_state import SiteState

_LIVE = ("running", "failed", "stopping")


class SiteInvariantError(Exception):
    """An invariant of the site machine is violated, which is a bug."""


def check_site(machine: SiteMachine) -> None:
    """Raise `SiteInvariantError` unless devices, parts and indexes are consistent.

    Every device has at most one holder and one claimer and is accounted for; the pool uses no more devices of
    a node group than the owner allows; the indexes match the parts.
    """
    site = machine.site
    for part in site.parts.values():
        _check_part(part)
    if isinstance(site.devices, DeviceIdAllocator):
        _check_ids(site, site.devices)
    for group, num in site.devices.used_by_pool().items():
        limit = site.pool_limit(group)
        _require(num <= limit, f"the pool has {num} devices of '{group}', the owner allows {limit}")
    for group, num in site.devices.num_free().items():
        total = site.devices.inventory[group]
        _require(0 <= num <= total, f"{num} of {total} devices of '{group}' are free")
    _check_indexes(site)


def _check_ids(site: SiteState, devices: DeviceIdAllocator) -> None:
    held: Counter[str] = Counter()
    claimed: Counter[str] = Counter()
    for part in site.parts.values():
        counter = held if part.state in HOLDING else claimed if part.state in CLAIMING else None
        for worker in part.workers.values():
            if counter is None:
                _require(not worker.devices, f"{_name(part)} has devices")
                continue
            counter.update(worker.devices)
            _require(len(worker.devices) == worker.chips, f"{_name(part)} lacks devices")
            known = {*devices.ids.get(worker.node_group, ()), *devices.former_ids}
            _require(set(worker.devices) <= known, f"{_name(part)} has devices that do not exist")
    for what, counter in (("holders", held), ("claimers", claimed)):
        twice = [device for device, num in counter.items() if num > 1]
        _require(not twice, f"devices {twice} have two {what}")
    total, free = sum(devices.inventory.values()), sum(devices.num_free().values())
    taken = len((held.keys() | claimed.keys()) - devices.former_ids)
    _require(free + taken == total, f"{free} free and {taken} taken of {total} devices")


def _check_part(part: SitePart) -> None:
    stale = part.observation is not None and part.observation != observe_part(part)
    _require(not stale, f"{_name(part)} has changed since it was reported")
    _require(part.state not in ("new", "forgotten"), f"{_name(part)} does not belong in the table")
    _require(part.state in _LIVE or not part.live, f"{_name(part)} has a live worker")
    _require(part.state != "released" or not part.workers, f"{_name(part)} still has workers")


def _check_indexes(site: SiteState) -> None:
    queued = {key for key, part in site.parts.items() if part.state == "queued"}
    _require(site.queued_local.keys() | site.queued_pool.keys() == queued, "the queue index is wrong")
    _require(all(part.local for part in site.queued_local.values()), "a part of the pool is queued as local")
    due = {key for key, part in site.parts.items() if site.is_time_dependent(part)}
    _require(site.time_dependent.keys() >= due, f"missing timers: {due - site.time_dependent.keys()}")


def _name(part: SitePart) -> str:
    return f"part {part.job}/{part.attempt} ({part.state})"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SiteInvariantError(what)

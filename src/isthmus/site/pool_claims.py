"""`claim_for_pool`: claims devices for a part of the pool, including those of the victims in its order.

The owner's policy may reject any order. A claim stops no victim; `evictions` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.site.devices.claim import DeviceSource
from isthmus.site.evictions import is_preemptible
from isthmus.site.parts import HOLDING, PartKey, SitePart
from isthmus.site.site_queue import local_jobs_ahead
from isthmus.site.site_state import SiteState


def claim_for_pool(site: SiteState, part: SitePart, victims: Sequence[PartKey]) -> str:
    """Assign devices to `part`, including those of `victims`; return "" or the reason for the refusal."""
    refusal = _policy_refusal(site, part, victims) or _permanent_shortage(site, part)
    if refusal:
        return refusal
    sources = [
        DeviceSource(key, site.devices.obtainable(site.parts[key], part), counted=key[1] > 0)
        for key in dict.fromkeys(victims)
        if key in site.parts and site.parts[key].state in HOLDING and key != part.key
    ]
    used = site.devices.used_by_pool(without=part)
    room = {group: site.pool_limit(group) - used[group] for group in part.wanted}
    taken = site.devices.claim(part, sources, room)
    if taken is None:
        return _describe_shortage(site, part, sources, room)
    part.victims = tuple(victims)
    site.devices.assign(part, taken)
    return ""


def _policy_refusal(site: SiteState, part: SitePart, victims: Iterable[PartKey]) -> str:
    if not site.is_open:
        return f"{site.cluster}: the owner does not admit the pool's jobs at this hour"
    for key in victims:
        victim = site.parts.get(key)
        if victim is None or not victim.local:
            continue
        if not is_preemptible(site, victim):
            return f"{site.cluster}: the owner does not let the pool preempt local job '{victim.job}'"
        if site.level_index(victim) <= site.level_index(part):
            return (
                f"{site.cluster}: local job '{victim.job}' of level '{victim.level}' is not below "
                f"'{part.level}', the level of the pool's job"
            )
    return ""


def _permanent_shortage(site: SiteState, part: SitePart) -> str:
    """Return why `part` could not start even if all devices of the pool were free, or ""."""
    waiting = local_jobs_ahead(site, part) if site.queued_local else []
    inventory = site.devices.inventory
    for group, num in part.wanted.items():
        where = f"{site.cluster}: node group '{group}': {num} devices wanted"
        if group not in inventory:
            return f"{site.cluster}: no node group '{group}'; available: {', '.join(sorted(inventory))}"
        if num > site.pool_limit(group):
            return f"{where}, the owner lets the pool have {site.pool_limit(group)}"
        first = next((other.job for other in waiting if group in other.wanted), None)
        if first is not None:
            return f"{where}, queued behind local job '{first}'"
    return ""


def _describe_shortage(
    site: SiteState, part: SitePart, sources: Sequence[DeviceSource[PartKey]], headroom: dict[str, int]
) -> str:
    """Return a message with the first node group that has too few devices."""
    free = site.devices.num_free(part)
    for group, num in part.wanted.items():
        from_victims = sum(source.num_devices.get(group, 0) for source in sources)
        counted = sum(source.num_devices.get(group, 0) for source in sources if source.counted)
        allowed = max(0, headroom[group]) + counted
        if num <= min(free[group] + from_victims, allowed):
            continue
        found = f"{free[group]} free"
        found += f", {from_victims} of victims" if sources else ""
        if headroom[group] < min(num, free[group] + from_victims):
            found += f", the owner lets the pool have {max(0, headroom[group])} more"
        return f"{site.cluster}: node group '{group}': {num} devices wanted, {found}"
    why = site.devices.why_no_place(part, [source.key for source in sources])
    return f"{site.cluster}: {why or 'the wanted devices are not available together'}"

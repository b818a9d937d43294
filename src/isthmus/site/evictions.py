"""Evictions of local jobs by the pool, and of the pool's parts by local jobs.

A victim loses its devices only once their claimer is certain to get them; a claim alone evicts nothing.
"""

from __future__ import annotations

from isthmus.site.checkpoint_protection import request_checkpoint
from isthmus.site.devices.claim import DeviceSource
from isthmus.site.part_lifecycle import move_part, release_part
from isthmus.site.parts import LEASED, SitePart
from isthmus.site.site_state import SiteState

_ENDING_STATES = ("stopping", "succeeded", "failed")


def is_preemptible(site: SiteState, local: SitePart) -> bool:
    """Tell whether the owner and the job itself let the pool's jobs of a higher level preempt it."""
    first = site.policy.preemptible_from
    if first is None or not local.preemptible:
        return False
    return site.level_index(local) >= site.priorities.rank(first)


def evict_victims(site: SiteState, part: SitePart, now_s: float) -> None:
    """Stop the local jobs that hold devices claimed by `part`; they are requeued.

    Victims that are parts of the pool end by their own orders.
    """
    for victim in current_holders(site, part):
        if victim.local and not victim.foreign and victim.state == "running":
            victim.requeue = True
            move_part(site, victim, "stopping", now_s, f"preempted by job '{part.job}' of the pool")


def current_holders(site: SiteState, part: SitePart) -> list[SitePart]:
    """Return the parts that still hold devices which `part` has claimed."""
    return [site.parts[key] for key in site.devices.current_holders(part)]


def evict_pool_parts(site: SiteState, job: SitePart, now_s: float) -> bool:
    """Evict parts of the pool below the level of the local `job` for its devices; return whether possible.

    Victims of the lowest level go first, of these parts that do not train yet, then those with the least
    unsaved work.
    """
    if not site.policy.local_evicts_pool:
        return False
    # Step 1: collect devices about to be free, then those of lower parts of the pool, cheapest first.
    others = [part for part in site.parts.values() if part is not job]
    ending = [part for part in others if part.state in _ENDING_STATES]
    lower = [part for part in others if not part.local and site.level_index(part) > site.level_index(job)]
    lower = [part for part in lower if part.state in LEASED or part.state == "running"]
    lower.sort(key=lambda part: _eviction_cost(site, part))
    victims = (*ending, *lower)
    sources = [DeviceSource(part.key, site.devices.obtainable(part, job), counted=False) for part in victims]
    # Step 2: claim the devices from as few victims as possible.
    taken = site.devices.claim(job, sources, {})
    losers = [part for part in lower if taken is not None and part.key in taken.victims]
    if taken is None or not losers:
        return False
    # Step 3: assign the devices and evict the victims; the job starts once all devices are free.
    site.devices.assign(job, taken)
    reason = f"its devices go to local job '{job.job}' of level '{job.level}'"
    for part in losers:
        _evict_part(site, part, now_s, reason)
    move_part(site, job, "evicting" if current_holders(site, job) else "running", now_s)
    return True


def continue_eviction(site: SiteState, part: SitePart, now_s: float) -> None:
    """Release an evicted part once its checkpoint is verified or overdue, or cancel its eviction.

    Start a claimer once all its devices are free.
    """
    if part.evicted and part.state == "running":
        claimers = (other for other in site.time_dependent.values() if other.state == "evicting")
        if (
            site.is_open
            and not site.shutting_down
            and not any(other.local and part in current_holders(site, other) for other in claimers)
        ):
            part.evicted, part.evict_at_s = False, None
            site.mark_changed(part)
        elif part.protection is not None or part.evict_at_s is None or now_s >= part.evict_at_s:
            part.fault = "evicted"
            release_part(site, part, now_s)
    is_ready = not part.fetching and part.path != "asked" and site.is_held(part)
    if part.state == "evicting" and is_ready and not current_holders(site, part):
        move_part(site, part, "running" if part.local else "prepared", now_s)


def evict_after_hours(site: SiteState, part: SitePart, now_s: float) -> None:
    """Evict a part of the pool outside the owner's pool hours."""
    if part.state in LEASED or part.state == "running":
        _evict_part(site, part, now_s, "outside the owner's pool hours")


def evict_before_shutdown(site: SiteState, part: SitePart, now_s: float) -> None:
    """Evict a part of the pool that runs while the agent is being stopped; its job waits for other chips."""
    _evict_part(site, part, now_s, f"the agent of {site.cluster} is being stopped")


def _evict_part(site: SiteState, part: SitePart, now_s: float, reason: str) -> None:
    """Evict a part: one that trains may save a checkpoint first, any other is released at once."""
    if part.evicted:
        return
    part.detail, part.evicted = f"evicted by the owner: {reason}", True
    if part.rank_map is not None and site.policy.protect_s > 0:
        part.evict_at_s = now_s + site.policy.protect_s
        site.mark_changed(part)
        request_checkpoint(site, part)
        return
    part.fault = "evicted"
    site.mark_changed(part)
    release_part(site, part, now_s)


def _eviction_cost(site: SiteState, part: SitePart) -> tuple[int, bool, float, int]:
    return -site.level_index(part), part.state == "running", part.unsaved_s, -part.arrived

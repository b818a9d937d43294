"""A site's state as its agent reports it to the server."""

from __future__ import annotations

from isthmus.core.messages.agent_messages import ObservedLocalJob, ObservedPart
from isthmus.site.evictions import is_preemptible
from isthmus.site.parts import SitePart
from isthmus.site.site_state import SiteState

UNSAVED_STEP_S = 10.0
"""Unsaved work is rounded down to multiples of this, so that an otherwise unchanged site sends no reports."""


def observed_parts(site: SiteState) -> tuple[ObservedPart, ...]:
    """Return every part of the pool; an unchanged part is returned as the same object."""
    parts = [part for part in site.parts.values() if not part.local]
    for part in parts:
        if part.observation is None:
            part.observation = observe_part(part)
    return tuple([part.observation for part in parts if part.observation])


def free_chips(site: SiteState) -> dict[str, int]:
    """Return the number of devices by node group available to a new part of the pool.

    These are the free devices that are not in fragments, minus the demand of queued local jobs, limited by the owner's
    policy.
    """
    if not site.is_open:
        return dict.fromkeys(site.devices.inventory, 0)
    free, used = site.devices.num_offered(), site.devices.used_by_pool()
    for part in site.queued_local.values():
        for group, num in part.wanted.items():
            free[group] = free.get(group, 0) - num
    return {group: max(0, min(free[group], site.pool_limit(group) - used[group])) for group in site.devices.inventory}


def observed_local_jobs(site: SiteState) -> tuple[ObservedLocalJob, ...]:
    """Return the local jobs that are queued or running."""
    return tuple(
        ObservedLocalJob(
            name=part.job,
            chips=part.wanted,
            level=part.level,
            running=part.state == "running",
            preemptible=is_preemptible(site, part),
            unsaved_s=round_unsaved_s(part.unsaved_s),
            ends_at_s=part.ends_at_s if part.state == "running" else None,
        )
        for part in site.parts.values()
        if part.local and part.state in ("queued", "evicting", "running")
    )


def observe_part(part: SitePart) -> ObservedPart:
    """Return a part as reported to the server, with the longest wait of its ranks."""
    waits = [(worker.wait, rank) for rank, worker in part.workers.items() if worker.live and worker.wait is not None]
    wait, rank = min(waits, key=lambda one: one[0].since_s, default=(None, 0))
    return ObservedPart(
        job=part.job,
        attempt=part.attempt,
        state=part.reported,
        detail=part.detail,
        fault=part.fault,
        workers=tuple(worker.address for worker in part.workers.values() if worker.address is not None),
        unsaved_s=round_unsaved_s(part.unsaved_s),
        protection=part.protection,
        waiting=f"rank {rank} {wait.reason}" if wait else "",
        waiting_since_s=wait.since_s if wait else None,
        ungranted=part.ungranted,
        granted_at_s=part.granted_at_s if (part.granted_at_s or 0.0) >= 0 else None,
        released_at_s=part.since_s if part.state == "released" and part.since_s >= 0 else None,
    )


def round_unsaved_s(unsaved_s: float) -> float:
    """Return seconds of unsaved work, rounded down for the report."""
    return unsaved_s // UNSAVED_STEP_S * UNSAVED_STEP_S

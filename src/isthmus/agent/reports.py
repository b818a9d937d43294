"""What the server is told of a site's state."""

from __future__ import annotations

from isthmus.agent.parts import HeldPart
from isthmus.agent.preemption import preemptible
from isthmus.agent.site import SiteState
from isthmus.core.messages import LocalJobSeen, ObservedPart

UNSAVED_STEP_S = 10.0
"""Unsaved work is told in steps of this, so that a quiet site has no news."""


def observed(site: SiteState) -> tuple[ObservedPart, ...]:
    """Return every part of the pool."""
    return tuple(_observed(part) for part in site.parts.values() if not part.local)


def free_chips(site: SiteState) -> dict[str, int]:
    """Return the cards of each node group that a new part of the pool could have.

    That is what is free less what local jobs queue for, and no more than the owner's policy lets it have.
    """
    if not site.is_open:
        return dict.fromkeys(site.cards.inventory, 0)
    free = site.cards.num_free(site.parts.values())
    for part in site.parts.values():
        if part.local and part.state == "queued":
            for group, num in part.wanted.items():
                free[group] = free.get(group, 0) - num
    used = site.cards.of_pool(site.parts.values())
    return {
        group: max(0, min(free[group], site.limit(group) - len(used[group])))
        for group in site.cards.inventory
    }


def local_jobs(site: SiteState) -> tuple[LocalJobSeen, ...]:
    """Return the site's own jobs that wait or run."""
    return tuple(
        LocalJobSeen(
            name=part.job,
            chips=part.wanted,
            level=part.level,
            running=part.state == "running",
            preemptible=preemptible(site, part),
            unsaved_s=_unsaved_s(part),
        )
        for part in site.parts.values()
        if part.local and part.state in ("queued", "evicting", "running")
    )


def _observed(part: HeldPart) -> ObservedPart:
    addresses = tuple(worker.address for worker in part.workers.values() if worker.address is not None)
    return ObservedPart(
        job=part.job,
        attempt=part.attempt,
        state=part.reported,
        detail=part.detail,
        fault=part.fault,
        workers=addresses,
        unsaved_s=_unsaved_s(part),
        protection=part.protection,
    )


def _unsaved_s(part: HeldPart) -> float:
    """Return the work that would be lost, in seconds: that of the rank that has saved least."""
    unsaved_s = max((worker.unsaved_s for worker in part.workers.values()), default=0.0)
    return unsaved_s // UNSAVED_STEP_S * UNSAVED_STEP_S

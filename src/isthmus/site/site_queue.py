"""The site's queue: local jobs and the pool's jobs, merged by priority level.

The server orders the pool's jobs. Local jobs are ordered by level, and within a level by arrival or as the
site's users have rearranged them. Between the two the higher level goes first, and within a level the
earlier arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from isthmus.site.fewest_moves import fewest_moves
from isthmus.site.machine_events import ReorderQueue
from isthmus.site.parts import PartKey, SitePart
from isthmus.site.site_state import SiteState

_UNRANKED = 10**9
"""Offset that puts jobs missing in the server's order behind all others."""


def set_pool_order(site: SiteState, order: Sequence[str]) -> None:
    """Order the pool's queued parts by the server's `order` of jobs; those not in it go last."""
    places = {job: place for place, job in enumerate(order)}
    for part in site.queued_pool.values():
        part.place = places.get(part.job, _UNRANKED + part.arrived)


def queue_order(site: SiteState) -> list[SitePart]:
    """Return the queued parts in starting order."""
    local = sorted(site.queued_local.values(), key=lambda part: (site.level_index(part), part.place))
    merged: list[SitePart] = []
    at = 0
    for part in sorted(site.queued_pool.values(), key=lambda part: part.place):
        while at < len(local) and _starts_first(site, local[at], part):
            merged.append(local[at])
            at += 1
        merged.append(part)
    return merged + local[at:]


def local_jobs_ahead(site: SiteState, part: SitePart) -> list[SitePart]:
    """Return the local jobs that are, or would be, ahead of the pool's `part` in the queue."""
    if part.state == "queued":
        before = takewhile(lambda other: other is not part, queue_order(site))
        return [other for other in before if other.local]
    return sorted(
        (other for other in site.queued_local.values() if site.level_index(other) <= site.level_index(part)),
        key=lambda other: (site.level_index(other), other.place),
    )


def reconcile_queue(site: SiteState, observed: Sequence[PartKey]) -> None:
    """Adopt the observed order of local jobs within each level, and correct all other differences."""
    _adopt_local_order(site, observed)
    wanted = [part.key for part in queue_order(site)]
    if list(observed) == wanted:
        return
    known = set(wanted)
    gone = tuple(key for key in observed if key not in known)
    moves = tuple(fewest_moves([key for key in observed if key in known], wanted))
    site.instructions.append(ReorderQueue(moves=moves, removed=gone))


def _adopt_local_order(site: SiteState, observed: Sequence[PartKey]) -> None:
    """Permute the positions of each level's local jobs to match the observed order."""
    levels: dict[str, list[SitePart]] = {}
    for key in observed:
        part = site.queued_local.get(key)
        if part is not None:
            levels.setdefault(part.level, []).append(part)
    for parts in levels.values():
        for part, place in zip(parts, sorted(part.place for part in parts), strict=True):
            if part.place != place:
                part.place, site.may_start_local = place, True


def _starts_first(site: SiteState, local: SitePart, part: SitePart) -> bool:
    return (site.level_index(local), local.arrived) < (site.level_index(part), part.arrived)

"""The site's queue: local jobs by level and place, the pool's in the pool's order, merged by level.

The pool's jobs stand among themselves as the server says. Local jobs stand among themselves by level, and
within a level as they came, or as somebody at the site has arranged them since. Where the two meet, the
higher level goes first, and within a level who came earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.agent.events import OrderQueue
from isthmus.agent.parts import HeldPart, PartKey
from isthmus.agent.reorder import reorder
from isthmus.agent.site import SiteState

_UNNAMED = 10**9
"""Behind every place that the server gives."""


def place_pool(site: SiteState, order: Sequence[str]) -> None:
    """Give the pool's queued parts the places of their jobs in the server's `order`; others go behind."""
    places = {job: place for place, job in enumerate(order)}
    for part in site.parts.values():
        if not part.local and part.state == "queued":
            part.place = places.get(part.job, _UNNAMED + part.arrived)


def queue(site: SiteState) -> list[HeldPart]:
    """Return what waits in the order in which it should: first to start first."""
    waiting = [part for part in site.parts.values() if part.state == "queued"]
    local = sorted((p for p in waiting if p.local), key=lambda part: (site.rank(part), part.place))
    pool = sorted((p for p in waiting if not p.local), key=lambda part: part.place)
    merged: list[HeldPart] = []
    at = 0
    for part in pool:
        while at < len(local) and _first(site, local[at], part):
            merged.append(local[at])
            at += 1
        merged.append(part)
    return merged + local[at:]


def ahead(site: SiteState, part: HeldPart) -> list[HeldPart]:
    """Return the local jobs that stand, or would stand, before `part` of the pool in the queue."""
    if part.state == "queued":
        return [other for other in _before(queue(site), part) if other.local]
    waiting = [other for other in site.parts.values() if other.state == "queued" and other.local]
    return sorted(
        (other for other in waiting if site.rank(other) <= site.rank(part)),
        key=lambda other: (site.rank(other), other.place),
    )


def see_queue(site: SiteState, seen: Sequence[PartKey]) -> None:
    """Take over how local jobs of a level were arranged at the site, and mend whatever else has drifted."""
    _adopt(site, seen)
    wanted = [part.key for part in queue(site)]
    if list(seen) == wanted:
        return
    keep = set(wanted)
    gone = tuple(key for key in seen if key not in keep)
    moves = tuple(reorder([key for key in seen if key in keep], wanted))
    site.out.append(OrderQueue(moves=moves, gone=gone))


def _adopt(site: SiteState, seen: Sequence[PartKey]) -> None:
    """Let the local jobs of each level exchange their places until they stand as seen."""
    levels: dict[str, list[HeldPart]] = {}
    for key in seen:
        part = site.parts.get(key)
        if part is not None and part.local and part.state == "queued":
            levels.setdefault(part.level, []).append(part)
    for parts in levels.values():
        for part, place in zip(parts, sorted(part.place for part in parts), strict=True):
            part.place = place


def _first(site: SiteState, local: HeldPart, part: HeldPart) -> bool:
    return (site.rank(local), local.arrived) < (site.rank(part), part.arrived)


def _before(parts: Sequence[HeldPart], part: HeldPart) -> Sequence[HeldPart]:
    return parts[: next(i for i, other in enumerate(parts) if other is part)]

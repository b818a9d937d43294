"""What moves in a simulated site's queue: places given, local jobs started in their turn."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.simulation.site_parts import SitePart
from isthmus.control.simulation.site_preemption import evict_pool
from isthmus.control.simulation.site_state import SiteBooks, move

_UNNAMED = 10**9
"""Behind every place that the server gives."""


def place_pool(books: SiteBooks, order: Sequence[str]) -> None:
    """Give the pool's queued parts the places of their jobs in the server's `order`; others go behind."""
    places = {job: place for place, job in enumerate(order)}
    for part in books.queued_pool.values():
        part.place = places.get(part.job, _UNNAMED + part.arrived)


def start_queued(books: SiteBooks, now_s: float) -> None:
    """Start local jobs in the queue's order; one that does not fit holds back those behind it in its group.

    A part of the pool that waits before them may hold back the cards it needs while the owner lets it.
    """
    if not books.queued_local or not (books.changed or books.policy.hold_back_s):
        books.changed = False
        return
    books.changed = False
    kept: dict[str, int] = {}
    blocked: set[str] = set()
    for part in books.queue():
        if not part.local:
            _keep_back(books, part, kept, now_s)
            continue
        if len(blocked) == len(books.cards.inventory):
            return
        ((group, num),) = part.chips.items()
        if group in blocked:
            continue
        if books.cards.free(part)[group] - kept.get(group, 0) >= num:
            move(books, part, "running", now_s)
        elif kept.get(group, 0) or not evict_pool(books, part, now_s):
            blocked.add(group)


def _keep_back(books: SiteBooks, part: SitePart, kept: dict[str, int], now_s: float) -> None:
    if now_s - part.since_s >= books.policy.hold_back_s:
        return
    used = books.cards.of_pool()
    for group, num in part.chips.items():
        room = max(0, books.limit(group) - used.get(group, 0))
        kept[group] = min(kept.get(group, 0) + num, room)

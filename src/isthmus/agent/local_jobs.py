"""The site's own jobs: taken in, started in the queue's order, ended, and queued again after a preemption."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.agent.events import EndLocal, LocalJob
from isthmus.agent.parts import HeldPart, HeldWorker
from isthmus.agent.preemption import evict_pool
from isthmus.agent.site import SiteState, move, release
from isthmus.agent.site_queue import queue


def want_local(site: SiteState, jobs: Sequence[LocalJob], unread: Sequence[str], now_s: float) -> None:
    """Queue the `jobs` that are new, let go of those that are no longer wanted, tell of those that ended.

    The `unread` stay as they are.
    """
    wanted = {*(job.name for job in jobs), *unread}
    for part in list(site.parts.values()):
        if part.local and part.job not in wanted:
            part.withdrawn, part.requeue = True, False
            release(site, part, now_s)
    for job in jobs:
        known = site.parts.get((job.name, 0))
        if known is None and not site.ending:
            part = HeldPart(job=job.name, attempt=0, command=job.command)
            part.workers[0] = HeldWorker(node_group=job.node_group, chips=job.chips)
            site.arrive(part)
            move(site, part, "queued", now_s)
            part.level, part.preemptible = job.level, job.preemptible
        elif known is not None and known.state == "released" and known.exit_status is not None:
            site.out.append(EndLocal(part=known, exit_status=known.exit_status))


def start_queued(site: SiteState, now_s: float) -> None:
    """Start local jobs in the queue's order; one that does not fit holds back those behind it in its group.

    A part of the pool that waits before them may hold back the cards it needs while the owner lets it.
    """
    if site.ending or not any(part.local and part.state == "queued" for part in site.parts.values()):
        return
    used = site.cards.of_pool(site.parts.values())
    room = {group: max(0, site.limit(group) - len(cards)) for group, cards in used.items()}
    kept: dict[str, int] = {}
    blocked: set[str] = set()
    for part in queue(site):
        if not part.local:
            if now_s - part.since_s < site.policy.hold_back_s:
                for group, num in part.wanted.items():
                    kept[group] = min(kept.get(group, 0) + num, room.get(group, 0))
            continue
        ((group, num),) = part.wanted.items()
        if group in blocked:
            continue
        free = site.cards.free(site.cards.ledger(site.parts.values()), part).get(group, [])
        if len(free) - kept.get(group, 0) >= num:
            site.cards.deal(part, {group: free[:num]})
            move(site, part, "running", now_s)
        elif kept.get(group, 0) or not evict_pool(site, part, now_s):
            blocked.add(group)

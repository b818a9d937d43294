"""`update_proposals`: the moves that an agent proposes to the pool's server; white paper 3.2.1, active rescheduling.

A part waits for a place alone if the site has the devices that it needs, in fragments. What that costs grows with
time; once it exceeds what the fewest moves cost, these are proposed (the break-even rule of ski rental: whatever comes,
waiting and moving together cost at most twice the cheaper of both). The server checks that the part is next in the
queue, has the moved jobs saved, and starts them again on the other devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from isthmus.core.messages.agent_messages import MAX_PROPOSALS, MoveProposal, QueueEntry
from isthmus.site.devices.topology_allocator import TopologyAllocator
from isthmus.site.moves.movable_parts import movable_parts
from isthmus.site.parts import SitePart
from isthmus.site.site_queue import queue_order
from isthmus.site.site_state import PlaceLack, SiteState
from isthmus.site.topology.gang_placement import GangRefusal
from isthmus.site.topology.plan_moves import plan_moves

RETRY_S = 10.0
"""Interval at which proposals are made again while a part waits."""
FORGET_S = 600.0
"""How long a part that was refused for lack of a place counts as waiting without asking again."""
MAX_TRIES = 100
"""Sets of parts that are placed for a proposal: an agent has other work."""
HOUR_S = 3600.0


def update_proposals(site: SiteState, now_s: float) -> None:
    """Make the proposals again if that is due."""
    devices = site.devices
    if not isinstance(devices, TopologyAllocator) or not site.policy.moves.at_once:
        return
    if site.moves_due_s == math.inf and (site.lacks or site.queued_pool):
        site.moves_due_s = now_s
    if now_s < site.moves_due_s:
        return
    _observe_queue(site, devices, now_s)
    found = tuple(_proposals(site, devices, now_s)) if site.may_move and site.is_open and not site.shutting_down else ()
    if [(one.job, one.moved) for one in found] != [(one.job, one.moved) for one in site.proposals]:
        site.proposals, site.num_changes = found, site.num_changes + 1
    site.moves_due_s = now_s + RETRY_S if site.lacks or site.queued_pool else math.inf


def note_refused(site: SiteState, part: SitePart, now_s: float) -> None:
    """Remember a part that is about to be refused, if it lacks nothing but a place."""
    if isinstance(site.devices, TopologyAllocator) and site.policy.moves.at_once:
        _note(site, site.devices, part, now_s)


def count_moves(site: SiteState, part: SitePart, now_s: float) -> None:
    """Count the moves that begin for a part against the hour's budget."""
    for proposal in site.proposals:
        if proposal.job == part.job:
            moved = {(one.job, one.attempt) for one in proposal.moved}
            site.moved_at_s += [now_s] * len(moved & set(part.victims))
    site.lacks.pop(part.job, None)


def _observe_queue(site: SiteState, devices: TopologyAllocator, now_s: float) -> None:
    """Note the first queued parts that lack a place, and drop those that have one, or ask no more."""
    placed = {part.job for part in site.parts.values() if part.state not in ("queued", "refused", "released")}
    for job, lack in list(site.lacks.items()):
        if job in placed or now_s - lack.seen_s >= FORGET_S or _lacking_group(site, devices, lack.part) != lack.group:
            del site.lacks[job]
    waiting = [part for part in queue_order(site) if not part.local and part.plan is not None]
    for part in waiting[:MAX_PROPOSALS]:
        _note(site, devices, part, now_s)


def _note(site: SiteState, devices: TopologyAllocator, part: SitePart, now_s: float) -> None:
    group = _lacking_group(site, devices, part)
    known = site.lacks.get(part.job)
    if group is None or (known is None and len(site.lacks) >= MAX_PROPOSALS):
        return
    wanted = SitePart(job=part.job, attempt=part.attempt, plan=part.plan, workers=dict(part.workers))
    since_s = now_s if known is None or known.group != group else known.since_s
    site.lacks[part.job] = PlaceLack(part=wanted, group=group, since_s=since_s, seen_s=now_s)


def _lacking_group(site: SiteState, devices: TopologyAllocator, part: SitePart) -> str | None:
    """Return the node group in which `part` lacks nothing but a place; None if it lacks more, or nothing."""
    free, used = devices.num_free(part), devices.used_by_pool(without=part)
    local = {group for other in site.queued_local.values() for group in other.wanted}
    for group, num in part.wanted.items():
        if group in local or num > min(free.get(group, 0), site.pool_limit(group) - used.get(group, 0)):
            return None
    refused = [name for name, found in devices.placements(part, ()).items() if isinstance(found, GangRefusal)]
    return refused[0] if len(refused) == 1 else None


def _proposals(site: SiteState, devices: TopologyAllocator, now_s: float) -> Iterator[MoveProposal]:
    """Yield proposals for the parts that wait, those that wait longest first; no part moves for two of them."""
    rules = site.policy.moves
    site.moved_at_s = [at_s for at_s in site.moved_at_s if now_s - at_s < HOUR_S]
    named = set[QueueEntry]()
    for lack in sorted(site.lacks.values(), key=lambda one: one.since_s):
        waited_s, request = now_s - lack.since_s, devices.requests(lack.part)[lack.group]
        most = min(rules.at_once, rules.per_hour - len(site.moved_at_s) - len(named))
        if waited_s < rules.after_s or most < 1:
            continue
        unit = max(one.num_cards for one in request.units)
        found = plan_moves(
            devices.free_cards(lack.group, lack.part), request,
            movable_parts(site, devices, lack.group, unit, now_s),
            gain_card_s=waited_s * request.num_cards, max_moves=most, max_tries=MAX_TRIES,
        )  # fmt: skip
        if found is None:
            continue
        moved = tuple(QueueEntry(job=job, attempt=attempt) for job, attempt in sorted(found.moved))
        if not named & set(moved):
            named |= set(moved)
            yield MoveProposal(
                job=lack.part.job,
                moved=moved,
                cost_card_s=found.cost_card_s,
                loss_card_s=waited_s * request.num_cards,
            )

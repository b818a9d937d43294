"""Cards from others at a simulated site: the pool's jobs from named victims, local jobs from the pool's jobs.

Of what an order asks, the owner's policy has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.control.simulation.site_cards import Source
from isthmus.control.simulation.site_parts import HOLDING, Act, PartKey, SitePart
from isthmus.control.simulation.site_state import SiteBooks, move, release

_ENDING = ("stopping", "succeeded", "failed")
_LIGHT = ("ready", "evicting", "prepared")


def ask(books: SiteBooks, part: SitePart) -> None:
    """Ask a running part for a checkpoint that survives it, unless it is asked already."""
    if part.protect_after is None:
        part.protect_after = part.saved.step if part.saved else 0
        part.protection, part.asked, part.told = None, False, None
    if not part.asked and part.protection is None:
        part.asked = True
        books.acts.append(Act("protect", part, after=part.protect_after))


def withdraw(part: SitePart) -> None:
    """End a request of the server; one that the owner's eviction has made stands."""
    if not part.evicted and part.protect_after is not None:
        part.protect_after, part.protection, part.told = None, None, None


def preemptible(books: SiteBooks, local: SitePart) -> bool:
    """Tell whether the owner and the job itself let the pool's jobs of a higher level preempt it."""
    first = books.policy.preemptible_from
    if first is None or not local.preemptible:
        return False
    return books.rank(local) >= books.cluster.priorities.rank(first)


def claim_for_pool(
    books: SiteBooks, part: SitePart, victims: Sequence[PartKey]
) -> dict[PartKey, dict[str, int]] | str:
    """Return what `part` takes of which victims, or why it cannot have its cards."""
    why = _breaks_policy(books, part, victims) or _misfit(books, part)
    if why:
        return why
    cards = books.cards
    sources = [
        Source(key, cards.obtainable(books.parts[key], part), counted=key[1] > 0)
        for key in dict.fromkeys(victims)
        if key in books.parts and books.parts[key].state in HOLDING and key != part.key
    ]
    used = cards.of_pool(without=part)
    room = {group: books.limit(group) - used[group] for group in part.chips}
    taken = cards.claim(part, sources, room)
    if taken is None:
        return f"{books.cluster.name}: {part.chips} cards wanted, {cards.free(part)} free"
    return taken


def evict_victims(books: SiteBooks, part: SitePart, now_s: float) -> None:
    """Have the local jobs that hold cards of `part` save and end, to be queued again."""
    for key in books.cards.occupants(part):
        victim = books.parts[key]
        if victim.local and victim.state == "running":
            victim.requeue = True
            move(books, victim, "stopping", now_s, f"preempted by job '{part.job}' of the pool")


def evict_pool(books: SiteBooks, job: SitePart, now_s: float) -> bool:
    """Take the cards that the local `job` needs from the pool's jobs below its level, if that can be."""
    if not books.policy.local_evicts_pool:
        return False
    others = [part for part in books.parts.values() if part is not job]
    ending = [part for part in others if part.state in _ENDING]
    lower = [part for part in others if not part.local and books.rank(part) > books.rank(job)]
    lower = [part for part in lower if part.state in (*_LIGHT, "running")]
    lower.sort(key=lambda part: _cost(books, part))
    cards = books.cards
    sources = [Source(part.key, cards.obtainable(part, job), counted=False) for part in (*ending, *lower)]
    taken = cards.claim(job, sources, {})
    losers = [part for part in lower if part.key in (taken or ())]
    if taken is None or not losers:
        return False
    for part in losers:
        _evict(books, part, job, now_s)
    occupied = any(cards.holds(key) for key in taken)
    move(books, job, "evicting" if occupied else "running", now_s)
    if occupied:
        cards.give(job, taken)
    return True


def pursue(books: SiteBooks, part: SitePart, now_s: float) -> None:
    """Go on with an eviction: let go of who is protected or late, or who need not go any more."""
    if part.evicted and part.state == "running":
        wanted = any(
            other.state == "evicting" and other.local and part.key in other.taken_from
            for other in books.cards.claimers.values()
        )
        if not wanted:
            part.evicted, part.evict_at_s = False, None
        elif part.protection is not None or part.evict_at_s is None or now_s >= part.evict_at_s:
            part.fault = "evicted"
            release(books, part, now_s)
    if part.state == "evicting" and not books.cards.occupants(part):
        move(books, part, "running" if part.local else "prepared", now_s)


def _evict(books: SiteBooks, part: SitePart, job: SitePart, now_s: float) -> None:
    """Let a part that trains save its work first; release any other."""
    if part.evicted:
        return
    part.detail = f"evicted by the owner: its cards go to local job '{job.job}' of level '{job.level}'"
    part.evicted, part.told = True, None
    books.restless[part.key] = part
    if part.rank_map is not None and books.policy.protect_s > 0:
        part.evict_at_s = now_s + books.policy.protect_s
        ask(books, part)
        return
    part.fault = "evicted"
    release(books, part, now_s)


def _cost(books: SiteBooks, part: SitePart) -> tuple[int, bool, float, int]:
    return -books.rank(part), part.state == "running", part.unsaved_s, -part.arrived


def _breaks_policy(books: SiteBooks, part: SitePart, victims: Iterable[PartKey]) -> str:
    for key in victims:
        victim = books.parts.get(key)
        if victim is None or not victim.local:
            continue
        if not preemptible(books, victim):
            return f"{books.cluster.name}: the owner does not let the pool preempt local job '{victim.job}'"
        if books.rank(victim) <= books.rank(part):
            return f"{books.cluster.name}: local job '{victim.job}' is not below '{part.level}'"
    return ""


def _misfit(books: SiteBooks, part: SitePart) -> str:
    """Return why `part` could not even have its cards if all that is of the pool's were free, or ""."""
    for group, num in part.chips.items():
        where = f"{books.cluster.name}: node group '{group}': {num} cards wanted"
        if group not in books.cards.inventory:
            return f"{books.cluster.name}: no node group '{group}'"
        if num > books.limit(group):
            return f"{where}, the owner lets the pool have {books.limit(group)}"
        if any(group in other.chips and _ahead(books, other, part) for other in books.queued_local.values()):
            return f"{where}, queued behind a local job"
    return ""


def _ahead(books: SiteBooks, local: SitePart, part: SitePart) -> bool:
    """Tell whether a waiting local job stands, or would stand, before `part` in the queue."""
    if part.state == "queued":
        order = books.queue()
        return order.index(local) < order.index(part)
    return books.rank(local) <= books.rank(part)

"""Cards from others: the pool's jobs from named victims, local jobs from the pool's jobs of a lower level.

Nobody loses a card before whoever gets it is to have it: to claim cards evicts nobody. Of what an order asks,
the owner's policy has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.agent.cards import HOLDING, Ledger
from isthmus.agent.claims import Source, claim
from isthmus.agent.parts import HeldPart, PartKey
from isthmus.agent.protection import ask, protected
from isthmus.agent.site import LEASED, SiteState, move, release
from isthmus.agent.site_queue import ahead

_ENDING = ("stopping", "succeeded", "failed")


def preemptible(site: SiteState, local: HeldPart) -> bool:
    """Tell whether the owner and the job itself let the pool's jobs of a higher level preempt it."""
    first = site.policy.preemptible_from
    if first is None or not local.preemptible:
        return False
    return site.rank(local) >= site.priorities.rank(first)


def claim_for_pool(site: SiteState, part: HeldPart, victims: Sequence[PartKey]) -> str:
    """Give `part` its cards, those of `victims` included; return "", or why it cannot have them."""
    why = _breaks_policy(site, part, victims) or _misfit(site, part)
    if why:
        return why
    ledger = site.cards.ledger(site.parts.values())
    sources = [
        Source(key, ledger.obtainable(site.parts[key], part), counted=key[1] > 0)
        for key in dict.fromkeys(victims)
        if key in site.parts and site.parts[key].state in HOLDING and key != part.key
    ]
    others = (other for other in site.parts.values() if other is not part)
    used = {group: len(cards) for group, cards in site.cards.of_pool(others).items()}
    room = {group: site.limit(group) - used[group] for group in part.wanted}
    free = site.cards.free(ledger, part)
    taken = claim(part.wanted, free, sources, room)
    if taken is None:
        return _shortage(site, part, free, sources, room)
    part.victims = tuple(victims)
    site.cards.deal(part, taken)
    return ""


def evict_victims(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Have the local jobs that hold cards of `part` save and end, to be queued again.

    Parts of the pool among them end by their own orders.
    """
    for victim in occupants(site, part):
        if victim.local and victim.state == "running":
            victim.requeue = True
            move(site, victim, "stopping", now_s, f"preempted by job '{part.job}' of the pool")


def occupants(site: SiteState, part: HeldPart) -> list[HeldPart]:
    """Return who still holds cards that `part` has claimed."""
    ledger = site.cards.ledger(site.parts.values())
    return [site.parts[key] for key in sorted(ledger.occupants(part))]


def evict_pool(site: SiteState, job: HeldPart, now_s: float) -> bool:
    """Take the cards that the local `job` needs from the pool's jobs below its level, if that can be.

    Returns whether it was. Those cost least that do not train yet; then those with the least unsaved work.
    """
    if not site.policy.local_evicts_pool:
        return False
    others = [part for part in site.parts.values() if part is not job]
    ending = [part for part in others if part.state in _ENDING]
    lower = [part for part in others if not part.local and site.rank(part) > site.rank(job)]
    lower = [part for part in lower if part.state in LEASED or part.state == "running"]
    lower.sort(key=lambda part: _cost(site, part))
    ledger = site.cards.ledger(site.parts.values())
    sources = [Source(part.key, ledger.obtainable(part, job), counted=False) for part in (*ending, *lower)]
    taken = claim(job.wanted, site.cards.free(ledger, job), sources, {})
    if taken is None:
        return False
    cards = {card for group in taken.values() for card in group}
    losers = [part for part in lower if cards & _given(ledger, part, job)]
    if not losers:
        return False
    why = f"its cards go to local job '{job.job}' of level '{job.level}'"
    for part in losers:
        _evict(site, part, now_s, why)
    site.cards.deal(job, taken)
    move(site, job, "evicting" if occupants(site, job) else "running", now_s)
    return True


def pursue(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Go on with an eviction: let go of who is protected or late, or who need not go any more."""
    if part.evicted and part.state == "running":
        claims = (other for other in site.parts.values() if other.state == "evicting" and other.local)
        if site.is_open and not any(part in occupants(site, other) for other in claims):
            part.evicted, part.evict_at_s = False, None
        elif protected(part) or part.evict_at_s is None or now_s >= part.evict_at_s:
            part.fault = "evicted"
            release(site, part, now_s)
    if part.state == "evicting" and not part.fetching and not occupants(site, part):
        move(site, part, "running" if part.local else "prepared", now_s)


def close(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Take the cards of a part of the pool back at the end of the hours that the owner gives it."""
    if part.state in LEASED or part.state == "running":
        _evict(site, part, now_s, "the hours of the pool are over")


def _evict(site: SiteState, part: HeldPart, now_s: float, why: str) -> None:
    """Let a part that trains save its work first; release any other."""
    if part.evicted:
        return
    part.detail, part.evicted = f"evicted by the owner: {why}", True
    if part.rank_map is not None and site.policy.protect_s > 0:
        part.evict_at_s = now_s + site.policy.protect_s
        ask(site, part)
        return
    part.fault = "evicted"
    release(site, part, now_s)


def _given(ledger: Ledger, part: HeldPart, job: HeldPart) -> set[str]:
    return {card for cards in ledger.obtainable(part, job).values() for card in cards}


def _cost(site: SiteState, part: HeldPart) -> tuple[int, bool, float, int]:
    unsaved_s = max((worker.unsaved_s for worker in part.workers.values()), default=0.0)
    return -site.rank(part), part.state == "running", unsaved_s, -part.arrived


def _breaks_policy(site: SiteState, part: HeldPart, victims: Iterable[PartKey]) -> str:
    if not site.is_open:
        return f"{site.cluster}: the owner does not let the pool work at this hour"
    for key in victims:
        victim = site.parts.get(key)
        if victim is None or not victim.local:
            continue
        if not preemptible(site, victim):
            return f"{site.cluster}: the owner does not let the pool preempt local job '{victim.job}'"
        if site.rank(victim) <= site.rank(part):
            return (
                f"{site.cluster}: local job '{victim.job}' of level '{victim.level}' is not below "
                f"'{part.level}', the level of the pool's job"
            )
    return ""


def _misfit(site: SiteState, part: HeldPart) -> str:
    """Return why `part` could not even have its cards if all that is of the pool's were free, or ""."""
    waiting = ahead(site, part)
    for group, num in part.wanted.items():
        where = f"{site.cluster}: node group '{group}': {num} cards wanted"
        if group not in site.cards.inventory:
            return (
                f"{site.cluster}: no node group '{group}'; there is {', '.join(sorted(site.cards.inventory))}"
            )
        if num > site.limit(group):
            return f"{where}, the owner lets the pool have {site.limit(group)}"
        first = next((other.job for other in waiting if group in other.wanted), None)
        if first is not None:
            return f"{where}, queued behind local job '{first}'"
    return ""


def _shortage(
    site: SiteState,
    part: HeldPart,
    free: dict[str, list[str]],
    sources: Sequence[Source],
    room: dict[str, int],
) -> str:
    for group, num in part.wanted.items():
        if claim({group: num}, free, sources, room) is not None:
            continue
        found = f"{len(free[group])} free"
        given = sum(len(source.cards.get(group, ())) for source in sources)
        found += f", {given} of victims" if sources else ""
        if room[group] < min(num, len(free[group]) + given):
            found += f", the owner lets the pool have {max(0, room[group])} more"
        return f"{site.cluster}: node group '{group}': {num} cards wanted, {found}"
    return f"{site.cluster}: its cards cannot be had together"

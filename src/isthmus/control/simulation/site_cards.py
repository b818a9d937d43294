"""`SiteCards`: how many cards of a site are held, claimed and free, and which victims' a claim may take.

A part that is `ready` or `evicting` has claimed its cards, though a victim may hold some of them still; from
`prepared` on it holds them. Sums are kept up as parts change their state: a question costs no look at cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.control.simulation.site_parts import CLAIMING, HOLDING, PartKey, SitePart

Counts = dict[str, int]


@dataclass(frozen=True)
class Source:
    """Cards by node group that one victim would give up; `counted` says that they are the pool's already."""

    key: PartKey
    cards: Mapping[str, int]
    counted: bool


class SiteCards:
    """The books of a site with `inventory` cards by node group."""

    def __init__(self, inventory: Mapping[str, int]) -> None:
        self.inventory = dict(inventory)
        self.held: Counts = dict.fromkeys(inventory, 0)
        self.held_by_pool: Counts = dict.fromkeys(inventory, 0)
        self.claimers: dict[PartKey, SitePart] = {}
        self._holders: dict[PartKey, SitePart] = {}

    def change(self, part: SitePart, before: str, after: str) -> None:
        """Note that `part` went from state `before` to `after`."""
        held, holds = before in HOLDING, after in HOLDING
        if held != holds:
            sign = 1 if holds else -1
            for group, num in part.chips.items():
                self.held[group] += sign * num
                if not part.local:
                    self.held_by_pool[group] += sign * num
            if holds:
                self._holders[part.key] = part
            else:
                del self._holders[part.key]
                for claimer in self.claimers.values():
                    claimer.taken_from.pop(part.key, None)
        if after in CLAIMING:
            self.claimers[part.key] = part
        elif before in CLAIMING:
            del self.claimers[part.key]
            part.taken_from = {}

    def holds(self, key: PartKey) -> bool:
        """Tell whether the part called `key` holds cards."""
        return key in self._holders

    def free(self, part: SitePart | None = None) -> Counts:
        """Return the cards that nobody holds or has claimed; those that `part` has claimed count as free."""
        free = {group: num - self.held[group] for group, num in self.inventory.items()}
        for claimer in self.claimers.values():
            if claimer is not part:
                for group, num in _claimed(claimer).items():
                    free[group] -= num
        return free

    def of_pool(self, without: SitePart | None = None) -> Counts:
        """Return the cards that the pool's parts, `without` one of them, hold or have claimed."""
        cards = dict(self.held_by_pool)
        if without is not None and not without.local and without.key in self._holders:
            for group, num in without.chips.items():
                cards[group] -= num
        for claimer in self.claimers.values():
            if claimer.local or claimer is without:
                continue
            for group, num in claimer.chips.items():
                cards[group] += num
            for key, taken in claimer.taken_from.items():
                if key[1]:
                    for group, num in taken.items():
                        cards[group] -= num
        return cards

    def obtainable(self, victim: SitePart, part: SitePart) -> Counts:
        """Return the cards that `part` could have if all were taken from `victim`."""
        if victim.state in CLAIMING:
            return _claimed(victim)
        cards = dict(victim.chips)
        for claimer in self.claimers.values():
            if claimer is not part and claimer is not victim:
                for group, num in claimer.taken_from.get(victim.key, {}).items():
                    cards[group] -= num
        return cards

    def occupants(self, part: SitePart) -> list[PartKey]:
        """Return who still holds cards that `part` has claimed."""
        return sorted(part.taken_from)

    def claim(
        self,
        part: SitePart,
        victims: Sequence[Source],
        room: Mapping[str, int],
    ) -> dict[PartKey, Counts] | None:
        """Return what `part` takes of which victims, or None where its cards cannot be had.

        `room` is how many cards that are not counted yet may be taken of a group (all, where it names none).
        Free cards go first, then those of `victims` in their order; none of them could be left out.
        """
        free, chosen = self.free(part), list(victims)
        taken = _take(part.chips, free, chosen, room)
        if taken is None:
            return None
        for victim in reversed(victims):
            fewer = [one for one in chosen if one is not victim]
            enough = _take(part.chips, free, fewer, room)
            if enough is not None:
                chosen, taken = fewer, enough
        return taken

    def give(self, part: SitePart, taken: Mapping[PartKey, Counts]) -> None:
        """Note of whom `part` has its claimed cards, as far as they still hold them."""
        part.taken_from = {key: dict(cards) for key, cards in taken.items() if key in self._holders}


def _claimed(part: SitePart) -> Counts:
    """Return the cards that `part` has claimed and nobody holds."""
    cards = dict(part.chips)
    for taken in part.taken_from.values():
        for group, num in taken.items():
            cards[group] -= num
    return cards


def _take(
    wanted: Mapping[str, int], free: Mapping[str, int], victims: Iterable[Source], room: Mapping[str, int]
) -> dict[PartKey, Counts] | None:
    taken: dict[PartKey, Counts] = {}
    for group, num in wanted.items():
        left = max(0, room.get(group, num))
        got = min(num, left, max(0, free.get(group, 0)))
        left -= got
        for victim in victims:
            more = min(victim.cards.get(group, 0), num - got)
            if not victim.counted:
                more = min(more, left)
                left -= more
            if more > 0:
                taken.setdefault(victim.key, {})[group] = more
                got += more
        if got < num:
            return None
    return taken

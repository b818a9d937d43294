"""`claim`: which cards to give to a job: free ones, and those that its victims would give up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.agent.parts import PartKey


@dataclass(frozen=True)
class Source:
    """The cards that one victim would give up, by node group.

    `counted` says that they are the pool's already, and so take no room of what the owner lets it have.
    """

    key: PartKey
    cards: Mapping[str, Sequence[str]]
    counted: bool


def claim(
    wanted: Mapping[str, int],
    free: Mapping[str, Sequence[str]],
    victims: Sequence[Source],
    room: Mapping[str, int],
) -> dict[str, list[str]] | None:
    """Return the cards to take by node group, or None where there are not enough.

    `wanted` is the number of cards by group; `room` how many cards that are not counted yet may be taken of a
    group (all, where it names none). Free cards go first, then those of `victims` in their order. No victim
    could be left out: the last ones are tried first.
    """
    chosen = list(victims)
    taken = _take(wanted, free, chosen, room)
    if taken is None:
        return None
    for victim in reversed(victims):
        fewer = [one for one in chosen if one is not victim]
        enough = _take(wanted, free, fewer, room)
        if enough is not None:
            chosen, taken = fewer, enough
    return taken


def _take(
    wanted: Mapping[str, int],
    free: Mapping[str, Sequence[str]],
    victims: Sequence[Source],
    room: Mapping[str, int],
) -> dict[str, list[str]] | None:
    taken: dict[str, list[str]] = {}
    for group, num in wanted.items():
        left = max(0, room.get(group, num))
        cards = list(free.get(group, ()))[: min(num, left)]
        left -= len(cards)
        for victim in victims:
            more = list(victim.cards.get(group, ()))[: num - len(cards)]
            if not victim.counted:
                more = more[:left]
                left -= len(more)
            cards += more
        if len(cards) < num:
            return None
        taken[group] = cards
    return taken

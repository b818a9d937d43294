"""Exact accounting of a site's cards: each is held by at most one part, and claimed by at most one.

A part that is `ready` or `evicting` has *claimed* its cards: nobody else is given them, though a victim may
hold them still. From `prepared` on a part *holds* its cards. Both are derived from the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.agent.parts import HeldPart, PartKey, State

HOLDING: frozenset[State] = frozenset({"prepared", "running", "succeeded", "failed", "stopping"})
"""States in which a part's workers hold their cards."""

CLAIMING: frozenset[State] = frozenset({"ready", "evicting"})
"""States in which a part's cards are kept for it, whoever holds them."""


@dataclass(frozen=True)
class Ledger:
    """Who holds and who has claimed each card."""

    holder: Mapping[str, PartKey]
    claimer: Mapping[str, PartKey]

    def is_free(self, card: str, part: HeldPart) -> bool:
        """Tell whether `part` could have `card` at once."""
        return card not in self.holder and self.claimer.get(card, part.key) == part.key

    def obtainable(self, victim: HeldPart, part: HeldPart) -> dict[str, list[str]]:
        """Return the cards, by node group, that `part` could have if all were taken from `victim`."""
        cards: dict[str, list[str]] = {}
        for worker in victim.workers.values():
            for card in worker.cards:
                held = self.holder.get(card, victim.key) == victim.key
                if held and self.claimer.get(card) in (None, victim.key, part.key):
                    cards.setdefault(worker.node_group, []).append(card)
        return cards

    def occupants(self, part: HeldPart) -> set[PartKey]:
        """Return the others that hold cards which `part` has claimed."""
        holders = {self.holder.get(card) for worker in part.workers.values() for card in worker.cards}
        return {key for key in holders if key is not None and key != part.key}


class Cards:
    """The cards of a site by node group."""

    def __init__(self, inventory: Mapping[str, Sequence[str]]) -> None:
        self.inventory = {group: tuple(cards) for group, cards in inventory.items()}
        self._place = {
            card: i for i, card in enumerate(c for cards in self.inventory.values() for c in cards)
        }

    def ledger(self, parts: Iterable[HeldPart]) -> Ledger:
        """Return who of `parts` holds and who has claimed which cards."""
        holder: dict[str, PartKey] = {}
        claimer: dict[str, PartKey] = {}
        for part in parts:
            book = holder if part.state in HOLDING else claimer if part.state in CLAIMING else None
            if book is not None:
                for worker in part.workers.values():
                    book.update(dict.fromkeys(worker.cards, part.key))
        return Ledger(holder, claimer)

    def free(self, ledger: Ledger, part: HeldPart) -> dict[str, list[str]]:
        """Return the cards of each group that `part` could have at once, in inventory order."""
        return {
            group: [card for card in cards if ledger.is_free(card, part)]
            for group, cards in self.inventory.items()
        }

    def num_free(self, parts: Iterable[HeldPart]) -> dict[str, int]:
        """Return the number of cards of each group that nobody holds or has claimed."""
        ledger = self.ledger(parts)
        taken = ledger.holder.keys() | ledger.claimer.keys()
        return {group: sum(card not in taken for card in cards) for group, cards in self.inventory.items()}

    def of_pool(self, parts: Iterable[HeldPart]) -> dict[str, set[str]]:
        """Return the cards of each group that the pool's `parts` hold or have claimed."""
        cards: dict[str, set[str]] = {group: set() for group in self.inventory}
        for part in parts:
            if not part.local and part.state in HOLDING | CLAIMING:
                for worker in part.workers.values():
                    cards[worker.node_group].update(worker.cards)
        return cards

    def deal(self, part: HeldPart, taken: Mapping[str, Sequence[str]]) -> None:
        """Give each worker of `part` its share of the cards `taken` of each group, neighbours together."""
        hands = {
            group: iter(sorted(cards, key=lambda card: self._place.get(card, 0)))
            for group, cards in taken.items()
        }
        for worker in part.workers.values():
            hand = hands[worker.node_group]
            worker.cards = tuple(next(hand) for _ in range(worker.chips))

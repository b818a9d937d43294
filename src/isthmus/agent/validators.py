"""What is always true of an agent's machine; run after every step of every test."""

from __future__ import annotations

from collections import Counter

from isthmus.agent.cards import CLAIMING, HOLDING
from isthmus.agent.machine import AgentMachine
from isthmus.agent.parts import HeldPart

_LIVE = ("running", "failed", "stopping")


class InvariantError(Exception):
    """An invariant of the agent does not hold: a bug."""


def validate(machine: AgentMachine) -> None:
    """Raise `InvariantError` unless every card has one holder and one claimer at most, and none is lost.

    Nor may the pool's parts have more of a node group than the owner lets them.
    """
    held: Counter[str] = Counter()
    claimed: Counter[str] = Counter()
    for part in machine.parts.values():
        _check_life(part)
        book = held if part.state in HOLDING else claimed if part.state in CLAIMING else None
        for worker in part.workers.values():
            if book is None:
                _require(not worker.cards, f"{_name(part)} has cards")
                continue
            book.update(worker.cards)
            _require(len(worker.cards) == worker.chips, f"{_name(part)} lacks cards")
            known = set(machine.site.cards.inventory.get(worker.node_group, ()))
            _require(set(worker.cards) <= known, f"{_name(part)} has cards that do not exist")
    for what, book in (("holders", held), ("claimers", claimed)):
        twice = [card for card, num in book.items() if num > 1]
        _require(not twice, f"cards {twice} have two {what}")
    total = sum(len(cards) for cards in machine.site.cards.inventory.values())
    free = sum(machine.site.cards.num_free(machine.parts.values()).values())
    taken = len(held.keys() | claimed.keys())
    _require(free + taken == total, f"{free} free and {taken} taken of {total} cards")
    for group, cards in machine.site.cards.of_pool(machine.parts.values()).items():
        limit = machine.site.limit(group)
        _require(
            len(cards) <= limit, f"the pool has {len(cards)} cards of '{group}', the owner allows {limit}"
        )


def _check_life(part: HeldPart) -> None:
    _require(part.state not in ("new", "forgotten"), f"{_name(part)} has no place in the table")
    _require(part.state in _LIVE or not part.live, f"{_name(part)} has a live worker")
    _require(part.state != "released" or not part.workers, f"{_name(part)} still has workers")


def _name(part: HeldPart) -> str:
    return f"part {part.job}/{part.attempt} ({part.state})"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)

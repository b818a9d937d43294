"""What is always true of an agent's machine; run after every step of every test."""

from __future__ import annotations

from collections import Counter

from isthmus.agent.machine import AgentMachine

_LIVE = ("running", "failed", "stopping")
_HOLDING = ("prepared", "running", "succeeded", "failed", "stopping")


class InvariantError(Exception):
    """An invariant of the agent does not hold: a bug."""


def validate(machine: AgentMachine) -> None:
    """Raise `InvariantError` unless every card has one holder at most, and only those who may hold."""
    held: Counter[str] = Counter()
    for part in machine.parts.values():
        name = f"part {part.job}/{part.attempt} ({part.state})"
        _require(part.state not in ("new", "forgotten"), f"{name} has no place in the table")
        _require(part.state in _LIVE or not part.live, f"{name} has a live worker")
        _require(part.state != "released" or not part.workers, f"{name} still has workers")
        if part.state in _HOLDING:
            for worker in part.workers.values():
                held.update(worker.cards)
                known = set(machine.cards.inventory.get(worker.node_group, ()))
                _require(set(worker.cards) <= known, f"{name} holds cards that do not exist")
    twice = [card for card, num in held.items() if num > 1]
    _require(not twice, f"cards {twice} have two holders")
    total = sum(len(cards) for cards in machine.cards.inventory.values())
    free = sum(machine.cards.num_free(machine.parts.values()).values())
    _require(free + len(held) == total, f"{free} free and {len(held)} held of {total} cards")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)

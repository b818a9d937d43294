"""Exact accounting of a site's cards: each belongs to at most one worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from isthmus.agent.parts import HeldPart

_HOLDING = ("prepared", "running", "succeeded", "failed", "stopping")
"""States in which a part's workers hold their cards."""


class Cards:
    """The cards of a site by node group; who holds which is derived from the parts, never counted twice."""

    def __init__(self, inventory: Mapping[str, Sequence[str]]) -> None:
        self.inventory = {group: tuple(cards) for group, cards in inventory.items()}

    def free(self, group: str, parts: Iterable[HeldPart]) -> list[str]:
        """Return the cards of `group` that no worker of `parts` holds, in inventory order."""
        held = {card for part in parts if _holds(part) for card in _cards(part)}
        return [card for card in self.inventory.get(group, ()) if card not in held]

    def num_free(self, parts: Iterable[HeldPart], reserved: Iterable[HeldPart] = ()) -> dict[str, int]:
        """Return the number of free cards by group, less what the `reserved` parts wait for."""
        parts, reserved = list(parts), list(reserved)
        return {
            group: max(0, len(self.free(group, parts)) - sum(_wanted(part, group) for part in reserved))
            for group in self.inventory
        }

    def lacking(self, wanted: Mapping[str, int], parts: Iterable[HeldPart], queue: Iterable[HeldPart]) -> str:
        """Return "" where every group has its `wanted` cards free, else which has not and how many there are.

        A group for which a local job of `queue` waits counts as taken: its own queue comes first.
        """
        parts, queue = list(parts), list(queue)
        for group, num in wanted.items():
            if group not in self.inventory:
                return f"no node group '{group}'; there is {', '.join(sorted(self.inventory))}"
            ahead = [part.job for part in queue if _wanted(part, group)]
            if ahead:
                return f"node group '{group}': {num} cards wanted, queued behind local job '{ahead[0]}'"
            num_free = len(self.free(group, parts))
            if num_free < num:
                return f"node group '{group}': {num} cards wanted, {num_free} free"
        return ""

    def take(self, group: str, num: int, parts: Iterable[HeldPart]) -> tuple[str, ...]:
        """Return `num` cards of `group` that no worker of `parts` holds; the caller made sure there are."""
        return tuple(self.free(group, parts)[:num])


def _holds(part: HeldPart) -> bool:
    return part.state in _HOLDING or (part.state == "new" and bool(part.workers))


def _cards(part: HeldPart) -> list[str]:
    return [card for worker in part.workers.values() for card in worker.cards]


def _wanted(part: HeldPart, group: str) -> int:
    return sum(len(worker.cards) for worker in part.workers.values() if worker.node_group == group)

"""`fewest_moves`: the smallest number of moves that reorder a queue.

Entries that stay form an increasing sequence of wanted positions: keep a longest one (patience sorting,
Fredman 1975) and move every other entry once. O(n log n) for n entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry", bound=Hashable)


def fewest_moves(present: Sequence[Entry], wanted: Sequence[Entry]) -> list[tuple[Entry, Entry | None]]:
    """Return moves `(entry, after)` to apply in order: put `entry` directly behind `after` (None: first).

    Entries are unique in both sequences. Entries of `wanted` that `present` lacks are inserted; entries of
    `present` that `wanted` lacks must be removed before.
    """
    place = {entry: index for index, entry in enumerate(wanted)}
    stays = _longest_increasing([place[entry] for entry in present if entry in place])
    return [(entry, wanted[i - 1] if i else None) for i, entry in enumerate(wanted) if i not in stays]


def _longest_increasing(places: Sequence[int]) -> set[int]:
    """Return the members of a longest increasing subsequence of distinct `places`."""
    tails: list[int] = []
    before: dict[int, int | None] = {}
    for place in places:
        at = bisect_left(tails, place)
        before[place] = tails[at - 1] if at else None
        tails[at : at + 1] = [place]
    found: set[int] = set()
    last = tails[-1] if tails else None
    while last is not None:
        found.add(last)
        last = before[last]
    return found

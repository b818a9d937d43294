"""`fewest_moves`: the fewest moves that bring a queue into a wanted order.

What may stay where it is forms an increasing sequence of wanted places, so the longest one stays (patience
sorting; Fredman 1975) and everything else is moved once: O(n log n) for n entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry", bound=Hashable)


def fewest_moves(present: Sequence[Entry], wanted: Sequence[Entry]) -> list[tuple[Entry, Entry | None]]:
    """Return moves `(entry, after)`, to be done in order: put `entry` directly behind `after` (None: first).

    Both sequences name each entry once. Entries of `wanted` that are not in `present` are put in; those of
    `present` that `wanted` does not name must have been taken out before.
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

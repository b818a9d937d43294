"""`FairOrder`: waiting work by priority; within a priority users take turns, however much each has queued.

Start-time fair queueing (Goyal, Vin, Cheng 1997) with work of equal size: an entry is tagged with the turn in which its
user is served, and the lowest tag is next. The entries of a user who adds 300 have 300 turns in a row; the first entry
of another user gets the present turn and precedes all but those that were due before it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from sortedcontainers import SortedList

Place = tuple[int, float, int]
"""(priority rank, time in s, number): the order of one user's entries; numbers are unique."""

FairKey = tuple[int, int, float, int]
"""(priority rank, turn, time in s, number)."""


@dataclass(slots=True)
class FairOrder:
    """Entries in the order in which they are served. Iterates over keys, the next one first."""

    keys: Annotated[SortedList, FairKey] = field(default_factory=SortedList)
    # (key, user) by number.
    entries: dict[int, tuple[FairKey, str]] = field(default_factory=dict)
    # Latest turn by (user, priority rank).
    turns: dict[tuple[str, int], int] = field(default_factory=dict)
    # Turn of the entry that was served last, by priority rank.
    served: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[FairKey]:
        return iter(self.keys)

    def __contains__(self, place: Place) -> bool:
        return place[2] in self.entries

    def add(self, user: str, place: Place, *, in_turns: bool = True) -> None:
        """Add an entry of a user; without `in_turns` it precedes all that wait for a turn, in the order of places."""
        rank, at_s, number = place
        if number in self.entries:
            return
        turn = 0
        if in_turns:
            turn = max(self.served.get(rank, 1), self.turns.get((user, rank), 0) + 1)
            self.turns[user, rank] = turn
        key = (rank, turn, at_s, number)
        self.entries[number] = key, user
        self.keys.add(key)

    def discard(self, place: Place) -> None:
        """Remove an entry, if it is there."""
        entry = self.entries.pop(place[2], None)
        if entry is not None:
            self.keys.remove(entry[0])

    def first(self) -> Place:
        """Return the place of the next entry."""
        rank, _, at_s, number = self.keys[0]
        return rank, at_s, number

    def pop(self, may_serve: Callable[[str], bool] = lambda _: True) -> Place | None:
        """Remove the next entry whose user may be served and return its place; None if there is none."""
        for key in self.keys:
            rank, turn, at_s, number = key
            if may_serve(self.entries[number][1]):
                self.discard((rank, at_s, number))
                self.served[rank] = max(self.served.get(rank, 1), turn)
                return rank, at_s, number
        return None

    def forget_turns(self) -> None:
        """Begin again if nothing waits, so that the turns of users do not accumulate."""
        if not self.keys:
            self.turns.clear()
            self.served.clear()

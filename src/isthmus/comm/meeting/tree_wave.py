"""`TreeWave`: agreement of all ranks that each of them has begun, by messages along the links of a tree.

A rank that has begun, and whose children are all ready, reports to its parent that it is ready. The root then knows
that all ranks have begun, and says so downwards. Each link carries at most two messages each way.
"""

from __future__ import annotations

from enum import IntEnum

from isthmus.comm.meeting.rank_tree import TreePlace


class Signal(IntEnum):
    """What one rank tells a neighbour."""

    CALL = 0
    """Begin too."""
    READY = 1
    """All ranks below this one have begun."""
    DONE = 2
    """All ranks have begun."""


Signals = list[tuple[int, Signal]]
"""(neighbour, signal) pairs to send."""


class TreeWave:
    """The state of one rank at `place`. With `calls`, the first rank that begins makes all others begin.

    `begin` and `receive` return the signals to send, which may arrive late, twice and in any order.
    """

    def __init__(self, place: TreePlace, *, calls: bool) -> None:
        self._place, self._calls = place, calls
        self.has_begun = self.is_done = False
        self._ready: set[int] = set()
        self._has_reported = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The neighbours that this rank still waits for."""
        if self.is_done:
            return ()
        below = tuple(child for child in self._place.children if child not in self._ready)
        return below or (() if self._place.parent is None else (self._place.parent,))

    def begin(self) -> Signals:
        """Begin at this rank."""
        return self._begin(None)

    def receive(self, sender: int, signal: Signal) -> Signals:
        """Handle `signal` of the neighbour `sender`; one that does not fit the tree changes nothing."""
        if signal is Signal.CALL and self._calls and sender in self._place.neighbours:
            return self._begin(sender)
        if signal is Signal.READY and sender in self._place.children:
            self._ready.add(sender)
            return (self._begin(sender) if self._calls else []) + self._report()
        if signal is Signal.DONE and sender == self._place.parent and self._has_reported:
            return self._finish()
        return []

    def _begin(self, caller: int | None) -> Signals:
        if self.has_begun:
            return []
        self.has_begun = True
        called = self._place.neighbours if self._calls else ()
        return [(one, Signal.CALL) for one in called if one != caller] + self._report()

    def _report(self) -> Signals:
        if self._has_reported or not self.has_begun or len(self._ready) < len(self._place.children):
            return []
        self._has_reported = True
        return self._finish() if self._place.parent is None else [(self._place.parent, Signal.READY)]

    def _finish(self) -> Signals:
        if self.is_done:
            return []
        self.is_done = True
        return [(child, Signal.DONE) for child in self._place.children]

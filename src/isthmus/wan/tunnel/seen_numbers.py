"""`SeenNumbers`: which numbers have been seen, each of which counts once, in bounded memory."""

from __future__ import annotations

from isthmus.core.errors import ProtocolError


class SeenNumbers:
    """Numbers from 0, in any order. All below `floor` have been seen; at most `window` above it may be."""

    def __init__(self, window: int) -> None:
        self.floor, self._window = 0, window
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self.floor or number in self._above

    def add(self, number: int) -> bool:
        """Return whether `number` is seen for the first time; raise `ProtocolError` beyond the window."""
        if number in self:
            return False
        if number >= self.floor + self._window:
            raise ProtocolError(f"number {number} is {self._window} or more beyond {self.floor}, which is missing")
        self._above.add(number)
        while self.floor in self._above:
            self._above.remove(self.floor)
            self.floor += 1
        return True

    def ranges(self, most: int) -> list[tuple[int, int]]:
        """Return at most `most` ranges [first, end) above the floor, the lowest first."""
        found: list[tuple[int, int]] = []
        for number in sorted(self._above):
            if found and found[-1][1] == number:
                found[-1] = found[-1][0], number + 1
            elif len(found) == most:
                break
            else:
                found.append((number, number + 1))
        return found

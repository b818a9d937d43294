"""`HeldBytes`: memory that the flows of one way keep together."""

from __future__ import annotations


class HeldBytes:
    """A count with a bound, and how many of the bytes wait to be sent for the first time."""

    def __init__(self, most: int) -> None:
        self.used, self.most, self.unsent = 0, most, 0

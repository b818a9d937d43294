"""`HeldBytes`: memory that the flows of one way keep together."""

from __future__ import annotations


class HeldBytes:
    """A count with a bound, and how many of the bytes wait to be sent for the first time."""

    def __init__(self, most: int) -> None:
        self.used, self.most, self.unsent = 0, most, 0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more are within the bound."""
        return self.used + num_bytes <= self.most

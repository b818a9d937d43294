"""`HeldBytes`: memory that the flows of one way keep together."""

from __future__ import annotations


class HeldBytes:
    """A count with a bound."""

    def __init__(self, most: int) -> None:
        self.used, self.most = 0, most

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many more are allowed."""
        return self.used + num_bytes <= self.most

"""`Amount`: how much of itself a part of `benchmarks.sites` runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A run in full or a quick one, whose repeated faults end after `limit_s` seconds; rows name what was run."""

    quick: bool = False
    limit_s: float = float("inf")
    begun_s: float = field(default_factory=time.monotonic)
    """When the part began, in seconds of the monotonic clock."""

    @property
    def is_over(self) -> bool:
        """Whether the time of the part is over."""
        return time.monotonic() - self.begun_s >= self.limit_s

"""Priorities: the pool's own three, and what they stand for in a site's queue (`PriorityMap`)."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from isthmus.core.base import Frozen, Name

Priority = Literal["low", "middle", "high"]
"""The pool's priorities."""


class PriorityMap(Frozen):
    """A site's own priority `levels`, highest first, and the ones that the pool's priorities stand for there.

    Registered with the cluster (cross-domain pooling report 4.3.2, table 2). Levels above `high` outrank
    every job of the pool.
    """

    levels: tuple[Name, ...] = ("high", "middle", "low")
    high: Name = "high"
    middle: Name = "middle"
    low: Name = "low"

    @model_validator(mode="after")
    def _in_order(self) -> PriorityMap:
        if len(set(self.levels)) != len(self.levels):
            raise ValueError(f"priority levels occur twice: {', '.join(self.levels)}")
        ranks = [self.rank(self.level(priority)) for priority in ("high", "middle", "low")]
        if ranks != sorted(ranks):
            raise ValueError("high, middle and low stand for levels in another order than theirs")
        return self

    def level(self, priority: Priority) -> str:
        """Return the site's own level for a priority of the pool."""
        return {"high": self.high, "middle": self.middle, "low": self.low}[priority]

    def rank(self, level: str) -> int:
        """Return a level's place, 0 the highest; raise `ValueError` where the site has no such level."""
        if level not in self.levels:
            raise ValueError(f"no priority level '{level}' among {', '.join(self.levels)}")
        return self.levels.index(level)

"""The three pool priorities and their mapping to a site's own levels (`PriorityMap`)."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from isthmus.core.base_model import FrozenModel, Name

Priority = Literal["low", "middle", "high"]
"""The pool's priorities."""


def joint_priority(project: Priority, job: Priority) -> Priority:
    """Return the pool priority of a job from the priorities of its project and its own.

    A site's level follows from it by `PriorityMap`. All jobs of a `high` project are `high`, all of a `low` one `low`:
    no owner thus ranks a job of a lower project above one of a higher project, whatever its levels.
    """
    return job if project == "middle" else project


class PriorityMap(FrozenModel):
    """A site's own priority `levels`, highest first, and the level of each pool priority.

    Part of the cluster registration (cross-domain pooling report 4.3.2, table 2). Levels above `high` outrank
    every pool job.
    """

    levels: tuple[Name, ...] = ("high", "middle", "low")
    high: Name = "high"
    middle: Name = "middle"
    low: Name = "low"

    @model_validator(mode="after")
    def _check_order(self) -> PriorityMap:
        if len(set(self.levels)) != len(self.levels):
            raise ValueError(f"duplicate priority levels: {', '.join(self.levels)}")
        ranks = [self.rank(self.level(priority)) for priority in ("high", "middle", "low")]
        if ranks != sorted(ranks):
            raise ValueError("high, middle and low must map to levels in descending order")
        return self

    def level(self, priority: Priority) -> str:
        """Return the site level of a pool priority."""
        return {"high": self.high, "middle": self.middle, "low": self.low}[priority]

    def rank(self, level: str) -> int:
        """Return the position of `level`, 0 the highest; raise `ValueError` if unknown."""
        if level not in self.levels:
            raise ValueError(f"unknown priority level '{level}', known: {', '.join(self.levels)}")
        return self.levels.index(level)

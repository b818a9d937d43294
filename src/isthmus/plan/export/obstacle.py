"""`Obstacle`: why a framework cannot run a plan, and what to do about it; `require_none` refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.core.errors import PlanError


@dataclass(frozen=True)
class Obstacle:
    """One thing of a plan or model that a framework has no word for, and the nearest way around it."""

    reason: str
    remedy: str


def require_none(framework: str, plan: str, obstacles: Iterable[Obstacle]) -> None:
    """Raise `PlanError` naming every obstacle, and every remedy once."""
    found = list(obstacles)
    if found:
        raise PlanError(
            f"{framework} cannot run plan '{plan}': " + "; ".join(one.reason for one in found),
            hint="; ".join(dict.fromkeys(one.remedy for one in found)),
        )

"""`Obstacle`: a reason why a framework cannot run a plan, with a remedy; `require_none` raises them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.core.errors import PlanError


@dataclass(frozen=True)
class Obstacle:
    """A property of a plan or model that a framework does not support, and a remedy."""

    reason: str
    remedy: str


def require_none(framework: str, plan: str, obstacles: Iterable[Obstacle]) -> None:
    """Raise `PlanError` with all reasons and distinct remedies, if any."""
    found = list(obstacles)
    if found:
        raise PlanError(
            f"{framework} cannot run plan '{plan}': " + "; ".join(one.reason for one in found),
            hint="; ".join(dict.fromkeys(one.remedy for one in found)),
        )

"""`Incompatibility`: a reason why a framework cannot run a plan, with a remedy; `require_compatible` raises them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.core.errors import PlanError


@dataclass(frozen=True)
class Incompatibility:
    """A property of a plan or model that a framework does not support, and a remedy."""

    reason: str
    remedy: str


def require_compatible(framework: str, plan: str, incompatibilities: Iterable[Incompatibility]) -> None:
    """Raise `PlanError` with all reasons and distinct remedies, if any."""
    found = list(incompatibilities)
    if found:
        raise PlanError(
            f"{framework} cannot run plan '{plan}': " + "; ".join(one.reason for one in found),
            hint="; ".join(dict.fromkeys(one.remedy for one in found)),
        )

"""`Incompatibility`: a reason why a framework cannot run a plan; `require_compatible` raises them with a next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.core.runs.plan_words import stated_words

REPLAN = {
    "isthmus": "plan again with `isthmus plan JOB --pool POOL --runnable`",
    "megatron": "plan again with `isthmus plan JOB --pool POOL --for megatron`",
    "torchtitan": "plan again with `isthmus plan JOB --pool POOL --for torchtitan`",
}
"""The command by framework that finds only plans which it can run."""


@dataclass(frozen=True)
class Incompatibility:
    """A property of a plan, its model or its pool that a framework does not support."""

    reason: str
    change: str = ""
    """What to change in the job before planning again; empty: the search avoids the property by itself."""
    final: str = ""
    """If no plan avoids the property: what the user can do instead, in words."""


def require_compatible(framework: str, key: str, plan: str, incompatibilities: Iterable[Incompatibility]) -> None:
    """Raise `PlanError` with all reasons, if any, and the next step: one that works, or why there is none.

    `key` is the framework's key in `REPLAN`.
    """
    found = list(incompatibilities)
    if not found:
        return
    final = list(dict.fromkeys(one.final for one in found if one.final))
    changes = list(dict.fromkeys(one.change for one in found if one.change))
    raise PlanError(
        f"{framework} cannot run {plan}: " + "; ".join(one.reason for one in found),
        hint="; ".join(final) if final else ", and ".join([*changes, REPLAN[key]]),
    )


def word_incompatibilities(plan: Plan, supported: Collection[str]) -> Iterator[Incompatibility]:
    """Yield what a plan states beside its degrees, and a framework's export does not know."""
    for name in stated_words(plan):
        if name not in supported:
            yield Incompatibility(f"{name} is not exported", final=f"remove {name} from the plan and set it by hand")


def plan_name(plan_id: str) -> str:
    """Return a plan's name in a message."""
    return f"plan '{plan_id}'"

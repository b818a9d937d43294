"""Checkpoints that survive a part: asked for, taken by all its ranks after the same step, read back, told.

A request names the step that the newest protected checkpoint had when it was made: any later one answers it.
So a request that is repeated, or that several sites make of the same job, costs one checkpoint.
"""

from __future__ import annotations

from isthmus.agent.events import AskProtection
from isthmus.agent.parts import HeldPart
from isthmus.agent.site import SiteState
from isthmus.core.messages import Protection


def ask(site: SiteState, part: HeldPart) -> None:
    """Ask the workers of a running part for a checkpoint that survives it, unless they are asked already."""
    if part.protect_after is None:
        steps = [worker.protection.step for worker in part.workers.values() if worker.protection]
        part.protect_after, part.protection, part.asked = max(steps, default=0), None, False
    if not part.asked and part.protection is None:
        part.asked = True
        site.out.append(AskProtection(part=part, after=part.protect_after))


def withdraw(part: HeldPart) -> None:
    """End a request of the server; one that the owner's eviction has made stands."""
    if not part.evicted:
        part.protect_after, part.protection = None, None


def protected(part: HeldPart) -> bool:
    """Tell whether what was asked for is there."""
    return part.protection is not None


def wants_protection(part: HeldPart) -> bool:
    """Tell whether a checkpoint was asked for and is not there yet."""
    return part.protect_after is not None and part.protection is None


def see_protection(part: HeldPart) -> None:
    """Note a checkpoint that every rank here has verified after the same step, and that answers a request."""
    if part.protect_after is None or part.protection is not None:
        return
    done = [worker.protection for worker in part.workers.values()]
    known = [one for one in done if one is not None]
    steps = {one.step for one in known}
    if known and len(known) == len(done) and len(steps) == 1 and min(steps) > part.protect_after:
        part.protection = Protection(step=steps.pop(), num_bytes=sum(one.num_bytes for one in known))

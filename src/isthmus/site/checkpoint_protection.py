"""Requested checkpoints: written by all ranks of a part after one step, verified, and reported.

A request holds the step of the newest verified checkpoint at that time; any later checkpoint answers it. So
repeated requests, and requests of several sites for the same job, cost one checkpoint.
"""

from __future__ import annotations

from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.site.machine_events import RequestCheckpoint
from isthmus.site.parts import SitePart
from isthmus.site.site_state import SiteState


def request_checkpoint(site: SiteState, part: SitePart) -> None:
    """Request a checkpoint of a running part, unless one is already requested."""
    if part.protect_after is None:
        steps = [worker.protection.step for worker in part.workers.values() if worker.protection]
        part.protect_after, part.protection = max(steps, default=0), None
        part.checkpoint_requested = False
        site.mark_changed(part)
    if not part.checkpoint_requested and part.protection is None:
        part.checkpoint_requested = True
        site.instructions.append(RequestCheckpoint(part=part, after=part.protect_after))


def withdraw_checkpoint_request(site: SiteState, part: SitePart) -> None:
    """Withdraw the server's checkpoint request; one for an eviction by the owner stays."""
    if not part.evicted and part.protect_after is not None:
        part.protect_after, part.protection = None, None
        site.mark_changed(part)


def awaits_checkpoint(part: SitePart) -> bool:
    """Tell whether a requested checkpoint is still missing."""
    return part.protect_after is not None and part.protection is None


def record_checkpoint(part: SitePart) -> bool:
    """Record a checkpoint that every local rank has verified at the same step if it answers the request.

    Returns whether it does.
    """
    if part.protect_after is None or part.protection is not None:
        return False
    reported = [worker.protection for worker in part.workers.values()]
    verified = [one for one in reported if one is not None]
    steps = {one.step for one in verified}
    if not verified or len(verified) < len(reported) or len(steps) > 1 or min(steps) <= part.protect_after:
        return False
    part.protection = VerifiedCheckpoint(step=steps.pop(), num_bytes=sum(one.num_bytes for one in verified))
    return True

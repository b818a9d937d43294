"""`metered_holdings`: what a job holds of owners and of the pool's links, in which phase, and for which it waits."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.accounting.holdings import Holding
from isthmus.control.state.allocations import HELD_STATES
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import PartRecord
from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.api_views import JobState
from isthmus.core.views.ledger_views import HoldPhase

_PHASES: dict[JobState, HoldPhase] = {
    "preempting": "waiting", "preparing": "waiting", "starting": "starting", "running": "running",
}  # fmt: skip
"""The phase of the current parts of a job; in all other states they are released."""


def owner_of_part(state: PoolState, part: PartRecord) -> str:
    """Return the owner of the chips of a part: of the cluster when it got them."""
    return part.used_owner or state.clusters[part.cluster].cluster.owner


def metered_holdings(state: PoolState, job: JobRecord) -> Iterator[Holding]:
    """Yield what each part holds, and the links of the job."""
    for part in job.unreleased_parts():
        if not part.allocated or part.state not in HELD_STATES:
            continue
        chips = ((group, num_chips - part.borrowed.get(group, 0)) for group, num_chips in part.chips.items())
        amounts = [(PoolResource.chips(part.cluster, group), num_chips) for group, num_chips in chips if num_chips > 0]
        if part.storage_bytes:
            amounts.append((PoolResource.storage(part.cluster), part.storage_bytes))
        late = _late_owners(state, job, part)
        yield Holding(
            attempt=part.attempt,
            cluster=part.cluster,
            owner=owner_of_part(state, part),
            phase="waiting" if late else _phase(job, part),
            amounts=tuple(amounts),
            late=late,
            away=not state.clusters[part.cluster].connected,
        )
    if job.allocated_kbps:
        yield Holding(
            attempt=job.attempt,
            cluster="",
            owner="",
            phase=_PHASES.get(job.state, "leaving"),
            amounts=tuple(sorted(job.allocated_kbps.items())),
        )


def _phase(job: JobRecord, part: PartRecord) -> HoldPhase:
    phase = _PHASES.get(job.state, "leaving") if part.attempt == job.attempt else "leaving"
    if phase != "running":
        return phase
    if part.state != "running":
        return "leaving" if part.ordered_s is None or part.left else "starting"
    return "saving" if part.checkpoint_requested and part.verified_checkpoint is None else "running"


def _late_owners(state: PoolState, job: JobRecord, part: PartRecord) -> tuple[str, ...]:
    """Return the owners of the sites for which a part waits that has done its own share of the present step.

    A site that waits for the chips of victims is not late.
    """
    if part.attempt != job.attempt or not _is_done(job, part):
        return ()
    others = (one for one in job.current_parts() if not one.victims and not _is_done(job, one))
    return tuple(sorted({owner_of_part(state, one) for one in others}))


def _is_done(job: JobRecord, part: PartRecord) -> bool:
    """Return whether a part waits for nothing at its own site; true in states in which no part waits."""
    if job.state == "preempting":
        return part.state not in ("ordered", "queued")
    if job.state == "preparing":
        return part.state == "prepared"
    return job.state != "starting" or len(part.workers) >= len(part.ranks)

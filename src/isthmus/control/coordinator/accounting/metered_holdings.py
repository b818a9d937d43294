"""`metered_holdings`: what a job holds of owners and of the pool's links, in which phase, and for which it waits."""

from __future__ import annotations

from functools import lru_cache

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
_WAITING = frozenset({"preempting", "preparing", "starting"})
"""States of a job in which a part may wait for others."""
_CACHE_SIZE = 1 << 14
"""Holdings that are kept, so that those of a job that has not changed are not made again."""


def owner_of_part(state: PoolState, part: PartRecord) -> str:
    """Return the owner of the chips of a part: of the cluster when it got them."""
    return part.used_owner or state.clusters[part.cluster].cluster.owner


def metered_holdings(state: PoolState, job: JobRecord) -> list[Holding]:
    """Return what each part holds, and the links of the job. Equal holdings are mostly the same object."""
    found: list[Holding] = []
    waits = job.state in _WAITING
    for part in job.parts.values():
        if not part.allocated or part.state not in HELD_STATES:
            continue
        late = _late_owners(state, job, part) if waits else ()
        found.append(
            _holding(
                part.attempt, part.cluster, owner_of_part(state, part), "waiting" if late else _phase(job, part),
                () if part.ungranted else tuple(part.chips.items()),
                tuple(part.borrowed.items()) if part.borrowed else (), part.storage_bytes, late,
                not state.clusters[part.cluster].connected,
            )
        )  # fmt: skip
    if job.allocated_kbps:
        amounts = tuple(sorted(job.allocated_kbps.items()))
        phase = _PHASES.get(job.state, "leaving")
        found.append(Holding(attempt=job.attempt, cluster="", owner="", phase=phase, amounts=amounts))
    return found


@lru_cache(_CACHE_SIZE)
def _holding(
    attempt: int,
    cluster: str,
    owner: str,
    phase: HoldPhase,
    chips: tuple[tuple[str, int], ...],
    borrowed: tuple[tuple[str, int], ...],
    storage_bytes: int,
    late: tuple[str, ...],
    away: bool,
) -> Holding:
    """Return what a part holds itself: its chips less those that victims still hold, and its storage."""
    lent = dict(borrowed)
    own = [(PoolResource.chips(cluster, group), num_chips - lent.get(group, 0)) for group, num_chips in chips]
    stored = [(PoolResource.storage(cluster), storage_bytes)] if storage_bytes else []
    amounts = (*((resource, num_chips) for resource, num_chips in own if num_chips > 0), *stored)
    return Holding(
        attempt=attempt, cluster=cluster, owner=owner, phase=phase, amounts=amounts, late=late, away=away
    )  # fmt: skip


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

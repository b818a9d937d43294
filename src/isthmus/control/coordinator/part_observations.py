"""The state machine of a part: a table `(from, to): action`; and `apply_observation`, which applies reports to it.

    ordered -> queued -> ready -> prepared -> running -> succeeded | failed -> released
    (refused, failed and released may follow most states)

Reports are checked against the table: late ones are dropped, illegal ones raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.control.state import allocations
from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_records import PartRecord, PartState
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import ObservedPart, RankMap, is_closer_to_root_cause

PartTransition = Callable[[PartRecord, ObservedPart], PartState]


def apply_observation(state: PoolState, part: PartRecord, seen: ObservedPart) -> bool:
    """Apply a site's report of a part; return whether the part changed.

    A state before the known one, or another of the same order, comes from a late report and is dropped.
    """
    part.unsaved_s = seen.unsaved_s
    seen = _refuse_foreign_address(state, part, seen)
    if seen.state == part.state:
        changed = _add_workers(state, part, seen) | _update_fault(part, seen) | _record_checkpoint(part, seen)
        if not (changed | _record_grant(part, seen) | _record_wait(part, seen)):
            return False
        state.changed_jobs.add(part.job)
        return True
    if _STATE_ORDER[seen.state] <= _STATE_ORDER[part.state]:
        return False
    step = PART_TRANSITIONS.get((part.state, seen.state))
    if step is None:
        raise IllegalTransitionError(
            f"part {part.job}/{part.attempt} at {part.cluster}: no step from {part.state} to {seen.state}; "
            f"its history: {' | '.join(part.history)}",
            hint="this is a bug: please report it with the message",
        )
    part.history.append(f"{part.state} -> {seen.state} {seen.detail}".rstrip())
    if not _update_fault(part, seen) and (seen.state != "released" or not part.detail):
        part.detail = seen.detail
    part.state = step(part, seen)
    _record_grant(part, seen)
    _record_wait(part, seen)
    _add_workers(state, part, seen)
    _record_checkpoint(part, seen)
    if part.state == "released":
        allocations.free_part(state, part)
    state.changed_jobs.add(part.job)
    return True


def _refuse_foreign_address(state: PoolState, part: PartRecord, seen: ObservedPart) -> ObservedPart:
    """Return `seen`, or a failure if a worker's address is not the site's own.

    The rank map sends the workers of all other sites there. The site's own address is the one that its agent was
    enrolled with, and at which the other sites have found its agent.
    """
    own = state.clusters[part.cluster].peer_address
    if own is None or _STATE_ORDER[seen.state] >= _STATE_ORDER["failed"]:
        return seen
    for worker in seen.workers:
        ports = range(own.first_port or 1, (own.last_port or 65535) + 1)
        if worker.rank in part.ranks and (worker.host != own.host or worker.port not in ports):
            found = f"rank {worker.rank} names the address {worker.host}:{worker.port}, which is not the site's own"
            return seen.model_copy(update={"state": "failed", "fault": "own", "detail": found, "workers": ()})
    return seen


def record_part_events(state: PoolState, part: PartRecord, seen: ObservedPart, now_s: float) -> None:
    """Add the new events of a part's own ranks to the job's history; reports repeat events."""
    job = state.jobs[part.job]
    for event in seen.events:
        if event.rank not in part.ranks or event.number <= part.last_events.get(event.rank, -1):
            continue
        part.last_events[event.rank] = event.number
        step = event.step if event.step is None or event.step <= job.spec.training.steps else None
        job.worker_restarts += event.kind == "restarted"
        if event.kind == "saved":
            state.meter.note_checkpoint(job.id, part.attempt)
        job.history.add_worker_event(
            event.kind, min(event.time_s, now_s), part.attempt, event.detail, part.cluster, event.rank,
            step, event.seconds,
        )  # fmt: skip
        state.changed_jobs.add(job.id)


def _add_workers(state: PoolState, part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt the addresses of new and replaced workers; ranks of other sites are ignored.

    In the rank map of a running job a new or replaced worker changes the entry of its own rank alone.
    """
    known = {worker.rank: worker for worker in part.workers}
    if all(known.get(worker.rank) == worker for worker in seen.workers):
        return False
    own = set(part.ranks)
    new = {
        worker.rank: worker
        for worker in seen.workers
        if worker.rank in own and worker.cluster == part.cluster and known.get(worker.rank) != worker
    }
    if not new:
        return False
    part.workers = tuple((known | new).values())
    job = state.jobs[part.job]
    if job.rank_map is not None and part.attempt == job.attempt:
        placed = {one.rank: one for one in job.rank_map.workers} | new
        job.rank_map = RankMap(workers=tuple(placed[rank] for rank in sorted(placed)))
    return True


def _update_fault(part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt the reported fault if it explains more than the known one."""
    if not is_closer_to_root_cause(seen.fault, part.fault):
        return False
    part.fault, part.detail = seen.fault, seen.detail
    return True


def _record_checkpoint(part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt the verified checkpoint that was requested."""
    if seen.protection is None or seen.protection == part.verified_checkpoint or not part.checkpoint_requested:
        return False
    part.verified_checkpoint = seen.protection
    return True


def _record_grant(part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt whether the site's scheduler has granted the part's chips; those of a part beyond `ready` are granted."""
    before, part.ungranted = part.ungranted, seen.ungranted and seen.state == "ready"
    return before != part.ungranted


def _record_wait(part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt what the part waits for."""
    before = part.waiting, part.waiting_since_s
    part.waiting, part.waiting_since_s = seen.waiting, seen.waiting_since_s
    return before != (part.waiting, part.waiting_since_s)


def _accept(_part: PartRecord, seen: ObservedPart) -> PartState:
    """Accept the reported state."""
    return seen.state


def _accept_if_committed(part: PartRecord, seen: ObservedPart) -> PartState:
    """Accept the reported state if the part was ordered to run; otherwise it has failed."""
    if part.committed:
        return seen.state
    part.detail = f"the site reports '{seen.state}' for a part that was never ordered to run"
    return "failed"


PART_TRANSITIONS: Mapping[tuple[PartState, PartState], PartTransition] = {
    ("ordered", "queued"): _accept,
    ("ordered", "ready"): _accept,
    ("ordered", "prepared"): _accept,
    ("ordered", "refused"): _accept,
    ("ordered", "running"): _accept_if_committed,
    ("ordered", "succeeded"): _accept_if_committed,
    ("ordered", "failed"): _accept,
    ("ordered", "released"): _accept,
    ("queued", "ready"): _accept,
    ("queued", "prepared"): _accept,
    ("queued", "refused"): _accept,
    ("queued", "running"): _accept_if_committed,
    ("queued", "succeeded"): _accept_if_committed,
    ("queued", "failed"): _accept,
    ("queued", "released"): _accept,
    ("ready", "prepared"): _accept,
    ("ready", "refused"): _accept,
    ("ready", "running"): _accept_if_committed,
    ("ready", "succeeded"): _accept_if_committed,
    ("ready", "failed"): _accept,
    ("ready", "released"): _accept,
    ("prepared", "refused"): _accept,
    ("prepared", "running"): _accept_if_committed,
    ("prepared", "succeeded"): _accept_if_committed,
    ("prepared", "failed"): _accept,
    ("prepared", "released"): _accept,
    ("refused", "running"): _accept_if_committed,
    ("refused", "succeeded"): _accept_if_committed,
    ("refused", "failed"): _accept,
    ("refused", "released"): _accept,
    ("running", "succeeded"): _accept,
    ("running", "failed"): _accept,
    ("running", "released"): _accept,
    ("succeeded", "released"): _accept,
    ("failed", "released"): _accept,
}
"""Every observable transition: forward only; states may be skipped, since reports may be lost."""

_STATE_ORDER: Mapping[PartState, int] = {
    "ordered": 0,
    "queued": 1,
    "ready": 2,
    "prepared": 3,
    "refused": 4,
    "running": 5,
    "succeeded": 6,
    "failed": 6,
    "released": 7,
}

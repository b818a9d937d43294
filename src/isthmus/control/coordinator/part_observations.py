"""The state machine of a part: a table `(from, to): action`; and `observe`, which applies reports to it.

    ordered -> queued -> ready -> prepared -> running -> succeeded | failed -> released
    (refused, failed and released may follow most states)

Reports are checked against the table: late ones are dropped, illegal ones raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.control.state import ledger
from isthmus.control.state.job_records import State
from isthmus.control.state.site_records import PartLife, PartRecord
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import ObservedPart, explains_more

PartStep = Callable[[PartRecord, ObservedPart], PartLife]


def observe(state: State, part: PartRecord, seen: ObservedPart) -> bool:
    """Apply a site's report of a part; return whether the part changed.

    A state before the known one, or another of the same order, comes from a late report and is dropped.
    """
    part.unsaved_s = seen.unsaved_s
    if seen.state == part.state:
        if not (_check_in(part, seen) | _explain(part, seen) | _protect(part, seen)):
            return False
        state.touched.add(part.job)
        return True
    if _HEIGHT[seen.state] <= _HEIGHT[part.state]:
        return False
    step = PART_STEPS.get((part.state, seen.state))
    if step is None:
        raise IllegalTransitionError(
            f"part {part.job}/{part.attempt} at {part.cluster}: no step from {part.state} to {seen.state}; "
            f"its history: {' | '.join(part.story)}",
            hint="this is a bug: please report it with the message",
        )
    part.story.append(f"{part.state} -> {seen.state} {seen.detail}".rstrip())
    if not _explain(part, seen) and (seen.state != "released" or not part.detail):
        part.detail = seen.detail
    part.state = step(part, seen)
    _check_in(part, seen)
    _protect(part, seen)
    if part.state == "released":
        ledger.settle(state, part)
    state.touched.add(part.job)
    return True


def _check_in(part: PartRecord, seen: ObservedPart) -> bool:
    """Add the addresses of new workers; ranks of other sites are ignored."""
    if not seen.workers or len(part.workers) == len(part.ranks):
        return False
    known = {worker.rank for worker in part.workers}
    new = tuple(
        worker
        for worker in seen.workers
        if worker.rank in part.ranks and worker.rank not in known and worker.cluster == part.cluster
    )
    part.workers += new
    return bool(new)


def _explain(part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt the reported fault if it explains more than the known one."""
    if not explains_more(seen.fault, part.fault):
        return False
    part.fault, part.detail = seen.fault, seen.detail
    return True


def _protect(part: PartRecord, seen: ObservedPart) -> bool:
    """Adopt the verified checkpoint that was requested."""
    if seen.protection is None or seen.protection == part.protection or not part.protect:
        return False
    part.protection = seen.protection
    return True


def _take(_part: PartRecord, seen: ObservedPart) -> PartLife:
    """Accept the reported state."""
    return seen.state


def _take_committed(part: PartRecord, seen: ObservedPart) -> PartLife:
    """Accept the reported state if the part was ordered to run; otherwise it has failed."""
    if part.committed:
        return seen.state
    part.detail = f"the site reports '{seen.state}' for a part that was never ordered to run"
    return "failed"


PART_STEPS: Mapping[tuple[PartLife, PartLife], PartStep] = {
    ("ordered", "queued"): _take,
    ("ordered", "ready"): _take,
    ("ordered", "prepared"): _take,
    ("ordered", "refused"): _take,
    ("ordered", "running"): _take_committed,
    ("ordered", "succeeded"): _take_committed,
    ("ordered", "failed"): _take,
    ("ordered", "released"): _take,
    ("queued", "ready"): _take,
    ("queued", "prepared"): _take,
    ("queued", "refused"): _take,
    ("queued", "running"): _take_committed,
    ("queued", "succeeded"): _take_committed,
    ("queued", "failed"): _take,
    ("queued", "released"): _take,
    ("ready", "prepared"): _take,
    ("ready", "refused"): _take,
    ("ready", "running"): _take_committed,
    ("ready", "succeeded"): _take_committed,
    ("ready", "failed"): _take,
    ("ready", "released"): _take,
    ("prepared", "refused"): _take,
    ("prepared", "running"): _take_committed,
    ("prepared", "succeeded"): _take_committed,
    ("prepared", "failed"): _take,
    ("prepared", "released"): _take,
    ("refused", "running"): _take_committed,
    ("refused", "succeeded"): _take_committed,
    ("refused", "failed"): _take,
    ("refused", "released"): _take,
    ("running", "succeeded"): _take,
    ("running", "failed"): _take,
    ("running", "released"): _take,
    ("succeeded", "released"): _take,
    ("failed", "released"): _take,
}
"""Every observable transition: forward only; states may be skipped, since reports may be lost."""

_HEIGHT: Mapping[PartLife, int] = {
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

"""The invariants of the control plane, as functions over the coordinator's state.

Each yields a sentence per violation. Tests run `violations` after every step; a server may run it at leisure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isthmus.control.records import ENDED, JobRecord, State


def all_or_none(state: State, now_s: float, grace_s: float = 0.0) -> Iterator[str]:
    """Invariant 1: no part is held beyond the reservation time-out while another part waits.

    `grace_s` is how often the shell asks for what is due.
    """
    for job in state.live.values():
        if job.state == "preparing" and job.deadline_s is None:
            yield f"job {job.id} holds chips with no end in sight"
        if job.state == "preparing" and job.deadline_s is not None and now_s > job.deadline_s + grace_s:
            yield f"job {job.id} has been preparing since {job.changed_s}, now {now_s}"
        if job.state in ("starting", "running") and any(p.state == "ordered" for p in job.present()):
            yield f"job {job.id} is {job.state}, but not every part was prepared"
        if job.state in ("planning", "choosing", "waiting") and any(
            part.desired != "released" for part in job.unreleased()
        ):
            yield f"job {job.id} is {job.state} and still holds chips"


def within_capacity(state: State) -> Iterator[str]:
    """Invariant 2: no cluster has promised more chips of a node group than it has."""
    for name, record in state.clusters.items():
        capacity = {group.name: group.chips for group in record.cluster.node_groups}
        for group in sorted({group for part in record.promised.values() for group in part.chips}):
            if record.wanted(group) > capacity.get(group, 0):
                yield f"{name} promised {record.wanted(group)} {group} of {capacity.get(group, 0)}"


def acknowledged(state: State, job_ids: Iterable[str]) -> Iterator[str]:
    """Invariant 3: every job whose submission was acknowledged, and that was not deleted, exists."""
    for job_id in job_ids:
        if job_id not in state.jobs:
            yield f"job {job_id} was acknowledged and is gone"


def attempts_apart(state: State) -> Iterator[str]:
    """No attempt is told to run while a part of an earlier one that was told to run may still be alive."""
    for job in state.jobs.values():
        alive = {part.attempt for part in job.unreleased() if part.committed}
        if len(alive) > 1:
            yield f"job {job.id}: attempts {sorted(alive)} overlap"


def books_balance(state: State) -> Iterator[str]:
    """Each cluster's ledger lists exactly the unreleased parts of the jobs, and an ended job runs nothing."""
    owed = {
        (part.cluster, part.job, part.attempt) for job in state.jobs.values() for part in job.unreleased()
    }
    kept = {
        (name, part.job, part.attempt)
        for name, record in state.clusters.items()
        for part in record.promised.values()
    }
    for cluster, job_id, attempt in sorted(owed ^ kept):
        yield f"part {job_id}/{attempt} at {cluster} is in one book only"
    for job in state.jobs.values():
        yield from _lists_agree(state, job)


def _lists_agree(state: State, job: JobRecord) -> Iterator[str]:
    if (job.state in ENDED) == (job.id in state.live):
        yield f"job {job.id} is {job.state}, and its place in the queue says otherwise"
    if job.state in ENDED and any(part.committed for part in job.unreleased()):
        yield f"job {job.id} is {job.state} while a part of it may run"
    if job.submission.key and state.keys.get((job.user, job.submission.key)) != job.id:
        yield f"job {job.id}: its key leads elsewhere"


def violations(state: State, now_s: float, *, grace_s: float = 0.0, job_ids: Iterable[str] = ()) -> list[str]:
    """Return every violation of every invariant; empty is good."""
    return [
        *all_or_none(state, now_s, grace_s),
        *within_capacity(state),
        *acknowledged(state, job_ids),
        *attempts_apart(state),
        *books_balance(state),
    ]

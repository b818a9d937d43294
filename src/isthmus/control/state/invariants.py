"""The invariants of the control plane, as functions over the coordinator's state.

Each yields a sentence per violation. Tests run `violations` after every step; a server may run it at leisure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from isthmus.control.state import ledger
from isthmus.control.state.check_indexes import indexes_agree
from isthmus.control.state.job_records import ENDED, JobRecord, State
from isthmus.control.state.site_records import PartRecord


def all_or_none(state: State, now_s: float, grace_s: float = 0.0) -> Iterator[str]:
    """Invariant 1: no part is held beyond the reservation time-out while another part waits.

    `grace_s` is how often the shell asks for what is due.
    """
    for job in state.live.values():
        if job.state in ("preparing", "preempting"):
            if job.deadline_s is None:
                yield f"job {job.id} holds chips with no end in sight"
            elif now_s > job.deadline_s + grace_s:
                yield f"job {job.id} has been {job.state} since {job.changed_s}, now {now_s}"
        if job.state in ("starting", "running") and any(p.state == "ordered" for p in job.present()):
            yield f"job {job.id} is {job.state}, but not every part was prepared"
        idle = job.state in ("planning", "choosing", "waiting", "blocked")
        for part in job.unreleased() if idle else ():
            if part.desired not in ("queued", "released"):
                yield f"job {job.id} is {job.state} and still holds chips"
            if part.desired == "queued" and not job.enqueued:
                yield f"job {job.id} stands in the queue of {part.cluster} and does not know"


def within_capacity(state: State) -> Iterator[str]:
    """Invariant 2: no chips, storage or bandwidth is promised that is not there, and the sums are right."""
    for name, record in state.clusters.items():
        parts = [part for part in record.parts.values() if part.promised]
        chips, unheld = Counter[str](), Counter[str]()
        for part in parts:
            for group in part.chips:
                chips[group] += _own(part, group)
                unheld[group] += 0 if part.held else _own(part, group) - part.local.get(group, 0)
        for group, amount in sorted(chips.items()):
            leaving = amount - record.wanted(group)
            if amount - leaving > record.capacity(group):
                yield f"{name} promised {amount - leaving} {group} of {record.capacity(group)}"
        if +chips != Counter(record.taken) or +unheld != +Counter(record.unheld):
            yield f"the sums of {name} are wrong: {record.taken}, {record.unheld} for {chips}, {unheld}"
        if sum(part.storage_bytes for part in parts) != record.taken_bytes:
            yield f"{name}: the storage promised does not add up to {record.taken_bytes} bytes"
        if record.taken_bytes > record.cluster.storage_bytes:
            yield f"{name} promised {record.taken_bytes} bytes of {record.cluster.storage_bytes}"
    yield from _links_within_capacity(state)


def _links_within_capacity(state: State) -> Iterator[str]:
    on_links = Counter[str]()
    for job in state.live.values():
        on_links.update(job.on_links)
    if +on_links != Counter(state.on_links):
        yield f"the bandwidth promised is {dict(on_links)}, the book says {state.on_links}"
    for key, kbps in on_links.items():
        most = ledger.link_kbps(state.links[key].bandwidth_gbps) if key in state.links else 0
        if kbps > most:
            yield f"{key} promised {kbps} kbit/s of {most}"


def _own(part: PartRecord, group: str) -> int:
    return part.chips[group] - part.borrowed.get(group, 0)


def acknowledged(state: State, job_ids: Iterable[str]) -> Iterator[str]:
    """Invariant 3: every job whose submission was acknowledged, and that was not deleted, exists."""
    for job_id in job_ids:
        if job_id not in state.jobs:
            yield f"job {job_id} was acknowledged and is gone"


def below_by_the_owners_map(state: State) -> Iterator[str]:
    """Invariant 4: whose chips are taken is of a lower level at that owner, and takes being preempted."""
    for job in state.live.values():
        for one in job.victims:
            levels = state.clusters[one.cluster].cluster.priorities
            victim = state.jobs.get(one.job) if one.attempt else None
            if victim is None or victim.victim_of != job.id:
                continue
            mine, theirs = (levels.rank(levels.level(each.priority)) for each in (job, victim))
            if theirs <= mine or not victim.preemptible:
                yield f"job {job.id} takes from {victim.id}, which is not below it at {one.cluster}"


def preemptions_are_joint(state: State) -> Iterator[str]:
    """Nobody is ended for a job before all its sites were ready and he had a verified checkpoint."""
    for job in state.live.values():
        if job.state == "preempting" and any(part.desired != "ready" for part in job.present()):
            yield f"job {job.id} is preempting, and a site was told to go on"
        for one in job.victims if job.state == "preempting" else ():
            victim = state.jobs.get(one.job) if one.attempt else None
            if victim is not None and victim.saved_step is not None and victim.victim_of == job.id:
                yield f"job {victim.id} was ended before job {job.id} had all its sites ready"
    for victim in state.live.values():
        if victim.saved_step is None or victim.state != "stopping" or victim.rank_map is None:
            continue
        steps = {part.protection.step if part.protection else None for part in victim.present()}
        if steps != {victim.saved_step}:
            yield f"job {victim.id} was ended with the checkpoints {steps}"


def attempts_apart(state: State) -> Iterator[str]:
    """No attempt is told to run while a part of an earlier one that was told to run may still be alive."""
    for job in state.jobs.values():
        alive = {part.attempt for part in job.unreleased() if part.committed}
        if len(alive) > 1:
            yield f"job {job.id}: attempts {sorted(alive)} overlap"


def books_balance(state: State) -> Iterator[str]:
    """Each cluster's book lists exactly the unreleased parts of the jobs, and an ended job runs nothing."""
    owed = {
        (part.cluster, part.job, part.attempt) for job in state.jobs.values() for part in job.unreleased()
    }
    kept = {
        (name, part.job, part.attempt)
        for name, record in state.clusters.items()
        for part in record.parts.values()
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
    if job.packed.key and state.keys.get((job.user, job.packed.key)) != job.id:
        yield f"job {job.id}: its key leads elsewhere"
    if job.victim_of is not None and job.victim_of not in state.jobs:
        yield f"job {job.id} is the victim of a job that is gone"


def violations(state: State, now_s: float, *, grace_s: float = 0.0, job_ids: Iterable[str] = ()) -> list[str]:
    """Return every violation of every invariant; empty is good."""
    return [
        *all_or_none(state, now_s, grace_s),
        *within_capacity(state),
        *acknowledged(state, job_ids),
        *below_by_the_owners_map(state),
        *preemptions_are_joint(state),
        *attempts_apart(state),
        *books_balance(state),
        *indexes_agree(state),
    ]

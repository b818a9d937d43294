"""The invariants of the control plane, as functions of the coordinator's state.

Each yields one message per violation. Tests run `violations` after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from isthmus.control.state import allocations
from isthmus.control.state.check_indexes import account_violations, index_violations
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState
from isthmus.control.state.site_records import PartRecord
from isthmus.core.pool_resource import PoolResource


def all_or_none(state: PoolState, now_s: float, grace_s: float = 0.0) -> Iterator[str]:
    """Invariant 1: no part is held longer than the reservation timeout while another part waits.

    `grace_s` is the interval at which the server processes due events.
    """
    for job in state.live_jobs.values():
        if job.state in ("preparing", "preempting"):
            if job.state_deadline_s is None:
                yield f"job {job.id} is {job.state} and has no deadline"
            elif now_s > job.state_deadline_s + grace_s:
                yield f"job {job.id} has been {job.state} since {job.changed_s}, now {now_s}"
        if job.state in ("starting", "running") and any(
            p.state == "ordered" and p.ordered_s is None for p in job.current_parts()
        ):
            yield f"job {job.id} is {job.state}, but not every part was prepared"
        idle = job.state in ("planning", "choosing", "waiting", "blocked")
        for part in job.unreleased_parts() if idle else ():
            if part.desired not in ("queued", "released"):
                yield f"job {job.id} is {job.state} and holds chips"
            if part.desired == "queued" and not job.in_site_queues:
                yield f"job {job.id} is in the queue of {part.cluster}, but not marked as queued"


def checks_agree(state: PoolState) -> Iterator[str]:
    """Invariant: a check that one site is ordered to make is awaited at the other, and the reverse."""
    ordered = {(name, target) for name, record in state.clusters.items() for target in record.to_check}
    awaited = {(source, name) for name, record in state.clusters.items() for source in record.checked_by}
    for source, target in sorted(ordered ^ awaited):
        yield f"the check that {source} reaches {target} is known at one of the two only"
    awaited_by_jobs = {(name, target) for name, record in state.clusters.items() for target in record.check_waits}
    for source, target in sorted(awaited_by_jobs - ordered):
        yield f"a job waits for the check that {source} reaches {target}, which is not ordered"


def within_capacity(state: PoolState) -> Iterator[str]:
    """Invariant 2: allocations of chips, storage and links stay within capacity, and the sums are right."""
    for name, record in state.clusters.items():
        parts = [part for part in record.parts.values() if part.allocated]
        chips, unheld = Counter[str](), Counter[str]()
        for part in parts:
            for group in part.chips:
                chips[group] += _own_chips(part, group)
                unheld[group] += 0 if part.held else _own_chips(part, group) - part.local_chips.get(group, 0)
        for group, amount in sorted(chips.items()):
            leaving = amount - record.active_chips(group)
            if amount - leaving > record.capacity(group):
                yield f"{name}: {amount - leaving} {group} allocated of {record.capacity(group)}"
        if +chips != Counter(record.allocated_chips) or +unheld != +Counter(record.unheld_chips):
            yield f"{name}: wrong sums {record.allocated_chips}, {record.unheld_chips}; expected {chips}, {unheld}"
        if sum(part.storage_bytes for part in parts) != record.allocated_bytes:
            yield f"{name}: the allocated storage does not add up to {record.allocated_bytes} bytes"
        if record.allocated_bytes > record.cluster.storage_bytes:
            yield f"{name}: {record.allocated_bytes} bytes allocated of {record.cluster.storage_bytes}"
    yield from _links_within_capacity(state)


def _links_within_capacity(state: PoolState) -> Iterator[str]:
    on_links = Counter[PoolResource]()
    for job in state.live_jobs.values():
        on_links.update(job.allocated_kbps)
    if +on_links != Counter(state.allocated_kbps):
        yield f"the allocated bandwidth is {dict(on_links)}, the state has {state.allocated_kbps}"
    for key, kbps in on_links.items():
        most = allocations.link_kbps(state.links[key].bandwidth_gbps) if key in state.links else 0
        if kbps > most:
            yield f"{key}: {kbps} kbit/s allocated of {most}"


def _own_chips(part: PartRecord, group: str) -> int:
    return part.chips[group] - part.borrowed.get(group, 0)


def acknowledged_jobs_exist(state: PoolState, job_ids: Iterable[str]) -> Iterator[str]:
    """Invariant 3: every acknowledged job that was not deleted exists."""
    for job_id in job_ids:
        if job_id not in state.jobs:
            yield f"job {job_id} was acknowledged and is missing"


def victims_have_lower_level(state: PoolState) -> Iterator[str]:
    """Invariant 4: every victim is preemptible and, unless it lends chips or is moved, of a lower level there."""
    for job in state.live_jobs.values():
        for one in job.victims:
            levels = state.clusters[one.cluster].cluster.priorities
            victim = state.jobs.get(one.job) if one.attempt else None
            if victim is None or victim.preemptor != job.id:
                continue
            mine, theirs = (levels.rank(levels.level(each.priority)) for each in (job, victim))
            if (theirs <= mine and not job.reclaims and not job.moves) or not victim.preemptible:
                yield f"job {job.id} preempts {victim.id}, which is not of a lower level at {one.cluster}"


def preemptions_are_joint(state: PoolState) -> Iterator[str]:
    """No victim is stopped before all sites are ready and its checkpoint is verified."""
    for job in state.live_jobs.values():
        if job.state == "preempting" and any(part.desired != "ready" for part in job.current_parts()):
            yield f"job {job.id} is preempting, but a part is past `ready`"
        for one in job.victims if job.state == "preempting" else ():
            victim = state.jobs.get(one.job) if one.attempt else None
            if victim is not None and victim.saved_step is not None and victim.preemptor == job.id:
                yield f"job {victim.id} was stopped before all sites of job {job.id} were ready"
    for victim in state.live_jobs.values():
        if victim.saved_step is None or victim.state != "stopping" or victim.rank_map is None:
            continue
        steps = {
            part.verified_checkpoint.step if part.verified_checkpoint else None for part in victim.training_parts()
        }
        if steps != {victim.saved_step}:
            yield f"job {victim.id} was stopped with checkpoints of steps {steps}"


def attempts_do_not_overlap(state: PoolState) -> Iterator[str]:
    """No two attempts of a job are committed while parts of both are unreleased."""
    for job in state.jobs.values():
        alive = {part.attempt for part in job.unreleased_parts() if part.committed}
        if len(alive) > 1:
            yield f"job {job.id}: attempts {sorted(alive)} overlap"


def records_are_consistent(state: PoolState) -> Iterator[str]:
    """The clusters list exactly the unreleased parts of the jobs, and an ended job runs nothing."""
    by_job = {(part.cluster, part.job, part.attempt) for job in state.jobs.values() for part in job.unreleased_parts()}
    by_cluster = {
        (name, part.job, part.attempt) for name, record in state.clusters.items() for part in record.parts.values()
    }
    for cluster, job_id, attempt in sorted(by_job ^ by_cluster):
        yield f"part {job_id}/{attempt} is in only one of job and cluster {cluster}"
    for job in state.jobs.values():
        yield from _job_maps_agree(state, job)


def _job_maps_agree(state: PoolState, job: JobRecord) -> Iterator[str]:
    if (job.state in TERMINAL_STATES) == (job.id in state.live_jobs):
        yield f"job {job.id} is {job.state}, which contradicts `live`"
    if job.state in TERMINAL_STATES and any(part.committed for part in job.unreleased_parts()):
        yield f"job {job.id} is {job.state}, but a part of it may run"
    if job.packed.key and state.ids_by_key.get((job.user, job.packed.key)) != job.id:
        yield f"job {job.id}: its key maps to another job"
    if job.preemptor is not None and job.preemptor not in state.jobs:
        yield f"job {job.id} is the victim of a missing job"


def chips_follow_checks(state: PoolState) -> Iterator[str]:
    """No chips are held for a job whose sites were asked for checks and have not passed them."""
    for job in state.live_jobs.values():
        record = job.preflight
        asked = record is not None and job.plan is not None and record.plan_id == job.plan.id
        if asked and record is not None and record.state != "passed" and job.state in ("preempting", "preparing"):
            yield f"job {job.id} is {job.state}, but its preflight {record.round} is {record.state}"


def use_agrees(state: PoolState) -> Iterator[str]:
    """The chips that count as used, by owner, cluster and user, are those that parts hold."""
    held = Counter[tuple[str, str, str]]()
    for name, record in state.clusters.items():
        for part in record.parts.values():
            own = sum(_own_chips(part, group) for group in part.chips) if part.allocated else 0
            if part.used_owner and own != part.used_chips:
                yield f"part {part.job}/{part.attempt} at {name} holds {own} chips, but {part.used_chips} count as used"
            held[part.used_owner, name, state.jobs[part.job].user] += part.used_chips
    counted = {key: one.num_chips for key, one in state.chip_use.held.items()}
    for key in sorted(held.keys() | counted.keys()):
        if held[key] != counted.get(key, 0):
            yield f"{counted.get(key, 0)} chips of {', '.join(key)} count as used, but {held[key]} are held"


def violations(state: PoolState, now_s: float, *, grace_s: float = 0.0, job_ids: Iterable[str] = ()) -> list[str]:
    """Return every violation of every invariant; empty if all hold."""
    return [
        *all_or_none(state, now_s, grace_s),
        *within_capacity(state),
        *use_agrees(state),
        *account_violations(state),
        *checks_agree(state),
        *acknowledged_jobs_exist(state, job_ids),
        *victims_have_lower_level(state),
        *preemptions_are_joint(state),
        *attempts_do_not_overlap(state),
        *records_are_consistent(state),
        *chips_follow_checks(state),
        *index_violations(state),
    ]

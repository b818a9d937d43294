"""`find_victims`: the victims whose chips would let a waiting job start, if its user agrees.

Victims must be `preemptible` and of a lower level than the job at each owner (`Cluster.priorities`); a site's
own jobs, if the owner's policy permits. A victim from the pool leaves all its sites, so it counts once, with
all chips it frees; but of one that can go on without those of its parts that have the chips (they only decode), these
parts alone are victims. Chosen greedily (lowest priority, then least work lost); then unneeded victims are dropped,
most expensive first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from isthmus.control.queries.accounts.lent_chips import LentChips, guaranteeing_project
from isthmus.control.state import allocations
from isthmus.control.state.indexes import PRIORITY_RANK
from isthmus.control.state.job_records import WAITING_STATES, ClusterVictim, JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.pool import Cluster
from isthmus.core.pool_resource import PoolResource


@dataclass(frozen=True, kw_only=True)
class VictimCandidate:
    """A job that could be preempted."""

    # The job at each cluster where it frees needed chips.
    victims: tuple[ClusterVictim, ...]
    # Needed chips that it frees.
    freed_chips: Mapping[PoolResource, int]
    unsaved_s: float
    # Rank of its priority; higher ranks are preempted first.
    priority_rank: int

    @property
    def cost(self) -> tuple[int, float, int, tuple[ClusterVictim, ...]]:
        """Sort key: lowest priority first, then least work lost."""
        chips = sum(self.freed_chips.values())
        return -self.priority_rank, self.unsaved_s * chips, chips, self.victims


def find_victims(state: PoolState, job: JobRecord) -> tuple[VictimCandidate, ...]:
    """Return the victims that a waiting job needs to start now; empty if no set of victims suffices."""
    if job.state not in WAITING_STATES or job.needs is None or not allocations.pool_can_hold(state, job):
        return ()
    lacking = _chip_shortage(state, job)
    return _choose(state, job, lacking, _candidates(state, job, lacking), lambda _: True) if lacking else ()


def find_borrowers(state: PoolState, job: JobRecord) -> tuple[VictimCandidate, ...]:
    """Return the jobs that hold lent chips which a waiting job needs to start now, within its project's guarantee.

    They may be of any level, but no project is brought below its own guarantee by more than the last job that it lends
    through. Empty if the job is not within a guarantee, or no set of such jobs suffices.
    """
    project = guaranteeing_project(state, job)
    if job.needs is None or not project or not allocations.pool_can_hold(state, job):
        return ()
    lacking = _chip_shortage(state, job)
    if not lacking:
        return ()
    names = dict.fromkeys(
        part.job
        for cluster in dict.fromkeys(key.cluster for key in lacking)
        for part in state.clusters[cluster].parts.values()
        if part.allocated
    )
    found = (_pool_candidate(state, state.jobs[name], job, lacking, by_level=False) for name in names)
    lent = LentChips.of(state, job, project)
    return _choose(
        state, job, lacking, (one for one in found if one is not None),
        lambda one: lent.take(one.victims[0].job, one.freed_chips),
    )  # fmt: skip


def _choose(
    state: PoolState,
    job: JobRecord,
    lacking: allocations.Amounts,
    candidates: Iterable[VictimCandidate],
    may_take: Callable[[VictimCandidate], bool],
) -> tuple[VictimCandidate, ...]:
    """Choose from the cheapest candidate on while chips are lacking, then drop those that are not needed."""
    sources = sorted(candidates, key=lambda one: one.cost)
    chosen = list[VictimCandidate]()
    for source in sources:
        left = _still_lacking(lacking, chosen)
        if not left:
            break
        if left.keys() & source.freed_chips.keys() and may_take(source):
            chosen.append(source)
    if _still_lacking(lacking, chosen) or not _within_inventory(state, job, chosen):
        return ()
    for source in sorted(chosen, key=lambda one: one.cost, reverse=True):
        fewer = [one for one in chosen if one is not source]
        if not _still_lacking(lacking, fewer) and _within_inventory(state, job, fewer):
            chosen = fewer
    return tuple(chosen)


def victims_suffice(state: PoolState, job: JobRecord, victims: Iterable[ClusterVictim]) -> bool:
    """Return whether a waiting job may preempt exactly `victims` and could then start."""
    if job.state not in WAITING_STATES or job.needs is None or not allocations.pool_can_hold(state, job):
        return False
    lacking, named = _chip_shortage(state, job), set(victims)
    if not lacking:
        return False
    known = [one for one in _candidates(state, job, lacking) if named.issuperset(one.victims)]
    complete = {at for one in known for at in one.victims} == named and not _still_lacking(lacking, known)
    return complete and _within_inventory(state, job, known)


def _chip_shortage(state: PoolState, job: JobRecord) -> allocations.Amounts:
    """Return the missing chips; empty if storage or links are missing too, which no victim can free."""
    short = allocations.missing_amounts(state, job.needs or {})
    return short if len(short) == len(allocations.chip_needs(short)) else {}


def _within_inventory(state: PoolState, job: JobRecord, sources: Sequence[VictimCandidate]) -> bool:
    """Return whether the inventory covers the job's chips beyond those that pool victims free."""
    for key, chips in allocations.chip_needs(job.needs or {}).items():
        record, group = state.clusters[key.cluster], key.name
        given = sum(one.freed_chips.get(key, 0) for one in sources if one.victims[0].attempt)
        if chips - given > record.capacity(group) - record.allocated_chips.get(group, 0):
            return False
    return True


def _still_lacking(lacking: Mapping[PoolResource, int], sources: Sequence[VictimCandidate]) -> allocations.Amounts:
    left = {key: n - sum(one.freed_chips.get(key, 0) for one in sources) for key, n in lacking.items()}
    return {key: n for key, n in left.items() if n > 0}


def _candidates(state: PoolState, job: JobRecord, lacking: Mapping[PoolResource, int]) -> Iterator[VictimCandidate]:
    """Yield every job that could be preempted at clusters with missing chips."""
    names = dict[str, None]()
    for cluster in dict.fromkeys(key.cluster for key in lacking):
        record = state.clusters[cluster]
        names |= dict.fromkeys(part.job for part in record.parts.values() if part.allocated)
        yield from _local_candidates(record, job, lacking)
    for name in names:
        found = _pool_candidate(state, state.jobs[name], job, lacking)
        if found is not None:
            yield from _apart(state.jobs[name], found)


def _apart(victim: JobRecord, whole: VictimCandidate) -> Iterator[VictimCandidate]:
    """Yield the parts of a candidate one by one where the victim goes on without all of them."""
    if not victim.may_go_on_without([one.cluster for one in whole.victims]):
        yield whole
        return
    for at in whole.victims:
        freed = {key: chips for key, chips in whole.freed_chips.items() if key.cluster == at.cluster}
        yield replace(whole, victims=(at,), freed_chips=freed, unsaved_s=0.0)


def _pool_candidate(
    state: PoolState, victim: JobRecord, job: JobRecord, lacking: Mapping[PoolResource, int], *, by_level: bool = True
) -> VictimCandidate | None:
    settled = victim.state in ("preparing", "starting", "running") and not victim.victims
    if not (settled and victim.preemptible and victim.preemptor is None and victim.id != job.id):
        return None
    gives, at, parts = dict[PoolResource, int](), list[ClusterVictim](), victim.remaining_parts()
    for part in parts:
        record = state.clusters[part.cluster]
        here = {PoolResource.chips(part.cluster, group): chips for group, chips in part.chips.items()}
        wanted = {key: chips for key, chips in here.items() if key in lacking}
        if not wanted:
            continue
        if not _holds_chips(part) or (by_level and not _has_lower_level(record.cluster, victim, job)):
            return None
        gives |= wanted
        at.append(ClusterVictim(cluster=part.cluster, job=victim.id, attempt=part.attempt))
    if not gives or not all(state.clusters[part.cluster].connected for part in parts):
        return None
    unsaved_s = max((part.unsaved_s for part in parts), default=0.0)
    return VictimCandidate(
        victims=tuple(sorted(at)),
        freed_chips=gives,
        unsaved_s=unsaved_s,
        priority_rank=PRIORITY_RANK[victim.priority],
    )


def _holds_chips(part: PartRecord) -> bool:
    return part.allocated and part.state in ("ordered", "queued", "prepared", "running")


def _has_lower_level(cluster: Cluster, victim: JobRecord, job: JobRecord) -> bool:
    """Return whether the victim has a lower level than the job at a cluster."""
    levels = cluster.priorities
    return levels.rank(levels.level(victim.priority)) > levels.rank(levels.level(job.priority))


def _local_candidates(
    record: ClusterRecord, job: JobRecord, lacking: Mapping[PoolResource, int]
) -> Iterator[VictimCandidate]:
    levels, name = record.cluster.priorities, record.cluster.name
    mine = levels.rank(levels.level(job.priority))
    for one in record.local_jobs.values():
        gives = {PoolResource.chips(name, group): chips for group, chips in one.chips.items()}
        gives = {key: chips for key, chips in gives.items() if key in lacking}
        if not (gives and one.running and one.preemptible and one.level in levels.levels):
            continue
        rank = levels.rank(one.level)
        if rank > mine:
            at = (ClusterVictim(cluster=name, job=one.name),)
            yield VictimCandidate(
                victims=at,
                freed_chips=gives,
                unsaved_s=one.unsaved_s,
                priority_rank=rank - mine + PRIORITY_RANK[job.priority],
            )

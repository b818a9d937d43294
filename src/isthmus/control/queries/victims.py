"""`offer`: the victims whose chips would let a waiting job start, if its user agrees.

Victims must be `preemptible` and of a lower level than the job at each owner (`Cluster.priorities`); a site's
own jobs, if the owner's policy permits. A victim from the pool leaves all its sites, so it counts once, with
all chips it frees. Chosen greedily (lowest priority, then least work lost); then unneeded victims are
dropped, most expensive first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.control.state import ledger
from isthmus.control.state.indexes import RANK
from isthmus.control.state.job_records import WAITING, JobRecord, State, VictimAt
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.pool import Cluster


@dataclass(frozen=True, kw_only=True)
class Source:
    """A job that could be preempted."""

    # The job at each cluster where it frees needed chips.
    at: tuple[VictimAt, ...]
    # Needed chips that it frees, by `CLUSTER/GROUP`.
    gives: Mapping[str, int]
    unsaved_s: float
    # Rank of its priority; higher ranks are preempted first.
    rank: int

    @property
    def cost(self) -> tuple[int, float, int, tuple[VictimAt, ...]]:
        """Sort key: lowest priority first, then least work lost."""
        chips = sum(self.gives.values())
        return -self.rank, self.unsaved_s * chips, chips, self.at


def offer(state: State, job: JobRecord) -> tuple[Source, ...]:
    """Return the victims that a waiting job needs to start now; empty if no set of victims suffices."""
    if job.state not in WAITING or job.needs is None or not ledger.holdable(state, job):
        return ()
    lacking = _lacking(state, job)
    if not lacking:
        return ()
    sources = sorted(_sources(state, job, lacking), key=lambda one: one.cost)
    chosen = list[Source]()
    for source in sources:
        left = _left(lacking, chosen)
        if not left:
            break
        if left.keys() & source.gives.keys():
            chosen.append(source)
    if _left(lacking, chosen) or not _within_inventory(state, job, chosen):
        return ()
    for source in sorted(chosen, key=lambda one: one.cost, reverse=True):
        fewer = [one for one in chosen if one is not source]
        if not _left(lacking, fewer) and _within_inventory(state, job, fewer):
            chosen = fewer
    return tuple(chosen)


def would_do(state: State, job: JobRecord, victims: Iterable[VictimAt]) -> bool:
    """Return whether a waiting job may preempt exactly `victims` and could then start."""
    if job.state not in WAITING or job.needs is None or not ledger.holdable(state, job):
        return False
    lacking, named = _lacking(state, job), set(victims)
    if not lacking:
        return False
    known = [one for one in _sources(state, job, lacking) if named.issuperset(one.at)]
    complete = {at for one in known for at in one.at} == named and not _left(lacking, known)
    return complete and _within_inventory(state, job, known)


def _lacking(state: State, job: JobRecord) -> dict[str, int]:
    """Return the missing chips; empty if storage or links are missing too, which no victim can free."""
    short = {key: n - ledger.free_of(state, key) for key, n in (job.needs or {}).items()}
    short = {key: n for key, n in short.items() if n > 0}
    return short if len(short) == len(ledger.chips_of(short)) else {}


def _within_inventory(state: State, job: JobRecord, sources: Sequence[Source]) -> bool:
    """Return whether the inventory covers the job's chips beyond those that pool victims free."""
    for key, chips in ledger.chips_of(job.needs or {}).items():
        cluster, _, group = key.partition("/")
        record = state.clusters[cluster]
        given = sum(one.gives.get(key, 0) for one in sources if one.at[0].attempt)
        if chips - given > record.capacity(group) - record.taken.get(group, 0):
            return False
    return True


def _left(lacking: Mapping[str, int], sources: Sequence[Source]) -> dict[str, int]:
    left = {key: n - sum(one.gives.get(key, 0) for one in sources) for key, n in lacking.items()}
    return {key: n for key, n in left.items() if n > 0}


def _sources(state: State, job: JobRecord, lacking: Mapping[str, int]) -> Iterator[Source]:
    """Yield every job that could be preempted at clusters with missing chips."""
    names = dict[str, None]()
    for cluster in dict.fromkeys(key.partition("/")[0] for key in lacking):
        record = state.clusters[cluster]
        names |= dict.fromkeys(part.job for part in record.parts.values() if part.promised)
        yield from _local(record, job, lacking)
    for name in names:
        found = _of_pool(state, state.jobs[name], job, lacking)
        if found is not None:
            yield found


def _of_pool(state: State, victim: JobRecord, job: JobRecord, lacking: Mapping[str, int]) -> Source | None:
    settled = victim.state in ("preparing", "starting", "running") and not victim.victims
    if not (settled and victim.preemptible and victim.victim_of is None and victim.id != job.id):
        return None
    gives, at, parts = dict[str, int](), list[VictimAt](), victim.present()
    for part in parts:
        record = state.clusters[part.cluster]
        here = {f"{part.cluster}/{group}": chips for group, chips in part.chips.items()}
        wanted = {key: chips for key, chips in here.items() if key in lacking}
        if not wanted:
            continue
        if not _takes(part) or not _below(record.cluster, victim, job):
            return None
        gives |= wanted
        at.append(VictimAt(cluster=part.cluster, job=victim.id, attempt=part.attempt))
    if not gives or not all(state.clusters[part.cluster].connected for part in parts):
        return None
    unsaved_s = max((part.unsaved_s for part in parts), default=0.0)
    return Source(at=tuple(sorted(at)), gives=gives, unsaved_s=unsaved_s, rank=RANK[victim.priority])


def _takes(part: PartRecord) -> bool:
    return part.promised and part.state in ("ordered", "queued", "prepared", "running")


def _below(cluster: Cluster, victim: JobRecord, job: JobRecord) -> bool:
    """Return whether the victim has a lower level than the job at a cluster."""
    levels = cluster.priorities
    return levels.rank(levels.level(victim.priority)) > levels.rank(levels.level(job.priority))


def _local(record: ClusterRecord, job: JobRecord, lacking: Mapping[str, int]) -> Iterator[Source]:
    levels, name = record.cluster.priorities, record.cluster.name
    mine = levels.rank(levels.level(job.priority))
    for one in record.local.values():
        gives = {f"{name}/{group}": chips for group, chips in one.chips.items()}
        gives = {key: chips for key, chips in gives.items() if key in lacking}
        if not (gives and one.running and one.preemptible and one.level in levels.levels):
            continue
        rank = levels.rank(one.level)
        if rank > mine:
            at = (VictimAt(cluster=name, job=one.name),)
            yield Source(at=at, gives=gives, unsaved_s=one.unsaved_s, rank=rank - mine + RANK[job.priority])

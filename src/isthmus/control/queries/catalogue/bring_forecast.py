"""What sites must bring of the catalogue before jobs can start there, and how long that should take. Read only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from isthmus.control.queries.catalogue.catalogue_versions import copy_at, missing_versions
from isthmus.control.state.catalogue_records import JobVersion
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.catalogue import NeededVersion
from isthmus.core.messages.site_fetch import ASSUMED_GBPS, SiteFetch
from isthmus.core.units import format_bytes, format_seconds


def site_fetches(
    state: PoolState, versions: Iterable[JobVersion], clusters: Iterable[str], job: JobRecord | None = None
) -> dict[str, SiteFetch]:
    """Return what each of `clusters` lacks of `versions`, and of the checkpoints of a `job` that has trained.

    Sites that lack nothing are left out.
    """
    wanted = tuple(versions)
    found = {}
    for name in clusters:
        lacks = _lacks_checkpoint(state, job, name)
        sizes = {"model": 0, "data": 0}
        for one in wanted:
            sizes["model" if one.everywhere else "data"] += _missing_bytes(state, name, one)
        if lacks or any(sizes.values()):
            gbps, measured = fetch_rate(state, name)
            found[name] = SiteFetch(
                model_bytes=sizes["model"],
                data_bytes=sizes["data"],
                gbps=gbps,
                measured=measured,
                lacks_checkpoint=lacks,
                link_gbps=_link_gbps(state, name, job.file_clusters if job else ()),
            )
    return found


def fetch_rate(state: PoolState, cluster: str) -> tuple[float, bool]:
    """Return the rate in Gbit/s at which a site fetches, and whether it was measured there."""
    record = state.clusters.get(cluster)
    if record is not None and record.fetch_gbps:
        return record.fetch_gbps, True
    return _link_gbps(state, cluster, ()), False


def unable_to_fetch(state: PoolState) -> set[str]:
    """Return the clusters whose agents bring no versions of the catalogue."""
    return {name for name, record in state.clusters.items() if record.copies is None}


def bring_seconds(state: PoolState, job: JobRecord) -> float:
    """Return how long the sites of the job's plan still need to bring what it uses; they bring it at once."""
    missing = missing_versions(state, job)
    return max((_seconds(state, name, lacking) for name, lacking in missing.items()), default=0.0)


def describe_bringing(state: PoolState, job: JobRecord) -> str:
    """Return what the sites of the job's plan bring, such as "brings 12.4 GiB to B, about 95.0 s"; "" for nothing."""
    parts = []
    for name, lacking in missing_versions(state, job).items():
        left = sum(_left_bytes(state, name, one) for one in lacking)
        parts.append(f"brings {format_bytes(left)} to {name}, about {format_seconds(_seconds(state, name, lacking))}")
    return "; ".join(parts)


def bring_times(state: PoolState, jobs: Iterable[JobRecord]) -> Mapping[str, float]:
    """Return the seconds of `bring_seconds` of the jobs that must wait for copies, by id."""
    return {job.id: seconds for job in jobs if job.versions and (seconds := bring_seconds(state, job)) > 0}


def _seconds(state: PoolState, cluster: str, lacking: Iterable[NeededVersion]) -> float:
    gbps, _ = fetch_rate(state, cluster)
    return sum(_left_bytes(state, cluster, one) for one in lacking) * 8 / 1e9 / gbps


def _left_bytes(state: PoolState, cluster: str, one: NeededVersion) -> int:
    held = copy_at(state, cluster, one.owner, one.version)
    return max(0, one.num_bytes - (held.num_bytes if held else 0))


def _missing_bytes(state: PoolState, cluster: str, one: JobVersion) -> int:
    entry, held = state.catalogue.get(one.key), copy_at(state, cluster, one.owner, one.version)
    record = entry.versions.get(one.version) if entry else None
    if record is None or (held is not None and held.complete):
        return 0
    return max(0, record.num_bytes - (held.num_bytes if held else 0))


def _lacks_checkpoint(state: PoolState, job: JobRecord | None, cluster: str) -> bool:
    """Return whether a job has trained at other sites only, whose disk this one does not share."""
    if job is None or not job.has_run or not job.file_clusters or cluster in job.file_clusters:
        return False
    return state.clusters[cluster].free_storage_bytes is not None


def _link_gbps(state: PoolState, cluster: str, sources: Iterable[str]) -> float:
    """Return the bandwidth of the fastest link to a cluster (from one of `sources` if there are any)."""
    known = set(sources)
    rates = [
        link.bandwidth_gbps
        for link in state.links.values()
        if link.target == cluster and (not known or link.source in known)
    ]
    return max(rates, default=ASSUMED_GBPS)

"""`sole_checkpoints`: the jobs whose checkpoints would be incomplete everywhere without a site."""

from __future__ import annotations

from isthmus.control.state.job_records import JobRecord, PoolState


def sole_checkpoints(state: PoolState, cluster: str) -> tuple[str, ...]:
    """Return the ids of jobs that have trained at `cluster`, have not ended, and need its storage to go on.

    Each part has copies at `checkpoints.copies` other sites of the last training, and the object store has all of them.
    A program of the user (`engine: command`) keeps its own files, of which nothing is known elsewhere. A site without
    storage of its own keeps nothing alone.
    """
    record = state.clusters.get(cluster)
    if record is None or record.free_storage_bytes is None:
        return ()
    return tuple(job.id for job in state.live_jobs.values() if _needs_site(state, job, cluster))


def _needs_site(state: PoolState, job: JobRecord, cluster: str) -> bool:
    if cluster not in job.file_clusters:
        return False
    config = job.spec.checkpoints
    if config.copy_store is not None:
        return False
    copies = config.copies if job.spec.engine == "isthmus" else 0
    stay = [one for one in job.file_clusters if one != cluster and _stays(state, one)]
    num_sites = max(job.num_file_clusters, len(job.file_clusters))
    return not stay or num_sites - len(stay) > copies


def _stays(state: PoolState, cluster: str) -> bool:
    """Return whether a site is in the pool and does not leave it."""
    record = state.clusters.get(cluster)
    return record is not None and (record.drain is None or not record.drain.leaves)

"""The end of a site's membership: nothing of it is left in the pool state but the histories of jobs."""

from __future__ import annotations

from isthmus.control.state.events import SiteLeft
from isthmus.control.state.job_records import PoolState
from isthmus.control.state.reconcile_log import forget_site


def admit_site_left(state: PoolState, event: SiteLeft) -> bool:
    """Return whether the site leaves and is empty; False for one that is unknown, or has parts yet."""
    record = state.clusters.get(event.cluster)
    leaves = record is not None and record.drain is not None and record.drain.leaves
    return record is not None and leaves and not record.parts


def remove_site(state: PoolState, event: SiteLeft) -> None:
    """Remove the record of the site, and what other records say of it."""
    name = event.cluster
    forget_site(state, name)
    state.invitations = {key: one for key, one in state.invitations.items() if one.joined != name}
    del state.clusters[name]
    for other in state.clusters.values():
        for of_pair in (other.to_check, other.check_waits, other.peer_results):
            of_pair.pop(name, None)
        other.checked_by.discard(name)
    for job in state.live_jobs.values():
        job.file_clusters = tuple(one for one in job.file_clusters if one != name)
    state.indexes.inventory_version += 1
    state.indexes.capacity_freed = True

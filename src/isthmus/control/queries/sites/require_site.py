"""`require_site_record`: the record of a site that an act names."""

from __future__ import annotations

from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.errors import NotFoundError


def require_site_record(state: PoolState, cluster: str) -> ClusterRecord:
    """Return the record of a site; raise `NotFoundError` if it has not joined."""
    record = state.clusters.get(cluster)
    if record is None:
        raise NotFoundError(f"no cluster '{cluster}' has joined the pool", hint="isthmus site list names them")
    return record

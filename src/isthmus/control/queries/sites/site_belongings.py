"""`site_belongings`: what a site has in the pool: what goes when it leaves, and what stays."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.views.site_views import Belonging


def site_belongings(state: PoolState, record: ClusterRecord) -> tuple[tuple[Belonging, ...], tuple[Belonging, ...]]:
    """Return what is removed with a site, and what the pool keeps of it.

    Histories of jobs, what their users have used, and the audit log are kept: others rely on them.
    """
    return tuple(_removed(state, record)), tuple(_kept(state, record))


def _removed(state: PoolState, record: ClusterRecord) -> Iterator[Belonging]:
    name = record.cluster.name
    yield Belonging(kind="site", name=name)
    if record.agent is not None:
        yield Belonging(kind="agent", name=record.agent.id[:12])
    for key, one in state.invitations.items():
        if one.joined == name:
            yield Belonging(kind="invitation", name=key)
    if record.copies:
        yield Belonging(kind="copies", name=f"{len(record.copies)} of versions of the catalogue")


def _kept(state: PoolState, record: ClusterRecord) -> Iterator[Belonging]:
    name = record.cluster.name
    jobs = [job for job in state.jobs.values() if any(cluster == name for _, cluster in (*job.parts, *job.past_ranks))]
    if jobs:
        yield Belonging(kind="history", name=f"of {len(jobs)} jobs that had parts at {name}")
        yield Belonging(kind="usage", name=f"of their {len({job.user for job in jobs})} users")

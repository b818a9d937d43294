"""`job_ranks`: the ranks of a job's plan, where their workers are, and the demands between their addresses."""

from __future__ import annotations

from isthmus.control.algorithms.rank_table import RankTable
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.errors import ConflictError
from isthmus.core.views.rank_views import RankView


def job_ranks(state: PoolState, job: JobRecord) -> tuple[RankView, ...]:
    """Return all ranks of a job in their order; those without a worker have no address.

    Raises `ConflictError` for a job without a plan.
    """
    if job.plan is None:
        raise ConflictError(
            f"job {job.id} is {job.state}: it has no plan, which gives it ranks",
            hint=f"see `isthmus show {job.id}`; `isthmus choose` takes a plan",
        )
    clusters = {name: state.clusters[name].cluster for name in job.plan.clusters if name in state.clusters}
    table = RankTable(job.plan, clusters)
    for part in job.current_parts():
        for worker in part.workers:
            table.place(worker)
    return table.views()

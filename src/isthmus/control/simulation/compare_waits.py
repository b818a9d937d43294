"""`compare_waits`: the waiting times of an owner's own users in the pool beside those on the owner's clusters alone.

Alone, the same jobs go through the server's own coordinator on a virtual clock, in a pool of this owner's clusters.
What is not known favours the owner alone, so that the pool does not look better than it is: its clusters begin the
month empty and never fail, and a job that has not started takes no time. A job is split into at most four stages,
each inside one cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.pool_outcome import JobOutcome, percentile
from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.simulation.traces.job_trace import TraceJob
from isthmus.core.chip import Chip, chip_catalogue
from isthmus.core.errors import InputError
from isthmus.core.pool import Cluster, Link, Pool
from isthmus.core.views.wait_views import OwnerWaits, WaitedJob, WaitedJobsPage, WaitFigures, WaitVerdict

MAX_COMPARED_JOBS = 100_000
"""Jobs of a month that are simulated."""
SLACK_S, SLACK_FACTOR = 60.0, 1.05
"""A mean or a 95th percentile is longer than another one beyond both: 60 s, and 5 percent more."""
ALONE_DELAYS = Delays(tick_interval_s=10.0)
_DAY_S = 86_400.0
_LEAST_RUN_S = 1.0
_MAX_DAYS_AFTER = 92.0


def compare_waits(
    page: WaitedJobsPage,
    month: str,
    clusters: Sequence[Cluster],
    links: Sequence[Link] = (),
    should_continue: Callable[[float, int], bool] | None = None,
) -> OwnerWaits:
    """Return the waits of a month's jobs in the pool and on the owner's `clusters` with the `links` between these.

    `should_continue(now_s, done)` is called on the way; after false, jobs that have not started count as never run
    alone. Raises `InputError` for more than `MAX_COMPARED_JOBS` jobs.
    """
    if len(page.jobs) > MAX_COMPARED_JOBS:
        raise InputError(
            f"owner '{page.owner}' has {len(page.jobs):,} jobs in {month}, more than the {MAX_COMPARED_JOBS:,} "
            "that are simulated",
            hint="list fewer `users` at the owner in the pool file",
        )  # fmt: skip
    jobs = [one for one in page.jobs if one.chips]
    own = [one for one in clusters if one.owner == page.owner]
    alone = _waits_alone([one for one in jobs if _fits(one, own)], own, links, should_continue)
    compared = [one for one in jobs if one.job in alone]
    pool = _figures(one.waited_s for one in compared)
    simulated = _figures(alone.values())
    num_open = sum(one.open for one in page.jobs)
    return OwnerWaits(
        owner=page.owner,
        month=month,
        final=page.month_over and not num_open,
        users=page.num_users,
        jobs=len(page.jobs),
        open=num_open,
        unsized=len(page.jobs) - len(jobs),
        compared=len(compared),
        never_alone=len(jobs) - len(compared),
        pool=pool,
        alone=simulated,
        pool_only=_figures(one.waited_s for one in jobs if one.job not in alone),
        verdict=wait_verdict(pool, simulated),
    )


def wait_verdict(pool: WaitFigures | None, alone: WaitFigures | None) -> WaitVerdict:
    """Return `worse` if the mean or the 95th percentile is longer in the pool, else `better` if one is shorter."""
    if pool is None or alone is None:
        return "no comparison"
    pairs = ((pool.mean_s, alone.mean_s), (pool.p95_s, alone.p95_s))
    if any(_is_longer(ours, theirs) for ours, theirs in pairs):
        return "worse"
    return "better" if any(_is_longer(theirs, ours) for ours, theirs in pairs) else "equal"


def _is_longer(one_s: float, other_s: float) -> bool:
    return one_s > max(other_s + SLACK_S, SLACK_FACTOR * other_s)


def _fits(job: WaitedJob, clusters: Iterable[Cluster]) -> bool:
    """Tell whether clusters have the chips of a job, of the kinds that it admits."""
    groups = (group for one in clusters for group in one.node_groups)
    return job.chips <= sum(group.num_chips for group in groups if not job.kinds or group.chip in job.kinds)


def _waits_alone(
    jobs: Sequence[WaitedJob],
    clusters: Sequence[Cluster],
    links: Sequence[Link],
    should_continue: Callable[[float, int], bool] | None,
) -> dict[str, float]:
    """Return the simulated waits of the jobs that are placed, by job."""
    if not jobs:
        return {}
    first_s = min(one.submitted_s for one in jobs)
    known = {group.chip for one in clusters for group in one.node_groups}
    trace = sorted((_trace_job(one, first_s, known) for one in jobs), key=lambda one: (one.submit_s, one.name))
    total_s = sum(one.run_s for one in trace) + _DAY_S
    until_s = trace[-1].submit_s + min(total_s, _MAX_DAYS_AFTER * _DAY_S)
    world = PoolSimulation(_pool_of(clusters, links), trace, delays=ALONE_DELAYS)
    world.run(should_continue, until_s)
    waits = ((one, _wait_alone(one, world.job_outcomes[one.job])) for one in jobs)
    return {one.job: waited_s for one, waited_s in waits if waited_s is not None}


def _trace_job(job: WaitedJob, first_s: float, known: set[str]) -> TraceJob:
    kinds = known.intersection(job.kinds)
    return TraceJob(
        name=job.job,
        owner=job.user,
        submit_s=job.submitted_s - first_s,
        run_s=max(_LEAST_RUN_S, job.ran_s),
        workers=job.chips,
        chip=kinds.pop() if len(kinds) == 1 else "",
        priority=job.priority,
    )


def _wait_alone(job: WaitedJob, outcome: JobOutcome) -> float | None:
    """Return how long a job waits alone, None if it is never placed; counted as the wait in the pool is.

    A job that is open or never started has been seen for so long only: its wait alone counts no further either.
    """
    if outcome.waited_s is None:
        return None
    if job.open or not job.started:
        return min(outcome.waited_s, job.waited_s + job.ran_s)
    if outcome.ended_s is None:
        return outcome.waited_s
    return max(0.0, outcome.ended_s - outcome.job.submit_s - outcome.job.run_s)


def _pool_of(clusters: Sequence[Cluster], links: Sequence[Link]) -> Pool:
    """Return a pool of clusters. Of chips only the model counts: not what it does, nor whether it is virtual."""
    names = {one.name for one in clusters}
    real = [
        one.model_copy(
            update={"node_groups": tuple(group.model_copy(update={"virtual": None}) for group in one.node_groups)}
        )
        for one in clusters
    ]
    catalogue = chip_catalogue()
    unknown = {group.chip for one in clusters for group in one.node_groups} - set(catalogue)
    pattern: Chip = next(iter(catalogue.values()))
    return Pool(
        clusters=tuple(real),
        links=tuple(link for link in links if {link.source, link.target} <= names),
        chips=tuple(pattern.model_copy(update={"name": name}) for name in sorted(unknown)),
    )


def _figures(waits_s: Iterable[float]) -> WaitFigures | None:
    ordered = sorted(waits_s)
    if not ordered:
        return None
    return WaitFigures(
        mean_s=sum(ordered) / len(ordered), median_s=percentile(ordered, 0.5), p95_s=percentile(ordered, 0.95)
    )

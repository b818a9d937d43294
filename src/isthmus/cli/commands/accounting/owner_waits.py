"""`owner_waits`: how long an owner's own users waited in a month, by the server, and alone, simulated here."""

from __future__ import annotations

import time

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.views.wait_views import OwnerWaits, WaitedJob, WaitedJobsPage

PAGE_SIZE = 1_000
PROGRESS_INTERVAL_S = 1.0
_DAY_S = 86_400.0


def owner_waits(env: CliEnvironment, client: ApiClient, owner: str, month: str) -> OwnerWaits:
    """Return the waits in the pool beside those alone; raise `NotFoundError` for an owner that lists no users."""
    from isthmus.control.simulation.compare_waits import compare_waits

    page = _all_pages(client, owner, month)
    pool = client.pool()
    clusters = [view.cluster for view in pool.clusters if view.cluster.owner == owner]
    return compare_waits(page, month, clusters, pool.known_links, _Progress(env, len(page.jobs)))


class _Progress:
    """Callback of the simulation: says once a second how far it is."""

    def __init__(self, env: CliEnvironment, num_jobs: int) -> None:
        self._env, self._num_jobs = env, num_jobs
        self._due_s = time.monotonic() + PROGRESS_INTERVAL_S

    def __call__(self, now_s: float, done: int) -> bool:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + PROGRESS_INTERVAL_S
            self._env.print_note(f"alone: day {now_s / _DAY_S:.1f}, {done} of {self._num_jobs} jobs done")
        return True


def _all_pages(client: ApiClient, owner: str, month: str) -> WaitedJobsPage:
    """Return all jobs of a month as one page; of more than are simulated, not all."""
    from isthmus.control.simulation.compare_waits import MAX_COMPARED_JOBS

    jobs: list[WaitedJob] = []
    page = client.waits(owner, month, limit=PAGE_SIZE)
    jobs += page.jobs
    while page.after is not None and len(jobs) <= MAX_COMPARED_JOBS:
        page = client.waits(owner, month, after=page.after, limit=PAGE_SIZE)
        jobs += page.jobs
    return page.model_copy(update={"jobs": tuple(jobs)})

"""`isthmus waits`: how long an owner's own users wait in the pool, and would have waited alone."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.client.api_client import ApiClient
from isthmus.core.units import format_seconds
from isthmus.core.views.wait_views import OwnerWaits, WaitedJob, WaitedJobsPage, WaitFigures

PANEL = "Pool"
PAGE_SIZE = 1_000
PROGRESS_INTERVAL_S = 1.0
_DAY_S = 86_400.0

commands = typer.Typer()


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus waits --owner hangzhou-lab --month 2027-01",
        "isthmus waits --owner hangzhou-lab --month 2027-01 --json | jq .verdict",
    ],
)
def waits(
    env: CliEnvironment,
    client: ApiClient,
    owner: Annotated[str, typer.Option(metavar="NAME", help="The owner whose own users are compared.")],
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="The month of submission, in UTC.")],
) -> None:
    """Compare how long an owner's own users waited in the pool with how long they would have waited alone.

    The server knows the jobs and their waits. This machine simulates the same jobs on the owner's clusters alone, with
    the server's own queue and placement. `users` of an owner are listed in the server's pool file.
    """
    from isthmus.control.simulation.compare_waits import compare_waits

    page = _all_pages(client, owner, month)
    pool = client.pool()
    clusters = [view.cluster for view in pool.clusters if view.cluster.owner == owner]
    progress = _Progress(env, len(page.jobs))
    found = compare_waits(page, month, clusters, pool.known_links, progress)
    env.answer(found, lambda: waits_table(found))


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


def waits_table(found: OwnerWaits) -> RenderableType:
    """Return the waits in the pool and alone, the jobs that are not compared, and the verdict."""
    figures = (
        (f"in the pool, {found.compared} jobs", found.pool),
        ("alone, the same jobs (simulated)", found.alone),
        (f"in the pool, {found.never_alone} jobs that alone would not have run", found.pool_only),
    )
    rows = [_row(name, one) for name, one in figures if one is not None]
    notes = [f"{found.open} jobs have not ended: their waits so far count"] if found.open else []
    notes += [f"{found.unsized} jobs never had a plan and are left out"] if found.unsized else []
    title = f"{found.owner} in {found.month}: {found.users} users, {found.jobs} jobs: {found.verdict}"
    return Group(
        Text(title if found.final or found.verdict == "no comparison" else f"{title} so far"),
        *([table("", ("waits", "mean", "median", "95 of 100"), rows, "mean|median|95 of 100")] if rows else []),
        *map(Text, notes),
    )


def _row(name: str, one: WaitFigures) -> tuple[str, ...]:
    return (name, *map(format_seconds, (one.mean_s, one.median_s, one.p95_s)))

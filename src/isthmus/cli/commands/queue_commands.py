"""Commands that show why a job waits and when it should start: queue, show."""

from __future__ import annotations

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.resolve_job import find_job_id

commands = typer.Typer()
PANEL = "Jobs"


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus queue",
        "isthmus queue --json | jq '.[] | {id, place, start_s, latest_s}'",
    ],
)
def queue(env: CliEnvironment, client: ApiClient) -> None:
    """List your waiting jobs: queue position, reason, expected start.

    An operator sees all users' jobs. `isthmus show JOB` shows the details.
    """
    found = client.queue()

    def show() -> object:
        from isthmus.cli.terminal.queue_tables import queue_table

        return queue_table(found, env.now())

    env.answer(found, show)


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus show my-job",
        "isthmus show my-job --json | jq '.queue.refused[] | {stage, owner, reason}'",
    ],
)
def show(env: CliEnvironment, client: ApiClient, job: JobArgument) -> None:
    """Show a job: where it runs, or missing resources, jobs ahead of it and expected start."""
    found = find_job_id(client, job)
    view, standing = client.job(found), client.queue_status(found)

    def shown() -> object:
        from isthmus.cli.terminal.queue_tables import job_page

        return job_page(view, standing, env.now())

    env.answer({"job": view, "queue": standing}, shown)

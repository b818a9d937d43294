"""Commands that show why a job waits and when it should start: queue, show."""

from __future__ import annotations

import typer

from isthmus.cli.client.api_client import Client
from isthmus.cli.client.resolve_job import find_id
from isthmus.cli.command import JobArgument, verb
from isthmus.cli.shell.shell import Shell

commands = typer.Typer()
PANEL = "Jobs"


@verb(
    commands,
    panel=PANEL,
    examples=[
        "isthmus queue",
        "isthmus queue --json | jq '.[] | {id, place, start_s, latest_s}'",
    ],
)
def queue(shell: Shell, client: Client) -> None:
    """List your waiting jobs: queue position, reason, expected start.

    An operator sees all users' jobs. `isthmus show JOB` shows the details.
    """
    found = client.queue()

    def show() -> object:
        from isthmus.cli.terminal.queue_tables import queue_table

        return queue_table(found, shell.now())

    shell.answer(found, show)


@verb(
    commands,
    panel=PANEL,
    examples=[
        "isthmus show my-job",
        "isthmus show my-job --json | jq '.queue.refused[] | {stage, owner, reason}'",
    ],
)
def show(shell: Shell, client: Client, job: JobArgument) -> None:
    """Show a job: where it runs, or missing resources, jobs ahead of it and expected start."""
    found = find_id(client, job)
    view, standing = client.job(found), client.standing(found)

    def shown() -> object:
        from isthmus.cli.terminal.queue_tables import job_page

        return job_page(view, standing, shell.now())

    shell.answer({"job": view, "queue": standing}, shown)

"""Commands that show why a job waits, when it should start and where its ranks are, and what was used."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.commands.follow_commands import read_history
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.history_text import next_steps, perplexity, result_place
from isthmus.cli.job_statistics import JobStatistics
from isthmus.client.api_client import ApiClient
from isthmus.client.resolve_job import find_job_id

commands = typer.Typer()
NEWEST_METRICS = 2000
"""Newest metrics in which `show` looks for the held-out loss."""
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
def show(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    num_events: Annotated[
        int, typer.Option("--events", metavar="N", min=0, max=1000, help="The newest N events of its history.")
    ] = 30,
) -> None:
    """Show a job: where it runs or why it waits, its history, held-out loss, result, and what to do next."""
    found = find_job_id(client, job)
    view, standing = client.job(found), client.queue_status(found)
    history = read_history(client, found)
    events = history.events[-num_events:] if num_events else ()
    stats = JobStatistics(client.metrics(found, limit=NEWEST_METRICS, newest=True).metrics)
    loss = stats.latest("validation_loss")
    record = {
        "job": view,
        "queue": standing,
        "history": list(events),
        "validation_loss": loss,
        "perplexity": perplexity(loss),
        "result": view.job.output if result_place(view) else None,
        "next": [command for command, _ in next_steps(view)],
    }

    def shown() -> object:
        from isthmus.cli.terminal.show_page import show_page

        return show_page(view, standing, stats, events, num_older=history.num_known - len(events), now_s=env.now())

    env.answer(record, shown)


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus ranks my-job",
        "isthmus ranks my-job --json | jq '.[0].addresses[0]'   (the master's address)",
        "isthmus ranks my-job --json | jq '.[].peers[].pairs[] | select(.gbps > 0)'   (for a network controller)",
    ],
)
def ranks(env: CliEnvironment, client: ApiClient, job: JobArgument) -> None:
    """List the ranks of a job: cluster, node, addresses, and the peers with which each exchanges messages.

    Each cluster has consecutive ranks; rank 0 is the master. A peer's `pairs` are demands between addresses.
    """
    found = client.ranks(find_job_id(client, job))

    def show() -> object:
        from isthmus.cli.terminal.ranks_table import ranks_table

        return ranks_table(found)

    env.answer(found, show)


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus usage",
        "isthmus usage --json | jq '.given'   (chip-hours by owner)",
        "isthmus usage --json | jq '.rows[] | {owner, cluster, user, chip_hours}'",
    ],
)
def usage(env: CliEnvironment, client: ApiClient) -> None:
    """Show the chip-hours that each owner has given and each user has taken.

    A user sees its own jobs, an owner its own clusters, an operator all of them. Chips count from their allocation
    until their site has released them. Amounts never fall: the difference of two readings is what was used between.
    """
    found = client.usage()

    def shown() -> object:
        from isthmus.cli.terminal.usage_table import usage_table

        return usage_table(found)

    env.answer(found, shown)

"""`isthmus waits`: how long an owner's own users wait in the pool, and would have waited alone."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import command
from isthmus.cli.commands.accounting.owner_waits import owner_waits
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.client.api_client import ApiClient
from isthmus.core.units import format_seconds
from isthmus.core.views.wait_views import OwnerWaits, WaitFigures

PANEL = "Pool"

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
    found = owner_waits(env, client, owner, month)
    env.answer(found, lambda: waits_table(found))


def waits_table(found: OwnerWaits) -> RenderableType:
    """Return the waits in the pool and alone, the jobs that are not compared, and the verdict."""
    rows = [_row(name, one) for name, one in found.figures.items()]
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

"""The command on the pool: pool."""

from __future__ import annotations

import typer

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient

commands = typer.Typer()


@command(commands, panel="Pool", examples=["isthmus pool", "isthmus pool --json | jq '.clusters[].free_chips'"])
def pool(env: CliEnvironment, client: ApiClient) -> None:
    """Show the clusters with their free chips, and the links."""
    view = client.pool()

    def show() -> object:
        from isthmus.cli.terminal.tables import pool_table

        return pool_table(view)

    env.answer(view, show)

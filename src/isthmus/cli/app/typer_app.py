"""The Typer app with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus import __version__
from isthmus.cli.commands import (
    calibrate_commands,
    chip_commands,
    export_commands,
    file_commands,
    follow_commands,
    job_commands,
    plan_commands,
    pool_commands,
    process_commands,
    queue_commands,
    report_commands,
    search_commands,
    server_commands,
    simulate_pool_commands,
)
from isthmus.cli.commands.catalogue import catalogue_commands
from isthmus.cli.commands.site import render_commands, site_commands
from isthmus.cli.demo import demo_command
from isthmus.cli.setup import doctor_command, init_command

app = typer.Typer(
    name="isthmus",
    help="Train one large model across clusters with different owners, chips and locations.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    invoke_without_command=True,
    epilog="Try [bold]isthmus demo[/bold] on this machine. Help: [bold]isthmus COMMAND --help[/bold].",
)
def isthmus(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Handle options before a command; without a command, print the help."""
    if version:
        typer.echo(f"isthmus {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


_COMMAND_MODULES = (
    demo_command,
    init_command,
    doctor_command,
    job_commands,
    queue_commands,
    follow_commands,
    report_commands,
    pool_commands,
    site_commands,
    catalogue_commands,
    search_commands,
    simulate_pool_commands,
    plan_commands,
    chip_commands,
    calibrate_commands,
    export_commands,
    process_commands,
    render_commands,
    server_commands,
    file_commands,
)
for module in _COMMAND_MODULES:
    app.add_typer(module.commands)

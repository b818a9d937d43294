"""`make_app`: the Typer app `isthmus` with its own options, without commands."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus import __version__


def make_app() -> typer.Typer:
    """Return the app that prints its version or help; the caller adds commands."""
    app = typer.Typer(
        name="isthmus",
        help="Train one large model across clusters with different owners, chips and locations.",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(
        invoke_without_command=True,
        epilog="Try [bold]isthmus demo[/bold] on this machine. Help: [bold]isthmus COMMAND --help[/bold].",
    )(isthmus)
    return app


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

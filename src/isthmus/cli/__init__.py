"""The command line. `main` is the console entry point `isthmus`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.cli.environment.cli_environment import CliEnvironment

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, *, env: CliEnvironment | None = None) -> int:
    """Run one command and return its exit status; see `isthmus.cli.app.entry.main`."""
    try:
        from isthmus.cli.app import entry, typer_app
    except KeyboardInterrupt:  # Ctrl-C while the commands are being imported
        return 130
    return entry.main(typer_app.app, arguments, env=env)

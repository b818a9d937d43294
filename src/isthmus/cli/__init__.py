"""The command line. `main` is the console entry point `isthmus`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.cli.environment.cli_environment import CliEnvironment

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, *, env: CliEnvironment | None = None) -> int:
    """Run one command and return its exit status; see `isthmus.cli.app.entry.main`."""
    try:
        from isthmus.cli.app import entry, find_command

        given = list(sys.argv[1:] if arguments is None else arguments)
        app = find_command.find_app(given if "_ISTHMUS_COMPLETE" not in os.environ else ())
    except KeyboardInterrupt:  # Ctrl-C while the commands are being imported
        return 130
    return entry.main(app, given, env=env)

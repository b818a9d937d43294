"""The command line. `main` is the console entry point `isthmus`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.cli.shell.shell import Shell

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, *, shell: Shell | None = None) -> int:
    """Run one command and return its exit status; see `isthmus.cli.app.entry.main`."""
    try:
        from isthmus.cli.app import app, entry
    except KeyboardInterrupt:  # Ctrl-C while the commands are being imported
        return 130
    return entry.main(app.app, arguments, shell=shell)

"""The command line: what people see. `main` is the console entry point `isthmus`."""

from __future__ import annotations

from isthmus.cli.entry import main

__all__ = ["main"]

"""`write_start`: what the worker's end of the courier runs, as the file `start.json` of a run folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.core.messages.worker_folder import write_atomically

PYTHON = "{python}"
"""Stands for the Python of the machine where a program runs."""

SCRIPTS = ("node_container", "container_start")
"""Scripts of `isthmus.core.process` that a program may name as `{NAME}`: the worker's end has them."""


def write_start(
    folder: Path, program: Sequence[str], environment: Mapping[str, str], *, positions: Sequence[int] = (),
    ends_with_hold: bool = True,
) -> None:  # fmt: skip
    """Write what is run for `folder`: `program`, with `environment` beside the variables of its machine.

    Paths of the folder become those of the copy there, and this Python, or a word `{python}`, the one that runs there.
    Of the cards that the scheduler gave the worker it sees those at `positions` (none: all). A program that does not
    end with its hold watches the folder in `ISTHMUS_HOLD` itself.
    """
    found = start_document(program, environment, positions=positions, ends_with_hold=ends_with_hold)
    write_atomically(folder / "start.json", json.dumps(found))


def start_document(
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    positions: Sequence[int] = (),
    ends_with_hold: bool = True,
) -> dict[str, object]:
    """Return the content of `start.json` (see `write_start`)."""
    return {
        "program": list(portable_words(program)), "environment": dict(environment), "ends_with_hold": ends_with_hold,
        "positions": ",".join(map(str, positions)),
    }  # fmt: skip


def portable_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command with `{python}` in place of this machine's Python."""
    return tuple(PYTHON if word == sys.executable else word for word in words)


def node_container_command(folder: Path) -> tuple[str, ...]:
    """Return the command that runs the container of `container.json` in `folder` on the worker's node."""
    return (PYTHON, "-I", "-S", "-B", *(f"{{{name}}}" for name in SCRIPTS), str(folder))

"""`write_start`: what the worker's end of the courier runs, as the file `start.json` of a run folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.core.messages.worker_folder import write_atomically

PYTHON = "{python}"
"""Stands for the Python of the machine where a program runs."""


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
    words = [PYTHON if word == sys.executable else word for word in program]
    return {
        "program": words, "environment": dict(environment), "ends_with_hold": ends_with_hold,
        "positions": ",".join(map(str, positions)),
    }  # fmt: skip

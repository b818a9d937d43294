"""`write_start`: what the worker's end of the courier runs, as the file `start.json` of a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.core.messages.worker_folder import write_atomically


def write_start(
    folder: Path, program: Sequence[str], environment: Mapping[str, str], *, positions: Sequence[int] = (),
    ends_with_hold: bool = True,
) -> None:  # fmt: skip
    """Write what is run for `folder`: `program`, with `environment` beside the variables of its machine.

    Paths of the folder become those of the copy there, and a word `{python}` the Python that runs there. Of the cards
    that the scheduler gave the worker it sees those at `positions` (none: all). A program that does not end with its
    hold watches the folder in `ISTHMUS_HOLD` itself.
    """
    found = {
        "program": list(program), "environment": dict(environment), "ends_with_hold": ends_with_hold,
        "positions": ",".join(map(str, positions)),
    }  # fmt: skip
    write_atomically(folder / "start.json", json.dumps(found))

"""The seam between the agent and whatever runs processes at a site: local, and later Slurm, Kubernetes, Ray.

An adapter knows workers only by their folders (`isthmus.core.worker.WorkerFolder`). It decides nothing: the
agent's machine says what to start and stop. Whoever implements `Adapter` proves it with
`isthmus.agent.conformance.check_adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from isthmus.core.base import Frozen


class WorkerStatus(Frozen):
    """What an adapter sees of one worker.

    `absent`: never started. `running`: a process of it may exist. `exited`: it was started, and not one of
    its processes is left; `exit_status` is then its status, or 128 + n where signal n ended it.
    """

    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None


class Adapter(Protocol):
    """Start, watch and stop workers. Every method returns at once; every one may be repeated.

    A folder is started at most once in its life, however often, and by however many agents one after the
    other, `start` is called. The state of a worker is read from its folder and from the site's scheduler,
    never from the adapter's memory: a new agent finds the workers of the one before it.
    """

    def inventory(self) -> Mapping[str, Sequence[str]]:
        """Return the card ids of each node group, neighbours of one node next to each other."""
        ...

    def start(self, folder: Path, cards: Sequence[str], command: Sequence[str] = ()) -> None:
        """Start the worker of `folder` on `cards`; `command` replaces the site's worker program.

        The program finds the card ids in `ISTHMUS_CARDS`, comma separated, and no token. Does nothing if
        the folder was started or stopped before. Raises `UnavailableError` where no process can be made.
        """
        ...

    def poll(self, folder: Path) -> WorkerStatus:
        """Return what is seen of the worker of `folder`."""
        ...

    def stop(self, folder: Path, *, force: bool) -> None:
        """Ask the worker of `folder` to end (SIGTERM), or end it (`force`, SIGKILL).

        A worker that was not started will never start after this.
        """
        ...

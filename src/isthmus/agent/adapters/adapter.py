"""The seam between the agent and whatever runs processes at a site: local, and later Slurm, Kubernetes, Ray.

It also shows the site's own queue to the agent, which stands for the pool's jobs there and keeps their order.

An adapter knows workers only by their folders (`WorkerFolder`). It decides nothing: the site machine says
what to start and stop. `check_adapter` is the conformance kit that every adapter passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from isthmus.core.base import Frozen
from isthmus.core.messages.agent_messages import QueueEntry


class WorkerStatus(Frozen):
    """What an adapter sees of one worker.

    `absent`: never started. `running`: a process of it may exist. `exited`: it was started, and not one of
    its processes is left; `exit_status` is then its status, or 128 + n where signal n ended it.
    """

    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None


class Move(Frozen):
    """Put `entry` directly behind `after`, or first where that is None; put it in if it is not there."""

    entry: QueueEntry
    after: QueueEntry | None = None


class Adapter(Protocol):
    """Start, watch and stop workers; show and order the site's queue.

    Every method returns at once; every one may be repeated.

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

    def queue(self) -> Sequence[QueueEntry]:
        """Return the site's queue as it stands, each entry once, first to start first."""
        ...

    def order(self, moves: Sequence[Move], gone: Sequence[QueueEntry] = ()) -> None:
        """Take `gone` out of the site's queue, then carry out `moves` one after the other.

        What is named by neither keeps its place. A move behind what is not there puts its entry last.
        Thousands of moves take no longer than a second. Raises `OSError` where the queue takes no change.
        """
        ...

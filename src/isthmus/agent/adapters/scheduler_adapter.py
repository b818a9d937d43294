"""`SchedulerAdapter`: the interface between the agent and a site's scheduler (local; later Slurm, Kubernetes, Ray).

It also gives the agent access to the site's own queue, where the agent orders the pool's jobs.

An adapter identifies workers only by their folders (`WorkerFolder`) and makes no decisions: the site machine
decides what to start and stop. Every adapter must pass `check_adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from isthmus.core.base_model import FrozenModel
from isthmus.core.messages.agent_messages import QueueEntry


class WorkerStatus(FrozenModel):
    """The observed state of one worker.

    `absent`: never started. `running`: a process of it may exist. `exited`: all of its processes have ended;
    `exit_status` is then the program's status, or 128 + n if signal n ended it.
    """

    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None


class QueueMove(FrozenModel):
    """Move or insert `entry` directly after `after` (None: to the front)."""

    entry: QueueEntry
    after: QueueEntry | None = None


class SchedulerAdapter(Protocol):
    """Start, watch and stop workers; read and reorder the site's queue.

    All methods are non-blocking and idempotent.

    `start` runs a folder's worker at most once, also when several agents in succession call it repeatedly.
    Worker state comes from the folder and the site's scheduler, never from the adapter's memory, so a new
    agent finds the workers of its predecessor.
    """

    def inventory(self) -> Mapping[str, Sequence[str]]:
        """Return the device ids of each node group; devices of one node are adjacent."""
        ...

    def start(self, folder: Path, device_ids: Sequence[str], command: Sequence[str] = ()) -> None:
        """Start the worker of `folder` on `device_ids`; `command` replaces the site's worker program.

        The program gets the comma-separated device ids in `ISTHMUS_CARDS` and no tokens. `WorkerLimits` in the folder
        are applied before the program starts (`core/process/confined_start.py`). No effect if the folder was started or
        stopped before. Raises `UnavailableError` if the process cannot be created.
        """
        ...

    def poll(self, folder: Path) -> WorkerStatus:
        """Return the status of the worker of `folder`."""
        ...

    def stop(self, folder: Path, *, force: bool) -> None:
        """Send SIGTERM, or with `force` SIGKILL, to the worker of `folder`.

        A worker that has not started can no longer start.
        """
        ...

    def read_queue(self) -> Sequence[QueueEntry]:
        """Return the site's queue in start order, without duplicates."""
        ...

    def reorder_queue(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        """Remove `removed` from the site's queue, then apply `moves` in order.

        Other entries keep their order. If `after` of a move is not in the queue, the entry goes last. A
        thousand moves must take at most one second. Raises `OSError` if the queue cannot be changed.
        """
        ...

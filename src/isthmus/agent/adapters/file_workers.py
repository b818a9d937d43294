"""`FileWorkers`: adapters whose workers start, stop and end by files of their folders, wherever the nodes are."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.adapters.local_queue_file import LocalQueueFile
from isthmus.agent.adapters.scheduler_adapter import QueueMove, SchedulerAdapter, WorkerStatus
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.process.rank_runner import take_folder

KILLED_STATUS = 137
_NEVER = "0"
"""Owner in the `pid` file of a folder that was stopped before its start."""


class FileWorkers(SchedulerAdapter):
    """Poll and stop workers of `rank_runner`, here or behind the courier; `queue` is the agent's own queue."""

    def __init__(self, queue: Path) -> None:
        self._queue = LocalQueueFile(queue)

    @abstractmethod
    def _is_asked_for(self, folder: Path) -> bool:
        """Return whether the start of a folder was asked for, and may have been made."""

    @abstractmethod
    def _has_lost(self, folder: Path) -> bool:
        """Return whether nothing of a worker without `exit` can run, by what was last seen of its scheduler."""

    def _can_no_more_start(self, folder: Path) -> bool:  # noqa: ARG002 - a start that nothing remembers is made again
        """Return whether a start that was asked for can no more be made."""
        return False

    def poll(self, folder: Path) -> WorkerStatus:
        """Return the status from the folder's files; a worker without `exit` has ended with what would write it."""
        folder = folder.absolute()
        if not (folder / "pid").exists():
            if not self._is_asked_for(folder) and not (folder / "pid").exists():
                return WorkerStatus(state="absent")
            if not self._can_no_more_start(folder) or not take_folder(str(folder), _NEVER):
                return WorkerStatus(state="running")
        status = WorkerFolder(folder).read_exit()
        if status is None and (_was_never_started(folder) or self._has_lost(folder)):
            status = WorkerFolder(folder).read_exit()
            status = KILLED_STATUS if status is None else status
            with contextlib.suppress(OSError):  # on a full disk the next poll derives the same status
                WorkerFolder(folder).write_exit(status)
        return WorkerStatus(state="running") if status is None else WorkerStatus(state="exited", exit_status=status)

    def stop(self, folder: Path, *, force: bool) -> None:
        """Leave the signal where the worker's runner looks for it; a folder without one can no longer start."""
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "pid").exists() and take_folder(str(folder), _NEVER):
            WorkerFolder(folder).write_exit(KILLED_STATUS)
        elif force or not (folder / "stop").exists():
            temporary = folder / f".stop.{os.getpid()}.{threading.get_ident()}"
            temporary.unlink(missing_ok=True)
            with temporary.open("x", encoding="ascii") as stream:  # follows no link that the worker has put there
                stream.write("KILL" if force else "TERM")
            temporary.replace(folder / "stop")

    def order(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        """Order the pool's parts in the agent's own queue; the scheduler's is never changed."""
        self._queue.reorder(moves, removed)


def _was_never_started(folder: Path) -> bool:
    """Return whether a folder was stopped before its start."""
    with contextlib.suppress(OSError, IndexError):
        return (folder / "pid").read_text(encoding="utf-8").split()[0] == _NEVER
    return False

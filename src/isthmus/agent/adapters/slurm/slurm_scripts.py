"""`SlurmScripts`: shell scripts that outlive the agent: those that keep holds and those that run steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.core.errors import UnavailableError


class SlurmScripts:
    """The scripts that this process has started, by the folder that each serves."""

    def __init__(self) -> None:
        self._children: dict[int, Path] = {}
        self._lock = threading.RLock()

    def start(self, folder: Path, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run `script` for `folder` in a session of its own; raise `UnavailableError` if no process can be started."""
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        try:
            pid = os.posix_spawnp(
                "sh", ["sh", "-c", script, "isthmus", *arguments], environment, file_actions=null, setsid=True
            )
        except OSError as error:
            raise UnavailableError(f"cannot start a process for {folder}: {error.strerror or error}") from error
        with self._lock:
            self._children[pid] = folder

    def runs_for(self, folder: Path) -> bool:
        """Return whether a script for `folder` still runs; reap those that have ended."""
        with self._lock:
            for pid in list(self._children):
                try:
                    ended, _ = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    ended = pid
                if ended:
                    del self._children[pid]
            return folder in self._children.values()

"""`RunLeaseWatch`: tells a rank when its site's lease has ended, so that it ends itself; and a thread that does so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.core.messages.run_lease import read_run_lease
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED
from isthmus.core.process.boot_clock import boot_time_s

READ_INTERVAL_S = 1.0
"""Interval at which the file is read again; the server waits several of them longer than the lease."""
_POLL_S = 0.2


class RunLeaseWatch:
    """The lease in file `path`; None: a rank without a lease. `clock` returns `boot_time_s`."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = boot_time_s) -> None:
        self._path, self._clock = path, clock
        self._until_s = self._read_s = float("-inf")

    @property
    def has_ended(self) -> bool:
        """Whether the rank must end now."""
        if self._path is None:
            return False
        now_s = self._clock()
        if now_s >= self._until_s or not 0 <= now_s - self._read_s < READ_INTERVAL_S:
            lease = read_run_lease(self._path)
            self._until_s, self._read_s = lease.until_s if lease else float("-inf"), now_s
        return now_s >= self._until_s


def end_with_run_lease(watch: RunLeaseWatch) -> None:
    """End this process with `RUN_LEASE_ENDED` as soon as the lease has ended."""

    def run() -> None:
        while not watch.has_ended:
            time.sleep(_POLL_S)
        os._exit(RUN_LEASE_ENDED)

    threading.Thread(target=run, name="isthmus-run-lease", daemon=True).start()

"""`RunLeaseWatch`: tells a rank when its site's lease has ended, so that it ends itself; and a thread that does so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.core.messages.run_lease import NO_LIMIT_S, RunLease, read_run_lease
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED
from isthmus.core.process.boot_clock import boot_time_s

READ_INTERVAL_S = 1.0
"""Interval at which the file is read again; the server waits several of them longer than the lease."""
FIRST_RENEWAL_S = 30.0
"""Longest wait for a renewal by an agent on another machine, which renews every few seconds while it has contact."""
_POLL_S = 0.2


class RunLeaseWatch:
    """The lease in file `path`; None: a rank without a lease. `clock` returns `boot_time_s`.

    A lease of another machine is counted by this one's clock: what was left of it at a renewal, from the last reading
    before that renewal was seen. How old a file is that has not changed yet, nothing here tells, so the rank must wait
    for a renewal before it begins (`wait_until_held`).
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = boot_time_s) -> None:
        self._path, self._clock = path, clock
        self._until_s = self._read_s = self._unchanged_s = float("-inf")
        self._seen: RunLease | None = None
        self._read()

    @property
    def has_ended(self) -> bool:
        """Whether the rank must end now."""
        if self._path is None:
            return False
        now_s = self._clock()
        if now_s >= self._until_s or not 0 <= now_s - self._read_s < READ_INTERVAL_S:
            self._read()
        return now_s >= self._until_s

    def wait_until_held(self, pause: Callable[[float], object] = time.sleep) -> bool:
        """Wait for the first renewal of a lease of another machine; return whether the rank may begin."""
        begun_s = self._clock()
        while self.has_ended:
            is_renewable = self._seen is not None and not self._seen.is_of_this_machine
            was_held = self._until_s > float("-inf")
            if not is_renewable or was_held or self._clock() - begun_s >= FIRST_RENEWAL_S:
                return False
            pause(_POLL_S)
        return True

    def _read(self) -> None:
        """Read the file; a change of a lease of another machine renews it."""
        if self._path is None:
            return
        self._read_s, lease = self._clock(), read_run_lease(self._path)
        if lease is None and (self._seen is None or self._seen.is_of_this_machine):
            self._until_s = float("-inf")
        if lease is None:  # of another machine's lease the time that was left goes on being counted
            return
        if lease.is_of_this_machine or lease.until_s >= NO_LIMIT_S:
            self._until_s = lease.until_s
        elif self._seen is not None and lease != self._seen:
            self._until_s = self._unchanged_s + lease.left_s
        self._seen, self._unchanged_s = lease, self._read_s


def end_with_run_lease(watch: RunLeaseWatch) -> None:
    """End this process with `RUN_LEASE_ENDED` as soon as the lease has ended."""

    def run() -> None:
        while not watch.has_ended:
            time.sleep(_POLL_S)
        os._exit(RUN_LEASE_ENDED)

    threading.Thread(target=run, name="isthmus-run-lease", daemon=True).start()

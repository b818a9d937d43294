"""`ChangeFeed`: the number of the event that last changed each job, for subscribers that poll by number.

Changes are coalesced per job: a subscriber reads the newest state only, so a slow one needs no buffer, and
one that reconnects needs only the last number it has seen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

from isthmus.core.process.subscribers import Subscribers

MAX_DELETIONS = 10_000
"""Number of deletions kept; a subscriber that missed more must list all jobs again."""


class Change(NamedTuple):
    """A job and the number of the event that last changed it; `deleted` is true once it was deleted."""

    number: int
    job_id: str
    deleted: bool = False


class ChangeFeed:
    """Change numbers of all jobs; thread-safe. Callbacks run in the changing thread and must not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_events: OrderedDict[str, int] = OrderedDict()
        self._job_users: dict[str, str] = {}
        self._deleted: deque[tuple[Change, str]] = deque(maxlen=MAX_DELETIONS)
        self._output_versions: dict[str, int] = {}
        self._subscribers = Subscribers()
        self.closed = False

    def record_submission(self, job_id: str, user: str) -> None:
        """Record a job's user; must come before its other changes."""
        with self._lock:
            self._job_users[job_id] = user

    def restore(self, users: Mapping[str, str], number: int) -> None:
        """Record the user of each job of a snapshot after event `number`, by id in the order of their submission."""
        with self._lock:
            self._job_users.update(users)
            self._last_events.update(dict.fromkeys(users, number))
        self._subscribers.notify()

    def record_change(self, job_id: str, number: int) -> None:
        """Record that event `number` changed a job."""
        with self._lock:
            self._last_events[job_id] = number
            self._last_events.move_to_end(job_id)
        self._subscribers.notify()

    def record_deletion(self, job_id: str, number: int) -> None:
        """Record that event `number` deleted a job."""
        with self._lock:
            self._last_events.pop(job_id, None)
            self._output_versions.pop(job_id, None)
            self._deleted.append((Change(number, job_id, deleted=True), self._job_users.pop(job_id, "")))
        self._subscribers.notify()

    def record_output(self, job_id: str) -> None:
        """Record that new metrics or logs of a job were stored."""
        with self._lock:
            self._output_versions[job_id] = self._output_versions.get(job_id, 0) + 1
        self._subscribers.notify()

    def close(self) -> None:
        """Close the feed, so that all subscriptions end."""
        self.closed = True
        self._subscribers.notify()

    def changes_after(self, after: int, limit: int, user: str | None = None) -> list[Change]:
        """Return the first `limit` jobs (of one user) last changed by an event above `after`, in order."""
        with self._lock:
            found = [
                Change(number, job_id)
                for job_id, number in _take_while_after(reversed(self._last_events.items()), after)
                if user in (None, self._job_users.get(job_id))
            ]
            gone = [change for change, of in self._deleted if change.number > after and user in (None, of)]
        return list(islice(sorted([*found, *gone]), limit))

    def latest_change(self, job_id: str) -> Change | None:
        """Return a job's last change, None if the feed has none."""
        with self._lock:
            if job_id in self._last_events:
                return Change(self._last_events[job_id], job_id)
            return next((change for change, _ in reversed(self._deleted) if change.job_id == job_id), None)

    def output_version(self, job_id: str) -> int:
        """Return how often metrics or logs of a job were stored; never decreases."""
        with self._lock:
            return self._output_versions.get(job_id, 0)

    def subscribe(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `callback` after every change until the context exits."""
        return self._subscribers.subscribe(callback)


def _take_while_after(items: Iterator[tuple[str, int]], after: int) -> Iterator[tuple[str, int]]:
    for job_id, number in items:
        if number <= after:
            return
        yield job_id, number

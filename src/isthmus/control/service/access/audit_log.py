"""`AuditLog`: the append-only, hash-chained record of acts on the pool: who did what to which object, from where.

An act that changes something is a `line` that its write takes along, so both are durable or neither. `record` is for
refusals, which change nothing: it never blocks and never fails. These records are bounded in rate per actor, queued,
and written by a thread; what exceeds the rate is counted in one record. Secrets do not belong in a record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from isthmus.control.service.auth import Caller
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import IsthmusError
from isthmus.core.views.access_views import MAX_DETAIL_CHARS, MAX_TEXT_CHARS, AuditRecord

RETENTION_S = 400 * 86400.0
"""How long records are kept; the stores refuse to delete those of the last 365 days."""
BURST = 200
"""Records of an actor at once."""
RATE_PER_S = 2.0
"""Records of an actor per second in the long run."""
MAX_ACTORS = 10_000
"""Actors whose rate is kept."""
MAX_QUEUED = 10_000
"""Records that wait for the store; later ones are counted as dropped."""
BATCH_WINDOW_S = 0.1
"""How long a record waits for others to share a write with."""

_log = logging.getLogger("isthmus.audit")


class RateOfActors:
    """A token bucket for each actor (ITU-T I.371), bounded in number. Pure: the clock is an argument."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._num_dropped: dict[str, int] = {}

    def admit(self, actor: str, now_s: float) -> bool:
        """Return whether a record of `actor` is within its rate; count it otherwise."""
        left, at_s = self._buckets.pop(actor, (float(BURST), now_s))
        left = min(float(BURST), left + max(0.0, now_s - at_s) * RATE_PER_S)
        admitted = left >= 1
        self._buckets[actor] = (left - 1 if admitted else left, now_s)
        if len(self._buckets) > MAX_ACTORS:
            self._buckets.popitem(last=False)
        if not admitted:
            known = actor in self._num_dropped or len(self._num_dropped) < MAX_ACTORS
            name = actor if known else "others"
            self._num_dropped[name] = self._num_dropped.get(name, 0) + 1
        return admitted

    def take_dropped(self, actor: str) -> int:
        """Return how many records of `actor` were dropped since the last call."""
        return self._num_dropped.pop(actor, 0)


class AuditLog:
    """Writes records to `store`; thread-safe. `clock` returns seconds since the epoch."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._rate = RateOfActors()
        self._lock = threading.Lock()
        self._queued: list[AuditRecord] = []
        self._num_lost = 0
        self._is_awaited = threading.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")

    def line(self, action: str, actor: Caller | None, subject: str = "", detail: str = "") -> AuditRecord:
        """Return the record of an act now, for the write that does it; long texts are cut."""
        return make_line(action, actor, self._clock(), subject, detail)

    def record(self, action: str, actor: Caller | None, subject: str = "", detail: str = "") -> None:
        """Record a refusal of `actor`, or something that changes nothing; long texts are cut."""
        self._add(self.line(action, actor, subject, detail))

    def record_stranger(self, action: str, address: str, subject: str = "", detail: str = "") -> None:
        """Record an act without a valid token; all strangers together have the rate of one actor."""
        self._add(_record(self._clock(), action, address=address, subject=subject, detail=detail))

    def record_failed_login(self, address: str, number: int) -> None:
        """Record `number` requests without a valid token from `address`, which are reported together."""
        self.record_stranger("login-failed", address, detail=f"{number} requests without a valid token")

    def prune(self) -> None:
        """Delete the records that are older than `RETENTION_S`."""
        now_s = self._clock()
        self._store.prune_audit(now_s - RETENTION_S, now_s)

    def flush(self) -> None:
        """Return once all records so far are stored."""
        self._is_awaited.set()
        self._executor.submit(self._write_queued).result(timeout=30)
        self._is_awaited.clear()

    def close(self) -> None:
        """Write what is queued; `record` must not be called afterwards."""
        self._is_awaited.set()
        self._executor.shutdown(wait=True)
        self._write_queued()

    def _add(self, made: AuditRecord) -> None:
        with self._lock:
            if not self._rate.admit(made.actor, made.at_s):
                return
            first = not self._queued
            dropped = self._rate.take_dropped(made.actor)
            if dropped:
                self._queue(made.model_copy(update={"action": "dropped", "subject": "", "detail": _dropped(dropped)}))
            self._queue(made)
            if first:
                self._executor.submit(self._write_soon)

    def _write_soon(self) -> None:
        self._is_awaited.wait(BATCH_WINDOW_S)
        self._write_queued()

    def _queue(self, record: AuditRecord) -> None:
        if len(self._queued) >= MAX_QUEUED:
            self._num_lost += 1
        else:
            self._queued.append(record)

    def _write_queued(self) -> None:
        with self._lock:
            queued, self._queued = self._queued, []
            lost, self._num_lost = self._num_lost, 0
        if not queued:
            return
        try:
            self._store.append_audit(queued)
        except IsthmusError as error:
            _log.warning("%d audit records are not stored: %s", len(queued) + lost, error)
        else:
            if lost:
                _log.warning("%d audit records were dropped: the store was too slow", lost)


def make_line(action: str, actor: Caller | None, now_s: float, subject: str = "", detail: str = "") -> AuditRecord:
    """Return the record that `actor` (None: the server) did `action` to `subject`; long texts are cut."""
    if actor is None:
        return _record(now_s, action, "server", subject=subject, detail=detail)
    return _record(now_s, action, actor.name, actor.role, actor.token_id, actor.address, subject, detail)


def _record(
    now_s: float, action: str, actor: str = "", role: str = "", token: str = "", address: str = "", subject: str = "",
    detail: str = "",
) -> AuditRecord:  # fmt: skip
    return AuditRecord.model_construct(
        at_s=now_s, action=action, actor=_bounded(actor), role=role, token=token, address=_bounded(address, 64),
        subject=_bounded(subject), detail=_bounded(detail, MAX_DETAIL_CHARS),
    )  # fmt: skip


def _bounded(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """Return `text` without control, format and line characters, cut to `most` characters."""
    if len(text) <= most and text.isprintable():
        return text
    plain = "".join(char if char.isprintable() else "?" for char in text[:most])
    return plain if len(text) <= most else plain[: most - 3] + "..."


def _dropped(number: int) -> str:
    return f"{number} records of this actor exceeded its rate"

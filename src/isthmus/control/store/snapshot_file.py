"""`SnapshotFile`: a file with the state after some event of the log, so that a start replays only later events.

A snapshot is only a cache: one from other code, other rules or another log, or that is damaged, is ignored,
and the log is replayed from its beginning. The body is JSON by the schema of the state's classes (`column_codec`):
reading one runs no code that the file names.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pydantic
import pydantic_core

import isthmus
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import encode_event
from isthmus.control.state.job_records import TERMINAL_STATES, PoolState
from isthmus.control.state.site_records import ClusterRecord
from isthmus.control.store.column_codec import ColumnCodec, column_codec
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.worker_folder import write_atomically

SNAPSHOT_FILE_NAME = "snapshot"
_DERIVED = frozenset({(PoolState, "live_jobs"), (ClusterRecord, "parts")})
"""Fields whose records other fields hold: the jobs that have not ended, and the parts of jobs by cluster."""
_log = logging.getLogger("isthmus.server")


class SnapshotFile:
    """The newest snapshot of one server, a file in `folder`; `code` identifies the code that writes and reads it."""

    def __init__(self, folder: Path, code: str | None = None) -> None:
        self.path, self._code = folder / SNAPSHOT_FILE_NAME, code or _code_fingerprint()

    def save(self, store: Store, number: int, body: bytes) -> None:
        """Save `body`, the state after event `number` as returned by `serialize_state`. I/O errors are only logged."""
        head = {"code": self._code, "event": _event_digest(store, number), "number": number}
        head |= {"sha256": hashlib.sha256(body).hexdigest()}
        try:
            write_atomically(self.path, json.dumps(head).encode() + b"\n" + body, 0o600)
        except OSError as error:
            _log.warning("could not write snapshot %s: %s", self.path, error)

    def load(self, store: Store, rules: CoordinatorConfig) -> tuple[int, Coordinator] | None:
        """Return the number of the snapshot's last event and its state, None without a valid snapshot."""
        try:
            line, _, body = self.path.read_bytes().partition(b"\n")
            head = json.loads(line)
            number = int(head["number"])
            fits = head["code"] == self._code and head["sha256"] == hashlib.sha256(body).hexdigest()
            if not fits or head["event"] != _event_digest(store, number):
                return None
            with gc_paused():
                state = restore_state(body)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, IsthmusError) as error:
            _log.warning("ignoring snapshot %s: %s", self.path, error)
            return None
        if state.config != rules:
            return None
        coordinator = Coordinator(rules)
        coordinator.state = state
        return number, coordinator


@dataclass(slots=True, kw_only=True)
class _StoredState:
    """The content of a snapshot."""

    # Keys of the unreleased parts at each cluster, in the order of `ClusterRecord.parts`.
    parts_by_cluster: dict[str, list[tuple[str, int]]]
    state: PoolState


def serialize_state(coordinator: Coordinator) -> bytes:
    """Return the state as JSON, as `SnapshotFile.save` expects it."""
    state = coordinator.state
    parts = {name: list(record.parts) for name, record in state.clusters.items()}
    with gc_paused():
        return pydantic_core.to_json(_codec().encode([_StoredState(parts_by_cluster=parts, state=state)]))


def restore_state(body: bytes) -> PoolState:
    """Return the state of `serialize_state`; raise `ValueError`, `TypeError` or `LookupError` for any other data."""
    (stored,) = _codec().decode(pydantic_core.from_json(body), 1)
    state: PoolState = stored.state
    state.live_jobs = {job_id: job for job_id, job in state.jobs.items() if job.state not in TERMINAL_STATES}
    for name, keys in stored.parts_by_cluster.items():
        record = state.clusters[name]
        record.parts = {(job, attempt): state.jobs[job].parts[attempt, name] for job, attempt in keys}
    return state


@functools.cache
def _codec() -> ColumnCodec:
    return column_codec(_StoredState, _DERIVED)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector while many objects are created, which it would scan repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _event_digest(store: Store, number: int) -> str:
    """Return the SHA-256 of event `number` of the log, "" if there is no such event."""
    for found, event in store.events(number - 1):
        return hashlib.sha256(encode_event(event).encode()).hexdigest() if found == number else ""
    return ""


@functools.cache
def _code_fingerprint() -> str:
    """Return a hash of the code of `control` and `core` and the versions of isthmus, Python and pydantic."""
    versions = [isthmus.__version__, platform.python_version(), pydantic.VERSION]
    found = hashlib.sha256(" ".join(versions).encode())
    package = Path(isthmus.__file__).parent
    for file in sorted([*package.glob("control/**/*.py"), *package.glob("core/**/*")]):
        if file.is_file():
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()

"""`SnapshotFile`: a file with the state after some event of the log, so that a start replays only later events.

A snapshot is only a cache: one from other code, other rules or another log, or that is damaged, is ignored,
and the log is replayed from its beginning. The body is JSON by the schema of the state's classes (`snapshot_codec`):
reading one runs no code that the file names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
from pathlib import Path

import pydantic

import isthmus
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import encode_event
from isthmus.control.state.job_records import PoolState
from isthmus.control.store.snapshot_codec import restore_state
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.gc_pause import collection_paused

SNAPSHOT_FILE_NAME = "snapshot"
_log = logging.getLogger("isthmus.server")


class SnapshotFile:
    """The newest snapshot of one server, a file in `folder`; `code` identifies the code that writes and reads it."""

    def __init__(self, folder: Path, code: str | None = None) -> None:
        self.path, self._code = folder / SNAPSHOT_FILE_NAME, code or code_fingerprint(Path(isthmus.__file__).parent)

    def save(self, store: Store, number: int, body: bytes) -> None:
        """Save `body`, the state after event `number` as returned by `serialize_state`. I/O errors are only logged."""
        head = {"code": self._code, "event": _event_digest(store, number), "number": number}
        head |= {"sha256": hashlib.sha256(body).hexdigest()}
        try:
            write_atomically(self.path, json.dumps(head).encode() + b"\n" + body, 0o600)
        except OSError as error:
            _log.warning("could not write snapshot %s: %s", self.path, error)

    def load(self, store: Store, rules: CoordinatorConfig) -> tuple[int, PoolState] | None:
        """Return the number of the snapshot's last event and its state, None without a valid snapshot."""
        try:
            line, _, body = self.path.read_bytes().partition(b"\n")
            head = json.loads(line)
            number = int(head["number"])
            fits = head["code"] == self._code and head["sha256"] == hashlib.sha256(body).hexdigest()
            if not fits or head["event"] != _event_digest(store, number):
                return None
            with collection_paused():
                state = restore_state(body)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, IsthmusError) as error:
            _log.warning("ignoring snapshot %s: %s", self.path, error)
            return None
        return (number, state) if state.config == rules else None


def _event_digest(store: Store, number: int) -> str:
    """Return the SHA-256 of event `number` of the log, "" if there is no such event."""
    for found, event in store.events(number - 1):
        return hashlib.sha256(encode_event(event).encode()).hexdigest() if found == number else ""
    return ""


@functools.cache
def code_fingerprint(package: Path) -> str:
    """Return a hash of the code of `control` and `core` of a package and the versions of it, Python and pydantic."""
    versions = [isthmus.__version__, platform.python_version(), pydantic.VERSION]
    found = hashlib.sha256(" ".join(versions).encode())
    for file in sorted([*package.glob("control/**/*.py"), *package.glob("core/**/*")]):
        # Bytecode that a later import adds is no change of the code.
        if file.suffix != ".pyc" and file.is_file():
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()

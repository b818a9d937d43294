"""`LogEndFile`: the last event that a server knows to be durable, in its state folder; a database may come back short.

`AuditEndFile` is the same for the last line of the audit log.

The file is one line of fixed length that each append overwrites in place, without a flush: it survives the server's
end, and after a crash of the machine it may name an earlier event, never a later one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from isthmus.control.store.log_chain import LogEnd
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.core.errors import FileError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.state_folder_lock import unwritable_folder_error

_CHECK_DIGITS = 16
_log = logging.getLogger("isthmus.server")


class LogEndFile:
    """The file `log-end` of a server's state folder: identity of its store, and the last event known to be durable."""

    name = "log-end"

    def __init__(self, state: Path) -> None:
        self.path = state / self.name
        self.store_id: str | None = None
        self.end = LogEnd(0, b"")
        self._descriptor: int | None = None
        self._load()

    def follow(self, store: SqlQueries[Any]) -> None:
        """Require that the store's log contains the event of the file, and keep the file at the log's end from now on.

        Raises `LogDamagedError` if the log lacks the event or has another one, `UnavailableError` if the file cannot be
        written.
        """
        self.store_id = store.store_id
        store.follow_end(self.end, self.save)

    def reset(self, store_id: str, end: LogEnd) -> None:
        """Replace the file durably, after a restore."""
        self.close()
        self.store_id, self.end = store_id, end
        self._create()

    def save(self, end: LogEnd) -> None:
        """Overwrite the event of the file; a failure is only logged, since the event itself is durable."""
        self.end = end
        if self._descriptor is None:
            self._create()
            self._descriptor = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(self._descriptor, self._line(), 0)
        except OSError as error:
            _log.warning("could not note number %d in %s: %s", end.number, self.path, error)

    def flush(self) -> None:
        """Flush the event of the file: no later one is needed to verify a log whose base is behind it."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close the file; may be called twice."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _create(self) -> None:
        try:
            write_atomically(self.path, self._line(), 0o600)
        except OSError as error:
            raise unwritable_folder_error(self.path.parent, error) from error

    def _line(self) -> bytes:
        text = f"isthmus-{self.name}-1 {self.store_id} {self.end.number:020} {self.end.digest.hex()}"
        return f"{text} {_checksum(text)}\n".encode()

    def _load(self) -> None:
        try:
            with self.path.open("rb") as file:
                text = file.read(1000).decode("ascii", errors="replace").rstrip("\n")
        except FileNotFoundError:
            return
        words, _, checksum = text.rpartition(" ")
        fields = words.split(" ")
        try:
            if checksum != _checksum(words) or len(fields) != 4 or fields[0] != f"isthmus-{self.name}-1":
                raise ValueError("it is no line of this form")
            self.store_id, self.end = fields[1], LogEnd(int(fields[2]), bytes.fromhex(fields[3]))
        except ValueError as error:
            raise FileError(
                "it does not say which event was acknowledged last",
                file=str(self.path),
                hint="run `isthmus server check`; if the log is complete, remove the file",
            ) from error


class AuditEndFile(LogEndFile):
    """The file `audit-end` of a server's state folder: the last line of the audit log known to be durable."""

    name = "audit-end"

    def follow(self, store: SqlQueries[Any]) -> None:
        """Require that the audit log contains the line of the file, and keep the file at the log's end from now on.

        Raises `AuditDamagedError` if the log lacks the line or has another one.
        """
        self.store_id = store.store_id
        store.follow_audit(self.end, self.save)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_CHECK_DIGITS]

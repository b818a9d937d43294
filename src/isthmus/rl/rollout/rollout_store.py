"""`RolloutStore`: the ledger's log and snapshots on disk, with the tokens of the trajectories.

An event is a JSON line, appended before the ledger handles it. A snapshot has the whole state and the tokens that may
still be trained on, and begins a new log; the former files go once it is complete. So a restart reads one snapshot and
the log after it. A last line that was cut is dropped: its event was not handled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.rl.ledger import rollout_events
from isthmus.rl.ledger.rollout_events import RolloutEvent, SampleKey

MAX_SNAPSHOT_BYTES = 4 << 30
_SNAPSHOT = "snapshot.json"
_EVENTS = {one.__name__: one for one in rollout_events.RolloutEvent.__args__}
_FORMAT = 1


class RolloutStore:
    """The files of one run's ledger in `folder`; a reader changes none.

    Raises `UnavailableError` where they cannot be written.
    """

    def __init__(self, folder: Path, *, is_reader: bool = False) -> None:
        self._folder, self._is_reader, self._number = folder, is_reader, 0
        self._log: Any = None

    @property
    def folder(self) -> Path:
        """Return where the files are."""
        return self._folder

    def read(self) -> tuple[dict[str, Any] | None, Iterator[tuple[RolloutEvent, dict[str, Any]]]]:
        """Return the newest snapshot, None without one, and the events since, each with what was stored beside it.

        Raises `InputError` for files of another format and damaged ones.
        """
        snapshot = None
        file = self._folder / _SNAPSHOT
        if file.exists():
            try:
                snapshot = json.loads(read_within(file, MAX_SNAPSHOT_BYTES))
                if snapshot["format"] != _FORMAT:
                    raise ValueError(f"format {snapshot['format']}")
                self._number = int(snapshot["log"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                hint = "restore the folder, or remove it: samples in flight are then lost"
                raise InputError(f"{file} is damaged: {error}", hint=hint) from error
        return snapshot, self._events()

    def append(self, event: RolloutEvent, **beside: Any) -> None:
        """Append an event, with values beside it."""
        line = json.dumps({"event": type(event).__name__, **asdict(event), "beside": beside}) + "\n"
        try:
            if self._log is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._log = self._path(self._number).open("a", encoding="utf-8")
            self._log.write(line)
            self._log.flush()
        except OSError as error:
            raise UnavailableError(f"cannot write {self._folder}: {error.strerror}") from error

    def sync(self) -> None:
        """Let all that was appended survive the machine."""
        if self._log is not None:
            os.fsync(self._log.fileno())

    def snapshot(self, content: dict[str, Any]) -> None:
        """Store the whole state and begin a new log."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = self._number + 1
            self._path(number).write_text("", encoding="utf-8")
            write_atomically(self._folder / _SNAPSHOT, json.dumps({"format": _FORMAT, "log": number, **content}))
            self.close()
            self._path(self._number).unlink(missing_ok=True)
            self._number = number
        except OSError as error:
            raise UnavailableError(f"cannot write {self._folder}: {error.strerror}") from error

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _path(self, number: int) -> Path:
        return self._folder / f"events-{number}.jsonl"

    def _events(self) -> Iterator[tuple[RolloutEvent, dict[str, Any]]]:
        path = self._path(self._number)
        if not path.exists():
            return
        whole = 0
        with path.open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                yield _event(line, path)
                whole += len(line)
        if whole < path.stat().st_size and not self._is_reader:
            os.truncate(path, whole)


def _event(line: bytes, path: Path) -> tuple[RolloutEvent, dict[str, Any]]:
    try:
        values = json.loads(line)
        beside, kind = values.pop("beside"), _EVENTS[values.pop("event")]
        if "sample" in values:
            values["sample"] = SampleKey(*values["sample"])
        return kind(**values), beside
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error!r}", hint="restore it, or remove the folder") from error

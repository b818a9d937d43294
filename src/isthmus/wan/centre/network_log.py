"""`NetworkLog`: the events of a decision centre or of a domain's controller on disk, each before its answer is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import FileError, UnavailableError

Event = TypeVar("Event", bound=FrozenModel)

LOG_FILE = "events.jsonl"
MAX_LOG_BYTES = 2**30
"""Size from which nothing new is taken until the process is started again, which drops what has ended."""
MAX_EVENT_BYTES = 2**21


class NetworkLog(Generic[Event]):
    """The log of events of `model` in `folder`. A line that a crash has cut is dropped: its answer was never sent."""

    def __init__(self, folder: Path, model: type[Event]) -> None:
        """Raise `UnavailableError` if the folder cannot be written."""
        self._model = model
        self.file = folder / LOG_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._num_bytes = self._cut_end()
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def is_full(self) -> bool:
        """Whether only what ends paths may still be added."""
        return self._num_bytes >= MAX_LOG_BYTES

    def read(self) -> Iterator[Event]:
        """Yield all events; raise `FileError` with the line of one that is damaged."""
        with self.file.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_EVENT_BYTES), b""), start=1):
                try:
                    yield self._model.model_validate_json(line)
                except ValidationError as error:
                    raise FileError(
                        "is no event of this log",
                        file=str(self.file),
                        line=number,
                        hint="restore the file from a copy: without it, what was promised would be forgotten",
                    ) from error

    def append(self, event: Event) -> None:
        """Add an event; it is on disk on return. Raise `UnavailableError` if it cannot be written."""
        line = event.model_dump_json(by_alias=True).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(28, "No space left on device")
            os.fdatasync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._num_bytes)
            raise self._unwritable(error) from error
        self._num_bytes += len(line)

    def replace(self, events: Sequence[Event]) -> None:
        """Put other events in the place of all, atomically."""
        temporary = self.file.with_suffix(".new")
        try:
            with temporary.open("wb") as stream:
                for event in events:
                    stream.write(event.model_dump_json(by_alias=True).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o600)
            temporary.replace(self.file)
            os.close(self._descriptor)
            self._descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            self._num_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _cut_end(self) -> int:
        """Remove an unfinished last line; return the size."""
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, MAX_EVENT_BYTES, max(0, size - MAX_EVENT_BYTES))
        end = size - len(tail) + tail.rfind(b"\n") + 1
        if end != size:
            os.ftruncate(self._descriptor, end)
        return end

    def _unwritable(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"cannot write {self.file}: {error.strerror}", hint="free space, or choose another state folder"
        )

"""What workers wrote and the server has not stored yet: metrics lines and log bytes, in bounded batches.

How far each file was taken over is kept beside it in `sent.json`, advanced only after the server answered.
An answer that was lost leads to the same bytes again; the server drops what it has.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from isthmus.core.base import Frozen, Index
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder

_BATCH_BYTES = 512 * 1024
"""Most bytes of metrics and logs in one report."""

_log = logging.getLogger("isthmus.agent")


class Sent(Frozen):
    """Bytes of a worker's files that the server has stored."""

    metrics: Index = 0
    log: Index = 0


@dataclass
class Batch:
    """What one report carries, and how far each folder will be once it is stored."""

    metrics: list[StepMetrics] = field(default_factory=list)
    logs: list[LogChunk] = field(default_factory=list)
    positions: dict[Path, Sent] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def full(self) -> bool:
        """Whether something may have been left for the next batch."""
        return self.num_bytes >= _BATCH_BYTES


class Outbox:
    """Reads the rank folders under `runs` (`<job>/<attempt>/rank-<r>`)."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._sent: dict[Path, Sent] = {}

    def collect(self) -> Batch:
        """Return the next batch, without advancing; `stored` advances."""
        batch = Batch()
        for folder in sorted(self._runs.glob("*/*/rank-*")):
            if batch.full:
                break
            if not folder.parent.name.isdecimal():  # somebody's copy of an attempt
                continue
            sent = self._position(folder)
            metrics = self._take_metrics(folder, sent.metrics, batch)
            log = self._take_log(folder, sent.log, batch)
            if (metrics, log) != (sent.metrics, sent.log):
                batch.positions[folder] = Sent(metrics=metrics, log=log)
        return batch

    def stored(self, batch: Batch) -> None:
        """Note that the server has `batch` on disk.

        Where a full disk keeps no note, this life of the agent knows, and the next one sends the bytes again.
        """
        for folder, sent in batch.positions.items():
            self._sent[folder] = sent
            try:
                temporary = folder / "sent.tmp"
                temporary.write_text(sent.model_dump_json(), encoding="utf-8")
                temporary.replace(folder / "sent.json")
            except OSError as error:
                _log.warning("%s: %s", folder, error)

    def drained(self, attempt: Path) -> bool:
        """Tell whether the server has everything that the workers of an attempt's folder wrote."""
        return all(self._is_drained(folder) for folder in attempt.glob("rank-*"))

    def _is_drained(self, folder: Path) -> bool:
        sent = self._position(folder)
        ours = WorkerFolder(folder)
        return sent.log >= _size(ours.log) and sent.metrics >= _size(ours.metrics)

    def _position(self, folder: Path) -> Sent:
        if folder not in self._sent:
            try:
                text = (folder / "sent.json").read_text(encoding="utf-8")
                self._sent[folder] = Sent.model_validate_json(text)
            except (FileNotFoundError, ValidationError):
                self._sent[folder] = Sent()
        return self._sent[folder]

    def _take_metrics(self, folder: Path, offset: int, batch: Batch) -> int:
        """Add whole lines from byte `offset` on; return the byte behind the last one taken."""
        ended = WorkerFolder(folder).exit.exists()
        for line in _lines(WorkerFolder(folder).metrics, offset):
            if batch.full or not (line.endswith(b"\n") or ended):
                break
            offset += len(line)
            batch.num_bytes += len(line)
            try:
                batch.metrics.append(StepMetrics.model_validate_json(line))
            except ValidationError as error:
                _log.warning("%s: a line is not metrics: %s", folder, error.errors()[0]["msg"])
        return offset

    def _take_log(self, folder: Path, offset: int, batch: Batch) -> int:
        room = _BATCH_BYTES - batch.num_bytes
        file = WorkerFolder(folder).log
        if room <= 0 or _size(file) <= offset:
            return offset
        ended = WorkerFolder(folder).exit.exists()
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(room)
            more = not ended or bool(stream.read(1))
        if more:
            data = data[: len(data) - _unfinished(data)]
        if not data:
            return offset
        job, attempt, rank = folder.parts[-3], int(folder.parts[-2]), int(folder.name.removeprefix("rank-"))
        text = data.decode("utf-8", errors=_SAME_LENGTH)
        batch.logs.append(LogChunk(job=job, attempt=attempt, rank=rank, offset=offset, text=text))
        batch.num_bytes += len(data)
        return offset + len(data)


_SAME_LENGTH = "isthmus-question-mark-a-byte"


def _question_marks(error: UnicodeError) -> tuple[str, int]:
    """Replace each byte that is not UTF-8 by one `?`, so that offsets in text and file stay equal."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "?" * (error.end - error.start), error.end


codecs.register_error(_SAME_LENGTH, _question_marks)


def _unfinished(data: bytes) -> int:
    """Return how many bytes at the end begin a character that is not complete yet (0 to 3)."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    decoder.decode(data[-4:])
    return len(decoder.getstate()[0])


def _lines(path: Path, offset: int) -> Iterator[bytes]:
    if _size(path) <= offset:
        return
    with path.open("rb") as stream:
        stream.seek(offset)
        yield from stream


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

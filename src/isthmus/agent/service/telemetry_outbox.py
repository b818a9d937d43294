"""Queue of worker metrics and log bytes that the server has not stored yet, read in bounded batches.

`sent.json` in each worker folder records the acknowledged offsets and advances only after the server's
response. After a lost response the same bytes are sent again; the server drops duplicates.

Workers run programs of users and may write anything into their folders: a line counts if it is metrics of the folder's
own rank and of bounded size, folders take turns, and links and pipes are not followed.
"""

from __future__ import annotations

import codecs
import logging
import stat
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, open_regular

MAX_BATCH_BYTES = 512 * 1024
"""Maximum bytes of metrics and logs in one report, unless one line of metrics is longer."""
MAX_LINE_BYTES, MAX_LINE_VALUES = 2 << 20, 100_000
"""Longest line of metrics, and most values of one: a report with one line more is within the server's limits."""
_MAX_OFFSETS_BYTES = 1024
_VALUE_MARKS = (b",", b"[", b"{")

_log = logging.getLogger("isthmus.agent")


class SentOffsets(FrozenModel):
    """Byte offsets of a worker's files up to which the server has stored them."""

    metrics: NonNegativeInt = 0
    log: NonNegativeInt = 0


@dataclass
class TelemetryBatch:
    """The telemetry of one report."""

    metrics: list[StepMetrics] = field(default_factory=list)
    logs: list[LogChunk] = field(default_factory=list)
    # Offsets of each worker folder once the server has stored this batch.
    offsets: dict[Path, SentOffsets] = field(default_factory=dict)
    num_bytes: int = 0
    max_bytes: int = MAX_BATCH_BYTES

    @property
    def full(self) -> bool:
        """Whether the size limit was reached, so that more data may remain."""
        return self.num_bytes >= self.max_bytes


class TelemetryOutbox:
    """Reads the rank folders under `runs` (`<job>/<attempt>/rank-<r>`)."""

    def __init__(self, runs: Path, *, max_batch_bytes: int = MAX_BATCH_BYTES) -> None:
        self._runs, self._max_batch_bytes = runs, max_batch_bytes
        self._offsets: dict[Path, SentOffsets] = {}
        self._last: Path | None = None
        self._warned: set[Path] = set()

    def collect(self) -> TelemetryBatch:
        """Return the next batch; `acknowledge` advances the offsets.

        After a full batch the next one begins with the folder behind the last, so that no worker holds up others.
        """
        batch = TelemetryBatch(max_bytes=self._max_batch_bytes)
        folders = [one for one in sorted(self._runs.glob("*/*/rank-*")) if one.parent.name.isdecimal()]
        first = 0 if self._last is None else bisect_right(folders, self._last)
        self._last = None
        for folder in (*folders[first:], *folders[:first]):
            sent = self._sent_offsets(folder)
            metrics = self._add_metrics(folder, sent.metrics, batch)
            log = self._add_log(folder, sent.log, batch)
            if (metrics, log) != (sent.metrics, sent.log):
                batch.offsets[folder] = SentOffsets(metrics=metrics, log=log)
            if batch.full:
                self._last = folder
                break
        return batch

    def acknowledge(self, batch: TelemetryBatch) -> None:
        """Record that the server has stored `batch`.

        If a full disk prevents the record, only this process knows; the next one sends the bytes again.
        """
        for folder, sent in batch.offsets.items():
            self._offsets[folder] = sent
            try:
                _replace_file(folder / "sent.json", sent.model_dump_json())
            except OSError as error:
                self._warn_once(folder, f"cannot note what the server has stored: {error}")

    def forget(self, attempt: Path) -> None:
        """Forget what was sent of an attempt whose folder is removed: another part may get the same one."""
        for folder in [one for one in self._offsets if one.parent == attempt]:
            del self._offsets[folder]

    def is_attempt_drained(self, attempt: Path) -> bool:
        """Return whether the server has stored all output of the workers in folder `attempt`."""
        return all(self._is_folder_drained(folder) for folder in attempt.glob("rank-*"))

    def _is_folder_drained(self, folder: Path) -> bool:
        sent = self._sent_offsets(folder)
        worker = WorkerFolder(folder)
        return sent.log >= _size_bytes(worker.log_path) and sent.metrics >= _size_bytes(worker.metrics_path)

    def _sent_offsets(self, folder: Path) -> SentOffsets:
        if folder not in self._offsets:
            try:
                with open_regular(folder / "sent.json") as stream:
                    self._offsets[folder] = SentOffsets.model_validate_json(stream.read(_MAX_OFFSETS_BYTES))
            except (OSError, ValidationError):
                self._offsets[folder] = SentOffsets()
        return self._offsets[folder]

    def _add_metrics(self, folder: Path, offset: int, batch: TelemetryBatch) -> int:
        """Add complete lines from byte `offset` on; return the new offset."""
        ended = WorkerFolder(folder).exit_path.exists()
        for line in _lines_from(WorkerFolder(folder).metrics_path, offset):
            if batch.full or not (line.endswith(b"\n") or ended or len(line) == MAX_LINE_BYTES):
                break
            offset += len(line)
            batch.num_bytes += len(line)
            try:
                batch.metrics.append(_parse_metrics(folder, line))
            except ValueError as error:
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                self._warn_once(folder, f"skipped a malformed metrics line: {reason}")
        return offset

    def _warn_once(self, folder: Path, problem: str) -> None:
        """Log the first problem of a worker's folder: the worker can make any number of them."""
        if folder not in self._warned:
            self._warned.add(folder)
            _log.warning("%s: %s; further problems of this folder are not logged", folder, problem)

    def _add_log(self, folder: Path, offset: int, batch: TelemetryBatch) -> int:
        left_bytes = batch.max_bytes - batch.num_bytes
        file = WorkerFolder(folder).log_path
        if left_bytes <= 0 or _size_bytes(file) <= offset:
            return offset
        ended = WorkerFolder(folder).exit_path.exists()
        with open_regular(file) as stream:
            stream.seek(offset)
            data = stream.read(left_bytes)
            more = not ended or bool(stream.read(1))
        if more:
            data = data[: len(data) - _num_incomplete_bytes(data)]
        if not data:
            return offset
        job, attempt, rank = _rank_of(folder)
        text = data.decode("utf-8", errors=_BYTEWISE_REPLACE)
        batch.logs.append(LogChunk(job=job, attempt=attempt, rank=rank, offset=offset, text=text))
        batch.num_bytes += len(data)
        return offset + len(data)


_BYTEWISE_REPLACE = "isthmus-question-mark-a-byte"


def _replace_bytewise(error: UnicodeError) -> tuple[str, int]:
    """Replace each invalid UTF-8 byte by one `?`, so that the encoded text keeps the file's byte offsets."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "?" * (error.end - error.start), error.end


codecs.register_error(_BYTEWISE_REPLACE, _replace_bytewise)


def _num_incomplete_bytes(data: bytes) -> int:
    """Return the number of trailing bytes (0 to 3) of an incomplete UTF-8 character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    decoder.decode(data[-4:])
    return len(decoder.getstate()[0])


def _replace_file(path: Path, text: str) -> None:
    """Replace a file of a worker's folder without a flush to disk; no link that the worker has made is followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as stream:
        stream.write(text)
    temporary.replace(path)


def _parse_metrics(folder: Path, line: bytes) -> StepMetrics:
    """Return the metrics of a line; raise `ValueError` for any other text, and for metrics of another rank or job."""
    if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
        raise ValueError(f"it has more than {MAX_LINE_BYTES} bytes")
    if sum(map(line.count, _VALUE_MARKS)) > MAX_LINE_VALUES:
        raise ValueError(f"it has more than {MAX_LINE_VALUES} values")
    found = StepMetrics.model_validate_json(line)
    if (found.job, found.attempt, found.rank) != _rank_of(folder):
        raise ValueError(f"it is of rank {found.rank} in attempt {found.attempt} of job {found.job}")
    return found


def _rank_of(folder: Path) -> tuple[str, int, int]:
    """Return job, attempt and rank of a worker's folder."""
    return folder.parts[-3], int(folder.parts[-2]), int(folder.name.removeprefix("rank-"))


def _lines_from(path: Path, offset: int) -> Iterator[bytes]:
    """Yield the lines of a file from `offset` on, and a longer one than `MAX_LINE_BYTES` in pieces of this size."""
    if _size_bytes(path) <= offset:
        return
    with open_regular(path) as stream:
        stream.seek(offset)
        yield from iter(partial(stream.readline, MAX_LINE_BYTES), b"")


def _size_bytes(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0

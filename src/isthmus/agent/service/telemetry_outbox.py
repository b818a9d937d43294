"""Queue of worker metrics and log bytes that the server has not stored yet, read in bounded batches.

`sent.json` in each worker folder records the acknowledged offsets and advances only after the server's
response. After a lost response the same bytes are sent again; the server drops duplicates.
"""

from __future__ import annotations

import codecs
import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, open_regular

MAX_BATCH_BYTES = 512 * 1024
"""Maximum bytes of metrics and logs in one report."""

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

    def collect(self) -> TelemetryBatch:
        """Return the next batch; `acknowledge` advances the offsets."""
        batch = TelemetryBatch(max_bytes=self._max_batch_bytes)
        for folder in sorted(self._runs.glob("*/*/rank-*")):
            if batch.full:
                break
            if not folder.parent.name.isdecimal():  # not an attempt folder
                continue
            sent = self._sent_offsets(folder)
            metrics = self._add_metrics(folder, sent.metrics, batch)
            log = self._add_log(folder, sent.log, batch)
            if (metrics, log) != (sent.metrics, sent.log):
                batch.offsets[folder] = SentOffsets(metrics=metrics, log=log)
        return batch

    def acknowledge(self, batch: TelemetryBatch) -> None:
        """Record that the server has stored `batch`.

        If a full disk prevents the record, only this process knows; the next one sends the bytes again.
        """
        for folder, sent in batch.offsets.items():
            self._offsets[folder] = sent
            try:
                temporary = folder / "sent.tmp"
                temporary.write_text(sent.model_dump_json(), encoding="utf-8")
                temporary.replace(folder / "sent.json")
            except OSError as error:
                _log.warning("%s: %s", folder, error)

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
                text = (folder / "sent.json").read_text(encoding="utf-8")
                self._offsets[folder] = SentOffsets.model_validate_json(text)
            except (FileNotFoundError, ValidationError):
                self._offsets[folder] = SentOffsets()
        return self._offsets[folder]

    def _add_metrics(self, folder: Path, offset: int, batch: TelemetryBatch) -> int:
        """Add complete lines from byte `offset` on; return the new offset."""
        ended = WorkerFolder(folder).exit_path.exists()
        for line in _lines_from(WorkerFolder(folder).metrics_path, offset):
            if batch.full or not (line.endswith(b"\n") or ended):
                break
            offset += len(line)
            batch.num_bytes += len(line)
            try:
                batch.metrics.append(StepMetrics.model_validate_json(line))
            except ValidationError as error:
                _log.warning("%s: skipped a malformed metrics line: %s", folder, error.errors()[0]["msg"])
        return offset

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
        job, attempt, rank = folder.parts[-3], int(folder.parts[-2]), int(folder.name.removeprefix("rank-"))
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


def _lines_from(path: Path, offset: int) -> Iterator[bytes]:
    if _size_bytes(path) <= offset:
        return
    with open_regular(path) as stream:
        stream.seek(offset)
        yield from stream


def _size_bytes(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0

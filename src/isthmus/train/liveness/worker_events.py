"""`EventLog`: the events of a rank, as text in its log and as JSON lines in `events.jsonl`."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from isthmus.core.messages.worker_folder import WorkerEvent, WorkerEventKind, WorkerFolder


class EventLog:
    """Appends events of `rank`; safe for several processes and threads, because each event is one write."""

    def __init__(self, folder: WorkerFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def record(
        self,
        kind: WorkerEventKind,
        detail: str,
        *,
        peer: int | None = None,
        seconds: float | None = None,
        step: int | None = None,
    ) -> None:
        """Append an event to the log and to `events.jsonl`; the latter is skipped if the disk is full."""
        event = WorkerEvent(
            time_s=time.time(),
            rank=self._rank,
            kind=kind,
            detail=detail,
            peer=peer,
            seconds=seconds,
            step=step,
        )
        print(f"rank {self._rank} {kind.replace('_', ' ')}: {detail}", flush=True)
        with suppress(OSError):
            file = os.open(self._folder.events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, event.model_dump_json().encode() + b"\n")
            finally:
                os.close(file)


def read_events(folder: WorkerFolder) -> list[WorkerEvent]:
    """Return all events of a worker, oldest first."""
    if not folder.events_path.exists():
        return []
    lines = folder.events_path.read_text(encoding="utf-8").splitlines()
    return [WorkerEvent.model_validate_json(line) for line in lines]

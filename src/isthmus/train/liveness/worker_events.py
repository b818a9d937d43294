"""`EventLog`: what befalls a rank, for people in its log and for programs in `events.jsonl`."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from isthmus.core.messages.worker_folder import EventKind, WorkerEvent, WorkerFolder


class EventLog:
    """The events of `rank`. Several processes and threads may write: each event is one write."""

    def __init__(self, folder: WorkerFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def tell(
        self,
        kind: EventKind,
        detail: str,
        *,
        peer: int | None = None,
        seconds: float | None = None,
        step: int | None = None,
    ) -> None:
        """Write an event down; where the disk is full, only the log may have it."""
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
            file = os.open(self._folder.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, event.model_dump_json().encode() + b"\n")
            finally:
                os.close(file)


def read_events(folder: WorkerFolder) -> list[WorkerEvent]:
    """Return all events of a worker so far."""
    if not folder.events.exists():
        return []
    lines = folder.events.read_text(encoding="utf-8").splitlines()
    return [WorkerEvent.model_validate_json(line) for line in lines]

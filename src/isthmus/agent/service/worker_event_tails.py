"""`WorkerEventTails`: the newest events of workers, read from their folders for the reports of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from isthmus.core.messages.agent_messages import (
    MAX_EVENT_CHARS,
    MAX_PART_EVENTS,
    MAX_REFUSED_EVENTS,
    PartEvent,
    PartEventKind,
)
from isthmus.core.messages.worker_folder import WorkerEvent, WorkerFolder, open_regular

TAIL_BYTES = 64 * 2**10
"""How much of the end of `events.jsonl` is read."""
_REPORTED_KINDS = frozenset(get_args(PartEventKind))


class WorkerEventTails:
    """Reads `events.jsonl` of workers again only when it has grown."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, tuple[PartEvent, ...]]] = {}

    def newest(self, folders: Iterable[Path]) -> tuple[PartEvent, ...]:
        """Return the newest events of the workers of one part, oldest first."""
        found = [event for folder in folders for event in self._events(WorkerFolder(folder).events_path)]
        return _newest(sorted(found, key=_place))

    def forget(self, folders: Iterable[Path]) -> None:
        """Drop what is known of removed workers."""
        for folder in folders:
            self._known.pop(WorkerFolder(folder).events_path, None)

    def _events(self, file: Path) -> tuple[PartEvent, ...]:
        try:
            size = file.stat().st_size
            if file not in self._known or self._known[file][0] != size:
                self._known[file] = size, _read_tail(file, size)
        except OSError:  # the worker has no events yet, or its folder is gone
            return ()
        return self._known[file][1]


def _read_tail(file: Path, size: int) -> tuple[PartEvent, ...]:
    """Return the reported events in the last bytes of a file; each has its offset in the file as number."""
    start = max(0, size - TAIL_BYTES)
    with open_regular(file) as stream:
        stream.seek(start)
        data = stream.read(size - start)
    found = list[PartEvent]()
    for line in data.splitlines(keepends=True):
        offset, start = start, start + len(line)
        event = _parse_event(line) if line.endswith(b"\n") else None
        if event is not None and event.kind in _REPORTED_KINDS:
            found.append(
                PartEvent(
                    rank=event.rank, number=offset, kind=event.kind, time_s=event.time_s,
                    detail=event.detail[:MAX_EVENT_CHARS], step=event.step, seconds=event.seconds,
                )
            )  # fmt: skip
    return _newest(found)


def _newest(events: Sequence[PartEvent]) -> tuple[PartEvent, ...]:
    """Return the last of the events; those about refused callers crowd out no others."""
    refused = [one for one in events if one.kind == "refused"][-MAX_REFUSED_EVENTS:]
    others = [one for one in events if one.kind != "refused"][-(MAX_PART_EVENTS - len(refused)) :]
    return tuple(sorted((*others, *refused), key=_place))


def _place(event: PartEvent) -> tuple[float, int, int]:
    return event.time_s, event.rank, event.number


def _parse_event(line: bytes) -> WorkerEvent | None:
    """Return the event of a line; None for the rest of a cut line, or one that a worker damaged."""
    try:
        return WorkerEvent.model_validate_json(line)
    except ValidationError:
        return None

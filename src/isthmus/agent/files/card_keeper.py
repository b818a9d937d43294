"""`CardKeeper`: writes the agent's own record of which part held which cards when (`core/records/card_record.py`).

Each month in UTC has a file `cards/YYYY-MM.jsonl` in the state folder, kept for over a year. A line is on disk before
the agent acts on the change or reports it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error
from isthmus.core.records.card_record import CardLine, parse_card_lines
from isthmus.core.records.held_interval import RecordedPart
from isthmus.site import CLAIMING, HOLDING, SitePart

CARDS_FOLDER = "cards"
KEPT_MONTHS = 14

_log = logging.getLogger("isthmus.agent")


class CardKeeper:
    """The record below the state folder `state`; `clock` counts from the epoch."""

    def __init__(self, state: Path, clock: Callable[[], float]) -> None:
        self._folder, self._clock = state / CARDS_FOLDER, clock
        self._file: Path | None = None
        self._open: dict[RecordedPart, CardLine] = {}
        self._started = False

    def update(self, parts: Iterable[SitePart], hold_id: Callable[[SitePart], str]) -> None:
        """Write what has changed; raise `UnavailableError` if the file cannot be written."""
        at_s = self._clock()
        lines = [] if self._started else self._begin(at_s)
        found = _held(tuple(parts), hold_id)
        now = datetime.fromtimestamp(at_s, UTC)
        file, month_s = self._folder / f"{now:%Y-%m}.jsonl", datetime(now.year, now.month, 1, tzinfo=UTC).timestamp()
        if file != self._file:
            lines = [line.model_copy(update={"at_s": month_s}) for line in self._open.values()] + lines
        for part in self._open.keys() - found.keys():
            lines.append(CardLine(at_s=at_s, event="released", job=part.job, attempt=part.attempt))
        for part, (hold, cards, ranks) in found.items():
            line = CardLine(
                at_s=at_s, event="held", job=part.job, attempt=part.attempt, hold=hold, cards=cards, ranks=ranks
            )  # fmt: skip
            before = self._open.get(part)
            if before is None or before.model_copy(update={"at_s": at_s}) != line:
                lines.append(line)
        self._append(file, lines)
        self._file, self._started = file, True
        for line in lines:
            part = RecordedPart(line.job, line.attempt)
            if line.event == "held":
                self._open[part] = line
            elif line.event == "released":
                self._open.pop(part, None)

    def _begin(self, at_s: float) -> list[CardLine]:
        """Read what an earlier agent has left open, end a line that it did not finish; return that this one starts."""
        files = sorted(self._folder.glob("????-??.jsonl"))
        if files:
            self._file = files[-1]
            try:
                body = self._file.read_bytes()
                if body and not body.endswith(b"\n"):
                    body = body[: body.rfind(b"\n") + 1]
                    with self._file.open("r+b") as stream:
                        stream.truncate(len(body))
                self._open = parse_card_lines(body.decode().splitlines(keepends=True), str(self._file)).open
            except (OSError, UnicodeDecodeError, FileError) as error:
                _log.error("the record of cards is continued without what it had: %s", error)
                self._open = {}
        for old in files[:-KEPT_MONTHS]:
            old.unlink(missing_ok=True)
        return [CardLine(at_s=at_s, event="started")]

    def _append(self, file: Path, lines: list[CardLine]) -> None:
        if not lines:
            return
        text = "".join(line.model_dump_json(exclude_defaults=True) + "\n" for line in lines)
        try:
            is_new = not file.exists()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                try:
                    written = os.write(descriptor, text.encode())
                except OSError:
                    written = 0
                if written != len(text.encode()):
                    os.ftruncate(descriptor, size)
                    raise UnavailableError(f"cannot write to {file}: the disk is full", hint="free space on that disk")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                fsync_path(self._folder)
        except OSError as error:
            raise unwritable_folder_error(self._folder, error) from error


def _held(
    parts: tuple[SitePart, ...], hold_id: Callable[[SitePart], str]
) -> dict[RecordedPart, tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]]:
    """Return hold, cards and ranks of each part of the pool that has cards; those of a victim are the victim's."""
    taken: set[str] = set()
    found: dict[RecordedPart, tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]] = {}
    for states in (HOLDING, CLAIMING):
        for part in parts:
            if part.state not in states or part.ungranted:
                continue
            cards = [card for worker in part.workers.values() for card in worker.devices if card not in taken]
            taken.update(cards)
            if cards and not part.local and not part.foreign:
                ranks = tuple((worker.node_group, worker.chips) for worker in part.workers.values())
                key = RecordedPart(part.job, part.attempt)
                found[key] = (hold_id(part) if part.hold else "", tuple(cards), ranks)
    return found

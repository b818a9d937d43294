"""`read_records`: the files of an owner's records, bounded, as intervals and starts of daemons."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import tzinfo
from pathlib import Path

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError
from isthmus.core.records.card_record import MAX_RECORD_BYTES, CardRecord, parse_card_lines
from isthmus.core.records.held_interval import HeldInterval, Restart
from isthmus.core.records.kubernetes_records import parse_kubernetes_records
from isthmus.core.records.slurm_records import parse_slurm_records, parse_slurmctld_log

WHOLE_SECOND_MS = 1000


@dataclass(frozen=True, kw_only=True)
class RecordFiles:
    """An owner's files: the agent's cards, and what its scheduler has; without that the cards themselves count."""

    cards: Path
    slurm: Path | None = None
    kubernetes: Path | None = None
    slurmctld_log: Path | None = None
    # The zone of Slurm's times; None: this machine's.
    zone: tzinfo | None = None


@dataclass(kw_only=True)
class OwnRecords:
    """What the records say. `kind` names whose intervals they are, `resolution_ms` how exact their times are."""

    kind: str
    intervals: list[HeldInterval]
    resolution_ms: int
    restarts: list[Restart] = field(default_factory=list)


def read_records(files: RecordFiles) -> OwnRecords:
    """Read the records; raise `FileError`, naming file and line, for what is too large or cannot be read."""
    if files.slurm is not None and files.kubernetes is not None:
        raise FileError("a site has one scheduler", file=str(files.kubernetes), hint="give its record alone")
    known = _cards(files.cards)
    restarts = list(known.restarts)
    if files.slurmctld_log is not None:
        restarts += parse_slurmctld_log(_lines(files.slurmctld_log), str(files.slurmctld_log), files.zone)
    if files.slurm is not None:
        held = parse_slurm_records(_lines(files.slurm), str(files.slurm), known.holds, files.zone)
        return OwnRecords(kind="Slurm", intervals=held, resolution_ms=WHOLE_SECOND_MS, restarts=restarts)
    if files.kubernetes is not None:
        held = parse_kubernetes_records(_bytes(files.kubernetes), str(files.kubernetes), known.holds)
        return OwnRecords(kind="Kubernetes", intervals=held, resolution_ms=WHOLE_SECOND_MS, restarts=restarts)
    return OwnRecords(kind="cards", intervals=known.intervals, resolution_ms=0, restarts=restarts)


def _cards(path: Path) -> CardRecord:
    """Return the record of a file, or of all files of the agent's folder, each of a month, as one."""
    if not path.is_dir():
        return parse_card_lines(_lines(path), str(path))
    files = sorted(path.glob("????-??.jsonl"))
    if not files:
        raise FileError("has no record of cards", file=str(path), hint="give the folder `cards` of the agent's state")
    whole, still = CardRecord(), list[HeldInterval]()
    for file in files:
        one = parse_card_lines(_lines(file), str(file))
        # What is held from one month to the next stands at the head of the next one's file as well.
        begins_ms = {held.part: held.begin_ms for held in reversed(one.intervals)}
        whole.intervals += [replace(held, end_ms=begins_ms[held.part]) for held in still if held.part in begins_ms]
        still = [held for held in one.intervals if held.end_ms is None]
        whole.intervals += [held for held in one.intervals if held.end_ms is not None]
        whole.restarts += one.restarts
        whole.holds |= one.holds
    whole.intervals += still
    return whole


def _lines(path: Path) -> list[str]:
    try:
        return _bytes(path).decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise FileError(f"is no text: byte {error.start} is not UTF-8", file=str(path)) from None


def _bytes(path: Path) -> bytes:
    try:
        return read_within(path, MAX_RECORD_BYTES)
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", file=str(path)) from error

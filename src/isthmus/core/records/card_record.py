"""The agent's own record of cards: which part held which cards when, a line of JSON for each change.

    {"at_s":1796083200.0,"event":"started"}
    {"at_s":1796083201.5,"event":"held","job":"a1","attempt":1,"hold":"9f…","cards":["h20/n1/0"],"ranks":[["h20",1]]}
    {"at_s":1796083260.2,"event":"released","job":"a1","attempt":1}

A `held` line replaces the one before of the same part. Times are seconds since the epoch on the site's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.errors import FileError
from isthmus.core.records.held_interval import HeldInterval, RecordedPart, Restart

MAX_TIME_S = 4e9
MAX_RECORD_BYTES = 256 << 20
"""Largest file of records that is read."""
MAX_LINES = 2_000_000
"""Most lines of a file of records."""

_Text = Annotated[str, Field(max_length=200)]


class CardLine(FrozenModel):
    """A line of the record. `hold` is the id under which the site's scheduler knows the cards, "" without one.

    `ranks` are node group and number of cards of each rank, in the order in which the hold asks for them.
    """

    at_s: Annotated[float, Field(ge=0, le=MAX_TIME_S)]
    event: Literal["started", "held", "released"]
    job: Name | Literal[""] = ""
    attempt: Annotated[int, Field(ge=0)] = 0
    hold: _Text = ""
    cards: Annotated[tuple[_Text, ...], Field(max_length=100_000)] = ()
    ranks: Annotated[tuple[tuple[_Text, int], ...], Field(max_length=100_000)] = ()


@dataclass(kw_only=True, slots=True)
class RecordedHold:
    """The part behind a hold, and of each of its allocations how many cards a rank has, and how many ranks."""

    part: RecordedPart
    units: tuple[tuple[int, int], ...]


@dataclass(kw_only=True)
class CardRecord:
    """What a record says: intervals, starts of the agent, and the part of each hold."""

    intervals: list[HeldInterval] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    holds: dict[str, RecordedHold] = field(default_factory=dict)
    # Cards and begin of what is held at the end.
    open: dict[RecordedPart, CardLine] = field(default_factory=dict)


def parse_card_lines(lines: Iterable[str], file: str) -> CardRecord:
    """Return what the lines of a record say; raise `FileError` for the first that is none.

    The last line may be cut off: the agent was killed while it wrote.
    """
    found = CardRecord()
    texts = lines if isinstance(lines, Sequence) else list(lines)
    if len(texts) > MAX_LINES:
        raise FileError(f"has more than {MAX_LINES:,} lines", file=file, hint="compare a month at a time")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = CardLine.model_validate_json(text)
        except ValidationError as error:
            if number == len(texts) and not text.endswith("\n"):
                continue
            problem = error.errors()[0]
            place = ".".join(str(step) for step in problem["loc"])
            raise FileError(
                f"{place + ': ' if place else ''}{problem['msg']}", file=file, line=number,
                hint="a record of cards is the file cards/YYYY-MM.jsonl of the agent's state folder",
            ) from None  # fmt: skip
        _take(found, line, f"line {number}")
    for part, line in found.open.items():
        found.intervals.append(_interval(part, line, None, ""))
    return found


def _take(found: CardRecord, line: CardLine, source: str) -> None:
    if line.event == "started":
        found.restarts.append(Restart(round(line.at_s * 1000), "agent"))
        return
    part = RecordedPart(line.job, line.attempt)
    before = found.open.pop(part, None)
    if before is not None:
        found.intervals.append(_interval(part, before, max(before.at_s, line.at_s), source))
    if line.event == "held":
        found.open[part] = line
        if line.hold:
            found.holds[line.hold] = RecordedHold(part=part, units=allocation_sizes(line.ranks))


def _interval(part: RecordedPart, line: CardLine, end_s: float | None, source: str) -> HeldInterval:
    end_ms = None if end_s is None else round(end_s * 1000)
    return HeldInterval(
        part=part, chips=len(line.cards), begin_ms=round(line.at_s * 1000), end_ms=end_ms, source=source
    )  # fmt: skip


def allocation_sizes(ranks: Iterable[tuple[str, int]]) -> tuple[tuple[int, int], ...]:
    """Return cards of a rank and number of ranks of each allocation of a hold: equal ranks share one, in order."""
    units: dict[tuple[str, int], int] = {}
    for rank in ranks:
        units[rank] = units.get(rank, 0) + 1
    return tuple((num_cards, num_ranks) for (_, num_cards), num_ranks in units.items())

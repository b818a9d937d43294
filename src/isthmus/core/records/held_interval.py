"""`HeldInterval`: cards that a part held for some time, by one record; `Restart`: a daemon that began to run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RecordedPart(NamedTuple):
    """A part of a job at the site of the records; `job` is `hold ID` for cards that no known part asked for."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldInterval:
    """`part` held `chips` in [begin_ms, end_ms), in milliseconds since the epoch on the clock of the record.

    `end_ms` is None while they are held. `source` names the place in the record.
    """

    part: RecordedPart
    chips: int
    begin_ms: int
    end_ms: int | None
    source: str = ""


class Restart(NamedTuple):
    """A daemon of the site, such as `agent` or `slurmctld`, that started at a time."""

    at_ms: int
    daemon: str

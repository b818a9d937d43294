"""Slurm's own accounting of the allocations that an agent asked for.

Three forms are read, all of which Slurm writes itself: `sacct -P` with its header (slurmdbd), the file of
`JobCompType=jobcomp/filetxt`, and `scontrol show job -o`. The name of an allocation is `isthmus-HOLD-NUMBER`. Names are
free text of users: only lines whose name is exactly such a one count, and those of two accounts are refused.
Times are whole seconds in the zone of the machine that wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import NamedTuple

from isthmus.core.errors import FileError
from isthmus.core.records.card_record import MAX_LINES, RecordedHold
from isthmus.core.records.held_interval import HeldInterval, RecordedPart, Restart

_NAME = re.compile(r"isthmus-([0-9a-f]{32})-(\d{1,6})")
_COMPLETED = re.compile(
    r"JobId=(?P<id>\d+) UserId=(?P<user>\S+?)\(\d+\) GroupId=\S+ Name=(?P<name>isthmus-[0-9a-f]{32}-\d{1,6}) "
    r"JobState=(?P<state>\S+) Partition=\S* TimeLimit=\S* StartTime=(?P<begin>\S+) EndTime=(?P<end>\S+) "
)
_SHOWN = re.compile(
    r"JobId=(?P<id>\d+) (?:ArrayJobId=\S+ ArrayTaskId=\S+ )?JobName=(?P<name>isthmus-[0-9a-f]{32}-\d{1,6}) "
    r"UserId=(?P<user>\S+?)\(\d+\) .*? JobState=(?P<state>\S+) .*? StartTime=(?P<begin>\S+) EndTime=(?P<end>\S+) "
)
_OWN_LINE = re.compile(
    r"JobId=\d+ (?:UserId=\S+ GroupId=\S+ Name|(?:ArrayJobId=\S+ ArrayTaskId=\S+ )?JobName)="
    r"isthmus-[0-9a-f]{32}-\d{1,6} (?:JobState|UserId)="
)
_STARTED = re.compile(r"\[(?P<at>[0-9T:.-]{19,26})\] slurmctld version \S+ started")
_NO_TIMES = frozenset({"", "Unknown", "None", "N/A", "NONE"})
_NOT_ENDED = frozenset({"RUNNING", "PENDING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED", "RESIZING"})
_WANTED = ("JobName", "State", "Start", "End")
_HINT = "write it with sacct -P --format=JobIDRaw,JobName,User,State,Start,End, or give jobcomp/filetxt's file"


class _Row(NamedTuple):
    """What a line says of an allocation, as text."""

    id: str
    user: str
    name: str
    state: str
    begin: str
    end: str


def parse_slurm_records(
    lines: Sequence[str], file: str, holds: Mapping[str, RecordedHold], zone: tzinfo | None = None
) -> list[HeldInterval]:
    """Return what the allocations of `holds` held; raise `FileError`, naming the line, for one that cannot be read.

    `zone` is that of the times (None: this machine's). Allocations without a known hold are parts named `hold ID`.
    """
    if len(lines) > MAX_LINES:
        raise FileError(f"has more than {MAX_LINES:,} lines", file=file, hint="compare a month at a time")
    found: dict[tuple[str, str], HeldInterval] = {}
    user = ""
    for number, row in _rows(lines, file):
        if row.begin in _NO_TIMES or row.state.split()[0] == "PENDING":
            continue
        if user not in ("", row.user):
            raise FileError(
                f"allocations of an agent belong to '{user[:40]}' and '{row.user[:40]}'", file=file, line=number,
                hint="keep the lines of the account that runs the agent: sacct --user",
            )  # fmt: skip
        user = row.user
        begin_ms = _time_ms(row.begin, zone, file, number)
        open_ended = row.end in _NO_TIMES or row.state.split()[0] in _NOT_ENDED
        end_ms = None if open_ended else _time_ms(row.end, zone, file, number)
        if end_ms is not None and end_ms < begin_ms:
            raise FileError(f"ends at {row.end}, before its begin {row.begin}", file=file, line=number, hint=_HINT)
        # The newest line of an allocation counts: sacct prints one that was requeued once more.
        found[row.name, row.begin] = _interval(row, holds, begin_ms, end_ms, number)
    return list(found.values())


def parse_slurmctld_log(lines: Iterable[str], file: str, zone: tzinfo | None = None) -> list[Restart]:
    """Return the starts of slurmctld that its log has; other lines are passed over."""
    found = []
    for number, line in enumerate(lines, start=1):
        started = _STARTED.match(line)
        if started is not None:
            found.append(Restart(_time_ms(started["at"], zone, file, number), "slurmctld"))
    return found


def _interval(
    row: _Row, holds: Mapping[str, RecordedHold], begin_ms: int, end_ms: int | None, number: int
) -> HeldInterval:
    named = _NAME.fullmatch(row.name)
    hold_id, unit = (named[1], int(named[2])) if named else ("", 0)
    hold = holds.get(hold_id)
    part, chips = RecordedPart(f"hold {hold_id}", 0), 1
    if hold is not None:
        part, (num_cards, num_ranks) = hold.part, hold.units[unit] if unit < len(hold.units) else (0, 0)
        chips = num_cards * num_ranks
    return HeldInterval(
        part=part, chips=chips, begin_ms=begin_ms, end_ms=end_ms, source=f"line {number}: job {row.id} {row.state}"
    )


def _rows(lines: Sequence[str], file: str) -> Iterator[tuple[int, _Row]]:
    """Yield the number of each line about an allocation of an agent, and what it says."""
    texts = [(number, line.rstrip("\r\n")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not texts or texts[0][1].startswith("No jobs in the system"):
        return
    if texts[0][1].startswith("JobId="):
        yield from _key_value_rows(texts, file)
    else:
        yield from _table_rows(texts, file)


def _key_value_rows(texts: Sequence[tuple[int, str]], file: str) -> Iterator[tuple[int, _Row]]:
    """Yield the rows of jobcomp/filetxt or `scontrol`; lines about other jobs, which may hold any text, are passed."""
    for number, text in texts:
        if not _OWN_LINE.match(text):
            continue
        row = _COMPLETED.match(text) or _SHOWN.match(text)
        if row is None:
            raise FileError("the line of an agent's allocation cannot be read", file=file, line=number, hint=_HINT)
        yield number, _Row(**row.groupdict())


def _table_rows(texts: Sequence[tuple[int, str]], file: str) -> Iterator[tuple[int, _Row]]:
    """Yield the rows of `sacct -P`."""
    number, header = texts[0]
    columns = header.split("|")
    missing = [name for name in _WANTED if name not in columns]
    if missing:
        raise FileError(f"the header has no {', '.join(missing)}", file=file, line=number, hint=_HINT)
    name_at = columns.index("JobName")
    for number, text in texts[1:]:
        fields = text.split("|")
        if len(fields) <= name_at or not _NAME.fullmatch(fields[name_at]):
            continue
        if len(fields) != len(columns):
            problem = f"has {len(fields)} fields, the header {len(columns)}"
            raise FileError(problem, file=file, line=number, hint=_HINT)
        by_name = dict(zip(columns, fields, strict=True))
        if not by_name["State"].strip():
            raise FileError("has no State", file=file, line=number, hint=_HINT)
        yield (
            number,
            _Row(
                by_name.get("JobIDRaw") or by_name.get("JobID", ""), by_name.get("User", ""), by_name["JobName"],
                by_name["State"], by_name["Start"], by_name["End"],
            ),
        )  # fmt: skip


def _time_ms(text: str, zone: tzinfo | None, file: str, number: int) -> int:
    try:
        at = datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=zone)).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise FileError(f"'{text[:40]}' is no time", file=file, line=number, hint=_HINT) from None

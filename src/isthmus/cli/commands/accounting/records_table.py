"""`records_table`: each interval of the ledger and of an owner's record, with the cause of each difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.terminal.tables import table
from isthmus.core.text.printable import printable
from isthmus.core.views.records_view import ComparedPartView, HeldSpan, RecordsView

MS_PER_S = 1000


def records_table(found: RecordsView, *, only_differences: bool = False) -> RenderableType:
    """Return a row for each part and each of its differences, and the sums by cause."""
    shown = [part for part in found.parts if part.differences or not only_differences]
    rows = [row for part in shown for row in _rows(part)]
    sums = [(one.cause, f"{one.differences:,}", f"{one.chip_hours:+.4f}") for one in found.causes]
    open_text = f"; {found.still_held} parts still hold cards and are not compared" if found.still_held else ""
    ours, theirs = f"{found.ours_chip_hours:.4f}", f"{found.theirs_chip_hours:.4f}"
    return Group(
        Text(f"{found.site} in {found.month}: the ledger has {ours} chip-hours, {found.record} {theirs}: "
             f"{found.percent:+.3f} %{open_text}"),
        table("", ("job", "attempt", "ledger", found.record, "chip-seconds", "cause"), rows, "attempt|chip-seconds"),
        *([table("", ("cause", "differences", "chip-hours"), sums, "differences|chip-hours")] if sums else []),
    )  # fmt: skip


def _rows(part: ComparedPartView) -> Iterator[tuple[str, ...]]:
    yield printable(part.job), str(part.attempt), _spans(part.ours), _spans(part.theirs), "", ""
    for one in part.differences:
        chip_s = (one.ours - one.theirs) * (one.end_ms - one.begin_ms) / MS_PER_S
        yield "", "", f"{_time(one.begin_ms)} {one.ours} chips", f"{one.theirs} chips", f"{chip_s:+.3f}", one.cause


def _spans(held: Iterable[HeldSpan]) -> str:
    """Return when chips were held, from first to last."""
    spans = list(held)
    if not spans:
        return "nothing"
    begin_ms, end_ms = min(one.begin_ms for one in spans), max(one.end_ms for one in spans)
    return f"{_time(begin_ms)} to {_time(end_ms)}"


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / MS_PER_S, UTC).strftime("%m-%d %H:%M:%S")

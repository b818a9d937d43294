"""`compare_ledger`: an owner's entries of the ledger beside its own records, for `isthmus ledger compare`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from isthmus.core.months import month_span_ms
from isthmus.core.records.compare_records import ComparedPart, compare_records
from isthmus.core.records.held_interval import HeldInterval, RecordedPart
from isthmus.core.records.read_records import OwnRecords
from isthmus.core.views.ledger_views import LedgerEntry
from isthmus.core.views.records_view import CauseSum, ComparedPartView, DifferenceView, HeldSpan, RecordsView

MS_PER_HOUR = 3_600_000
_USAGE = frozenset({"usage", "proven"})


def ledger_intervals(entries: Iterable[LedgerEntry], site: str, owner: str | None = None) -> Iterator[HeldInterval]:
    """Yield the chips of a site that the ledger has booked: each interval once, from the owner's side."""
    accounts = None if owner is None else {f"owner:{owner}"}
    for one in entries:
        booked = one.kind in _USAGE and one.resource.startswith(f"{site}/") and one.account.startswith("owner:")
        if booked and (accounts is None or one.account in accounts):
            yield HeldInterval(
                part=RecordedPart(one.job, one.attempt), chips=one.amount,
                begin_ms=one.begin_ms, end_ms=one.end_ms, source=f"transaction {one.transaction}",
            )  # fmt: skip


def compare_ledger(
    entries: Iterable[LedgerEntry], records: OwnRecords, site: str, month: str, owner: str | None = None
) -> RecordsView:
    """Return the comparison of a month; raise `InputError` for other text."""
    held = ledger_intervals(entries, site, owner)
    parts, still = compare_records(
        held, records.intervals, records.restarts, month_span_ms(month), resolution_ms=records.resolution_ms
    )  # fmt: skip
    ours, theirs = (sum(getattr(one, name) for one in parts) for name in ("ours_chip_ms", "theirs_chip_ms"))
    sums: dict[str, list[int]] = defaultdict(list)
    for part in parts:
        for one in part.differences:
            sums[one.cause].append(one.chip_ms)
    return RecordsView(
        site=site,
        month=month,
        record=records.kind,
        parts=tuple(map(_part_view, parts)),
        still_held=len({one.part for one in still}),
        ours_chip_hours=ours / MS_PER_HOUR,
        theirs_chip_hours=theirs / MS_PER_HOUR,
        percent=100 * (ours - theirs) / theirs if theirs else 0.0 if not ours else 100.0,
        causes=tuple(
            CauseSum(cause=cause, differences=len(found), chip_hours=sum(found) / MS_PER_HOUR)
            for cause, found in sorted(sums.items())
        ),
        unexplained=len(sums.get("unknown", ())),
    )


def _part_view(one: ComparedPart) -> ComparedPartView:
    return ComparedPartView(
        job=one.part.job,
        attempt=one.part.attempt,
        ours=tuple(map(_span, one.ours)),
        theirs=tuple(map(_span, one.theirs)),
        differences=tuple(
            DifferenceView(
                begin_ms=found.begin_ms, end_ms=found.end_ms, ours=found.ours, theirs=found.theirs, cause=found.cause
            )
            for found in one.differences
        ),
    )  # fmt: skip


def _span(held: HeldInterval) -> HeldSpan:
    end_ms = held.begin_ms if held.end_ms is None else held.end_ms
    return HeldSpan(chips=held.chips, begin_ms=held.begin_ms, end_ms=end_ms, source=held.source)

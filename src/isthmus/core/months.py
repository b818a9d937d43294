"""Calendar months in UTC as intervals of milliseconds since the epoch."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from isthmus.core.errors import InputError


def month_span_ms(month: str) -> tuple[int, int]:
    """Return the first moment of a month `YYYY-MM` and of the next one; raise `InputError` for other text."""
    if not re.fullmatch(r"(19[7-9]\d|2\d{3})-(0[1-9]|1[0-2])", month, re.ASCII):
        raise InputError(f"'{month[:20]}' is no month", hint="write YYYY-MM, such as 2027-01")
    begin = datetime(int(month[:4]), int(month[5:]), 1, tzinfo=UTC)
    return round(begin.timestamp() * 1000), next_month_ms(round(begin.timestamp() * 1000))


def month_begin_ms(at_ms: int) -> int:
    """Return the first moment of the month of `at_ms`."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return round(datetime(at.year, at.month, 1, tzinfo=UTC).timestamp() * 1000)


def next_month_ms(at_ms: int) -> int:
    """Return the first moment of the month after the one of `at_ms`."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    year, month = (at.year + 1, 1) if at.month == 12 else (at.year, at.month + 1)
    return round(datetime(year, month, 1, tzinfo=UTC).timestamp() * 1000)

"""`parse_since_s` and `parse_age_s`: periods that a user gives as an age or a date."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from isthmus.core.errors import InputError

_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")
_AGE_FACTORS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_since_s(text: str, now_s: float) -> float:
    """Return the time that an age before `now_s` (`90s`, `30m`, `12h`, `7d`, `2w`) or an ISO date means.

    Times are seconds since the epoch; a date without a time zone is UTC. Raises `InputError` for other text.
    """
    if _AGE.fullmatch(text) is not None:
        return max(0.0, now_s - parse_age_s(text))
    try:
        date = datetime.fromisoformat(text)
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError) as error:
        hint = "give an age such as 90s, 30m, 12h, 7d, or a date such as 2026-11-20 or 2026-11-20T09:00"
        raise InputError(f"'{text[:80]}' is neither an age nor a date", hint=hint) from error


def parse_age_s(text: str) -> float:
    """Return the seconds of a period such as `90s`, `30m`, `12h`, `7d`, `2w`; raise `InputError` for other text."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise InputError(
            f"'{text[:80]}' is not a period", hint="give a number and a unit, such as 90s, 30m, 12h, 7d, 2w"
        )
    return float(match.group(1)) * _AGE_FACTORS_S[match.group(2)]

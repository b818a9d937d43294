"""`next_change_s`: when the hours that an owner gives the pool may next begin or end, in simulated time."""

from __future__ import annotations

from datetime import datetime, timedelta

from isthmus.core.policy import OwnerPolicy

START = datetime(2024, 1, 1)  # noqa: DTZ001 - local time of every simulated site
"""Second 0 of simulated time: a Monday at midnight, by the clock of every site."""


def is_open_at(policy: OwnerPolicy, now_s: float) -> bool:
    """Tell whether the owner lets the pool work at `now_s`."""
    return policy.is_open(START + timedelta(seconds=now_s))


def next_change_s(policy: OwnerPolicy, now_s: float) -> float | None:
    """Return the next time of day at which some of the owner's hours begin or end, None without hours."""
    day_s = 86_400.0
    times = {time for hours in policy.hours for time in (hours.begin, hours.end)}
    seconds = [3600.0 * int(time[:2]) + 60.0 * int(time[3:]) for time in times]
    midnight_s = now_s // day_s * day_s
    return min((at if at > now_s else at + day_s for at in (midnight_s + s for s in seconds)), default=None)

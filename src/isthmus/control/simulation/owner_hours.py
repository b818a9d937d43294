"""An owner's pool hours in simulated time: `is_open_at` and `next_change_s`."""

from __future__ import annotations

from datetime import datetime, timedelta

from isthmus.core.owner.owner_policy import OwnerPolicy

SIMULATION_START = datetime(2024, 1, 1)  # noqa: DTZ001 - local time of every simulated site
"""Simulated time 0: a Monday at midnight, local time of every site."""


def is_open_at(policy: OwnerPolicy, now_s: float) -> bool:
    """Tell whether the owner admits the pool's jobs at `now_s`."""
    return policy.is_open(SIMULATION_START + timedelta(seconds=now_s))


def may_move_at(policy: OwnerPolicy, now_s: float) -> bool:
    """Tell whether the owner lets running jobs be moved at `now_s`."""
    return policy.moves.is_open(SIMULATION_START + timedelta(seconds=now_s))


def next_change_s(policy: OwnerPolicy, now_s: float) -> float | None:
    """Return the next time in seconds at which the owner's hours may begin or end, None without hours."""
    day_s = 86_400.0
    times = {time for hours in (*policy.hours, *policy.moves.hours) for time in (hours.begin, hours.end)}
    seconds = [3600.0 * int(time[:2]) + 60.0 * int(time[3:]) for time in times]
    midnight_s = now_s // day_s * day_s
    return min((at if at > now_s else at + day_s for at in (midnight_s + s for s in seconds)), default=None)

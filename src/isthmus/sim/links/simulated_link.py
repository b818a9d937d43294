"""`SimulatedLink`: one direction of a simulated link, with rate, delay, jitter and cross traffic.

A message occupies its link for its bytes over the remaining rate, and arrives a delay later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.core.errors import InputError
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.core.pool import Link


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Cross traffic on a link, with priority: `bytes_per_s` for `on_s`, then none for `off_s`, repeatedly.

    It starts at `start_s`, and is constant if `off_s` is 0.
    """

    bytes_per_s: float
    start_s: float = 0.0
    on_s: float = 1.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0 or self.start_s < 0 or self.on_s <= 0 or self.off_s < 0:
            raise InputError(f"interference {self}", hint="on_s must be positive, the other values at least 0")


@dataclass(frozen=True, kw_only=True)
class SimulatedLink:
    """One direction of a link. Stage boundaries that use the same `name` share its rate.

    `jitter_s` is the standard deviation of the delay, which is drawn per message and at least 0; messages of
    one flow stay in order. `interference` reduces the rate while it is on.
    """

    name: str
    bytes_per_s: float
    delay_s: float
    jitter_s: float = 0.0
    interference: Interference | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.delay_s < 0 or self.jitter_s < 0:
            raise InputError(
                f"link {self.name}: rate {self.bytes_per_s}, delay {self.delay_s}, jitter {self.jitter_s}",
                hint="the rate must be positive, delay and jitter at least 0",
            )
        other = self.interference
        if other is not None and other.off_s == 0 and other.bytes_per_s >= self.bytes_per_s:
            raise InputError(
                f"link {self.name}: constant interference of {other.bytes_per_s:g} bytes/s uses all of its "
                f"{self.bytes_per_s:g} bytes/s",
                hint="lower its rate, or add pauses (off_s)",
            )


def simulated_link(link: Link, reverse: Link | None = None, interference: Interference | None = None) -> SimulatedLink:
    """Return the simulated link of a link of the pool, at the rate that one TCP flow reaches under its loss.

    `reverse` is the opposite direction, for the round-trip time. Jitter and delay are those of `link`.
    """
    return SimulatedLink(
        name=f"{link.source}>{link.target}",
        bytes_per_s=effective_bytes_per_s(link, reverse),
        delay_s=link.delay_s,
        jitter_s=link.jitter_ms / 1e3,
        interference=interference,
    )


def transferable_bytes(link: SimulatedLink, from_s: float, to_s: float) -> float:
    """Return the bytes that `link` can send from `from_s` to `to_s`, given its interference."""
    whole = link.bytes_per_s * (to_s - from_s)
    other = link.interference
    if other is None:
        return whole
    taken_per_s = min(other.bytes_per_s, link.bytes_per_s)
    return whole - taken_per_s * (_active_s(other, to_s) - _active_s(other, from_s))


def send_end_s(link: SimulatedLink, start_s: float, num_bytes: float) -> float:
    """Return the time at which `num_bytes` that start at `start_s` have left, given the interference."""
    other = link.interference
    if other is None:
        return start_s + num_bytes / link.bytes_per_s
    left_bytes, now_s = num_bytes, start_s
    period_s = other.on_s + other.off_s
    slow_per_s = link.bytes_per_s - min(other.bytes_per_s, link.bytes_per_s)
    period_bytes = slow_per_s * other.on_s + link.bytes_per_s * other.off_s
    while True:
        phase_s = now_s - other.start_s
        if phase_s >= 0 and left_bytes > period_bytes:  # skip whole periods
            periods = math.floor(left_bytes / period_bytes)
            now_s, left_bytes = now_s + periods * period_s, left_bytes - periods * period_bytes
            phase_s = now_s - other.start_s
        inside_s = phase_s % period_s
        on = phase_s >= 0 and (inside_s < other.on_s or not other.off_s)
        span_s = -phase_s if phase_s < 0 else (other.on_s if on else period_s) - inside_s
        rate = slow_per_s if on else link.bytes_per_s
        if left_bytes <= rate * span_s:
            return now_s + (left_bytes / rate if left_bytes else 0.0)
        left_bytes -= rate * span_s
        now_s += max(span_s, math.ulp(now_s))


def _active_s(interference: Interference, time_s: float) -> float:
    """Return the total time that `interference` has been on before `time_s`."""
    phase_s = time_s - interference.start_s
    if phase_s <= 0:
        return 0.0
    periods, inside_s = divmod(phase_s, interference.on_s + interference.off_s)
    return periods * interference.on_s + min(inside_s, interference.on_s)

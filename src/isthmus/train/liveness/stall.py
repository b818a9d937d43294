"""`detect_stall`: detects a worker process that is alive but makes no progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.train.liveness.heartbeat import HeartbeatReading

FROZEN_AFTER_S = 2.0
"""A process without a heartbeat for this long is frozen: stopped, swapped out, or stuck in one call."""

STALL_FACTOR = 5
"""A rank that works in one step for this multiple of its median step is stalled."""

MIN_STALL_S = 5.0
"""Shortest time in one step that counts as a stall."""

RESTART_FACTOR = 4
"""The process is restarted once a stall lasts this multiple of its detection limit."""


@dataclass(frozen=True)
class Stall:
    """A stall that has lasted `lasted_s`; `needs_restart` once the process is to be restarted."""

    kind: Literal["frozen", "stalled"]
    lasted_s: float
    needs_restart: bool

    def describe(self) -> str:
        """Return a message for the log."""
        if self.kind == "frozen":
            return f"no heartbeat for {self.lasted_s:.1f} s"
        return f"busy in one step for {self.lasted_s:.1f} s without waiting for a peer"


def detect_stall(reading: HeartbeatReading, now_s: float) -> Stall | None:
    """Return the stall of a process with heartbeat values `reading` at `now_s`, or None.

    A rank that waits for a peer is not stalled. Outside steps (checkpoints, evaluation, export) there is no
    typical duration, so that only missing heartbeats count.
    """
    silent_s = now_s - reading.last_beat_s
    if silent_s > FROZEN_AFTER_S:
        return Stall("frozen", silent_s, silent_s > RESTART_FACTOR * max(FROZEN_AFTER_S, MIN_STALL_S))
    limit_s = max(STALL_FACTOR * reading.median_step_s, MIN_STALL_S)
    busy_s = now_s - reading.busy_since_s
    if reading.step < 0 or reading.median_step_s == 0 or busy_s <= limit_s:
        return None
    return Stall("stalled", busy_s, busy_s > RESTART_FACTOR * limit_s)

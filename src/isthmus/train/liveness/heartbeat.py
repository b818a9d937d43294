"""`Heartbeat`: a worker's heartbeat and progress, in memory shared with its supervisor.

Each value is one aligned machine word, so that a killed process leaves no torn value. Times are on the
machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from isthmus.train.liveness.peer_wait import is_waiting_for_peer

HEARTBEAT_INTERVAL_S = 0.2
"""Interval between heartbeats."""

_MEDIAN_STEPS = 15
_FIELDS = ("incarnation", "last_beat_s", "step", "busy_since_s", "median_step_s", "is_finished")


@dataclass(frozen=True)
class HeartbeatReading:
    """The values of a heartbeat at one moment; times are monotonic seconds."""

    # Incarnation of the group that the rank is in or joins, -1 before the first.
    incarnation: int
    # Time of the last heartbeat.
    last_beat_s: float
    # Current training step, -1 outside steps.
    step: int
    # Since when the rank has worked in this step without waiting for a peer.
    busy_since_s: float
    # Median duration of this process's last steps, 0 before the first.
    median_step_s: float
    # Whether the rank has completed all work of the run.
    is_finished: bool


class Heartbeat:
    """Shared memory with the values of `HeartbeatReading`; a forked worker inherits it from its supervisor."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(_FIELDS))
        self._words = memoryview(self._memory).cast("d")
        self._durations_s: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._began_s = 0.0
        self._set("incarnation", -1)
        self.clear_step()

    def read(self) -> HeartbeatReading:
        """Return the current values."""
        incarnation, beat_s, step, busy_since_s, usual_step_s, finished = self._words
        return HeartbeatReading(int(incarnation), beat_s, int(step), busy_since_s, usual_step_s, bool(finished))

    @property
    def incarnation(self) -> int:
        """Incarnation of the group that the rank is in or joins, -1 before the first."""
        return self.read().incarnation

    def start_process(self) -> None:
        """Record the start of a worker process."""
        self._durations_s.clear()
        self._set("median_step_s", 0)
        self.clear_step()
        self.beat(waiting=False)

    def set_incarnation(self, incarnation: int) -> None:
        """Record the incarnation that the rank joins."""
        self._set("incarnation", incarnation)

    def begin_step(self, step: int) -> None:
        """Record the start of a training step."""
        self._began_s = time.monotonic()
        self._set("busy_since_s", self._began_s)
        self._set("step", step)

    def end_step(self) -> None:
        """Record the end of the step."""
        self._durations_s.append(time.monotonic() - self._began_s)
        self._set("median_step_s", median(self._durations_s))
        self.clear_step()

    def clear_step(self) -> None:
        """Record that the rank is outside a step."""
        self._set("step", -1)

    def set_finished(self) -> None:
        """Record that the rank has completed the run; other ranks may still need it for a recovery."""
        self._set("is_finished", 1)

    def beat(self, waiting: bool) -> None:
        """Record a heartbeat, and whether the main thread is `waiting` for a peer."""
        now_s = time.monotonic()
        if waiting:
            self._set("busy_since_s", now_s)
        self._set("last_beat_s", now_s)

    def _set(self, name: str, value: float) -> None:
        self._words[_FIELDS.index(name)] = value


def start_heartbeat(heartbeat: Heartbeat) -> None:
    """Start a thread that records heartbeats for the calling thread, which trains.

    Each heartbeat records whether the training thread is inside `waiting_for_peer`.
    """
    training_thread = threading.get_ident()
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT_INTERVAL_S):
            heartbeat.beat(waiting=is_waiting_for_peer(training_thread))

    heartbeat.beat(waiting=False)
    threading.Thread(target=beat, name="isthmus-pulse", daemon=True).start()

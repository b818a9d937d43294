"""`Pulse`: what a rank's process tells its supervisor all the time, in memory that both see.

Each figure is one aligned machine word, so that a process killed at any point leaves none of them torn. Times
are on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from types import FrameType

BEAT_S = 0.2
"""How often a living process says so."""

_KEPT_STEPS = 15
_NAMES = ("incarnation", "beat_s", "step", "busy_since_s", "usual_step_s", "finished")
_WAITING_IN = (
    "/isthmus/comm/",
    "/torch/distributed/",
    "/isthmus/train/messages/exchange.py",
    "/isthmus/train/tensor_parallel/tensor_group.py",
)
"""Where the main thread is while it waits for a peer, or for what another thread waits for."""


@dataclass(frozen=True)
class Reading:
    """What a pulse says at one moment.

    `incarnation` is that of the group the rank is in or about to join, -1 before the first; `step` is -1
    outside training steps. `busy_since_s` is since when the rank has been at work, waiting for nobody, in
    this step; `usual_step_s` the median of its last steps, 0 while it has none. `finished`: nothing of the
    run is left to do.
    """

    incarnation: int
    beat_s: float
    step: int
    busy_since_s: float
    usual_step_s: float
    finished: bool


class Pulse:
    """The shared words. A process inherits them from the one that forked it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(_NAMES))
        self._words = memoryview(self._memory).cast("d")
        self._durations: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._began_s = 0.0
        self._set("incarnation", -1)
        self.rest()

    def read(self) -> Reading:
        """Return all words."""
        incarnation, beat_s, step, busy_since_s, usual_step_s, finished = self._words
        return Reading(int(incarnation), beat_s, int(step), busy_since_s, usual_step_s, bool(finished))

    @property
    def incarnation(self) -> int:
        """The incarnation of the group that the rank is in or about to join, -1 before the first."""
        return self.read().incarnation

    def starts(self) -> None:
        """Note that a process begins: it lives, and no step of it is done."""
        self._durations.clear()
        self._set("usual_step_s", 0)
        self.rest()
        self.beat(waiting=False)

    def joins(self, incarnation: int) -> None:
        """Note which incarnation the rank is about to join."""
        self._set("incarnation", incarnation)

    def begins(self, step: int) -> None:
        """Note that a training step begins."""
        self._began_s = time.monotonic()
        self._set("busy_since_s", self._began_s)
        self._set("step", step)

    def ends(self) -> None:
        """Note that the step is done."""
        self._durations.append(time.monotonic() - self._began_s)
        self._set("usual_step_s", median(self._durations))
        self.rest()

    def rest(self) -> None:
        """Note that the rank is not in a step (any more)."""
        self._set("step", -1)

    def finishes(self) -> None:
        """Note that nothing of the run is left to do, though another rank may not know it yet."""
        self._set("finished", 1)

    def beat(self, waiting: bool) -> None:
        """Note that the process lives, and whether its main thread is `waiting` for a peer."""
        now_s = time.monotonic()
        if waiting:
            self._set("busy_since_s", now_s)
        self._set("beat_s", now_s)

    def _set(self, name: str, value: float) -> None:
        self._words[_NAMES.index(name)] = value


def start_beating(pulse: Pulse) -> None:
    """Let a thread of its own beat for the calling thread, which is the one that trains, until the end."""
    trains = threading.get_ident()
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            pulse.beat(_waits(sys._current_frames().get(trains)))

    pulse.beat(waiting=False)
    threading.Thread(target=beat, name="isthmus-pulse", daemon=True).start()


def _waits(frame: FrameType | None) -> bool:
    """Tell whether a thread is inside the exchange of messages."""
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in _WAITING_IN):
            return True
        frame = frame.f_back
    return False

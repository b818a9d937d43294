"""`stall_of`: whether a rank's process, which lives, has stopped getting on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.train.liveness.heartbeat import Reading

FROZEN_S = 2.0
"""Without a sign of life for so long a process is frozen: stopped, swapped out, or stuck in one call."""

USUAL_STEPS = 5
"""A rank at work in one step for so many times its usual step is stalled."""

SHORTEST_S = 5.0
"""But not before so long, whatever is usual."""

PATIENCE = 4
"""After so many times as long as what made it one, a stall is ended by starting the process again."""


@dataclass(frozen=True)
class Stall:
    """A stall that has lasted `lasted_s`; `hopeless` once it is time to start the process again."""

    kind: Literal["frozen", "stalled"]
    lasted_s: float
    hopeless: bool

    def in_words(self) -> str:
        """Return what to tell people."""
        if self.kind == "frozen":
            return f"its process gives no sign of life for {self.lasted_s:.1f} s"
        return f"it is at work in one step for {self.lasted_s:.1f} s and waits for nobody"


def stall_of(reading: Reading, now_s: float) -> Stall | None:
    """Return the stall of a process whose pulse says `reading` at `now_s`, None where there is none.

    A rank that waits for a peer is not stalled: the peer may be. Outside steps (checkpoints, evaluation,
    export) nothing is usual, and only a process without any sign of life counts.
    """
    silent_s = now_s - reading.beat_s
    if silent_s > FROZEN_S:
        return Stall("frozen", silent_s, silent_s > PATIENCE * max(FROZEN_S, SHORTEST_S))
    limit_s = max(USUAL_STEPS * reading.usual_step_s, SHORTEST_S)
    busy_s = now_s - reading.busy_since_s
    if reading.step < 0 or reading.usual_step_s == 0 or busy_s <= limit_s:
        return None
    return Stall("stalled", busy_s, busy_s > PATIENCE * limit_s)

"""`Clock` and `interleaved`: how micro-benchmarks are timed, so that other work on the machine says little.

Operations take turns: whatever the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5
"""Turns that each operation gets."""
MOST = 40
"""Repetitions in a turn, at most."""


class Clock:
    """Seconds that operations take on `device` ("cpu" or "cuda").

    On a single CPU thread it is the processor time of this process: what others take of the core is no
    property of the core. Elsewhere it is the time until the device is idle again.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        alone = device == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def seconds(self, operation: Callable[[], object]) -> float:
        """Return the seconds of one `operation`."""
        begun_s = self._now()
        operation()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return max(self._now() - begun_s, 1e-9)


def interleaved(once: Sequence[Callable[[], float]], seconds: float) -> list[tuple[float, ...]]:
    """Call each of `once`, which return what they took, in turns; return what each took, call by call.

    Each is called for about `seconds` in all, at least once a turn, after a call that warms up.
    """
    found: list[list[float]] = [[] for _ in once]
    for call in once:
        call()
    for _ in range(ROUNDS):
        for call, taken in zip(once, found, strict=True):
            turn = [call()]
            while sum(turn) < seconds / ROUNDS and len(turn) < MOST:
                turn.append(call())
            taken += turn
    return [tuple(taken) for taken in found]

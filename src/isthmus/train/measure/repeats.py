"""`Clock` and `interleaved`: timing of micro-benchmarks.

Operations run in turns, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5
"""Turns per operation."""
MOST = 40
"""Maximum number of repetitions per turn."""


class Clock:
    """Times operations on `device` ("cpu" or "cuda").

    With a single CPU thread it measures processor time of this process, which excludes other load on the
    core; otherwise wall time until the device is idle.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        alone = device == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def seconds(self, operation: Callable[[], object]) -> float:
        """Run `operation` and return its time in seconds."""
        begun_s = self._now()
        operation()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return max(self._now() - begun_s, 1e-9)


def interleaved(once: Sequence[Callable[[], float]], seconds: float) -> list[tuple[float, ...]]:
    """Call the functions `once` in turns; return the times in seconds that each of them returned.

    Each function runs for about `seconds` in total and at least once per turn, after one warm-up call.
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

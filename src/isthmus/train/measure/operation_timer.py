"""`OperationTimer` and `time_interleaved`: timing of micro-benchmarks.

Operations run in turns, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

NUM_ROUNDS = 5
"""Turns per operation."""
MAX_REPEATS = 40
"""Maximum number of repetitions per turn."""


class OperationTimer:
    """Times operations on `device` ("cpu" or "cuda").

    With a single CPU thread it measures processor time of this process, which excludes other load on the
    core; otherwise wall time until the device is idle.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        alone = device == "cpu" and torch.get_num_threads() == 1
        self._clock = time.process_time if alone else time.perf_counter

    def time_s(self, operation: Callable[[], object]) -> float:
        """Run `operation` and return its time in seconds."""
        begun_s = self._clock()
        operation()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return max(self._clock() - begun_s, 1e-9)


def time_interleaved(timed_calls: Sequence[Callable[[], float]], seconds: float) -> list[tuple[float, ...]]:
    """Call the functions `timed_calls` in turns; return the times in seconds that each of them returned.

    Each function runs for about `seconds` in total and at least once per turn, after one warm-up call.
    """
    found: list[list[float]] = [[] for _ in timed_calls]
    for call in timed_calls:
        call()
    for _ in range(NUM_ROUNDS):
        for call, taken in zip(timed_calls, found, strict=True):
            turn = [call()]
            while sum(turn) < seconds / NUM_ROUNDS and len(turn) < MAX_REPEATS:
                turn.append(call())
            taken += turn
    return [tuple(taken) for taken in found]

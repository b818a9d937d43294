"""`RewardFunction`: a reward that a function of the user's computes, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from isthmus.rl.rewards.function_process import FunctionProcess
from isthmus.rl.rewards.reward_error import RewardError


class RewardFunction:
    """Calls function `FILE.py:NAME` with prompt, response and answer."""

    def __init__(self, function: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = FunctionProcess(function, "reward", timeout_s, RewardError, clock)

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the reward of a response; raises `RewardError` if the function raises, ends or is late."""
        return float(self._process.call(prompt, response, answer))

    def close(self) -> None:
        """End the process."""
        self._process.close()

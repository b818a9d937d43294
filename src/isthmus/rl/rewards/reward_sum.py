"""`RewardSum`: the weighted sum of a job's rewards."""

from __future__ import annotations

import math

from isthmus.core.job_parts.rl_job import RewardConfig
from isthmus.rl.rewards.reward_error import RewardError
from isthmus.rl.rewards.reward_function import RewardFunction
from isthmus.rl.rewards.reward_service import RewardService


class RewardSum:
    """The rewards of `configs`, called in order, each multiplied by its weight."""

    def __init__(self, configs: tuple[RewardConfig, ...]) -> None:
        self._parts = [(one.weight, _open(one)) for one in configs]
        self.is_immediate = all(part is None for _, part in self._parts)
        """Whether no reward waits for another process."""

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the reward of a response; raises `RewardError` if one of them fails or is not finite."""
        total = 0.0
        for weight, part in self._parts:
            value = float(response == answer) if part is None else part(prompt, response, answer)
            if not math.isfinite(value):
                raise RewardError(f"a reward is {value}", hint="a reward is a finite number")
            total += weight * value
        return total

    def close(self) -> None:
        """End processes and connections."""
        for _, part in self._parts:
            if part is not None:
                part.close()


def _open(config: RewardConfig) -> RewardFunction | RewardService | None:
    """Return what computes a reward; None for an exact comparison."""
    if config.function is not None:
        return RewardFunction(config.function, config.timeout_s)
    return None if config.url is None else RewardService(config.url, config.timeout_s)

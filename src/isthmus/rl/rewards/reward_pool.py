"""`RewardPool`: the rewards of several samples at once, with a bound."""

from __future__ import annotations

from isthmus.core.job_parts.rl_job import RewardConfig
from isthmus.rl.rewards.call_pool import CallPool
from isthmus.rl.rewards.reward_sum import RewardSum


class RewardPool:
    """Up to `num_workers` sums of rewards, each with processes and connections of its own; any thread may call it."""

    def __init__(self, configs: tuple[RewardConfig, ...], num_workers: int) -> None:
        first = RewardSum(configs)
        self.is_immediate = first.is_immediate
        """Whether no reward waits for another process."""
        self.num_workers = 1 if self.is_immediate else num_workers
        self._pool = CallPool([first, *(RewardSum(configs) for _ in range(self.num_workers - 1))])

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the weighted sum of the rewards of a response; raises `RewardError`."""
        with self._pool.borrow() as one:
            return one(prompt, response, answer)

    def close(self) -> None:
        """End processes and connections; no call is under way."""
        for one in self._pool.members:
            one.close()

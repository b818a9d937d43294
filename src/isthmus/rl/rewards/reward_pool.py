"""`RewardPool`: the rewards of several samples at once, with a bound."""

from __future__ import annotations

import queue

from isthmus.core.job_parts.rl_job import RewardConfig
from isthmus.rl.rewards.reward_sum import RewardSum


class RewardPool:
    """Up to `num_workers` sums of rewards, each with processes and connections of its own; any thread may call it.

    A call waits while all are in use. The one that was used last is used first, so that processes start as they are
    needed: a second one only where two samples wait for a reward.
    """

    def __init__(self, configs: tuple[RewardConfig, ...], num_workers: int) -> None:
        self._free: queue.LifoQueue[RewardSum] = queue.LifoQueue()
        sums = [RewardSum(configs) for _ in range(num_workers)]
        self.is_immediate = sums[0].is_immediate
        """Whether no reward waits for another process."""
        self.num_workers = 1 if self.is_immediate else num_workers
        self._sums = sums[: self.num_workers]
        for one in reversed(self._sums):
            self._free.put(one)

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the weighted sum of the rewards of a response; raises `RewardError`."""
        one = self._free.get()
        try:
            return one(prompt, response, answer)
        finally:
            self._free.put(one)

    def close(self) -> None:
        """End processes and connections; no call is under way."""
        for one in self._sums:
            one.close()

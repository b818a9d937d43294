"""`RewardService`: rewards from an HTTP service."""

from __future__ import annotations

import httpx

from isthmus.rl.rewards.http_service import HttpService
from isthmus.rl.rewards.reward_error import RewardError

_FORM = 'the service answers {"reward": number}'


class RewardService:
    """Posts `{"prompt", "response", "answer"}` to `url`, whose answer is `{"reward": number}`."""

    def __init__(self, url: str, timeout_s: float, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        self._service = HttpService(url, "reward", timeout_s, RewardError, _FORM, transport=transport)

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the reward of a response; raises `RewardError` for a service that fails or is late."""
        found = self._service.call({"prompt": prompt, "response": response, "answer": answer}, "reward")
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise RewardError(f"{self._url} gave no reward: {found!r:.60}", hint=_FORM) from error

    def close(self) -> None:
        """Close the connections."""
        self._service.close()

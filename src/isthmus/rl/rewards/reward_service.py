"""`RewardService`: rewards from an HTTP service."""

from __future__ import annotations

import httpx

from isthmus.rl.rewards.reward_error import RewardError

_MAX_ANSWER_BYTES = 1 << 16


class RewardService:
    """Posts `{"prompt", "response", "answer"}` to `url`, whose answer is `{"reward": number}`."""

    def __init__(self, url: str, timeout_s: float, transport: httpx.BaseTransport | None = None) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client = httpx.Client(timeout=timeout_s, transport=transport, follow_redirects=False)

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the reward of a response; raises `RewardError` for a service that fails or is late."""
        body = {"prompt": prompt, "response": response, "answer": answer}
        try:
            with self._client.stream("POST", self._url, json=body) as reply:
                reply.raise_for_status()
                content = b""
                for piece in reply.iter_bytes():
                    content += piece
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise RewardError(f"{self._url} answered more than {_MAX_ANSWER_BYTES} bytes")
            return float(httpx.Response(200, content=content).json()["reward"])
        except httpx.TimeoutException as error:
            hint = "set timeout_s of the reward, or make the service faster"
            raise RewardError(f"{self._url} took longer than {self._timeout_s:g} s", hint=hint) from error
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            hint = 'the service answers {"reward": number}'
            raise RewardError(f"{self._url} gave no reward: {reason}", hint=hint) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

"""`Environment`: calls what answers the turns of a response: a function of the user's, or an HTTP service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx

from isthmus.core.job_parts.rl_job import EnvironmentConfig
from isthmus.rl.environments.turn_error import TurnError
from isthmus.rl.rewards.function_process import FunctionProcess
from isthmus.rl.rewards.http_service import HttpService

_FORM = 'the service answers {"observation": text}, a list of token numbers, or null at the end'
_TOKEN_BYTES = 64
"""Most bytes of an answer for each token of an observation."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a response: whose it is, its text, and its tokens as they were sampled or observed."""

    by: Literal["model", "environment"]
    text: str
    tokens: tuple[int, ...]


class Environment:
    """One process or connection; it keeps nothing between calls, each of which has all turns so far."""

    def __init__(self, config: EnvironmentConfig, transport: httpx.BaseTransport | None = None) -> None:
        self._function: FunctionProcess | None = None
        self._service: HttpService | None = None
        most = 1024 + _TOKEN_BYTES * config.max_observation_tokens
        if config.function is not None:
            self._function = FunctionProcess(
                config.function, "environment", config.timeout_s, TurnError, max_bytes=most
            )  # fmt: skip
        elif config.url is not None:
            self._service = HttpService(
                config.url, "environment", config.timeout_s, TurnError, _FORM, transport=transport, max_bytes=most
            )

    def answer(self, prompt: str, turns: Sequence[Turn], answer: str) -> Any:
        """Return text, token numbers, or None where the response has ended; raises `TurnError`."""
        told = [asdict(one) for one in turns]
        if self._function is not None:
            return self._function.call(prompt, told, answer)
        if self._service is None:
            raise RuntimeError("an environment has a function or a url")
        return self._service.call({"prompt": prompt, "turns": told, "answer": answer}, "observation")

    def close(self) -> None:
        """End the process or the connections."""
        for one in (self._function, self._service):
            if one is not None:
                one.close()

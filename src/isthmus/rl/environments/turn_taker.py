"""`TurnTaker`: what follows a turn of the model: tokens of the environment, or the end of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from isthmus.core.job_parts.rl_job import EnvironmentConfig
from isthmus.rl.environments.environment import Environment, Turn
from isthmus.rl.environments.turn_error import TurnError
from isthmus.rl.ledger.ledger_records import TokenRange
from isthmus.rl.rewards.call_pool import CallPool

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


class TurnTaker:
    """Calls the environments of a run, `num_workers` at a time; any thread may call it.

    Tokens that the model sampled are never encoded again: an observation is encoded alone, and appended.
    """

    def __init__(
        self, config: EnvironmentConfig, max_response_tokens: int, vocab_size: int, encode: Encode, decode: Decode,
        num_workers: int = 1, make: Callable[[EnvironmentConfig], Environment] = Environment,
    ) -> None:  # fmt: skip
        self._config, self._most, self._vocab_size = config, max_response_tokens, vocab_size
        self._encode, self._decode = encode, decode
        self._pool = CallPool([make(config) for _ in range(num_workers)])
        self.num_workers = num_workers

    def observe(
        self, prompt: str, answer: str, ranges: Sequence[TokenRange], tokens: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Return the tokens that follow a turn of the model, or None where the response ends.

        It ends where the environment says so, after `max_turns` turns, and where no token of another turn has room
        after the observation. Raises `TurnError`.
        """
        turns = self.turns(ranges, tokens)
        if len(tokens) >= self._most or sum(one.by == "model" for one in turns) >= self._config.max_turns:
            return None
        with self._pool.borrow() as environment:
            found = environment.answer(prompt, turns, answer)
        if found is None:
            return None
        added = self._tokens(found)
        return None if len(tokens) + len(added) >= self._most else added

    def turns(self, ranges: Sequence[TokenRange], tokens: Sequence[int]) -> list[Turn]:
        """Return the turns of a response; ranges of one turn may be of several versions and engines."""
        bounds: list[tuple[bool, int, int]] = []
        for one in ranges:
            start = bounds.pop()[1] if bounds and bounds[-1][0] and one.is_sampled else one.start
            bounds.append((one.is_sampled, start, one.end))
        return [
            Turn(
                by="model" if is_sampled else "environment", text=self._decode(tokens[start:end]),
                tokens=tuple(tokens[start:end]),
            )
            for is_sampled, start, end in bounds
        ]  # fmt: skip

    def scored_text(self, ranges: Sequence[TokenRange], tokens: Sequence[int]) -> str:
        """Return what rewards get as the response: the last turn of the model, or all turns."""
        turns = self.turns(ranges, tokens)
        if self._config.scores == "transcript":
            return "".join(one.text for one in turns)
        return next((one.text for one in reversed(turns) if one.by == "model"), "")

    def close(self) -> None:
        """End processes and connections; no call is under way."""
        for one in self._pool.members:
            one.close()

    def _tokens(self, found: Any) -> tuple[int, ...]:
        """Return the tokens of an answer; raises `TurnError` for one that is no observation."""
        if isinstance(found, str):
            tokens = tuple(int(one) for one in self._encode(found))
        elif isinstance(found, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in found):
            tokens = tuple(found)
        else:
            raise TurnError(
                f"the environment answered {found!r:.60}", hint="it answers text, a list of token numbers, or null"
            )
        if not tokens:
            raise TurnError("the environment answered no token", hint="answer null where the response has ended")
        if len(tokens) > self._config.max_observation_tokens:
            raise TurnError(
                f"an observation has {len(tokens)} tokens, max_observation_tokens is "
                f"{self._config.max_observation_tokens}",
                hint="shorten it, or set rl.environment.max_observation_tokens",
            )
        outside = next((one for one in tokens if not 0 <= one < self._vocab_size), None)
        if outside is not None:
            raise TurnError(
                f"the environment answered token {outside} in a vocabulary of {self._vocab_size}",
                hint="use the job's tokenizer, or answer text",
            )
        return tokens

"""Requests to a decode engine and its events, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

OnSwitch = Literal["keep", "refill", "abort"]
"""Under newer weights unfinished sequences go on with their cache, compute it again, or are dropped."""


class SequenceKey(NamedTuple):
    """A sequence: its prompt, its number among the samples of the prompt, and how often it began again."""

    prompt: int
    sample: int
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """What an engine is to decode: at most `max_response_tokens` after `prompt_tokens`, up to one of `stop_tokens`.

    `temperature` divides the logits; 0 takes the most probable token. `response_tokens` are those that another engine
    has decoded: decoding goes on after them. Draws follow from `seed`, prompt, sample and position alone. The
    experts of the first `routed_rows` tokens are known, and not reported again.
    """

    key: SequenceKey
    seed: int
    prompt_tokens: tuple[int, ...]
    max_response_tokens: int
    temperature: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    response_tokens: tuple[int, ...] = ()
    routed_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenDecoded:
    """Token number `position` of a response, decoded by weights `version`.

    `log_probability` is that of the distribution from which the token was drawn: at the request's temperature, and at
    temperature 1 where the request has 0. `routing` has the experts of all tokens before this one that were not
    reported yet, each as `RoutingShape` says; it is empty where the engine does not record them.
    """

    key: SequenceKey
    position: int
    token: int
    log_probability: float
    version: int
    routing: bytes = b""


@dataclass(frozen=True, kw_only=True)
class DecodingEnded:
    """A response of `num_tokens` tokens ended: by a stop token, at its greatest length, or as its logits were NaN."""

    key: SequenceKey
    num_tokens: int
    reason: Literal["stop", "length", "failed"]


DecodeEvent = TokenDecoded | DecodingEnded

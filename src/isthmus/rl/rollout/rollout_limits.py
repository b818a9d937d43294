"""`RolloutLimits`: what a response may be, and what is wrong with one that an engine reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.rl.check_inputs import ROUNDING
from isthmus.rl.ledger.ledger_records import SampleRecord
from isthmus.rl.rollout.engine_messages import EndReport, TokensReport
from isthmus.rl.rollout.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """What a response may be: its most tokens, the vocabulary, and what is added to its reward by its length.

    `stop_tokens` end a response; where they are known, one that goes on after them or ends early without them is no
    sample. `owners` are all that decode. `routing` is the shape of what engines report where it is replayed.
    """

    max_response_tokens: int
    vocab_size: int
    penalty_of: Callable[[int], float]
    stop_tokens: frozenset[int] = frozenset()
    owners: frozenset[str] = frozenset()
    routing: RoutingShape | None = None

    def tokens_problem(self, report: TokensReport) -> str:
        """Return what no engine of this model could have sampled, or ""."""
        count = len(report.tokens)
        if not count or count != len(report.log_probabilities):
            return f"{count} tokens with {len(report.log_probabilities)} log-probabilities"
        if not 0 <= report.start <= self.max_response_tokens - count:
            return f"tokens {report.start} to {report.start + count} of at most {self.max_response_tokens}"
        for token, value in zip(report.tokens, report.log_probabilities, strict=True):
            if not 0 <= token < self.vocab_size:
                return f"token {token} in a vocabulary of {self.vocab_size}"
            if not (math.isfinite(value) and value <= ROUNDING):
                return f"log-probability {value} of token {token}"
        return ""

    def is_complete(self, sample: SampleRecord | None, kept: Trajectory, num_tokens: int) -> bool:
        """Return whether a response needs no token more: its engine reported the last one, and was lost before the end.

        An observation that ends with an end token is answered.
        """
        if sample is None or not sample.ranges:
            return False
        return num_tokens >= self.max_response_tokens or (
            sample.ranges[-1].is_sampled and kept.tokens[num_tokens - 1] in self.stop_tokens
        )

    def end_problem(self, sample: SampleRecord | None, kept: Trajectory | None, report: EndReport) -> str:
        """Return why a response cannot have ended, or ""."""
        if kept is None or not self.stop_tokens or len(kept.tokens) != report.num_tokens:
            return ""  # the ledger asks for what is missing
        observed = [one.end for one in sample.ranges if not one.is_sampled] if sample is not None else []
        begun = max(observed, default=0)
        response = enumerate(kept.tokens[begun:], begun + 1)
        at = next((place for place, token in response if token in self.stop_tokens), None)
        if at is not None and at < report.num_tokens:
            return f"a response of {report.num_tokens} tokens goes on after the end token, number {at}"
        if at is None and report.num_tokens < self.max_response_tokens:
            return f"a response ends after {report.num_tokens} tokens without an end token"
        return ""

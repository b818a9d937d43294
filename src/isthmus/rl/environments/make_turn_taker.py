"""`make_turn_taker`: what calls the environment of a job, with the tokenizer of its prompts."""

from __future__ import annotations

from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.data import PromptSet
from isthmus.rl.environments.turn_taker import TurnTaker


def make_turn_taker(rl: RlConfig, prompts: PromptSet, vocab_size: int, num_workers: int) -> TurnTaker | None:
    """Return it for up to `num_workers` calls at a time, None for a job whose responses are one turn."""
    if rl.environment is None:
        return None
    return TurnTaker(
        rl.environment, rl.max_response_tokens, vocab_size, prompts.encode, prompts.text_of, num_workers
    )  # fmt: skip

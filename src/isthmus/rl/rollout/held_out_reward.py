"""`held_out_reward`: the mean reward of the most probable responses to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from isthmus.core.job import Job
from isthmus.data import PromptSet
from isthmus.rl.rewards.reward_error import RewardError
from isthmus.rl.rewards.reward_sum import RewardSum
from isthmus.rl.rollout.open_engine import open_engine
from isthmus.serve import DecodeRequest, SequenceKey, TokenDecoded


def held_out_reward(
    job: Job, prompts: PromptSet, weights: Mapping[str, torch.Tensor], device: torch.device
) -> float | None:
    """Return the mean reward by `weights` over up to `training.evaluate_samples` held-out prompts; None without any.

    A response whose reward fails counts as 0.
    """
    if job.rl is None:
        raise ValueError(f"job {job.name} has task {job.task}")
    chosen = prompts.held_out[: job.training.evaluate_samples]
    if not chosen:
        return None
    engine = open_engine(job, 0, weights, device)
    responses: list[list[int]] = [[] for _ in chosen]
    for number, prompt in enumerate(chosen):
        engine.add(
            DecodeRequest(
                key=SequenceKey(number, 0), seed=0, prompt_tokens=prompt.tokens, temperature=0.0,
                max_response_tokens=job.rl.max_response_tokens, stop_tokens=frozenset({prompts.end_id}),
            )
        )  # fmt: skip
    while engine.num_sequences:
        for event in engine.step():
            if isinstance(event, TokenDecoded):
                responses[event.key.prompt].append(event.token)
    reward, total = RewardSum(job.rl.rewards), 0.0
    try:
        for prompt, tokens in zip(chosen, responses, strict=True):
            try:
                total += reward(prompt.text, prompts.text_of(tokens), prompt.answer)
            except RewardError as error:
                print(f"warning: held-out prompt: {error.message}", flush=True)
    finally:
        reward.close()
    return total / len(chosen)

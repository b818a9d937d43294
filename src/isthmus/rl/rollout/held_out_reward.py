"""`held_out_reward`: the mean reward of the most probable responses to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from isthmus.core.job import Job
from isthmus.data import Prompt, PromptSet
from isthmus.rl.environments.make_turn_taker import make_turn_taker
from isthmus.rl.environments.turn_error import TurnError
from isthmus.rl.environments.turn_taker import TurnTaker
from isthmus.rl.ledger.ledger_records import ENVIRONMENT, TokenRange
from isthmus.rl.rewards.reward_error import RewardError
from isthmus.rl.rewards.reward_sum import RewardSum
from isthmus.rl.rollout.open_engine import open_engine
from isthmus.serve import DecodeEngine, DecodeRequest, SequenceKey, TokenDecoded


def held_out_reward(
    job: Job, prompts: PromptSet, weights: Mapping[str, torch.Tensor], device: torch.device
) -> float | None:
    """Return the mean reward by `weights` over up to `training.evaluate_samples` held-out prompts; None without any.

    A response whose environment or reward fails counts as 0.
    """
    if job.rl is None:
        raise ValueError(f"job {job.name} has task {job.task}")
    chosen = prompts.held_out[: job.training.evaluate_samples]
    if not chosen:
        return None
    found = [_Response() for _ in chosen]
    engine = open_engine(job, 0, weights, device)
    turns = make_turn_taker(job.rl, prompts, prompts.vocab_size, 1)
    reward, total = RewardSum(job.rl.rewards), 0.0
    waiting = set(range(len(chosen)))
    try:
        while waiting:
            _decode(engine, [(number, chosen[number], found[number]) for number in sorted(waiting)], job, prompts)
            if turns is None:
                break
            waiting = {number for number in waiting if _goes_on(turns, chosen[number], found[number])}
        for prompt, one in zip(chosen, found, strict=True):
            text = prompts.text_of(one.tokens) if turns is None else turns.scored_text(one.ranges, one.tokens)
            try:
                total += 0.0 if one.has_failed else reward(prompt.text, text, prompt.answer)
            except RewardError as error:
                print(f"warning: held-out prompt: {error.message}", flush=True)
    finally:
        reward.close()
        if turns is not None:
            turns.close()
    return total / len(chosen)


class _Response:
    """A response: its tokens, and the ranges of its turns."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ranges: list[TokenRange] = []
        self.has_failed = False

    def end_turn(self, owner: str) -> None:
        """Let the tokens since the last turn be one of `owner`."""
        start = self.ranges[-1].end if self.ranges else 0
        self.ranges.append(
            TokenRange(start=start, end=len(self.tokens), version=0, engine=owner, owner=owner)
        )  # fmt: skip


def _decode(engine: DecodeEngine, todo: Sequence[tuple[int, Prompt, _Response]], job: Job, prompts: PromptSet) -> None:
    """Decode a turn of each response."""
    if job.rl is None:
        raise ValueError(f"job {job.name} has task {job.task}")
    responses = {}
    for number, prompt, one in todo:
        responses[SequenceKey(number, 0)] = one
        engine.add(
            DecodeRequest(
                key=SequenceKey(number, 0), seed=0, prompt_tokens=prompt.tokens, temperature=0.0,
                max_response_tokens=job.rl.max_response_tokens, stop_tokens=prompts.stop_tokens,
                response_tokens=tuple(one.tokens),
            )
        )  # fmt: skip
    while engine.num_sequences:
        for event in engine.step():
            if isinstance(event, TokenDecoded):
                responses[event.key].tokens.append(event.token)
    for one in responses.values():
        one.end_turn("model")


def _goes_on(turns: TurnTaker, prompt: Prompt, one: _Response) -> bool:
    """Append what the environment answers; False where the response ends."""
    try:
        added = turns.observe(prompt.text, prompt.answer, one.ranges, one.tokens)
    except TurnError as error:
        print(f"warning: held-out prompt: {error.message}", flush=True)
        one.has_failed, added = True, None
    if added is None:
        return False
    one.tokens += added
    one.end_turn(ENVIRONMENT)
    return True

"""Rule of responses whose last token arrived and whose end did not: they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.data import open_prompts
from isthmus.rl import LedgerConfig
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_messages import EndReport, EngineOrder, StartSample, TokensReport
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from tests.rl.rl_jobs import make_rl_job

CONFIG = LedgerConfig(group=3, batch_prompts=1, max_staleness=0, filter_groups=False)
SENT = ((9, 9, 9, 9), (9, 257))


@pytest.mark.parametrize("ends", ["the engine", "the process"])
def test_a_response_whose_end_was_lost_is_scored_and_not_decoded_again(ends: str, tmp_path: Path) -> None:
    """One of all its tokens and one with an end token; one that lacks a token goes on, after a restart too."""
    job = make_rl_job(tmp_path)
    assert job.rl is not None
    prompts, rewards = open_prompts(job), job.rl.rewards
    limits = RolloutLimits(
        max_response_tokens=4, vocab_size=272, penalty_of=lambda _: 0.0, stop_tokens=frozenset({257})
    )

    def start() -> RolloutCoordinator:
        made = RolloutCoordinator(CONFIG, limits, prompts, RewardPool(rewards, 1), RolloutStore(tmp_path / "l"))
        made.begin(0)
        return made

    made = start()
    orders: list[EngineOrder | None] = []
    made.join_engine("b#1", "b", 3, 0, orders.append)
    given = [one for one in orders if isinstance(one, StartSample)]
    for one, tokens in zip(given, (*SENT, (9,)), strict=True):
        made.report("b#1", TokensReport(sample=one.sample, lease=one.lease, start=0, version=0, tokens=tokens,
                                        log_probabilities=(-0.5,) * len(tokens)))  # fmt: skip
    if ends == "the process":
        made.close()
        made = start()
    else:
        made.lose_engine("b#1")
    orders.clear()
    made.join_engine("b#2", "b", 3, 0, orders.append)
    again = {one.sample: one.response_tokens for one in orders if isinstance(one, StartSample)}
    assert again == {given[2].sample: (9,)}
    last = next(one for one in orders if isinstance(one, StartSample))
    rest = TokensReport(
        sample=last.sample, lease=last.lease, start=1, version=0, tokens=(257,), log_probabilities=(-0.5,)
    )
    made.report("b#2", rest)
    made.report("b#2", EndReport(sample=last.sample, lease=last.lease, num_tokens=2))
    made.request_batch(0)
    batch = next((found for _ in range(200) if (found := made.wait_batch(0.1)) is not None), ())
    assert batch == tuple(one.sample for one in given)
    assert [tuple(made.sample(key)[1].tokens) for key in batch] == [*SENT, (9, 257)]
    made.close()

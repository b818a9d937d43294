"""Rules of rewards that are computed at once: their bound, and batches that do not depend on which one ends first."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from isthmus.core.job_parts.rl_job import RewardConfig, RlConfig
from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    EngineJoined,
    SampleEnded,
    SampleScored,
    TokensReported,
    TrainerJoined,
)
from isthmus.rl.ledger.rollout_instructions import GenerateSample, ScoreSample, TrainBatch
from isthmus.rl.rewards.reward_error import RewardError
from isthmus.rl.rewards.reward_pool import RewardPool

MEETING = '''
import os
import pathlib
import time

HERE = pathlib.Path(__file__).parent


def meet(prompt, response, answer):
    """Return how many calls were under way, once there are as many as the answer says."""
    (HERE / f"{os.getpid()}.call").touch()
    while (found := len(list(HERE.glob("*.call")))) < int(answer):
        time.sleep(0.002)
    return found


def fail(prompt, response, answer):
    raise ValueError(response)
'''


def test_rewards_are_computed_at_once_up_to_their_bound(tmp_path: Path) -> None:
    """Each of three calls ends only once all three run: in three processes, and six calls need no fourth."""
    (tmp_path / "meeting.py").write_text(MEETING)
    pool = RewardPool((RewardConfig(function=f"{tmp_path / 'meeting.py'}:meet", timeout_s=60),), 3)
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(pool("p", "r", "3"))) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    pool.close()
    assert found == [3.0] * 6


def test_a_reward_that_failed_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    """One place, three calls; exact answers need no process, and so one place."""
    (tmp_path / "meeting.py").write_text(MEETING)
    pool = RewardPool((RewardConfig(function=f"{tmp_path / 'meeting.py'}:fail"),), 1)
    for number in range(3):
        with pytest.raises(RewardError, match=f"ValueError: {number}"):
            pool("p", str(number), "a")
    pool.close()
    exact = RewardPool((RewardConfig(exact=True),), 8)
    assert (exact.is_immediate, exact.num_workers, exact("p", "a", "a")) == (True, 1, 1.0)


@pytest.mark.parametrize("workers", [0, 65])
def test_a_job_has_1_to_64_workers(workers: int) -> None:
    """Others are refused."""
    with pytest.raises(ValueError, match="reward_workers"):
        RlConfig(max_prompt_tokens=1, max_response_tokens=1, reward={"exact": True}, reward_workers=workers)


def batch_of(seed: int) -> tuple[object, ...]:
    """Return the batch of a step whose rewards come in an order by `seed`; every second prompt is filtered."""
    ledger, mixed = TrajectoryLedger(LedgerConfig(group=3, batch_prompts=3, max_staleness=0)), random.Random(seed)
    ledger.handle(TrainerJoined(trainer=1, version=0))
    todo = [*ledger.handle(BatchRequested(trainer=1, step=0))]
    todo += ledger.handle(EngineJoined(engine="a", owner="o", num_slots=9, version=0))
    for _ in range(1000):
        one = todo.pop(mixed.randrange(len(todo)))
        if isinstance(one, TrainBatch):
            return one.samples
        if isinstance(one, GenerateSample):
            given = {"engine": one.engine, "sample": one.sample, "lease": one.lease}
            todo += ledger.handle(TokensReported(**given, start=0, num_tokens=1, version=0))
            todo += ledger.handle(SampleEnded(**given, num_tokens=1))
        if isinstance(one, ScoreSample):
            differs = one.sample.prompt % 2 and one.sample.number == 0
            todo += ledger.handle(SampleScored(sample=one.sample, score_try=1, reward=float(differs)))
        check_trajectories(ledger.state)
    raise AssertionError("no batch")


def test_a_step_has_the_same_samples_whichever_reward_comes_first() -> None:
    """At staleness 0, filtered groups included; so a curve is the same bit for bit."""
    assert {batch_of(seed) for seed in range(40)} == {batch_of(0)}
    assert [one.prompt for one in batch_of(0)] == [1, 1, 1, 3, 3, 3, 5, 5, 5]

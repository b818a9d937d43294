"""Rules of reports that no engine of the model sends: named, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.data import open_prompts
from isthmus.rl import LedgerConfig, check_trajectories, summarise_ledger
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_messages import EngineOrder, StartSample, TokensReport
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from tests.rl.rl_jobs import make_rl_job


def start(folder: Path) -> tuple[RolloutCoordinator, list[EngineOrder | None]]:
    """Return a ledger's holder with an engine of two samples, and the orders to it."""
    job = make_rl_job(folder)
    assert job.rl is not None
    limits = RolloutLimits(max_response_tokens=4, vocab_size=272, penalty_of=lambda _: 0.0)
    config = LedgerConfig(group=2, batch_prompts=1, max_staleness=0, filter_groups=False)
    store = RolloutStore(folder / "l")
    made = RolloutCoordinator(config, limits, open_prompts(job), RewardPool(job.rl.rewards, 1), store)
    made.begin(0)
    orders: list[EngineOrder | None] = []
    made.join_engine("b#1", "b", 2, 0, orders.append)
    return made, orders


@pytest.mark.attack
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tokens": [272]}, "token 272 in a vocabulary of 272"),
        ({"tokens": [-1]}, "token -1"),
        ({"log_probabilities": [0.01]}, "log-probability 0.01"),
        ({"log_probabilities": [float("nan")]}, "log-probability nan"),
        ({"log_probabilities": [float("-inf")]}, "log-probability -inf"),
        ({"log_probabilities": []}, "1 tokens with 0"),
        ({"tokens": [], "log_probabilities": []}, "0 tokens"),
        ({"start": 4}, "tokens 4 to 5 of at most 4"),
        ({"start": -1}, "tokens -1"),
        ({"routing": b"\x00"}, "1 bytes of routing"),
    ],
)
def test_a_report_that_no_engine_sends_is_named_and_its_sample_begins_again(
    changed: dict[str, object], problem: str, tmp_path: Path
) -> None:
    """Nothing of it is recorded, and no prompt is lost or doubled."""
    made, orders = start(tmp_path)
    first = next(one for one in orders if isinstance(one, StartSample))
    values = {"start": 0, "version": 0, "tokens": [5], "log_probabilities": [-0.5]} | changed
    report = TokensReport(sample=first.sample, lease=first.lease, **values)  # type: ignore[arg-type]
    assert problem in made.report("b#1", report)
    again = [one for one in orders if isinstance(one, StartSample) and one.sample[:2] == first.sample[:2]][-1]
    assert (again.lease != first.lease, again.response_tokens) == (True, ())
    check_trajectories(made.ledger.state)
    told = summarise_ledger(made.ledger.state)
    assert (told.lost, told.doubled) == (0, 0)
    made.close()

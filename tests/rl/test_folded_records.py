"""Rules of records that become counts: a ledger does not grow with its run, and says the same."""

from __future__ import annotations

import json

import pytest

from isthmus.core.errors import InputError, NotFoundError
from isthmus.data import PromptSet
from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories, summarise_ledger
from isthmus.rl.ledger.ledger_snapshot import dump_ledger, restore_ledger
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    EngineJoined,
    EngineUpdated,
    RecordsFolded,
    SampleAudited,
    SampleEnded,
    SampleScored,
    StepTrained,
    TokensReported,
    TrainerJoined,
)
from isthmus.rl.ledger.rollout_instructions import EventRefused, GenerateSample
from isthmus.rl.process.policy_method import LEDGER_FOLDER
from isthmus.rl.process.show_ledger import main
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.read_ledger import read_audits
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore

CONFIG = LedgerConfig(group=2, batch_prompts=2, max_staleness=0)


def run_of(steps: int, *, folds: bool) -> TrajectoryLedger:
    """Return the ledger of a run in which every third prompt is filtered and one sample of each step audited."""
    ledger = TrajectoryLedger(CONFIG)
    todo = list(ledger.handle(EngineJoined(engine="a", owner="o", num_slots=8, version=0)))
    ledger.handle(TrainerJoined(trainer=1, version=0))
    for step in range(steps):
        todo += ledger.handle(BatchRequested(trainer=1, step=step))
        while ledger.state.next_step == step:
            one = todo.pop(0)
            if not isinstance(one, GenerateSample):
                continue
            given = {"engine": one.engine, "sample": one.sample, "lease": one.lease}
            todo += ledger.handle(TokensReported(**given, start=0, num_tokens=3, version=step))
            todo += ledger.handle(SampleEnded(**given, num_tokens=3))
            if one.sample.number == 0:
                ledger.handle(SampleAudited(sample=one.sample, owner="o", problem=""))
            reward = float(one.sample.prompt % 3 > 0 and one.sample.number)
            todo += ledger.handle(SampleScored(sample=one.sample, score_try=1, reward=reward))
        ledger.handle(StepTrained(trainer=1, step=step))
        todo += ledger.handle(EngineUpdated(engine="a", version=step + 1))
        if folds:
            todo += ledger.handle(RecordsFolded(before=step - 1))
        check_trajectories(ledger.state)
    return ledger


def test_a_snapshot_does_not_grow_and_the_counts_are_the_same() -> None:
    """After 30 steps it is at most a fifth longer than after 10; without folding it is three times as long."""
    sizes = {
        (steps, folds): len(json.dumps({**dump_ledger(run_of(steps, folds=folds).state), "folded": None}))
        for steps in (10, 30) for folds in (True, False)
    }  # fmt: skip
    assert sizes[30, True] < 1.2 * sizes[10, True]
    assert sizes[30, False] > 2.5 * sizes[10, False]
    assert summarise_ledger(run_of(30, folds=True).state) == summarise_ledger(run_of(30, folds=False).state)


def test_folded_counts_survive_a_snapshot_and_a_trainer_may_go_back_to_what_is_kept() -> None:
    """Steps before are refused; the batch of a kept one comes again, the same."""
    ledger = run_of(8, folds=True)
    state = restore_ledger(CONFIG, json.loads(json.dumps(dump_ledger(ledger.state))))
    assert state.folded == ledger.state.folded
    assert state.first_step == 6
    again = TrajectoryLedger.of_state(state)
    assert isinstance(again.handle(TrainerJoined(trainer=2, version=5))[0], EventRefused)
    kept = ledger.state.batch_of(6)
    again.handle(TrainerJoined(trainer=2, version=6))
    (batch,) = again.handle(BatchRequested(trainer=2, step=6))
    assert tuple(dict.fromkeys(one.prompt for one in batch.samples)) == kept
    check_trajectories(again.state)


def test_audits_of_a_folded_step_are_still_told(tmp_path) -> None:
    """Their numbers, and what differed; a checkpoint of a step before is refused by name."""
    ledger, store = run_of(8, folds=True), RolloutStore(tmp_path)
    content = {"base": 3, "config": vars(CONFIG), "ledger": dump_ledger(ledger.state), "trajectories": []}
    store.snapshot(content)
    assert read_audits(tmp_path, 4) == {"step": 4, "samples": 4, "recomputed": 2, "differing": []}
    assert read_audits(tmp_path, 10)["recomputed"] == 2
    with pytest.raises(NotFoundError, match="no step 11"):
        read_audits(tmp_path, 11)
    limits = RolloutLimits(max_response_tokens=4, vocab_size=9, penalty_of=lambda _: 0.0)
    prompts = PromptSet([], [], _NoTokenizer(), "none", 0)
    made = RolloutCoordinator(CONFIG, limits, prompts, RewardPool((), 1), RolloutStore(tmp_path))
    with pytest.raises(InputError, match="of step 5, the ledger of the trajectories has steps 9 to 11"):
        made.begin(5)
    made.close()


def test_the_life_of_a_sample_is_told(tmp_path, capsys) -> None:
    """Who made which tokens, its reward, its step and its fate; of a prompt that is counted it is said so."""
    ledger = run_of(4, folds=True)
    store = RolloutStore(tmp_path / LEDGER_FOLDER)
    store.snapshot({"base": 3, "config": vars(CONFIG), "ledger": dump_ledger(ledger.state), "trajectories": []})
    prompt = ledger.state.batch_of(3)[0]
    assert main([str(tmp_path), "prompt", str(prompt)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_step"] == 3
    first, second = found["samples"]
    piece = {"start": 0, "end": 3, "version": 3, "engine": "a", "owner": "o"}
    assert first == {
        "sample": [prompt, 0, 0], "state": "trained", "turns": 1, "ranges": [piece], "engine": None, "tries": 1,
        "reward": 0.0, "step": 3, "audit": {"owner": "o", "problem": ""},
    }  # fmt: skip
    assert (second["reward"], second["audit"]) == (1.0, None)
    for number, what in ((1, "is trained, and counted"), (999, "was not opened")):
        assert main([str(tmp_path), "prompt", str(number)]) > 0
        assert what in json.loads(capsys.readouterr().out)["error"]
    assert main([str(tmp_path), "prompt", "x"]) > 0


class _NoTokenizer:
    """A tokenizer that no test calls."""

    vocab_size, end_id = 9, 0

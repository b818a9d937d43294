"""Rules of the trajectory ledger: nothing lost, nothing doubled, staleness kept, whatever happens in which order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._rollout_faults import RolloutWorld
from isthmus.core.errors import IllegalTransitionError, InputError
from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories, summarise_ledger
from isthmus.rl.ledger.check_trajectories import LedgerInvariantError
from isthmus.rl.ledger.ledger_records import SampleState
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    EngineJoined,
    EngineLost,
    EngineUpdated,
    RolloutEvent,
    SampleEnded,
    SampleFailed,
    SampleKey,
    SampleScored,
    ScoreFailed,
    StepTrained,
    TokensReported,
    TrainerJoined,
)
from isthmus.rl.ledger.rollout_instructions import (
    AcknowledgeTokens,
    EndTraining,
    EventRefused,
    GenerateSample,
    RolloutInstruction,
    ScoreSample,
    StopSample,
    TrainBatch,
    UpdateEngine,
)
from isthmus.rl.ledger.sample_lifecycle import move_sample
from isthmus.sim.rollouts.meet_deadlines import meet_deadlines


def config(**changed: object) -> LedgerConfig:
    """Return a run of 1 prompt of 2 samples a step, two prompts in all, without filter and without stale tokens."""
    given_fields = {
        "group": 2, "batch_prompts": 1, "max_staleness": 0, "num_prompts": 2, "filter_groups": False, **changed,
    }  # fmt: skip
    return LedgerConfig(**given_fields)


class Script:
    """A ledger that is checked after each event of a test's story."""

    def __init__(self, **changed: object) -> None:
        self.ledger = TrajectoryLedger(config(**changed))

    def do(self, event: RolloutEvent) -> list[RolloutInstruction]:
        """Handle an event and return the instructions."""
        found = self.ledger.handle(event)
        check_trajectories(self.ledger.state)
        return found

    def join(self, name: str = "a", slots: int = 9, version: int = 0) -> list[RolloutInstruction]:
        """Let an engine join."""
        return self.do(EngineJoined(engine=name, owner=f"of {name}", num_slots=slots, version=version))

    def tokens(self, one: GenerateSample, start: int, count: int, version: int = 0) -> list[RolloutInstruction]:
        """Report tokens of a sample that an engine was given."""
        return self.do(TokensReported(engine=one.engine, sample=one.sample, lease=one.lease, start=start,
                                      num_tokens=count, version=version))  # fmt: skip

    def end(self, one: GenerateSample, count: int) -> list[RolloutInstruction]:
        """Report the end of a sample."""
        return self.do(SampleEnded(engine=one.engine, sample=one.sample, lease=one.lease, num_tokens=count))

    def finish(self, one: GenerateSample, reward: float = 1.0, version: int = 0) -> list[RolloutInstruction]:
        """Report 3 tokens, the end and the reward of a sample."""
        self.tokens(one, one.num_tokens, 3, version)
        self.end(one, one.num_tokens + 3)
        return self.do(SampleScored(sample=one.sample, score_try=1, reward=reward))

    def sample(self, prompt: int, index: int):
        """Return the record of a current sample."""
        return self.ledger.state.prompts[prompt].samples[index]


def only(kind: type, instructions: list[RolloutInstruction]) -> list:
    """Return the instructions of one kind."""
    return [one for one in instructions if isinstance(one, kind)]


def test_a_run_from_prompt_to_end() -> None:
    """Samples are given, scored and claimed; with no staleness the next prompt begins under the new version."""
    story = Script()
    first, second = story.join()
    assert (first.sample, second.sample) == (SampleKey(0, 0, 0), SampleKey(0, 1, 0))
    story.do(TrainerJoined(trainer=1, version=0))
    assert story.do(BatchRequested(trainer=1, step=0)) == []
    assert story.tokens(first, 0, 3) == [
        AcknowledgeTokens(engine="a", sample=first.sample, lease=first.lease, num_tokens=3)
    ]
    assert story.end(first, 3) == [ScoreSample(sample=first.sample, score_try=1)]
    story.do(SampleScored(sample=first.sample, score_try=1, reward=0.0))
    assert story.finish(second) == [TrainBatch(step=0, samples=(first.sample, second.sample))]
    assert story.do(StepTrained(trainer=1, step=0)) == [UpdateEngine(engine="a", version=1, on_update="keep")]
    begun = story.do(EngineUpdated(engine="a", version=1))
    assert [one.sample.prompt for one in begun] == [1, 1]
    for one in begun:
        story.finish(one, version=1)
    assert only(TrainBatch, story.do(BatchRequested(trainer=1, step=1)))
    story.do(StepTrained(trainer=1, step=1))
    assert story.do(BatchRequested(trainer=1, step=2)) == [EndTraining(step=2)]
    told = summarise_ledger(story.ledger.state)
    assert told.samples == {"trained": 4}
    assert told.tokens == {"of a": {"trained": 12}}
    assert (told.lost, told.doubled, told.staleness) == (0, 0, {0: 12})


def test_reported_tokens_survive_their_engine() -> None:
    """1 a reports 3 of 5 tokens 2 a dies 3 b goes on from token 3 4 a's late reports are stopped."""
    story = Script(max_staleness=1)
    first, *_ = story.join("a", slots=1)
    story.tokens(first, 0, 3)
    story.do(EngineLost(engine="a"))
    resumed = only(GenerateSample, story.join("b", slots=2))
    assert (resumed[0].sample, resumed[0].num_tokens) == (first.sample, 3)
    assert only(StopSample, story.tokens(first, 3, 2))
    story.tokens(resumed[0], 3, 2)
    assert [(one.start, one.end, one.engine) for one in story.sample(0, 0).ranges] == [(0, 3, "a"), (3, 5, "b")]


def test_doubled_and_overtaken_reports_count_once() -> None:
    """A gap is asked for again, an overlap adds its tail, a repeated report adds nothing, an early end waits."""
    story = Script()
    first, _ = story.join()
    for start, count, known in ((2, 2, 0), (0, 3, 3), (0, 3, 3), (2, 3, 5)):
        (told,) = story.tokens(first, start, count)
        assert told.num_tokens == known
    (told,) = story.end(first, 7)
    assert told.num_tokens == 5
    assert story.end(first, 5) == [ScoreSample(sample=first.sample, score_try=1)]
    assert only(StopSample, story.end(first, 5))


def test_a_step_waits_for_the_groups_that_must_be_in_it() -> None:
    """With staleness 0 and 2 prompts a step, both of version 0 are in step 0; no third begins before version 1."""
    story = Script(batch_prompts=2, num_prompts=9)
    begun = story.join()
    assert {one.sample.prompt for one in begun} == {0, 1}
    story.do(TrainerJoined(trainer=1, version=0))
    story.do(BatchRequested(trainer=1, step=0))
    *others, last = begun
    for one in others:
        assert not only(TrainBatch, story.finish(one))
    assert only(TrainBatch, story.finish(last))


def test_prompts_begin_ahead_as_far_as_staleness_allows() -> None:
    """With staleness 2 and 1 prompt a step: three prompts under version 0, a fourth once a batch is claimed."""
    story = Script(max_staleness=2, num_prompts=9)
    begun = story.join("a", slots=99)
    assert sorted({one.sample.prompt for one in begun}) == [0, 1, 2]
    story.do(TrainerJoined(trainer=1, version=0))
    story.do(BatchRequested(trainer=1, step=0))
    for one in begun[:2]:
        told = story.finish(one)
    assert only(TrainBatch, told)
    assert not only(GenerateSample, told)  # version 0 is too old for step 3, which a fourth group would have
    story.do(StepTrained(trainer=1, step=0))
    assert {one.sample.prompt for one in story.do(EngineUpdated(engine="a", version=1))} == {3}


@pytest.mark.parametrize(("rewards", "fate"), [((1.0, 1.0), "filtered"), ((1.0, 0.0), None)])
def test_groups_without_a_difference_are_filtered(rewards: tuple[float, float], fate: str | None) -> None:
    """Their place goes to the next prompt at once."""
    story = Script(filter_groups=True)
    begun = story.join()
    for one, reward in zip(begun, rewards, strict=True):
        told = story.finish(one, reward)
    assert story.ledger.state.prompts[0].fate == fate
    assert [one.sample.prompt for one in only(GenerateSample, told)] == ([1, 1] if fate else [])


def test_failures_begin_again_and_then_end_the_prompt() -> None:
    """A failed sample begins again without its tokens; the second failure of the prompt ends all its samples."""
    story = Script(max_failures=2)
    first, second = story.join()
    story.tokens(first, 0, 2)
    stopped, again = story.do(SampleFailed(engine="a", sample=first.sample, lease=first.lease))
    assert isinstance(stopped, StopSample)
    assert (again.sample, again.num_tokens) == (SampleKey(0, 0, 1), 0)
    told = story.do(SampleFailed(engine="a", sample=again.sample, lease=again.lease))
    assert {one.sample for one in only(StopSample, told)} == {again.sample, second.sample}
    assert story.ledger.state.prompts[0].fate is SampleState.FAILED
    assert {one.sample.prompt for one in only(GenerateSample, told)} == {1}
    assert summarise_ledger(story.ledger.state).tokens == {"of a": {"failed": 2}}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_bad_reward_is_asked_for_again(bad: float | None) -> None:
    """NaN, infinity and a function that raised; an answer to an earlier try is not counted."""
    story = Script(max_failures=2)
    first, _ = story.join()
    story.tokens(first, 0, 1)
    story.end(first, 1)
    event = (
        ScoreFailed(sample=first.sample, score_try=1) if bad is None
        else SampleScored(sample=first.sample, score_try=1, reward=bad)
    )  # fmt: skip
    assert story.do(event) == [ScoreSample(sample=first.sample, score_try=2)]
    assert story.do(event) == []
    story.do(SampleScored(sample=first.sample, score_try=2, reward=0.5))
    assert story.sample(0, 0).reward == 0.5


def test_abort_begins_unfinished_samples_again() -> None:
    """1 step 0 is trained 2 samples of version 0 are stale 3 they begin again once the engine has version 1."""
    story = Script(max_staleness=1, on_update="abort")
    begun = story.join("a", slots=9)
    assert {one.sample.prompt for one in begun} == {0, 1}
    story.do(TrainerJoined(trainer=1, version=0))
    story.do(BatchRequested(trainer=1, step=0))
    for one in begun[:2]:
        story.finish(one)
    told = story.do(StepTrained(trainer=1, step=0))
    assert {one.sample for one in only(StopSample, told)} == {one.sample for one in begun[2:]}
    assert not only(GenerateSample, told)
    told = story.do(EngineUpdated(engine="a", version=1))
    assert {one.sample for one in told} == {SampleKey(1, 0, 1), SampleKey(1, 1, 1)}
    assert summarise_ledger(story.ledger.state).samples == {"in_flight": 2, "stale": 2, "trained": 2}


def test_a_restored_trainer_gets_the_same_batches_again() -> None:
    """1 steps 0 and 1 are trained 2 the trainer is back at version 1 3 step 1 has the same samples, trained once."""
    story = Script(num_prompts=3, max_staleness=5)
    begun = story.join("a", slots=99)
    story.do(TrainerJoined(trainer=1, version=0))
    for one in begun:
        story.finish(one)
    batches = []
    for step in (0, 1):
        batches += only(TrainBatch, story.do(BatchRequested(trainer=1, step=step)))
        story.do(StepTrained(trainer=1, step=step))
    story.do(TrainerJoined(trainer=2, version=1))
    assert summarise_ledger(story.ledger.state).samples == {"in_flight": 4, "trained": 2}
    assert story.do(StepTrained(trainer=1, step=1)) == []  # of the trainer that is gone
    assert story.do(BatchRequested(trainer=2, step=1)) == batches[1:]
    story.do(StepTrained(trainer=2, step=1))
    assert summarise_ledger(story.ledger.state).samples == {"in_flight": 2, "trained": 4}


@pytest.mark.parametrize(
    "event",
    [
        EngineJoined(engine="z", owner="z", num_slots=0, version=0),
        EngineJoined(engine="z", owner="z", num_slots=1, version=1),
        EngineUpdated(engine="z", version=0),
        EngineUpdated(engine="a", version=1),
        BatchRequested(trainer=1, step=1),
        StepTrained(trainer=1, step=0),
        TrainerJoined(trainer=2, version=1),
    ],
)
def test_what_cannot_be_is_refused(event: RolloutEvent) -> None:
    """With a reason, and without a change."""
    story = Script()
    story.join()
    story.do(TrainerJoined(trainer=1, version=0))
    before = TrajectoryLedger.replay(config(), []).state
    (told,) = story.do(event)
    assert isinstance(told, EventRefused)
    assert story.ledger.state.version == before.version
    assert story.ledger.state.engines.keys() == {"a"}


def test_tokens_of_a_version_that_cannot_be_fail_the_sample() -> None:
    """A version that does not exist yet; the sample begins again."""
    story = Script()
    first, _ = story.join()
    told = story.tokens(first, 0, 3, version=1)
    assert only(EventRefused, told)
    assert [one.sample for one in only(GenerateSample, told)] == [SampleKey(0, 0, 1)]


def test_an_illegal_step_raises() -> None:
    """The table has no way from waiting to trained."""
    story = Script()
    story.join("a", slots=1)
    waiting = story.sample(0, 1)
    with pytest.raises(IllegalTransitionError, match="waiting -> trained"):
        move_sample(story.ledger.state, waiting, SampleState.TRAINED)


def test_the_check_finds_what_is_wrong() -> None:
    """A prompt in two batches, a gap in the tokens, and a sample that is too old."""
    story = Script(num_prompts=1)
    begun = story.join()
    story.do(TrainerJoined(trainer=1, version=0))
    for one in begun:
        story.finish(one)
    story.do(BatchRequested(trainer=1, step=0))
    state = story.ledger.state
    state.batches.append(state.batches[0])
    with pytest.raises(LedgerInvariantError, match="two batches"):
        check_trajectories(state)
    state.batches.pop()
    story.sample(0, 0).step = 1
    with pytest.raises(LedgerInvariantError, match="1 versions old"):
        check_trajectories(state)
    story.sample(0, 0).step = 0
    story.sample(0, 0).ranges *= 2
    with pytest.raises(LedgerInvariantError, match="tokens 0 after 3"):
        check_trajectories(state)


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 3))
def test_groups_fit_exactly_if_an_order_exists(deadlines: list[int], batch: int) -> None:
    """Earliest deadline first, `batch` a step, meets every deadline just when `meet_deadlines` says so."""
    in_order = all(place // batch <= one for place, one in enumerate(sorted(deadlines)))
    assert meet_deadlines(deadlines, 0, batch) == in_order


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"group": 1}, "group 1"), ({"batch_prompts": 0}, "0 prompts"), ({"max_staleness": -1}, "staleness -1"),
     ({"max_failures": 0}, "0 failures")],
)  # fmt: skip
def test_rules_that_describe_no_run_are_named(changed: dict[str, int], message: str) -> None:
    """Before anything starts."""
    with pytest.raises(InputError, match=message):
        config(**changed)


@pytest.mark.integration
@pytest.mark.parametrize("on_update", ["keep", "refill", "abort"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_faults_lose_and_double_nothing(on_update: str, max_staleness: int, whole: bool) -> None:
    """Over 400 faults of eight kinds for each rule (with `--whole` 1,200): every invariant holds after every event.

    A third of the runs have environments that answer turns, a third folds its records. And by what engines made and the
    trainer trained on: each prompt has one fate, those of the trainer are those of the ledger, no token is staler than
    it may be, and each run ends.
    """
    faults: Counter[str] = Counter()
    seed = 0
    while faults.total() < (1_200 if whole else 400):
        rules = LedgerConfig(
            group=2 + seed % 2, batch_prompts=1 + seed % 3, max_staleness=max_staleness, num_prompts=12,
            on_update=on_update, filter_groups=seed % 2 == 0,
        )  # fmt: skip
        observes = 0.4 if seed % 3 == 1 else 0.0
        world = RolloutWorld(
            rules, seed, 0.15, lambda ledger: check_trajectories(ledger.state), observes, folds=seed % 3 == 2
        )
        world.run()
        assert world.problems() == [], f"seed {seed}"
        told = summarise_ledger(world.ledger.state)
        assert (told.lost, told.doubled) == (0, 0)
        assert max(told.staleness, default=0) <= max_staleness
        faults += world.faults
        seed += 1
    assert len(faults) == 8, faults

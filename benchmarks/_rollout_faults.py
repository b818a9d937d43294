"""Engines, rewards and a trainer around a trajectory ledger, with faults drawn by a seed.

Messages are lost, doubled and overtake each other; engines die with what they have not reported, and come back with old
weights; the ledger restarts from its log, without the instructions that it gave last; the trainer goes back to its last
checkpoint; rewards raise or are NaN; and events arrive that cannot be. `RolloutWorld.run` ends when no prompt is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus.rl import LedgerConfig, TrajectoryLedger, summarise_ledger
from isthmus.rl.ledger.ledger_records import SampleState
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    EngineJoined,
    EngineLost,
    EngineUpdated,
    ObservationAdded,
    RecordsFolded,
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
    GenerateSample,
    RolloutInstruction,
    ScoreSample,
    StopSample,
    TrainBatch,
    UpdateEngine,
)

MAX_TURNS = 200_000
"""Turns after which a run that has not ended counts as stuck."""


@dataclass
class Decoding:
    """A sample on an engine: the versions of its tokens from `first` on, how many are acknowledged, its length."""

    key: SampleKey
    first: int
    length: int
    versions: list[int] = field(default_factory=list)
    acknowledged: int = 0


@dataclass
class Engine:
    """An engine: its weights, those that it is to fetch, and its samples by lease."""

    version: int
    wanted: int = 0
    samples: dict[int, Decoding] = field(default_factory=dict)


class RolloutWorld:
    """A run of `config` with faults at the rate `fault_share`; `check` is called after every event.

    `observe_share` of the turns of a response are answered by an environment, up to three of each. With `folds` records
    are folded into counts at each checkpoint.
    """

    def __init__(
        self, config: LedgerConfig, seed: int, fault_share: float, check: Callable[[TrajectoryLedger], None],
        observe_share: float = 0.0, folds: bool = False,
    ) -> None:  # fmt: skip
        self.observe_share, self.folds = observe_share, folds
        self.config, self.check, self.fault_share = config, check, fault_share
        self.random = random.Random(seed)
        self.ledger = TrajectoryLedger(config)
        self.log: list[RolloutEvent] = []
        self.pending: list[RolloutEvent] = []
        self.rewards: list[ScoreSample] = []
        self.engines: dict[str, Engine] = {}
        self.faults: Counter[str] = Counter()
        self.trainer, self.version, self.checkpoint, self.working = 0, 0, 0, False
        self.timeline: list[tuple[SampleKey, ...]] = []
        self.num_started = 0
        self.made: dict[tuple[SampleKey, int], set[int]] = {}
        self.ended = False

    def run(self) -> None:
        """Run until no prompt is left; raises `RuntimeError` where it gets stuck."""
        self.start_trainer(0)
        for _ in range(MAX_TURNS):
            if self.ended:
                return
            if self.random.random() < self.fault_share:
                self.fault()
            else:
                self.turn()
        raise RuntimeError(f"no end after {MAX_TURNS} turns: {self.ledger.state.open_prompts}")

    def turn(self) -> None:
        """Let one part of the world go on."""
        self.random.choice([self.deliver, self.deliver, self.decode, self.decode, self.score, self.train, self.join])()

    def send(self, event: RolloutEvent) -> None:
        """Put an event on its way."""
        self.pending.append(event)

    def handle(self, event: RolloutEvent) -> None:
        """Log an event, let the ledger handle it, and carry out its instructions."""
        self.log.append(event)
        instructions = self.ledger.handle(event)
        self.check(self.ledger)
        self.obey(instructions)

    def deliver(self) -> None:
        """Deliver some of the messages that are on their way: order is not kept."""
        for _ in range(min(self.random.randint(1, 8), len(self.pending))):
            self.handle(self.pending.pop(self.random.randrange(len(self.pending))))

    def join(self) -> None:
        """Start an engine of one of three owners, with weights of any age, up to three at a time."""
        if len(self.engines) < 3:
            self.num_started += 1
            owner = "abc"[self.num_started % 3]
            version = self.random.randint(0, self.ledger.state.newest)
            self.engines[f"{owner}{self.num_started}"] = Engine(version)
            self.handle(EngineJoined(
                engine=f"{owner}{self.num_started}", owner=owner, num_slots=5, version=version
            ))  # fmt: skip

    def decode(self) -> None:
        """Let an engine sample some tokens, fetch weights, and send again what is not acknowledged."""
        if not self.engines:
            return
        name = self.random.choice(sorted(self.engines))
        if name not in self.ledger.state.engines:
            del self.engines[name]  # it finds itself unknown, and starts again
            return
        engine = self.engines[name]
        if engine.wanted > engine.version and self.random.random() < 0.5:
            engine.version = engine.wanted
            self.send(EngineUpdated(engine=name, version=engine.version))
        for lease, one in engine.samples.items():
            if self.random.random() < 0.7:
                self.decode_one(name, engine, lease, one)

    def decode_one(self, name: str, engine: Engine, lease: int, one: Decoding) -> None:
        """Sample tokens of one response and report those without acknowledgement, a version at a time."""
        again = self.random.random() < 0.2
        room, known = one.length - one.first - len(one.versions), one.first + len(one.versions)
        for _ in range(min(self.random.randint(1, 4), room)):
            self.made.setdefault((one.key, one.first + len(one.versions)), set()).add(engine.version)
            one.versions.append(engine.version)
        at = max(one.acknowledged, one.first) if again else known
        while at < one.first + len(one.versions):
            version = one.versions[at - one.first]
            end = at
            while end < one.first + len(one.versions) and one.versions[end - one.first] == version:
                end += 1
            self.send(TokensReported(
                engine=name, sample=one.key, lease=lease, start=at, num_tokens=end - at, version=version
            ))  # fmt: skip
            at = end
        if at == one.length and (again or room):
            self.send(SampleEnded(engine=name, sample=one.key, lease=lease, num_tokens=one.length))

    def score(self) -> None:
        """Work out a reward, or what an environment answers."""
        if self.rewards:
            asked = self.rewards.pop(self.random.randrange(len(self.rewards)))
            found = self.ledger.find(asked.sample)
            if found is not None and found.num_turns < 4 and self.random.random() < self.observe_share:
                self.send(ObservationAdded(
                    sample=asked.sample, score_try=asked.score_try, num_tokens=self.random.randint(1, 5)
                ))  # fmt: skip
                return
            reward = float(self.random.random() < 0.6)
            self.send(SampleScored(sample=asked.sample, score_try=asked.score_try, reward=reward))

    def train(self) -> None:
        """Let the trainer end its step, or ask for a batch."""
        if self.working:
            self.working, self.version = False, self.version + 1
            if self.random.random() < 0.5:
                self.checkpoint = self.version
                if self.folds:
                    self.send(RecordsFolded(before=self.checkpoint))
        if self.version:  # until the ledger knows; it ignores what it knows
            self.send(StepTrained(trainer=self.trainer, step=self.version - 1))
        self.send(BatchRequested(trainer=self.trainer, step=self.version))

    def start_trainer(self, version: int) -> None:
        """Start the trainer with the weights of a checkpoint; steps after it are lost."""
        self.trainer, self.version, self.working = self.trainer + 1, version, False
        del self.timeline[version:]
        self.handle(TrainerJoined(trainer=self.trainer, version=version))

    def obey(self, instructions: list[RolloutInstruction]) -> None:
        """Carry out instructions; those to an engine that is gone are lost."""
        for one in instructions:
            match one:
                case GenerateSample():
                    self.begin(one)
                case StopSample() if one.engine in self.engines:
                    self.engines[one.engine].samples.pop(one.lease, None)
                case AcknowledgeTokens() if one.engine in self.engines:
                    sample = self.engines[one.engine].samples.get(one.lease)
                    if sample is not None:
                        sample.acknowledged = max(sample.acknowledged, one.num_tokens)
                case ScoreSample():
                    self.rewards.append(one)
                case UpdateEngine() if one.engine in self.engines:
                    engine = self.engines[one.engine]
                    engine.wanted = max(engine.wanted, one.version)
                    if engine.version >= one.version:
                        self.send(EngineUpdated(engine=one.engine, version=engine.version))
                case TrainBatch() if one.step == self.version and not self.working:
                    self.working = True
                    self.timeline.append(one.samples)
                case EndTraining() if one.step == self.version:
                    self.ended = True

    def begin(self, one: GenerateSample) -> None:
        """Begin or resume a sample, unless the engine has the lease already."""
        engine = self.engines.get(one.engine)
        if engine is None:
            self.send(EngineLost(engine=one.engine))
        elif one.lease not in engine.samples:
            found = self.ledger.find(one.sample)
            begun = [piece.end for piece in found.ranges if not piece.is_sampled] if found is not None else []
            length = max(begun, default=0) + 3 + (one.sample.prompt * 7 + one.sample.number * 5) % 17
            engine.samples[one.lease] = Decoding(one.sample, one.num_tokens, length, acknowledged=one.num_tokens)

    def fault(self) -> None:
        """Inject one fault of any kind that is possible now."""
        kinds = [self.lose_message, self.double_message, self.kill_engine, self.restart_ledger, self.restore_trainer,
                 self.fail_sample, self.fail_reward, self.send_nonsense]  # fmt: skip
        weights = [8, 8, 1, 2, 0.5, 0.5, 1, 4]
        kind = self.random.choices(kinds, weights)[0]
        if kind():
            self.faults[kind.__name__] += 1

    def lose_message(self) -> bool:
        """Lose a message of an engine; rewards and the trainer's come again by themselves or are sent again."""
        lossy = [one for one in self.pending if isinstance(one, TokensReported | SampleEnded | BatchRequested)]
        if lossy:
            self.pending.remove(self.random.choice(lossy))
        return bool(lossy)

    def double_message(self) -> bool:
        """Send a message twice, of those that are on their way or came long ago."""
        known = self.pending or self.log
        if known:
            self.pending.append(self.random.choice(self.random.choice([known, self.log or known])))
        return bool(known)

    def kill_engine(self) -> bool:
        """End an engine with all that it did not report; the ledger learns of it now or when it is back."""
        if not self.engines:
            return False
        name = self.random.choice(sorted(self.engines))
        del self.engines[name]
        self.handle(EngineLost(engine=name))
        return True

    def restart_ledger(self) -> bool:
        """End the ledger between an event and its instructions; replay its log, and ask for what is outstanding."""
        if self.pending:
            self.log.append(self.pending.pop())
            self.ledger.handle(self.log[-1])
            self.check(self.ledger)
        again = TrajectoryLedger.replay(self.config, self.log)
        self.ledger.state.instructions = again.state.instructions = []
        if again.state != self.ledger.state:
            raise RuntimeError("a replayed ledger differs")
        self.ledger = again
        self.rewards.clear()
        self.obey(again.outstanding())
        return True

    def restore_trainer(self) -> bool:
        """Take the trainer back to its last checkpoint."""
        self.start_trainer(self.checkpoint)
        return True

    def fail_sample(self) -> bool:
        """Let an engine fail at a sample: a tool that raised."""
        running = [(name, lease, one) for name, engine in self.engines.items() for lease, one in engine.samples.items()]
        if running:
            name, lease, one = self.random.choice(running)
            self.send(SampleFailed(engine=name, sample=one.key, lease=lease))
        return bool(running)

    def fail_reward(self) -> bool:
        """Let a reward raise, or be NaN."""
        if not self.rewards:
            return False
        one = self.rewards.pop()
        nan = SampleScored(sample=one.sample, score_try=one.score_try, reward=float("nan"))
        self.send(self.random.choice([nan, ScoreFailed(sample=one.sample, score_try=one.score_try)]))
        return True

    def send_nonsense(self) -> bool:
        """Send an event that cannot be: unknown samples and engines, versions to come, leases that were never given."""
        key = SampleKey(self.random.randint(-1, 40), self.random.randint(-1, 9), self.random.randint(0, 2))
        far = self.ledger.state.newest + self.random.randint(1, 5)
        self.send(self.random.choice([
            TokensReported(engine="a", sample=key, lease=10**9, start=0, num_tokens=5, version=0),
            SampleEnded(engine="z", sample=key, lease=1, num_tokens=3),
            EngineUpdated(engine=self.random.choice(sorted(self.engines) or ["z"]), version=far),
            EngineJoined(engine="z", owner="z", num_slots=3, version=far),
            StepTrained(trainer=self.trainer, step=self.ledger.state.next_step + 3),
            StepTrained(trainer=self.trainer - 1, step=self.version),
            BatchRequested(trainer=self.trainer, step=far + 3),
            SampleScored(sample=key, score_try=7, reward=1.0),
            TrainerJoined(trainer=0, version=0),
        ]))  # fmt: skip
        return True

    def count_problems(self) -> list[str]:
        """Return what the counts of a ledger show against the batches that the trainer had."""
        told, batches = summarise_ledger(self.ledger.state), sum(map(len, self.timeline))
        found = [] if told.samples.get("trained") == batches else [f"{told.samples} for {batches} trained samples"]
        keys = Counter(key.prompt for batch in self.timeline for key in batch)
        found += [f"prompt {one} trained {count} times" for one, count in keys.items() if count != self.config.group]
        if self.ledger.state.num_prompts != self.config.num_prompts:
            found.append(f"{self.ledger.state.num_prompts} prompts of {self.config.num_prompts}")
        return found

    def problems(self) -> list[str]:
        """Return what a finished run shows against the ledger, from what engines made and the trainer trained on."""
        found, state = [], self.ledger.state
        if self.folds and state.folded.prompts:
            return self.count_problems()
        trained = [key.prompt for batch in self.timeline for key in batch]
        groups = Counter(trained)
        found += [f"prompt {one} trained {count} times" for one, count in groups.items() if count != self.config.group]
        fates = {number: one.fate for number, one in state.prompts.items()}
        found += [f"prompt {one} has no fate" for one, fate in fates.items() if fate is None]
        if set(groups) != {one for one, fate in fates.items() if fate is SampleState.TRAINED}:
            found.append("the trainer has other prompts than the ledger")
        if self.config.num_prompts != len(fates):
            found.append(f"{len(fates)} prompts of {self.config.num_prompts}")
        for step, batch in enumerate(self.timeline):
            for key in batch:
                ranges = state.prompts[key.prompt].samples[key.number].ranges
                stale = step - ranges[0].version
                if stale > self.config.max_staleness:
                    found.append(f"sample {key} is {stale} versions old at step {step}")
                sampled = [one for one in ranges if one.is_sampled]
                found += [f"{key} has tokens that no engine made" for one in sampled for at in range(one.start, one.end)
                          if one.version not in self.made.get((key, at), ())]  # fmt: skip
        return found

"""`RolloutTime`: steps a second of a job with `task: rl` over links, by the real ledger, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories, summarise_ledger
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    EngineJoined,
    EngineUpdated,
    RolloutEvent,
    SampleEnded,
    SampleKey,
    SampleScored,
    StepTrained,
    TokensReported,
    TrainerJoined,
)
from isthmus.rl.ledger.rollout_instructions import GenerateSample, ScoreSample, TrainBatch, UpdateEngine


@dataclass(frozen=True, kw_only=True)
class RolloutWork:
    """Virtual chips: seconds of a training step and of a token, most tokens of a response, samples of an engine."""

    train_s: float
    token_s: float
    max_tokens: int
    num_slots: int
    group: int
    batch_prompts: int


@dataclass
class _Sample:
    lease: int
    position: int
    since_s: float


@dataclass
class _Engine:
    """Samples run side by side, each a token in `token_s`."""

    rate_bytes_per_s: float
    delay_s: float
    version: int = 0
    arriving: int = 0
    samples: dict[SampleKey, _Sample] = field(default_factory=dict)


class RolloutTime:
    """One trainer and engines behind links, Gbit/s and ms of a round trip each; `version_bytes` cross for a version.

    A version is offered, asked for, sent and reported: two round trips and the time of its bytes.
    """

    def __init__(
        self, links: Mapping[str, tuple[float, float]], work: RolloutWork, version_bytes: float, max_staleness: int
    ) -> None:
        self._work, self._bytes = work, version_bytes
        self._engines = {
            name: _Engine(gbps * 1e9 / 8, round_trip_ms / 2e3) for name, (gbps, round_trip_ms) in links.items()
        }
        self._ledger = TrajectoryLedger(
            LedgerConfig(
                group=work.group, batch_prompts=work.batch_prompts, max_staleness=max_staleness, on_update="keep",
                filter_groups=False,
            )
        )  # fmt: skip
        self._now_s, self._step = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ends_s: list[float] = []

    def steps_per_s(self, num_steps: int) -> float:
        """Return steps a second after the first fifth of them."""
        self._tell(TrainerJoined(trainer=1, version=0))
        for name in self._engines:
            joined = EngineJoined(engine=name, owner=name, num_slots=self._work.num_slots, version=0)
            self._tell(joined)
        self._tell(BatchRequested(trainer=1, step=0))
        while len(self._ends_s) < num_steps:
            self._now_s, _, turn = heapq.heappop(self._queue)
            turn()
        check_trajectories(self._ledger.state)
        told = summarise_ledger(self._ledger.state)
        if told.lost or told.doubled:
            raise ValueError(f"the ledger has {told}")
        first = num_steps // 5
        return (num_steps - 1 - first) / (self._ends_s[-1] - self._ends_s[first])

    def _after(self, seconds: float, turn: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now_s + seconds, next(self._numbers), turn))

    def _tell(self, event: RolloutEvent) -> None:
        for one in list(self._ledger.handle(event)):
            match one:
                case GenerateSample():
                    self._after(self._engines[one.engine].delay_s, lambda one=one: self._start(one))
                case ScoreSample():
                    self._tell(SampleScored(sample=one.sample, score_try=one.score_try, reward=1.0))
                case TrainBatch():
                    self._after(self._work.train_s, self._end_step)
                case UpdateEngine():
                    self._offer(one.engine, one.version)

    def _start(self, order: GenerateSample) -> None:
        engine = self._engines[order.engine]
        length = random.Random(str(order.sample[:2])).randint(self._work.max_tokens // 4, self._work.max_tokens)
        engine.samples[order.sample] = _Sample(order.lease, order.num_tokens, self._now_s)
        left_s = (length - order.num_tokens) * self._work.token_s
        self._after(left_s, lambda: self._end(order.engine, order.sample, order.lease, length))

    def _end(self, name: str, key: SampleKey, lease: int, length: int) -> None:
        engine = self._engines[name]
        sample = engine.samples.get(key)
        if sample is None or sample.lease != lease:
            return
        self._report(name, key, sample, length)
        del engine.samples[key]
        ended = SampleEnded(engine=name, sample=key, lease=lease, num_tokens=length)
        self._after(engine.delay_s, lambda: self._tell(ended))

    def _report(self, name: str, key: SampleKey, sample: _Sample, position: int) -> None:
        """Report the tokens up to `position`, all decoded by the present version."""
        engine, count = self._engines[name], position - sample.position
        if count > 0:
            report = TokensReported(
                engine=name, sample=key, lease=sample.lease, start=sample.position, num_tokens=count,
                version=engine.version,
            )  # fmt: skip
            self._after(engine.delay_s, lambda: self._tell(report))
        sample.position, sample.since_s = position, self._now_s

    def _offer(self, name: str, version: int) -> None:
        engine = self._engines[name]
        if engine.arriving != engine.version:
            return  # the newest one follows the one that arrives
        engine.arriving = version
        spent_s = 3 * engine.delay_s + self._bytes / engine.rate_bytes_per_s
        self._after(spent_s + 2 * engine.delay_s, lambda: self._switch(name, version))

    def _switch(self, name: str, version: int) -> None:
        engine = self._engines[name]
        for key, sample in engine.samples.items():
            done = int((self._now_s - sample.since_s) / self._work.token_s + 1e-6)
            since_s = sample.since_s
            self._report(name, key, sample, sample.position + done)
            sample.since_s = since_s + done * self._work.token_s
        engine.version = engine.arriving = version
        self._after(engine.delay_s, lambda: self._tell(EngineUpdated(engine=name, version=version)))
        newest = self._step
        if newest > version:
            self._after(engine.delay_s, lambda: self._offer(name, newest))

    def _end_step(self) -> None:
        self._ends_s.append(self._now_s)
        step, self._step = self._step, self._step + 1
        self._tell(StepTrained(trainer=1, step=step))
        self._tell(BatchRequested(trainer=1, step=step + 1))

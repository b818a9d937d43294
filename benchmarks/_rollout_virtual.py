"""Runs of reinforcement learning on a virtual clock, token by token, under the ledger of real runs.

What `simulate_rollouts` shortens is done in full: every decode step is an event, every sample has a key, leases, ranges
of tokens and a reward in `TrajectoryLedger`, and every order and report crosses its link.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

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
from isthmus.rl.ledger.rollout_instructions import GenerateSample, ScoreSample, StopSample, TrainBatch
from isthmus.sim.kernel import Event, Kernel, ProcessGenerator
from isthmus.sim.rollouts.rollout_pipeline import DecodeRates, DecodeSite, RolloutPipeline, WeightsWay
from isthmus.sim.rollouts.simulate_rollouts import draw_length


def random_pipeline(seed: int, steps: int = 8) -> RolloutPipeline:
    """Return a small run: a fifth decode in turns, the others at up to three sites over unlike links."""
    drawn = random.Random(seed)
    in_turns = drawn.random() < 0.2
    sites = tuple(
        DecodeSite(
            name="" if in_turns else name, slots=drawn.choice((8, 16, 32)), rates=_random_rates(drawn),
            way=None if in_turns else WeightsWay(occupied_s=drawn.uniform(0.1, 4), delay_s=drawn.uniform(0.005, 0.1)),
            delay_s=0.0 if in_turns else drawn.uniform(0.005, 0.05),
        )
        for name in "abc"[: 1 if in_turns else drawn.randint(1, 3)]
    )  # fmt: skip
    return RolloutPipeline(
        train_s=drawn.uniform(0.2, 4.0), steps=steps, group=4, batch_prompts=drawn.choice((4, 8)),
        max_staleness=drawn.choice((0, 1, 1, 2, 4)), prompt_tokens=drawn.randint(4, 40), sites=sites, seed=seed,
        lengths=tuple(max(1, int(drawn.lognormvariate(3.5, 0.8))) for _ in range(50)),
        on_update=drawn.choice(("keep", "keep", "refill", "abort")),
    )  # fmt: skip


def _random_rates(drawn: random.Random) -> DecodeRates:
    return DecodeRates(
        host_s=drawn.uniform(0.001, 0.01), weights_s=drawn.uniform(0.002, 0.02), row_s=drawn.uniform(1e-5, 4e-4),
        cached_token_s=drawn.uniform(1e-8, 1e-6), tile_rows=drawn.choice((1, 8)),
    )  # fmt: skip


@dataclass(kw_only=True)
class _Sequence:
    key: SampleKey
    lease: int
    length: int
    done: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)


class VirtualRun:
    """`steps_s` are the seconds of each step, `batches` the prompts of each."""

    def __init__(self, pipeline: RolloutPipeline, num_steps: int) -> None:
        self.steps_s: list[float] = []
        self.batches: list[tuple[int, ...]] = []
        self._given, self._num_steps, self._kernel = pipeline, num_steps, Kernel()
        config = LedgerConfig(
            group=pipeline.group, batch_prompts=pipeline.batch_prompts, max_staleness=pipeline.max_staleness,
            on_update=pipeline.on_update, filter_groups=False,
        )  # fmt: skip
        self._ledger = TrajectoryLedger(config)
        self._batch: Event | None = None
        self._published = [self._kernel.event() for _ in pipeline.sites]
        self._engines = [_Engine(self, self._kernel, pipeline, site) for site in pipeline.sites]
        self._turns = pipeline.sites[0].way is None
        self.is_over = False

    def run(self) -> VirtualRun:
        """Run to the end of the last step; raises `ValueError` if the ledger has lost or doubled a prompt."""
        self._apply(TrainerJoined(trainer=1, version=0))
        for number, one in enumerate(self._engines):
            self._kernel.start(one.decode())
            if one.site.way is not None:
                self._kernel.start(self._send_versions(number))
        self._kernel.start(self._train())
        for one in self._engines:
            self._apply(EngineJoined(engine=one.site.name, owner="o", num_slots=one.site.slots, version=0))
        self._kernel.run()
        check_trajectories(self._ledger.state)
        told = summarise_ledger(self._ledger.state)
        if told.lost or told.doubled:
            raise ValueError(f"the ledger has {told}")
        return self

    @property
    def steps_per_s(self) -> float:
        """Return steps a second after the first fifth of them."""
        counted = self.steps_s[len(self.steps_s) // 5 + 1 :]
        return len(counted) / sum(counted)

    def report(self, engine: _Engine, event: RolloutEvent) -> None:
        """Bring an event to the ledger."""
        self._kernel.call_at(self._kernel.now_s + engine.site.delay_s, lambda _: self._apply(event))

    def _apply(self, event: RolloutEvent) -> None:
        for one in self._ledger.handle(event):
            match one:
                case GenerateSample():
                    engine = next(each for each in self._engines if each.site.name == one.engine)
                    length = draw_length(self._given, one.sample.prompt, one.sample.number)
                    made = _Sequence(key=one.sample, lease=one.lease, length=length, done=one.num_tokens)
                    self._kernel.call_at(self._kernel.now_s + engine.site.delay_s, partial(engine.add, made))
                case StopSample():
                    engine = next(each for each in self._engines if each.site.name == one.engine)
                    drop = partial(engine.drop, one.sample, one.lease)
                    self._kernel.call_at(self._kernel.now_s + engine.site.delay_s, drop)
                case ScoreSample():
                    scored = SampleScored(sample=one.sample, score_try=one.score_try, reward=1.0)
                    self._kernel.call_at(self._kernel.now_s, lambda _, event=scored: self._apply(event))
                case TrainBatch() if self._batch is not None:
                    waited, self._batch = self._batch, None
                    self.batches.append(tuple(dict.fromkeys(key.prompt for key in one.samples)))
                    if self._turns:
                        self._engines[0].is_paused = True
                    waited.trigger()
                case _:
                    pass

    def _train(self) -> ProcessGenerator:
        kernel = self._kernel
        for step in range(self._num_steps):
            begun_s, self._batch = kernel.now_s, kernel.event()
            waited = self._batch
            self._apply(BatchRequested(trainer=1, step=step))
            if self._turns and self._batch is not None:
                self._engines[0].resume()
            yield waited
            yield kernel.now_s + self._given.train_s
            self.steps_s.append(kernel.now_s - begun_s)
            self._apply(StepTrained(trainer=1, step=step))
            for number in range(len(self._engines)):
                event, self._published[number] = self._published[number], kernel.event()
                event.trigger()
            if self._turns:
                self._engines[0].staged = step + 1
        self.is_over = True
        for one in self._engines:
            one.wake()

    def _send_versions(self, number: int) -> ProcessGenerator:
        engine, sent = self._engines[number], 0
        way = engine.site.way
        while way is not None and not self.is_over:
            version = self._ledger.state.version
            if sent == version:
                yield self._published[number]
                continue
            sent = version
            yield self._kernel.now_s + way.occupied_s
            self._kernel.call_at(self._kernel.now_s + way.delay_s, partial(engine.stage, sent))


class _Engine:
    def __init__(self, run: VirtualRun, kernel: Kernel, pipeline: RolloutPipeline, site: DecodeSite) -> None:
        self.site, self.staged, self.is_paused = site, 0, False
        self._run, self._kernel, self._given = run, kernel, pipeline
        self._version = 0
        self._running: list[_Sequence] = []
        self._pending: list[_Sequence] = []
        self._idle: Event | None = None

    def add(self, one: _Sequence, _: object) -> None:
        self._pending.append(one)
        self.wake()

    def drop(self, key: SampleKey, lease: int, _: object) -> None:
        for each in (self._running, self._pending):
            each[:] = [one for one in each if (one.key, one.lease) != (key, lease)]

    def stage(self, version: int, _: object) -> None:
        self.staged = version
        self.wake()

    def resume(self) -> None:
        self.is_paused = False
        self.wake()

    def wake(self) -> None:
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.trigger()

    def decode(self) -> ProcessGenerator:
        """Decode step by step."""
        rates = self.site.rates
        while not self._run.is_over:
            prefill = 0
            if not self.is_paused:
                prefill = self._begin_step()
            if self.is_paused or not self._running:
                self._idle = self._kernel.event()
                yield self._idle
                continue
            cached = sum(self._given.prompt_tokens + one.done for one in self._running)
            yield self._kernel.now_s + rates.step_s(len(self._running), cached) + prefill * rates.row_s
            for one in list(self._running):
                self._add_token(one)

    def _begin_step(self) -> int:
        """Switch and take in new samples; return the rows of prompts that are computed first."""
        prefill = 0
        if self.staged > self._version:
            for one in self._running:
                self._flush(one)
            self._version = self.staged
            if self._given.on_update == "refill":
                prefill = sum(self._given.prompt_tokens + one.done for one in self._running)
            self._run.report(self, EngineUpdated(engine=self.site.name, version=self._version))
        prefill += sum(self._given.prompt_tokens + one.done for one in self._pending)
        self._running += self._pending
        self._pending = []
        return prefill

    def _add_token(self, one: _Sequence) -> None:
        one.done += 1
        last = one.pieces[-1] if one.pieces else (-1, 0)
        if last[0] == self._version:
            one.pieces[-1] = (self._version, last[1] + 1)
        else:
            one.pieces.append((self._version, 1))
        if one.done >= one.length:
            self._flush(one)
            self._running.remove(one)
            self._run.report(
                self, SampleEnded(engine=self.site.name, sample=one.key, lease=one.lease, num_tokens=one.done)
            )

    def _flush(self, one: _Sequence) -> None:
        start = one.done - sum(num for _, num in one.pieces)
        for version, num in one.pieces:
            event = TokensReported(
                engine=self.site.name, sample=one.key, lease=one.lease, start=start, num_tokens=num, version=version
            )
            self._run.report(self, event)
            start += num
        one.pieces = []

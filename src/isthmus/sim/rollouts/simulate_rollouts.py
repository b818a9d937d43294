"""`simulate_rollouts`: reinforcement learning on a virtual clock, event by event.

A trainer asks for batches, engines decode, their reports come up and new versions go down. Who decodes what, and which
groups a step trains on, follow the rules of the trajectory ledger; between two events an engine decodes in closed form,
so that the work grows with the samples, not with their tokens.
"""

from __future__ import annotations

import random
from functools import partial

from isthmus.sim.kernel import Event, Kernel, ProcessGenerator
from isthmus.sim.rollouts.rollout_pipeline import RolloutPipeline, RolloutResult, SiteSpans
from isthmus.sim.rollouts.simulated_engine import SimulatedEngine
from isthmus.sim.rollouts.simulated_ledger import SampleGroup, SimulatedLedger, SlotHolder


def warm_steps(max_staleness: int) -> int:
    """Return how many first steps fill the pipeline and do not count."""
    return 2 + max_staleness


def draw_length(pipeline: RolloutPipeline, prompt: int, sample: int) -> int:
    """Return the tokens of a response: the same wherever and whenever it is decoded."""
    drawn = random.Random(f"{pipeline.seed} {prompt} {sample}")  # noqa: S311 - so that runs repeat; no secret
    return drawn.choice(pipeline.lengths)


def simulate_rollouts(pipeline: RolloutPipeline) -> RolloutResult:
    """Simulate `pipeline.steps` steps after those that fill the pipeline; the result depends on `pipeline` alone."""
    return _Simulation(pipeline).run()


class _Simulation:
    def __init__(self, pipeline: RolloutPipeline) -> None:
        self._given, self._kernel = pipeline, Kernel()
        self._ledger = SimulatedLedger(
            pipeline.group, pipeline.batch_prompts, pipeline.max_staleness, aborts=pipeline.on_update == "abort"
        )
        self._versions = [0] * len(pipeline.sites)
        self._engines = [
            SimulatedEngine(
                self._kernel, site, pipeline.on_update, pipeline.prompt_tokens, on_end=self._ended,
                on_switch=self._switched,
            )
            for site in pipeline.sites
        ]  # fmt: skip
        self._by_name = {one.name: one for one in self._engines}
        self._claimed: Event | None = None
        self._published: list[Event] = [self._kernel.event() for _ in self._engines]
        self._ages: list[float] = []
        self._wait_s = 0.0
        self._ends_s: list[float] = []
        self._turns = pipeline.sites[0].way is None

    def run(self) -> RolloutResult:
        warm = warm_steps(self._given.max_staleness)
        self._kernel.start(self._train(warm))
        for number, site in enumerate(self._given.sites):
            if site.way is not None:
                self._kernel.start(self._send_versions(number))
        for joined in range(1, len(self._engines) + 1):  # one after the other
            self._ledger.assign(self._engines[:joined], self._give)
        self._kernel.run()
        steps = self._given.steps
        return RolloutResult(
            step_s=(self._ends_s[-1] - self._ends_s[-1 - steps]) / steps,
            wait_samples_s=self._wait_s / steps,
            staleness=sum(self._ages) / len(self._ages),
            sites=tuple(
                SiteSpans(
                    name=one.name, decode_s=one.decode_s / steps, wait_samples_s=one.wait_samples_s / steps,
                    wait_weights_s=one.wait_weights_s / steps, tokens=one.num_tokens / steps,
                    versions=self._versions[number] / steps,
                )
                for number, one in enumerate(self._engines)
            ),
            steps_s=tuple(b - a for a, b in zip((0.0, *self._ends_s), self._ends_s, strict=False)),
        )  # fmt: skip

    def _train(self, warm: int) -> ProcessGenerator:
        kernel = self._kernel
        for step in range(warm + self._given.steps):
            if step == warm:
                self._begin_count()
            begun_s, claimed = kernel.now_s, kernel.event()
            self._claimed = claimed
            self._claim()
            if self._turns and self._claimed is not None:
                self._engines[0].resume()
            groups = yield claimed
            self._wait_s += kernel.now_s - begun_s
            self._ages += [step - one.oldest for one in groups]
            yield kernel.now_s + self._given.train_s
            self._ends_s.append(kernel.now_s)
            self._publish()
        for one in self._engines:
            one.settle()
            one.stop()

    def _begin_count(self) -> None:
        self._wait_s, self._ages = 0.0, []
        self._versions = [0] * len(self._engines)
        for one in self._engines:
            one.settle()
            one.decode_s = one.wait_samples_s = one.wait_weights_s = one.num_tokens = 0.0

    def _publish(self) -> None:
        self._ledger.version += 1
        if self._given.on_update == "abort":
            self._abort()
        for number, one in enumerate(self._engines):
            one.published = self._ledger.version
            event, self._published[number] = self._published[number], self._kernel.event()
            event.trigger()
        if self._turns:
            self._engines[0].stage(self._ledger.version)

    def _abort(self) -> None:
        for holder, group, sample in self._ledger.abort_unfinished():
            engine = self._by_name[holder.name]
            due_s = self._kernel.now_s + engine.site.delay_s
            self._kernel.call_at(due_s, partial(_drop, engine, group, sample))

    def _send_versions(self, number: int) -> ProcessGenerator:
        """Send the newest version to a site whenever its way is free."""
        engine, sent, kernel = self._engines[number], 0, self._kernel
        way = engine.site.way
        while way is not None:
            if sent == self._ledger.version:
                yield self._published[number]
            sent = self._ledger.version
            self._versions[number] += 1
            yield kernel.now_s + way.occupied_s
            kernel.call_at(kernel.now_s + way.delay_s, partial(_stage, engine, sent))

    def _switched(self, engine: SimulatedEngine, version: int) -> None:
        def know(_: object) -> None:
            engine.known_version = version
            self._assign()

        self._kernel.call_at(self._kernel.now_s + engine.site.delay_s, know)

    def _ended(self, engine: SimulatedEngine, group: SampleGroup, sample: int, lease: int) -> None:
        def take_in(_: object) -> None:
            if self._ledger.end(group, sample, lease):
                self._claim()
                self._kernel.call_at(self._kernel.now_s, lambda _: self._assign())

        if engine.site.delay_s:
            self._kernel.call_at(self._kernel.now_s + engine.site.delay_s, take_in)
        else:
            take_in(None)

    def _claim(self) -> None:
        if self._claimed is None or (groups := self._ledger.claim()) is None:
            return
        claimed, self._claimed = self._claimed, None
        claimed.trigger(groups)
        if self._turns:
            self._engines[0].pause()

    def _assign(self) -> None:
        self._ledger.assign(self._engines, self._give)

    def _give(self, group: SampleGroup, sample: int, holder: SlotHolder) -> None:
        engine, lease = self._by_name[holder.name], group.running[sample][1]
        length = draw_length(self._given, group.number, sample)
        due_s = self._kernel.now_s + engine.site.delay_s
        self._kernel.call_at(due_s, lambda _: engine.add(group, sample, lease, length))


def _drop(engine: SimulatedEngine, group: SampleGroup, sample: int, _: object) -> None:
    engine.drop(group, sample)


def _stage(engine: SimulatedEngine, version: int, _: object) -> None:
    engine.stage(version)

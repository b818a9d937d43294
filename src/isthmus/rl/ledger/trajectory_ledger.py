"""`TrajectoryLedger`: what became of each prompt, sample and range of tokens; `handle(event) -> instructions`.

Pure: no clock, no network, no randomness. The code around it appends an event to a log before it handles it; after a
restart `replay` of that log gives the same ledger, and engines that do not come back are reported as lost. Tokens
themselves are kept by that code, under the sample's key; the ledger says which ones count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from isthmus.rl.ledger.assign_samples import assign_samples
from isthmus.rl.ledger.bar_owner import bar_owner
from isthmus.rl.ledger.claim_batch import claim_batch, send_batch
from isthmus.rl.ledger.fold_records import fold_records
from isthmus.rl.ledger.ledger_records import (
    ENVIRONMENT,
    EngineRecord,
    LedgerConfig,
    LedgerState,
    LinkBytes,
    SampleAudit,
    SampleRecord,
    SampleState,
    TokenRange,
)
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    BytesCounted,
    EngineJoined,
    EngineLost,
    EngineUpdated,
    ObservationAdded,
    RecordsFolded,
    RolloutEvent,
    SampleAudited,
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
    EventRefused,
    GenerateSample,
    RolloutInstruction,
    ScoreSample,
    StopSample,
    UpdateEngine,
)
from isthmus.rl.ledger.sample_lifecycle import begin_again, end_prompt, fail_sample, move_sample


class TrajectoryLedger:
    """The ledger of one run. `state` may be read; `handle` alone changes it."""

    def __init__(self, config: LedgerConfig) -> None:
        self.state = LedgerState(config=config)

    @classmethod
    def of_state(cls, state: LedgerState) -> TrajectoryLedger:
        """Return the ledger of a state, as `restore_ledger` gives it."""
        ledger = cls(state.config)
        ledger.state = state
        return ledger

    @classmethod
    def replay(cls, config: LedgerConfig, events: Iterable[RolloutEvent]) -> TrajectoryLedger:
        """Return the ledger after these events; their instructions were given before."""
        ledger = cls(config)
        for event in events:
            ledger.handle(event)
        return ledger

    def handle(self, event: RolloutEvent) -> list[RolloutInstruction]:
        """Take in an event and return what is to be done; one that is late or doubled changes nothing."""
        self.state.instructions = []
        match event:
            case EngineJoined():
                self._join_engine(event)
            case EngineLost():
                self._lose_engine(event.engine)
            case EngineUpdated():
                self._update_engine(event)
            case TokensReported():
                self._add_tokens(event)
            case SampleEnded():
                self._end_sample(event)
            case SampleFailed():
                if (sample := self._running(event)) is not None:
                    fail_sample(self.state, sample)
            case SampleAudited():
                self._audit_sample(event)
            case ObservationAdded():
                self._add_observation(event)
            case SampleScored() | ScoreFailed():
                self._score_sample(event)
            case _:
                self._handle_trainer(event)
        claim_batch(self.state)
        assign_samples(self.state)
        return self.state.instructions

    def _handle_trainer(
        self, event: TrainerJoined | BatchRequested | StepTrained | BytesCounted | RecordsFolded
    ) -> None:
        match event:
            case RecordsFolded():
                fold_records(self.state, event.before)
            case TrainerJoined():
                self._join_trainer(event)
            case BatchRequested():
                self._request_batch(event)
            case StepTrained():
                self._end_step(event)
            case BytesCounted():
                self._count_bytes(event)

    def outstanding(self) -> list[RolloutInstruction]:
        """Return what a restarted process has to ask for again, as it may have ended before it asked.

        An engine that has a lease already goes on with it; the trainer requests its batch again.
        """
        self.state.instructions = []
        for name, engine in self.state.engines.items():
            self._ask_for_update(name)
            for one in engine.running.values():
                self.state.instructions.append(
                    GenerateSample(engine=name, sample=one.key, lease=one.lease, num_tokens=one.num_tokens)
                )
        for prompt in self.state.open_prompts.values():
            for one in prompt.samples:
                if one.state is SampleState.ENDED:
                    self.state.instructions.append(ScoreSample(sample=one.key, score_try=one.score_try))
        return self.state.instructions

    def _join_engine(self, event: EngineJoined) -> None:
        if not 0 <= event.version <= self.state.newest or event.num_slots < 1:
            self._refuse(f"engine {event.engine} with {event.num_slots} slots and version {event.version}")
            return
        if event.owner in self.state.barred:
            self._refuse(f"engine {event.engine} of {event.owner}: {self.state.barred[event.owner]}")
            return
        self._lose_engine(event.engine)
        self.state.engines[event.engine] = EngineRecord(
            owner=event.owner, num_slots=event.num_slots, version=event.version
        )
        self._ask_for_update(event.engine)

    def _lose_engine(self, name: str) -> None:
        """Put the samples of an engine back, with the tokens that it reported."""
        engine = self.state.engines.get(name)
        for sample in list(engine.running.values()) if engine else ():
            move_sample(self.state, sample, SampleState.WAITING)
        self.state.engines.pop(name, None)

    def _update_engine(self, event: EngineUpdated) -> None:
        engine = self.state.engines.get(event.engine)
        if engine is None or not 0 <= event.version <= self.state.newest:
            self._refuse(f"engine {event.engine} with version {event.version}")
            return
        engine.version = max(engine.version, event.version)

    def _add_tokens(self, event: TokensReported) -> None:
        """Append the tokens that follow those recorded, and acknowledge all that are."""
        sample = self._running(event)
        if sample is None:
            return
        last = sample.ranges[-1].version if sample.ranges else sample.begun_version or 0
        if not last <= event.version <= self.state.newest or event.num_tokens < 1 or event.start < 0:
            self._refuse(f"tokens of version {event.version} after {last} from {event.engine}")
            fail_sample(self.state, sample)
            return
        end = event.start + event.num_tokens
        if event.start <= sample.num_tokens < end:
            owner = self.state.engines[event.engine].owner
            piece = TokenRange(
                start=sample.num_tokens, end=end, version=event.version, engine=event.engine, owner=owner
            )
            _append(sample.ranges, piece)
        self._acknowledge(sample, event)

    def _end_sample(self, event: SampleEnded) -> None:
        sample = self._running(event)
        if sample is None:
            return
        if event.num_tokens < 1:
            fail_sample(self.state, sample)
        elif event.num_tokens != sample.num_tokens:
            self._acknowledge(sample, event)
        else:
            move_sample(self.state, sample, SampleState.ENDED)
            self.state.instructions.append(ScoreSample(sample=sample.key, score_try=sample.score_try))

    def _audit_sample(self, event: SampleAudited) -> None:
        sample = self.find(event.sample)
        if sample is None or event.owner not in {one.owner for one in sample.ranges}:
            self._refuse(f"an audit of sample {tuple(event.sample)} by {event.owner}")
            return
        self.state.audits[event.sample] = SampleAudit(owner=event.owner, problem=event.problem)
        if event.problem:
            bar_owner(self.state, event.owner, event.problem)

    def _score_sample(self, event: SampleScored | ScoreFailed) -> None:
        sample = self.find(event.sample)
        if sample is None or sample.state is not SampleState.ENDED or sample.score_try != event.score_try:
            return
        if isinstance(event, SampleScored) and math.isfinite(event.reward):
            move_sample(self.state, sample, SampleState.SCORED)
            sample.reward = event.reward
            self._filter_group(sample.key.prompt)
        elif sample.score_try - sample.first_try + 1 < self.state.config.max_failures:
            sample.score_try += 1
            self.state.instructions.append(ScoreSample(sample=sample.key, score_try=sample.score_try))
        else:
            fail_sample(self.state, sample)

    def _add_observation(self, event: ObservationAdded) -> None:
        """Append what an environment answered, and let the sample go on; begin again what the weights have outrun."""
        sample = self.find(event.sample)
        if sample is None or sample.state is not SampleState.ENDED or sample.score_try != event.score_try:
            return
        if event.num_tokens < 1:
            self._refuse(f"an observation of {event.num_tokens} tokens for sample {tuple(event.sample)}")
            return
        last, prompt = sample.ranges[-1], self.state.prompts[event.sample.prompt]
        if self.state.config.on_update == "abort" and sample.ranges[0].version < self.state.version:
            begin_again(self.state, prompt, sample, SampleState.STALE)
            return
        sample.ranges.append(
            TokenRange(
                start=last.end, end=last.end + event.num_tokens, version=last.version, engine=ENVIRONMENT,
                owner=ENVIRONMENT,
            )
        )  # fmt: skip
        sample.score_try += 1
        sample.first_try = sample.score_try
        move_sample(self.state, sample, SampleState.WAITING)

    def _filter_group(self, number: int) -> None:
        """Drop a complete group whose rewards are all equal; another prompt takes its place."""
        prompt = self.state.prompts[number]
        rewards = {one.reward for one in prompt.samples}
        if prompt.ready and len(rewards) == 1 and self.state.config.filter_groups:
            for sample in prompt.samples:
                move_sample(self.state, sample, SampleState.FILTERED)
            end_prompt(self.state, prompt, SampleState.FILTERED)

    def _join_trainer(self, event: TrainerJoined) -> None:
        """Take back the steps that a restored trainer has lost; their batches stay as they are and come again.

        A trainer that has a later version than is known had ended a step before it could say so.
        """
        state = self.state
        if event.trainer <= state.trainer:
            return
        if not state.first_step <= event.version <= state.next_step:
            self._refuse(f"trainer {event.trainer} with version {event.version} of {state.next_step}")
            return
        while state.version < event.version:
            self._record_step()
        for number in [one for step in range(event.version, state.version) for one in state.batch_of(step)]:
            prompt = state.prompts[number]
            prompt.fate = None
            for sample in prompt.samples:
                move_sample(state, sample, SampleState.CLAIMED)
        state.trainer, state.version, state.requested = event.trainer, event.version, False
        for name in state.engines:
            self._ask_for_update(name)

    def _request_batch(self, event: BatchRequested) -> None:
        state = self.state
        if event.trainer != state.trainer or event.step < state.version:
            return
        if event.step > state.version:
            self._refuse(f"step {event.step} of a trainer with version {state.version}")
        elif event.step < state.next_step:
            send_batch(state, event.step)
        else:
            state.requested = True

    def _end_step(self, event: StepTrained) -> None:
        state = self.state
        if event.trainer != state.trainer or event.step < state.version:
            return
        if event.step > state.version or event.step >= state.next_step:
            self._refuse(f"step {event.step} was trained without a batch")
            return
        self._record_step()
        for name in state.engines:
            self._ask_for_update(name)

    def _record_step(self) -> None:
        """Give the samples of the trainer's step their fate; its version is the next one."""
        state = self.state
        for number in state.batch_of(state.version):
            prompt = state.prompts[number]
            prompt.fate = SampleState.TRAINED
            for sample in prompt.samples:
                move_sample(state, sample, SampleState.TRAINED)
        state.version += 1
        is_new = state.version > state.newest
        state.newest = max(state.newest, state.version)
        if is_new and state.config.on_update == "abort":
            self._abort_unfinished()

    def _abort_unfinished(self) -> None:
        """Let samples that have begun under older weights begin again."""
        for prompt in list(self.state.open_prompts.values()):
            for sample in list(prompt.samples):
                if sample.state in (SampleState.WAITING, SampleState.RUNNING) and sample.oldest_version is not None:
                    begin_again(self.state, prompt, sample, SampleState.STALE)

    def _count_bytes(self, event: BytesCounted) -> None:
        if min(event.weights_bytes, event.sent_bytes, event.received_bytes) < 0:
            self._refuse(f"{event.sent_bytes} bytes sent to {event.owner}")
            return
        total = self.state.links.setdefault(event.owner, LinkBytes())
        total.weights_bytes += event.weights_bytes
        total.sent_bytes += event.sent_bytes
        total.received_bytes += event.received_bytes

    def _ask_for_update(self, name: str) -> None:
        version, on_update = self.state.version, self.state.config.on_update
        if self.state.engines[name].version < version:
            self.state.instructions.append(UpdateEngine(engine=name, version=version, on_update=on_update))

    def _running(self, event: TokensReported | SampleEnded | SampleFailed) -> SampleRecord | None:
        """Return the sample if the event's lease is the current one; otherwise the engine is to stop it."""
        sample = self.find(event.sample)
        if sample is not None and (sample.state, sample.engine, sample.lease) == (
            SampleState.RUNNING,
            event.engine,
            event.lease,
        ):
            return sample
        self.state.instructions.append(StopSample(engine=event.engine, sample=event.sample, lease=event.lease))
        return None

    def find(self, key: SampleKey) -> SampleRecord | None:
        """Return the current sample with this key, None for one that began again or never was."""
        prompt = self.state.prompts.get(key.prompt)
        if prompt is None or not 0 <= key.number < len(prompt.samples) or prompt.samples[key.number].key != key:
            return None
        return prompt.samples[key.number]

    def _acknowledge(self, sample: SampleRecord, event: TokensReported | SampleEnded) -> None:
        self.state.instructions.append(
            AcknowledgeTokens(engine=event.engine, sample=sample.key, lease=sample.lease, num_tokens=sample.num_tokens)
        )

    def _refuse(self, reason: str) -> None:
        self.state.instructions.append(EventRefused(reason=reason))


def _append(ranges: list[TokenRange], piece: TokenRange) -> None:
    """Append tokens, to the last range where engine and version are the same."""
    last = ranges[-1] if ranges else None
    if last is not None and (last.version, last.engine) == (piece.version, piece.engine):
        piece = TokenRange(
            start=ranges.pop().start, end=piece.end, version=piece.version, engine=piece.engine, owner=piece.owner
        )
    ranges.append(piece)

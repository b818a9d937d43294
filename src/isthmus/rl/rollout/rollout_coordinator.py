"""`RolloutCoordinator`: the shell around the trajectory ledger: its log, tokens, rewards, and links to engines.

Threads may call it: each connection of an engine, those that compute rewards, and the trainer. An event is logged, the
ledger handles it, and its instructions go out, all under one lock, so that orders leave in the order of events.
"""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from isthmus.core.errors import InputError
from isthmus.data import PromptSet
from isthmus.rl.environments.turn_taker import TurnTaker
from isthmus.rl.kept.keep_trained import keep_trained
from isthmus.rl.kept.kept_samples import KeptSamples
from isthmus.rl.ledger.ledger_records import LedgerConfig, SampleRecord, SampleState
from isthmus.rl.ledger.ledger_snapshot import dump_ledger, restore_ledger
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
    StepTrained,
    TokensReported,
    TrainerJoined,
)
from isthmus.rl.ledger.rollout_instructions import (
    EventRefused,
    GenerateSample,
    OnUpdate,
    RolloutInstruction,
    ScoreSample,
    StopSample,
    TrainBatch,
    UpdateEngine,
)
from isthmus.rl.ledger.trajectory_ledger import TrajectoryLedger
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_messages import (
    DropSample,
    EndReport,
    EngineOrder,
    EngineReport,
    StartSample,
    SwitchVersion,
    TokensReport,
    VersionReport,
)
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from isthmus.rl.rollout.sample_scorer import SampleScorer
from isthmus.rl.rollout.trajectory import Trajectory
from isthmus.rl.routing.routing_rows import join_routing, routing_problem

MAX_USELESS_GROUPS = 64
"""Groups in a row, for each prompt of a step, that may be filtered or fail before the run ends with their cause."""

MAX_NAMES = 1000
"""Checkpoints whose weights' names are known, the last ones."""


Audit = Callable[[SampleRecord, tuple[int, ...], Trajectory], tuple[str, str] | None]
"""Takes a complete sample, the tokens of its prompt and the response; returns an owner and what differs ("": nothing).

None where the sample was not chosen, or cannot be recomputed."""


class RolloutCoordinator:
    """Holds the ledger of one run; `begin` comes first."""

    def __init__(
        self, config: LedgerConfig, limits: RolloutLimits, prompts: PromptSet, reward: RewardPool, store: RolloutStore,
        audit: Audit | None = None, turns: TurnTaker | None = None,
    ) -> None:  # fmt: skip
        self._audit, self._scorer = audit, SampleScorer(prompts, reward, turns, limits.penalty_of)
        self._config, self._limits, self._prompts, self._store = config, limits, prompts, store
        self._ledger = TrajectoryLedger(config)
        self._trajectories: dict[SampleKey, Trajectory] = {}
        self._links: dict[str, Callable[[EngineOrder | None], None]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._auditing = threading.Lock()
        num_workers = self._scorer.num_workers or int(audit is not None)
        self._scorers = ThreadPoolExecutor(num_workers, "isthmus-reward") if num_workers else None
        self._batch: tuple[SampleKey, ...] | None = None
        self._base: int | None = None
        self._saved = 0
        self._kept, self._names = KeptSamples(store.folder), dict[int, str]()
        self._is_over = False
        self._refused: set[str] = set()
        self._num_useless, self._useless, self._error = 0, "", ""
        self._hint = "change the reward, the prompts, or rl.filter_groups"
        self.num_filtered = 0

    @property
    def ledger(self) -> TrajectoryLedger:
        """Return the ledger, for reading."""
        return self._ledger

    @property
    def on_update(self) -> OnUpdate:
        """Return what becomes of samples in flight when weights change."""
        return self._config.on_update

    @property
    def base(self) -> int:
        """Return the training step of the ledger's version 0."""
        return self._base or 0

    def begin(self, step: int, weights_name: str = "") -> None:
        """Let a trainer that has restored the state after `step` steps take part; the first call reads the store.

        `weights_name` names the weights by their content. Raises `InputError` if the ledger on disk does not know that
        step.
        """
        with self._changed:
            if self._base is None:
                self._open(step)
            self._note_name(step, weights_name)
            version = step - self.base
            state = self._ledger.state
            if not state.first_step <= version <= state.next_step:
                known = f"steps {self.base + state.first_step} to {self.base + state.next_step}"
                raise InputError(
                    f"the checkpoint is of step {step}, the ledger of the trajectories has {known}",
                    hint="restore both from the same time, or use a new checkpoints.folder",
                )
            self._batch = None
            self._apply(TrainerJoined(trainer=state.trainer + 1, version=version))
            self._execute(self._ledger.outstanding())

    def join_engine(
        self, name: str, owner: str, num_slots: int, step: int, send: Callable[[EngineOrder | None], None]
    ) -> str:
        """Take in an engine with the weights after `step` steps; orders go to `send`, which must not block.

        None as an order ends the connection. Returns "", or why the owner decodes no more.
        """
        with self._changed:
            if owner in self._ledger.state.barred:
                return self._ledger.state.barred[owner]
            self._links[name] = send
            self._apply(EngineJoined(engine=name, owner=owner, num_slots=num_slots, version=step - self.base))
        return ""

    def refuse_owner(self, owner: str, problem: str) -> None:
        """Note that an owner cannot decode for the run; with none left the run ends with the cause."""
        print(f"warning: {owner} decodes nothing: {problem}", flush=True)
        with self._changed:
            self._refused.add(owner)
            self._end_without_owners(owner, problem)

    def _end_without_owners(self, owner: str, problem: str) -> None:
        if self._limits.owners and self._limits.owners <= self._refused | self._ledger.state.barred.keys():
            self._error, self._hint = f"no owner is left that decodes: {owner}: {problem}", "name other clusters"
            self._changed.notify_all()

    def lose_engine(self, name: str) -> None:
        """Put the samples of an engine back."""
        with self._changed:
            if self._links.pop(name, None) is not None:
                self._apply(EngineLost(engine=name))

    def report(self, engine: str, report: EngineReport) -> str:
        """Take in a report; return "" or what is wrong with it: such a sample fails, and begins again elsewhere."""
        with self._changed:
            match report:
                case VersionReport():
                    self._apply(EngineUpdated(engine=engine, version=report.version - self.base))
                case EndReport(failed=True):
                    self._apply(SampleFailed(engine=engine, sample=report.sample, lease=report.lease))
                case EndReport():
                    sample, kept = self._ledger.find(report.sample), self._trajectories.get(report.sample)
                    if problem := self._limits.end_problem(sample, kept, report):
                        self._apply(SampleFailed(engine=engine, sample=report.sample, lease=report.lease))
                        return problem
                    self._apply(
                        SampleEnded(
                            engine=engine, sample=report.sample, lease=report.lease, num_tokens=report.num_tokens
                        )
                    )  # fmt: skip
                case TokensReport():
                    return self._add_tokens(engine, report)
        return ""

    def count_bytes(self, owner: str, weights_bytes: int, sent_bytes: int, received_bytes: int) -> None:
        """Add bytes that have crossed the connections of an owner's engines since the last call."""
        if not sent_bytes and not received_bytes:
            return
        with self._changed:
            self._apply(
                BytesCounted(
                    owner=owner, weights_bytes=weights_bytes, sent_bytes=sent_bytes, received_bytes=received_bytes
                )
            )  # fmt: skip

    def request_batch(self, step: int) -> None:
        """Ask for the samples of training step `step`."""
        with self._changed:
            self._num_useless = self.num_filtered = 0
            self._batch = None
            self._apply(BatchRequested(trainer=self._ledger.state.trainer, step=step - self.base))
            self._store.sync()

    def wait_batch(self, timeout_s: float) -> tuple[SampleKey, ...] | None:
        """Return the samples of the step that was requested, None if it has none after `timeout_s`.

        Raises `InputError` if groups are useless one after another: a run that would never go on.
        """
        with self._changed:
            if self._batch is None and not self._error:
                self._changed.wait(timeout_s)
            if self._error:
                raise InputError(self._error, hint=self._hint)
            return self._batch

    def end_step(self, step: int, *, is_last: bool) -> None:
        """Note that training step `step` is done, and its version can be had; after the last one no order goes out."""
        with self._changed:
            self._is_over = is_last
            self._apply(StepTrained(trainer=self._ledger.state.trainer, step=step - self.base))
            self._store.sync()

    def save(self, step: int, weights_name: str = "") -> None:
        """Write a snapshot that goes with the checkpoint after `step` steps, whose weights have the name.

        Tokens and records that no trainer asks for again are left out: those of steps before the checkpoint before this
        one. Those that an audit can recompute from a checkpoint go to files first.
        """
        with self._changed:
            self._note_name(step, weights_name)
            keep_trained(
                self._kept, self._ledger.state, self.base, self._names, self._trajectories,
                lambda key: self._prompts.prompt(self.prompt_number(key)).tokens,
            )  # fmt: skip
            oldest, self._saved = self._saved - self.base, step
            self._apply(RecordsFolded(before=oldest))
            for key in list(self._trajectories):
                if self._ledger.find(key) is None:
                    del self._trajectories[key]
            self._store.snapshot(self._content())

    def sample(self, key: SampleKey) -> tuple[SampleRecord, Trajectory]:
        """Return the record and the tokens of a sample of a batch."""
        with self._changed:
            sample = self._ledger.find(key)
            if sample is None:
                raise KeyError(key)
            return sample, self._trajectories[key]

    def close(self) -> None:
        """End rewards and close the store."""
        if self._scorers is not None:
            self._scorers.shutdown(cancel_futures=True)
        self._scorer.close()
        self._store.close()

    def _open(self, step: int) -> None:
        """Restore the ledger from the store, without its engines, or begin a new one at `step`."""
        snapshot, events = self._store.read()
        if snapshot is None:
            self._base = step
            self._store.snapshot(self._content())
            return
        self._base = int(snapshot["base"])
        self._ledger = TrajectoryLedger.of_state(restore_ledger(self._config, snapshot["ledger"]))
        self._trajectories = {
            SampleKey(*key): Trajectory(
                tokens=tokens, log_probabilities=log_probabilities, routing=bytearray(b64decode("".join(routing)))
            )
            for key, tokens, log_probabilities, *routing in snapshot["trajectories"]
        }
        self._names = {int(version): str(name) for version, name in snapshot.get("names", ())}
        for event, beside in events:
            self._handle(event, beside)
        for name in list(self._ledger.state.engines):
            self._apply(EngineLost(engine=name))

    def _content(self) -> dict[str, Any]:
        trajectories = [
            (list(key), one.tokens, one.log_probabilities, b64encode(one.routing).decode())
            for key, one in self._trajectories.items()
        ]
        return {
            "base": self._base,
            "config": asdict(self._config),
            "ledger": dump_ledger(self._ledger.state),
            "trajectories": trajectories,
            "names": list(self._names.items()),
        }

    def _note_name(self, step: int, name: str) -> None:
        """Note the name of weights that a checkpoint keeps; those of a step that gave two versions cannot be told."""
        if name:
            self._names[step] = name if self._names.get(step, name) == name else ""
            for old in sorted(self._names)[:-MAX_NAMES]:
                del self._names[old]

    def _apply(self, event: RolloutEvent, **beside: Any) -> None:
        """Log an event, handle it, and do what follows."""
        self._store.append(event, **beside)
        self._execute(self._handle(event, beside))

    def _handle(self, event: RolloutEvent, beside: dict[str, Any]) -> list[RolloutInstruction]:
        """Let the ledger handle an event, and keep the tokens that it records."""
        if not isinstance(event, TokensReported | ObservationAdded):
            return self._ledger.handle(event)
        sample = self._ledger.find(event.sample)
        before = 0 if sample is None else sample.num_tokens
        start = event.start if isinstance(event, TokensReported) else before
        instructions = list(self._ledger.handle(event))
        after = 0 if sample is None else sample.num_tokens
        if after > before:
            kept = self._trajectories.setdefault(event.sample, Trajectory())
            new = slice(before - start, after - start)
            kept.tokens += beside["tokens"][new]
            kept.log_probabilities += beside["log_probabilities"][new]
            if self._limits.routing is not None and isinstance(event, TokensReported):
                first = self._num_prompt_tokens(event.sample) - 1
                join_routing(
                    kept.routing, b64decode(beside.get("routing", "")), first + start + event.num_tokens,
                    first + after, self._limits.routing.row_bytes,
                )  # fmt: skip
        return instructions

    def _execute(self, instructions: list[RolloutInstruction]) -> None:
        for one in list(instructions):
            match one:
                case GenerateSample():
                    kept = self._trajectories.get(one.sample, Trajectory())
                    if self._limits.is_complete(self._ledger.find(one.sample), kept, one.num_tokens):
                        self._apply(
                            SampleEnded(
                                engine=one.engine, sample=one.sample, lease=one.lease, num_tokens=one.num_tokens
                            )
                        )  # fmt: skip
                        continue
                    self._send(
                        one.engine,
                        StartSample(
                            sample=one.sample, lease=one.lease,
                            prompt_tokens=self._prompts.prompt(self.prompt_number(one.sample)).tokens,
                            response_tokens=tuple(kept.tokens[: one.num_tokens]),
                            routed_rows=self._num_routed(kept),
                        ),
                    )  # fmt: skip
                case StopSample():
                    self._send(one.engine, DropSample(sample=one.sample, lease=one.lease))
                case UpdateEngine():
                    self._send(one.engine, SwitchVersion(version=one.version + self.base, on_update=one.on_update))
                case ScoreSample():
                    self._score(one)
                case TrainBatch():
                    self._batch, self._num_useless = one.samples, 0
                    self._changed.notify_all()
                case EventRefused():
                    print(f"warning: rollouts: {one.reason}", flush=True)

    def _send(self, engine: str, order: EngineOrder) -> None:
        send = self._links.get(engine)
        if send is not None and not self._is_over:
            send(order)

    def prompt_number(self, key: SampleKey) -> int:
        """Return the number of the prompt in the sequence of the data, of which earlier runs have used some."""
        return self.base * self._config.batch_prompts + key.prompt

    def _num_prompt_tokens(self, key: SampleKey) -> int:
        return len(self._prompts.prompt(self.prompt_number(key)).tokens)

    def _num_routed(self, kept: Trajectory) -> int:
        """Return of how many tokens of prompt and response the experts are here."""
        shape = self._limits.routing
        return 0 if shape is None else len(kept.routing) // shape.row_bytes

    def _routing_problem(self, report: TokensReport) -> str:
        """Return what is wrong with the experts of a report; one for a former lease may lack some, and is not taken."""
        sample, kept = self._ledger.find(report.sample), self._trajectories.get(report.sample, Trajectory())
        end = self._num_prompt_tokens(report.sample) + report.start + len(report.tokens) - 1
        is_late = sample is None or sample.lease != report.lease
        return routing_problem(self._limits.routing, report.routing, end, end if is_late else self._num_routed(kept))

    def _add_tokens(self, engine: str, report: TokensReport) -> str:
        problem = self._limits.tokens_problem(report) or self._routing_problem(report)
        if problem:
            self._apply(SampleFailed(engine=engine, sample=report.sample, lease=report.lease))
            return problem
        self._apply(
            TokensReported(
                engine=engine, sample=report.sample, lease=report.lease, start=report.start,
                num_tokens=len(report.tokens), version=report.version - self.base,
            ),
            tokens=list(report.tokens), log_probabilities=list(report.log_probabilities),
            **({"routing": b64encode(report.routing).decode()} if report.routing else {}),
        )  # fmt: skip
        return ""

    def _is_forged(self, wanted: ScoreSample, prompt_tokens: tuple[int, ...]) -> bool:
        """Recompute a complete sample if it is chosen; drop the owner of a forged one, and return whether it is."""
        with self._changed:
            sample = self._ledger.find(wanted.sample)
            if self._audit is None or sample is None:
                return False
            kept = self._trajectories[wanted.sample]
            claim = Trajectory(tokens=list(kept.tokens), log_probabilities=list(kept.log_probabilities))
            record = replace(sample, ranges=list(sample.ranges))
        with self._auditing:  # one engine computes all audits
            found = self._audit(record, prompt_tokens, claim)
        if found is None:
            return False
        owner, problem = found
        with self._changed:
            of_owner = [name for name, one in self._ledger.state.engines.items() if one.owner == owner]
            self._apply(SampleAudited(sample=wanted.sample, owner=owner, problem=problem))
            if not problem:
                return False
            print(f"warning: {owner} is dropped: sample {tuple(wanted.sample)} is forged: {problem}", flush=True)
            for name in of_owner:
                if (send := self._links.pop(name, None)) is not None:
                    send(None)
            self._end_without_owners(owner, problem)
        return True

    def _score(self, wanted: ScoreSample) -> None:
        prompt = self._prompts.prompt(self.prompt_number(wanted.sample))
        tokens = list(self._trajectories[wanted.sample].tokens)
        sample = self._ledger.find(wanted.sample)
        ranges = () if sample is None else tuple(sample.ranges)

        def work() -> None:
            event, added, problem = self._scorer.score(
                wanted, prompt, ranges, tokens, lambda: self._is_forged(wanted, prompt.tokens)
            )
            if problem:
                self._useless = problem
                print(f"warning: {problem}", flush=True)
            if event is None:
                return
            with self._changed:
                known = self._ledger.state.prompts.get(wanted.sample.prompt)
                if known is None:  # its prompt has failed, and is counted
                    return
                fate = known.fate
                beside = {"tokens": list(added), "log_probabilities": [0.0] * len(added)} if added else {}
                self._apply(event, **beside)
                if fate is None:
                    self._count_useless(wanted.sample.prompt)

        if self._scorers is None:
            work()
        else:
            self._scorers.submit(self._work_or_end, work)

    def _work_or_end(self, work: Callable[[], None]) -> None:
        """Do work in a thread of its own; a run that could not go on after an error ends with it."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self._error, self._hint = f"{type(error).__name__}: {error}", "report it"
                self._changed.notify_all()
            raise

    def _count_useless(self, number: int) -> None:
        """Count a group that was filtered or failed since the last batch; too many end the run."""
        prompt = self._ledger.state.prompts[number]
        if prompt.fate is SampleState.FILTERED:
            self.num_filtered += 1
            self._useless = f"all rewards of prompt {number} are {prompt.samples[0].reward}"
        elif prompt.fate is not SampleState.FAILED:
            return
        self._num_useless += 1
        if self._num_useless >= MAX_USELESS_GROUPS * self._config.batch_prompts:
            self._error = f"{self._num_useless} groups in a row were filtered or failed: {self._useless}"
            self._changed.notify_all()

"""What the trajectory ledger records of prompts, samples, engines and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from isthmus.core.errors import InputError
from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.ledger.rollout_instructions import OnUpdate, RolloutInstruction


class SampleState(StrEnum):
    """Where a sample is. The last four are fates; `trained` is taken back where the trainer lost the step."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    SCORED = "scored"
    CLAIMED = "claimed"
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


ENVIRONMENT = "(environment)"
"""Engine and owner of tokens that an environment gave: they are no one's samples, and are not trained on."""

FATES = (SampleState.TRAINED, SampleState.FILTERED, SampleState.STALE, SampleState.FAILED)


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """The rules of a run.

    `group` samples a prompt, `batch_prompts` prompts a step, of `num_prompts` in all (None: without end). A token is
    trained on at most `max_staleness` versions after the one that sampled it. `filter_groups` drops groups whose
    rewards are all equal. A prompt fails after `max_failures` failed samples.
    """

    group: int
    batch_prompts: int
    max_staleness: int
    num_prompts: int | None = None
    on_update: OnUpdate = "keep"
    filter_groups: bool = True
    max_failures: int = 3

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that describe no run."""
        if self.group < 2:
            raise InputError(f"group {self.group}", hint="use at least 2 samples a prompt")
        if self.batch_prompts < 1 or self.max_staleness < 0 or self.max_failures < 1:
            raise InputError(
                f"{self.batch_prompts} prompts a step, staleness {self.max_staleness}, {self.max_failures} failures",
                hint="use at least 1 prompt, staleness 0 or more, and at least 1 failure",
            )


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """Tokens `start` to `end - 1` of a response: the version that sampled them, the engine and its owner."""

    start: int
    end: int
    version: int
    engine: str
    owner: str

    @property
    def is_sampled(self) -> bool:
        """Return whether an engine sampled the tokens; an environment gave the others."""
        return self.owner != ENVIRONMENT


@dataclass(kw_only=True)
class SampleRecord:
    """A sample: its state, its ranges in order, and while it runs its engine, lease and the version it began with.

    `score_try` numbers the calls of environment and rewards, `first_try` the first one since the last observation.
    """

    key: SampleKey
    state: SampleState = SampleState.WAITING
    ranges: list[TokenRange] = field(default_factory=list)
    engine: str | None = None
    lease: int = 0
    begun_version: int | None = None
    score_try: int = 1
    first_try: int = 1
    reward: float | None = None
    step: int | None = None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are recorded."""
        return self.ranges[-1].end if self.ranges else 0

    @property
    def num_turns(self) -> int:
        """Return how many turns the model has begun: one, and one after each observation."""
        return 1 + sum(not one.is_sampled for one in self.ranges)

    @property
    def oldest_version(self) -> int | None:
        """Return the oldest version of its tokens, or the one that it began with; None where it has not begun."""
        return self.ranges[0].version if self.ranges else self.begun_version


@dataclass(kw_only=True)
class PromptRecord:
    """A prompt: the current sample of each number, those that began again, and its fate."""

    number: int
    samples: list[SampleRecord]
    former: list[SampleRecord] = field(default_factory=list)
    num_failures: int = 0
    fate: SampleState | None = None
    step: int | None = None

    @property
    def ready(self) -> bool:
        """Return whether all samples have a reward and none is claimed."""
        for one in self.samples:  # noqa: SIM110  # of all open groups after each event: twice as fast as `all`
            if one.state is not SampleState.SCORED:
                return False
        return True


@dataclass(kw_only=True)
class EngineRecord:
    """An engine: its owner, its slots, its version, and the samples that run on it."""

    owner: str
    num_slots: int
    version: int
    running: dict[SampleKey, SampleRecord] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleAudit:
    """What an audit of a sample found: `problem` is "" where tokens and log-probabilities were the same."""

    owner: str
    problem: str


@dataclass(kw_only=True)
class LinkBytes:
    """Bytes over all connections to an owner's engines: weights, all that was sent to them, all that came back."""

    weights_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(kw_only=True)
class SampleCounts:
    """Counts of samples: by fate; tokens by owner, then fate; trained tokens by staleness; audits by owner."""

    samples: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    audits: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, sample: SampleRecord) -> None:
        """Count a sample."""
        fate = str(sample.state) if sample.state in FATES else "in_flight"
        self.samples[fate] = self.samples.get(fate, 0) + 1
        for one in sample.ranges:
            num, of_owner = one.end - one.start, self.tokens.setdefault(one.owner, {})
            of_owner[fate] = of_owner.get(fate, 0) + num
            if one.is_sampled and sample.state is SampleState.TRAINED and sample.step is not None:
                age = sample.step - one.version
                self.staleness[age] = self.staleness.get(age, 0) + num

    def add_audit(self, audit: SampleAudit) -> None:
        """Count an audit."""
        count = self.audits.setdefault(audit.owner, {"samples": 0, "differing": 0})
        count["samples"] += 1
        count["differing"] += bool(audit.problem)


@dataclass(kw_only=True)
class FoldedAudit:
    """Of a step without records: its samples, how many were recomputed, and those that differed with owner and how."""

    samples: int = 0
    recomputed: int = 0
    differing: list[tuple[SampleKey, str, str]] = field(default_factory=list)


@dataclass(kw_only=True)
class FoldedRecords:
    """What is known of prompts whose records are gone: their number, their counts, and audits by step."""

    prompts: int = 0
    counts: SampleCounts = field(default_factory=SampleCounts)
    steps: dict[int, FoldedAudit] = field(default_factory=dict)


@dataclass(kw_only=True)
class LedgerState:
    """The whole state; only `isthmus.rl.ledger` changes it.

    `num_prompts` were opened, of which `prompts` has those whose records are here. `batches` begin with step
    `first_step`.
    """

    config: LedgerConfig
    prompts: dict[int, PromptRecord] = field(default_factory=dict)
    open_prompts: dict[int, PromptRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)
    batches: list[tuple[int, ...]] = field(default_factory=list)
    folded: FoldedRecords = field(default_factory=FoldedRecords)
    num_prompts: int = 0
    first_step: int = 0
    links: dict[str, LinkBytes] = field(default_factory=dict)
    audits: dict[SampleKey, SampleAudit] = field(default_factory=dict)
    barred: dict[str, str] = field(default_factory=dict)
    version: int = 0
    newest: int = 0
    trainer: int = 0
    requested: bool = False
    next_lease: int = 1
    instructions: list[RolloutInstruction] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """Return the first step that has no batch yet."""
        return self.first_step + len(self.batches)

    def batch_of(self, step: int) -> tuple[int, ...]:
        """Return the prompts of a step, from `first_step` on."""
        return self.batches[step - self.first_step]

    @property
    def exhausted(self) -> bool:
        """Return whether every prompt has been opened."""
        return self.config.num_prompts is not None and self.num_prompts >= self.config.num_prompts

    def samples(self) -> Iterator[SampleRecord]:
        """Yield all samples whose records are here, those that began again included."""
        for prompt in self.prompts.values():
            yield from prompt.former
            yield from prompt.samples

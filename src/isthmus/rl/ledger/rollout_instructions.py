"""Instructions of the trajectory ledger to the code around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.rl.ledger.rollout_events import SampleKey

OnUpdate = Literal["keep", "refill", "abort"]
"""What becomes of unfinished samples under newer weights: go on with the cache, compute it again, or begin again."""


@dataclass(frozen=True, kw_only=True)
class GenerateSample:
    """An engine is to go on with a sample after its first `num_tokens` tokens, under a new lease."""

    engine: str
    sample: SampleKey
    lease: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class StopSample:
    """An engine is to drop a sample: the lease is over."""

    engine: str
    sample: SampleKey
    lease: int


@dataclass(frozen=True, kw_only=True)
class AcknowledgeTokens:
    """The first `num_tokens` tokens are recorded; the engine sends what follows, again if need be."""

    engine: str
    sample: SampleKey
    lease: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class ScoreSample:
    """The reward of a complete sample is needed."""

    sample: SampleKey
    score_try: int


@dataclass(frozen=True, kw_only=True)
class UpdateEngine:
    """An engine is to fetch weights `version` and go on with its samples as `on_update` has it."""

    engine: str
    version: int
    on_update: OnUpdate


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """The trainer is to do step `step` with these samples, in this order: groups side by side."""

    step: int
    samples: tuple[SampleKey, ...]


@dataclass(frozen=True, kw_only=True)
class EndTraining:
    """No prompt is left for step `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class EventRefused:
    """An event that cannot be: the code around logs it, and the ledger is as it was."""

    reason: str


RolloutInstruction = (
    GenerateSample
    | StopSample
    | AcknowledgeTokens
    | ScoreSample
    | UpdateEngine
    | TrainBatch
    | EndTraining
    | EventRefused
)

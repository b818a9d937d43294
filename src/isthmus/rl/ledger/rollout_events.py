"""Events of the trajectory ledger: what engines, reward functions and the trainer report.

They may arrive late, twice or in another order. Numbers make that harmless: a lease is given once, tokens carry their
place, a trainer's starts are numbered, and so are the tries of a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SampleKey(NamedTuple):
    """A sample: its prompt, its number among the samples of the prompt, and how often it began again."""

    prompt: int
    number: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class EngineJoined:
    """An engine can decode `num_slots` samples at once with weights `version`; its name is new with each start."""

    engine: str
    owner: str
    num_slots: int
    version: int


@dataclass(frozen=True, kw_only=True)
class EngineLost:
    """An engine does not answer, or its owner took its chips."""

    engine: str


@dataclass(frozen=True, kw_only=True)
class EngineUpdated:
    """An engine decodes with weights `version` from now on."""

    engine: str
    version: int


@dataclass(frozen=True, kw_only=True)
class TokensReported:
    """An engine sampled the tokens number `start` to `start + num_tokens - 1` of a response under one version."""

    engine: str
    sample: SampleKey
    lease: int
    start: int
    num_tokens: int
    version: int


@dataclass(frozen=True, kw_only=True)
class SampleEnded:
    """A response of `num_tokens` tokens is complete."""

    engine: str
    sample: SampleKey
    lease: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class SampleFailed:
    """An engine cannot go on with a sample: a tool that raised, a time-out."""

    engine: str
    sample: SampleKey
    lease: int


@dataclass(frozen=True, kw_only=True)
class SampleScored:
    """The reward of a sample; NaN and infinity count as a failed try."""

    sample: SampleKey
    score_try: int
    reward: float


@dataclass(frozen=True, kw_only=True)
class ScoreFailed:
    """The try number `score_try` of a reward raised or came too late."""

    sample: SampleKey
    score_try: int


@dataclass(frozen=True, kw_only=True)
class ObservationAdded:
    """An environment answered a turn, asked in try number `score_try`, with `num_tokens` tokens: the sample goes on."""

    sample: SampleKey
    score_try: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class TrainerJoined:
    """The trainer started for the time number `trainer`, from 1, with weights `version`: its last checkpoint."""

    trainer: int
    version: int


@dataclass(frozen=True, kw_only=True)
class BatchRequested:
    """The trainer is ready for step number `step`, which makes version `step + 1` of version `step`."""

    trainer: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StepTrained:
    """The trainer did a step, and its new version can be fetched."""

    trainer: int
    step: int


@dataclass(frozen=True, kw_only=True)
class BytesCounted:
    """Bytes that have crossed the connections of an owner's engines since the last count, as its link carries them.

    `weights_bytes` are those of new versions, part of `sent_bytes`; `received_bytes` are trajectories and answers.
    """

    owner: str
    weights_bytes: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class SampleAudited:
    """A sample was recomputed at the versions that it claims: `problem` says what differs, "" if nothing does.

    `owner` is the one whose tokens differ, or the one of the sample's last tokens.
    """

    sample: SampleKey
    owner: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class RecordsFolded:
    """No trainer goes back to a step before `before`: records of earlier ones become counts."""

    before: int


RolloutEvent = (
    EngineJoined
    | EngineLost
    | EngineUpdated
    | TokensReported
    | SampleEnded
    | SampleFailed
    | SampleScored
    | ScoreFailed
    | ObservationAdded
    | TrainerJoined
    | BatchRequested
    | StepTrained
    | BytesCounted
    | SampleAudited
    | RecordsFolded
)

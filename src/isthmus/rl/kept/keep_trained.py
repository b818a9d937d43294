"""`keep_trained`: lets files keep the trained samples that an audit after the run can recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from isthmus.rl.kept.kept_samples import KeptRange, KeptSample, KeptSamples
from isthmus.rl.ledger.ledger_records import LedgerState, SampleRecord
from isthmus.rl.ledger.rollout_events import SampleKey


class Response(Protocol):
    """The tokens of a response, and the log-probability of each."""

    tokens: list[int]
    log_probabilities: list[float]


def keep_trained(
    kept: KeptSamples, state: LedgerState, base: int, names: Mapping[int, str],
    trajectories: Mapping[SampleKey, Response], prompt_tokens: Callable[[SampleKey], tuple[int, ...]],
) -> None:  # fmt: skip
    """Keep the samples of each trained step of which some claim only versions that `names` has.

    `names` are by training step, `base` is the one of the ledger's version 0. The records of the steps are here until a
    checkpoint later, so a step is written twice at most.
    """
    for step in range(state.first_step, min(state.next_step, state.version)):
        records = [_as_kept(one, base) for number in state.batch_of(step) for one in state.prompts[number].samples]
        whole = [one.versions <= names.keys() and SampleKey(*one.key) in trajectories for one in records]
        if any(whole):
            found = [
                _with_tokens(one, trajectories[SampleKey(*one.key)], prompt_tokens) if is_whole else one
                for one, is_whole in zip(records, whole, strict=True)
            ]
            kept.write(base + step, dict(names), found)


def _kept_ranges(sample: SampleRecord, base: int) -> tuple[KeptRange, ...]:
    """Return the ranges of a sample, with versions as training steps."""
    return tuple(KeptRange(**vars(replace(one, version=one.version + base))) for one in sample.ranges)


def _as_kept(sample: SampleRecord, base: int) -> KeptSample:
    return KeptSample(key=tuple(sample.key), ranges=_kept_ranges(sample, base))


def _with_tokens(
    one: KeptSample, trajectory: Response, prompt_tokens: Callable[[SampleKey], tuple[int, ...]]
) -> KeptSample:
    return one.model_copy(
        update={
            "prompt_tokens": tuple(prompt_tokens(SampleKey(*one.key))),
            "tokens": tuple(trajectory.tokens),
            "log_probabilities": tuple(trajectory.log_probabilities),
        }
    )

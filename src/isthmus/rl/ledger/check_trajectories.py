"""Invariants of the trajectory ledger, checked after every event of every test."""

from __future__ import annotations

from collections import Counter

from isthmus.rl.ledger.deadlines import deadline_of
from isthmus.rl.ledger.ledger_records import LedgerState, PromptRecord, SampleRecord, SampleState
from isthmus.sim import meet_deadlines


class LedgerInvariantError(Exception):
    """An invariant of the ledger is violated, which is a bug."""


def check_trajectories(ledger: LedgerState) -> None:
    """Raise `LedgerInvariantError` if anything is lost or doubled, or a token is too stale.

    Prompts are opened in order and each is open, in one batch, filtered or failed, or folded into counts. Each of its
    places has one current sample, and former ones are stale or failed. Tokens are recorded without a gap, under
    versions that rise.
    """
    numbers = list(ledger.prompts)
    _require(numbers == sorted(numbers) and max(numbers, default=-1) < ledger.num_prompts, "a prompt is out of order")
    _require(len(numbers) + ledger.folded.prompts == ledger.num_prompts, "a prompt was left out")
    in_batches = Counter(number for batch in ledger.batches for number in batch)
    _require(not in_batches or max(in_batches.values()) == 1, "a prompt is in two batches")
    for number, prompt in ledger.prompts.items():
        places = (number in ledger.open_prompts) + in_batches[number]
        ended = prompt.fate in (SampleState.FILTERED, SampleState.FAILED)
        _require(places + ended == 1, f"prompt {number} is in {places} places with fate {prompt.fate}")
        _check_prompt(ledger, prompt)
    for step, batch in enumerate(ledger.batches, ledger.first_step):
        state = SampleState.TRAINED if step < ledger.version else SampleState.CLAIMED
        states = {one.state for number in batch for one in ledger.prompts[number].samples}
        _require(states == {state}, f"step {step} has samples that are {states}, not {state}")
    deadlines = [deadline_of(one, ledger.config) for one in ledger.open_prompts.values()]
    _require(
        meet_deadlines(deadlines, ledger.next_step, ledger.config.batch_prompts), f"deadlines {deadlines} cannot be met"
    )
    _check_engines(ledger)
    unclaimed = (sample for prompt in ledger.open_prompts.values() for sample in prompt.samples)
    barred = [one.key for one in unclaimed if any(piece.owner in ledger.barred for piece in one.ranges)]
    _require(not barred, f"samples {barred} have tokens of an owner that is barred")


def _check_prompt(ledger: LedgerState, prompt: PromptRecord) -> None:
    keys = [one.key for one in (*prompt.former, *prompt.samples)]
    _require(len(set(keys)) == len(keys), f"prompt {prompt.number} has a sample twice")
    _require(len(prompt.samples) == ledger.config.group, f"prompt {prompt.number} lacks a sample")
    lost = [one.key for one in prompt.former if one.state not in (SampleState.STALE, SampleState.FAILED)]
    _require(not lost, f"samples {lost} have no fate")
    for sample in (*prompt.former, *prompt.samples):
        _check_sample(ledger, sample)
    if prompt.fate is SampleState.FILTERED:
        _require(len({one.reward for one in prompt.samples}) == 1, f"prompt {prompt.number} was filtered in error")
    if prompt.fate is not None:
        states = {one.state for one in prompt.samples}
        _require(states == {prompt.fate}, f"prompt {prompt.number} is {prompt.fate}, its samples are {states}")


def _check_sample(ledger: LedgerState, sample: SampleRecord) -> None:
    at, version = 0, 0
    for one in sample.ranges:
        _require(one.start == at < one.end, f"sample {sample.key} has tokens {one.start} after {at}")
        _require(version <= one.version <= ledger.newest, f"sample {sample.key} has version {one.version}")
        at, version = one.end, one.version
    if sample.state in (SampleState.CLAIMED, SampleState.TRAINED):
        oldest = sample.ranges[0].version
        staleness = (sample.step or 0) - oldest
        _require(sample.step is not None, f"sample {sample.key} has no step")
        _require(staleness <= ledger.config.max_staleness, f"sample {sample.key} is {staleness} versions old")
        _require(sample.reward is not None, f"sample {sample.key} has no reward")


def _check_engines(ledger: LedgerState) -> None:
    running = {one.key: one for one in ledger.samples() if one.state is SampleState.RUNNING}
    leases = [one.lease for one in running.values()]
    _require(len(set(leases)) == len(leases), "two samples have one lease")
    held = {key: name for name, engine in ledger.engines.items() for key in engine.running}
    _require(held == {key: one.engine for key, one in running.items()}, "engines and samples differ")
    for name, engine in ledger.engines.items():
        _require(engine.owner not in ledger.barred, f"engine {name} is of {engine.owner}, which is barred")
        _require(len(engine.running) <= engine.num_slots, f"engine {name} has more samples than slots")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise LedgerInvariantError(message)

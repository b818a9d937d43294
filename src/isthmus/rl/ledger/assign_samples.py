"""`assign_samples`: waiting samples go to free slots of engines, and new prompts are opened for slots that are left."""

from __future__ import annotations

import math

from isthmus.rl.ledger.deadlines import deadline_of
from isthmus.rl.ledger.ledger_records import EngineRecord, LedgerState, PromptRecord, SampleRecord, SampleState
from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.ledger.rollout_instructions import GenerateSample
from isthmus.rl.ledger.sample_lifecycle import move_sample
from isthmus.sim import meet_deadlines


def assign_samples(ledger: LedgerState) -> None:
    """Start what may start: samples of the earliest deadlines first, then of the prompts that were opened first.

    An engine takes a sample only if it has no older weights than the sample's last tokens, and if all groups still can
    be trained in time. Where updates abort samples, it needs the trainer's version.
    """
    if all(len(one.running) >= one.num_slots for one in ledger.engines.values()):
        return
    deadlines = {number: deadline_of(one, ledger.config) for number, one in ledger.open_prompts.items()}
    blocked = False
    for number in sorted(ledger.open_prompts, key=lambda one: (deadlines[one], one)):
        for sample in ledger.open_prompts[number].samples:
            if sample.state is SampleState.WAITING and not _start(ledger, sample, deadlines):
                blocked = True
    while not blocked and not ledger.exhausted:
        number = ledger.num_prompts
        group = [SampleRecord(key=SampleKey(number, index, 0)) for index in range(ledger.config.group)]
        prompt = PromptRecord(number=number, samples=group)
        if not _start(ledger, group[0], deadlines):
            return
        ledger.num_prompts += 1
        ledger.prompts[number] = ledger.open_prompts[number] = prompt
        for sample in group[1:]:
            blocked = not _start(ledger, sample, deadlines) or blocked


def _start(ledger: LedgerState, sample: SampleRecord, deadlines: dict[int, float]) -> bool:
    """Start a sample on the engine with the newest weights, if one may.

    Of these the one that has computed its tokens, then one that has the prompt from other samples of the group and at
    most a group fewer free slots than another, then the one with most free slots.
    """
    last = sample.ranges[-1].version if sample.ranges else 0
    if ledger.config.on_update == "abort":
        last = max(last, ledger.version)
    most = max((one.num_slots - len(one.running) for one in ledger.engines.values()), default=0)
    able = [
        (name, one) for name, one in ledger.engines.items() if len(one.running) < one.num_slots and one.version >= last
    ]
    if len(able) > 1:
        able.sort(key=lambda each: _preference(sample, each[0], each[1], most - ledger.config.group), reverse=True)
    for name, one in able:
        if _may_begin(ledger, sample, one.version, deadlines):
            _give(ledger, sample, name, one)
            return True
    return False


def _preference(
    sample: SampleRecord, name: str, engine: EngineRecord, least_free: int
) -> tuple[int, bool, bool, int, str]:
    """Return what an engine is chosen by: its version, its cache, its free slots."""
    num_free = engine.num_slots - len(engine.running)
    return (engine.version, *_cached(sample, name, engine, least_free), num_free, name)


def _cached(sample: SampleRecord, name: str, engine: EngineRecord, least_free: int) -> tuple[bool, bool]:
    """Return whether an engine has rows of the sample's tokens, and of its prompt where it has `least_free` slots."""
    sampled = [one for one in sample.ranges if one.is_sampled]
    own = bool(sampled) and (sampled[-1].engine, sampled[-1].version) == (name, engine.version)
    shares = any(key.prompt == sample.key.prompt for key in engine.running)
    return own, shares and engine.num_slots - len(engine.running) >= least_free


def _may_begin(ledger: LedgerState, sample: SampleRecord, version: int, deadlines: dict[int, float]) -> bool:
    """Return whether all groups fit with this sample begun under `version`; if so note its group's deadline."""
    oldest = sample.oldest_version
    own = (version if oldest is None else oldest) + ledger.config.max_staleness
    prompt = sample.key.prompt
    deadline = min(own, deadlines.get(prompt, math.inf))
    if not meet_deadlines({**deadlines, prompt: deadline}.values(), ledger.next_step, ledger.config.batch_prompts):
        return False
    deadlines[prompt] = deadline
    return True


def _give(ledger: LedgerState, sample: SampleRecord, name: str, engine: EngineRecord) -> None:
    move_sample(ledger, sample, SampleState.RUNNING)
    sample.engine, sample.lease = name, ledger.next_lease
    ledger.next_lease += 1
    if not sample.ranges:
        sample.begun_version = engine.version
    engine.running[sample.key] = sample
    ledger.instructions.append(
        GenerateSample(engine=name, sample=sample.key, lease=sample.lease, num_tokens=sample.num_tokens)
    )

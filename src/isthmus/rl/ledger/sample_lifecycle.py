"""The life of a sample: the table of its transitions, and how one begins again or fails.

waiting -> running -> ended -> scored -> claimed -> trained
running -> waiting                     its engine is lost; what it reported stays
ended -> waiting                       an environment answered its turn, and it goes on
trained -> claimed                     the trainer lost the step
scored -> filtered                     all rewards of the group are equal
waiting, running, ended -> stale       it begins again under newer weights
waiting, running, ended, scored -> failed
"""

from __future__ import annotations

from isthmus.core.errors import IllegalTransitionError
from isthmus.rl.ledger.ledger_records import LedgerState, PromptRecord, SampleRecord, SampleState
from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.ledger.rollout_instructions import StopSample

_WAITING, _RUNNING, _ENDED, _SCORED = (
    SampleState.WAITING,
    SampleState.RUNNING,
    SampleState.ENDED,
    SampleState.SCORED,
)
_TRANSITIONS = frozenset(
    [
        (_WAITING, _RUNNING),
        (_RUNNING, _WAITING),
        (_RUNNING, _ENDED),
        (_ENDED, _WAITING),
        (_ENDED, _SCORED),
        (_SCORED, SampleState.CLAIMED),
        (SampleState.CLAIMED, SampleState.TRAINED),
        (SampleState.TRAINED, SampleState.CLAIMED),
        (_SCORED, SampleState.FILTERED),
        *((one, SampleState.STALE) for one in (_WAITING, _RUNNING, _ENDED)),
        *((one, SampleState.FAILED) for one in (_WAITING, _RUNNING, _ENDED, _SCORED)),
    ]
)


def move_sample(ledger: LedgerState, sample: SampleRecord, to: SampleState) -> None:
    """Move a sample; raises `IllegalTransitionError` if the table forbids it. One that stops running frees its slot."""
    before = sample.state
    if (before, to) not in _TRANSITIONS:
        raise IllegalTransitionError(f"sample {tuple(sample.key)}: {before} -> {to}")
    if before is SampleState.RUNNING:
        if sample.engine in ledger.engines:
            del ledger.engines[sample.engine].running[sample.key]
        sample.engine = None
        if not sample.ranges:
            sample.begun_version = None
    sample.state = to


def begin_again(ledger: LedgerState, prompt: PromptRecord, sample: SampleRecord, fate: SampleState) -> None:
    """Give a sample its fate, `stale` or `failed`, and put a new one in its place; its engine stops it."""
    _stop(ledger, sample)
    move_sample(ledger, sample, fate)
    prompt.former.append(sample)
    key = SampleKey(sample.key.prompt, sample.key.number, sample.key.attempt + 1)
    prompt.samples[sample.key.number] = SampleRecord(key=key)


def fail_sample(ledger: LedgerState, sample: SampleRecord) -> None:
    """Let a failed sample begin again; with too many failures its prompt fails, and with it the other samples."""
    prompt = ledger.prompts[sample.key.prompt]
    prompt.num_failures += 1
    if prompt.num_failures < ledger.config.max_failures:
        begin_again(ledger, prompt, sample, SampleState.FAILED)
        return
    for one in prompt.samples:
        _stop(ledger, one)
        move_sample(ledger, one, SampleState.FAILED)
    end_prompt(ledger, prompt, SampleState.FAILED)


def end_prompt(ledger: LedgerState, prompt: PromptRecord, fate: SampleState) -> None:
    """Record the fate of a prompt whose samples have theirs."""
    prompt.fate = fate
    del ledger.open_prompts[prompt.number]


def _stop(ledger: LedgerState, sample: SampleRecord) -> None:
    if sample.engine is not None:
        ledger.instructions.append(StopSample(engine=sample.engine, sample=sample.key, lease=sample.lease))

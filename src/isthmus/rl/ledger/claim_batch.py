"""`claim_batch`: the next batch, if the trainer waits for one and enough groups are ready."""

from __future__ import annotations

from isthmus.rl.ledger.deadlines import deadline_of
from isthmus.rl.ledger.ledger_records import LedgerState, PromptRecord, SampleState
from isthmus.rl.ledger.rollout_instructions import EndTraining, TrainBatch
from isthmus.rl.ledger.sample_lifecycle import move_sample
from isthmus.sim import meet_deadlines


def claim_batch(ledger: LedgerState) -> None:
    """SampleClaim the ready groups with the earliest deadlines for the step that was requested.

    The step waits for unfinished groups that must be in it. Where no prompt is left, the last step takes what there is.
    """
    if not ledger.requested or ledger.version != ledger.next_step:
        return
    config, step = ledger.config, ledger.next_step
    ready = [number for number, one in ledger.open_prompts.items() if one.ready]
    last = ledger.exhausted and len(ready) == len(ledger.open_prompts)
    if len(ready) < config.batch_prompts and not last:
        return
    deadlines = {number: deadline_of(one, config) for number, one in ledger.open_prompts.items()}
    ready.sort(key=lambda number: (deadlines[number], number))
    if last and not ready:
        ledger.requested = False
        ledger.instructions.append(EndTraining(step=step))
        return
    chosen = ready[: config.batch_prompts]
    rest = [deadlines[number] for number in ledger.open_prompts if number not in chosen]
    if not meet_deadlines(rest, step + 1, config.batch_prompts):
        return
    ledger.requested = False
    ledger.batches.append(tuple(chosen))
    for number in chosen:
        _claim(ledger, ledger.open_prompts.pop(number), step)
    send_batch(ledger, step)


def send_batch(ledger: LedgerState, step: int) -> None:
    """Send the batch of a step, again if need be: it is the same at any time."""
    keys = tuple(sample.key for number in ledger.batch_of(step) for sample in ledger.prompts[number].samples)
    ledger.instructions.append(TrainBatch(step=step, samples=keys))


def _claim(ledger: LedgerState, prompt: PromptRecord, step: int) -> None:
    prompt.step = step
    for sample in prompt.samples:
        move_sample(ledger, sample, SampleState.CLAIMED)
        sample.step = step

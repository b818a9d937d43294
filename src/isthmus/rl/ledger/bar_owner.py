"""`bar_owner`: an owner whose trajectories were found forged decodes no more, and nothing of it is trained on."""

from __future__ import annotations

from isthmus.rl.ledger.ledger_records import LedgerState, SampleState
from isthmus.rl.ledger.sample_lifecycle import begin_again, move_sample


def bar_owner(ledger: LedgerState, owner: str, reason: str) -> None:
    """Drop the owner's engines and all unclaimed samples that have tokens of it: these begin again elsewhere.

    Batches that were claimed before stay as they are, so that a trainer which goes back gets the same ones.
    """
    ledger.barred.setdefault(owner, reason)
    for name in [one for one, engine in ledger.engines.items() if engine.owner == owner]:
        for sample in list(ledger.engines[name].running.values()):
            move_sample(ledger, sample, SampleState.WAITING)
        del ledger.engines[name]
    for prompt in list(ledger.open_prompts.values()):
        for sample in list(prompt.samples):
            if any(one.owner == owner for one in sample.ranges):
                begin_again(ledger, prompt, sample, SampleState.FAILED)

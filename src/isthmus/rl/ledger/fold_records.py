"""`fold_records`: records that no one asks for again become counts, so that a ledger does not grow with its run."""

from __future__ import annotations

from isthmus.rl.ledger.ledger_records import FoldedAudit, LedgerState, PromptRecord, SampleState

MAX_AUDITED_STEPS = 10_000
"""Steps whose numbers of audits are kept, the last ones."""


def fold_records(ledger: LedgerState, before: int) -> None:
    """Fold the prompts that were filtered or failed, and those of steps before `before` that were trained.

    No trainer goes back to a step before `before`.
    """
    end = min(before, ledger.version)
    for number, prompt in list(ledger.prompts.items()):
        if prompt.fate in (SampleState.FILTERED, SampleState.FAILED):
            _count(ledger, prompt)
        elif prompt.fate is SampleState.TRAINED and prompt.step is not None and prompt.step < end:
            _note_audits(ledger, prompt, prompt.step)
            _count(ledger, prompt)
        else:
            continue
        del ledger.prompts[number]
    if end > ledger.first_step:
        del ledger.batches[: end - ledger.first_step]
        ledger.first_step = end
    for step in sorted(ledger.folded.steps)[:-MAX_AUDITED_STEPS]:
        del ledger.folded.steps[step]


def _note_audits(ledger: LedgerState, prompt: PromptRecord, step: int) -> None:
    """Add what audits found of the samples of a prompt to the counts of its step."""
    told = ledger.folded.steps.setdefault(step, FoldedAudit())
    for sample in (*prompt.former, *prompt.samples):
        told.samples += 1
        audit = ledger.audits.get(sample.key)
        told.recomputed += audit is not None
        if audit is not None and audit.problem:
            told.differing.append((sample.key, audit.owner, audit.problem))


def _count(ledger: LedgerState, prompt: PromptRecord) -> None:
    folded = ledger.folded
    folded.prompts += 1
    for sample in (*prompt.former, *prompt.samples):
        folded.counts.add(sample)
        if (audit := ledger.audits.pop(sample.key, None)) is not None:
            folded.counts.add_audit(audit)

"""`sample_lives`: the life of each sample of a prompt: who made which tokens, its reward, its step and its fate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from isthmus.rl.ledger.ledger_records import LedgerState, SampleRecord


def sample_lives(ledger: LedgerState, prompt: int) -> list[dict[str, Any]] | None:
    """Return the samples of a prompt by number and attempt as JSON values; None where its records are not here."""
    found = ledger.prompts.get(prompt)
    if found is None:
        return None
    return [_life(ledger, one) for one in sorted((*found.former, *found.samples), key=lambda one: one.key[1:])]


def _life(ledger: LedgerState, sample: SampleRecord) -> dict[str, Any]:
    audit = ledger.audits.get(sample.key)
    return {
        "sample": list(sample.key), "state": str(sample.state), "turns": sample.num_turns,
        "ranges": [asdict(one) for one in sample.ranges], "engine": sample.engine, "tries": sample.score_try,
        "reward": sample.reward, "step": sample.step, "audit": None if audit is None else asdict(audit),
    }  # fmt: skip

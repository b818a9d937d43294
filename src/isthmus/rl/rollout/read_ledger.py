"""`read_ledger`, `read_audits` and `read_sample_lives`: what the files of a run say, while it runs or afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.core.errors import InputError, NotFoundError
from isthmus.rl.ledger.ledger_records import LedgerConfig, LedgerState
from isthmus.rl.ledger.ledger_snapshot import restore_ledger
from isthmus.rl.ledger.ledger_summary import LedgerSummary, summarise_ledger
from isthmus.rl.ledger.sample_life import sample_lives
from isthmus.rl.ledger.trajectory_ledger import TrajectoryLedger
from isthmus.rl.rollout.rollout_store import RolloutStore


def read_ledger(folder: Path) -> LedgerSummary:
    """Return the counts of the ledger in `folder`; raises `NotFoundError` without one, `InputError` for damage."""
    return summarise_ledger(_read_state(folder)[0])


def read_audits(folder: Path, step: int) -> dict[str, Any]:
    """Return what audits found of the samples of the prompts of training step `step`, those that began again included.

    Raises `NotFoundError` for a step without a batch.
    """
    state, base = _read_state(folder)
    if not 0 <= step - base < state.next_step:
        known = f"steps {base} to {base + state.next_step - 1}" if state.next_step else "no step yet"
        raise NotFoundError(f"the ledger has no step {step}", hint=f"it has {known}")
    if step - base < state.first_step:
        return _folded_audits(state, base, step)
    prompts = [state.prompts[number] for number in state.batch_of(step - base)]
    keys = [one.key for prompt in prompts for one in (*prompt.former, *prompt.samples)]
    differing = [
        {"sample": list(key), "owner": state.audits[key].owner, "problem": state.audits[key].problem}
        for key in keys
        if key in state.audits and state.audits[key].problem
    ]
    recomputed = sum(key in state.audits for key in keys)
    return {"step": step, "samples": len(keys), "recomputed": recomputed, "differing": differing}


def read_sample_lives(folder: Path, prompt: int) -> dict[str, Any]:
    """Return the life of each sample of prompt `prompt`, those that began again included.

    Raises `NotFoundError` for a prompt that was not opened, and for one whose records are counts by now.
    """
    state, base = _read_state(folder)
    lives = sample_lives(state, prompt)
    if lives is None:
        known = f"it has {', '.join(map(str, list(state.prompts)[:8])) or 'none'} and later ones"
        what = "is trained, and counted" if 0 <= prompt < state.num_prompts else "was not opened"
        raise NotFoundError(f"prompt {prompt} {what}: the ledger has no records of it", hint=known)
    return {"prompt": prompt, "first_step": base, "samples": lives}


def _folded_audits(state: LedgerState, base: int, step: int) -> dict[str, Any]:
    """Return what is known of a step whose records are counts."""
    found = state.folded.steps.get(step - base)
    if found is None:
        first = base + min(state.folded.steps, default=state.first_step)
        raise NotFoundError(f"the ledger has no audits of step {step}", hint=f"it has those from step {first} on")
    differing = [{"sample": list(key), "owner": owner, "problem": text} for key, owner, text in found.differing]
    return {"step": step, "samples": found.samples, "recomputed": found.recomputed, "differing": differing}


def _read_state(folder: Path) -> tuple[LedgerState, int]:
    """Return the state of the ledger, and the training step of its version 0."""
    snapshot, events = RolloutStore(folder, is_reader=True).read()
    if snapshot is None:
        raise NotFoundError(f"{folder} has no ledger", hint="it is below checkpoints.folder of a job with task: rl")
    try:
        config, base = LedgerConfig(**snapshot["config"]), int(snapshot["base"])
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"the ledger in {folder} is damaged: {error!r}", hint="restore the folder") from error
    ledger = TrajectoryLedger.of_state(restore_ledger(config, snapshot["ledger"]))
    for event, _ in events:
        ledger.handle(event)
    return ledger.state, base

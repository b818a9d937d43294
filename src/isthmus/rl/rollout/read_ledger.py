"""`read_ledger`: the counts of a ledger from the files of its run, while it runs or afterwards."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.errors import InputError, NotFoundError
from isthmus.rl.ledger.ledger_records import LedgerConfig
from isthmus.rl.ledger.ledger_snapshot import restore_ledger
from isthmus.rl.ledger.ledger_summary import LedgerSummary, summarise_ledger
from isthmus.rl.ledger.trajectory_ledger import TrajectoryLedger
from isthmus.rl.rollout.rollout_store import RolloutStore


def read_ledger(folder: Path) -> LedgerSummary:
    """Return the counts of the ledger in `folder`; raises `NotFoundError` without one, `InputError` for damage."""
    snapshot, events = RolloutStore(folder, is_reader=True).read()
    if snapshot is None:
        raise NotFoundError(f"{folder} has no ledger", hint="it is below checkpoints.folder of a job with task: rl")
    try:
        config = LedgerConfig(**snapshot["config"])
    except (TypeError, KeyError) as error:
        raise InputError(f"the ledger in {folder} is damaged: {error!r}") from error
    ledger = TrajectoryLedger.of_state(restore_ledger(config, snapshot["ledger"]))
    for event, _ in events:
        ledger.handle(event)
    return summarise_ledger(ledger.state)

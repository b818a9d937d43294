"""`train`: the training loop of one rank, from the newest state that all ranks have to the export."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.schedule import Schedule
from isthmus.train.messages.device import device_name
from isthmus.train.messages.metrics import MetricsLog
from isthmus.train.process.export_model import export
from isthmus.train.process.prepare import Prepared, describe
from isthmus.train.process.training_run import Run
from isthmus.train.recovery.recover import Recovery


def train(
    spec: WorkerSpec, schedule: Schedule, prepared: Prepared, folder: WorkerFolder, recovery: Recovery
) -> None:
    """Train from the newest state that all ranks have (or the start) to the last step, then export the model.

    Needs the default process group. Where a rank is lost and another process takes its place, training goes
    on from the newest state that all have. Raises `PeerError` where none does, `UnavailableError` where a
    folder cannot be written.
    """
    print(describe(spec, device_name(prepared.pieces.device)), flush=True)
    runs: list[Run] = []

    def attempt() -> None:
        if runs:
            runs[0].begin_again()
        else:
            runs.append(Run(spec, schedule, prepared, folder, recovery))
        _train(runs[0])

    def drain() -> None:
        for run in runs:
            run.exchange.drain()

    recovery.persist(attempt, drain)


def _train(run: Run) -> None:
    """Train from the newest state that all ranks have to the end, unless one is lost (`PeerError`)."""
    spec, recovery = run.spec, run.recovery
    run.saver.meet()
    run.copies.meet(run.saver)
    first = recovery.agree(run.exchange, run.restore, run.resume, run.saver.newest_step())
    total = spec.job.training.steps
    run.keep(first)
    board = Path(spec.job.checkpoints.folder) / "tensorboard" if run.tells_loss else None
    with MetricsLog(run.folder.metrics, spec, board, first) as log:
        for step in range(first, total):
            recovery.begins(step)
            values, account = run.step(step)
            values |= recovery.ends(account.compute_s)
            if spec.job.training.evaluate_every and _due(step + 1, spec.job.training.evaluate_every, total):
                values |= run.evaluate()
            if run.exchange.wished or _due(step + 1, spec.job.checkpoints.every_steps, total):
                values |= run.save(step + 1)
            if run.exchange.wished:
                values |= run.protect(step + 1)
            log.write(step, values, tuple(account.spans))
            if "loss" in values:
                print(f"step {step + 1} of {total}: loss {values['loss']:.4f}", flush=True)
            run.stop_if_lost(step)
            run.keep(step + 1)
    export(spec.job, run.place, run.prepared.pieces, run.exchange)


def _due(done: int, every: int, total: int) -> bool:
    """Tell whether what is done `every` so many steps (0: only at the end) is due after `done` of them."""
    return done == total or (every > 0 and done % every == 0)

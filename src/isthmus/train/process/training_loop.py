"""`train`: the training loop of one rank, from the newest common state to the export."""

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
    """Train from the newest state that all ranks have to the last step, then export the model.

    Needs the default process group. After a loss, once a new process has replaced the lost rank, training
    continues from the newest common state. Raises `PeerError` if the rank is not replaced, `UnavailableError`
    if a folder cannot be written.
    """
    print(describe(spec, device_name(prepared.pieces.device)), flush=True)
    trainers: list[Run] = []

    def attempt() -> None:
        if trainers:
            trainers[0].begin_again()
        else:
            trainers.append(Run(spec, schedule, prepared, folder, recovery))
        _train(trainers[0])

    def drain() -> None:
        for trainer in trainers:
            trainer.exchange.drain()

    recovery.persist(attempt, drain)


def _train(run: Run) -> None:
    """Restore the newest common state and train to the end; raises `PeerError` if a rank is lost."""
    spec, recovery = run.spec, run.recovery
    # Step 1: agree with all ranks on the state to start from.
    run.saver.meet()
    run.copies.meet(run.saver)
    first = recovery.agree(run.exchange, run.restore, run.resume, run.saver.newest_step())
    training, num_steps = spec.job.training, spec.job.training.steps
    run.keep(first)
    # Step 2: train, evaluate and save.
    tensorboard = Path(spec.job.checkpoints.folder) / "tensorboard" if run.tells_loss else None
    with MetricsLog(run.folder.metrics, spec, tensorboard, first) as log:
        for step in range(first, num_steps):
            recovery.begins(step)
            values, timer = run.step(step)
            values |= recovery.ends(timer.compute_s)
            if training.evaluate_every and _due(step + 1, training.evaluate_every, num_steps):
                values |= run.evaluate()
            if run.exchange.wished or _due(step + 1, spec.job.checkpoints.every_steps, num_steps):
                values |= run.save(step + 1)
            if run.exchange.wished:
                values |= run.protect(step + 1)
            log.write(step, values, tuple(timer.spans))
            if "loss" in values:
                print(f"step {step + 1} of {num_steps}: loss {values['loss']:.4f}", flush=True)
            run.stop_if_lost(step)
            run.keep(step + 1)
    # Step 3: write the model.
    export(spec.job, run.place, run.prepared.pieces, run.exchange)


def _due(done: int, every: int, num_steps: int) -> bool:
    """Return whether a task that runs `every` n steps (0: only at the end) is due after `done` steps."""
    return done == num_steps or (every > 0 and done % every == 0)

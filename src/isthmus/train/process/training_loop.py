"""`train`: the training loop of one rank, from the newest common state to the export."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.schedule import Schedule
from isthmus.train.communication.step_metrics import MetricsLog
from isthmus.train.communication.torch_device import device_name
from isthmus.train.process.export_model import export_model
from isthmus.train.process.prepare_stage import PreparedStage, describe_rank
from isthmus.train.process.take_rank_keys import RankKeys
from isthmus.train.process.trainer import Trainer, TrainingMethod
from isthmus.train.recovery.rank_recovery import RankRecovery


def train(
    spec: WorkerSpec,
    schedule: Schedule,
    prepared: PreparedStage,
    folder: WorkerFolder,
    recovery: RankRecovery,
    keys: RankKeys,
    method: TrainingMethod,
) -> None:
    """Train from the newest state that all ranks have to the last step, then export the model.

    Needs the default process group. After a loss, once a new process has replaced the lost rank, training
    continues from the newest common state. Raises `PeerError` if the rank is not replaced, `UnavailableError`
    if a folder cannot be written. `keys` are those of the rank; `method` has its batches.
    """
    print(describe_rank(spec, device_name(prepared.model_chunks.device)), flush=True)
    if prepared.dataset is not None:
        print(*prepared.dataset.describe(), sep="\n", flush=True)
    trainers: list[Trainer] = []

    def attempt() -> None:
        if trainers:
            trainers[0].reset()
        else:
            trainers.append(Trainer(spec, schedule, prepared, folder, recovery, keys, method))
        _train_once(trainers[0])

    def drain() -> None:
        for trainer in trainers:
            trainer.communicator.drain()

    recovery.run_with_recovery(attempt, drain)


def _train_once(trainer: Trainer) -> None:
    """Restore the newest common state and train to the end; raises `PeerError` if a rank is lost."""
    spec, recovery = trainer.spec, trainer.recovery
    # Step 1: agree with all ranks on the state to start from.
    trainer.checkpoint_manager.reset()
    trainer.peer_snapshots.connect(trainer.checkpoint_manager)
    first = recovery.restore_common_state(
        trainer.communicator,
        trainer.restore_snapshot,
        trainer.load_checkpoint,
        trainer.checkpoint_manager.newest_step(),
        trainer.optimizer.share_state,
    )
    training, num_steps = spec.job.training, spec.job.training.steps
    trainer.take_snapshot(first)
    trainer.method.begin(trainer, first)
    # Step 2: train, evaluate and save.
    tensorboard = Path(spec.job.checkpoints.folder) / "tensorboard" if trainer.reports_loss else None
    with MetricsLog(trainer.folder.metrics_path, spec, tensorboard, first) as log:
        for step in range(first, num_steps):
            recovery.begin_step(step)
            values, timer = trainer.step(step)
            values |= recovery.end_step(timer.compute_s)
            values |= trainer.method.end_step(trainer, step)
            if training.evaluate_every and _is_due(step + 1, training.evaluate_every, num_steps):
                values |= trainer.evaluate()
            saves = trainer.communicator.any_requested or _is_due(step + 1, spec.job.checkpoints.every_steps, num_steps)
            if saves:
                values |= trainer.save_checkpoint(step + 1)
                trainer.method.end_save(trainer, step + 1)
            if trainer.communicator.any_requested:
                values |= trainer.verify_checkpoint(step + 1)
            log.write(step, values, timer)
            if "loss" in values:
                print(f"step {step + 1} of {num_steps}: loss {values['loss']:.4f}", flush=True)
            trainer.raise_if_diverged(step)
            trainer.take_snapshot(step + 1, with_checkpoint=saves)
    trainer.method.close(trainer)
    trainer.optimizer.close()
    # Step 3: write the model.
    trainer.optimizer.gather_weights()
    prepared = trainer.prepared
    export_model(spec, trainer.position, prepared.model_chunks, prepared.dataset, trainer.communicator)


def _is_due(steps_done: int, every: int, num_steps: int) -> bool:
    """Return whether a task that runs `every` n steps (0: only at the end) is due after `steps_done` steps."""
    return steps_done == num_steps or (every > 0 and steps_done % every == 0)

"""`NextTokens`: the `TrainingMethod` that predicts the next tokens of the job's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.data import Dataset, TokenBatch, open_job_data
from isthmus.schedule import forward_only
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.process.prepare_stage import JobData
from isthmus.train.process.trainer import Trainer
from isthmus.train.update.replica_layout import averaged_samples, evaluation_passes, replica_samples


class NextTokens:
    """Trains on the next tokens of the data set; only the first and last stage of a pipeline read any."""

    def open_data(self, spec: WorkerSpec, pieces: ModelChunks, /) -> JobData | None:
        """Open the data set on the first and last stage; raises `InputError` for one that does not fit the job."""
        if not (pieces.is_first or pieces.is_last):
            return None
        training, dataset = spec.job.training, open_job_data(spec.job)
        dataset.check_job_fits(num_samples=training.global_batch_size, vocab_size=pieces.vocab_size)
        if training.evaluate_every:
            dataset.validation_batch(1)
        return dataset

    def begin(self, _trainer: Trainer, _step: int, /) -> None:
        """Do nothing: samples are read by number."""

    def next_batches(self, trainer: Trainer, /) -> MicroBatches:
        """Return the replica's part of the global batch that starts at the trainer's next sample."""
        size, first = trainer.training.global_batch_size, trainer.samples
        averaged = averaged_samples(trainer.spec.plan, trainer.position.replica, size)
        return _split(trainer, size, lambda dataset: dataset.train_batch(first, size), averaged)

    def end_step(self, _trainer: Trainer, _step: int, /) -> dict[str, float | None]:
        """Return no metrics beside the trainer's."""
        return {}

    def evaluate(self, trainer: Trainer, /) -> dict[str, float | None]:
        """Compute the held-out loss."""
        size, plan = trainer.training.evaluate_samples, trainer.spec.plan
        batches = _split(trainer, size, lambda dataset: dataset.validation_batch(size), ((0, size),))
        loss = None
        trainer.optimizer.begin_passes()
        if batches.sizes:
            chunks = len(trainer.prepared.model_chunks.first_copy)
            schedule = forward_only(len(trainer.position.ranks), len(batches.sizes), chunks)
            loss = trainer.executor.run(schedule, batches, StepTimer()).loss
        trainer.optimizer.end_evaluation(evaluation_passes(plan, size) - len(batches.sizes))
        if plan.dp > 1 or any(stage.cp > 1 for stage in plan.stages):
            loss = trainer.sum_of_losses(loss)
        return {"validation_loss": loss}

    def end_save(self, _trainer: Trainer, _step: int, /) -> None:
        """Do nothing: the data position is part of the checkpoint."""

    def close(self, _trainer: Trainer, /) -> None:
        """Do nothing."""


def _split(
    trainer: Trainer, size: int, read: Callable[[Dataset], TokenBatch], averaged: Sequence[tuple[int, int]]
) -> MicroBatches:
    pieces, dataset = trainer.prepared.model_chunks, trainer.prepared.dataset
    batch = read(dataset) if isinstance(dataset, Dataset) else None
    plan, replica = trainer.spec.plan, trainer.position.replica
    return MicroBatches.split(
        size,
        plan.micro_batch_size_of(replica),
        trainer.training.sequence_length,
        batch.input_ids if batch and pieces.is_first else None,
        batch.labels if batch and pieces.is_last else None,
        positions=None if pieces.context is None else pieces.context.share.positions,
        rows=replica_samples(plan, replica, size),
        averaged=averaged,
    )

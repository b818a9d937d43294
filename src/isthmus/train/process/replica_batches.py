"""`ReplicaBatches`: the samples of one replica, split into its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.data import Dataset, TokenBatch
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.process.prepare_stage import PreparedStage
from isthmus.train.update.replica_layout import PipelinePosition, averaged_samples, replica_samples


class ReplicaBatches:
    """Reads samples for the rank at `position`; only the first and last stage of a pipeline read any."""

    def __init__(
        self, prepared: PreparedStage, plan: Plan, position: PipelinePosition, training: TrainingConfig
    ) -> None:
        self._prepared, self._plan, self._position, self._training = prepared, plan, position, training

    def training_step(self, first_sample: int) -> MicroBatches:
        """Return the replica's part of the global batch that starts at training sample `first_sample`."""
        size = self._training.global_batch_size
        averaged = averaged_samples(self._plan, self._position.replica, size)
        return self._split(size, lambda dataset: dataset.train_batch(first_sample, size), averaged)

    def validation(self) -> MicroBatches:
        """Return the replica's part of the held-out samples, possibly empty."""
        size = self._training.evaluate_samples
        return self._split(size, lambda dataset: dataset.validation_batch(size), ((0, size),))

    def _split(
        self, size: int, read: Callable[[Dataset], TokenBatch], averaged: Sequence[tuple[int, int]]
    ) -> MicroBatches:
        pieces, dataset = self._prepared.model_chunks, self._prepared.dataset
        batch = None if dataset is None else read(dataset)
        return MicroBatches.split(
            size,
            self._plan.micro_batch_size_of(self._position.replica),
            self._training.sequence_length,
            batch.input_ids if batch and pieces.is_first else None,
            batch.labels if batch and pieces.is_last else None,
            positions=None if pieces.context is None else pieces.context.share.positions,
            rows=replica_samples(self._plan, self._position.replica, size),
            averaged=averaged,
        )

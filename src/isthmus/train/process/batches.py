"""`Batches`: the samples of one replica, split into its micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.core.job import Training
from isthmus.core.plan import Plan
from isthmus.data import Batch, Dataset
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.process.prepare import Prepared
from isthmus.train.update.replicas import Place, rows_of


class Batches:
    """Reads samples for the rank at `place`; only the first and last stage of a pipeline read any."""

    def __init__(self, prepared: Prepared, plan: Plan, place: Place, training: Training) -> None:
        self._prepared, self._plan, self._place, self._training = prepared, plan, place, training

    def of_step(self, first_sample: int) -> MicroBatches:
        """Return the replica's part of the global batch that starts at training sample `first_sample`."""
        size = self._training.global_batch_size
        return self._cut(size, lambda dataset: dataset.train_batch(first_sample, size))

    def held_out(self) -> MicroBatches:
        """Return the replica's part of the held-out samples, possibly empty."""
        size = self._training.evaluate_samples
        return self._cut(size, lambda dataset: dataset.validation_batch(size))

    def _cut(self, size: int, read: Callable[[Dataset], Batch]) -> MicroBatches:
        pieces, dataset = self._prepared.pieces, self._prepared.dataset
        batch = None if dataset is None else read(dataset)
        return MicroBatches.cut(
            size,
            self._plan.micro_batch_size_of(self._place.replica),
            self._training.sequence_length,
            batch.input_ids if batch and pieces.is_first else None,
            batch.labels if batch and pieces.is_last else None,
            rows=rows_of(self._plan, self._place.replica, size),
        )

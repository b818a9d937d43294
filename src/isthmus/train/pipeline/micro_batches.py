"""`MicroBatches`: the samples of one step, as one stage needs them.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatches:
    """A replica's samples of one step, in micro-batches of `sizes` samples of `sequence_length` tokens.

    `inputs[m]` [B, S] int64 is given to the first stage, `labels[m]` [B, S] int64 to the last. The step has
    `num_samples`, over all replicas. A token's loss weighs `loss_scale`: one over the counted tokens of the
    whole step, however it is cut.
    """

    sizes: tuple[int, ...]
    sequence_length: int
    num_samples: int
    inputs: tuple[torch.Tensor, ...] = ()
    labels: tuple[torch.Tensor, ...] = ()
    loss_scale: float = 1.0

    @classmethod
    def cut(
        cls, size: int, micro_batch_size: int, sequence_length: int,
        input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None,
        rows: tuple[int, int] | None = None,
    ) -> MicroBatches:  # fmt: skip
        """Cut the samples `rows` (first, last exclusive; all, without it) of a step of `size` samples.

        `input_ids`, `labels` are [size, S] where the stage needs them: those of the whole step.
        """
        first, last = rows or (0, size)
        sizes = [micro_batch_size] * ((last - first) // micro_batch_size)
        if (last - first) % micro_batch_size:
            sizes.append((last - first) % micro_batch_size)
        counted = 1 if labels is None else max(int((labels != -100).sum()), 1)
        return cls(
            sizes=tuple(sizes),
            sequence_length=sequence_length,
            num_samples=size,
            inputs=() if input_ids is None else torch.split(input_ids[first:last], micro_batch_size),
            labels=() if labels is None else torch.split(labels[first:last], micro_batch_size),
            loss_scale=1.0 / counted,
        )

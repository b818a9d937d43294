"""`MicroBatches`: the samples of one step, as one stage needs them.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatches:
    """The samples of one step, cut into micro-batches of `sizes` samples of `sequence_length` tokens.

    `inputs[m]` [B, S] int64 is given to the first stage, `labels[m]` [B, S] int64 to the last. A token's loss
    weighs `loss_scale`: one over the counted tokens of the whole step, however it is cut.
    """

    sizes: tuple[int, ...]
    sequence_length: int
    inputs: tuple[torch.Tensor, ...] = ()
    labels: tuple[torch.Tensor, ...] = ()
    loss_scale: float = 1.0

    @classmethod
    def cut(
        cls, size: int, micro_batch_size: int, sequence_length: int,
        input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None,
    ) -> MicroBatches:  # fmt: skip
        """Cut `size` samples; `input_ids`, `labels` are [size, S] where the stage needs them."""
        sizes = [micro_batch_size] * (size // micro_batch_size)
        if size % micro_batch_size:
            sizes.append(size % micro_batch_size)
        counted = 1 if labels is None else max(int((labels != -100).sum()), 1)
        return cls(
            sizes=tuple(sizes),
            sequence_length=sequence_length,
            inputs=() if input_ids is None else torch.split(input_ids, micro_batch_size),
            labels=() if labels is None else torch.split(labels, micro_batch_size),
            loss_scale=1.0 / counted,
        )

"""`MicroBatches`: the samples of one step for one stage.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from isthmus.train.model.stage_model import StageModel


@dataclass(frozen=True)
class MicroBatches:
    """One replica's samples of one step, split into micro-batches."""

    # Samples of each micro-batch.
    sizes: tuple[int, ...]
    # Tokens of each sample.
    sequence_length: int
    # Samples of the step over all replicas whose gradients are summed.
    num_samples: int
    # [B, S] int64 by micro-batch, on the first stage only.
    inputs: tuple[torch.Tensor, ...] = ()
    # [B, S] int64 by micro-batch, on the last stage only.
    labels: tuple[torch.Tensor, ...] = ()
    # [B, S, routers of the model, experts of a token] int16 by micro-batch: experts that the layers take, -1 where the
    # router chooses; empty where it always does.
    routing: tuple[torch.Tensor, ...] = ()
    # Weight of a token's loss: 1 / counted tokens of these samples.
    token_weight: float = 1.0

    def loss(self, model: StageModel, hidden: torch.Tensor, labels: torch.Tensor, _number: int, /) -> torch.Tensor:
        """Return the part of the step's loss that the micro-batch with this number has, a scalar.

        `hidden` [B, S, H] are the inputs of the head of `model`, `labels` [B, S] those of the micro-batch.
        """
        return model.loss(hidden, labels) * self.token_weight

    @classmethod
    def split(
        cls, num_samples: int, micro_batch_size: int, sequence_length: int,
        input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None,
        rows: tuple[int, int] | None = None, positions: Sequence[int] | None = None,
        averaged: Sequence[tuple[int, int]] = (),
    ) -> Self:  # fmt: skip
        """Split the samples `rows` (first, end; default all) of a step of `num_samples` samples.

        `input_ids` and `labels` [size, S] are those of the whole step, if the stage needs them. The last
        micro-batch may be smaller. `positions` are the tokens of this rank, if several share a sequence. `averaged`
        are the samples (ranges, default all) of which the loss is the mean.
        """
        first, end = rows or (0, num_samples)
        averaged = averaged or [(0, num_samples)]
        sizes = [micro_batch_size] * ((end - first) // micro_batch_size)
        if (end - first) % micro_batch_size:
            sizes.append((end - first) % micro_batch_size)
        if positions is not None:
            sequence_length = len(positions)
        counted = 1 if labels is None else max(sum(int((labels[a:b] != -100).sum()) for a, b in averaged), 1)
        return cls(
            sizes=tuple(sizes),
            sequence_length=sequence_length,
            num_samples=sum(b - a for a, b in averaged),
            inputs=_split(input_ids, first, end, micro_batch_size, positions),
            labels=_split(labels, first, end, micro_batch_size, positions),
            token_weight=1.0 / counted,
        )


def _split(
    tokens: torch.Tensor | None, first: int, end: int, size: int, positions: Sequence[int] | None
) -> tuple[torch.Tensor, ...]:
    """Return the rows [first, end) of `tokens` [N, T], at `positions` only, in micro-batches of `size`."""
    if tokens is None:
        return ()
    rows = tokens[first:end]
    found: tuple[torch.Tensor, ...] = torch.split(rows if positions is None else rows[:, list(positions)], size)
    return found

"""`gather_full_parameters`: gather the full parameters of a stage from its tensor-parallel ranks, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import StageModel


def gather_full_parameters(stage: StageModel | ModelChunks) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (full-model name, tensor of the full shape) of each parameter of which this rank holds a part.

    Collective: all ranks of the stage must iterate to the end together.
    """
    for name, parameter in stage.global_named_parameters():
        held, own = stage.slices[name], parameter.detach()
        if held.is_full:
            yield name, own
            continue
        padded = own.new_zeros(held.shape)
        held.copy_into(own, padded)
        yield name, stage.group.all_reduce_sum(padded)

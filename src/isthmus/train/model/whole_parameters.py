"""`whole_parameters`: the parameters of a stage put together from the ranks that share it, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isthmus.train.model.stage_model import StageModel
from isthmus.train.model.stage_pieces import StagePieces


def whole_parameters(stage: StageModel | StagePieces) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the whole model, whole tensor) of all that this rank holds of the stage.

    All ranks of the stage go through it at once, each to its end. What several hold is yielded by each.
    """
    for name, parameter in stage.global_named_parameters():
        held, own = stage.slices[name], parameter.detach()
        if held.is_whole:
            yield name, own
            continue
        padded = own.new_zeros(held.shape)
        held.put(own, padded)
        yield name, stage.group.sum(padded)

"""`gather_full_parameters`: gather the full parameters of a stage from the ranks that share it, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import StageModel
from isthmus.train.tensor_parallel.parameter_slices import ParameterSlice, is_expert_parameter


def gather_full_parameters(
    stage: StageModel | ModelChunks, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (full-model name, tensor of the full shape) of each parameter of which this rank holds a part.

    `names` are those to gather (default: all).

    Collective: all tensor-parallel ranks of the stage must iterate to the end together; other ranks that share its
    experts call `give_experts` meanwhile.
    """
    for name, parameter in stage.global_named_parameters():
        if names is not None and name not in names:
            continue
        held, experts = stage.slices[name], stage.experts
        if held.is_full:
            yield name, parameter.detach()
        elif experts is not None and is_expert_parameter(name):
            yield name, experts.all_reduce_sum(_padded(parameter, held))
        else:
            yield name, stage.group.all_reduce_sum(_padded(parameter, held))


def give_experts(stage: StageModel | ModelChunks, names: Collection[str] | None = None) -> None:
    """Give this rank's experts to the ranks that iterate over `gather_full_parameters` of the same layers."""
    for name, parameter in stage.global_named_parameters():
        if names is not None and name not in names:
            continue
        held = stage.slices[name]
        if stage.experts is not None and is_expert_parameter(name) and not held.is_full:
            stage.experts.all_reduce_sum(_padded(parameter, held))


def _padded(parameter: nn.Parameter, held: ParameterSlice) -> torch.Tensor:
    """Return a tensor of the full shape with the slice of this rank, and zeros elsewhere."""
    padded = parameter.detach().new_zeros(held.shape)
    held.copy_into(parameter.detach(), padded)
    return padded

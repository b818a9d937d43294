"""`cut_parameters` and `connect`: shard the transformers modules of a stage over its tensor-parallel ranks.

Modules of transformers keep their names and get smaller weights; hooks add the collectives. Attention and MLP
each need one all-reduce forward and one backward. With sequence parallelism (V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2) these become an all-gather
before and a reduce-scatter after each block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from isthmus.train.tensor_parallel.parameter_slices import Slice, slice_of
from isthmus.train.tensor_parallel.tensor_group import TensorGroup, copied, ended, entered, left


def cut_parameters(model: nn.Module, group: TensorGroup) -> dict[str, Slice]:
    """Replace the parameters of `model` (on the meta device) by this rank's slices; return these by name.

    Tied parameters stay tied.
    """
    slices: dict[str, Slice] = {}
    made: dict[int, nn.Parameter | None] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                full = f"{prefix}.{name}".removeprefix(".")
                held = slice_of(full, parameter.shape, group.size, group.index)
                if held is not None:
                    slices[full] = held
                made[id(parameter)] = _cut(parameter, held)
            setattr(module, name, made[id(parameter)])
    return slices


def _cut(parameter: nn.Parameter, held: Slice | None) -> nn.Parameter | None:
    if held is None:
        return None
    return parameter if held.is_whole else nn.Parameter(parameter.new_empty(held.local_shape))


def connect(layer: nn.Module, group: TensorGroup) -> None:
    """Register the hooks that run the collectives of a sharded decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    attention.register_forward_pre_hook(partial(_enter_hidden, group), with_kwargs=True)
    attention.o_proj.register_forward_hook(partial(_sum_output, group))
    for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)):
        if norm is not None:  # each rank's gradient covers its own heads only
            norm.weight.register_hook(group.sum)
    if group.cuts_sequence:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.register_hook(group.sum)  # each rank's gradient covers its own tokens only
    if hasattr(mlp, "experts"):
        mlp.experts.intermediate_dim = mlp.experts.down_proj.shape[-1]
        mlp.register_forward_pre_hook(partial(_join_first, group))
        mlp.experts.register_forward_pre_hook(partial(_copy_routed, group))
        mlp.register_forward_hook(partial(_sum_output, group))
    else:
        mlp.register_forward_pre_hook(partial(_enter_first, group))
        mlp.down_proj.register_forward_hook(partial(_sum_output, group))


class SharedEmbedding(nn.Module):
    """Embedding of the vocabulary rows from `first` on; ranks sum their results."""

    def __init__(self, weight: nn.Parameter, first: int, padding: int | None, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self._first, self._group = weight, first, group
        here = padding is not None and first <= padding < first + weight.shape[0]
        self._padding = padding - first if padding is not None and here else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids `[B, S]`: `[B, S, H]`, or `[B, S / tp, H]` with sequence parallelism."""
        place = ids - self._first
        elsewhere = (place < 0) | (place >= self.weight.shape[0])
        found = functional.embedding(place.masked_fill(elsewhere, 0), self.weight, self._padding)
        return left(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


def _enter_hidden(
    group: TensorGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"hidden_states": entered(kwargs["hidden_states"], group)}


def _enter_first(group: TensorGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return entered(args[0], group), *args[1:]


def _join_first(group: TensorGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather all tokens for router and experts; the router's gradients are equal on all ranks."""
    return ended(args[0], group), *args[1:]


def _copy_routed(group: TensorGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sum the gradients of hidden states [T, H] and routing weights [T, k] over the ranks in backward."""
    hidden, expert_ids, weights = args
    return copied(hidden, group), expert_ids, copied(weights, group)


def _sum_output(group: TensorGroup, _: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return left(output, group)

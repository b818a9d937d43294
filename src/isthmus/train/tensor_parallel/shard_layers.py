"""Shard the transformers modules of a stage over its tensor-parallel ranks.

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

from isthmus.train.tensor_parallel.parameter_slices import ExpertShare, ParameterSlice, parameter_slice
from isthmus.train.tensor_parallel.tensor_parallel_group import (
    Collective,
    TensorParallelGroup,
    copy_to_parallel_region,
    enter_parallel_region,
    exit_parallel_region,
    gather_sequence,
)


def shard_parameters(
    model: nn.Module, group: TensorParallelGroup, share: ExpertShare | None = None
) -> dict[str, ParameterSlice]:
    """Replace the parameters of `model` (on the meta device) by this rank's slices; return these by name.

    `share` is that of the experts, if ranks hold whole ones. Tied parameters stay tied.
    """
    slices: dict[str, ParameterSlice] = {}
    made: dict[int, nn.Parameter | None] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                full = f"{prefix}.{name}".removeprefix(".")
                held = parameter_slice(full, parameter.shape, group.size, group.tp_rank, share)
                if held is not None:
                    slices[full] = held
                made[id(parameter)] = _shard_parameter(parameter, held)
            setattr(module, name, made[id(parameter)])
    return slices


def _shard_parameter(parameter: nn.Parameter, held: ParameterSlice | None) -> nn.Parameter | None:
    if held is None:
        return None
    return parameter if held.is_full else nn.Parameter(parameter.new_empty(held.local_shape))


def register_collectives(layer: nn.Module, group: TensorParallelGroup, *, routes_own_tokens: bool = False) -> None:
    """Register the hooks that run the collectives of a sharded decoder layer.

    With `routes_own_tokens` each rank routes its part of the tokens to whole experts, which other ranks may hold.
    """
    attention, mlp = layer.self_attn, layer.mlp
    attention.register_forward_pre_hook(partial(_enter_attention, group), with_kwargs=True)
    attention.o_proj.register_forward_hook(partial(_exit_block, group))
    for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)):
        if norm is not None:  # each rank's gradient covers its own heads only
            norm.weight.register_hook(group.all_reduce_sum)
    if group.sequence_parallel:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.register_hook(group.all_reduce_sum)  # each rank's gradient covers its own tokens only
    shared_gate = getattr(mlp, "shared_expert_gate", None)
    if shared_gate is not None:  # each rank's gradient covers its part of the shared expert, or its own tokens, only
        shared_gate.weight.register_hook(group.all_reduce_sum)
    if hasattr(mlp, "experts") and routes_own_tokens:
        mlp.gate.weight.register_hook(group.all_reduce_sum)  # each rank's gradient covers its own tokens only
    elif hasattr(mlp, "experts"):
        mlp.experts.intermediate_dim = mlp.experts.down_proj.shape[-1]
        mlp.register_forward_pre_hook(partial(_gather_moe_input, group))
        mlp.experts.register_forward_pre_hook(partial(_copy_expert_inputs, group))
        if shared_gate is not None:
            mlp.shared_expert.register_forward_pre_hook(partial(_copy_input, group))
            shared_gate.register_forward_pre_hook(partial(_copy_input, group))
        mlp.register_forward_hook(partial(_exit_block, group))
    else:
        mlp.register_forward_pre_hook(partial(_enter_mlp, group))
        mlp.down_proj.register_forward_hook(partial(_exit_block, group))


def shared_expert_regions(group: TensorParallelGroup, routes_own_tokens: bool) -> tuple[Collective, Collective]:
    """Return what to apply to the input [T, H] of a sharded shared expert, and to its result.

    A rank that routes its own tokens alone gathers those of all ranks for the shared expert; otherwise the ranks have
    the same tokens, and the layer sums their results.
    """
    if not routes_own_tokens:
        return partial(copy_to_parallel_region, group=group), _same
    return (
        lambda hidden: enter_parallel_region(hidden.unsqueeze(0), group).squeeze(0),
        lambda result: exit_parallel_region(result.unsqueeze(0), group).squeeze(0),
    )


class VocabParallelEmbedding(nn.Module):
    """Embedding of the vocabulary rows from `first_token` on; ranks sum their results."""

    def __init__(self, weight: nn.Parameter, first_token: int, padding: int | None, group: TensorParallelGroup) -> None:
        super().__init__()
        self.weight, self._first_token, self._group = weight, first_token, group
        here = padding is not None and first_token <= padding < first_token + weight.shape[0]
        self._padding = padding - first_token if padding is not None and here else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids `[B, S]`: `[B, S, H]`, or `[B, S / tp, H]` with sequence parallelism."""
        place = ids - self._first_token
        elsewhere = (place < 0) | (place >= self.weight.shape[0])
        found = functional.embedding(place.masked_fill(elsewhere, 0), self.weight, self._padding)
        return exit_parallel_region(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


def _enter_attention(
    group: TensorParallelGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"hidden_states": enter_parallel_region(kwargs["hidden_states"], group)}


def _enter_mlp(group: TensorParallelGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return enter_parallel_region(args[0], group), *args[1:]


def _gather_moe_input(group: TensorParallelGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather all tokens for router and experts; the router's gradients are equal on all ranks."""
    return gather_sequence(args[0], group), *args[1:]


def _copy_expert_inputs(group: TensorParallelGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sum the gradients of hidden states [T, H] and routing weights [T, k] over the ranks in backward."""
    hidden, expert_ids, weights = args
    return copy_to_parallel_region(hidden, group), expert_ids, copy_to_parallel_region(weights, group)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _copy_input(group: TensorParallelGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return copy_to_parallel_region(args[0], group), *args[1:]


def _exit_block(group: TensorParallelGroup, _: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return exit_parallel_region(output, group)

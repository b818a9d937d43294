"""`cut_parameters` and `connect`: a stage of transformers' modules, cut to one rank's share of its tensors.

The modules stay those of transformers with smaller weights, under their old names; hooks put the sums
between them. Attention and feed-forward each take one sum forward and one backward. Where the ranks have
parts of the sequence between blocks (V. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", MLSys 2023, section 4.2.2), tokens are gathered before a block and its sum is dealt out.
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
    """Replace the parameters of `model`, on the meta device, by this rank's; return what each is by name.

    A parameter that two modules share stays shared.
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
    """Put the sums into a decoder layer that holds this rank's share of the parameters."""
    attention, mlp = layer.self_attn, layer.mlp
    attention.register_forward_pre_hook(partial(_enter_hidden, group), with_kwargs=True)
    attention.o_proj.register_forward_hook(partial(_sum_output, group))
    for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)):
        if norm is not None:  # each rank has seen its own heads alone
            norm.weight.register_hook(group.sum)
    if group.cuts_sequence:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.register_hook(group.sum)  # each rank has seen its own tokens alone
    if hasattr(mlp, "experts"):
        mlp.experts.intermediate_dim = mlp.experts.down_proj.shape[-1]
        mlp.register_forward_pre_hook(partial(_join_first, group))
        mlp.experts.register_forward_pre_hook(partial(_copy_routed, group))
        mlp.register_forward_hook(partial(_sum_output, group))
    else:
        mlp.register_forward_pre_hook(partial(_enter_first, group))
        mlp.down_proj.register_forward_hook(partial(_sum_output, group))


class SharedEmbedding(nn.Module):
    """The embedding of the tokens from `first` on; the sum over all ranks is that of the whole vocabulary."""

    def __init__(self, weight: nn.Parameter, first: int, padding: int | None, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self._first, self._group = weight, first, group
        here = padding is not None and first <= padding < first + weight.shape[0]
        self._padding = padding - first if padding is not None and here else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding of token ids `[B, S]`: `[B, S, H]`, or the tokens that this rank has of it."""
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
    """Give router and experts all tokens; only the experts' gradients are those of a share."""
    return ended(args[0], group), *args[1:]


def _copy_routed(group: TensorGroup, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy hidden states and the weights of the chosen experts, not which they are."""
    hidden, chosen, weights = args
    return copied(hidden, group), chosen, copied(weights, group)


def _sum_output(group: TensorGroup, _: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return left(output, group)

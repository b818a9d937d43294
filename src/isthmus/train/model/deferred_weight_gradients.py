"""`DeferredWeightGradients`: defers weight gradients in split backward passes (`backward_input`).

A schedule may split a backward pass: the input gradient, which the previous stage waits for, runs first, and
the weight gradients run in a later gap. Linear layers and experts that are computed one by one then store
their input and output gradient. All other parameters, and experts computed by grouped products
(`isthmus.train.model.transformers_model.choose_expert_kernels`), get their gradients immediately. Source: P. Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ChunkKey = tuple[int, int]
"""(micro-batch, chunk)."""


@dataclass(frozen=True)
class DeferredProduct:
    """A deferred weight gradient of one linear product."""

    # [out, in], or [E, out, in] of which `expert` is the index.
    weight: nn.Parameter
    expert: int | None
    # [out]
    bias: nn.Parameter | None
    # Input [..., in].
    x: torch.Tensor
    # Gradient of the output [..., out].
    output_gradient: torch.Tensor

    def weight_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight [out, in] and bias [out]."""
        gradient, x = self.output_gradient.flatten(0, -2), self.x.flatten(0, -2)
        return gradient.t() @ x, gradient.sum(0)


class DeferredWeightGradients:
    """Deferred weight gradients of the layers of `models`, by micro-batch and chunk.

    Replaces the `forward` of these layers; from then on every backward through `models` must run in
    `defer`.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._deferred: dict[ChunkKey, list[DeferredProduct]] = {}
        self._active: list[DeferredProduct] | None = None
        for model in models:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.forward = partial(self._linear_forward, layer)
                elif _is_eager_experts(layer):
                    layer.forward = partial(self._experts_forward, layer)

    @contextmanager
    def defer(self, key: ChunkKey) -> Iterator[None]:
        """Defer the weight gradients of the backward pass in this context under `key`."""
        self._active = self._deferred[key] = []
        try:
            yield
        finally:
            self._active = None

    def clear(self) -> None:
        """Discard all deferred gradients after an aborted step."""
        self._deferred.clear()

    def add(self, product: DeferredProduct) -> None:
        """Defer one product; raises `RuntimeError` outside of `defer`."""
        if self._active is None:
            raise RuntimeError("backward through layers with deferred weight gradients, outside of `defer`")
        self._active.append(product)

    def compute_gradients(self, key: ChunkKey) -> None:
        """Compute the gradients deferred under `key`; autograd accumulates them and runs hooks."""
        of_experts: dict[nn.Parameter, torch.Tensor] = {}
        for product in self._deferred.pop(key):
            weight, bias = product.weight_gradients()
            if product.expert is None:
                torch.autograd.backward(product.weight, weight)
            else:
                whole = of_experts.setdefault(product.weight, torch.zeros_like(product.weight))
                whole[product.expert] += weight
            if product.bias is not None:
                torch.autograd.backward(product.bias, bias)
        for parameter, whole in of_experts.items():
            torch.autograd.backward(parameter, whole)

    def _linear_forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, layer.weight, None, layer.bias)

    def _experts_forward(
        self, layer: nn.Module, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [T, H] of experts `expert_ids` [T, k], weighted by `weights` [T, k]."""
        result = torch.zeros_like(hidden)
        for expert in expert_ids.unique().tolist():
            rank, token = torch.where(expert_ids.t() == expert)
            gate, up = self._multiply(hidden[token], layer.gate_up_proj, expert).chunk(2, dim=-1)
            out = self._multiply(layer.act_fn(gate) * up, layer.down_proj, expert)
            result.index_add_(0, token, (out * weights[token, rank, None]).to(result.dtype))
        return result

    def _multiply(
        self, x: torch.Tensor, weight: Any, expert: int | None, bias: nn.Parameter | None = None
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(x, _weight_matrix(weight, expert), bias)
        result: torch.Tensor = _DeferredLinear.apply(x, weight, expert, bias, self)
        return result


class _DeferredLinear(torch.autograd.Function):
    """Linear product whose backward computes only the input gradient and defers the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        expert: int | None,
        bias: nn.Parameter | None,
        deferred: DeferredWeightGradients,
    ) -> torch.Tensor:
        """Return `x` [..., in] times the transposed weight [out, in], plus the bias: [..., out]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.expert, ctx.bias, ctx.deferred = weight, expert, bias, deferred
        return functional.linear(x, _weight_matrix(weight, expert), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of `x` [..., in]; defer those of weight and bias."""
        (x,) = ctx.saved_tensors
        gradient = gradients[0]
        ctx.deferred.add(DeferredProduct(ctx.weight, ctx.expert, ctx.bias, x, gradient))
        needed = ctx.needs_input_grad[0]
        return (gradient @ _weight_matrix(ctx.weight, ctx.expert) if needed else None), None, None, None, None


def _weight_matrix(weight: torch.Tensor, expert: int | None) -> torch.Tensor:
    return weight.detach() if expert is None else weight.detach()[expert]


def _is_eager_experts(layer: nn.Module) -> bool:
    """Return whether `layer` is a transformers experts module that computes its experts one by one."""
    config = getattr(layer, "config", None)
    return hasattr(layer, "gate_up_proj") and getattr(config, "_experts_implementation", None) == "eager"

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

from isthmus.train.kernels.linear_products import LinearProducts
from isthmus.train.model.layer_products import are_eager_experts, products_of, run_experts

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
    products: LinearProducts

    def weight_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight [out, in] and bias [out]."""
        gradient = self.output_gradient
        return self.products.weight_gradient(gradient, self.x), gradient.flatten(0, -2).sum(0)


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
                elif are_eager_experts(layer):
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
        return self._multiply(products_of(layer), x, layer.weight, None, layer.bias)

    def _experts_forward(
        self, layer: nn.Module, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return run_experts(layer, partial(self._multiply, products_of(layer)), hidden, expert_ids, weights)

    def _multiply(
        self,
        products: LinearProducts,
        x: torch.Tensor,
        weight: nn.Parameter,
        expert: int | None,
        bias: nn.Parameter | None = None,
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return products.forward(x, _weight_matrix(weight, expert), bias)
        result: torch.Tensor = _DeferredLinear.apply(x, weight, expert, bias, self, products)
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
        products: LinearProducts,
    ) -> torch.Tensor:
        """Return `x` [..., in] times the transposed weight [out, in], plus the bias: [..., out]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.expert, ctx.bias, ctx.deferred, ctx.products = weight, expert, bias, deferred, products
        return products.forward(x, _weight_matrix(weight, expert), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of `x` [..., in]; defer those of weight and bias."""
        (x,) = ctx.saved_tensors
        gradient = gradients[0]
        ctx.deferred.add(DeferredProduct(ctx.weight, ctx.expert, ctx.bias, x, gradient, ctx.products))
        matrix = _weight_matrix(ctx.weight, ctx.expert)
        needed = ctx.products.input_gradient(gradient, matrix) if ctx.needs_input_grad[0] else None
        return needed, None, None, None, None, None


def _weight_matrix(weight: torch.Tensor, expert: int | None) -> torch.Tensor:
    return weight.detach() if expert is None else weight.detach()[expert]

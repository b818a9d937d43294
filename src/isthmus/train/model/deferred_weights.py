"""`DeferredWeights`: backwards that leave the gradients of weights for later (`backward_input`).

A schedule may cut a backward in two: the gradient that the stage before waits for, now, and those of the
weights in any later gap. The layers that hold nearly all of that work then keep their input and the gradient
of their output instead of multiplying them: linear layers, and experts that are computed one by one (a device
with grouped products, `isthmus.train.model.architecture.choose_kernels`, makes the gradients of its experts
at once, as every other parameter gets its own). Source: P. Qi et al., "Zero Bubble Pipeline Parallelism",
ICLR 2024, section 2.
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

Key = tuple[int, int]
"""A micro-batch and a chunk."""


@dataclass(frozen=True)
class _Product:
    """A product that was put off: input [..., in] and gradient of the output [..., out] of one weight.

    The weight is `expert` of a parameter [E, out, in], or the whole of one [out, in]; its bias is [out].
    """

    weight: nn.Parameter
    expert: int | None
    bias: nn.Parameter | None
    x: torch.Tensor
    gradient: torch.Tensor

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight [out, in] and bias [out]."""
        gradient, x = self.gradient.flatten(0, -2), self.x.flatten(0, -2)
        return gradient.t() @ x, gradient.sum(0)


class DeferredWeights:
    """The put-off products of the layers of `models`, by micro-batch and chunk.

    From its making on, every backward through `models` must be inside `put_off`.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._put_off: dict[Key, list[_Product]] = {}
        self._now: list[_Product] | None = None
        for model in models:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.forward = partial(self._linear, layer)
                elif _one_by_one(layer):
                    layer.forward = partial(self._experts, layer)

    @contextmanager
    def put_off(self, key: Key) -> Iterator[None]:
        """Put off what the backward inside multiplies."""
        self._now = self._put_off[key] = []
        try:
            yield
        finally:
            self._now = None

    def drop(self) -> None:
        """Forget what was put off: the step was broken off."""
        self._put_off.clear()

    def keep(self, product: _Product) -> None:
        """Put one product off; raises `RuntimeError` outside of a backward cut in two."""
        if self._now is None:
            raise RuntimeError("a backward through layers that put their weights off, outside of `put_off`")
        self._now.append(product)

    def multiply(self, key: Key) -> None:
        """Do what was put off for `key`, by way of autograd: its hooks see the gradients."""
        of_experts: dict[nn.Parameter, torch.Tensor] = {}
        for product in self._put_off.pop(key):
            weight, bias = product.gradients()
            if product.expert is None:
                torch.autograd.backward(product.weight, weight)
            else:
                whole = of_experts.setdefault(product.weight, torch.zeros_like(product.weight))
                whole[product.expert] += weight
            if product.bias is not None:
                torch.autograd.backward(product.bias, bias)
        for parameter, whole in of_experts.items():
            torch.autograd.backward(parameter, whole)

    def _linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return self._multiplied(x, layer.weight, None, layer.bias)

    def _experts(
        self, layer: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum [T, H] of the experts `chosen` [T, k] for each token of `hidden` [T, H]."""
        result = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rank, token = torch.where(chosen.t() == expert)
            gate, up = self._multiplied(hidden[token], layer.gate_up_proj, expert).chunk(2, dim=-1)
            out = self._multiplied(layer.act_fn(gate) * up, layer.down_proj, expert)
            result.index_add_(0, token, (out * weights[token, rank, None]).to(result.dtype))
        return result

    def _multiplied(
        self, x: torch.Tensor, weight: Any, expert: int | None, bias: nn.Parameter | None = None
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(x, _matrix(weight, expert), bias)
        result: torch.Tensor = _Multiplied.apply(x, weight, expert, bias, self)
        return result


class _Multiplied(torch.autograd.Function):
    """A product with a weight whose backward computes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        expert: int | None,
        bias: nn.Parameter | None,
        deferred: DeferredWeights,
    ) -> torch.Tensor:
        """Return `x` [..., in] times the weight [out, in], plus the bias."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.expert, ctx.bias, ctx.deferred = weight, expert, bias, deferred
        return functional.linear(x, _matrix(weight, expert), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of `x`; those of weight and bias are put off."""
        (x,) = ctx.saved_tensors
        gradient = gradients[0]
        ctx.deferred.keep(_Product(ctx.weight, ctx.expert, ctx.bias, x, gradient))
        wanted = ctx.needs_input_grad[0]
        return (gradient @ _matrix(ctx.weight, ctx.expert) if wanted else None), None, None, None, None


def _matrix(weight: torch.Tensor, expert: int | None) -> torch.Tensor:
    return weight.detach() if expert is None else weight.detach()[expert]


def _one_by_one(layer: nn.Module) -> bool:
    """Tell whether `layer` is experts of transformers that it computes one after the other."""
    config = getattr(layer, "config", None)
    return hasattr(layer, "gate_up_proj") and getattr(config, "_experts_implementation", None) == "eager"

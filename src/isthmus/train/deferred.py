"""`DeferredWeights`: backwards that leave the gradients of weights for later (`backward_input`).

A schedule may cut a backward in two: the gradient that the stage before waits for, now, and those of the
weights in any later gap. The linear layers, which hold nearly all of that work, then keep their input and the
gradient of their output instead of multiplying them; every other parameter gets its gradient at once. Source:
P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
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
    """What one linear layer has put off: input [..., in], gradient of its output [..., out]."""

    layer: nn.Linear
    x: torch.Tensor
    gradient: torch.Tensor

    def multiply(self) -> None:
        """Add the gradients to the layer's parameters, by way of autograd: its hooks see them."""
        gradient, x = self.gradient.flatten(0, -2), self.x.flatten(0, -2)
        torch.autograd.backward(self.layer.weight, gradient.t() @ x)
        if self.layer.bias is not None:
            torch.autograd.backward(self.layer.bias, gradient.sum(0))


class DeferredWeights:
    """The put-off products of the linear layers of `models`, by micro-batch and chunk.

    From its making on, every backward through `models` must be inside `put_off`.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._put_off: dict[Key, list[_Product]] = {}
        self._now: list[_Product] | None = None
        for model in models:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.forward = partial(self._linear, layer)

    @contextmanager
    def put_off(self, key: Key) -> Iterator[None]:
        """Put off what the backward inside multiplies."""
        self._now = self._put_off[key] = []
        try:
            yield
        finally:
            self._now = None

    def keep(self, layer: nn.Linear, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Put one product off; raises `RuntimeError` outside of a backward cut in two."""
        if self._now is None:
            raise RuntimeError("a backward through layers that put their weights off, outside of `put_off`")
        self._now.append(_Product(layer, x, gradient))

    def multiply(self, key: Key) -> None:
        """Do what was put off for `key`, last layer first."""
        for product in self._put_off.pop(key):
            product.multiply()

    def _linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return functional.linear(x, layer.weight, layer.bias)
        result: torch.Tensor = _Linear.apply(x, layer.weight, layer, self)
        return result


class _Linear(torch.autograd.Function):
    """A linear layer whose backward computes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: nn.Linear, deferred: DeferredWeights
    ) -> torch.Tensor:
        """Return `x` [..., in] times the layer's weight, plus its bias."""
        ctx.save_for_backward(x)
        ctx.layer, ctx.deferred = layer, deferred
        return functional.linear(x, weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Return the gradient of `x`; that of the weight is put off."""
        (x,) = ctx.saved_tensors
        gradient = gradients[0]
        ctx.deferred.keep(ctx.layer, x, gradient)
        wanted = ctx.needs_input_grad[0]
        return (gradient @ ctx.layer.weight if wanted else None), None, None, None

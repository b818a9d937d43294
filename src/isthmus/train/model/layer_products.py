"""`use_products`: lets linear layers and experts of a decoder layer compute by given products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from isthmus.train.kernels.linear_products import PLAIN, LinearProducts

_ATTRIBUTE = "isthmus_products"
"""Where a module keeps its products, besides its parameters and modules."""

ExpertProduct = Callable[[torch.Tensor, nn.Parameter, int], torch.Tensor]
"""Inputs [N, in] of an expert, the weights [E, out, in] of all, and its number: the outputs [N, out]."""


def use_products(layer: nn.Module, products: LinearProducts) -> None:
    """Compute the linear layers inside `layer`, and its experts one by one, by `products`; hooks of modules stay."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear_forward, module, products)
        elif are_eager_experts(module):
            module.forward = partial(_experts_forward, module, products)
        else:
            continue
        module.__dict__[_ATTRIBUTE] = products


def products_of(module: nn.Module) -> LinearProducts:
    """Return the products that `module` computes by."""
    found: LinearProducts = module.__dict__.get(_ATTRIBUTE, PLAIN)
    return found


def are_eager_experts(module: nn.Module) -> bool:
    """Return whether `module` is an experts module of transformers that computes its experts one by one."""
    config = getattr(module, "config", None)
    return hasattr(module, "gate_up_proj") and getattr(config, "_experts_implementation", None) == "eager"


def run_experts(
    module: Any, multiply: ExpertProduct, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the output [T, H] of experts `expert_ids` [T, k] for `hidden` [T, H], weighted by `weights` [T, k]."""
    result = torch.zeros_like(hidden)
    for expert in expert_ids.unique().tolist():
        rank, token = torch.where(expert_ids.t() == expert)
        gate, up = multiply(hidden[token], module.gate_up_proj, expert).chunk(2, dim=-1)
        out = multiply(module.act_fn(gate) * up, module.down_proj, expert)
        result.index_add_(0, token, (out * weights[token, rank, None]).to(result.dtype))
    return result


def _linear_forward(module: nn.Linear, products: LinearProducts, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Product.apply(x, module.weight, module.bias, products)
    return result


def _experts_forward(
    module: nn.Module, products: LinearProducts, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    def multiply(x: torch.Tensor, of_all: nn.Parameter, expert: int) -> torch.Tensor:
        result: torch.Tensor = _Product.apply(x, of_all[expert], None, products)
        return result

    return run_experts(module, multiply, hidden, expert_ids, weights)


class _Product(torch.autograd.Function):
    """A linear layer whose three products are those of an argument."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: LinearProducts
    ) -> torch.Tensor:
        """Return the outputs [..., out] of `x` [..., in], given the weight [out, in] and the bias [out]."""
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `x` [..., in], weight [out, in] and bias [out], those that are needed."""
        x, weight = ctx.saved_tensors
        (gradient,), products = gradients, ctx.products
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            products.input_gradient(gradient, weight) if of_x else None,
            products.weight_gradient(gradient, x) if of_weight else None,
            gradient.flatten(0, -2).sum(0) if of_bias else None,
            None,
        )

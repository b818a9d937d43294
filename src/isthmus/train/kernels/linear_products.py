"""The three products of a linear layer: in the precision of its operands, or of 8-bit numbers in scaled blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch.nn import functional

from isthmus.train.kernels.scaled_blocks import BLOCK, ScaledBlocks, scale_blocks

ScaledProduct: TypeAlias = Callable[[ScaledBlocks, ScaledBlocks, torch.dtype], torch.Tensor]
"""The product [M, N], in a dtype, of a matrix [M, K] and the transpose of one [N, K]."""


class LinearProducts(Protocol):
    """Products of a layer's inputs `x` [..., in], the gradients of its outputs [..., out], and its weight [out, in]."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs [..., out]; `bias` is [out]."""
        ...

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs [..., in], given that of the outputs [..., out]."""
        ...

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight [out, in], given that of the outputs [..., out]."""
        ...


class PlainProducts:
    """Products in the precision of the operands."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs [..., out] of `x` [..., in]."""
        return functional.linear(x, weight, bias)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs [..., in]."""
        return gradient @ weight

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight [out, in]."""
        return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class BlockScaledProducts:
    """Products of 8-bit numbers in scaled blocks, summed in fp32 and returned in the precision of the operands.

    Each operand is scaled along the dimension that its product sums over: inputs and gradients in blocks of 1 x 128,
    for the weight's gradient along the tokens, weights in blocks of 128 x 128. `multiply` computes a product
    (default: exactly the same one in the precision of the operands, which any chip has).
    """

    def __init__(self, multiply: ScaledProduct | None = None) -> None:
        self._multiply = multiply or multiply_widened

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs [..., out] of `x` [..., in]."""
        product = self._multiply(scale_blocks(x.flatten(0, -2), 1), scale_blocks(weight, BLOCK), x.dtype)
        result = product.view(*x.shape[:-1], len(weight))
        return result if bias is None else result + bias

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs [..., in]; the weight has the same numbers as in `forward`."""
        scaled = scale_blocks(weight, BLOCK).transposed()
        product = self._multiply(scale_blocks(gradient.flatten(0, -2), 1), scaled, gradient.dtype)
        return product.view(*gradient.shape[:-1], weight.shape[1])

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight [out, in]."""
        by_output, by_input = (scale_blocks(one.flatten(0, -2).t(), 1) for one in (gradient, x))
        return self._multiply(by_output, by_input, x.dtype)


PLAIN = PlainProducts()


def multiply_widened(left: ScaledBlocks, right: ScaledBlocks, dtype: torch.dtype) -> torch.Tensor:
    """Return the product [M, N] of `left` [M, K] and the transpose of `right` [N, K], as any chip with `dtype` can."""
    return left.widened(dtype) @ right.widened(dtype).t()

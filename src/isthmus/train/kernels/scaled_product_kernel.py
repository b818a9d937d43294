"""`find_scaled_product`: the kernel of a device for products of 8-bit numbers in scaled blocks, if it computes them.

torch has cuBLAS's kernels for blocks of 1 x 128 and 128 x 128, from 2.10 on, on CUDA capability 9.0 (NVIDIA H100 and
H200) with CUDA 12.9 or later.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from isthmus.train.kernels.linear_products import ScaledProduct, multiply_widened
from isthmus.train.kernels.scaled_blocks import BLOCK, ScaledBlocks, scale_blocks

CAPABILITY = (9, 0)
"""The only CUDA capability that has these kernels."""

MAX_DIFFERENCE = 2.0**-7
"""Largest difference of a product from the same one in bf16, by its largest element: a rounding of bf16 in each, and
sums whose order differs."""

_SCALE_ROWS = 4
"""The kernels read the scales of 128 x 128 blocks by fours along the dimension that is summed."""


def find_scaled_product(device: torch.device) -> ScaledProduct | None:
    """Return the kernel of `device`; None if it has none or if its results differ from products in bf16."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return None
    if not hasattr(functional, "scaled_mm"):
        return None
    return multiply_by_kernel if is_exact(multiply_by_kernel, device) else None


def multiply_by_kernel(left: ScaledBlocks, right: ScaledBlocks, dtype: torch.dtype) -> torch.Tensor:
    """Return the product [M, N] of `left` [M, K] and the transpose of `right` [N, K] by the device's kernel.

    Products whose dimensions are no multiples of 128 are computed in `dtype`.
    """
    sizes = (*left.values.shape, len(right.values))
    if any(size % BLOCK or not size for size in sizes):
        return multiply_widened(left, right, dtype)
    kinds = functional.ScalingType
    recipes = {1: kinds.BlockWise1x128, BLOCK: kinds.BlockWise128x128}
    return functional.scaled_mm(
        left.values.contiguous(),
        right.values.contiguous().t(),
        _kernel_scales(left),
        recipes[left.rows],
        _kernel_scales(right),
        recipes[right.rows],
        output_dtype=dtype,
    )


def is_exact(multiply: ScaledProduct, device: torch.device) -> bool:
    """Return whether `multiply` computes on `device`, as bf16 does, products with either size of right blocks."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * BLOCK, 3 * BLOCK), (BLOCK, 3 * BLOCK))
    spread = [torch.randn(shape, generator=generator).pow(3) for shape in shapes]
    left, right = (one.to(device, torch.bfloat16) for one in spread)
    for rows in (1, BLOCK):
        operands = scale_blocks(left, 1), scale_blocks(right, 1 if rows == 1 else BLOCK)
        expected = multiply_widened(*operands, torch.bfloat16).float()
        try:
            found = multiply(*operands, torch.bfloat16).float()
        except (RuntimeError, ValueError):
            return False
        if not bool((found - expected).abs().max() <= MAX_DIFFERENCE * expected.abs().max()):
            return False
    return True


def _kernel_scales(blocks: ScaledBlocks) -> torch.Tensor:
    """Return scales as the kernels read them, the dimension across blocks being the one that is contiguous.

    [R, C / 128] of 1 x 128 blocks; [C / 128 rounded up to fours, R / 128] of 128 x 128 blocks.
    """
    if blocks.rows == 1:
        return blocks.scales.t().contiguous().t()
    return functional.pad(blocks.scales, (0, -blocks.scales.shape[1] % _SCALE_ROWS)).t()

"""`scale_blocks`: a matrix in 8-bit floating-point numbers with one scale for each block.

Numbers are of the format E4M3: 4 bits of exponent, 3 of mantissa, at most 448. A scale is a power of two, so the
matrix that the blocks stand for is exact in bf16, and a product of it in bf16 differs from one of 8-bit hardware in the
order of its sums alone. Source of the blocks, 1 x 128 of activations and gradients and 128 x 128 of weights:
DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3.2; of the format: P. Micikevicius et al.,
"FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.nn import functional

BLOCK: Final = 128
"""Columns of a block, and rows of a block of weights."""

LARGEST = 448.0
"""Largest number of E4M3."""

MIN_SCALE = 2.0**-100
"""Least scale; its blocks are exact in bf16, and smaller elements than 2^-110 become 0."""

_MANTISSA_BITS = 23
"""Of fp32."""


@dataclass(frozen=True)
class ScaledBlocks:
    """A matrix [R, C] in blocks of `rows` rows by 128 columns; those at the edges are smaller."""

    # [R, C], float8_e4m3fn.
    values: torch.Tensor
    # [ceil(R / rows), ceil(C / 128)], fp32: powers of two, or not finite where the block had such an element.
    scales: torch.Tensor
    rows: Literal[1, 128]

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [R, C] that the blocks stand for, exact in bf16 and fp32."""
        across, down = self.scales.shape
        scales = self.scales.to(dtype)[:, None, :, None].expand(across, self.rows, down, BLOCK)
        num_rows, num_columns = self.values.shape
        return self.values.to(dtype) * scales.reshape(across * self.rows, down * BLOCK)[:num_rows, :num_columns]

    def transposed(self) -> ScaledBlocks:
        """Return the transposed matrix [C, R] with the same numbers, if blocks are square."""
        if self.rows != BLOCK:
            raise ValueError(f"blocks of {self.rows} x {BLOCK} are scaled by rows: scale the transposed matrix")
        return ScaledBlocks(self.values.t().contiguous(), self.scales.t().contiguous(), self.rows)


def scale_blocks(matrix: torch.Tensor, rows: Literal[1, 128]) -> ScaledBlocks:
    """Return `matrix` [R, C], bf16 or fp32, in blocks of `rows` rows by 128 columns.

    A finite element is off by at most 1 / 16 of itself, or by 2^-10 of its block's scale, whichever is more; that scale
    is the least power of two by which the block fits into the format. A block with an element that is not finite is not
    finite as a whole.
    """
    num_rows, num_columns = matrix.shape
    padded = functional.pad(matrix, (0, -num_columns % BLOCK, 0, -num_rows % rows))
    across, down = padded.shape[0] // rows, padded.shape[1] // BLOCK
    blocks = padded.reshape(across, rows, down, BLOCK)
    largest = torch.linalg.vector_norm(blocks, float("inf"), dim=(1, 3)) if blocks.numel() else blocks.sum((1, 3))
    scales = _power_of_two_above(largest.float() / LARGEST)
    values = blocks * scales.reciprocal().to(matrix.dtype)[:, None, :, None]
    numbers = values.to(torch.float8_e4m3fn).view(padded.shape)
    return ScaledBlocks(numbers[:num_rows, :num_columns], scales, rows)


def _power_of_two_above(numbers: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is no smaller than each of `numbers` [...] (fp32), and `MIN_SCALE` at least.

    Numbers that are not finite stay.
    """
    least = numbers.clamp(min=MIN_SCALE)
    mantissa = (1 << _MANTISSA_BITS) - 1
    rounded = ((least.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
    return torch.where(least.isfinite(), rounded, least)

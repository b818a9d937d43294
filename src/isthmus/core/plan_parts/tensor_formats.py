"""`TensorFormats`: formats of tensors that are kept or sent, where they differ from the compute precision."""

from __future__ import annotations

from typing import Literal

from isthmus.core.base_model import FrozenModel


class TensorFormats(FrozenModel):
    """Formats of tensors that are kept or sent; what is not named has the format of the plan's stack.

    `activations: fp8` keeps the inputs of products in 8 bits, whatever they compute in. `gathers: fp8` gathers the
    weights of ZeRO in 8 bits, `dispatch: fp8` sends tokens to experts in 8 bits (they come back in 16). `gradients`
    is the format in which gradients are reduced. `scales: row` gives each row of an operand of a product of 8 bits its
    own scale, where its whole tensor has one (`tensor`).
    """

    activations: Literal["fp8"] | None = None
    gathers: Literal["bf16", "fp8"] | None = None
    dispatch: Literal["bf16", "fp8"] | None = None
    gradients: Literal["bf16", "fp32"] | None = None
    scales: Literal["tensor", "row"] | None = None

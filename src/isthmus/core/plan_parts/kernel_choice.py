"""`KernelChoice`: kernels that a run uses instead of those of its stack."""

from __future__ import annotations

from typing import Literal

from isthmus.core.base_model import FrozenModel


class KernelChoice(FrozenModel):
    """Kernels that differ from those of the plan's stack; what is not named stays as the stack has it.

    `attention`: `eager` keeps the scores in memory. `loss`: `fused` is one kernel whose gradient replaces the logits,
    `linear` computes head and loss together in parts and keeps no logits. `norms: fused` keep their input alone, in its
    own precision. `compiled` layers fuse element-wise work, which keeps the inputs of products and launches less.
    `dropout` drops elements of the results of attention and feed-forward, and of scores that are kept in memory: a mask
    of one byte an element each.
    """

    attention: Literal["flash2", "flash3", "cudnn", "sdpa", "eager"] | None = None
    loss: Literal["fused", "linear"] | None = None
    norms: Literal["fused"] | None = None
    compiled: bool = False
    dropout: bool = False

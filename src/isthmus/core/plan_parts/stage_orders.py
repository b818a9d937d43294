"""`StageOrders`: the order of computations of each stage, for replicas under a searched schedule."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeInt

MAX_ORDER_CHARS = 1_000_000
"""Longest text of a stage's order."""


class StageOrders(FrozenModel):
    """The computations of each stage in order, as text, for some replicas of a plan.

    `F` is a forward, `I` the gradient for the previous stage, `W` the weight gradients, `B` both at once; a chunk above
    0 follows (`F1`). Micro-batches keep their order. A number repeats what follows it: `3F 5(I F W) 3I 3W`.
    `replicas` are those that run these orders (default: all).
    """

    replicas: tuple[NonNegativeInt, ...] = ()
    stages: tuple[Annotated[str, Field(max_length=MAX_ORDER_CHARS)], ...] = Field(min_length=1)

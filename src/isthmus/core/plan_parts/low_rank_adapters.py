"""`LowRankAdapters`: fine-tuning of low-rank adapters (LoRA) beside frozen weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from isthmus.core.base_model import FrozenModel

MAX_RANK = 65_536
"""Largest rank of an adapter; rejects typing mistakes."""

AdapterTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]


class LowRankAdapters(FrozenModel):
    """Low-rank adapters (LoRA): two factors of `rank` beside each of the `targets`; all other weights are frozen.

    Frozen weights have no gradients and no optimizer state, and keep the compute precision. Source: E. Hu et al.,
    LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    targets: Annotated[tuple[AdapterTarget, ...], Field(min_length=1, max_length=7)] = ("q", "k", "v", "o")

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError(f"a target is named twice: {', '.join(targets)}")
        return targets

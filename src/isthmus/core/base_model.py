"""Base model and field types for everything that users write or that crosses a process boundary."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class FrozenModel(BaseModel):
    """Immutable pydantic model that rejects unknown fields, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def __eq__(self, other: object) -> bool:
        """Return whether the other model is of the same class and has the same fields.

        Equal fields are found at once, which matters where a job is packed: each default is compared.
        """
        if type(self) is type(other) and self.__dict__ == other.__dict__:
            return True
        return super().__eq__(other)


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""A name: letters, digits, `.`, `_`, `-`; at most 63 characters."""

PathName = Annotated[str, Field(min_length=1)]
"""A path or URL of a file or folder."""

Fraction = Annotated[float, Field(ge=0, le=1)]

MAX_INTEGER = 2**63 - 1
"""Largest integer of a file or message: every database and every float can stand for it."""
MAX_NUMBER = 1e30
"""Largest other number: a product of several of them is still finite, so that no sum of it ends in an exception."""
PositiveFloat = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INTEGER)]

Currency = Annotated[str, Field(pattern=r"^[A-Za-z]{0,8}$")]
"""The unit of prices, such as `EUR`; empty if unnamed."""

ComputeMode = Literal["real", "virtual"]
"""`real`: the chips compute; `virtual`: they wait for the predicted compute time instead."""

TrainingPrecision = Literal["bf16", "fp32", "fp16", "fp8"]
"""Precision of the weights that forward and backward use, with `fp8` of layers' products; master weights are fp32."""

AttentionKernelName = Literal["sdpa", "flash", "flex", "eager"]
"""The kernel of the attention core: torch's choice, its flash kernel, compiled flex attention, scores in memory."""

TransportKind = Literal["thread", "process"]
"""Where messages to other clusters are sent from: threads of the worker, or a separate process."""

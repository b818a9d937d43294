"""`TensorShard`: a rectangular shard of a full-model tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorShard:
    """A rectangular shard of a full-model tensor."""

    # Name of the full tensor.
    name: str
    # Shape of the full tensor.
    shape: tuple[int, ...]
    # Where `tensor` begins in the full tensor, per dimension.
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def full(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """Return the shard that covers all of `tensor`, of any shape."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

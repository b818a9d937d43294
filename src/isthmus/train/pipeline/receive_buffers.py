"""`ReceiveBuffers`: reusable buffers for the messages that a stage receives."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class ReceiveBuffers:
    """A pool of [B, S, H] buffers, bounded by the schedule's peak of simultaneous receives.

    Buffers are reused across steps; a new shape or an aborted step discards them.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._taken: dict[Hashable, torch.Tensor] = {}
        self._like = torch.empty(0)
        self._limit = 0

    @property
    def num_buffers(self) -> int:
        """Number of buffers allocated now."""
        return len(self._free) + len(self._taken)

    def begin(self, limit: int, like: torch.Tensor) -> None:
        """Start a step that holds at most `limit` buffers at once, of the shape and type of `like`."""
        changed = (self._like.shape, self._like.dtype) != (like.shape, like.dtype)
        if changed or self._taken:
            self._free.clear()
            self._taken.clear()
        self._like, self._limit = like, limit

    def take(self, name: Hashable, num_samples: int, device: torch.device) -> torch.Tensor:
        """Return a buffer [num_samples, S, H], reserved under `name` until `give_back`.

        Raises `RuntimeError` above the step's limit: the schedule receives more than was checked.
        """
        if len(self._taken) >= self._limit:
            raise RuntimeError(f"{name}: all {self._limit} receive buffers of the schedule are in use")
        if not self._free:
            self._free.append(torch.empty(self._like.shape, dtype=self._like.dtype, device=device))
        buffer = self._taken[name] = self._free.pop()
        return (buffer if num_samples == buffer.shape[0] else buffer[:num_samples]).detach()

    def give_back(self, name: Hashable) -> None:
        """Return the buffer of `name`, if any, to the pool."""
        buffer = self._taken.pop(name, None)
        if buffer is not None:
            self._free.append(buffer)

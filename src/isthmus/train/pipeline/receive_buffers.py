"""`ReceiveBuffers`: where a stage's messages arrive, allocated once and used again and again."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class ReceiveBuffers:
    """Buffers of [B, S, H] for what a stage receives: at most as many as its schedule was checked to need.

    They stay allocated from step to step; a step of another shape, or one that was broken off, gets new ones.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._taken: dict[Hashable, torch.Tensor] = {}
        self._like = torch.empty(0)
        self._limit = 0

    @property
    def num_buffers(self) -> int:
        """Buffers that are allocated now."""
        return len(self._free) + len(self._taken)

    def begin(self, limit: int, like: torch.Tensor) -> None:
        """Start a step that holds at most `limit` buffers at once, of the shape and type of `like`."""
        changed = (self._like.shape, self._like.dtype) != (like.shape, like.dtype)
        if changed or self._taken:
            self._free.clear()
            self._taken.clear()
        self._like, self._limit = like, limit

    def take(self, name: Hashable, num_samples: int, device: torch.device) -> torch.Tensor:
        """Return room for a message of `num_samples` samples, which is `name`'s until it is given back.

        Raises `RuntimeError` beyond the step's limit: the schedule does not do what it was checked for.
        """
        if len(self._taken) >= self._limit:
            raise RuntimeError(f"{name}: all {self._limit} receive buffers of the schedule are in use")
        if not self._free:
            self._free.append(torch.empty(self._like.shape, dtype=self._like.dtype, device=device))
        buffer = self._taken[name] = self._free.pop()
        return (buffer if num_samples == buffer.shape[0] else buffer[:num_samples]).detach()

    def give_back(self, name: Hashable) -> None:
        """Free what `name` holds, if anything: it is not read any more."""
        buffer = self._taken.pop(name, None)
        if buffer is not None:
            self._free.append(buffer)

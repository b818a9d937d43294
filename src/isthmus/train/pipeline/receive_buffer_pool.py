"""`ReceiveBufferPool`: reusable buffers for the messages that a stage receives."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class ReceiveBufferPool:
    """A pool of [B, S, H] buffers, bounded by the schedule's peak of simultaneous receives.

    Buffers are reused across steps; a new shape or an aborted step discards them.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._in_use: dict[Hashable, torch.Tensor] = {}
        self._template = torch.empty(0)
        self._limit = 0

    @property
    def num_allocated(self) -> int:
        """Number of buffers allocated now."""
        return len(self._free) + len(self._in_use)

    def begin_step(self, limit: int, template: torch.Tensor) -> None:
        """Start a step that holds at most `limit` buffers at once, of the shape and type of `template`."""
        changed = (self._template.shape, self._template.dtype) != (template.shape, template.dtype)
        if changed or self._in_use:
            self._free.clear()
            self._in_use.clear()
        self._template, self._limit = template, limit

    def acquire(self, key: Hashable, num_samples: int, device: torch.device) -> torch.Tensor:
        """Return a buffer [num_samples, S, H], reserved under `key` until `release`.

        Raises `RuntimeError` above the step's limit: the schedule receives more than was checked.
        """
        if len(self._in_use) >= self._limit:
            raise RuntimeError(f"{key}: all {self._limit} receive buffers of the schedule are in use")
        if not self._free:
            self._free.append(torch.empty(self._template.shape, dtype=self._template.dtype, device=device))
        buffer = self._in_use[key] = self._free.pop()
        return (buffer if num_samples == buffer.shape[0] else buffer[:num_samples]).detach()

    def release(self, key: Hashable) -> None:
        """Return the buffer of `key`, if any, to the pool."""
        buffer = self._in_use.pop(key, None)
        if buffer is not None:
            self._free.append(buffer)

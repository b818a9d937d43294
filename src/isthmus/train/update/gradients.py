"""`Gradients`: the fp32 gradients of a stage's parameters, accumulated over a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from isthmus.train.update.buckets import Segment
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.weight_share import rows_of


class Gradients:
    """The gradients of `parameters` (by full-model name).

    With `lowers` the caller converts each parameter to bf16 by `lower`; its gradients accumulate in fp32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ownership: Ownership, *, lowers: bool) -> None:
        self._parameters, self._ownership, self._lowers = parameters, ownership, lowers
        self._gathered: dict[str, torch.Tensor] = {}

    def lower(self, name: str) -> None:
        """Convert a parameter to bf16; this frees its fp32 memory if it has no other reference."""
        parameter = self._parameters[name]
        parameter.data = parameter.data.to(torch.bfloat16)

        def accumulate(working: torch.Tensor) -> None:
            if working.grad is not None:
                if name in self._gathered:
                    self._gathered[name].add_(working.grad)
                else:
                    self._gathered[name] = working.grad.float()
                working.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

    def get(self, name: str) -> torch.Tensor | None:
        """Return the fp32 gradient of a parameter; None if it has none."""
        return self._gathered.get(name) if self._lowers else self._parameters[name].grad

    def of(self, segment: Segment) -> torch.Tensor:
        """Return the gradient of a segment that this rank owns, as a view."""
        gradient = self.get(segment.name)
        if gradient is None:
            raise KeyError(f"no gradient of {segment.name}")
        return rows_of(gradient, self._ownership.place(segment))

    def fill_shared(self) -> None:
        """Set missing gradients of shared parameters to zero, because other ranks may have one."""
        for name in self._ownership.shared_names:
            if self.get(name) is None:
                zeros = torch.zeros_like(self._parameters[name], dtype=torch.float32)
                if self._lowers:
                    self._gathered[name] = zeros
                else:
                    self._parameters[name].grad = zeros

    def sum_of_squares(self) -> float:
        """Return the squared norm (fp64) of the segments that this rank counts.

        The result is bit-identical with and without sharded updates.
        """
        counted = [one for one in self._ownership.counted if self.get(one.name) is not None]
        if not counted:
            return 0.0
        norms = torch._foreach_norm([self.of(one) for one in counted], 2, dtype=torch.float64)
        return float(torch.stack(norms).square().sum())

    def drop(self) -> None:
        """Discard all gradients."""
        self._gathered.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

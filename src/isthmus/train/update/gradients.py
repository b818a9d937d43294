"""`Gradients`: what a step has gathered so far for the parameters of one stage, in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from isthmus.train.update.buckets import Segment
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.weight_share import rows_of


class Gradients:
    """The gradients of `parameters`, by name in the whole model, of which `ownership` says who owns what.

    Parameters are fp32, or with `lowers` each becomes bf16 by `lower`, its gradients gathered in fp32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ownership: Ownership, *, lowers: bool) -> None:
        self._parameters, self._ownership, self._lowers = parameters, ownership, lowers
        self._gathered: dict[str, torch.Tensor] = {}

    def lower(self, name: str) -> None:
        """Make a parameter bf16; its fp32 memory is freed where nobody else keeps it."""
        parameter = self._parameters[name]
        parameter.data = parameter.data.to(torch.bfloat16)

        def gather(working: torch.Tensor) -> None:
            if working.grad is not None:
                if name in self._gathered:
                    self._gathered[name].add_(working.grad)
                else:
                    self._gathered[name] = working.grad.float()
                working.grad = None

        parameter.register_post_accumulate_grad_hook(gather)

    def get(self, name: str) -> torch.Tensor | None:
        """Return the gradient (fp32) of a parameter, None without any."""
        return self._gathered.get(name) if self._lowers else self._parameters[name].grad

    def of(self, segment: Segment) -> torch.Tensor:
        """Return the gradient of a segment that this rank owns: a view."""
        gradient = self.get(segment.name)
        if gradient is None:
            raise KeyError(f"no gradient of {segment.name}")
        return rows_of(gradient, self._ownership.place(segment))

    def fill_shared(self) -> None:
        """Give what others may have a gradient of one here as well."""
        for name in self._ownership.shared_names:
            if self.get(name) is None:
                zeros = torch.zeros_like(self._parameters[name], dtype=torch.float32)
                if self._lowers:
                    self._gathered[name] = zeros
                else:
                    self._parameters[name].grad = zeros

    def sum_of_squares(self) -> float:
        """Return the squared norm (fp64) of the segments that are counted here, one by one.

        These do not depend on whether updates are shared, nor do the bits.
        """
        counted = [one for one in self._ownership.counted if self.get(one.name) is not None]
        if not counted:
            return 0.0
        norms = torch._foreach_norm([self.of(one) for one in counted], 2, dtype=torch.float64)
        return float(torch.stack(norms).square().sum())

    def drop(self) -> None:
        """Forget what was gathered."""
        self._gathered.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

"""`GradientAccumulator`: the fp32 gradients of a stage's parameters, accumulated over a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from isthmus.train.update.buckets import ParameterSegment
from isthmus.train.update.ownership import LocalRows, Ownership
from isthmus.train.update.weight_shard import view_rows


class GradientAccumulator:
    """The gradients of `parameters` (by full-model name).

    With a `dtype` of 16 bits the caller converts each parameter by `lower`; its gradients accumulate in fp32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ownership: Ownership, dtype: torch.dtype) -> None:
        self._parameters, self._ownership, self._dtype = parameters, ownership, dtype
        self._is_narrow = dtype != torch.float32
        self._accumulated: dict[str, torch.Tensor] = {}
        self._on_accumulated: Callable[[str], None] | None = None

    def observe(self, on_accumulated: Callable[[str], None]) -> None:
        """Call `on_accumulated` with the name of a parameter after each addition to its gradient."""
        self._on_accumulated = on_accumulated
        if not self._is_narrow:
            for name, parameter in self._parameters.items():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: on_accumulated(name))

    def lower(self, name: str) -> None:
        """Convert a parameter to 16 bits; this frees its fp32 memory if it has no other reference."""
        parameter = self._parameters[name]
        parameter.data = parameter.data.to(self._dtype)

        def accumulate(working: torch.Tensor) -> None:
            if working.grad is not None:
                if name in self._accumulated:
                    self._accumulated[name].add_(working.grad)
                else:
                    self._accumulated[name] = working.grad.float()
                working.grad = None
                if self._on_accumulated is not None:
                    self._on_accumulated(name)

        parameter.register_post_accumulate_grad_hook(accumulate)

    def get(self, name: str) -> torch.Tensor | None:
        """Return the fp32 gradient of a parameter, of its local shape; None if it has none."""
        return self._accumulated.get(name) if self._is_narrow else self._parameters[name].grad

    def segment_view(self, segment: ParameterSegment) -> torch.Tensor:
        """Return the gradient of a segment that this rank owns, as a view: the segment's rows of the local shape."""
        gradient = self.get(segment.name)
        if gradient is None:
            raise KeyError(f"no gradient of {segment.name}")
        return view_rows(gradient, self._ownership.locate(segment))

    def segment_or_zeros(self, segment: ParameterSegment) -> torch.Tensor:
        """Return the gradient of a segment as `segment_view` does, or zeros [num_elements] if there is none."""
        if self.get(segment.name) is None:
            return torch.zeros(segment.num_elements, device=self._parameters[segment.name].device)
        return self.segment_view(segment)

    def zeros(self, name: str, rows: LocalRows) -> torch.Tensor:
        """Return fp32 zeros of the shape of `rows` of a parameter."""
        parameter = self._parameters[name]
        shape = [*parameter.shape[: rows.dim], rows.num_rows, *parameter.shape[rows.dim + 1 :]]
        return torch.zeros(shape, device=parameter.device)

    def drop(self, name: str) -> None:
        """Discard the gradient of a parameter."""
        self._accumulated.pop(name, None)
        self._parameters[name].grad = None

    def zero_missing_shared(self) -> None:
        """Set missing gradients of shared parameters to zero, because other ranks may have one."""
        for name in self._ownership.shared_names:
            if self.get(name) is None:
                zeros = torch.zeros_like(self._parameters[name], dtype=torch.float32)
                if self._is_narrow:
                    self._accumulated[name] = zeros
                else:
                    self._parameters[name].grad = zeros

    def sum_of_squares(self) -> torch.Tensor:
        """Return the squared norm, an fp64 scalar on the device, of the segments that this rank counts.

        The result is bit-identical with and without sharded updates.
        """
        counted = [one for one in self._ownership.norm_segments if self.get(one.name) is not None]
        if not counted:
            return torch.zeros((), dtype=torch.float64)
        norms = torch._foreach_norm([self.segment_view(one) for one in counted], 2, dtype=torch.float64)
        return torch.stack(norms).square().sum()

    def clear(self) -> None:
        """Discard all gradients."""
        self._accumulated.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

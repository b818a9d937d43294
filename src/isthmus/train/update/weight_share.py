"""`WeightShare`: rows of a parameter that a rank updates, and the fp32 weight behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.train.messages.pinned_memory import host_copies
from isthmus.train.update.ownership import Ownership, Rows


@dataclass(frozen=True)
class WeightShare:
    """Rows of a parameter that are updated here, and their fp32 weight: the parameter's own memory or not."""

    name: str
    rows: Rows
    weight: nn.Parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of the rank's own `tensor`: a view."""
        return rows_of(tensor, self.rows)

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Tell whether the weight is the memory of these rows of `tensor`, and no copy."""
        return bool(self.of(tensor).data_ptr() == self.weight.data_ptr())


def make_shares(
    name: str, parameter: nn.Parameter, ownership: Ownership, *, keeps_fp32: bool, on_host: bool
) -> Iterator[WeightShare]:
    """Yield what this rank updates of a parameter (fp32), called `name` in the whole model.

    With `keeps_fp32` the model computes with fp32: weights then share its memory where they can. `on_host`
    puts them into host memory.
    """
    for rows in ownership.updated.get(name, ()):
        yield WeightShare(name, rows, _weight(parameter, rows, keeps_fp32=keeps_fp32, on_host=on_host))


def rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return `rows` of a rank's own `tensor`: a view."""
    return tensor.narrow(rows.dim, rows.at, rows.num_rows)


def _weight(parameter: nn.Parameter, rows: Rows, *, keeps_fp32: bool, on_host: bool) -> nn.Parameter:
    view = rows_of(parameter.detach(), rows)
    if on_host:
        return nn.Parameter(host_copies([view])[0])
    whole = rows.num_rows == parameter.shape[rows.dim]
    if whole and keeps_fp32:
        return parameter
    if whole or (keeps_fp32 and view.is_contiguous()):
        return nn.Parameter(view)
    return nn.Parameter(view.clone(memory_format=torch.contiguous_format))

"""`parameter_slice`: the slice of each parameter that a tensor-parallel rank holds.

Query, key, value, gate and up projections and the head are column-parallel (split by output), output and down
projections row-parallel (split by input), so that a block needs one reduction. The embedding is split by
vocabulary. Experts store gate and up projections in one parameter, and each half is split; expert-parallel ranks
hold whole experts instead. The first rank alone holds the bias of row-parallel layers; all ranks hold norms and
routers. Source: M. Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_COLUMN_PARALLEL = re.compile(r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)")
_ROW_PARALLEL = re.compile(r".*\.(o_proj|down_proj)\.(weight|bias)")
_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class ExpertShare:
    """Part `rank` of `size` equal parts of the experts of a layer."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Row ranges of a parameter that a rank holds, concatenated in its local tensor."""

    # Shape of the full parameter.
    shape: tuple[int, ...]
    # Dimension that is split; "rows" are indices along it.
    dim: int
    # (start, stop) of each range of rows.
    ranges: tuple[tuple[int, int], ...]
    # Whether all ranks of the stage hold the same rows.
    is_replicated: bool = False
    # True on one of the ranks that hold the same rows.
    is_first_copy: bool = True

    @property
    def is_full(self) -> bool:
        """Whether the slice covers the full parameter."""
        return self.num_rows == self.shape[self.dim]

    @property
    def num_rows(self) -> int:
        """Number of rows held."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def row_elements(self) -> int:
        """Number of elements per row."""
        return math.prod(self.shape) // self.shape[self.dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return (*self.shape[: self.dim], self.num_rows, *self.shape[self.dim + 1 :])

    def row_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, at): rows `[start, stop)` of the full parameter begin at local row `at`."""
        at = 0
        for start, stop in self.ranges:
            yield start, stop, at
            at += stop - start

    def take_from(self, full: torch.Tensor) -> torch.Tensor:
        """Return this slice, of `local_shape`, of the parameter `full` of `shape`: `full` itself, or a copy."""
        if self.is_full:
            return full
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def copy_into(self, held: torch.Tensor, full: torch.Tensor) -> None:
        """Copy `held`, of `local_shape`, into its rows of the full parameter `full`, of `shape`."""
        for start, stop, at in self.row_ranges():
            full.narrow(self.dim, start, stop - start).copy_(held.narrow(self.dim, at, stop - start))


def is_expert_parameter(name: str) -> bool:
    """Return whether the parameter `name` holds the experts of a layer, along its first dimension."""
    return _EXPERTS.fullmatch(name) is not None


def parameter_slice(
    name: str, shape: Sequence[int], tp_size: int, tp_rank: int, share: ExpertShare | None = None
) -> ParameterSlice | None:
    """Return the slice that rank `tp_rank` of `tp_size` holds of parameter `name` (full `shape`), or None.

    With a `share` that is the slice of experts, whatever `tp_size`. The split dimension depends neither on `tp_size`
    nor on the size of a share, so that slices of different degrees can be compared.
    """
    if share is not None and is_expert_parameter(name):
        bounds = shape[0] * share.rank // share.size, shape[0] * (share.rank + 1) // share.size
        return ParameterSlice(shape=tuple(shape), dim=0, ranges=(bounds,))
    dim, halves = _split_rule(name, len(shape))
    if dim is None:
        everything = ((0, shape[0]),)
        if _ROW_PARALLEL.fullmatch(name):
            return ParameterSlice(shape=tuple(shape), dim=0, ranges=everything) if tp_rank == 0 else None
        return ParameterSlice(
            shape=tuple(shape),
            dim=0,
            ranges=everything,
            is_replicated=tp_size > 1,
            is_first_copy=tp_rank == 0,
        )
    if tp_size == 1:
        return ParameterSlice(shape=tuple(shape), dim=dim, ranges=((0, shape[dim]),))
    half = shape[dim] // halves
    start, stop = half * tp_rank // tp_size, half * (tp_rank + 1) // tp_size
    return ParameterSlice(
        shape=tuple(shape), dim=dim, ranges=tuple((i * half + start, i * half + stop) for i in range(halves))
    )


def _split_rule(name: str, num_dims: int) -> tuple[int | None, int]:
    """Return the split dimension (None: replicated), and the number of blocks that are split separately."""
    experts = _EXPERTS.fullmatch(name)
    if experts:
        return (1, 2) if experts[1] == "gate_up_proj" else (2, 1)
    if name in _VOCABULARY or _COLUMN_PARALLEL.fullmatch(name):
        return 0, 1
    if _ROW_PARALLEL.fullmatch(name) and num_dims > 1:
        return 1, 1
    return None, 1

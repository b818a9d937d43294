"""`slice_of`: the slice of each parameter that a tensor-parallel rank holds.

Query, key, value, gate and up projections and the head are column-parallel (split by output), output and down
projections row-parallel (split by input), so that a block needs one reduction. The embedding is split by
vocabulary. Experts store gate and up projections in one parameter, and each half is split. The first rank
alone holds the bias of row-parallel layers; all ranks hold norms and routers. Source: M. Shoeybi et al.,
"Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_PUT_OUT = re.compile(r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)")
_TAKEN_IN = re.compile(r".*\.(o_proj|down_proj)\.(weight|bias)")
_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Row ranges of a parameter that a rank holds, concatenated in its local tensor."""

    # Shape of the full parameter.
    shape: tuple[int, ...]
    # Dimension that is split; "rows" are indices along it.
    dim: int
    # (start, stop) of each range of rows.
    ranges: tuple[tuple[int, int], ...]
    # Whether all ranks of the stage hold the same rows.
    copies: bool = False
    # True on one of the ranks that hold the same rows.
    first: bool = True

    @property
    def is_whole(self) -> bool:
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

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, at): rows `[start, stop)` of the full parameter begin at local row `at`."""
        at = 0
        for start, stop in self.ranges:
            yield start, stop, at
            at += stop - start

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this slice of the full parameter `whole`: `whole` itself, or a copy."""
        if self.is_whole:
            return whole
        return torch.cat(
            [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        )

    def put(self, held: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the local tensor `held` into its rows of the full parameter `whole`."""
        for start, stop, at in self.parts():
            whole.narrow(self.dim, start, stop - start).copy_(held.narrow(self.dim, at, stop - start))


def slice_of(name: str, shape: Sequence[int], tp: int, index: int) -> Slice | None:
    """Return the slice that rank `index` of `tp` holds of parameter `name` (full `shape`), or None.

    The split dimension does not depend on `tp`, so that slices of different tp degrees can be compared.
    """
    dim, halves = _rule(name, len(shape))
    if dim is None:
        everything = ((0, shape[0]),)
        if _TAKEN_IN.fullmatch(name):
            return Slice(shape=tuple(shape), dim=0, ranges=everything) if index == 0 else None
        return Slice(shape=tuple(shape), dim=0, ranges=everything, copies=tp > 1, first=index == 0)
    if tp == 1:
        return Slice(shape=tuple(shape), dim=dim, ranges=((0, shape[dim]),))
    half = shape[dim] // halves
    start, stop = half * index // tp, half * (index + 1) // tp
    return Slice(
        shape=tuple(shape), dim=dim, ranges=tuple((i * half + start, i * half + stop) for i in range(halves))
    )


def _rule(name: str, num_dims: int) -> tuple[int | None, int]:
    """Return the split dimension (None: replicated), and the number of blocks that are split separately."""
    experts = _EXPERTS.fullmatch(name)
    if experts:
        return (1, 2) if experts[1] == "gate_up_proj" else (2, 1)
    if name in _VOCABULARY or _PUT_OUT.fullmatch(name):
        return 0, 1
    if _TAKEN_IN.fullmatch(name) and num_dims > 1:
        return 1, 1
    return None, 1

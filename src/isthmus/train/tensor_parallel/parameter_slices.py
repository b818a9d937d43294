"""`slice_of`: which part of each parameter a rank holds where `tp` ranks share a stage.

Queries, keys, values, gate and up projections and the head are cut by what they put out, output and down
projections by what they take in, so that a block needs one sum of its result. The embedding is cut by tokens
of the vocabulary. Experts keep gate above up in one parameter: each half is cut. A bias behind a sum is held
by the first rank alone, norms and routers by all. Source: M. Shoeybi et al., "Megatron-LM" (2019), section 3.
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
    """Rows `ranges` (start, stop) along dimension `dim` of a parameter that has `shape` in the whole model.

    They lie behind each other in the rank's own tensor. `copies` says that other ranks of the stage hold
    the same: then `first` is true for one of them.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    copies: bool = False
    first: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the parameter is missing here."""
        return self.num_rows == self.shape[self.dim]

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def row_elements(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape) // self.shape[self.dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        return (*self.shape[: self.dim], self.num_rows, *self.shape[self.dim + 1 :])

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, at): rows of the whole parameter, which begin at row `at` of the rank's own."""
        at = 0
        for start, stop in self.ranges:
            yield start, stop, at
            at += stop - start

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what the rank holds of a `whole` parameter: `whole` itself, or a copy."""
        if self.is_whole:
            return whole
        return torch.cat(
            [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        )

    def put(self, held: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the rank's own tensor to its place in a `whole` one."""
        for start, stop, at in self.parts():
            whole.narrow(self.dim, start, stop - start).copy_(held.narrow(self.dim, at, stop - start))


def slice_of(name: str, shape: Sequence[int], tp: int, index: int) -> Slice | None:
    """Return what rank `index` of `tp` holds of parameter `name` (of `shape`) of the whole model.

    None: nothing at all. The dimension does not depend on `tp`, so slices of unlike cuts can be compared.
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
    """Return the dimension that is cut (None: none is), and in how many blocks it is cut alike."""
    experts = _EXPERTS.fullmatch(name)
    if experts:
        return (1, 2) if experts[1] == "gate_up_proj" else (2, 1)
    if name in _VOCABULARY or _PUT_OUT.fullmatch(name):
        return 0, 1
    if _TAKEN_IN.fullmatch(name) and num_dims > 1:
        return 1, 1
    return None, 1

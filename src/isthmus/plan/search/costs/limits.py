"""`Limits`: what a search keeps to, by the job or by whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.plan.search.costs.task import Zero


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the caller fixes. None leaves a degree free; `executable` admits what our runtime runs.

    `largest_micro_batch` bounds the micro-batch sizes that are tried. `even_batches` gives every replica as
    many micro-batches (to within one), for frameworks that deal samples evenly. Without `overlap` no
    schedule is tried that overlaps communication with computation.
    """

    executable: bool = False
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    zero: Zero = 1
    max_chips: int | None = None
    mixed_chips: bool = True
    largest_micro_batch: int = 8
    even_batches: bool = False
    overlap: bool = True

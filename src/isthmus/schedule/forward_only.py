"""`forward_only`: how a held-out set is evaluated."""

from __future__ import annotations

from functools import lru_cache

from isthmus.schedule.exchanges import lay_exchanges, require_counts
from isthmus.schedule.operation import Operation, Schedule

SENDS_UNDER_WAY = 16
"""Messages of a stage that may be on their way: what a stage has sent, and nobody has, is in its memory."""


@lru_cache(maxsize=8)
def forward_only(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Forwards alone. A stage asks for an input when it needs it, and is ahead of its sends by a few.

    With several chunks micro-batches go in groups of `num_stages`, each through all chunks before the next:
    of one that waits for its next chunk there are never more. Asked again it is the same object.
    """
    require_counts(num_stages, num_micro_batches, num_chunks)
    order = tuple(
        Operation("forward", m, chunk)
        for first in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for m in range(first, min(first + num_stages, num_micro_batches))
    )
    computing = Schedule("forward_only", num_micro_batches, (order,) * num_stages, num_chunks, trains=False)
    return lay_exchanges(computing, 0, max_sends=max(SENDS_UNDER_WAY, 2 * num_stages))

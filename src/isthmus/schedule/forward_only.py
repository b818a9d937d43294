"""`forward_only`: the schedule of evaluation on a held-out set."""

from __future__ import annotations

from functools import lru_cache

from isthmus.schedule.add_communication import add_communication, require_counts
from isthmus.schedule.operation import Operation, Schedule

MAX_PENDING_SENDS = 16
"""Least limit on the pending sends of a stage; each keeps its tensor in the sender's memory."""


@lru_cache(maxsize=8)
def forward_only(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Return a schedule of forwards only, without receive-ahead and with a limited number of pending sends.

    With several chunks, micro-batches pass in groups of `num_stages`, each group through all chunks before
    the next, so at most `num_stages` wait for their next chunk. Calls with equal arguments return the same
    object.
    """
    require_counts(num_stages, num_micro_batches, num_chunks)
    order = tuple(
        Operation("forward", m, chunk)
        for first in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for m in range(first, min(first + num_stages, num_micro_batches))
    )
    computing = Schedule("forward_only", num_micro_batches, (order,) * num_stages, num_chunks, trains=False)
    return add_communication(computing, 0, max_pending_sends=max(MAX_PENDING_SENDS, 2 * num_stages))

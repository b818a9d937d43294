"""`interleaved`: 1F1B over `num_chunks` model chunks per stage, which divides the bubble by `num_chunks`."""

from __future__ import annotations

import itertools

from isthmus.schedule.add_communication import add_communication, require_counts
from isthmus.schedule.operation import Operation, Schedule


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int = 2, receive_ahead: int = 1) -> Schedule:
    """Return the interleaved 1F1B schedule: `num_chunks` model chunks per stage, groups of `num_stages`.

    A group of micro-batches passes chunk 0, then chunk 1, and so on; backwards pass in reverse. Micro-batches
    that do not fill a group join the first one, of size `g`. Stage `s` warms up with
    `2 (num_stages - s - 1) + (num_chunks - 1) g` forwards of a chunk. Communication overlaps computation
    (`add_communication`). Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters", SC 2021, section 2.2.
    """
    require_counts(num_stages, num_micro_batches, num_chunks)
    first = min(num_micro_batches, num_stages + num_micro_batches % num_stages)
    starts = [0, *range(first, num_micro_batches, num_stages)]
    groups = [range(a, b) for a, b in itertools.pairwise([*starts, num_micro_batches])]
    chunks = range(num_chunks)
    forwards = [(m, chunk) for group in groups for chunk in chunks for m in group]
    backwards = [(m, chunk) for group in groups for chunk in reversed(chunks) for m in group]
    total = len(forwards)
    stages = []
    for s in range(num_stages):
        warm_up = min(2 * (num_stages - s - 1) + (num_chunks - 1) * first, total)
        order = [Operation("forward", *one) for one in forwards[:warm_up]]
        for i in range(total - warm_up):
            order += [Operation("forward", *forwards[warm_up + i]), Operation("backward", *backwards[i])]
        order += [Operation("backward", *one) for one in backwards[total - warm_up :]]
        stages.append(tuple(order))
    return add_communication(
        Schedule("interleaved", num_micro_batches, tuple(stages), num_chunks=num_chunks), receive_ahead
    )

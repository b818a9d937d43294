"""`check_process_group`: the conformance kit for process groups of torch.distributed.

gloo, every vendor's library, the group over several clusters and the fakes pass it: collective x dtype x size x root x
split x asynchronous, each against the result of one process, and what happens when ranks disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isthmus.comm.group.check_collectives import ALL_DTYPES, check_collectives
from isthmus.comm.group.check_disagreement import check_disagreement
from isthmus.comm.group.check_messages import check_messages
from isthmus.comm.transport.check_transport import run_on_ranks

MakeGroups = Callable[[], Sequence[Any]]
"""Returns new groups, one per rank, of the same ranks."""

SplitGroup = Callable[[Any, Sequence[int]], Any]
"""Returns the part of a rank's group that has the given ranks, this one among them; they call it together."""


def check_process_group(
    groups: Sequence[Any],
    *,
    dtypes: Sequence[torch.dtype] = ALL_DTYPES,
    messages: bool = True,
    uneven: bool = True,
    device: str = "cpu",
    split: SplitGroup | None = None,
    make: MakeGroups | None = None,
) -> None:
    """Check that `groups` conform; `groups[r]` is rank `r` of one group of at least two ranks, in this process.

    `dtypes` are those that the group reduces. Leave out what a library does not have: point-to-point `messages`,
    tensors whose sizes are `uneven` between ranks. Collectives are of tensors on `device`. With `split`, parts of the
    group are checked as well; with `make`, ranks that disagree on shape, type, order or operation, or of which one does
    not call: each case on new groups, with a time-out of 20 s at most, which are ended by their `abort`. Raises
    `AssertionError` with the broken rule.
    """
    if messages:
        check_messages(groups)
    check_collectives(groups, dtypes, uneven=uneven, device=device)
    if split is not None:
        for ranks in _parts(len(groups)):
            check_collectives(_split_together(groups, ranks, split), dtypes[:1], uneven=uneven, device=device)
    if make is not None:
        check_disagreement(make)


def _parts(size: int) -> list[tuple[int, ...]]:
    """Return subsets of the ranks: the ends, all but the first, every second, each one alone."""
    found = [(0, size - 1), tuple(range(1, size)), tuple(range(0, size, 2)), *((rank,) for rank in range(size))]
    return sorted(set(found))


def _split_together(groups: Sequence[Any], ranks: Sequence[int], split: SplitGroup) -> list[Any]:
    return run_on_ranks([groups[rank] for rank in ranks], lambda group: split(group, ranks))

"""`pin_cores`: keeps the process of an engine on cores of its own.

Source: `long-sequence-rl.txt`, 2.2.4: a process that moves between cores and NUMA nodes loses what they have cached.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_MAX_LIST_BYTES = 1 << 16


def choose_cores(
    allowed: Collection[int], nodes: Sequence[Collection[int]], local_rank: int, num_ranks: int, threads: int
) -> frozenset[int]:
    """Return the cores for rank `local_rank` of the `num_ranks` of a machine, empty where it is better left alone.

    Each rank gets as many cores as another, all of one NUMA node where a node has enough (`nodes`: the cores of each).
    Where there are fewer cores than `threads` for each rank, none is pinned: they would have to share.
    """
    each = len(allowed) // num_ranks
    if each < threads or num_ranks < 1 or not 0 <= local_rank < num_ranks:
        return frozenset()
    known = [sorted(set(one) & set(allowed)) for one in nodes]
    parts = [one[at : at + each] for one in known for at in range(0, len(one) - each + 1, each)]
    if len(parts) < num_ranks:
        cores = sorted(allowed)
        parts = [cores[at : at + each] for at in range(0, len(cores) - each + 1, each)]
    return frozenset(parts[local_rank])


def pin_cores(local_rank: int, num_ranks: int, threads: int, nodes: Path = NODES) -> frozenset[int]:
    """Let this process and the threads that it starts run on the cores of its rank alone; return them."""
    if not hasattr(os, "sched_setaffinity"):
        return frozenset()
    chosen = choose_cores(os.sched_getaffinity(0), read_nodes(nodes), local_rank, num_ranks, threads)
    if chosen:
        with suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, chosen)
    return chosen


def read_nodes(folder: Path) -> list[frozenset[int]]:
    """Return the cores of each NUMA node of this machine, none where the kernel does not say."""
    found = []
    for file in sorted(folder.glob("node[0-9]*/cpulist")):
        with suppress(OSError, ValueError), file.open(encoding="ascii") as stream:
            found.append(_cores(stream.read(_MAX_LIST_BYTES)))
    return found


def _cores(text: str) -> frozenset[int]:
    """Return the cores of a list such as `0-3,8`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not 0 <= int(first) <= int(last or first) < 1 << 16:
            raise ValueError(f"cores {part}")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)

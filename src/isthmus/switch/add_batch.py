"""`split_adds`: the ADD packets of many datagrams as arrays, one `PacketArray` for each worker of a stream.

Parsing by arrays costs the same for one packet as for hundreds. What is not plainly well-formed is left to
`decode_runs`, which names what is wrong with it, so a batch accepts nothing that single packets do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from isthmus.switch.packet import (
    FIXED_BYTES,
    OVERHEAD_BYTES,
    PacketKind,
    PacketRun,
    decode_runs,
    is_genuine,
)

MIN_PACKETS = 4
"""Fewer packets of a worker are read one by one: arrays would cost more."""

MAX_SEGMENTS = 64
"""Packets that Linux sends by one system call (`UDP_MAX_SEGMENTS`)."""

_TAG_WORDS = 4
_MAGNITUDE, _PART, _INTEGERS = 9, 10, 12
"""Places in a packet, in words of 4 bytes."""


@dataclass(frozen=True)
class PacketArray:
    """Packets that are equal in all fields of `head` but these three; parts may be in any order."""

    head: PacketRun
    parts: list[int]
    """[num_packets]."""
    magnitudes: NDArray[np.uint32]
    """[num_packets], as bits."""
    integers: NDArray[np.int32]
    """[num_packets, integers per packet]."""

    def runs(self, slots: int, most: int) -> Iterator[PacketRun]:
        """Yield the packets as runs of at most `most` parts that follow each other, in one round of `slots`."""
        parts, most = self.parts, min(most, MAX_SEGMENTS)
        ends = [at for at in range(1, len(parts)) if parts[at] != parts[at - 1] + 1 or not parts[at] % slots]
        for first, last in pairwise([0, *ends, len(parts)]):
            for start in range(first, last, most):
                stop = min(start + most, last)
                yield self.head.with_parts(parts[start], self.magnitudes[start:stop], self.integers[start:stop])


def split_adds(
    datagrams: Iterable[tuple[bytes, int]], key_of: Callable[[int], bytes | None], max_part: int
) -> tuple[list[tuple[PacketArray, list[int]]], list[int]]:
    """Return the ADD packets of `datagrams` (data, bytes of a packet) by worker, and the numbers of the others.

    With each array come the numbers of its datagrams. Packets with equal heads keep their order; others may overtake
    them, as on a network. Parts are below `max_part`.
    """
    alike: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    data, rest = list[bytes](), list[int]()
    for number, (one, size) in enumerate(datagrams):
        data.append(one)
        if size < OVERHEAD_BYTES or size % 4 or len(one) % size or len(one) < size or one[3] != PacketKind.ADD:
            rest.append(number)
        else:
            alike[one[:FIXED_BYTES], size].append(number)
    found = []
    for (_, size), numbers in alike.items():
        total = sum(len(data[number]) for number in numbers)
        joined = b"".join([data[number] for number in numbers]) if total >= MIN_PACKETS * size else b""
        array = _read(joined, size, key_of, max_part) if joined else None
        if array is None:
            rest += numbers
        else:
            found.append((array, numbers))
    return found, sorted(rest)


def _read(data: bytes, size: int, key_of: Callable[[int], bytes | None], max_part: int) -> PacketArray | None:
    """Return the packets of `size` bytes in `data`, or None if they differ in their heads or one is not genuine."""
    fixed = data[:FIXED_BYTES]
    head = _read_head(fixed, size)
    key = None if head is None else key_of(head.job)
    if head is None or key is None or not all(data.startswith(fixed, at) for at in range(size, len(data), size)):
        return None
    words = np.frombuffer(data, "<u4").reshape(-1, size // 4)
    if not _all_genuine(data, words, size, key):
        return None
    parts = words[:, _PART : _PART + 2].copy().view("<u8")[:, 0].tolist()
    if max(parts) >= max_part:
        return None
    return PacketArray(head, parts, words[:, _MAGNITUDE], words[:, _INTEGERS:-_TAG_WORDS].view(np.int32))


@lru_cache(maxsize=4096)
def _read_head(fixed: bytes, size: int) -> PacketRun | None:
    """Return what packets of `size` bytes that begin with `fixed` have in common; None unless they are ADD packets."""
    runs = decode_runs(fixed + bytes(size - FIXED_BYTES), size, lambda _: b"", {})
    if len(runs) != 1 or runs[0].kind is not PacketKind.ADD:
        return None
    return runs[0].with_parts(0, runs[0].magnitudes[:0].copy(), runs[0].integers[:0].copy())  # free of the packet


def _all_genuine(data: bytes, words: NDArray[np.uint32], size: int, key: bytes) -> bool:
    if not key:
        return not words[:, -_TAG_WORDS:].any()
    return all(is_genuine(data[start : start + size], key) for start in range(0, len(data), size))

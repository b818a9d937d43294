"""`PacketRun`: packets between workers and a switch, read and written in runs of consecutive parts.

A packet is a header of 48 bytes, up to a slot's 32-bit integers, and a tag of 16 bytes, all little-endian. The tag is
keyed BLAKE2b over the rest: a packet that lacks the job's key is rejected. Packets of one system call that differ in
part, magnitude and integers only form a run, which is added as one array.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
MAX_INTEGERS = 340
"""Integers of the largest packet: with its headers it fits 1,500 bytes."""

MAX_WORKERS = 64
NO_WORKER = 0xFFFF
"""Sender of what a switch sends: a result is one packet for all workers."""

HEADER = struct.Struct("<HBBHHQQIIHHIQ")
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER.size + TAG_BYTES
_MAGIC = 0x5349
FIXED_BYTES = 36
"""Bytes of a header that are equal in all packets of a run."""


class PacketKind(IntEnum):
    """Kinds of packet: JOIN, ADD, PROBE and LEAVE are a worker's; the others are the switch's."""

    JOIN = 1
    CHALLENGE = 2
    WELCOME = 3
    REFUSED = 4
    ADD = 5
    PROBE = 6
    SUM = 7
    MISSING = 8
    PENDING = 9
    STALE = 10
    LEAVE = 11


_KIND_OF = {int(kind): kind for kind in PacketKind}


def _no_magnitudes() -> NDArray[np.uint32]:
    return np.zeros(1, np.uint32)


def _no_integers() -> NDArray[np.int32]:
    return np.zeros((1, 0), np.int32)


@dataclass(frozen=True, kw_only=True)
class PacketRun:
    """`len(magnitudes)` packets of parts `first_part`, `first_part + 1`, and so on, equal in all other fields."""

    kind: PacketKind
    job: int
    """Number of the job's name (`job_number`), 64 bits."""
    run: int
    """Run of the job, 64 bits: workers of an earlier run do not disturb a later one."""
    stream: int
    """The vector that the workers sum: each has slots of its own, 32 bits."""
    worker: int = NO_WORKER
    workers: int = 0
    incarnation: int = 0
    """Number of the lease of slots that the packet is for, 32 bits."""
    slots: int = 0
    """JOIN: slots asked for. WELCOME: slots granted. PROBE: its number, which MISSING repeats."""
    first_part: int = 0
    """First part; in JOIN and CHALLENGE the cookie; in REFUSED a `JoinRefusal`."""
    magnitudes: NDArray[np.uint32] = field(default_factory=_no_magnitudes)
    """[num_packets]: largest magnitude of the sender's next part in this slot, as bits; PENDING: workers seen."""
    integers: NDArray[np.int32] = field(default_factory=_no_integers)
    """[num_packets, integers per packet]."""

    @property
    def num_packets(self) -> int:
        """Number of packets."""
        return len(self.magnitudes)

    def part_of(self, start: int, stop: int) -> PacketRun:
        """Return packets `[start, stop)` as a run."""
        return self.with_parts(self.first_part + start, self.magnitudes[start:stop], self.integers[start:stop])

    def with_parts(self, first_part: int, magnitudes: NDArray[np.uint32], integers: NDArray[np.int32]) -> PacketRun:
        """Return a run that is equal but for its parts; much faster than `replace`."""
        made = object.__new__(PacketRun)
        made.__dict__.update(self.__dict__, first_part=first_part, magnitudes=magnitudes, integers=integers)
        return made


def encode_run(run: PacketRun, key: bytes) -> bytes:
    """Return the packets of `run`, one after the other, each of `packet_bytes(run)`; an empty `key` signs nothing."""
    num, count = run.integers.shape
    fixed = HEADER.pack(
        _MAGIC, VERSION, run.kind, run.worker, run.workers, run.job, run.run, run.stream, run.incarnation,
        count, run.slots, 0, 0,
    )  # fmt: skip
    if num == 1:
        head = fixed[:FIXED_BYTES] + struct.pack("<IQ", int(run.magnitudes[0]), run.first_part)
        return _signed(head + run.integers.tobytes(), key)
    records = np.empty(num, _record(count))
    records["fixed"] = np.frombuffer(fixed, np.uint8, FIXED_BYTES)
    records["magnitude"] = run.magnitudes
    records["part"] = np.arange(run.first_part, run.first_part + num, dtype=np.uint64)
    records["integers"] = run.integers
    records["tag"] = 0
    if key:
        data, size = records.tobytes(), records.itemsize
        return b"".join(_signed(data[start : start + size - TAG_BYTES], key) for start in range(0, num * size, size))
    return records.tobytes()


def packet_bytes(run: PacketRun) -> int:
    """Return the size of each packet of `run`."""
    return OVERHEAD_BYTES + 4 * int(run.integers.shape[1])


def decode_runs(
    data: bytes, size: int, key_of: Callable[[int], bytes | None], rejected: MutableMapping[str, int]
) -> list[PacketRun]:
    """Return the runs in `data`, packets of `size` bytes each, of which the last may be shorter.

    `key_of(job)` is the key of a job, None for an unknown one. Packets that are malformed, forged or of another
    version are left out and counted by reason in `rejected`.
    """
    runs: list[PacketRun] = []
    start, end = 0, len(data)
    while start < end:
        stop = min(start + max(size, 1), end)
        problem = _problem(data, start, stop, key_of)
        if problem:
            rejected[problem] = rejected.get(problem, 0) + 1
            start = stop
            continue
        num = _run_length(data, start, size, end)
        run, valid = _read(data, start, stop - start, num, key_of)
        if run is not None:
            runs.append(run)
        if valid < num:
            rejected["forged"] = rejected.get("forged", 0) + 1
        start += min(valid + 1, num) * (stop - start)
    return runs


def _problem(data: bytes, start: int, stop: int, key_of: Callable[[int], bytes | None]) -> str:
    """Return why the packet `data[start:stop]` is rejected before its tag is checked, or ""."""
    length = stop - start
    if length < OVERHEAD_BYTES:
        return "truncated"
    magic, version, kind, worker, workers, job, _, _, _, count, _, _, _ = HEADER.unpack_from(data, start)
    if magic != _MAGIC or kind not in _KIND_OF:
        return "malformed"
    if version != VERSION:
        return "version"
    if length < OVERHEAD_BYTES + 4 * count:
        return "truncated"
    if count > MAX_INTEGERS or length > OVERHEAD_BYTES + 4 * count:
        return "oversized"
    if workers > MAX_WORKERS or (worker != NO_WORKER and worker >= workers):
        return "malformed"
    return "" if key_of(job) is not None else "unknown job"


def _run_length(data: bytes, start: int, size: int, end: int) -> int:
    """Return how many packets at `start`, of `size` each, form a run: consecutive parts, otherwise equal."""
    most = (end - start) // size if size else 1
    if most <= 1:
        return 1
    prefix = data[start : start + FIXED_BYTES]
    (part,) = _PART.unpack_from(data, start + _PART_PLACE)
    num = 1
    for place in range(start + size, start + most * size, size):
        if not data.startswith(prefix, place) or _PART.unpack_from(data, place + _PART_PLACE)[0] != part + num:
            break
        num += 1
    return num


def _read(
    data: bytes, start: int, size: int, num: int, key_of: Callable[[int], bytes | None]
) -> tuple[PacketRun | None, int]:
    """Return the run of `num` packets at `start` as far as it is genuine, and the number of its packets."""
    _, _, kind, worker, workers, job, run, stream, incarnation, count, slots, _, part = HEADER.unpack_from(data, start)
    key = key_of(job) or b""
    records = np.frombuffer(data, _record(count), num, start)
    valid = num
    if key or records["tag"].any():
        valid = 0
        while valid < num and is_genuine(data[start + valid * size : start + (valid + 1) * size], key):
            valid += 1
    if not valid:
        return None, 0
    records = records[:valid]
    made = PacketRun(
        kind=_KIND_OF[kind], job=job, run=run, stream=stream, worker=worker, workers=workers,
        incarnation=incarnation, slots=slots, first_part=part,
        magnitudes=records["magnitude"], integers=records["integers"],
    )  # fmt: skip
    return made, valid


def is_genuine(packet: bytes, key: bytes) -> bool:
    """Return whether the tag of `packet` is that of `key`."""
    return hmac.compare_digest(packet[-TAG_BYTES:], _tag(packet[:-TAG_BYTES], key))


def _signed(packet: bytes, key: bytes) -> bytes:
    return packet + _tag(packet, key)


def _tag(packet: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(packet, digest_size=TAG_BYTES, key=key).digest() if key else _NO_TAG


_NO_TAG = bytes(TAG_BYTES)
_PART = struct.Struct("<Q")
_PART_PLACE = 40


@lru_cache(maxsize=MAX_INTEGERS + 1)
def _record(count: int) -> np.dtype[Any]:
    """Return the type of one packet of `count` integers."""
    return np.dtype([
        ("fixed", "u1", (FIXED_BYTES,)), ("magnitude", "<u4"), ("part", "<u8"),
        ("integers", "<i4", (count,)), ("tag", "u1", (TAG_BYTES,)),
    ])  # fmt: skip

"""`SlotPool`: the switch as a pure function of packets and time: it sums parts in slots and returns what to send.

Source: algorithm 2 of the PASSING paper (section 4.2), read as follows. A slot has two versions, so that a result can
be sent again while the next part is summed, and its bitmap is looked at before anything is added.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from isthmus.core.errors import InputError
from isthmus.core.messages.datagram import Address, Datagram
from isthmus.switch.add_batch import split_adds
from isthmus.switch.packet import (
    MAX_INTEGERS,
    NO_WORKER,
    PacketKind,
    PacketRun,
    decode_runs,
    encode_run,
    packet_bytes,
)

MAX_STREAMS = 4096
"""Vectors that share a switch at a time."""

MAX_PART = 2**62
"""Numbers of parts are below this value."""

COOKIE_LIFE_S = 30.0
"""A JOIN is valid for one to two of these periods, from the address that asked for its cookie only."""


class JoinRefusal(IntEnum):
    """Why a JOIN was refused."""

    FULL = 1
    MISMATCH = 2
    TOO_LARGE = 3


@dataclass
class _Lease:
    """Slots `[first, first + slots)` of one stream, until no packet of it has been added for a while."""

    first: int
    slots: int
    workers: int
    num_integers: int
    used_s: float
    incarnation: int
    addresses: dict[int, Address] = field(default_factory=dict)


MAX_SENT_BYTES = 2**16 - 1024
"""What one system call sends at most."""

_StreamKey = tuple[int, int, int]
"""Job, run and stream."""


class SlotPool:
    """`num_slots` slots of `slot_integers` 32-bit integers, lent to streams of jobs.

    `keys` has the key of each job's number; None accepts every job without tags, which is for loopback only.
    Leases are numbered from `incarnation` on, a random number of 32 bits, so packets for an earlier lease, or an
    earlier start of the switch, are answered as stale. `secret` signs cookies, which prove addresses. Slots of a
    stream are freed when a worker leaves, or `lease_s` after the last packet that was added. Memory is bounded by
    `num_slots` and `MAX_STREAMS`.
    """

    def __init__(
        self,
        num_slots: int,
        slot_integers: int,
        *,
        keys: Mapping[int, bytes] | None,
        incarnation: int,
        secret: bytes,
        lease_s: float = 120.0,
    ) -> None:
        if num_slots < 1 or not 1 <= slot_integers <= MAX_INTEGERS:
            raise InputError(
                f"a switch of {num_slots} slots of {slot_integers} integers",
                hint=f"at least one slot, and 1 to {MAX_INTEGERS} integers each",
            )
        self.num_slots, self.slot_integers, self.lease_s = num_slots, slot_integers, lease_s
        self._incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._keys, self._secret = keys, secret
        self._leases: dict[_StreamKey, _Lease] = {}
        self._sums = np.zeros((2, num_slots, slot_integers), np.int32)
        self._magnitudes = np.zeros((2, num_slots), np.uint32)
        self._parts = [[-1] * num_slots for _ in range(2)]
        self._bitmaps = [[0] * num_slots for _ in range(2)]
        self._counts = [[0] * num_slots for _ in range(2)]
        self._expiry_s = 0.0

    def handle(self, packets: Datagram, now_s: float) -> list[Datagram]:
        """Return what to send for received `packets`; malformed and forged ones are counted and dropped."""
        if now_s >= self._expiry_s:
            self._expire(now_s)
        replies: list[Datagram] = []
        runs = decode_runs(packets.data, packets.packet_bytes, self._key_of, self.rejected)
        for run in runs:
            self.counters["packets"] += run.num_packets
            if run.worker == NO_WORKER or (run.kind is not PacketKind.JOIN and run.first_part >= MAX_PART):
                self.rejected["malformed"] += run.num_packets
            elif run.kind is PacketKind.ADD:
                replies += self._add(run, packets.address, now_s)
            elif run.kind in _SINGLE:
                for place in range(run.num_packets):
                    replies += self._handle_single(run.part_of(place, place + 1), packets.address, now_s)
            else:
                self.rejected["malformed"] += run.num_packets
        return replies

    def handle_all(self, datagrams: Sequence[Datagram], now_s: float) -> list[Datagram]:
        """Return what to send for `datagrams`: as `handle` for each of them, in an order that a network may bring.

        ADD packets are read by arrays, and parts of a worker that follow each other are added at once, also where they
        came in many datagrams.
        """
        if now_s >= self._expiry_s:
            self._expire(now_s)
        arrays, rest = split_adds([(one.data, one.packet_bytes) for one in datagrams], self._key_of, MAX_PART)
        replies: list[Datagram] = []
        for array, numbers in arrays:
            lease = self._lease_of(array.head)
            if lease is None or array.integers.shape[1] not in (0, lease.num_integers):
                rest += numbers
                continue
            self.counters["packets"] += len(array.parts)
            for run in array.runs(lease.slots, max(MAX_SENT_BYTES // packet_bytes(array.head), 1)):
                replies += self._add_run(lease, run, now_s)
        for number in sorted(rest):
            replies += self.handle(datagrams[number], now_s)
        return replies

    def statistics(self) -> dict[str, object]:
        """Return the counters, and what is in use."""
        used = sum(lease.slots for lease in self._leases.values())
        return {
            "packets": self.counters["packets"],
            "added": self.counters["added"],
            "results": self.counters["results"],
            "duplicates": self.counters["duplicates"],
            "probes": self.counters["probes"],
            "stale": self.counters["stale"],
            "refused": self.counters["refused"],
            "expired_streams": self.counters["expired"],
            "rejected": {reason: num for reason, num in sorted(self.rejected.items()) if num},
            "streams": len(self._leases),
            "jobs": len({job for job, _, _ in self._leases}),
            "slots": self.num_slots,
            "slots_used": used,
        }

    def check(self) -> None:
        """Raise `AssertionError` unless leases are disjoint and bitmaps have only bits of the streams' workers."""
        ranges = sorted((lease.first, lease.first + lease.slots, lease.workers) for lease in self._leases.values())
        last = 0
        for first, stop, workers in ranges:
            if first < last or stop > self.num_slots:
                raise AssertionError(f"leases overlap: {ranges}")
            if any(bits >> workers for version in self._bitmaps for bits in version[first:stop]):
                raise AssertionError("a bitmap has a worker that its stream lacks")
            last = stop

    def _key_of(self, job: int) -> bytes | None:
        return b"" if self._keys is None else self._keys.get(job)

    def _handle_single(self, run: PacketRun, source: Address, now_s: float) -> list[Datagram]:
        if run.kind is PacketKind.JOIN:
            return self._join(run, source, now_s)
        lease = self._lease_of(run)
        if lease is None:
            self.counters["stale"] += 1
            return [] if run.kind is PacketKind.LEAVE else [self._reply(run, source, PacketKind.STALE)]
        if run.kind is PacketKind.LEAVE:
            self._free((run.job, run.run, run.stream))
            return []
        return self._probe(lease, run)

    def _lease_of(self, run: PacketRun) -> _Lease | None:
        """Return the stream's lease, if the packet is for this very lease and fits it."""
        lease = self._leases.get((run.job, run.run, run.stream))
        if lease is None or run.incarnation != lease.incarnation:
            return None
        return lease if run.workers == lease.workers and run.worker < lease.workers else None

    # --- joining and leaving

    def _join(self, run: PacketRun, source: Address, now_s: float) -> list[Datagram]:
        """Answer a JOIN: a cookie first; slots to one that returns the cookie, whose address is thereby proven."""
        key = (run.job, run.run, run.stream)
        period = int(now_s // COOKIE_LIFE_S)
        if run.first_part not in (self._cookie(run, source, period), self._cookie(run, source, period - 1)):
            return [self._reply(run, source, PacketKind.CHALLENGE, part=self._cookie(run, source, period))]
        lease, asked = self._leases.get(key), run.integers.shape[1]
        if lease is None:
            problem = JoinRefusal.TOO_LARGE if asked > self.slot_integers else None
            first, slots = (0, 0) if problem else self._find_slots(max(run.slots, 1))
            if problem is None and (not slots or len(self._leases) >= MAX_STREAMS or run.workers < 1):
                problem = JoinRefusal.FULL
            if problem is not None:
                self.counters["refused"] += 1
                return [self._reply(run, source, PacketKind.REFUSED, part=problem)]
            self._incarnation = (self._incarnation + 1) % 2**32
            lease = self._leases[key] = _Lease(first, slots, run.workers, asked, now_s, self._incarnation)
            for version in range(2):
                stop = first + slots
                self._parts[version][first:stop] = [-1] * slots
                self._bitmaps[version][first:stop] = self._counts[version][first:stop] = [0] * slots
        elif (lease.workers, lease.num_integers) != (run.workers, asked) or run.worker >= lease.workers:
            self.counters["refused"] += 1
            return [self._reply(run, source, PacketKind.REFUSED, part=JoinRefusal.MISMATCH)]
        lease.used_s = now_s
        lease.addresses[run.worker] = source
        welcome = replace(run, incarnation=lease.incarnation)
        return [self._reply(welcome, source, PacketKind.WELCOME, slots=lease.slots)]

    def _cookie(self, run: PacketRun, source: Address, period: int) -> int:
        text = f"{source}|{run.job}|{run.run}|{run.stream}|{run.worker}|{run.workers}|{period}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._secret).digest(), "little") | 1

    def _find_slots(self, wanted: int) -> tuple[int, int]:
        """Return first slot and number of the smallest free range of `wanted` slots, else of the largest one."""
        taken = sorted((lease.first, lease.first + lease.slots) for lease in self._leases.values())
        free, last = list[tuple[int, int]](), 0
        for first, stop in [*taken, (self.num_slots, self.num_slots)]:
            if first > last:
                free.append((last, first - last))
            last = stop
        enough = [one for one in free if one[1] >= wanted]
        first, num = (
            min(enough, key=lambda one: one[1]) if enough else max(free, key=lambda one: one[1], default=(0, 0))
        )
        return first, min(num, wanted)

    def _expire(self, now_s: float) -> None:
        """Free the slots of streams that are gone."""
        for key in [key for key, lease in self._leases.items() if lease.used_s + self.lease_s <= now_s]:
            self._free(key)
            self.counters["expired"] += 1
        self._expiry_s = now_s + self.lease_s / 8

    def _free(self, key: _StreamKey) -> None:
        del self._leases[key]

    # --- adding

    def _add(self, run: PacketRun, source: Address, now_s: float) -> list[Datagram]:
        lease = self._lease_of(run)
        if lease is None:
            self.counters["stale"] += run.num_packets
            return [self._reply(run, source, PacketKind.STALE)]
        if run.integers.shape[1] not in (0, lease.num_integers):
            self.rejected["malformed"] += run.num_packets
            return []
        before_end = lease.slots - run.first_part % lease.slots
        if run.num_packets > before_end:
            return [
                *self._add_run(lease, run.part_of(0, before_end), now_s),
                *self._add(run.part_of(before_end, run.num_packets), source, now_s),
            ]
        return self._add_run(lease, run, now_s)

    def _add_run(self, lease: _Lease, run: PacketRun, now_s: float) -> list[Datagram]:
        """Add a run of parts whose slots follow each other: at once if they are in one state, else one by one."""
        num, count = run.integers.shape
        place = run.first_part % lease.slots
        version = run.first_part // lease.slots & 1
        start, stop = lease.first + place, lease.first + place + num
        parts = list(range(run.first_part, run.first_part + num))
        held, bitmaps = self._parts[version][start:stop], self._bitmaps[version][start:stop]
        bit = 1 << run.worker
        if held == parts:
            bits = bitmaps[0]
            if bits & bit or bitmaps != [bits] * num or self._counts[version][start:stop] != [count] * num:
                return self._add_singly(lease, run, now_s)
            self._sums[version, start:stop, :count] += run.integers
            magnitudes = self._magnitudes[version, start:stop]
            np.maximum(magnitudes, run.magnitudes, out=magnitudes)
            bits |= bit
        elif max(held) < run.first_part:
            self._parts[version][start:stop], self._counts[version][start:stop] = parts, [count] * num
            self._sums[version, start:stop, :count] = run.integers
            self._magnitudes[version, start:stop] = run.magnitudes
            bits = bit
        else:
            return self._add_singly(lease, run, now_s)
        self._bitmaps[version][start:stop] = [bits] * num
        lease.used_s = now_s
        self.counters["added"] += num
        return self._results(lease, run, version, start) if bits == (1 << lease.workers) - 1 else []

    def _add_singly(self, lease: _Lease, run: PacketRun, now_s: float) -> list[Datagram]:
        if run.num_packets > 1:
            return [
                datagram
                for place in range(run.num_packets)
                for datagram in self._add_run(lease, run.part_of(place, place + 1), now_s)
            ]
        self.counters["duplicates"] += 1
        return self._state_of(lease, run, is_probe=False)

    def _probe(self, lease: _Lease, run: PacketRun) -> list[Datagram]:
        self.counters["probes"] += 1
        return self._state_of(lease, run, is_probe=True)

    def _state_of(self, lease: _Lease, run: PacketRun, *, is_probe: bool) -> list[Datagram]:
        """Tell the worker what is held of one part: its result, that it is pending, or that its packet is missing."""
        version, slot = run.first_part // lease.slots & 1, lease.first + run.first_part % lease.slots
        address = lease.addresses.get(run.worker)
        held, bits = self._parts[version][slot], self._bitmaps[version][slot]
        if address is None or held > run.first_part:
            return []  # of a part that all workers have the result of
        if held < run.first_part or not bits >> run.worker & 1:
            return [self._reply(run, address, PacketKind.MISSING, slots=run.slots)] if is_probe else []
        if bits == (1 << lease.workers) - 1:
            return [self._result(lease, run, version, slot, 1, address)]
        return [self._reply(run, address, PacketKind.PENDING, seen=bits & 0xFFFF_FFFF)]

    # --- what is sent

    def _results(self, lease: _Lease, run: PacketRun, version: int, start: int) -> list[Datagram]:
        self.counters["results"] += run.num_packets
        datagram = self._result(lease, run, version, start, run.num_packets, ("", 0))
        return [Datagram(address, datagram.data, datagram.packet_bytes) for address in lease.addresses.values()]

    def _result(self, lease: _Lease, run: PacketRun, version: int, start: int, num: int, address: Address) -> Datagram:
        count = self._counts[version][start]
        made = PacketRun(
            kind=PacketKind.SUM, job=run.job, run=run.run, stream=run.stream, workers=lease.workers,
            incarnation=lease.incarnation, first_part=run.first_part,
            magnitudes=self._magnitudes[version, start : start + num],
            integers=self._sums[version, start : start + num, :count],
        )  # fmt: skip
        return Datagram(address, encode_run(made, self._key_of(run.job) or b""), packet_bytes(made))

    def _reply(
        self,
        run: PacketRun,
        address: Address,
        kind: PacketKind,
        *,
        part: int | None = None,
        slots: int = 0,
        seen: int = 0,
    ) -> Datagram:
        """Return a packet without integers: an answer is never longer than its request."""
        made = PacketRun(
            kind=kind, job=run.job, run=run.run, stream=run.stream, workers=run.workers,
            incarnation=run.incarnation, slots=slots, first_part=run.first_part if part is None else part,
            magnitudes=np.array([seen], np.uint32),
        )  # fmt: skip
        return Datagram(address, encode_run(made, self._key_of(run.job) or b""), packet_bytes(made))


_SINGLE = frozenset({PacketKind.JOIN, PacketKind.PROBE, PacketKind.LEAVE})

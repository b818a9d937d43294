"""Rules of `SlotPool.handle_all`: many datagrams at once are what they are one by one, and sums stay exact."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.messages.datagram import Datagram
from isthmus.core.messages.switch_keys import job_number
from isthmus.switch import (
    ClientState,
    FixedPoint,
    Received,
    SlotPool,
    Start,
    StreamSettings,
    SwitchClient,
    Timer,
    magnitude_bits,
)
from isthmus.switch.packet import PacketKind, PacketRun, decode_runs, encode_run, packet_bytes

JOB, SLOTS, COUNT = job_number("job"), 16, 5


def joined_pool(workers: int, key: bytes) -> tuple[SlotPool, int]:
    """Return a pool that `workers` have joined, and the number of their lease."""
    pool = SlotPool(SLOTS, 8, keys={JOB: key} if key else None, incarnation=3, secret=b"s")
    for worker in range(workers):
        join = PacketRun(
            kind=PacketKind.JOIN, job=JOB, run=1, stream=2, worker=worker, workers=workers, slots=SLOTS,
            integers=np.zeros((1, COUNT), np.int32),
        )  # fmt: skip
        for _ in range(2):
            (reply,) = pool.handle(Datagram(("host", worker), encode_run(join, key), packet_bytes(join)), 0.0)
            (found,) = decode_runs(reply.data, reply.packet_bytes, lambda _: key, {})
            join = replace(join, first_part=found.first_part)
    assert found.kind is PacketKind.WELCOME
    return pool, found.incarnation


def packets_of(replies: list[Datagram]) -> Counter[tuple[object, bytes]]:
    """Return the packets of datagrams: how they are cut is left to the pool."""
    return Counter(
        (one.address, one.data[start : start + one.packet_bytes])
        for one in replies
        for start in range(0, len(one.data), one.packet_bytes)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([b"", b"k" * 32]), st.integers(0, 3))
def test_a_batch_is_what_its_datagrams_are_one_by_one(seed: int, workers: int, key: bytes, first_round: int) -> None:
    """One round of parts, in any cuts and orders, doubled, forged, truncated: equal results and counters."""
    numbers, values = random.Random(seed), np.random.default_rng(seed)
    (one, incarnation), (other, _) = joined_pool(workers, key), joined_pool(workers, key)
    table, datagrams = values.integers(-9, 9, (workers, SLOTS, COUNT)).astype(np.int32), []
    for _ in range(numbers.randint(1, 12)):
        num, worker = numbers.randint(1, SLOTS), numbers.randrange(workers)
        start = numbers.randint(0, SLOTS - num)
        run = PacketRun(
            kind=numbers.choice([PacketKind.ADD] * 6 + [PacketKind.PROBE, PacketKind.SUM]), job=JOB, run=1, stream=2,
            worker=worker, workers=workers,
            incarnation=incarnation + (numbers.random() < 0.1),
            first_part=first_round * SLOTS + start,
            magnitudes=np.full(num, 7, np.uint32),
            integers=table[worker, start : start + num],
        )  # fmt: skip
        data = bytearray(encode_run(run, b"x" * 32 if numbers.random() < 0.1 else key))
        if key and numbers.random() < 0.15:
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        if numbers.random() < 0.1:
            del data[numbers.randrange(len(data)) :]
        datagrams.append(Datagram(("host", run.worker), bytes(data), packet_bytes(run)))
        if numbers.random() < 0.2:
            datagrams.append(datagrams[-1])
    singly = [reply for datagram in _by_worker(datagrams) for reply in one.handle(datagram, 1.0)]
    at_once = other.handle_all(_by_worker(datagrams), 1.0)
    assert {kind: num for kind, num in other.rejected.items() if num} == {k: n for k, n in one.rejected.items() if n}
    assert {kind: other.counters[kind] for kind in ("packets", "added", "results", "stale")} == {
        kind: one.counters[kind] for kind in ("packets", "added", "results", "stale")
    }
    assert {of for of in packets_of(singly) if of[1][3] == PacketKind.SUM} == {
        of for of in packets_of(at_once) if of[1][3] == PacketKind.SUM
    }
    other.check()


def _by_worker(datagrams: list[Datagram]) -> list[Datagram]:
    """Return them with the kinds that change nothing behind: a batch answers these last."""
    return sorted(datagrams, key=lambda one: (len(one.data) < 4 or one.data[3] != PacketKind.ADD, one.address[1]))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 90), st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([b"", b"k" * 32]),
)  # fmt: skip
def test_sums_by_batches_are_exact_whatever_is_lost_doubled_or_reordered(
    seed: int, workers: int, num_parts: int, loss: float, key: bytes
) -> None:
    """Clients send until they are done; the pool gets all that arrives in a tick as one batch, in any order."""
    numbers = random.Random(seed)
    pool = SlotPool(SLOTS, COUNT, keys={JOB: key} if key else None, incarnation=1, secret=b"s")
    values = np.random.default_rng(seed).normal(size=(workers, num_parts, COUNT)).astype(np.float32)
    clients = [
        SwitchClient(StreamSettings(job=JOB, run=1, stream=0, worker=worker, workers=workers, key=key, slots=SLOTS,
                                    part_integers=COUNT, silence_s=1e9))
        for worker in range(workers)
    ]  # fmt: skip

    def lossy(data: bytes, size: int, address: tuple[str, int]) -> list[Datagram]:
        cut = numbers.choice([1, 3, 8]) * size
        pieces = [Datagram(address, data[start : start + cut], size) for start in range(0, len(data), cut)]
        return [one for one in pieces for _ in range(2 if numbers.random() < loss else 1) if numbers.random() >= loss]

    sent: list[Datagram] = []
    for worker, client in enumerate(clients):
        made = client.handle(Start(values[worker], magnitude_bits(values[worker])), 0.0)
        sent += [one for data, size in made.send for one in lossy(data, size, ("host", worker))]
    now_s = 0.0
    while not all(client.state is ClientState.DONE for client in clients):
        now_s += 0.05
        assert now_s < 500, [client.state for client in clients]
        numbers.shuffle(sent)
        replies, sent = pool.handle_all(sent, now_s), []
        pool.check()
        for reply in replies:
            for one in lossy(reply.data, reply.packet_bytes, reply.address):
                made = clients[reply.address[1]].handle(Received(one.data, one.packet_bytes), now_s)
                sent += [got for data, size in made.send for got in lossy(data, size, reply.address)]
        for worker, client in enumerate(clients):
            made = client.handle(Timer(), now_s)
            sent += [got for data, size in made.send for got in lossy(data, size, ("host", worker))]
    point = FixedPoint(workers)
    scales = point.scales(np.max([magnitude_bits(one) for one in values], axis=0))
    wanted = np.sum([point.to_integers(one, scales).astype(np.int64) for one in values], axis=0)
    assert all(np.array_equal(client.sums, wanted) for client in clients)
    assert not any(pool.rejected.values())

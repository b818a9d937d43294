"""How many packets a switch handles in a CPU second: the switch in a process of its own, fed over loopback.

Beside it the bound of the interpreter: a loop that does for each datagram of eight packets what no switch in Python can
leave out, and takes for granted what ours checks.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection

import numpy as np

from isthmus.core.messages.datagram import Datagram
from isthmus.switch import (
    Received,
    SlotPool,
    Start,
    StreamSettings,
    SwitchClient,
    Timer,
    job_number,
    magnitude_bits,
    serve_switch,
)
from isthmus.switch.packet import PacketKind, PacketRun, encode_run, packet_bytes
from isthmus.wan import UdpSocket

INTEGERS = 256
SLOTS = 128
WORKERS = 2
JOB = job_number("rate")


Serve = Callable[[SlotPool, UdpSocket, Callable[[], bool]], int]
"""Serves until it shall stop, and returns how many packets it has taken."""


def serve_ours(pool: SlotPool, udp: UdpSocket, should_stop: Callable[[], bool]) -> int:
    """Serve as `isthmus switch` does."""
    before = pool.counters["packets"]
    serve_switch(pool, udp, time.monotonic, should_stop)
    return pool.counters["packets"] - before


def serve_bare(pool: SlotPool, udp: UdpSocket, should_stop: Callable[[], bool]) -> int:
    """Receive, find the lease, look at the bitmap, add, and answer batches of `_BATCH` with a result; nothing else.

    Each datagram is one batch, every batch begins at a multiple of `_BATCH`, and nothing is lost or malformed.
    """
    del pool
    sock, words = socket.socket(fileno=udp.fileno()), (packet_bytes(_empty_run()) + 4 * INTEGERS) // 4
    sums = np.zeros((SLOTS // _BATCH, _BATCH, INTEGERS), np.int32)
    out = np.zeros((_BATCH, words), "<u4")
    split = [(socket.IPPROTO_UDP, 103, struct.pack("H", 4 * words))]
    bitmaps, held = [0] * len(sums), [-1] * len(sums)
    leases: dict[bytes, tuple[int, tuple[str, int]]] = {}
    num_packets, space = 0, socket.CMSG_SPACE(4)
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while not should_stop():
            selector.select(0.25)
            while True:
                try:
                    data, _, _, address = sock.recvmsg(2**16, space)
                except BlockingIOError:
                    break
                lease = leases.get(data[:36])
                if lease is None:
                    lease = leases[data[:36]] = 1 << len(leases), address
                part = int.from_bytes(data[40:48], "little")
                place = part // _BATCH % len(sums)
                integers = np.frombuffer(data, "<i4").reshape(_BATCH, words)[:, 12:-4]
                num_packets += _BATCH
                if held[place] == part and not bitmaps[place] & lease[0]:
                    bitmaps[place] |= lease[0]
                    sums[place] += integers
                elif held[place] < part:
                    held[place], bitmaps[place] = part, lease[0]
                    sums[place] = integers
                if bitmaps[place] == (1 << WORKERS) - 1:
                    out[:, 12:-4] = sums[place].view("<u4")
                    result = out.tobytes()
                    for _, target in leases.values():
                        sock.sendmsg([result], split, 0, target)
    sock.detach()
    return num_packets


_BATCH = 8


def _empty_run() -> PacketRun:
    return PacketRun(kind=PacketKind.ADD, job=0, run=0, stream=0)


def packets_per_cpu_s(batch: int, key: bytes, rounds: int, serve: Serve = serve_ours) -> float:
    """Return the packets that a switch takes in a CPU second (user and system), `batch` of them a system call.

    Two workers fill all slots in each round and wait for the results, which the switch sends to both.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, key, batch > 1, serve))
    process.start()
    try:
        address = near.recv()
        with closing(UdpSocket(batches=batch > 1)) as first, closing(UdpSocket(batches=batch > 1)) as second:
            workers = [_joined(worker, udp, address, key) for worker, udp in enumerate((first, second))]
            near.send("begin")
            near.recv()
            for number in range(1, rounds + 1):
                _round(workers, address, number, batch, key)
            near.send("end")
            packets, cpu_s = near.recv()
    finally:
        process.join(30)
        process.kill()
    return float(packets) / float(cpu_s)


def _serve(pipe: Connection, key: bytes, batches: bool, serve: Serve) -> None:
    keys = {JOB: key} if key else None
    pool = SlotPool(SLOTS, INTEGERS, keys=keys, incarnation=1, secret=b"s")
    with closing(UdpSocket(batches=batches)) as udp:
        pipe.send(udp.address)
        serve_switch(pool, udp, time.monotonic, pipe.poll)
        pipe.recv()
        cpu_s = time.process_time()
        pipe.send("begun")
        packets = serve(pool, udp, pipe.poll)
        pipe.send((packets, time.process_time() - cpu_s))


def _joined(worker: int, udp: UdpSocket, address: tuple[str, int], key: bytes) -> tuple[UdpSocket, PacketRun]:
    """Join the stream; return the socket and what to send."""
    settings = StreamSettings(
        job=JOB, run=1, stream=0, worker=worker, workers=WORKERS, key=key, slots=SLOTS, part_integers=INTEGERS,
        silence_s=20.0,
    )  # fmt: skip
    client = SwitchClient(settings)
    parts = np.ones((1, INTEGERS), np.float32)
    made, end_s = client.handle(Start(parts, magnitude_bits(parts)), time.monotonic()), time.monotonic() + 20.0
    while not client.slots and time.monotonic() < end_s:
        for data, size in made.send:
            udp.send(Datagram(address, data, size))
        time.sleep(0.01)
        made = client.handle(Timer(), time.monotonic())
        for one in udp.receive():
            made.send += client.handle(Received(one.data, one.packet_bytes), time.monotonic()).send
    if not client.slots:
        raise ValueError(f"the switch gave no slots: {client.failure}")
    data, _ = client.leave()
    run = PacketRun(
        kind=PacketKind.ADD, job=JOB, run=1, stream=0, worker=worker, workers=WORKERS, incarnation=_incarnation(data)
    )  # fmt: skip
    return udp, run


def _incarnation(packet: bytes) -> int:
    return int.from_bytes(packet[28:32], "little")


def _round(
    workers: list[tuple[UdpSocket, PacketRun]], address: tuple[str, int], number: int, batch: int, key: bytes
) -> None:
    """Fill all slots from both workers, and take the results of both."""
    integers = np.ones((batch, INTEGERS), np.int32)
    bits = np.zeros(batch, np.uint32)
    for udp, run in workers:
        for place in range(0, SLOTS, batch):
            made = PacketRun(
                kind=run.kind, job=run.job, run=run.run, stream=run.stream, worker=run.worker, workers=run.workers,
                incarnation=run.incarnation, first_part=(number + 8) * SLOTS + place,
                magnitudes=bits, integers=integers,
            )  # fmt: skip
            udp.send(Datagram(address, encode_run(made, key), packet_bytes(made)))
    end_s = time.monotonic() + 2.0
    for udp, _ in workers:
        got = 0
        while got < SLOTS and time.monotonic() < end_s:
            for one in udp.receive():
                got += -(-len(one.data) // one.packet_bytes)

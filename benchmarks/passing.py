"""What PASSING sends and how fast a switch sums: `python -m benchmarks.passing [--json] [--quick]`.

4 hosts of 4 workers sum M bytes of fp32 each, through a real switch over UDP on loopback; bytes are payload, counted at
the sockets of each host (integers of packets, and messages between workers of different hosts). SwitchML has the same
switch and workers, but no sum inside hosts: each worker is a host of its own there, and four of them share a network
card. Bytes of the other strategies follow from their steps, which the checker proves. Losses are injected at the
workers' sockets, in both directions, by a seed. Packets are 256 integers of 4 bytes; the CPU seconds are those of the
switch's process, user and system.

`--only bytes`, `exact`, `rate`, `time` and `step` print one part. `time` and `step` need root: hosts are network
namespaces with shaped links (`benchmarks/_passing_time.py` says what stands for what), and a row says where they are
skipped. Parameter servers are played by ranks there, so their bytes add to those of a host. What binds is the link of a
host, in one direction.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import torch

from benchmarks._passing_time import step_rows, time_rows
from benchmarks._switch_rate import packets_per_cpu_s, serve_bare
from benchmarks.table import Row, compared, print_rows
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.passing.passing_sums import PassingOptions, PassingSums
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.messages.datagram import Datagram
from isthmus.strategies import count_elements, steps
from isthmus.switch import FixedPoint, SlotPool, magnitude_bits, serve_switch
from isthmus.switch.packet import OVERHEAD_BYTES, PacketKind
from isthmus.wan import UdpSocket

HOSTS, CHIPS = 4, 4
LOSSES = (0.0, 0.001, 0.01)
KEY = b"k" * 32
PEERS = ("ring", "hierarchical-ring", "2d-torus", "psring", "parameter-server", "switchml")


class CountingSocket(UdpSocket):
    """Counts the integers' bytes of packets, and loses, doubles and delays packets by a seed."""

    loss = 0.0
    disorder = 0.0

    def __init__(self, host: str, counts: Counter[str], seed: int) -> None:
        super().__init__(host)
        self._counts, self._random = counts, random.Random(seed)

    def send(self, datagram: Datagram) -> None:
        """Send what is not lost; all of it has left the worker."""
        self._counts["sent"] += _payload_bytes(datagram)
        for one in self._faulty(datagram):
            super().send(one)

    def receive(self) -> Iterator[Datagram]:
        """Yield what is not lost."""
        for datagram in super().receive():
            for one in self._faulty(datagram):
                self._counts["received"] += _payload_bytes(one)
                yield one

    def _faulty(self, datagram: Datagram) -> Iterator[Datagram]:
        if not self.loss and not self.disorder:
            yield datagram
            return
        for start in range(0, len(datagram.data), datagram.packet_bytes):
            packet = datagram.data[start : start + datagram.packet_bytes]
            if self._random.random() < self.loss:
                continue
            one = Datagram(datagram.address, packet, len(packet))
            if self._random.random() < self.disorder:
                yield one  # doubled
            yield one


def _payload_bytes(datagram: Datagram) -> int:
    """Return the bytes of integers of values: of ADD and SUM; all packets of a datagram are of one kind."""
    if datagram.data[3] not in (PacketKind.ADD, PacketKind.SUM):
        return 0
    num = -(-len(datagram.data) // datagram.packet_bytes)
    return len(datagram.data) - num * OVERHEAD_BYTES


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Serve a switch by a thread, and yield its address."""
    pool = SlotPool(4096, 256, keys=None, incarnation=1, secret=b"s")
    over = threading.Event()
    with closing(UdpSocket()) as udp:
        thread = threading.Thread(target=serve_switch, args=(pool, udp, time.monotonic, over.is_set))
        thread.start()
        try:
            yield udp.address
        finally:
            over.set()
            thread.join()


def passing_bytes(num_values: int, *, in_host: bool, loss: float, disorder: float = 0.0) -> tuple[float, float, bool]:
    """Return the largest bytes sent and received by a host over M, and whether all integers were exact and equal.

    Without `in_host` every worker sends all its values, as in SwitchML.
    """
    size = HOSTS * CHIPS
    clusters = [str(rank // CHIPS if in_host else rank) for rank in range(size)]
    counts = [Counter[str]() for _ in range(size)]
    numbers = np.random.default_rng(1)
    values = [numbers.normal(size=num_values).astype(np.float32) for _ in range(size)]
    transports = memory_transports(size)
    groups = [IsthmusGroup(one, clusters) for one in transports]
    methods = []
    with serving() as address:
        for rank, group in enumerate(groups):
            kind = type("Socket", (CountingSocket,), {"loss": loss, "disorder": disorder})
            options = PassingOptions(
                switches=(address,), slots=64, silence_s=60.0,
                open_socket=lambda host, rank=rank, kind=kind: kind(host, counts[rank], rank),
            )  # fmt: skip
            methods.append(PassingSums(group, options))
            group.use_method(methods[-1])

        def work(rank: int) -> torch.Tensor:
            tensor = torch.from_numpy(values[rank].copy())
            groups[rank].allreduce([tensor]).wait()
            return tensor

        with ThreadPoolExecutor(size) as threads:
            got = list(threads.map(work, range(size)))
        exact = _is_exact(values, methods, clusters) and all(torch.equal(one, got[0]) for one in got)
        without = any(one.worker is not None and one.worker.counters["parts_without_switch"] for one in methods)
        sent, received = [0] * HOSTS, [0] * HOSTS
        for rank, transport in enumerate(transports):
            sent[rank // CHIPS] += counts[rank]["sent"]
            received[rank // CHIPS] += counts[rank]["received"]
            for peer, traffic in transport.traffic().items():
                if peer // CHIPS != rank // CHIPS:
                    sent[rank // CHIPS] += traffic.sent_bytes
                    received[rank // CHIPS] += traffic.received_bytes
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(lambda group: group.close_with_error("over"), groups))
    if without:
        raise ValueError("the switch was left during the measurement: the machine is too busy")
    total = 4 * num_values
    return max(sent) / total, max(received) / total, exact


def _is_exact(values: Sequence[np.ndarray], methods: Sequence[PassingSums], clusters: Sequence[str]) -> bool:
    """Return whether the integers of all workers are those of one exact sum, worked out from each host's own sums."""
    names = sorted(set(clusters), key=int)
    shares = CHIPS if len(names) == HOSTS else 1
    length = -(-len(values[0]) // shares)
    for share in range(shares):
        spans = [sum_in_order([values[r][share * length :][:length] for r, c in enumerate(clusters) if c == name])
                 for name in names]  # fmt: skip
        parts = [np.pad(one, (0, -len(one) % 256)).reshape(-1, 256) for one in spans]
        point = FixedPoint(len(names))
        scales = point.scales(np.max([magnitude_bits(one) for one in parts], axis=0))
        wanted = np.sum([point.to_integers(one, scales).astype(np.int64) for one in parts], axis=0)
        for rank in range(len(clusters)):
            worker = methods[rank].worker
            if (rank % CHIPS if shares > 1 else 0) == share and (
                worker is None or not np.array_equal(worker.integers, wanted)
            ):
                return False
    return True


def sum_in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the float32 sum in ascending order of ranks, as a host sums."""
    total = parts[0].copy()
    for one in parts[1:]:
        total = total + one
    return total


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "bytes": lambda quick: _bytes_rows(2**15 if quick else 2**20),
    "exact": lambda quick: _exact_rows(2**14 if quick else 2**18),
    "rate": lambda quick: _rate_rows(60 if quick else 600),
    "time": time_rows,
    "step": step_rows,
}


def measure(quick: bool, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of all parts, or of those in `only`."""
    for name, rows in PARTS.items():
        if not only or name in only:
            yield from (replace(row, part=name) for row in rows(quick))


def _bytes_rows(num_values: int) -> Iterator[Row]:
    what = f"PASSING bytes, {HOSTS} x {CHIPS}, per host and direction (payload), M = {4 * num_values / 2**20:g} MiB"
    for loss, limit in ((0.0, 1.0), (0.01, 1.05)):
        sent, received, _ = passing_bytes(num_values, in_host=True, loss=loss)
        ours = max(sent, received)
        yield Row(
            what=f"{what}, {loss:.0%} loss", ours=ours, unit="M", peer="bytes at the binding end", peer_value=1.0,
            ratio=ours, target=f"{limit:g} M", met=round(ours, 2) <= limit,
        )  # fmt: skip
    sent, received, _ = passing_bytes(num_values // 4, in_host=False, loss=0.0)
    yield compared(f"{what}, SwitchML, counted", max(sent, received), "M", "a worker per network card", 1.0)
    for name in PEERS:
        counted = count_elements(steps(name, HOSTS, CHIPS, 2**12))
        hosts = max(*counted.sent_by_host, *counted.received_by_host) / 2**12
        ends = max([*counted.sent_by_aggregator, *counted.received_by_aggregator], default=0) / 2**12
        what = f"bytes of {name}, {HOSTS} x {CHIPS}"
        yield Row(what=f"{what}, per host and direction, from its steps", ours=hosts, unit="M")
        if ends > hosts and name != "switchml":
            yield Row(what=f"{what}, at its server, which binds", ours=ends, unit="M")


def _exact_rows(num_values: int) -> Iterator[Row]:
    for loss in LOSSES:
        _, _, exact = passing_bytes(num_values, in_host=True, loss=loss, disorder=0.05 if loss else 0.0)
        doubled = ", 5 % doubled" if loss else ""
        yield Row(
            what=f"exact at {loss:.1%} loss{doubled}: equal integers at {HOSTS * CHIPS} workers",
            ours=float(exact), unit="1 = equal", target="equal integers", met=exact,
        )  # fmt: skip


def _rate_rows(rounds: int) -> Iterator[Row]:
    for batch, wanted in ((8, 400_000), (1, 60_000)):
        for key in (b"", KEY):
            rate = packets_per_cpu_s(batch, key, rounds)
            how = f"{batch} a system call, {'with' if key else 'without'} a key"
            met = None if key else rate >= wanted
            yield Row(
                what=f"switch, packets of 256 in a CPU s, {how}", ours=rate, unit="packets/CPU s",
                target="" if key else f"{wanted:,}", met=met,
            )  # fmt: skip
    bare = packets_per_cpu_s(8, b"", rounds, serve_bare)
    yield Row(
        what="switch, packets of 256 in a CPU s, 8 a system call, bound of the interpreter", ours=bare,
        unit="packets/CPU s",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="smaller tensors, fewer packets, fewer hosts")
    parser.add_argument("--only", action="append", choices=list(PARTS), default=[], help="print this part alone")
    options = parser.parse_args(arguments)
    rows = []
    for row in measure(options.quick, options.only):
        rows.append(row)
        if options.json:
            print_rows([row], as_json=True)
    if not options.json:
        print_rows(rows, as_json=False)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

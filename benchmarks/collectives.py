"""What a sum over two clusters costs: `python -m benchmarks.collectives [--json] [--quick]`.

Two ranks in each of two clusters sum a tensor of fp32, over isthmus and over gloo, on one emulated line of packets
with a round trip of 20 ms (root: a TUN device per cluster, which both cross by TCP; ours encrypts). The line's time
is one delay and the bytes of the tensor, which each cluster must send once. All ranks start together; a sum ends with
its last rank. Each size is summed several times, the two in turns; the median counts. Four processes and the relay
share the cores of this machine, so CPU seconds of the ranks are printed beside. At 1 Gbit/s so is the bound of kernel
and relay: two plain sockets that exchange the bytes both ways, with no sum, no encryption and no second rank.

`--only links`, `machine`, `gradients` and `training` print the other parts: the bytes that each of three clusters
sends, counted by the transport; a sum among four ranks of one machine; 64 MiB of gradients on that line, as training
adds them up; and steps of DDP, FSDP2 and HSDP, over a group of two clusters (losses) and of one (times), beside gloo.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks._collective_ranks import SumTime, run_gloo, run_isthmus, run_sockets
from benchmarks._gradient_ranks import run_gradients
from benchmarks._parallel_ranks import KINDS, Trained, run_over_gloo, run_over_isthmus
from benchmarks._wan_run import Bed, launch, packets, pool_of
from benchmarks._wan_stage import StageJob
from benchmarks.table import Row, compared, print_rows
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.schedule import gpipe
from isthmus.wan.netns import effective_capabilities, unavailable_reason

CLUSTERS = "aabb"
SENDERS = (0, 2)
"""One rank of each cluster sends across: both share the line (`IsthmusOptions.senders`)."""
ROUND_TRIP_MS = 20.0
WIRE_SHARE = 0.965
"""What of a line's rate is left to payload: frames, IP and TCP take the rest."""

KIB, MIB = 2**10, 2**20
CASES = (
    (0.1, int(6.4 * MIB), 1.35, None),
    (1.0, 64 * MIB, 2.5, 600.0),
    (1.0, 16 * MIB, 2.2, 180.0),
    (1.0, MIB, 4.5, 27.0),
    (1.0, 4 * KIB, 9.0, 12.0),
)
"""Gbit/s, bytes, times as fast as gloo, and milliseconds on free cores, if there is a target for them."""


def line_ms(num_bytes: int, gbps: float) -> float:
    """Return the time of the line: one delay, and the tensor at the rate that is left to payload."""
    return ROUND_TRIP_MS / 2 + num_bytes / (gbps * 1e9 / 8 * WIRE_SHARE) * 1e3


def sums(
    bed: Bed,
    num_bytes: int,
    rounds: int,
    run: Callable[[StageJob, Connection], None],
    clusters: str = CLUSTERS,
    senders: tuple[int, ...] = (),
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each sum but the first, and the CPU milliseconds of all ranks in it."""
    shape = (num_bytes // 4, 1)
    ranks: list[list[SumTime]] = launch(bed, clusters, gpipe(len(clusters), 1), (), shape, rounds, run, senders=senders)
    each = list(zip(*(one[1:] for one in ranks), strict=True))
    walls = [1e3 * (max(one.end_s for one in part) - part[0].start_s) for part in each]
    return walls, [1e3 * sum(one.cpu_s for one in part) for part in each]


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of each case."""
    for gbps, num_bytes, faster, wanted_ms in CASES[1::2] if quick else CASES:
        rounds = 3 if quick else 5
        walls: dict[str, list[float]] = {"isthmus": [], "gloo": []}
        cpus: dict[str, list[float]] = {"isthmus": [], "gloo": []}
        with packets(pool_of(CLUSTERS, ROUND_TRIP_MS, gbps)) as bed:
            for _ in range(1 if quick else 2):
                for name, run in (("isthmus", run_isthmus), ("gloo", run_gloo)):
                    wall, cpu = sums(bed, num_bytes, rounds, run, senders=SENDERS)
                    walls[name] += wall
                    cpus[name] += cpu
        yield from _rows(gbps, num_bytes, faster, wanted_ms, walls, cpus)
        if wanted_ms is not None:
            with packets(pool_of("ab", ROUND_TRIP_MS, gbps)) as bed:
                exchange = sums(bed, num_bytes, rounds, run_sockets, clusters="ab")[0]
            what = f"plain sockets, {ROUND_TRIP_MS:g} ms, {gbps:g} Gbit/s, {_size_text(num_bytes)}"
            yield compared(what, statistics.median(exchange), "ms", "the line", line_ms(num_bytes, gbps))


def links(quick: bool) -> Iterator[Row]:
    """Yield the bytes that the clusters of three send, as the transport counts them, as a share of the tensor."""
    clusters, num_bytes = "aabbcc", (4 if quick else 16) * MIB
    transports = memory_transports(len(clusters))
    groups = [IsthmusGroup(one, clusters) for one in transports]
    tensors = [torch.ones(num_bytes // 4) for _ in groups]
    for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    sent = dict.fromkeys(clusters, 0)
    for rank, one in enumerate(transports):
        for peer, traffic in one.traffic().items():
            if clusters[peer] != clusters[rank]:
                sent[clusters[rank]] += traffic.sent_bytes
    for group in groups:
        group.shutdown()
    bound = 2 * (len(sent) - 1) / len(sent)
    for cluster, num in sent.items():
        share = num / num_bytes
        yield compared(
            f"bytes over each link, 3 clusters: sent by cluster {cluster}", share, "x the tensor",
            "2(C - 1)/C", bound, target="the bound, within 1 %", met=share <= 1.01 * bound,
        )  # fmt: skip


def machine(quick: bool) -> Iterator[Row]:
    """Yield the row of a sum among ranks of one machine."""
    walls: dict[str, list[float]] = {"isthmus": [], "gloo": []}
    for _ in range(1 if quick else 3):
        for name, run in (("isthmus", run_isthmus), ("gloo", run_gloo)):
            walls[name] += sums(Bed(), 64 * MIB, 3 if quick else 5, run, clusters="aaaa")[0]
    ours, theirs = (statistics.median(walls[name]) for name in ("isthmus", "gloo"))
    yield compared(
        "one machine, 4 ranks, 64 MiB", ours, "ms", "gloo", theirs,
        target="within 5 % of gloo", met=ours <= 1.05 * theirs,
    )  # fmt: skip


def gradients(quick: bool) -> Iterator[Row]:
    """Yield the rows of a sum of gradients as training adds them up, on the line with encryption."""
    num_bytes, gbps = 64 * MIB, 1.0
    with packets(pool_of(CLUSTERS, ROUND_TRIP_MS, gbps)) as bed:
        walls, cpus = sums(bed, num_bytes, 3 if quick else 7, run_gradients)
    what = f"gradients 2+2, {ROUND_TRIP_MS:g} ms, {gbps:g} Gbit/s, {num_bytes // MIB} MiB"
    yield compared(what, statistics.median(walls), "ms", "the line", line_ms(num_bytes, gbps))
    yield Row(what=f"{what}, CPU of four ranks", ours=statistics.median(cpus), unit="CPU ms")


def training(quick: bool) -> Iterator[Row]:
    """Yield the rows of torch's own parallelism: losses over two clusters, and the time of a step in one."""
    steps, rounds = (4, 1) if quick else (12, 3)
    for kind in KINDS:
        runs = {"isthmus": partial(run_over_isthmus, kind=kind), "gloo": partial(run_over_gloo, kind=kind)}
        losses, times = {}, {name: list[float]() for name in runs}
        for name, run in runs.items():
            two: list[Trained] = launch(Bed(), CLUSTERS, gpipe(len(CLUSTERS), 1), (), (256, 4), steps, run)
            losses[name] = two[0].losses
        for name, run in list(runs.items()) * rounds:
            one: list[Trained] = launch(Bed(), "aaaa", gpipe(len(CLUSTERS), 1), (), (1024, 4), steps, run)
            times[name] += [1e3 * max(each) for each in zip(*(rank.steps_s[1:] for rank in one), strict=True)]
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses["isthmus"], losses["gloo"], strict=True))
        yield Row(
            what=f"{kind} over two kinds of group: loss apart from gloo's", ours=apart, unit="of the loss",
            target="1e-6", met=apart <= 1e-6,
        )  # fmt: skip
        ours, theirs = (statistics.median(times[name]) for name in ("isthmus", "gloo"))
        yield compared(
            f"{kind} in one cluster: a step", ours, "ms", "gloo", theirs,
            target="within 5 % of gloo", met=ours <= 1.05 * theirs,
        )  # fmt: skip


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "network": measure,
    "links": links,
    "machine": machine,
    "gradients": gradients,
    "training": training,
}


def _rows(
    gbps: float,
    num_bytes: int,
    faster: float,
    wanted_ms: float | None,
    walls: dict[str, list[float]],
    cpus: dict[str, list[float]],
) -> Iterator[Row]:
    what = f"all-reduce 2+2, {ROUND_TRIP_MS:g} ms, {gbps:g} Gbit/s, {_size_text(num_bytes)}"
    ours, theirs = (statistics.median(walls[name]) for name in ("isthmus", "gloo"))
    spread = f"{min(walls['isthmus']):.0f} to {max(walls['isthmus']):.0f} ms"
    yield compared(
        f"{what} ({spread})", ours, "ms", "gloo", theirs,
        target=f"{faster:g} times as fast as gloo", met=theirs / ours >= faster,
    )  # fmt: skip
    bound, share = line_ms(num_bytes, gbps), 1.06
    text = f"{wanted_ms:g} ms on free cores" if wanted_ms else f"at most {share:g} times the line"
    met = ours <= (wanted_ms or share * bound)
    yield compared(f"{what}, beside the line", ours, "ms", "the line", bound, target=text, met=met)
    spent = [statistics.median(cpus[name]) for name in ("isthmus", "gloo")]
    yield compared(f"{what}, CPU of four ranks", spent[0], "CPU ms", "gloo", spent[1])


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.3g} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows, or why there are none; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="two sizes, few sums")
    parser.add_argument("--only", choices=PARTS, help="print one part")
    options = parser.parse_args(arguments)
    parts = [options.only] if options.only else list(PARTS)
    reason = unavailable_reason(effective_capabilities())
    on_packets = [part for part in ("network", "gradients") if part in parts]
    if reason is not None and on_packets:
        print(f"no emulated packets: {reason}", file=sys.stderr)
        parts = [part for part in parts if part not in on_packets]
    rows = []
    for part in parts:
        found = [replace(row, part=part) for row in PARTS[part](options.quick)]
        if options.json:
            print_rows(found, as_json=True)
        rows += found
    if not options.json:
        print_rows(rows, as_json=False)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

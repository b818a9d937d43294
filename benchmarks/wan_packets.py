"""Which rates the emulator of packets keeps: `python -m benchmarks.wan_packets [--json] [--quick] [--only PART]`.

Two network namespaces are joined by a link of 10 ms one way that loses 0.1 % of the packets. TCP is one connection with
BBR; datagrams are sent at 98 % of the link's rate, since a sender has no word from the queue: in batches, one system
call (`UDP_SEGMENT`) for what takes 0.15 ms on the wire, or one by one. The bound is the rate less headers and loss. CPU
time is that of the emulator's process, which carries the receiver's half of the kernel's network stack too. Sender,
emulator and receiver share the cores of this machine. Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import Row, compared, print_rows, run_parts
from benchmarks.wan_links import in_namespaces, pool_of
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.wan.netns import Namespaces, effective_capabilities, emulated_namespaces, unavailable_reason

DELAY_MS, LOSS = 10, 1e-3
HEADER_BYTES = 28
"""IPv4's and UDP's."""
SENT_SHARE = 0.98
BATCH_S = 0.15e-3
MAX_BATCH_BYTES = 64_000
PARTS = {"batches": "UDP in batches", "single": "UDP one by one", "tcp": "TCP"}


class Arrived(NamedTuple):
    """What came through a link, and what could."""

    mbps: float
    bound_mbps: float
    num_sent: int
    """Datagrams; 0 where TCP counts its own."""
    delays_ms: list[float]


def packet_rows(kind: str, quick: bool) -> list[Row]:
    """Rows of one kind of traffic at every MTU and rate."""
    rates_gbps = (1, 2) if quick else (1, 2, 5, 10)
    settings = [(mtu_bytes, gbps) for mtu_bytes in (1500, 9000) for gbps in rates_gbps]
    return [row for mtu_bytes, gbps in settings for row in _rows(kind, mtu_bytes, gbps, 1.0 if quick else 2.5)]


def _rows(kind: str, mtu_bytes: int, gbps: float, span_s: float) -> Iterator[Row]:
    pool = pool_of(
        bandwidth_gbps=gbps, delay_ms=DELAY_MS, loss=LOSS, mtu_bytes=mtu_bytes, congestion_control="bbr"
    )  # fmt: skip
    with emulated_namespaces(pool) as namespaces:
        before = _times(namespaces.relay.pid)
        if kind == "TCP":
            (mbps,) = in_namespaces(namespaces, "send", skip_s=span_s, window_s=span_s)
            arrived = Arrived(mbps, effective_bytes_per_s(pool.links[0]) * 8e-6, 0, [])
        else:
            batch_bytes = 0 if kind.endswith("one") else min(BATCH_S * gbps * 1e9 / 8, MAX_BATCH_BYTES)
            arrived = _pour(namespaces, gbps, mtu_bytes, max(1, int(batch_bytes // mtu_bytes)), span_s)
        user_s, kernel_s = (after - was for after, was in zip(_times(namespaces.relay.pid), before, strict=True))
        count = next(one for one in namespaces.counters() if one["from"] == "a")
    num_sent = arrived.num_sent or count["packets"] + count["lost"] + count["dropped"]
    num_seen = count["packets"] + count["lost"]
    lost = count["lost"] / num_seen
    met = arrived.mbps >= 0.95 * arrived.bound_mbps and abs(lost - LOSS) <= 4 * math.sqrt(LOSS / num_seen)
    told = f"{lost:.3%} lost, {1 - num_seen / num_sent:.1%} dropped by queues"
    if arrived.delays_ms:
        delay_ms = statistics.median(arrived.delays_ms)
        p99_ms = sorted(arrived.delays_ms)[int(0.99 * len(arrived.delays_ms))]
        told += f", one way {delay_ms:.1f} ms, p99 {p99_ms:.1f}"
        met &= abs(delay_ms - DELAY_MS) <= 2
    what = f"{kind}, MTU {mtu_bytes}, {gbps} Gbit/s"
    target = "within 5 %; loss as stated" + ("; median within 2 ms" if arrived.delays_ms else "")
    yield compared(f"{what}: {told}", arrived.mbps, "Mbit/s", "bound", arrived.bound_mbps, target=target, met=met)
    used_s = user_s + kernel_s
    yield Row(
        what=f"{what}: CPU of the emulator, {kernel_s / used_s:.0%} in the kernel", unit="s/GB",
        ours=used_s / (count["bytes"] * 1e-9),
    )  # fmt: skip


def _times(pid: int) -> tuple[float, float]:
    """Return the CPU seconds that a process has used itself, and those of the kernel for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK"), int(fields[12]) / os.sysconf("SC_CLK_TCK")


def _pour(namespaces: Namespaces, gbps: float, mtu_bytes: int, at_once: int, span_s: float) -> Arrived:
    """Send datagrams from site a to site b."""
    module = [sys.executable, "-m", "benchmarks._udp_traffic"]
    datagram_bytes = mtu_bytes - HEADER_BYTES
    options = {
        "datagram_bytes": datagram_bytes, "at_once": at_once, "gbps": SENT_SHARE * gbps,
        "header_bytes": HEADER_BYTES, "span_s": span_s,
    }  # fmt: skip
    with namespaces.run_in("b", [*module, "catch"], stdout=subprocess.PIPE, text=True) as far:
        port = far.stdout.readline().strip() if far.stdout else ""
        argv = [*module, "pour", f"{namespaces.sites['b'].address}:{port}", json.dumps(options)]
        with namespaces.run_in("a", argv, stdout=subprocess.PIPE, text=True) as near:
            num_sent = json.loads(near.communicate(timeout=60)[0])
        mbps, *delays_ms = json.loads(far.communicate(timeout=60)[0])
    return Arrived(mbps, SENT_SHARE * gbps * 1e3 * datagram_bytes / mtu_bytes * (1 - LOSS), num_sent, delays_ms)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="the two lower rates, for a second each")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args(words)
    if why := unavailable_reason(effective_capabilities()):
        parser.exit(0, f"no emulated packets: {why}\n")
    parts = {name: partial(packet_rows, kind, options.quick) for name, kind in PARTS.items()}
    print_rows(run_parts(parts, [options.only] if options.only else PARTS), options.json)


if __name__ == "__main__":
    main()

"""RoCEv2 across a long link, through gateways and without: `python -m benchmarks.roce_gateway`.

Queue pairs of NICs in user space over 1 Gbit/s with a queue of one bandwidth-delay product, payload of 1,024 bytes, on
a virtual clock, so that other load changes only the parts `added` and `cpu`; `cpu` has native rows where `make native`
was run. The peer is the same NICs without a gateway: go-back-N with a resend time above the round trip, which favours
it, and a window of 8 MiB where none is named. The ceiling is the link's rate less all headers. `choice` has 0.2 Gbit/s,
what a gateway in Python carries: NICs alone send at 98 % of their share of it, and TCP is not played but counted by the
formula of emulated links (BBR). `added` runs all its processes with the priority that they have, and once more with
that of `isthmus gateway --real-time`, where that is permitted. `--json`, `--quick`, `--only PART`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from benchmarks._roce_added import WAIT_S, times_on_the_way
from benchmarks._roce_balance import balance_rows
from benchmarks._roce_bound import forwarded_in_a_cpu_s, viewed_in_a_cpu_s
from benchmarks._roce_choice import choice_rows
from benchmarks._roce_lab import RoceLab, goodput_mbps
from benchmarks.table import Row, compared, print_rows, run_parts
from isthmus.wan.gateway.run_gateway import GC_THRESHOLD
from isthmus.wan.roce import Gateway, GatewaySettings, RocePacket, build, parse
from isthmus.wan.roce.gateway.gateway_datagram import DATA_BYTES
from isthmus.wan.roce.gateway.gateway_events import (
    GatewayEvent,
    LinkDatagrams,
    NicFrames,
    SendOnLink,
    SendToNic,
    Tick,
)
from isthmus.wan.roce.gateway.native_gateway import native_gateway
from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_packet import AethHeader
from isthmus.wan.roce.roce_view import view_frame
from tests.wan.roce.test_roce_packet import scapy_frame, some_packet

GBPS = 1.0
PAYLOAD_BYTES = 1024
SKIP_S = 0.4
"""Time before a window: the queue pairs are learned, and rates have settled."""

FRAME_BYTES = PAYLOAD_BYTES + 44
READ_AT_ONCE = 64
"""Frames or datagrams of one event, as the gateway's process reads them."""

LOSSES = (0.0, 0.001, 0.01, 0.05)
TIMES = {0.001: 6.5, 0.01: 50.0}
"""Times the peer's goodput that is aimed at."""


def settings_of(round_trip_s: float, **fields: float) -> GatewaySettings:
    """Return a gateway's settings for a link."""
    return GatewaySettings(link_gbps=GBPS, nic_gbps=10, acknowledge_near=True, round_trip_s=round_trip_s, **fields)  # type: ignore[arg-type]


def ceiling_mbps() -> float:
    """Return the link's rate less the headers of frame and datagram."""
    overhead = DATA_BYTES + settings_of(0.04).datagram_overhead_bytes
    return 1000 * GBPS * PAYLOAD_BYTES / (FRAME_BYTES + overhead)


def loss_rows(quick: bool) -> Iterator[Row]:
    """Goodput and frames sent, at each loss."""
    window_s = 0.1 if quick else 1.0
    for loss in (0.01,) if quick else LOSSES:
        lab = RoceLab(gbps=GBPS, round_trip_s=0.04, loss=loss, settings=settings_of(0.04), port_gbps=10.0)
        lab.run(SKIP_S)
        before = lab.gateways[0].statistics()
        (ours,) = goodput_mbps(lab, SKIP_S, window_s)
        after = lab.gateways[0].statistics()
        sent = after.frames_sent - before.frames_sent
        first = sent - (after.frames_sent_again - before.frames_sent_again)
        alone = RoceLab(
            gbps=GBPS, round_trip_s=0.04, loss=loss, settings=None, port_gbps=GBPS, window_bytes=8 * 2**20,
            resend_s=0.1,
        )  # fmt: skip
        (peer,) = goodput_mbps(alone, SKIP_S, 2 * window_s)
        bound = 0.99 * ceiling_mbps() * (1 - loss)
        times = TIMES.get(loss, 0.0)
        target = f"{bound:.0f}" + (f", {times:g} x go-back-N" if times else "")
        yield compared(
            f"RoCE goodput, loss {loss:.1%}, 40 ms (ceiling {ceiling_mbps():.0f})", ours, "Mbit/s",
            "go-back-N, no gateway", peer, target=target, met=ours >= bound and ours >= times * peer,
        )  # fmt: skip
        most = 1.005 / (1 - loss)
        yield Row(
            what=f"frames sent over frames taken, loss {loss:.1%}; {lab.lines[0].num_dropped} dropped by the queue",
            ours=sent / first, unit="", target=f"{most:.4f}",
            met=sent / first <= most and lab.lines[0].num_dropped == 0,
        )  # fmt: skip


def window_rows(quick: bool) -> Iterator[Row]:
    """A queue pair with a window of 1 MB on long paths."""
    for round_trip_s in (0.04,) if quick else (0.04, 0.1):
        nic = {"window_bytes": 10**6, "resend_s": 0.004}
        lab = RoceLab(
            gbps=GBPS, round_trip_s=round_trip_s, loss=0.0, settings=settings_of(round_trip_s), port_gbps=10.0, **nic
        )
        window_s = 0.1 if quick else 1.0
        (ours,) = goodput_mbps(lab, 8 * round_trip_s, window_s)
        alone = RoceLab(
            gbps=GBPS, round_trip_s=round_trip_s, loss=0.0, settings=None, port_gbps=GBPS, window_bytes=10**6,
            resend_s=3 * round_trip_s,
        )  # fmt: skip
        (peer,) = goodput_mbps(alone, 4 * round_trip_s, 10 * round_trip_s)
        what = f"queue pair, 1 MB window, {1000 * round_trip_s:.0f} ms"
        yield compared(what, ours, "Mbit/s", "no gateway", peer, target="880", met=ours >= 880)


def congestion_rows(quick: bool) -> Iterator[Row]:
    """Near congestion notifications, and sixteen queue pairs that share the link."""
    start_s, window_s = 0.1, 0.1 if quick else 1.0
    lab = RoceLab(
        gbps=GBPS, round_trip_s=0.04, loss=0.0, settings=settings_of(0.04), num_pairs=16, start_s=start_s,
        port_gbps=1.0,
    )  # fmt: skip
    notified: list[float] = []

    def on_nic(frame: bytes) -> None:
        if view_frame(frame).opcode == Opcode.CNP:
            notified.append(lab.now_s)

    lab.on_nic = on_nic
    lab.run(start_s)
    while not notified and lab.now_s < 1:
        lab.run(lab.now_s + 5e-5)
    wait_ms = 1000 * (lab.now_s - start_s)
    yield Row(
        what="near CNP: 16 known queue pairs begin at 16 times the link's rate, to the first notification",
        ours=wait_ms, unit="ms", target="1", met=bool(notified) and wait_ms <= 1,
    )  # fmt: skip
    lab.run(start_s + SKIP_S)
    before, waits = [sender.num_bytes for sender in lab.senders], []
    while lab.now_s < start_s + SKIP_S + window_s:
        lab.run(lab.now_s + 1e-3)
        waits.append(lab.gateways[0].num_waiting_bytes)
    rates = [one.num_bytes - was for one, was in zip(lab.senders, before, strict=True)]
    jain = sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))
    total = sum(rates) * 8e-6 / window_s
    refused = lab.gateways[0].statistics().frames_refused
    bdp = GBPS * 1e9 / 8 * 0.04
    yield Row(
        what=f"16 to 1, {total:.0f} Mbit/s, {refused} frames refused: queue, p99", unit="% of a BDP",
        ours=100 * sorted(waits)[int(0.99 * len(waits))] / bdp, target="5",
        met=sorted(waits)[int(0.99 * len(waits))] <= 0.05 * bdp and not refused,
    )  # fmt: skip
    yield Row(what="16 to 1: Jain's index of goodputs", ours=jain, unit="", target="0.99", met=jain >= 0.99)


class CpuLab:
    """Two gateways and what they spend: `READ_AT_ONCE` frames or datagrams are one event, as a shell reads them."""

    def __init__(self, form: type[Gateway]) -> None:
        settings = GatewaySettings(link_gbps=1000, nic_gbps=1000, acknowledge_near=True, round_trip_s=0.01)
        self.near, self.far, self.now_s = form(settings, 1), form(settings, 2), 0.0
        self.spent = {self.near: 0.0, self.far: 0.0}

    def settle(self, frames: Sequence[bytes]) -> None:
        """Carry what both say until nothing more comes; the far NICs acknowledge each message."""
        near: list[GatewayEvent] = [NicFrames(one) for one in _runs(frames)]
        far: list[GatewayEvent] = []
        for _ in range(8):
            self.now_s += 0.003
            link, _ = self._run(self.near, near)
            link_back, handed = self._run(self.far, [*far, *(LinkDatagrams(one) for one in _runs(link))])
            near = [LinkDatagrams(one) for one in _runs(link_back)]
            far = [NicFrames(one) for one in _runs([acknowledge(one) for one in handed if view_frame(one).wants_ack])]

    def _run(self, gateway: Gateway, events: Sequence[GatewayEvent]) -> tuple[list[bytes], list[bytes]]:
        start_s = time.process_time()
        found = [one for event in (*events, Tick()) for one in gateway.handle(event, self.now_s)]
        self.spent[gateway] += time.process_time() - start_s
        return (
            [one.data for one in found if isinstance(one, SendOnLink)],
            [one.frame for one in found if isinstance(one, SendToNic)],
        )


def cpu_rows(quick: bool) -> Iterator[Row]:
    """Packets in a CPU second of one gateway, ten thousand queue pairs: one a message, and 32 a message.

    The forms are those of `make native`, where it was run, and Python.
    """
    num_pairs, rounds = (2_000, 3) if quick else (10_000, 5)
    native = native_gateway()
    forms: list[tuple[str, type[Gateway], tuple[int, int]]] = [("Python", Gateway, (60_000, 300_000))]
    if native is not None:
        forms.append(("native", native, (250_000, 1_000_000)))
    for form, kind, aims in forms:
        for (num_packets, share), aim in zip(((1, 1), (32, 32)), aims, strict=True):
            found = _rates(CpuLab(kind), num_pairs, rounds, num_packets, share)
            for name, value in zip(("near", "far"), found, strict=True):
                yield Row(
                    what=f"packets in a CPU s of the {name} gateway, {form}, {num_pairs:,} queue pairs, messages of "
                    f"{num_packets} with their answers",
                    ours=value, unit="1/s", target=f"{aim:,}", met=value >= aim,
                )  # fmt: skip
    frames = [message(number, 0, 1) for number in range(num_pairs)]
    yield Row(
        what="bound of any Python: recv, struct, a look-up in a dict and sendto of a frame, nothing else", unit="1/s",
        ours=forwarded_in_a_cpu_s(frames, num_runs=num_pairs // READ_AT_ONCE, run=READ_AT_ONCE),
    )  # fmt: skip
    yield Row(what="bound: headers of a frame read, both CRCs checked, nothing else", ours=viewed_in_a_cpu_s(frames),
              unit="1/s")  # fmt: skip


def _rates(lab: CpuLab, num_pairs: int, rounds: int, num_packets: int, share: int) -> list[float]:
    """Return the packets in a CPU second of both gateways, medians of `rounds`, each with 1/`share` of the pairs."""
    collected, num_used, results = gc.get_threshold(), num_pairs // share, []
    lab.settle([])
    lab.settle([message(number, 0, 1) for number in range(num_pairs)])
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    for turn in range(rounds):
        first = (1 + num_packets * turn) if share == 1 else 1
        pairs = range(num_used) if share == 1 else range(turn * num_used, (turn + 1) * num_used)
        frames = [
            message(number, first + place, num_packets, place) for number in pairs for place in range(num_packets)
        ]
        lab.spent = dict.fromkeys(lab.spent, 0.0)
        lab.settle(frames)
        results.append([len(frames) / spent for spent in lab.spent.values()])
    gc.unfreeze()
    gc.set_threshold(*collected)
    return [statistics.median(one[place] for one in results) for place in range(2)]


def _runs(items: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (items[place : place + READ_AT_ONCE] for place in range(0, len(items), READ_AT_ONCE))


def message(number: int, psn: int, num_packets: int, place: int = 0) -> bytes:
    """Return packet `place` of a SEND of `num_packets`."""
    opcode = Opcode.SEND_FIRST if not place else Opcode.SEND_MIDDLE
    if place == num_packets - 1:
        opcode = Opcode.SEND_LAST if place else Opcode.SEND_ONLY
    return build(
        RocePacket(
            source=f"10.1.{number >> 8}.{number & 255}", target="10.2.0.1", opcode=opcode,
            queue_pair=100_000 + number, psn=psn, source_port=49_152 + number % 16_384,
            wants_ack=place == num_packets - 1, payload=bytes(PAYLOAD_BYTES),
        )
    )  # fmt: skip


def acknowledge(frame: bytes) -> bytes:
    """Return the far NIC's answer."""
    view = view_frame(frame)
    source = ".".join(str(byte) for byte in view.ends[:4])
    return build(
        RocePacket(
            source="10.2.0.1", target=source, opcode=Opcode.ACKNOWLEDGE, queue_pair=view.queue_pair - 50_000,
            psn=view.psn, source_port=view.source_port, aeth=AethHeader(0x1F, view.psn + 1),
        )
    )  # fmt: skip


def added_rows(quick: bool) -> Iterator[Row]:
    """What two gateway processes add to the way of a frame, one at a time, on loopback, and what bare ones add."""
    count = 200 if quick else 2_000
    frames = [message(0, psn, 1) for psn in range(count + 1)]
    for option, real_time in (("", False), (" with --real-time", True)):
        try:
            found = times_on_the_way(settings_of(0.04), frames, acknowledge, real_time=real_time)
        except PermissionError:
            continue
        missed = sum(one >= WAIT_S for one in found.gateways)
        for name, place, target_ms in (("median", 0.5, 0.3), ("p99", 0.99, 2.0)):
            ours, bare, direct = (1000 * sorted(times[20:])[int(place * (count - 20))] for times in found)
            yield compared(
                f"gateway pair{option} adds, {name} of {count:,} frames ({missed} missed; direct: {direct:.3f} ms)",
                ours - direct, "ms", "two processes: recv, look-up, sendto", bare - direct, target=f"{target_ms:g}",
                met=ours - direct <= target_ms and not missed,
            )  # fmt: skip


def frame_rows(quick: bool) -> Iterator[Row]:
    """Random packets, IPv4 and IPv6 by turns, as scapy's roce layer builds them."""
    rng, count = Random(20), 2_000 if quick else 1_000_000
    wrong = 0
    for number in range(count):
        packet = some_packet(rng, six=number % 2 == 1)
        frame = scapy_frame(packet)
        wrong += build(packet) != frame or parse(frame) != packet
    yield Row(what=f"{count:,} frames against scapy's roce layer: mismatches", ours=wrong, unit="", target="0",
              met=not wrong)  # fmt: skip


PARTS = {
    "loss": loss_rows,
    "window": window_rows,
    "congestion": congestion_rows,
    "added": added_rows,
    "cpu": cpu_rows,
    "balance": balance_rows,
    "choice": choice_rows,
    "frames": frame_rows,
}


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="short windows and fewer queue pairs")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    parts = {name: partial(_rows, part, options.quick) for name, part in PARTS.items()}
    print_rows(run_parts(parts, [options.only] if options.only else PARTS), options.json)


def _rows(part: Callable[[bool], Iterator[Row]], quick: bool) -> list[Row]:
    return list(part(quick))


if __name__ == "__main__":
    main()

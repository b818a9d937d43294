"""Tenants with equal addresses over one network: `python -m benchmarks.tenants [--json] [--quick] [--only PART ...]`.

- `process`: the gateway's engine in memory: frames in a CPU second, out and in, with their headers (no root).
- `crossings`: a thousand tenants with one address plan behind two gateways in namespaces (root). Each sends frames both
  ways through real sockets; a frame that arrives under another VLAN than its sender's is a crossing. Then a tenant
  is added at both sites: the time from its file to its first frame at the other site.
- `rates`: one tenant's bandwidth changes while its numbered frames pass; then it fills its queue while heartbeats pass;
  then its port is forbidden, and the time is taken until no frame of it arrives any more.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._tenant_lab import SITES, TenantLab, in_namespace
from benchmarks.table import Row, print_rows, run_parts
from isthmus.wan.netns import effective_capabilities
from isthmus.wan.roce import RocePacket, build
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.packets.vxlan_header import IPV4_BYTES, UDP_BYTES
from isthmus.wan.tenancy.tenant_events import DatagramFromGateway, FrameFromTenant, SendToGateway, SendToTenant
from isthmus.wan.tenancy.tenant_gateway import TenantGateway
from isthmus.wan.tenancy.tenants_file import TenantsFile
from isthmus.wan.tenants.kernel_commands import run_checked
from isthmus.wan.tenants.packet_port import PacketPort
from isthmus.wan.tenants.probe_tenancy import missing_rights

KEY = "1,000 tenants, one address plan"
NUM_TENANTS = 1000
ENDS = {"nanjing": ("10.1.0.1", "10.2.0.1"), "hangzhou": ("10.2.0.1", "10.1.0.1")}
_MACS = b"\2\0\0\0\0\2\2\0\0\0\0\1\x08\0"
_PSN_AT = 51
_PLACE_AT = 54
"""Where the payload begins, which says whose the frame is."""


def tenant(number: int, **fields: Any) -> dict[str, Any]:
    """Return a tenant; all have the same addresses and ports."""
    return {
        "name": f"t{number}", "vni": 5000 + number, "vlan": number, "gbps": 0.0005, "max_gbps": 0.5,
        "networks": {"nanjing": ["10.1.0.0/16"], "hangzhou": ["10.2.0.0/16"]},
        "allow": [{"protocol": "udp", "to_ports": 4791}], **fields,
    }  # fmt: skip


def frame(site: str, psn: int, vlan: int, size: int = 64) -> bytes:
    """Return a RoCEv2 frame of a site whose payload names its tenant."""
    source, target = ENDS[site]
    payload = vlan.to_bytes(4, "big") + bytes(size - 4)
    return _MACS + build(
        RocePacket(source=source, target=target, opcode=4, queue_pair=7, psn=psn % 2**24, payload=payload)
    )


def process(quick: bool) -> Iterator[Row]:
    """Rows of the engine alone."""
    document = {"gateways": {"nanjing": "10.0.0.1", "hangzhou": "10.0.0.2"}, "gbps": 1}
    tenants = [tenant(n) for n in range(1, NUM_TENANTS + 1)]
    near, far = (
        TenantGateway(TenantsFile.model_validate({**document, "site": site, "tenants": tenants}), 1) for site in SITES
    )
    for size in (64, 1024):
        frames = [(n, frame("nanjing", 0, n, size)) for n in range(1, NUM_TENANTS + 1)]
        packets, rounds = list[bytes](), 5 if quick else 40
        out_s = in_s = 0.0
        for _ in range(rounds):
            buffers = [(vlan, FrameBuffer(data)) for vlan, data in frames]
            start_s, packets = time.process_time(), []
            for vlan, buffer in buffers:
                packets += [
                    bytes(one.packet)
                    for one in near.handle(FrameFromTenant(vlan, buffer), 0.0)
                    if isinstance(one, SendToGateway) and one.vni != 1
                ]
            out_s += time.process_time() - start_s
            arriving = [FrameBuffer(packet[IPV4_BYTES + UDP_BYTES :]) for packet in packets]
            start_s, handed = time.process_time(), 0
            for buffer in arriving:
                out = far.handle(DatagramFromGateway(b"\x0a\0\0\1", 0, buffer), 0.0)
                handed += sum(isinstance(one, SendToTenant) for one in out)
            in_s += time.process_time() - start_s
            if handed != NUM_TENANTS:
                raise RuntimeError(f"{handed} of {NUM_TENANTS} frames arrived")
        for way, used_s in (("out", out_s), ("in", in_s)):
            what = f"frames of {size} B payload, {way}, headers in place, 1,000 flows, the engine alone"
            yield Row(what=what, ours=rounds * NUM_TENANTS / used_s, unit="1/CPU s")


class Counted:
    """Counts what arrives at a site, by the tenant that sent it and the VLAN that it came under."""

    def __init__(self, port: PacketPort) -> None:
        self.port, self.stop = port, threading.Event()
        self.found: Counter[tuple[int, int]] = Counter()
        self.numbers: Counter[int] = Counter()
        self.last_s = 0.0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        buffer = FrameBuffer(bytes(9300))
        while not self.stop.is_set():
            vlan = self.port.read(buffer)
            if vlan is None:
                time.sleep(0.0005)
                continue
            data = buffer.view
            self.found[vlan, int.from_bytes(data[_PLACE_AT : _PLACE_AT + 4], "big")] += 1
            self.numbers[int.from_bytes(data[_PSN_AT : _PSN_AT + 3], "big")] += 1
            self.last_s = time.monotonic()

    def end(self) -> None:
        """Stop counting."""
        self.stop.set()
        self.thread.join()
        self.port.close()


def _ports(lab: TenantLab) -> dict[str, PacketPort]:
    found = {}
    for site in SITES:
        with in_namespace(lab.behind[site]):
            found[site] = PacketPort("tenants")
    return found


def _wait(holds: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    return True


def crossings(quick: bool) -> Iterator[Row]:
    """Rows of a thousand tenants, and of one more."""
    tenants = [tenant(n) for n in range(1, NUM_TENANTS + 1)]
    with tempfile.TemporaryDirectory() as folder, TenantLab(Path(folder), {"gbps": 2, "tenants": tenants}) as lab:
        lab.start()
        senders, counted = _ports(lab), {site: Counted(port) for site, port in _ports(lab).items()}
        rounds, psn, num_sent = 1 if quick else 20, 0, 0
        for _ in range(rounds):
            for number in range(1, NUM_TENANTS + 1):
                psn += 1
                for site in SITES:
                    senders[site].send(number, frame(site, psn, number))
                    num_sent += 1
                if number % 20 == 0:
                    time.sleep(0.02)
        _wait(lambda: sum(one.found.total() for one in counted.values()) >= num_sent, 30)
        num_arrived = sum(one.found.total() for one in counted.values())
        crossed = sum(
            count for one in counted.values() for (vlan, sender), count in one.found.items() if vlan != sender
        )
        reached = sum(len(one.found) for one in counted.values())
        what = f"{KEY}: crossings, of {num_arrived:,} frames that arrived, {num_sent:,} sent"
        yield Row(what=what, ours=crossed, unit="", target="0", met=crossed == 0 and num_arrived > 0)
        yield Row(what=f"{KEY}: tenants and ways with their frames, of 2,000", ours=reached, unit="")
        before_s = lab.cpu_s()
        times = [_one_more(lab, senders, counted, NUM_TENANTS + 1 + n) for n in range(1 if quick else 5)]
        what = f"{KEY}: one more, from its file to its first frame at the other site, worst of {len(times)}"
        yield Row(what=what, ours=max(times), unit="s", target="5", met=max(times) <= 5)
        used_s = (lab.cpu_s() - before_s) / len(times)
        yield Row(what=f"{KEY}: one more, CPU of both gateways, with its first frames", ours=used_s, unit="CPU s")
        for one in counted.values():
            one.end()


def _one_more(lab: TenantLab, senders: dict[str, PacketPort], counted: dict[str, Counted], number: int) -> float:
    """Add a tenant at both sites; return the time until its first frame has crossed."""
    tenants = [*lab.document["tenants"], tenant(number)]
    start_s = time.monotonic()
    for site in SITES:
        lab.write(site, tenants=tenants)
    while not counted["hangzhou"].found[number, number] and time.monotonic() < start_s + 120:
        senders["nanjing"].send(number, frame("nanjing", 1, number))
        time.sleep(0.005)
    return time.monotonic() - start_s


def rates(quick: bool) -> Iterator[Row]:
    """Rows of a bandwidth that changes, a tenant that fills its queue, and a port that is forbidden."""
    given = {"gbps": 0.2, "tenants": [tenant(1, gbps=0.05, max_gbps=0.05), tenant(2, gbps=0.01, max_gbps=0.01)]}
    with tempfile.TemporaryDirectory() as folder, TenantLab(Path(folder), given) as lab:
        lab.start()
        senders, counted = _ports(lab), {site: Counted(port) for site, port in _ports(lab).items()}
        yield from _changes(lab, senders, counted["hangzhou"], 4 if quick else 20)
        yield from _saturation(lab, senders, counted["hangzhou"], 3.0 if quick else 15.0)
        yield from _forbidden(lab, senders, counted["hangzhou"], 2 if quick else 10)
        for one in counted.values():
            one.end()


def _changes(lab: TenantLab, senders: dict[str, PacketPort], counted: Counted, count: int) -> Iterator[Row]:
    psn = 1
    for change in range(count):
        gbps = 0.03 + 0.01 * (change % 3)
        lab.write("nanjing", tenants=[tenant(1, gbps=gbps, max_gbps=gbps), *lab.document["tenants"][1:]])
        for _ in range(200):
            senders["nanjing"].send(1, frame("nanjing", psn, 1, 1024))
            psn += 1
            time.sleep(0.002)
    _wait(lambda: counted.numbers.total() >= psn - 1, 10)
    num_lost = psn - 1 - len(counted.numbers)
    what = f"frames lost or twice while a VNI's bandwidth changes {count} times, of {psn - 1:,}"
    wrong = num_lost + sum(times - 1 for times in counted.numbers.values())
    yield Row(what=what, ours=wrong, unit="", target="0", met=wrong == 0)


def _saturation(lab: TenantLab, senders: dict[str, PacketPort], counted: Counted, seconds: float) -> Iterator[Row]:
    def round_trip_ms() -> float:
        return 1e3 * float(lab.state("hangzhou")["links"][0]["round_trip_s"])

    def missed() -> int:
        return sum(int(lab.state(site)["links"][0]["heartbeats_missed"]) for site in SITES)

    quiet, busy, before = list[float](), list[float](), missed()
    for _ in range(int(seconds)):
        time.sleep(1.0)
        quiet.append(round_trip_ms())
    data, stop = frame("nanjing", 0, 2, 1024), threading.Event()

    def flood() -> None:
        while not stop.is_set():
            for _ in range(20):
                senders["nanjing"].send(2, data)
            time.sleep(0.005)

    flooding = threading.Thread(target=flood, daemon=True)
    num_before, start_s = counted.found[2, 2], time.monotonic()
    flooding.start()
    waiting = {"1:3": 0, "1:11": 0}
    cpu_s, waited_s = lab.cpu_s(), lab.waited_s()
    for _ in range(int(seconds)):
        time.sleep(1.0)
        busy.append(round_trip_ms())
        for name, most in waiting.items():
            waiting[name] = max(most, _num_waiting(lab, name))
    num_passed, passed_s = counted.found[2, 2] - num_before, time.monotonic() - start_s
    cpu_s, waited_s = lab.cpu_s() - cpu_s, lab.waited_s() - waited_s
    stop.set()
    flooding.join()
    time.sleep(1.5)
    num_missed = missed() - before
    mbps = num_passed * (len(data) + 50) * 8 / passed_s / 1e6
    name = f"a tenant sends four times its 10 Mbit/s ({mbps:.1f} pass)"
    yield Row(
        what=f"{name}: heartbeats missed in {seconds:.0f} s", ours=num_missed, unit="", target="0", met=not num_missed
    )
    yield Row(
        what=f"{name}: most packets that wait in the kernel's class of control, of {int(seconds)} looks",
        ours=waiting["1:3"], unit="", peer="the tenant's class", peer_value=waiting["1:11"],
        target="at most 1", met=waiting["1:3"] <= 1 < waiting["1:11"],
    )  # fmt: skip
    yield Row(
        what=f"{name}: round trip of heartbeats, median", ours=statistics.median(busy), unit="ms",
        peer="quiet", peer_value=statistics.median(quiet), ratio=statistics.median(busy) / statistics.median(quiet),
    )  # fmt: skip
    yield Row(
        what=f"{name}: time that the gateways wait for a core, for each CPU second of theirs",
        ours=waited_s / cpu_s, unit="s/CPU s",
    )  # fmt: skip


def _num_waiting(lab: TenantLab, name: str) -> int:
    """Return how many packets wait in a class of nanjing's device."""
    namespace = lab.gateway["nanjing"]
    shown = run_checked(["ip", "netns", "exec", namespace, "tc", "-s", "class", "show", "dev", "wan", "classid", name])
    return int(re.findall(r"backlog \S+ (\d+)p", shown)[0])


def _forbidden(lab: TenantLab, senders: dict[str, PacketPort], counted: Counted, count: int) -> Iterator[Row]:
    times = list[float]()
    allowed = lab.document["tenants"]
    other = {"allow": [{"protocol": "tcp", "to_ports": 29500}]}
    for _ in range(count):
        before = counted.found[1, 1]
        while counted.found[1, 1] < before + 20:
            senders["nanjing"].send(1, frame("nanjing", 9, 1))
            time.sleep(0.005)
        start_s = time.monotonic()
        lab.write("nanjing", tenants=[{**allowed[0], **other}, *allowed[1:]])
        while time.monotonic() - max(counted.last_s, start_s) < 0.5:
            senders["nanjing"].send(1, frame("nanjing", 9, 1))
            time.sleep(0.001)
        times.append(max(counted.last_s - start_s, 0.0) * 1e3)
        lab.write("nanjing", tenants=allowed)
        time.sleep(0.2)
    what = f"a port is forbidden in the file: last frame of a known flow, median of {count}"
    yield Row(what=what, ours=statistics.median(times), unit="ms")
    what = f"a port is forbidden in the file: last frame of a known flow, worst of {count}"
    yield Row(what=what, ours=max(times), unit="ms", target="100", met=max(times) <= 100)


def main() -> None:
    parts = {"process": process, "crossings": crossings, "rates": rates}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART")
    asked = parser.parse_args()
    chosen = list(asked.only)
    if (why := missing_rights(effective_capabilities())) is not None:
        print(f"only the part `process` runs here: {why}", file=sys.stderr)
        chosen = [one for one in chosen if one == "process"]
    rows = run_parts({name: partial(_listed, part, asked.quick) for name, part in parts.items()}, chosen)
    print_rows(rows, asked.json)
    if any(row.met is False for row in rows):
        sys.exit(1)


def _listed(part: Callable[[bool], Iterator[Row]], quick: bool) -> list[Row]:
    return list(part(quick))


if __name__ == "__main__":
    main()

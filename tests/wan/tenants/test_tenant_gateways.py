"""Tenant gateways in namespaces (root): real frames of tenants with equal addresses, rates, strangers, heartbeats."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._tenant_lab import SITES, TenantLab, in_namespace
from isthmus.wan.netns import effective_capabilities, unavailable_reason
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenants.packet_port import PacketPort
from isthmus.wan.tenants.probe_tenancy import missing_rights, probe_tenancy
from tests.machines import wait_until
from tests.wan.tenancy.tenancy_lab import roce_frame, tenant

WHY = unavailable_reason(effective_capabilities()) or missing_rights(effective_capabilities())
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(WHY is not None, reason=f"{WHY}; run: sudo .venv/bin/python -m pytest -m root tests/wan"),
]
OUT, BACK = ("10.1.0.1", "10.2.0.1"), ("10.2.0.1", "10.1.0.1")


def tenants(gbps: float = 0.04) -> list[dict[str, object]]:
    """Return two tenants of the trunk, the first with a rate of its own, and two with a device."""
    with_ports = [tenant(n, port=f"port{n}", gbps=0.02) for n in (3, 4)]
    return [tenant(1, gbps=gbps), tenant(2, gbps=0.02), *with_ports]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantLab]:
    """Return two gateways that run."""
    with TenantLab(tmp_path_factory.mktemp("tenants"), {"gbps": 0.2, "tenants": tenants()}) as found:
        for site, address in zip(SITES, ("10.1.0.7/8", "10.2.0.7/8"), strict=True):
            for number in (3, 4):
                found.add_machine(site, f"port{number}", address)
        found.start()
        yield found


@pytest.fixture
def ports(lab: TenantLab) -> Iterator[dict[str, PacketPort]]:
    """Return the devices behind the trunks, with nothing left to read."""
    found = {}
    for site in SITES:
        with in_namespace(lab.behind[site]):
            found[site] = PacketPort("tenants")
    yield found
    for one in found.values():
        one.close()


def take(port: PacketPort, count: int, limit_s: float = 10.0) -> list[tuple[int, bytes]]:
    """Return up to `count` frames with their VLANs, and whatever else comes with them."""
    found, buffer, end_s = list[tuple[int, bytes]](), FrameBuffer(bytes(9300)), time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < end_s:
        vlan = port.read(buffer)
        if vlan is None:
            time.sleep(0.001)
        else:
            found.append((vlan, bytes(buffer.view)))
    return found


def test_equal_addresses_never_meet(ports: dict[str, PacketPort]) -> None:
    """The same frames of two tenants, both ways, arrive under their own VLAN; those of a third VLAN nowhere."""
    sent = dict[str, list[tuple[int, bytes]]]()
    for site, other, ends in (("nanjing", "hangzhou", OUT), ("hangzhou", "nanjing", BACK)):
        sent[other] = [(vlan, roce_frame(*ends, psn=psn)) for psn in range(20) for vlan in (101, 102)]
        for vlan, frame in sent[other]:
            ports[site].send(vlan, frame)
            ports[site].send(99, frame)
    for other, frames in sent.items():
        assert Counter(take(ports[other], len(frames))) == Counter(frames)
        assert take(ports[other], 1, 0.2) == []


def serve(namespace: str, name: bytes, ready: threading.Event) -> None:
    """Answer one caller with a name."""
    with in_namespace(namespace), socket.create_server(("10.2.0.7", 29500)) as listener:
        listener.settimeout(60)
        ready.set()
        connection, _ = listener.accept()
        with connection:
            data = bytearray()
            while len(data) < 300_000 and (more := connection.recv(1 << 16)):
                data += more
            connection.sendall(name + str(len(data)).encode())


def test_machines_with_the_same_addresses_talk_to_their_own(lab: TenantLab) -> None:
    """Real TCP of two tenants, both from 10.1.0.7 to 10.2.0.7: each reaches the machine of its own tenant."""
    there, here = lab.more[:2], lab.more[2:]
    events = [threading.Event() for _ in there]
    servers = [
        threading.Thread(target=serve, args=(machine, name, event), daemon=True)
        for machine, name, event in zip(here, (b"three", b"four"), events, strict=True)
    ]
    for server, event in zip(servers, events, strict=True):
        server.start()
        assert event.wait(30)
    answers = []
    for machine in there:
        with in_namespace(machine), socket.create_connection(("10.2.0.7", 29500), 60) as connection:
            connection.settimeout(60)
            connection.sendall(bytes(300_000))
            answers.append(connection.recv(100))
    for server in servers:
        server.join(60)
    assert answers == [b"three300000", b"four300000"]


def test_strangers_are_dropped_before_they_are_read(lab: TenantLab, ports: dict[str, PacketPort]) -> None:
    """VXLAN from an address that is no gateway's never reaches the process, and is counted."""
    before = lab.state("hangzhou")["strangers_filtered"]
    with in_namespace(lab.gateway["nanjing"]):
        subprocess.run(["ip", "-n", lab.gateway["nanjing"], "address", "add", "10.0.0.9/24", "dev", "wan"], check=True)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("10.0.0.9", 0))
            for _ in range(10):
                data = b"\x08\0\0\0" + (5001 << 8).to_bytes(4, "big") + roce_frame()
                stranger.sendto(data, ("10.0.0.2", 4789))
    assert take(ports["hangzhou"], 1, 0.3) == []
    wait_until(lambda: lab.state("hangzhou")["strangers_filtered"] - before == 10, "strangers are counted", 30)


def stream(port: PacketPort, seconds: float, frames_per_s: float, first: int) -> int:
    """Send numbered frames at a steady rate; return the number after the last one."""
    start_s, psn = time.monotonic(), first
    while (passed_s := time.monotonic() - start_s) < seconds:
        while psn - first < passed_s * frames_per_s:
            port.send(101, roce_frame(psn=psn, size=1024))
            psn += 1
        time.sleep(0.002)
    return psn


def count_frames(port: PacketPort, counts: Counter[int], done: threading.Event) -> None:
    """Count the numbers that arrive, until two quiet seconds after `done`."""
    quiet_s = time.monotonic()
    while not done.is_set() or time.monotonic() - quiet_s < 2:
        for _, frame in take(port, 1, 0.05):
            counts[int.from_bytes(frame[51:54], "big")] += 1
            quiet_s = time.monotonic()


def test_a_bandwidth_changes_without_losing_a_packet(lab: TenantLab, ports: dict[str, PacketPort]) -> None:
    """Every number of a stream arrives once, while the class of its tenant is changed three times."""
    counts, done = Counter[int](), threading.Event()
    reader = threading.Thread(target=count_frames, args=(ports["hangzhou"], counts, done), daemon=True)
    reader.start()
    first = psn = 1_000
    for gbps in (0.03, 0.06, 0.025):
        psn = stream(ports["nanjing"], 0.5, 200, psn)
        for site in SITES:
            lab.write(site, tenants=tenants(gbps))
        psn = stream(ports["nanjing"], 0.5, 200, psn)
        for _ in range(300):
            if rate_is(lab, gbps):
                break
            psn = stream(ports["nanjing"], 0.1, 200, psn)
        assert rate_is(lab, gbps)
    done.set()
    reader.join()
    assert counts == Counter(range(first, psn))


def rate_is(lab: TenantLab, gbps: float) -> bool:
    """Return whether the kernel's class of the first tenant has that rate."""
    shown = subprocess.run(
        ["ip", "netns", "exec", lab.gateway["nanjing"], "tc", "class", "show", "dev", "wan", "classid", "1:10"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return f"rate {gbps * 1000:.0f}Mbit" in shown.stdout


def class_counts(lab: TenantLab, class_id: str) -> dict[str, int]:
    """Return what the kernel has counted of nanjing's class."""
    argv = [
        "ip",
        "netns",
        "exec",
        lab.gateway["nanjing"],
        "tc",
        "-s",
        "class",
        "show",
        "dev",
        "wan",
        "classid",
        class_id,
    ]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(dropped|overlimits) (\d+)", shown)}


def saturate(port: PacketPort, seconds: float) -> None:
    """Send more than a tenant may."""
    stop_s, psn = time.monotonic() + seconds, 100_000
    while time.monotonic() < stop_s:
        for _ in range(60):
            psn += 1
            port.send(101, roce_frame(psn=psn, size=1024))
        time.sleep(0.01)


def test_a_saturated_tenant_does_not_delay_heartbeats(lab: TenantLab, ports: dict[str, PacketPort]) -> None:
    """While a tenant's queue is full, heartbeats pass it: the kernel drops none, and they are heard."""
    before = lab.state("hangzhou")["links"][0]["num_heard"]
    saturate(ports["nanjing"], 4)
    assert class_counts(lab, "1:10")["overlimits"] > 0
    assert class_counts(lab, "1:3")["dropped"] == 0
    assert lab.state("hangzhou")["links"][0]["num_heard"] > before


def test_a_removed_tenant_ends_at_once(lab: TenantLab, ports: dict[str, PacketPort]) -> None:
    """Its frames are dropped as soon as the file is read; those of the others pass on."""
    lab.write("hangzhou", tenants=tenants()[:1] + tenants()[2:])

    def is_dropped() -> bool:
        ports["nanjing"].send(102, roce_frame(psn=5))
        return not take(ports["hangzhou"], 1, 0.3)

    wait_until(is_dropped, "the tenant is removed", 30)
    ports["nanjing"].send(102, roce_frame(psn=6))
    ports["nanjing"].send(101, roce_frame(psn=7))
    found = take(ports["hangzhou"], 1, 20) + take(ports["hangzhou"], 1, 0.2)
    assert found == [(101, roce_frame(psn=7))]


def test_what_a_machine_has_is_said() -> None:
    """Each feature is tried; what is missing says why, and what still works."""
    found = {one.name: one for one in probe_tenancy()}
    assert found["root and commands"].works
    for one in found.values():
        assert one.works or one.why
        assert one.without
    assert not [name for name in Path("/run/netns").iterdir() if f"isthmus-{os.getpid()}-999999" in name.name]


def test_a_second_gateway_of_an_address_is_refused(lab: TenantLab) -> None:
    """It says so, and leaves what the first one has set."""
    argv = ["ip", "netns", "exec", lab.gateway["nanjing"], sys.executable, "-m", "isthmus", "wan", "tenants"]
    argv += [str(lab.file("nanjing")), "--run", "--trunk", "trunk", "--device", "wan"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cannot listen at 10.0.0.1:4789" in done.stderr
    shown = subprocess.run(
        ["ip", "netns", "exec", lab.gateway["nanjing"], "nft", "list", "tables"], capture_output=True, text=True
    ).stdout
    assert "isthmus_tenants" in shown
    assert class_counts(lab, "1:3")


def test_without_rights_nothing_is_started(tmp_path: Path) -> None:
    """A process without capabilities says so before it sets anything, and what still works."""
    file = tmp_path / "tenants.json"
    document = {"site": "nanjing", "gateways": {"nanjing": "10.0.0.1", "hangzhou": "10.0.0.2"}, "gbps": 1}
    file.write_text(json.dumps({**document, "tenants": [tenant(1)]}))
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "isthmus", "wan", "tenants"]
    done = subprocess.run([*argv, str(file), "--run", "--trunk", "lo"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "root" in done.stderr
    assert "the file is checked" in done.stderr

"""The kernel's rules: tried in the NIC, then in the kernel; frames without a rule keep their tenant."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence

import pytest

from isthmus.core.errors import UnavailableError
from isthmus.wan.tenancy.tenant_events import FrameFromTenant, FrameFromTunnel, TenantEvent
from isthmus.wan.tenants.choose_datapath import CarriedIn, choose_datapath
from isthmus.wan.tenants.kernel_datapath import KernelDatapath
from isthmus.wan.tenants.probe_tenancy import FLOWER, probe_tenancy
from isthmus.wan.tenants.tenant_ports import TenantPorts
from tests.wan.tenancy.tenancy_lab import roce_frame, tenant, tenants_file
from tests.wan.tenancy.test_kernel_text import rule

FRAME = roce_frame()


class FakeKernel:
    """Takes lines of tc, except those with a word that it does not know; its devices are sockets."""

    def __init__(self, *unknown: str) -> None:
        self.unknown, self.lines, self.shown = unknown, list[str](), "[]"
        self.devices: dict[str, socket.socket] = {}
        self.events: list[tuple[object, bytes]] = []

    def run(self, command: str, lines: Sequence[str]) -> None:
        """Take lines."""
        for line in lines:
            if any(word in line for word in self.unknown):
                raise UnavailableError("the kernel refuses it")
            self.lines.append(f"{command} {line}")

    def open_tap(self, name: str) -> int:
        """Return the descriptor of a device."""
        own, self.devices[name] = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.setblocking(False)
        return own.detach()

    def give(self, event: TenantEvent) -> None:
        """Keep an event with its frame."""
        assert isinstance(event, FrameFromTenant | FrameFromTunnel)
        who = event.vlan if isinstance(event, FrameFromTenant) else (event.vni, event.gateway)
        self.events.append((who, bytes(event.buffer.view)))

    def datapath(self, trunk: str | None = "trunk") -> KernelDatapath:
        """Return a datapath over this kernel."""
        show = lambda _argv: self.shown  # noqa: E731
        return KernelDatapath(tenants_file(), trunk, self.give, self.run, show, self.open_tap)


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    """Return a kernel without NICs that take rules."""
    found = FakeKernel("skip_sw")
    yield found
    for one in found.devices.values():
        one.close()


def tagged(*vlans: int) -> bytes:
    """Return the frame under tags, the outer one first."""
    return FRAME[:12] + b"".join(b"\x81\0" + vlan.to_bytes(2, "big") for vlan in vlans) + FRAME[12:]


def test_frames_without_a_rule_keep_tenant_and_gateway(kernel: FakeKernel) -> None:
    """By their tags: a tenant's VLAN, then the number of the site; heartbeats come by a device of their own."""
    datapath = kernel.datapath()
    kernel.devices["ist-out"].send(tagged(102))
    kernel.devices["ist-in"].send(tagged(1, 101))
    kernel.devices["ist-in"].send(tagged(7, 99))
    kernel.devices["ist-ctl"].send(tagged(1))
    for read in datapath.sources().values():
        read()
    hangzhou = b"\x0a\0\0\2"
    assert kernel.events == [(102, FRAME), ((5001, hangzhou), FRAME), ((0, b""), FRAME), ((1, hangzhou), FRAME)]
    datapath.close()


def test_a_rule_goes_to_the_nic_first(kernel: FakeKernel) -> None:
    """Then to the kernel; where neither takes it, the flow stays with the process, and a rule that it had goes."""
    datapath = kernel.datapath()
    kernel.unknown = ()
    assert datapath.install(rule(is_outgoing=True))
    assert "1 of 1 rules in the NIC" in datapath.label
    kernel.unknown = ("skip_sw",)
    assert datapath.install(rule(is_outgoing=False))
    assert "1 of 2 rules in the NIC" in datapath.label
    kernel.unknown = ("flower",)
    before = len(kernel.lines)
    assert not datapath.install(rule(is_outgoing=True, is_6=True))
    assert len(kernel.lines) == before
    kernel.unknown = ("skip_sw", "skip_hw")
    assert not datapath.install(rule(is_outgoing=True))
    assert kernel.lines[-1].startswith("tc filter del dev trunk ingress prio 12 handle 1 ")
    datapath.close()


def test_rules_that_had_frames_are_told(kernel: FakeKernel) -> None:
    """Once for each time that their count has grown; frames count for the link of their gateway."""
    datapath = kernel.datapath()
    out = rule(is_outgoing=True)
    datapath.install(out)
    kernel.shown = json.dumps([{"options": {"handle": 1, "actions": [{"stats": {"packets": 5}}]}}, {"protocol": "all"}])
    assert list(datapath.used()) == [out.key]
    assert list(datapath.used()) == []
    assert datapath.counts() == {b"\x0a\0\0\2": (5, 0, 0)}
    datapath.remove(out)
    assert list(datapath.used()) == []
    datapath.close()


def test_a_removed_tenants_frames_are_led_nowhere(kernel: FakeKernel) -> None:
    """Its VNI no longer comes to the process; the others' lines are set again as they were."""
    datapath = kernel.datapath()
    assert any("enc_key_id 5002" in line for line in kernel.lines)
    kernel.lines.clear()
    datapath.change(tenants_file(tenants=[tenant(1)]))
    assert [line for line in kernel.lines if " del " in line] == [
        f"tc filter del dev ist-vxlan ingress prio 100 handle {102 << 8 | 1} protocol all flower"
    ]
    assert not any("enc_key_id 5002" in line for line in kernel.lines)
    datapath.close()


def test_what_a_start_sets_is_undone(kernel: FakeKernel) -> None:
    """A kernel that refuses a line leaves no device behind."""
    kernel.unknown = ("matchall",)
    with pytest.raises(UnavailableError):
        kernel.datapath()
    assert kernel.lines[-1] == "ip link del ist-vxlan"
    for device in kernel.devices.values():
        with pytest.raises(OSError):
            device.send(b"x" * 20)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: sudo .venv/bin/python -m pytest -m root tests/wan/tenants")
def test_a_kernel_without_flower_is_said_before_the_start() -> None:
    """Where it is asked for; by itself the gateway takes what there is."""
    found = next(one for one in probe_tenancy() if one.name == FLOWER)
    if found.works:
        pytest.skip("this kernel has tc-flower")
    with pytest.raises(UnavailableError, match="tc-flower"):
        choose_datapath(CarriedIn.FLOWER)(tenants_file(), TenantPorts(None), lambda _event: None)

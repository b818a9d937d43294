"""What the kernel is told for tenants: classes that keep their numbers, VNIs in a table, filters, rules of flows."""

from __future__ import annotations

import re
import shutil
import subprocess
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.netns import effective_capabilities
from isthmus.wan.tenancy.kernel.flower_rules import GatewayDevices, flower_defaults, flower_lines
from isthmus.wan.tenancy.kernel.stranger_filter import stranger_filter
from isthmus.wan.tenancy.kernel.tenant_shaping import CONTROL, OTHER, ROOT, shaping_commands, tenant_shaping
from isthmus.wan.tenancy.tenant_events import FlowKey, FlowRule
from tests.wan.tenancy.tenancy_lab import tenant, tenants_file

DEVICES = GatewayDevices(
    trunk="trunk", vxlan="tunnels", from_tenants="slow0", from_tunnel="slow1", from_control="slow2"
)


def test_a_bandwidth_is_changed_in_place() -> None:
    """Nothing is removed or added, so that no packet in a queue is lost."""
    before = tenant_shaping(tenants_file(tenants=[tenant(1), tenant(2)]))
    after = tenant_shaping(tenants_file(tenants=[tenant(1, gbps=0.5), tenant(2)]), before)
    lines = shaping_commands("eth0", before, after)
    assert {line.split()[1] for line in lines} == {"change"}
    assert any("rate 500000kbit ceil 500000kbit" in line for line in lines)
    assert shaping_commands("eth0", after, after) == []


def test_control_comes_before_all_tenants() -> None:
    """Its class has the first priority and may use the whole device; a tenant's is never before it."""
    classes = {one.minor: one for one in tenant_shaping(tenants_file()).classes}
    assert classes[CONTROL].ceil_kbps == classes[ROOT].rate_kbps
    others = [one for one in classes.values() if one.minor not in (ROOT, CONTROL)]
    assert classes[CONTROL].priority < min(one.priority for one in others)
    assert classes[OTHER].priority == max(one.priority for one in others)


@given(seed=st.integers(0, 2**40))
def test_any_run_of_files_leads_to_what_the_last_one_says(seed: int) -> None:
    """Applied to a model of tc, every change leaves one class a tenant and one node a VNI, within the device."""
    rng, shaping = Random(seed), None
    classes: dict[str, str] = {}
    nodes: dict[str, tuple[str, str]] = {}
    for _ in range(6):
        numbers = rng.sample(range(1, 2000), rng.randint(0, 8))
        file = tenants_file(
            tenants=[tenant(n, vni=256 * n + rng.randint(0, 1), gbps=rng.randint(1, 9) / 1000) for n in numbers]
        )
        after = tenant_shaping(file, shaping)
        for line in shaping_commands("eth0", shaping, after):
            kind, verb, text = line.split(" ", 2)
            if kind == "class":
                minor = re.findall(r"classid 1:(\w+)", text)[0]
                assert (minor in classes) == (verb != "add")
                if verb == "del":
                    del classes[minor]
                else:
                    classes[minor] = re.findall(r"rate (\d+)kbit", text)[0]
            elif kind == "filter" and " ht " in text:
                node = re.findall(r"handle (\S+)", text)[0]
                assert node not in nodes
                nodes[node] = re.findall(r"match u32 (\S+) .* flowid 1:(\w+)", text)[0]
            elif kind == "filter" and verb == "del":
                del nodes[re.findall(r"handle (\S+)", text)[0]]
        shaping = after
        wanted = {one.vni: round(one.gbps * 1e6) for one in file.tenants}
        found = {int(vni, 16) >> 8: int(classes[minor]) for vni, minor in nodes.values()}
        assert found == {**wanted, 1: 10_000}
        assert len(classes) == len(file.tenants) + 4
        assert sum(map(int, classes.values())) - int(classes["1"]) <= int(classes["1"])


def test_strangers_are_filtered_by_address() -> None:
    """Only the gateways of the file reach the port; what does not is counted."""
    script = stranger_filter(tenants_file())
    assert "ip daddr 10.0.0.1 udp dport 4789 ip saddr != { 10.0.0.2 } counter name strangers drop" in script
    assert "tcp dport 4789" in script


def rule(*, is_outgoing: bool, port: str | None = None, is_6: bool = False) -> FlowRule:
    """Return a rule of a RoCEv2 flow."""
    ends = (bytes(15) + b"\1", bytes(15) + b"\2") if is_6 else (b"\x0a\1\0\1", b"\x0a\2\0\1")
    key = FlowKey(5001, is_outgoing, 0x86DD if is_6 else 0x0800, 17, *ends, 49152, 4791)
    return FlowRule(key, 101, port, b"\x0a\0\0\2", 26)


def test_a_flow_is_matched_by_tenant_addresses_and_ports() -> None:
    """Out: the VLAN goes, the tunnel's key comes with the mark; in: VNI and gateway match, and the VLAN comes back."""
    file = tenants_file()
    (out,) = flower_lines("replace", rule(is_outgoing=True), 7, DEVICES, file, "skip_sw")
    match = "vlan_id 101 vlan_ethtype ipv4 ip_proto udp src_ip 10.1.0.1 dst_ip 10.2.0.1 src_port 49152 dst_port 4791"
    key = "tunnel_key set id 5001 src_ip 10.0.0.1 dst_ip 10.0.0.2 dst_port 4789 tos 0x68 nocsum"
    assert f"protocol 802.1Q flower skip_sw {match} action vlan pop action {key} action mirred" in out
    (back,) = flower_lines("replace", rule(is_outgoing=False), 7, DEVICES, file, "skip_hw")
    assert "dev tunnels ingress" in back
    assert "enc_key_id 5001 enc_src_ip 10.0.0.2 enc_dst_ip 10.0.0.1 enc_dst_port 4789" in back
    assert back.endswith(
        "action tunnel_key unset action vlan push id 101 protocol 802.1Q action mirred egress redirect dev trunk"
    )


@pytest.mark.skipif(shutil.which("tc") is None, reason="needs iproute2")
@pytest.mark.skipif(not effective_capabilities() & 1 << 12, reason="needs root")
@pytest.mark.parametrize("is_6", [False, True])
@pytest.mark.parametrize("port", [None, "lo"])
@pytest.mark.parametrize("is_outgoing", [False, True])
def test_tc_understands_every_rule(is_6: bool, port: str | None, is_outgoing: bool) -> None:
    """`tc` takes the words of each line: what stops it is a kernel without the classifier, or nothing."""
    devices = GatewayDevices(trunk="lo", vxlan="lo", from_tenants="lo", from_tunnel="lo", from_control="lo")
    file = tenants_file(tenants=[tenant(1, port=port)])
    found = rule(is_outgoing=is_outgoing, port=port, is_6=is_6)
    lines = flower_lines("replace", found, 7, devices, file, "skip_hw") + flower_defaults(devices, file)
    for line in lines:
        if line.startswith("filter"):
            line = line.replace("ingress", "parent 9999:")
        else:
            continue
        done = subprocess.run(["tc", *line.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 2, line
        assert re.search(r"answers|Error: |talking to the kernel", done.stderr), (line, done.stderr)
        assert not re.search(r"Usage|What is|Illegal|Unknown|bad action", done.stderr), (line, done.stderr)

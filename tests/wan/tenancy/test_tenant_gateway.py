"""Tenants with equal addresses at two gateways: who meets whom, what passes, and what is dropped."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.tenancy.flow_table import IDLE_S
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.tenant_events import (
    DatagramFromGateway,
    FrameFromTenant,
    FrameFromTunnel,
    InstallRule,
    RemoveRule,
    RuleRefused,
    RulesUsed,
    SendToGateway,
    SendToTenant,
    TenantsChanged,
    Tick,
)
from isthmus.wan.tenancy.tenant_gateway import TenantGateway
from tests.wan.tenancy.tenancy_lab import SITES, TwoGateways, arp_frame, ip_frame, roce_frame, tenant, tenants_file

FRAME = roce_frame()


def test_a_frame_arrives_at_its_own_tenant_with_the_same_bytes() -> None:
    """The same addresses under two VLANs reach two tenants, each its own, byte for byte."""
    lab = TwoGateways()
    for vlan in (101, 102):
        for frame in (FRAME, roce_frame("fd00:1::1", "fd00:2::1"), ip_frame("10.1.0.1", "10.2.0.9", 6, 999, 29500)):
            assert lab.send("nanjing", frame, vlan) == [("hangzhou", vlan, frame)]
    assert {one.vni for one in lab.sent} == {5001, 5002}


@given(seed=st.integers(0, 2**40))
def test_no_frame_ever_reaches_another_tenant(seed: int) -> None:
    """Of any mix of tenants, directions and protocols, what is handed over has its own tenant's VLAN and bytes."""
    rng = Random(seed)
    lab = TwoGateways(tenants=[tenant(n) for n in range(1, 6)])
    for number in range(60):
        site = rng.choice(SITES)
        ends = ("10.1.0.1", "10.2.0.1") if site == "nanjing" else ("10.2.0.1", "10.1.0.1")
        vlan = rng.randint(101, 106)
        frame = rng.choice([roce_frame(*ends, psn=number), ip_frame(*ends, 6, 1000 + number, 29500), arp_frame(*ends)])
        found = lab.send(site, frame, vlan)
        other = SITES[1 - SITES.index(site)]
        assert found == ([(other, vlan, frame)] if vlan < 106 else [])


@pytest.mark.parametrize(
    ("frame", "vlan", "reason"),
    [
        (FRAME, 99, "unknown VLAN"),
        (roce_frame("10.9.0.1"), 101, "not an address of the tenant"),
        (roce_frame("10.2.0.2"), 101, "not an address of the tenant"),
        (roce_frame("10.1.0.1", "10.1.0.2"), 101, "to no other site"),
        (roce_frame("10.1.0.1", "10.9.0.2"), 101, "to no other site"),
        (ip_frame("10.1.0.1", "10.2.0.1", 6, 29500, 22), 101, "not an allowed port"),
        (ip_frame("10.1.0.1", "10.2.0.1", 17, 4791, 53), 101, "not an allowed port"),
        (ip_frame("10.1.0.1", "10.2.0.1", 47, 0, 0), 101, "not an allowed port"),
        (FRAME[:30], 101, "malformed"),
        (roce_frame(size=2000), 101, "too long"),
    ],
)
def test_what_is_not_the_tenants_is_dropped_and_counted(frame: bytes, vlan: int, reason: str) -> None:
    """Each stranger has its reason, and nothing leaves for the other site."""
    lab = TwoGateways()
    assert lab.send("nanjing", frame, vlan) == []
    assert lab.dropped("nanjing") == {reason: 1}
    assert lab.sent == []


@pytest.mark.parametrize(
    ("gateway", "vni", "frame", "reason"),
    [
        ("10.0.0.9", 5001, FRAME, "unknown gateway"),
        ("10.0.0.1", 77, FRAME, "unknown VNI"),
        ("10.0.0.1", 5001, roce_frame("10.9.0.1"), "not an address of the tenant"),
        ("10.0.0.1", 5001, roce_frame("10.1.0.1", "10.2.5.1", opcode=0x7F)[:50], "malformed"),
        ("10.0.0.1", 5001, ip_frame("10.1.0.1", "10.2.0.1", 6, 1, 22), "not an allowed port"),
        ("10.0.0.1", 1, FRAME, "malformed"),
    ],
)
def test_strangers_from_the_network_are_dropped_and_counted(
    gateway: str, vni: int, frame: bytes, reason: str
) -> None:  # fmt: skip
    """A VNI, gateway, address or port that is not in the file reaches no tenant."""
    lab = TwoGateways()
    data = b"\x08\0\0\0" + (vni << 8).to_bytes(4, "big") + frame
    address = bytes(map(int, gateway.split(".")))
    lab.give("hangzhou", DatagramFromGateway(address, 0, FrameBuffer(data)))
    assert lab.handed == []
    assert lab.dropped("hangzhou") == {reason: 1}


def test_a_known_flow_from_another_site_than_its_own_is_dropped() -> None:
    """With three sites, what one of them sends in the name of another is no tenant's."""
    networks = {"nanjing": ["10.1.0.0/16"], "hangzhou": ["10.2.0.0/16"], "suzhou": ["10.3.0.0/16"]}
    addresses = {"nanjing": "10.0.0.1", "hangzhou": "10.0.0.2", "suzhou": "10.0.0.3"}
    gateway = TenantGateway(tenants_file("hangzhou", [tenant(1, networks=networks)], gateways=addresses), 1)
    for address, num_handed in ((b"\x0a\0\0\1", 1), (b"\x0a\0\0\3", 0)):
        out = gateway.handle(FrameFromTunnel(5001, address, FrameBuffer(FRAME)), 0.0)
        assert sum(isinstance(one, SendToTenant) for one in out) == num_handed
    assert gateway.statistics(0.0).dropped == {"not an address of the tenant": 1}


def test_answers_pass_where_the_question_was_allowed() -> None:
    """A TCP answer comes back from an allowed port; the same frame without the question does not."""
    answer = ip_frame("10.2.0.1", "10.1.0.1", 6, 29500, 999)
    lab = TwoGateways()
    assert lab.send("hangzhou", answer) == []
    lab.send("nanjing", ip_frame("10.1.0.1", "10.2.0.1", 6, 999, 29500))
    assert lab.send("hangzhou", answer) == [("nanjing", 101, answer)]


def test_neighbours_are_found_across_sites() -> None:
    """A question for an address of the other site goes there, and nowhere else."""
    lab = TwoGateways()
    question = arp_frame("10.1.0.1", "10.2.0.1")
    assert lab.send("nanjing", question) == [("hangzhou", 101, question)]
    assert lab.send("nanjing", arp_frame("10.1.0.1", "10.1.0.2")) == []


def test_a_tenant_has_no_more_flows_than_it_may() -> None:
    """Further ones are dropped, and take no place of another tenant's; idle ones make room."""
    lab = TwoGateways(tenants=[tenant(1, max_flows=3), tenant(2)])
    frames = [ip_frame("10.1.0.1", "10.2.0.1", 6, port, 29500) for port in range(1000, 1005)]
    assert sum(len(lab.send("nanjing", frame)) for frame in frames) == 3
    assert lab.dropped("nanjing") == {"too many flows": 2}
    assert len(lab.send("nanjing", frames[0], 102)) == 1
    lab.now_s = 2 * IDLE_S
    lab.give("nanjing", Tick())
    lab.give("hangzhou", Tick())
    assert len(lab.send("nanjing", frames[4])) == 1


# Rules


def test_the_first_frame_of_a_flow_asks_for_its_rule() -> None:
    """Both gateways ask once for a flow, with VNI, VLAN, gateway and mark."""
    lab = TwoGateways()
    for _ in range(3):
        lab.send("nanjing", FRAME)
    (there,), (here,) = (list(lab.rules[site].values()) for site in SITES)
    assert (there.key.is_outgoing, there.key.vni, there.vlan, there.dscp) == (True, 5001, 101, 26)
    assert there.gateway == b"\x0a\0\0\2"
    assert (here.key.is_outgoing, here.gateway) == (False, b"\x0a\0\0\1")
    assert lab.gateways["nanjing"].statistics(0.0).rules == 1


def test_a_refused_rule_leaves_the_flow_to_the_process() -> None:
    """It is not asked for again, and frames go on."""
    lab = TwoGateways()
    lab.send("nanjing", FRAME)
    (rule,) = lab.rules["nanjing"].values()
    lab.give("nanjing", RuleRefused(rule.key))
    out = lab.gateways["nanjing"].handle(FrameFromTenant(101, FrameBuffer(FRAME)), 0.0)
    assert [type(one) for one in out] == [SendToGateway]
    assert lab.gateways["nanjing"].statistics(0.0).rules == 0


def test_frames_without_ports_get_no_rule() -> None:
    """Neighbours and ICMP stay with the process."""
    lab = TwoGateways()
    lab.send("nanjing", arp_frame("10.1.0.1", "10.2.0.1"))
    lab.send("nanjing", ip_frame("10.1.0.1", "10.2.0.1", 1, 0, 0))
    assert not lab.rules["nanjing"]
    assert not lab.rules["hangzhou"]


def test_an_idle_flow_loses_its_rule_and_a_used_one_does_not() -> None:
    """What a kernel carries is not idle, though no frame passes the process."""
    lab = TwoGateways()
    used, idle = roce_frame(), roce_frame("10.1.0.2")
    lab.send("nanjing", used)
    lab.send("nanjing", idle)
    keys = list(lab.rules["nanjing"])
    lab.now_s = IDLE_S
    lab.give("nanjing", RulesUsed(keys[:1]))
    lab.now_s = IDLE_S + 11
    lab.give("nanjing", Tick())
    assert list(lab.rules["nanjing"]) == keys[:1]


def test_another_file_ends_what_it_does_not_allow_at_once() -> None:
    """A removed tenant's rules go, a removed port's too; those of the others stay, and their frames pass on."""
    lab = TwoGateways()
    tcp = ip_frame("10.1.0.1", "10.2.0.1", 6, 999, 29500)
    for vlan in (101, 102):
        lab.send("nanjing", FRAME, vlan)
        lab.send("nanjing", tcp, vlan)
    assert len(lab.rules["nanjing"]) == 4
    only_roce = [{"protocol": "udp", "to_ports": 4791}]
    lab.give("nanjing", TenantsChanged(tenants_file(tenants=[tenant(1, allow=only_roce)])))
    (left,) = lab.rules["nanjing"].values()
    assert (left.key.vni, left.key.protocol) == (5001, 17)
    assert lab.send("nanjing", FRAME) == [("hangzhou", 101, FRAME)]
    assert lab.send("nanjing", tcp) == lab.send("nanjing", FRAME, 102) == []
    assert lab.dropped("nanjing") == {"not an allowed port": 1, "unknown VLAN": 1}


@given(seed=st.integers(0, 2**40))
def test_rules_are_only_of_flows_that_the_last_file_allows(seed: int) -> None:
    """After any run of frames and files, no rule is of a tenant, address or port that the file does not have."""
    rng = Random(seed)
    lab = TwoGateways()
    gateway = lab.gateways["nanjing"]
    for _ in range(30):
        if rng.random() < 0.3:
            first = rng.choice([4791, "29500-29600"])
            numbers = rng.sample([1, 2, 3], rng.randint(0, 3))
            allow = [{"protocol": "udp" if first == 4791 else "tcp", "to_ports": first}]
            lab.give("nanjing", TenantsChanged(tenants_file(tenants=[tenant(n, allow=allow) for n in numbers])))
        frame = rng.choice([FRAME, ip_frame("10.1.0.1", "10.2.0.1", 6, rng.randint(1, 3), 29500)])
        lab.send("nanjing", frame, rng.randint(101, 103))
        allowed = {(one.vni, rule.protocol) for one in gateway.file.tenants for rule in one.allow}
        names = {6: "tcp", 17: "udp"}
        assert {(key.vni, names[key.protocol]) for key in lab.rules["nanjing"]} <= allowed
        assert gateway.statistics(0.0).rules == len(lab.rules["nanjing"])


# Marks


@pytest.mark.parametrize("ecn", range(4))
def test_marks_are_copied_out_and_back(ecn: int) -> None:
    """The outer header has the frame's mark, and the frame comes out as it was."""
    lab = TwoGateways()
    frame = roce_frame(ecn=ecn)
    assert lab.send("nanjing", frame) == [("hangzhou", 101, frame)]
    assert bytes(lab.sent[0].packet)[1] == 26 << 2 | ecn


def test_a_mark_on_the_way_reaches_the_nic() -> None:
    """A frame that may carry marks comes out marked, with a right checksum; the link counts it."""
    lab = TwoGateways()
    lab.mark = 1
    ((_, _, found),) = lab.send("nanjing", roce_frame(ecn=2))
    assert found == roce_frame(ecn=3)
    assert lab.send("nanjing", roce_frame(ecn=0)) == [("hangzhou", 101, roce_frame(ecn=0))]


def test_a_marked_frame_that_cannot_carry_a_mark_is_dropped() -> None:
    """As RFC 6040 says: the router has dropped it, as it were."""
    lab = TwoGateways()
    data = b"\x08\0\0\0" + (5001 << 8).to_bytes(4, "big") + roce_frame(ecn=0)
    lab.give("hangzhou", DatagramFromGateway(b"\x0a\0\0\1", 3, FrameBuffer(data)))
    assert lab.handed == []
    assert lab.dropped("hangzhou") == {"marked, and cannot carry a mark": 1}


def test_notifications_pass_and_are_counted() -> None:
    """Congestion notification packets (CNP) reach the NIC that has to slow down."""
    lab = TwoGateways()
    cnp = roce_frame("10.2.0.1", "10.1.0.1", opcode=Opcode.CNP, size=16)
    assert lab.send("hangzhou", cnp) == [("nanjing", 101, cnp)]
    assert lab.gateways["nanjing"].statistics(0.0).notifications == 1


# Congestion


def carried(lab: TwoGateways) -> str:
    """Return how nanjing's RoCEv2 flow goes."""
    (found,) = lab.gateways["nanjing"].statistics(lab.now_s).carried
    return found


def test_a_lossy_link_takes_the_flow_to_tcp_and_back() -> None:
    """First another mark, then TCP without a rule, then back to the first mark, and nothing handed twice."""
    lab = TwoGateways()
    lab.connect_tcp()
    lab.pass_time(2, frames_each=20)
    assert carried(lab) == "direct"
    lab.lose_every = 20
    seen = list[str]()
    for _ in range(40):
        lab.pass_time(0.1, frames_each=20)
        seen += [carried(lab)] if carried(lab) not in seen[-1:] else []
        if carried(lab) == "marked":
            assert {one.dscp for one in lab.rules["nanjing"].values()} == {46}
    assert seen == ["direct", "marked", "tcp"]
    assert not lab.rules["nanjing"]
    before, handed = lab.num_data, len(lab.handed)
    lab.pass_time(1, frames_each=20)
    assert lab.num_data == before
    assert len(lab.handed) == handed + 200
    lab.lose_every = 0
    lab.pass_time(20, frames_each=20)
    assert carried(lab) == "direct"
    assert {one.dscp for one in lab.rules["nanjing"].values()} == {26}
    frames = [frame for site, _, frame in lab.handed if site == "hangzhou"]
    assert len(set(frames)) == len(frames)


def test_a_flow_comes_back_from_tcp_in_order() -> None:
    """Frames wait while earlier ones are under way in TCP, and follow them; without the connection they go at once."""
    lab = TwoGateways()
    lab.connect_tcp()
    lab.lose_every = 3
    lab.pass_time(4, frames_each=20)
    assert carried(lab) == "tcp"
    lab.lose_every, lab.tcp_waits = 0, []
    lab.pass_time(8, frames_each=2)
    assert carried(lab) != "tcp"
    before = len(lab.handed)
    lab.pass_time(0.1, frames_each=5)
    assert len(lab.handed) == before
    lab.release_tcp()
    numbers = [int.from_bytes(frame[51:54], "big") for site, _, frame in lab.handed[before:] if site == "hangzhou"]
    assert numbers == sorted(numbers)
    assert len(numbers) > 100


def test_a_lost_connection_does_not_hold_a_flow() -> None:
    """What waited goes by VXLAN, and so does what follows."""
    lab = TwoGateways()
    lab.connect_tcp()
    lab.lose_every = 3
    lab.pass_time(4, frames_each=20)
    assert carried(lab) == "tcp"
    lab.lose_every = 0
    lab.connect_tcp(is_up=False)
    assert len(lab.send("nanjing", FRAME)) == 1


def test_resends_of_a_nic_alone_take_its_flow_to_tcp() -> None:
    """The NIC goes back again and again, though too few frames pass for the link's own measure."""
    lab = TwoGateways()
    lab.connect_tcp()
    for _ in range(60):
        for psn in (1, 2, 3, 2, 3, 4, 3, 4):
            lab.send("nanjing", roce_frame(psn=psn))
        lab.pass_time(0.1)
    assert carried(lab) in ("marked", "tcp")


def test_other_flows_than_roce_keep_their_way() -> None:
    """TCP slows down by itself."""
    lab = TwoGateways()
    lab.connect_tcp()
    tcp = ip_frame("10.1.0.1", "10.2.0.1", 6, 999, 29500)
    lab.lose_every = 3
    for _ in range(40):
        for _ in range(20):
            lab.send("nanjing", tcp)
        lab.pass_time(0.1)
    assert carried(lab) == "direct"


# Heartbeats


def test_heartbeats_have_a_vni_and_a_mark_of_their_own() -> None:
    """Gateways that hear each other know the round trip; silence is seen after a second."""
    lab = TwoGateways()
    out = lab.gateways["nanjing"].handle(Tick(), 0.0)
    (beat,) = [one for one in out if isinstance(one, SendToGateway)]
    assert (beat.vni, bytes(beat.packet)[1] >> 2) == (1, 48)
    lab.pass_time(1)
    (link,) = lab.gateways["nanjing"].statistics(lab.now_s).links
    assert link.is_up
    assert link.round_trip_s < 0.2
    assert not lab.gateways["nanjing"].statistics(lab.now_s + 2).links[0].is_up


def test_instructions_of_a_start_are_only_heartbeats() -> None:
    """Nothing is sent to tenants, and no rule is set, before a frame comes."""
    gateway = TenantGateway(tenants_file(), 1)
    out = gateway.handle(Tick(), 0.0)
    assert not [one for one in out if isinstance(one, SendToTenant | InstallRule | RemoveRule)]
    assert gateway.next_tick_s() == pytest.approx(0.1)
    assert replace(gateway.statistics(0.0), links=()).flows == 0

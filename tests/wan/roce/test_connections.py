"""Queue pairs that CM messages set up: both directions, numbers and MTU are known before the first packet."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.roce import RocePacket, build
from isthmus.wan.roce.cm_message import CmKind, CmMessage, parse_cm
from isthmus.wan.roce.gateway.connections import Connections
from isthmus.wan.roce.gateway.gateway_events import NicFrame
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import PostWork, RoceNic
from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_view import view_frame
from tests.wan.roce.cm_frames import DREP, DREQ, REJ, REP, REQ, RTU, cm_frame
from tests.wan.roce.gateway_lab import FAR, NEAR, End, GatewayLab

HERE, THERE = "10.1.0.1", "10.2.0.1"
SETTINGS = GatewaySettings(link_gbps=1, nic_gbps=10, acknowledge_near=True, round_trip_s=0.04)


def send(lab: GatewayLab, site: int, frame: bytes) -> None:
    """Let a NIC of `site` send a message; it crosses the link."""
    gateway = lab.gateways[site]
    assert gateway is not None
    for one in gateway.handle(NicFrame(frame), lab.now_s):
        lab.carry_out(site, one)
    lab.run(lab.now_s + 0.1, stop_when_idle=False)


def set_up(lab: GatewayLab, ends: tuple[End, End], local_id: int) -> list[bytes]:
    """Exchange the messages of a connection; return the frames."""
    near, far = (one.nic.settings for one in ends)
    req = cm_frame(HERE, THERE, REQ, local_id=local_id, queue_pair=near.queue_pair, first_psn=near.first_psn)
    rep = cm_frame(
        THERE, HERE, REP, local_id=9000 + local_id, remote_id=local_id, queue_pair=far.queue_pair,
        first_psn=far.first_psn,
    )  # fmt: skip
    rtu = cm_frame(HERE, THERE, RTU, local_id=local_id, remote_id=9000 + local_id)
    for site, frame in ((NEAR, req), (FAR, rep), (NEAR, rtu)):
        send(lab, site, frame)
    return [req, rep, rtu]


def connect(lab: GatewayLab, *, near_psn: int, far_psn: int) -> tuple[End, End]:
    """Return a queue pair at a shared port, with the numbers of its first packets."""
    near, far = lab.connect(same_port=True, max_retries=10**9)
    near.nic = RoceNic(dataclasses.replace(near.nic.settings, first_psn=near_psn, peer_first_psn=far_psn))
    far.nic = RoceNic(dataclasses.replace(far.nic.settings, first_psn=far_psn, peer_first_psn=near_psn))
    return near, far


def test_messages_are_read_at_the_offsets_of_the_specification() -> None:
    """Every kind, its numbers and ids; other packets to queue pair 1 are none."""
    read = [
        parse_cm(view_frame(frame))
        for frame in (
            cm_frame(HERE, THERE, REQ, local_id=5, queue_pair=0xABCDEF, first_psn=0xFEDCBA, mtu=5),
            cm_frame(THERE, HERE, REP, local_id=6, remote_id=5, queue_pair=0x123456, first_psn=2),
            *(cm_frame(HERE, THERE, one, local_id=5, remote_id=6) for one in (RTU, DREQ, DREP, REJ)),
        )
    ]
    assert read[:2] == [
        CmMessage(CmKind.REQ, 5, -1, 0xABCDEF, 0xFEDCBA, 4096),
        CmMessage(CmKind.REP, 6, 5, 0x123456, 2),
    ]
    assert read[2:] == [CmMessage(one, 5, 6) for one in (CmKind.RTU, CmKind.DREQ, CmKind.DREP, CmKind.REJ)]
    assert parse_cm(view_frame(cm_frame(HERE, THERE, REQ, local_id=5, mtu=6))) is None
    assert parse_cm(view_frame(cm_frame(HERE, THERE, 0x11, local_id=5))) is None


def test_queue_pairs_with_one_port_are_paired_and_answered_from_the_first_packet() -> None:
    """What traffic cannot show is in the messages, which pass on unchanged; numbers may begin anywhere."""
    lab = GatewayLab(1, settings=SETTINGS)
    pairs = [connect(lab, near_psn=2**24 - 2, far_psn=700), connect(lab, near_psn=5, far_psn=9)]
    for number, pair in enumerate(pairs):
        req, rep, rtu = set_up(lab, pair, number)
        assert lab.to_nic[FAR][-2:] == [req, rtu]
        assert lab.to_nic[NEAR][-1] == rep
    start_s = lab.now_s
    for near, far in pairs:
        for number in range(5):
            lab.post(near, PostWork("send", bytes([number]) * 3000))
            lab.post(far, PostWork("write", bytes([number]) * 2000))
    lab.run(start_s + 0.003, stop_when_idle=False)
    assert [len(one.done) for pair in pairs for one in pair] == [5, 5, 5, 5]
    lab.run(start_s + 5)
    assert [len(one.arrived) for pair in pairs for one in pair] == [5, 5, 5, 5]
    gateway = lab.gateways[NEAR]
    assert gateway is not None
    assert gateway.statistics().num_paired == 2
    assert not lab.failures


def test_a_queue_pair_that_is_set_up_by_messages_again_begins_at_once() -> None:
    """Its numbers are those of the messages, however near the old ones; a message sent once more changes nothing."""
    lab = GatewayLab(2, settings=SETTINGS)
    ends = connect(lab, near_psn=100, far_psn=0)
    _, rep, _ = set_up(lab, ends, 1)
    for life, first_psn in ((2, 101), (3, 101)):
        for _ in range(5):
            lab.post(ends[NEAR], PostWork("send", bytes([life]) * 3000))
        send(lab, FAR, rep)
        lab.run(lab.now_s + 5)
        assert ends[FAR].arrived == [bytes([life]) * 3000] * 5
        near, far = (one.nic.settings for one in ends)
        ends = (
            lab.plug(RoceNic(dataclasses.replace(near, first_psn=first_psn)), NEAR),
            lab.plug(RoceNic(dataclasses.replace(far, peer_first_psn=first_psn)), FAR),
        )
        _, rep, _ = set_up(lab, ends, life)
    assert not lab.failures


@pytest.mark.attack
def test_what_was_set_up_and_is_not_used_is_bounded_and_ends() -> None:
    """Messages without end fill no more than the bound; a refused or ended connection is forgotten."""
    table = Connections(10)
    for number in range(500):
        table.note(view_frame(cm_frame(HERE, THERE, REQ, local_id=number, queue_pair=number)))
        rep = cm_frame(THERE, HERE, REP, local_id=number, remote_id=number, queue_pair=number)
        assert table.note(view_frame(rep)) is not None
        assert table.note(view_frame(rep)) is None
        assert len(table) <= 30
    for number in range(490, 500):
        kind = DREP if number % 2 else REJ
        table.note(view_frame(cm_frame(THERE, HERE, kind, local_id=number, remote_id=number)))
    assert len(table) == 10


@pytest.mark.attack
@given(seed=st.integers(0, 2**40), place=st.integers(0, 255), size=st.integers(0, 300))
def test_forged_messages_raise_nothing_and_pass_as_frames(seed: int, place: int, size: int) -> None:
    """Whatever stands in a datagram to queue pair 1, the frame is carried, or refused if it is no RoCE."""
    rng = Random(seed)
    good = bytearray(view_frame(cm_frame(HERE, THERE, rng.choice((REQ, REP, DREP)), local_id=1)).frame[48:-4])
    good[place] = rng.randrange(256)
    packet = {"source": HERE, "target": THERE, "opcode": Opcode.DATAGRAM_SEND_ONLY, "queue_pair": 1, "psn": 0}
    table = Connections(4)
    lab = GatewayLab(seed, settings=SETTINGS)
    for payload in (bytes(good), rng.randbytes(size)):
        frame = build_frame(packet, payload)
        table.note(view_frame(frame))
        send(lab, NEAR, frame)
        assert lab.to_nic[FAR][-1] == frame
    assert len(table) <= 4


def build_frame(packet: dict[str, object], payload: bytes) -> bytes:
    """Return a datagram with any payload."""
    return build(RocePacket(**packet, extra=bytes(8), payload=payload, padding=bytes(-len(payload) % 4)))  # type: ignore[arg-type]

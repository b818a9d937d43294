"""Hostile frames and datagrams at a RoCEv2 gateway: refused, bounded, without an effect on other queue pairs."""

from __future__ import annotations

import struct
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.roce import RocePacket, build
from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_datagram import (
    DatagramKind,
    FailureEntry,
    FeedbackEntry,
    FlowFailure,
    Origin,
    build_data,
    build_list,
    pack_failure,
    pack_feedback,
    pack_flow,
    parse_datagram,
)
from isthmus.wan.roce.gateway.gateway_events import LinkDatagram, NicFrame, SendOnLink, SendToNic, Tick
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import PostWork
from isthmus.wan.roce.roce_opcodes import Opcode
from tests.wan.roce.gateway_lab import FAR, NEAR, GatewayLab, Line

SETTINGS = GatewaySettings(link_gbps=1, nic_gbps=10, max_queue_pairs=50, max_total_bytes=200_000, max_flow_bytes=50_000)
PEER = 77


def connected(epoch: int = 1) -> Gateway:
    """Return a gateway that knows a peer of epoch `PEER`."""
    gateway = Gateway(SETTINGS, epoch)
    hello = build_list(DatagramKind.HELLO, Origin(PEER, epoch, True), [])[0]
    gateway.handle(LinkDatagram(hello), 0.0)
    assert gateway.is_connected
    return gateway


def frame(queue_pair: int, psn: int, opcode: int = Opcode.SEND_ONLY, size: int = 1000) -> bytes:
    """Return a frame of the other site."""
    return build(
        RocePacket(
            source="10.2.0.1", target="10.1.0.1", opcode=opcode, queue_pair=queue_pair, psn=psn, payload=bytes(size)
        )
    )


@given(data=st.binary(max_size=200), is_frame=st.booleans())
def test_random_bytes_change_nothing(data: bytes, *, is_frame: bool) -> None:
    """No error leaves `handle`, and nothing is sent or kept."""
    gateway = connected()
    event = NicFrame(data) if is_frame else LinkDatagram(data)
    assert gateway.handle(event, 1.0) == []
    assert gateway.held_bytes == 0
    assert gateway.statistics().frames_refused == 1


@given(
    kind=st.sampled_from([*DatagramKind]),
    body=st.binary(max_size=120),
    origin=st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_random_bodies_under_a_good_header_change_nothing(
    kind: DatagramKind, body: bytes, origin: tuple[int, int]
) -> None:
    """Whatever follows a header, the gateway keeps no frame and stays usable."""
    gateway = connected()
    data = struct.pack("!BBBxII", kind, 1, 0, *origin) + body
    for now_s in (1.0, 1.5, 2.0):
        gateway.handle(LinkDatagram(data), now_s)
        gateway.handle(Tick(), now_s + 0.1)
    assert gateway.held_bytes == 0


@given(seed=st.integers(0, 2**32), place=st.integers(0, 999), change=st.integers(1, 255))
def test_a_frame_that_was_changed_is_refused(seed: int, place: int, change: int) -> None:
    """From the link as from a NIC: a byte that the ICRC covers, or a cut, and the frame goes nowhere."""
    good = frame(Random(seed).randrange(2**24), 5)
    bad = bytearray(good)
    bad[28 + place] ^= change
    if 28 + place == 32:  # the byte that routers may change
        return
    for broken in (bytes(bad), good[: 20 + place]):
        gateway = connected()
        out = gateway.handle(LinkDatagram(build_data(Origin(PEER, 1, False), 1, 0, broken)), 1.0)
        out += gateway.handle(NicFrame(broken), 1.0)
        assert not [one for one in out if isinstance(one, SendToNic)]
        assert gateway.held_bytes == 0
        assert gateway.statistics().frames_refused == 2


def test_a_flood_of_queue_pairs_is_bounded() -> None:
    """Frames of ever new queue pairs fill no more than the bounds, from either side."""
    gateway = connected()
    for number in range(2000):
        now_s = 1 + number * 1e-4
        gateway.handle(NicFrame(frame(number, 0)), now_s)
        gateway.handle(LinkDatagram(build_data(Origin(PEER, 1, False), number + 1, 3, frame(number, 0))), now_s)
    assert gateway.statistics().num_queue_pairs <= 100
    assert gateway.held_bytes <= 2 * 200_000


def test_a_number_far_ahead_keeps_no_memory() -> None:
    """A peer that leaves a gap of a million frames gets nothing kept for it."""
    gateway = connected()
    for number in (10**6, 2**31 - 1, 2**32 - 1):
        gateway.handle(LinkDatagram(build_data(Origin(PEER, 1, False), 1, number, frame(9, 0))), 1.0)
    assert gateway.held_bytes == 0


def test_false_feedback_releases_nothing() -> None:
    """A peer that claims frames which were never sent, or moves backwards, is not believed."""
    gateway = connected()
    for psn in range(5):
        gateway.handle(NicFrame(frame(9, psn)), 1.0 + psn * 1e-3)
    held = gateway.held_bytes
    ranges = ((0, 0xFFFF), (2**32 - 5, 0xFFFF), (2**31, 1)) * 20
    for floor, done in ((100, 100), (2, 4), (2**32 - 1, 2**32 - 1), (2**31, 0)):
        entry = FeedbackEntry(1, floor, done, 2**32 - 1, 2**32 - 1, 9, 2**32 - 1, 2**32 - 1, ranges)
        (data,) = build_list(DatagramKind.FEEDBACK, Origin(PEER, 1, False), [pack_feedback(entry)])
        assert list(parse_datagram(data).body) == [entry]
        gateway.handle(LinkDatagram(data), 2.0)
        assert gateway.held_bytes == held


def test_a_late_datagram_of_an_ended_epoch_is_ignored() -> None:
    """After a restart of the peer nothing of its old table counts, replayed or late."""
    gateway = connected()
    old = build_data(Origin(PEER, 1, False), 1, 0, frame(9, 0))
    assert any(isinstance(one, SendToNic) for one in gateway.handle(LinkDatagram(old), 1.0))
    new = build_list(DatagramKind.HELLO, Origin(88, 1, False), [])[0]
    gateway.handle(LinkDatagram(new), 1.1)
    failure = [pack_failure(FailureEntry(1, True, FlowFailure.NIC))]
    (failed,) = build_list(DatagramKind.FAILED, Origin(PEER, 1, False), failure)
    for late in (old, build_data(Origin(PEER, 1, False), 1, 1, frame(9, 1)), failed):
        assert gateway.handle(LinkDatagram(late), 1.2) == []
    assert gateway.statistics().queue_pairs_failed == 0


def test_its_own_datagrams_are_not_believed() -> None:
    """What a gateway has sent comes back to it: it takes itself for no peer, and gives up none."""
    for gateway in (Gateway(GatewaySettings(link_gbps=1), 1), connected()):
        for _ in range(3):
            own = [one.data for one in gateway.handle(Tick(), 1.0) if isinstance(one, SendOnLink)]
            own += build_list(DatagramKind.HELLO, Origin(1, 1, False), [])
            before = gateway.is_connected
            for data in own:
                assert gateway.handle(LinkDatagram(data), 1.05) == []
            assert gateway.is_connected is before


def test_a_replayed_frame_is_handed_over_once() -> None:
    """The same datagram again and again reaches the NIC once."""
    gateway, datagram = connected(), build_data(Origin(PEER, 1, False), 1, 0, frame(9, 0))
    out = [one for place in range(50) for one in gateway.handle(LinkDatagram(datagram), 1 + place * 1e-3)]
    assert sum(isinstance(one, SendToNic) for one in out) == 1


def test_probes_of_unknown_flows_get_a_bounded_answer() -> None:
    """A thousand probes are answered in a few datagrams."""
    gateway = connected()
    for data in build_list(DatagramKind.PROBE, Origin(PEER, 1, False), [pack_flow(number) for number in range(1000)]):
        gateway.handle(LinkDatagram(data), 1.0)
    out = gateway.handle(Tick(), 1.1)
    assert 0 < sum(isinstance(one, SendOnLink) for one in out) < 10


def test_noise_does_not_disturb_a_queue_pair() -> None:
    """Random and replayed datagrams among genuine ones: every message arrives once, in order."""
    lab = GatewayLab(
        5, settings=GatewaySettings(link_gbps=0.1, acknowledge_near=True, round_trip_s=0.01), link=Line(0.005)
    )
    near, far = lab.connect(max_retries=10**9, port_gbps=0.2)
    rng, recorded = Random(6), list[bytes]()
    for number in range(40):
        lab.post(near, PostWork("send", bytes([number]) * 3000))
    for _ in range(200):
        lab.run(lab.now_s + 1e-3, stop_when_idle=False)
        for site in (NEAR, FAR):
            gateway = lab.gateways[site]
            assert gateway is not None
            noise = rng.randbytes(rng.randrange(100))
            replay = rng.choice(recorded) if recorded else noise
            for event in (LinkDatagram(noise), NicFrame(noise), LinkDatagram(replay)):
                for one in gateway.handle(event, lab.now_s):
                    if isinstance(one, SendOnLink):
                        recorded.append(one.data)
                    lab.carry_out(site, one)
    lab.run(10)
    assert far.arrived == [bytes([number]) * 3000 for number in range(40)]

"""The RoCEv2 gateway on a virtual clock: delivery, near answers, failures, restarts, congestion, bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from benchmarks._roce_lab import RoceLab
from isthmus.core.errors import InputError
from isthmus.wan.roce import RocePacket, build
from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_datagram import FlowFailure
from isthmus.wan.roce.gateway.gateway_events import NicFrame
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.held_bytes import HeldBytes
from isthmus.wan.roce.gateway.incoming_flow import IncomingFlow
from isthmus.wan.roce.nic import MessageArrived, NicArrival, NicSettings, NicTick, PostWork, RoceNic, Transmit
from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_view import view_frame
from tests.wan.roce.gateway_lab import FAR, LAN_S, NEAR, End, GatewayLab, Line

MEMORY = Random(5).randbytes(20_000)
SLOW: dict[str, Any] = {"port_gbps": 0.2, "resend_s": 0.016, "window_bytes": 32_768, "memory": MEMORY}


def settings_of(**fields: Any) -> GatewaySettings:
    """Return settings of a quick link with short timers."""
    base: dict[str, Any] = {
        "link_gbps": 0.1,
        "nic_gbps": 10,
        "round_trip_s": 0.04,
        "max_tries": 40,
        "nic_timeout_s": 1e-3,
    }
    return GatewaySettings(**{**base, **fields})


def some_work(rng: Random) -> PostWork:
    """Return a SEND, a WRITE or a READ of any size."""
    kind = rng.choice(("send", "write", "send", "read"))
    if kind == "read":
        return PostWork(kind, b"", rng.randrange(10_000), rng.choice((1, 1024, 5000)))
    return PostWork(kind, rng.randbytes(rng.choice((0, 5, 1024, 3000, 9000))))


def expected_of(works: list[PostWork]) -> tuple[list[bytes], list[bytes]]:
    """Return the messages that arrive, and what each piece of work completes with."""
    arrive = [work.data for work in works if work.kind != "read"]
    return arrive, [MEMORY[w.address : w.address + w.num_bytes] if w.kind == "read" else b"" for w in works]


class RandomTraffic:
    """Queue pairs with work both ways over a bad link and bad LANs, all by seed."""

    def __init__(self, seed: int, *, acknowledge_near: bool, lab_fields: dict[str, Any] | None = None) -> None:
        rng = Random(seed)
        link = Line(
            rng.choice((0.002, 0.02)), rng.choice((0, 0.01, 0.1, 0.25)), rng.choice((0, 0.05)),
            rng.choice((0, 0.001, 0.02)),
        )  # fmt: skip
        lan = Line(LAN_S, rng.choice((0, 0, 0.02)), rng.choice((0, 0, 0.02)))
        self.lab = GatewayLab(
            seed, settings=settings_of(acknowledge_near=acknowledge_near), link=link, lan=lan,
            **(lab_fields or {}),
        )  # fmt: skip
        self.sent: list[tuple[End, End, list[PostWork]]] = []
        same_port = rng.random() < 0.2
        for _ in range(rng.randint(1, 3)):
            one, other = self.lab.connect(same_port=same_port, max_retries=10**9, **SLOW)
            psns = rng.choice((0, 2**24 - 3, 777)), rng.choice((0, 2**24 - 9, 99))
            for end, (own, theirs) in ((one, psns), (other, psns[::-1])):
                end.nic = RoceNic(dataclasses.replace(end.nic.settings, first_psn=own, peer_first_psn=theirs))
            for end, peer in ((one, other), (other, one)):
                self.sent.append((end, peer, [some_work(rng) for _ in range(rng.randint(1, 8))]))
        self.restart_s = rng.uniform(0.02, 0.4), rng.uniform(0, 0.05)

    def run(self, restart: tuple[int, ...] = ()) -> None:
        """Do all work; gateways of `restart` lose their tables on the way."""
        for end, _, works in self.sent:
            for work in works:
                self.lab.post(end, work)
        for place, site in enumerate(restart):
            self.lab.run(self.restart_s[0] + 0.1 * place, stop_when_idle=False)
            self.lab.restart(site, self.restart_s[1])
        self.lab.run(60)

    def check_whole(self) -> None:
        """All work is done, once and in order, and no gateway keeps a byte."""
        for end, peer, works in self.sent:
            arrive, done = expected_of(works)
            assert peer.arrived == arrive
            assert end.done == done
        assert not self.lab.failures
        self.lab.run(self.lab.now_s + 20, stop_when_idle=False)
        assert self.lab.is_drained()


def seeds(config: pytest.Config, count: int) -> range:
    """Return `count` seeds, thirty times as many with `--whole`."""
    return range(count * (30 if config.getoption("--whole") else 1))


@pytest.mark.parametrize("acknowledge_near", [False, True])
def test_every_message_arrives_once_in_order(pytestconfig: pytest.Config, *, acknowledge_near: bool) -> None:
    """Whatever link and LANs lose, repeat and reorder, and wherever numbers wrap."""
    for seed in seeds(pytestconfig, 12):
        traffic = RandomTraffic(seed, acknowledge_near=acknowledge_near)
        traffic.run()
        traffic.check_whole()


def test_an_answer_that_overtakes_a_resend_ends_it() -> None:
    """A NIC that goes on after its answer, in the middle of a resend, is not taken for one that lost the rest of it."""
    settings = GatewaySettings(link_gbps=0.2, nic_gbps=10, acknowledge_near=True, round_trip_s=0.001)
    lab = RoceLab(
        gbps=0.2, round_trip_s=0.001, loss=0.0, settings=settings, port_gbps=10.0, window_bytes=2**20, resend_s=0.006
    )
    lab.run(0.1)
    assert lab.senders[0].num_bytes > 2**20, "it stays at its first window"


@pytest.mark.parametrize(
    ("restart", "acknowledge_near"), [((FAR,), True), ((FAR,), False), ((NEAR,), False), ((NEAR, FAR), False)]
)
def test_a_gateway_that_restarts_loses_nothing(
    pytestconfig: pytest.Config, restart: tuple[int, ...], *, acknowledge_near: bool
) -> None:
    """An empty table costs time only where every request is kept by a NIC or by the other gateway."""
    for seed in seeds(pytestconfig, 6):
        traffic = RandomTraffic(1000 + seed, acknowledge_near=acknowledge_near)
        if acknowledge_near:  # requests of one side only: those of the other are acknowledged by what restarts
            traffic.sent = [one for one in traffic.sent if one[0].site == NEAR]
        traffic.run(restart)
        traffic.check_whole()


def check_numbers_after_a_restart(make: Callable[[GatewaySettings, int], Any]) -> None:
    """A queue pair that fell silent before the restart ends, and the ones that have the new numbers go on."""
    lab = GatewayLab(settings=settings_of(idle_s=2.0), make=make)
    silent, *others = (lab.connect(max_retries=10**9) for _ in range(3))
    lab.post(silent[NEAR], PostWork("send", b"once"))
    lab.run(1.0, stop_when_idle=False)
    lab.restart(NEAR)
    lab.run(1.1, stop_when_idle=False)
    sent = [bytes([number]) for number in range(24)]
    for data in sent:
        for near, _ in others:
            lab.post(near, PostWork("send", data))
        lab.run(lab.now_s + 0.5, stop_when_idle=False)
    assert [far.arrived for _, far in others] == [sent, sent]
    assert not lab.failures


def test_a_number_given_again_after_a_restart_stays_with_its_queue_pair() -> None:
    """What had the number before ends without it."""
    check_numbers_after_a_restart(Gateway)


def test_what_a_restarted_gateway_had_acknowledged_is_never_lost_in_silence(pytestconfig: pytest.Config) -> None:
    """Messages arrive up to some point without a gap; where any is missing, the queue pair has failed at both sides."""
    num_failed = 0
    for seed in seeds(pytestconfig, 8):
        traffic = RandomTraffic(2000 + seed, acknowledge_near=True)
        traffic.run((NEAR,))
        traffic.lab.run(traffic.lab.now_s + 10, stop_when_idle=False)
        failed = {key for _, one in traffic.lab.failures for key in [(one.ends, one.queue_pair)]}
        num_failed += bool(failed)
        for _, peer, works in traffic.sent:
            arrive, _ = expected_of(works)
            assert peer.arrived == arrive[: len(peer.arrived)]
            if len(peer.arrived) < len(arrive):
                assert failed, "a message is lost and no queue pair has failed"
    assert num_failed, "no seed has lost anything, so this test shows nothing"


def one_way(
    count: int, size: int, *, link: Line | None = None, settings: GatewaySettings | None = None, **fields: Any
) -> tuple[GatewayLab, End, End]:
    """Send messages from the near to the far site until all work is done."""
    lab = GatewayLab(1, settings=settings or settings_of(acknowledge_near=True), link=link)
    near, far = lab.connect(**{"max_retries": 10**9, "port_gbps": 1, **fields})
    for number in range(count):
        lab.post(near, PostWork("send", bytes([number % 251]) * size))
    lab.run(30)
    return lab, near, far


def test_only_what_was_lost_crosses_the_link_again() -> None:
    """At 5 % loss, 1.005 / (1 - p) frames are sent for one that arrives."""
    lab, _, far = one_way(120, 30_000, link=Line(0.02, 0.05))
    assert len(far.arrived) == 120
    near = lab.gateways[NEAR]
    assert near is not None
    found = near.statistics()
    assert found.frames_sent_again > 0
    assert found.frames_sent / found.frames_taken < 1.01 / (1 - 0.05)


def test_the_gateway_hands_each_frame_over_once() -> None:
    """On a clean LAN the far NIC gets every number once, in order, once the queue pair is known."""
    lab, _, _ = one_way(60, 20_000, link=Line(0.02, 0.1, 0.1, 0.01), first_psn=2**24 - 100, resend_s=10.0)
    views = [view_frame(frame) for frame in lab.to_nic[FAR]]
    assert [view.psn for view in views if view.opcode in (0, 1, 2)] == [
        (2**24 - 100 + place) % 2**24 for place in range(60 * 20)
    ]


def test_a_near_acknowledgement_spares_the_round_trip() -> None:
    """With it a window of 64 KiB fills the link; without it, it goes once a round trip."""
    times = []
    for is_on in (True, False):
        lab, near, far = one_way(100, 20_000, settings=settings_of(acknowledge_near=is_on), window_bytes=65_536)
        assert len(far.arrived) == len(near.done) == 100
        times.append(lab.now_s)
    assert times[0] < 0.4 < 1.2 < times[1]


def test_reads_are_never_acknowledged_near() -> None:
    """A READ completes with the far memory's bytes, no earlier than a round trip after it was posted."""
    lab = GatewayLab(2, settings=settings_of(acknowledge_near=True))
    near, _ = lab.connect(max_retries=10**9, memory=MEMORY)
    lab.post(near, PostWork("send", b"first"))
    lab.run(1)
    start_s = lab.now_s
    lab.post(near, PostWork("read", b"", 100, 3000))
    lab.post(near, PostWork("send", b"behind it"))
    lab.run(start_s + 0.039, stop_when_idle=False)
    assert near.done == [b""]
    lab.run(5)
    assert near.done == [b"", MEMORY[100:3100], b""]


def test_resends_of_a_nic_stay_at_its_site() -> None:
    """A NIC that resends every 4 ms on a path of 40 ms costs the link nothing."""
    lab, near, _ = one_way(40, 20_000, settings=settings_of(acknowledge_near=False), window_bytes=2**20)
    gateway = lab.gateways[NEAR]
    assert gateway is not None
    found = gateway.statistics()
    assert near.nic.num_sent_again > 1000
    assert found.frames_sent < 40 * 20 * 1.8  # those of the first round trips, before the queue pair is known


@pytest.mark.parametrize("dead", ["nic", "gateway"])
def test_an_error_reaches_the_sender_when_the_far_side_dies(dead: str) -> None:
    """Requests that were acknowledged here fail the queue pair afterwards, and its memory is free."""
    lab, near, far = one_way(3, 20_000, settings=settings_of(acknowledge_near=True, max_tries=5))
    if dead == "nic":
        far.nic.failed = "gone"
    else:
        lab.link_up = False
    for _ in range(8):
        lab.post(near, PostWork("send", bytes(20_000)))
    lab.run(lab.now_s + 20, stop_when_idle=False)
    gateway = lab.gateways[NEAR]
    assert gateway is not None
    assert gateway.held_bytes == 0
    assert {one.reason for _, one in lab.failures} & {FlowFailure.NIC, FlowFailure.LINK}
    lab.post(near, PostWork("send", b"after it"))
    lab.run(lab.now_s + 1, stop_when_idle=False)
    assert near.failed is not None
    assert "0x63" in near.failed


def test_a_request_that_the_far_nic_refuses_fails_the_queue_pair() -> None:
    """A remote access error after a near acknowledgement ends at the sender as an error."""
    lab, near, far = one_way(3, 5000)
    far.nic.not_ready_code = 0x42  # answers with syndrome 0x62, a remote access error
    lab.post(near, PostWork("write", bytes(3000)))
    lab.run(lab.now_s + 1, stop_when_idle=False)
    lab.post(near, PostWork("write", bytes(3000)))
    lab.run(lab.now_s + 1, stop_when_idle=False)
    assert near.failed is not None
    assert FlowFailure.REFUSED in {one.reason for _, one in lab.failures}


def test_a_receiver_that_is_not_ready_is_waited_for_at_its_own_site() -> None:
    """The far gateway takes `receiver not ready` and tries again; the sender notices nothing."""
    lab, near, far = one_way(3, 5000)
    far.nic.not_ready_code = 14
    lab.post(near, PostWork("send", b"late" * 1000))
    lab.run(lab.now_s + 0.2, stop_when_idle=False)
    assert len(near.done) == 4
    assert len(far.arrived) == 3
    far.nic.not_ready_code = None
    lab.run(lab.now_s + 5)
    assert far.arrived[3:] == [b"late" * 1000]
    assert not lab.failures


def test_a_queue_pair_that_is_set_up_again_begins_again() -> None:
    """The same numbers from 0 on are new requests, not resends."""
    lab, near, far = one_way(5, 5000)
    lab.run(lab.now_s + 2, stop_when_idle=False)
    ends = [lab.plug(RoceNic(one.nic.settings), one.site) for one in (near, far)]
    for number in range(5):
        lab.post(ends[NEAR], PostWork("send", bytes([100 + number]) * 3000))
    lab.run(lab.now_s + 20)
    assert ends[FAR].arrived == [bytes([100 + number]) * 3000 for number in range(5)]
    assert len(ends[NEAR].done) == 5
    assert not lab.failures


def test_queue_pairs_with_one_port_are_not_told_apart_by_guess() -> None:
    """Two queue pairs with the same addresses, port and numbers: nothing is acknowledged near, and all arrives."""
    lab = GatewayLab(3, settings=settings_of(acknowledge_near=True))
    pairs = [lab.connect(same_port=True, max_retries=10**9, resend_s=0.1) for _ in range(2)]
    for near, _ in pairs:
        for number in range(6):
            lab.post(near, PostWork("send", bytes([number]) * 4000))
    lab.run(20)
    assert all(far.arrived == [bytes([number]) * 4000 for number in range(6)] for _, far in pairs)
    gateway = lab.gateways[NEAR]
    assert gateway is not None
    assert gateway.statistics().num_paired == 0


def test_the_near_nic_slows_down_within_a_millisecond() -> None:
    """As soon as frames wait, the NIC is notified; the queue stays near its mark, and nothing is refused."""
    settings = settings_of(acknowledge_near=True, queue_mark_s=5e-3)
    lab, near, _ = one_way(2, 1000, settings=settings)
    for _ in range(60):
        lab.post(near, PostWork("send", bytes(60_000)))
    start_s = lab.now_s
    lab.run(start_s + 0.002, stop_when_idle=False)  # 64 KiB have come after 0.6 ms at ten times the link's rate
    assert near.nic.num_notified > 0
    gateway = lab.gateways[NEAR]
    assert gateway is not None
    lab.run(lab.now_s + 0.1, stop_when_idle=False)
    assert lab.max_held_bytes[NEAR] < 2_000_000
    assert gateway.statistics().frames_refused == 0


def test_a_congested_far_nic_slows_its_gateway_then_the_near_one() -> None:
    """The far NIC's notifications end at its gateway, which slows down; its queue slows the near gateway."""
    lab, near, far = one_way(2, 1000, settings=settings_of(acknowledge_near=True, nic_gbps=0.2, queue_mark_s=1.6e-3))
    for _ in range(40):
        lab.post(near, PostWork("send", bytes(30_000)))
    far_gateway = lab.gateways[FAR]
    assert far_gateway is not None
    own = far.nic.settings
    cnp = build(
        RocePacket(
            source=own.address, target=own.peer, opcode=Opcode.CNP, queue_pair=own.peer_queue_pair, psn=0,
            payload=bytes(16),
        )
    )  # fmt: skip
    crossed = lab.num_link_datagrams
    for _ in range(30):
        far_gateway.handle(NicFrame(cnp), lab.now_s)
        lab.run(lab.now_s + 0.005, stop_when_idle=False)
    assert lab.num_link_datagrams > crossed
    assert near.nic.num_notified > 0
    assert far_gateway.held_bytes < 2_000_000
    lab.run(60)
    assert len(far.arrived) == 42


def test_frames_that_waited_for_a_lost_one_do_not_slow_their_flow() -> None:
    """The NIC's rate is measured from when frames wait for it, not from before, when the link brought none in order."""
    flow, late_s, run_s = None, 0.04, 1e-3
    for number in (*range(1, 1001), 0):
        frame = RocePacket(
            source="10.1.0.1", target="10.2.0.1", opcode=Opcode.SEND_ONLY, queue_pair=7, psn=number, payload=bytes(1024)
        )
        view = view_frame(build(frame))
        flow = flow or IncomingFlow(1, view, settings_of(), HeldBytes(2**30))
        for ready in flow.add(number, view, 0.0 if number else late_s):
            flow.queue(ready, -1)
    assert flow is not None
    for number in range(500):
        flow.next_frame(late_s + run_s * number / 500)
    entry = flow.feedback(late_s + run_s, ())
    assert entry.held_bytes > 500 * 1024
    assert entry.kilobytes_per_s == pytest.approx(500 * len(view.frame) / run_s / 1000, rel=0.01)


def test_memory_and_queue_pairs_are_bounded() -> None:
    """Beyond the bounds frames are refused, and what was taken still arrives."""
    settings = settings_of(acknowledge_near=True, max_flow_bytes=40_000, max_total_bytes=90_000, max_queue_pairs=3)
    lab = GatewayLab(4, settings=settings)
    lab.link_up = False
    pairs = [lab.connect(max_retries=10**9, port_gbps=0.2, resend_s=0.1, ack_packets=8) for _ in range(6)]
    for near, _ in pairs:
        for _ in range(5):
            lab.post(near, PostWork("send", bytes(15_000)))
    lab.run(0.3, stop_when_idle=False)
    gateway = lab.gateways[NEAR]
    assert gateway is not None
    assert 80_000 < lab.max_held_bytes[NEAR] <= 90_000
    assert gateway.statistics().num_queue_pairs == 3
    lab.link_up = True
    lab.run(2.5, stop_when_idle=False)
    assert [len(far.arrived) for _, far in pairs[:3]] == [5, 5, 5]


@pytest.mark.parametrize(
    "fields", [{"link_gbps": 0}, {"max_tries": 0}, {"round_trip_s": float("nan")}, {"reorder_s": -1}]
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    """A rate, bound or time out of range is named."""
    with pytest.raises(InputError, match=next(iter(fields))):
        settings_of(**fields)
    with pytest.raises(InputError, match="epoch"):
        Gateway(settings_of(), 0)


def test_a_nic_without_gateway_resends_what_was_lost_and_all_after_it() -> None:
    """The endpoint goes back N: the peer that benchmarks compare with."""
    own = NicSettings(address="10.0.0.1", peer="10.0.0.2", queue_pair=1, peer_queue_pair=2, resend_s=1e-3)
    one, other = (
        RoceNic(own),
        RoceNic(dataclasses.replace(own, address="10.0.0.2", peer="10.0.0.1", queue_pair=2, peer_queue_pair=1)),
    )
    sent = [item for item in one.handle(PostWork("send", bytes(range(250)) * 40), 0.0) if isinstance(item, Transmit)]
    now_s = 0.0
    while len(sent) < 10:
        now_s = one.next_tick_s()
        sent += [item for item in one.handle(NicTick(), now_s) if isinstance(item, Transmit)]
    answers = [item for frame in (sent[0], *sent[2:]) for item in other.handle(NicArrival(frame.frame), now_s)]
    naks = [item for item in answers if isinstance(item, Transmit)]
    assert len(naks) == 1
    assert view_frame(naks[0].frame).psn == 1
    again = one.handle(NicArrival(naks[0].frame), now_s)
    while len(again) < 9:
        now_s = one.next_tick_s()
        again += one.handle(NicTick(), now_s)
    found = [item for one_frame in again if isinstance(one_frame, Transmit)
             for item in other.handle(NicArrival(one_frame.frame), now_s)]  # fmt: skip
    assert [item.data for item in found if isinstance(item, MessageArrived)] == [bytes(range(250)) * 40]

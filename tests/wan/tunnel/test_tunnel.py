"""The tunnel between two proxies: every byte once, in order, bounded, whatever its legs do."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.wan.tunnel.incoming_bytes import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES
from isthmus.wan.tunnel.outgoing_bytes import PAUSE_BYTES
from isthmus.wan.tunnel.tunnel import BUDGET_BYTES, TUNNEL_TIMEOUT_S, Tunnel
from isthmus.wan.tunnel.tunnel_events import (
    CloseLeg,
    Connect,
    DialFailed,
    DialLeg,
    FrameArrived,
    LegUp,
    OpenStream,
    Refused,
    SendFrame,
    SetReading,
    Stop,
    StreamBroken,
    StreamConnected,
    StreamData,
    Tick,
    TunnelEnded,
)
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame
from tests.wan.tunnel.tunnel_lab import FAR, NEAR, TunnelLab


def some_bytes(seed: int, count: int) -> bytes:
    """Return bytes that repeat nowhere, so that a swap shows."""
    return Random(seed).randbytes(count)


@given(
    seed=st.integers(0, 2**32),
    legs=st.integers(1, 5),
    cut=st.sampled_from([0.0, 0.02, 0.1]),
    repeat=st.sampled_from([0.0, 0.2]),
    reorder=st.booleans(),
    sizes=st.lists(st.sampled_from([0, 1, 1500, 300_000, 900_000]), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_every_byte_arrives_once_and_in_order(
    *, seed: int, legs: int, cut: float, repeat: float, reorder: bool, sizes: list[int]
) -> None:
    """Whatever legs cut, repeat or reorder, both directions of each stream arrive whole, each with its end."""
    lab = TunnelLab(seed, legs=legs, cut_probability=cut, repeat_probability=repeat, reorder=reorder)
    data = {lab.open(some_bytes(size, size), some_bytes(-size - 1, size // 2)): size for size in sizes}
    lab.run()
    for stream, size in data.items():
        near, far = lab.workers[NEAR][stream], lab.workers[FAR][stream]
        assert lab.answers[stream] == "accepted"
        assert bytes(far.got) == some_bytes(size, size)
        assert far.ended
        assert bytes(near.got) == some_bytes(-size - 1, size // 2)
        assert near.ended
    assert [side.num_streams for side in lab.sides] == [0, 0]
    assert lab.ended == [None, None]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_memory_is_bounded_by_credit(seed: int) -> None:
    """What a side keeps is at most the credit of its streams and what it has read ahead."""
    lab = TunnelLab(seed, legs=2, cut_probability=0.01)
    lab.open(some_bytes(1, 6 * 2**20))
    lab.run()
    assert lab.max_held_bytes[NEAR] <= MAX_WINDOW_BYTES + PAUSE_BYTES + 300_000
    assert lab.sides[NEAR].num_held_bytes == 0


def test_a_total_cut_shorter_than_the_timeout_is_not_noticed() -> None:
    """1. All legs break. 2. No dial succeeds for 30 s. 3. The link returns: the streams go on."""
    lab = TunnelLab(7, legs=4)
    stream = lab.open(some_bytes(3, 2**20))
    lab.run(until_s=0.1)
    lab.can_dial = False
    lab.cut_all()
    lab.run(until_s=30)
    assert len(lab.workers[FAR].get(stream, lab.workers[NEAR][stream]).got) < 2**20
    lab.can_dial = True
    lab.run()
    assert bytes(lab.workers[FAR][stream].got) == some_bytes(3, 2**20)
    assert lab.num_cuts >= 4


def test_a_longer_cut_ends_the_tunnel_and_its_streams() -> None:
    """After the timeout both sides free everything, and the workers' connections break with the reason."""
    lab = TunnelLab(8, legs=2)
    stream = lab.open(some_bytes(4, 2**22), b"x" * 2**22)
    lab.run(until_s=0.1)
    lab.can_dial = False
    lab.cut_all()
    lab.run(until_s=3 * TUNNEL_TIMEOUT_S)
    assert all(reason is not None and "no leg" in reason for reason in lab.ended)
    assert "no leg" in (lab.workers[NEAR][stream].broken or "")
    assert [side.num_held_bytes for side in lab.sides] == [0, 0]


def test_a_refused_target_is_refused_at_the_worker() -> None:
    """The far side's reason reaches the worker that asked; nothing of the stream stays."""
    lab = TunnelLab(9, refuse=True)
    stream = lab.open(b"hello")
    lab.run()
    assert lab.answers[stream] == "502 refused"
    assert [side.num_streams for side in lab.sides] == [0, 0]


def test_a_broken_worker_breaks_the_far_end_only() -> None:
    """A reset crosses the tunnel; other streams of it go on."""
    lab = TunnelLab(10)
    broken, other = lab.open(b"a" * 2**22), lab.open(some_bytes(5, 2**20))
    lab.run(until_s=0.12)
    lab.handle(NEAR, StreamBroken(broken, "connection reset"))
    lab.run()
    assert "connection reset" in (lab.workers[FAR][broken].broken or "")
    assert bytes(lab.workers[FAR][other].got) == some_bytes(5, 2**20)


def joined(num_legs: int = 1) -> Tunnel:
    """Return a dialler with `num_legs` legs, ids 0 and up."""
    tunnel = Tunnel(is_dialler=True, num_legs=num_legs, now_s=0.0)
    tunnel.handle(DialFailed(99), 0.0)
    for index in range(num_legs):
        tunnel.handle(LegUp(index, index), 0.0)
    return tunnel


def test_a_restarted_far_proxy_ends_the_tunnel() -> None:
    """1. The far proxy restarts without its tunnels. 2. A dial says so. 3. Waiting workers get 503, none hangs."""
    tunnel = joined(0)
    tunnel.handle(OpenStream(0, "10.0.0.2:7000"), 0.0)
    found = tunnel.handle(DialFailed(0, is_unknown=True), 1.0)
    reason = "the other proxy has restarted"
    assert found == [Refused(0, f"503 {reason}"), TunnelEnded(reason)]
    assert tunnel.handle(LegUp(5, 0), 2.0) == []


def test_a_busy_worker_is_not_read_beyond_the_bound() -> None:
    """Bytes that find no leg stay in the worker's socket once `PAUSE_BYTES` wait."""
    tunnel = Tunnel(is_dialler=False, num_legs=0, now_s=0.0)
    tunnel.handle(LegUp(0, 0), 0.0)
    opened = tunnel.handle(FrameArrived(0, TunnelFrame(FrameKind.OPEN, 0, 0, MIN_WINDOW_BYTES, b"10.0.0.2:1")), 0.0)
    assert Connect(0, "10.0.0.2:1") in opened
    assert SetReading(0, True) in tunnel.handle(StreamConnected(0), 0.0)
    found = [tunnel.handle(StreamData(0, bytes(PAUSE_BYTES // 4)), 0.0) for _ in range(4)]
    assert [SetReading(0, False) in one for one in found] == [False, False, False, True]


@pytest.mark.parametrize(
    "frames",
    [
        [TunnelFrame(FrameKind.DATA, 0, 0, 0, b"x")],
        [TunnelFrame(FrameKind.CREDIT, 3, 99, 5)],
        [TunnelFrame(FrameKind.OPEN, 0, 2**40, 5, b"10.0.0.2:1")],
        [TunnelFrame(FrameKind.PING), TunnelFrame(FrameKind.FIN, 2**40, 0, 0)],
        [TunnelFrame(FrameKind.ACK, offset=1)],
        [TunnelFrame(FrameKind.OPEN, 0, 0, 5, b"a:1"), TunnelFrame(FrameKind.OPENED, 1, 0, 5)],
        [
            TunnelFrame(FrameKind.OPEN, 0, 0, 5, b"a:1"),
            TunnelFrame(FrameKind.DATA, 1, 0, MIN_WINDOW_BYTES, b"beyond the credit"),
        ],
        [
            TunnelFrame(FrameKind.OPEN, 0, 0, 5, b"a:1"),
            TunnelFrame(FrameKind.DATA, 1, 0, 0, b"ab"),
            TunnelFrame(FrameKind.DATA, 2, 0, 1, b"b"),
        ],
        [TunnelFrame(FrameKind.OPEN, 0, 0, 5, b"a:1"), *(TunnelFrame(FrameKind.FIN, 1 + i, 0, 3) for i in range(2))],
    ],
)
def test_frames_that_break_the_rules_end_the_tunnel(frames: list[TunnelFrame]) -> None:
    """A site that holds the key may send anything: its own tunnel ends, with its streams, and nothing else."""
    tunnel = Tunnel(is_dialler=False, num_legs=0, now_s=0.0)
    tunnel.handle(LegUp(0, 0), 0.0)
    found = [one for frame in frames for one in tunnel.handle(FrameArrived(0, frame), 0.0)]
    assert CloseLeg(0) in found
    assert isinstance(found[-1], TunnelEnded)
    assert tunnel.num_streams == tunnel.num_held_bytes == 0


def test_connections_beyond_the_memory_of_a_tunnel_are_refused() -> None:
    """Each stream takes its first credit from the budget; one that finds none gets 503, and later ones get it."""
    tunnel = Tunnel(is_dialler=False, num_legs=0, now_s=0.0)
    tunnel.handle(LegUp(0, 0), 0.0)
    most = BUDGET_BYTES // MIN_WINDOW_BYTES
    found = []
    for number in range(most + 3):
        found += tunnel.handle(FrameArrived(0, TunnelFrame(FrameKind.OPEN, number, number, 5, b"a:1")), 0.0)
    assert sum(isinstance(one, Connect) for one in found) == most == tunnel.num_streams


def test_the_end_of_a_proxy_reaches_the_other_side() -> None:
    """A proxy that stops says so: the other side breaks its workers' connections at once, not after a timeout."""
    near, far = joined(), Tunnel(is_dialler=False, num_legs=0, now_s=0.0)
    far.handle(LegUp(0, 0), 0.0)
    (sent,) = [one for one in near.handle(Stop("stopped by its operator"), 1.0) if isinstance(one, SendFrame)]
    assert "stopped by its operator" in far.handle(FrameArrived(0, sent.frame), 1.0)[-1].reason


def test_missing_legs_are_dialled_with_growing_waits() -> None:
    """Every index is dialled at once, then after 0.1 s, 0.2 s and so on, one dial at a time."""
    tunnel = Tunnel(is_dialler=True, num_legs=2, now_s=0.0)
    times, now_s = [], 0.0
    for _ in range(5):
        now_s = tunnel.next_tick_s()
        assert set(tunnel.handle(Tick(), now_s)) == {DialLeg(0), DialLeg(1)}
        times.append(round(now_s, 3))
        for index in (0, 1):
            tunnel.handle(DialFailed(index), now_s)
    assert times == [0.0, 0.1, 0.3, 0.7, 1.5]

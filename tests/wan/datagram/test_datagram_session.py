"""Frames over datagrams on a virtual line: whole, bounded, at the line's rate; and what no honest side sends."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.wan.datagram.datagram_packet import (
    MAX_PIECES,
    PIECE_BYTES,
    AckPacket,
    ClosePacket,
    PiecePacket,
    parse_packet,
)
from isthmus.wan.datagram.datagram_session import IDLE_S, DatagramSession
from isthmus.wan.datagram.frame_assembly import MAX_HELD_BYTES, MAX_OPEN_FRAMES, FrameAssembly
from isthmus.wan.datagram.outgoing_frames import MAX_UNACKNOWLEDGED_BYTES
from isthmus.wan.datagram.session_events import EndSession, PacketArrived, SendFrame, SendPacket, TimerFired
from tests.wan.datagram.datagram_lab import HEADERS_BYTES, DatagramLab, Line

FRAME = 65_536
BYTES_PER_S = 6.25e6
"""50 Mbit/s: a round trip of 40 ms holds 250 kB."""
CEILING = PIECE_BYTES / (PIECE_BYTES + 9 + HEADERS_BYTES)


def frames_of(seed: int, count: int, longest: int = 3 * PIECE_BYTES) -> list[bytes]:
    """Frames of random lengths, each with its number first, so that no two are equal."""
    rng = random.Random(seed)
    return [number.to_bytes(4, "big") + rng.randbytes(rng.randrange(longest)) for number in range(count)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.01, 0.2, 0.5]),
    duplicated=st.sampled_from([0.0, 0.1]),
    jitter_s=st.sampled_from([0.0, 0.03]),
    queue_s=st.sampled_from([0.001, 0.04]),
)
def test_every_frame_comes_once_as_it_was(
    seed: int, loss: float, duplicated: float, jitter_s: float, queue_s: float
) -> None:
    """Whatever the line loses, doubles and reorders, both ways at once; what either side keeps is bounded."""
    one, other = frames_of(seed, 40), frames_of(seed + 1, 30)
    lab = DatagramLab(
        seed,
        one,
        other,
        line=lambda: Line(BYTES_PER_S, 0.01, queue_s, loss, duplicated, jitter_s),
    )
    lab.run(300, lambda: lab.has_all(40, 30))
    assert [side.ended for side in lab.sides] == [None, None]
    assert (sorted(lab.sides[1].got), sorted(lab.sides[0].got)) == (sorted(one), sorted(other))
    assert max(side.most_held_bytes for side in lab.sides) < MAX_UNACKNOWLEDGED_BYTES


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.01, 0.05])
def test_loss_takes_only_what_it_takes(loss: float) -> None:
    """Once the line is found, it is full: goodput is its rate less headers and lost packets, and no queue overflows."""
    frames = [bytes(FRAME)] * 100
    lab = DatagramLab(1, frames, line=lambda: Line(BYTES_PER_S, 0.02, 0.04, loss))
    lab.run(0.6)
    side, before = lab.sides[0], lab.sides[0].line.num_dropped
    lab.run(60, lambda: lab.has_all(len(frames)))
    late = [at_s for at_s in lab.sides[1].got_at_s if at_s > 0.6]
    goodput = (len(late) - 1) * FRAME / (late[-1] - late[0])
    assert goodput > 0.96 * BYTES_PER_S * CEILING * (1 - loss)
    assert side.line.num_dropped == before
    sent = side.session.num_pieces * PIECE_BYTES
    assert sent * (1 - loss) < 1.02 * len(frames) * FRAME + side.line.num_dropped * PIECE_BYTES


def test_a_shallow_queue_is_not_flooded() -> None:
    """A queue of an eighth of a round trip loses packets while the rate is tried, and few afterwards."""
    frames = [bytes(FRAME)] * 100
    lab = DatagramLab(1, frames, line=lambda: Line(BYTES_PER_S, 0.02, 0.005))
    lab.run(0.6)
    before, pieces = lab.sides[0].line.num_dropped, lab.sides[0].session.num_pieces
    lab.run(60, lambda: lab.has_all(len(frames)))
    after = lab.sides[0].session.num_pieces - pieces
    assert lab.sides[0].line.num_dropped - before < 0.05 * after
    assert lab.now_s < 1.15 * len(frames) * FRAME / (BYTES_PER_S * CEILING) + 0.3


def test_a_line_that_ends_ends_the_session() -> None:
    """Nothing from the far side for `IDLE_S`: over, with the reason, also while frames are on their way."""
    lab = DatagramLab(1, [bytes(FRAME)] * 20, line=lambda: Line(BYTES_PER_S, 0.02))
    lab.run(0.1)
    for side in lab.sides:
        side.line.loss = 1.0
    lab.run(60)
    assert [side.ended for side in lab.sides] == [f"nothing from the other side for {IDLE_S:.0f} s"] * 2
    assert lab.sides[0].session.num_pieces < 400, "a dead line is tried ever more rarely"


def test_a_side_that_closes_is_heard() -> None:
    """The far side ends at once."""
    one, other = DatagramSession(0.0), DatagramSession(0.0)
    (packet,) = one.close()
    assert isinstance(packet, SendPacket)
    assert other.handle(PacketArrived(0, packet.content), 1.0) == [EndSession("closed by the other side")]
    assert one.handle(SendFrame(b"x"), 1.0) == other.handle(TimerFired(), 1.0) == []


@given(st.binary(max_size=1500))
def test_any_bytes_are_a_packet_or_an_error(content: bytes) -> None:
    """What parses is what would be sent again."""
    try:
        packet = parse_packet(content)
    except ProtocolError:
        return
    assert packet.content() == content


@pytest.mark.attack
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        PiecePacket(0, 1, 1, b"x").content(),
        PiecePacket(0, 0, MAX_PIECES + 1, bytes(PIECE_BYTES)).content(),
        PiecePacket(0, 0, 2, b"short").content(),
        PiecePacket(0, 0, 1, bytes(PIECE_BYTES + 1)).content(),
        PiecePacket(MAX_OPEN_FRAMES, 0, 1, b"x").content(),
        AckPacket(0.0, ((5, 1),)).content(),
        AckPacket(0.0, ((0, 2**16 - 1),) * 64).content(),
        b"\x02\x00\x00\x00\x00\xff",
        b"\x09",
    ],
)
def test_a_side_that_breaks_the_rules_ends_its_session(content: bytes) -> None:
    """With a packet that says so, and nothing kept."""
    session = DatagramSession(0.0)
    out = session.handle(PacketArrived(0, content), 1.0)
    assert out[0] == SendPacket(0, ClosePacket().content())
    assert isinstance(out[1], EndSession)
    assert session.num_held_bytes == 0


@pytest.mark.attack
@pytest.mark.parametrize("by_turns", [False, True])
def test_open_frames_take_bounded_memory(*, by_turns: bool) -> None:
    """A side that never ends its frames is cut off before it fills the memory, whichever it opens first."""
    assembly, data = FrameAssembly(), bytes(PIECE_BYTES)

    def fill() -> None:
        frames, indexes = range(MAX_OPEN_FRAMES), range(MAX_PIECES - 1)
        for one, other in itertools.product(*((indexes, frames) if by_turns else (frames, indexes))):
            frame, index = (other, one) if by_turns else (one, other)
            assembly.add(PiecePacket(frame, index, MAX_PIECES, data))

    with pytest.raises(ProtocolError, match="frames are open"):
        fill()
    assert assembly.num_held_bytes <= MAX_HELD_BYTES


def test_a_frame_with_two_counts_is_refused() -> None:
    """Its pieces say how many there are, all the same."""
    assembly = FrameAssembly()
    assembly.add(PiecePacket(0, 0, 3, bytes(PIECE_BYTES)))
    with pytest.raises(ProtocolError, match="3 pieces, and 2"):
        assembly.add(PiecePacket(0, 1, 2, b"x"))

"""Error correction of datagram legs: any losses up to the parity are repaired, and what no honest side sends."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.wan.datagram.datagram_packet import MAX_PIECES, PIECE_BYTES, ParityPacket, PiecePacket, parse_packet
from isthmus.wan.datagram.datagram_session import DatagramSession
from isthmus.wan.datagram.erasure_code import MAX_GROUP, MAX_PARITY, ErasureCode
from isthmus.wan.datagram.frame_assembly import MAX_HELD_BYTES, MAX_OPEN_FRAMES, FrameAssembly
from isthmus.wan.datagram.outgoing_frames import MAX_UNACKNOWLEDGED_BYTES, OutgoingFrames
from isthmus.wan.datagram.parity_amount import ParityAmount
from isthmus.wan.datagram.session_events import EndSession, PacketArrived
from tests.wan.datagram.datagram_lab import DatagramLab, Line, Side

LINE_BYTES_PER_S = 125e6


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_pieces=st.integers(1, MAX_GROUP), piece_bytes=st.sampled_from([1, 7, 100]))
def test_any_losses_up_to_the_parity_are_repaired(data: st.DataObject, num_pieces: int, piece_bytes: int) -> None:
    """Whichever pieces are lost, as many parity pieces as there are losses give them back, whichever these are."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    num_parity = data.draw(st.integers(1, MAX_PARITY))
    num_lost = data.draw(st.integers(0, min(num_pieces, num_parity)))
    code, content = ErasureCode(num_pieces, piece_bytes), rng.randbytes(num_pieces * piece_bytes)
    pieces = {at: content[at * piece_bytes : (at + 1) * piece_bytes] for at in range(num_pieces)}
    parity = dict(enumerate(code.parity(content, num_parity)))
    lost = set(rng.sample(range(num_pieces), num_lost))
    known = {at: piece for at, piece in pieces.items() if at not in lost}
    kept = {index: parity[index] for index in rng.sample(range(num_parity), num_lost)}
    assert code.repair(known, kept) == {at: pieces[at] for at in lost}
    if num_lost:
        kept.popitem()
        with pytest.raises(ValueError, match="pieces are lost"):
            code.repair(known, kept)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_bytes=st.sampled_from([1, 33, PIECE_BYTES, PIECE_BYTES + 1, 40_000]))
def test_a_frame_is_whole_with_as_many_packets_as_it_has_pieces(seed: int, num_bytes: int) -> None:
    """In any order, of pieces and parity alike; later and repeated packets add nothing, and nothing is kept."""
    rng = random.Random(seed)
    frames, frame = OutgoingFrames(has_parity=True), rng.randbytes(num_bytes)
    frames.add(frame)
    packets = []
    while (piece := frames.next_piece()) is not None:
        packets.append(parse_packet(piece.packet.content()))
    count = sum(isinstance(one, PiecePacket) for one in packets)
    assert len(packets) == count + ParityAmount().for_pieces(count)
    rng.shuffle(packets)
    assembly = FrameAssembly()
    got = [assembly.add(one) for one in [*packets, *packets] if isinstance(one, PiecePacket | ParityPacket)]
    assert [one for one in got if one is not None] == [frame]
    assert got.index(frame) == count - 1
    assert assembly.num_held_bytes == 0


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.01, 0.2, 0.5]),
    duplicated=st.sampled_from([0.0, 0.1]),
    jitter_s=st.sampled_from([0.0, 0.03]),
)
def test_every_frame_comes_once_beyond_the_parity_too(
    seed: int, loss: float, duplicated: float, jitter_s: float
) -> None:
    """What the parity does not repair is sent again: each frame once, as it was, with bounded memory."""
    rng = random.Random(seed)
    one, other = ([at.to_bytes(4, "big") + rng.randbytes(rng.randrange(5000)) for at in range(25)] for _ in range(2))
    lab = corrected(DatagramLab(seed, [], line=lambda: Line(6.25e6, 0.01, 0.04, loss, duplicated, jitter_s)))
    lab.offer(0, one)
    lab.offer(1, other)
    lab.run(300, lambda: lab.has_all(25, 25))
    assert [side.ended for side in lab.sides] == [None, None]
    assert (sorted(lab.sides[1].got), sorted(lab.sides[0].got)) == (sorted(one), sorted(other))
    assert max(side.most_held_bytes for side in lab.sides) < MAX_UNACKNOWLEDGED_BYTES


def test_a_message_that_loses_packets_takes_one_round_trip() -> None:
    """1 MB at 1 Gbit/s, 40 ms and 1 % of loss is there, with its answer, within 1.3 round trips and 8 ms."""
    lab = corrected(DatagramLab(3, [], line=lambda: Line(LINE_BYTES_PER_S, 0.02, 0.04, 0.01)))
    message, times_s = [bytes(250_000)] * 4, []
    for number in range(1, 19):
        start_s = lab.now_s
        lab.offer(0, message)
        lab.run(start_s + 5, lambda number=number: len(lab.sides[1].got) == 4 * number)
        lab.offer(1, [b"answer"])
        lab.run(start_s + 5, lambda number=number: len(lab.sides[0].got) == number)
        times_s.append(lab.now_s - start_s)
    late = times_s[10:]
    assert max(late) < 1.3 * 0.04 + 0.008
    assert lab.sides[1].session.num_frames_repaired > 36
    assert lab.sides[0].session.num_pieces_again < 0.01 * lab.sides[0].session.num_pieces


def test_the_parity_follows_the_loss() -> None:
    """A clean line costs little, a bad one more; what one frame gets is bounded."""
    amount = ParityAmount()
    first = amount.for_pieces(MAX_PIECES)
    amount.note(arrived=2000)
    for _ in range(100):
        amount.note(arrived=256)
    assert amount.for_pieces(MAX_PIECES) <= 3 < first
    for _ in range(100):
        amount.note(arrived=128, lost=128)
    assert amount.for_pieces(MAX_PIECES) == MAX_PARITY


def corrected(lab: DatagramLab) -> DatagramLab:
    """Return `lab`, which nothing has happened in, with sessions that send parity: side 1 learns it from side 0."""
    lab.sides = [
        Side(DatagramSession(0.0, error_correction=not at), side.line, []) for at, side in enumerate(lab.sides)
    ]
    return lab


PARITY = ParityPacket(0, 0, 2, 5, bytes(PIECE_BYTES))


@pytest.mark.attack
@pytest.mark.parametrize(
    "packet",
    [
        ParityPacket(0, 0, 0, 5, bytes(PIECE_BYTES)),
        ParityPacket(0, 0, MAX_PIECES + 1, 5, bytes(PIECE_BYTES)),
        ParityPacket(0, MAX_PARITY, 2, 5, bytes(PIECE_BYTES)),
        ParityPacket(0, 0, 2, 0, bytes(PIECE_BYTES)),
        ParityPacket(0, 0, 2, PIECE_BYTES + 1, bytes(PIECE_BYTES)),
        ParityPacket(0, 0, 2, 5, bytes(PIECE_BYTES - 1)),
        ParityPacket(0, 0, 1, 5, bytes(6)),
        ParityPacket(MAX_OPEN_FRAMES, 0, 2, 5, bytes(PIECE_BYTES)),
    ],
)
def test_forged_parity_ends_the_session(packet: ParityPacket) -> None:
    """Group sizes, indices and lengths that no sender has; the leg ends and keeps nothing."""
    session = DatagramSession(0.0)
    out = session.handle(PacketArrived(0, packet.content()), 1.0)
    assert isinstance(out[-1], EndSession)
    assert session.num_held_bytes == 0


@pytest.mark.attack
@pytest.mark.parametrize(
    "second",
    [
        ParityPacket(0, 1, 3, 5, bytes(PIECE_BYTES)),
        ParityPacket(0, 1, 2, 6, bytes(PIECE_BYTES)),
        PiecePacket(0, 1, 2, bytes(6)),
    ],
)
def test_parity_of_another_group_is_refused(second: ParityPacket | PiecePacket) -> None:
    """Pieces and parity of a frame say the same of it."""
    assembly = FrameAssembly()
    assembly.add(PARITY)
    with pytest.raises(ProtocolError, match="and"):
        assembly.add(second)


@pytest.mark.attack
@pytest.mark.parametrize("by_turns", [False, True])
def test_parity_without_frames_takes_bounded_memory(*, by_turns: bool) -> None:
    """A side that sends parity only is cut off before it fills the memory; parity of a whole frame is dropped."""
    assembly = FrameAssembly()
    assert assembly.add(PiecePacket(0, 0, 1, b"whole")) == b"whole"
    assert assembly.add(ParityPacket(0, 0, 1, 5, bytes(5))) is None

    def fill() -> None:
        frames, indexes = range(1, MAX_OPEN_FRAMES), range(MAX_PARITY)
        for one, other in itertools.product(*((indexes, frames) if by_turns else (frames, indexes))):
            frame, index = (other, one) if by_turns else (one, other)
            assembly.add(ParityPacket(frame, index, MAX_PIECES, 5, bytes(PIECE_BYTES)))

    with pytest.raises(ProtocolError, match="frames are open"):
        fill()
    assert assembly.num_held_bytes <= MAX_HELD_BYTES

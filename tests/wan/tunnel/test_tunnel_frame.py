"""Frames between proxies: what one side writes the other reads, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.wan.tunnel.seen_numbers import SeenNumbers
from isthmus.wan.tunnel.sent_frames import SentFrames
from isthmus.wan.tunnel.tunnel_frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    RANGE,
    UNNUMBERED,
    FrameKind,
    TunnelFrame,
    parse_frame_header,
    parse_ranges,
    parse_text,
)


@given(st.sampled_from(FrameKind), st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_header_is_read_as_written(kind: FrameKind, number: int, stream: int, offset: int) -> None:
    """Kind, number, stream, offset and payload size survive."""
    payload = b"x" if kind is FrameKind.DATA else b""
    frame = TunnelFrame(kind, 2**64 - 1 if kind in UNNUMBERED else number, stream, offset, payload)
    assert parse_frame_header(frame.header()) == (TunnelFrame(kind, frame.number, stream, offset), len(payload))


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_headers_are_refused_or_read(header: bytes) -> None:
    """No other error than `ProtocolError` leaves the parser, and no size beyond the longest payload."""
    try:
        _, num_bytes = parse_frame_header(header)
    except ProtocolError:
        return
    assert num_bytes <= MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("place", [0, 1, 4, 8])
def test_a_header_with_a_wrong_field_is_refused(place: int) -> None:
    """An unknown kind, reserved bytes, a payload that its kind has not, a number where none belongs."""
    header = bytearray(TunnelFrame(FrameKind.PING).header())
    header[place] = 0x55
    with pytest.raises(ProtocolError):
        parse_frame_header(header)


@given(st.binary(max_size=100))
def test_random_ranges_are_refused_or_ascend(payload: bytes) -> None:
    """What passes ascends and does not overlap, so that acknowledging costs no more than what was sent."""
    try:
        ranges = parse_ranges(payload)
    except ProtocolError:
        return
    assert [place for one in ranges for place in one] == sorted({place for one in ranges for place in one})


def test_an_acknowledgement_of_frames_never_sent_is_refused() -> None:
    """A huge range costs nothing: it is refused before it is walked through."""
    with pytest.raises(ProtocolError):
        SentFrames().acknowledge(0, parse_ranges(RANGE.pack(1, 2**61)))


def test_text_of_the_far_side_is_printable() -> None:
    """Control characters of a reason never reach a terminal or a log."""
    assert parse_text(b"a\x1b[31m\n\xff") == "a?[31m??"


@given(st.permutations(range(12)), st.lists(st.integers(0, 11)))
def test_each_number_is_new_once(order: list[int], repeats: list[int]) -> None:
    """In any order, with repeats; at the end all are below the floor, and no memory is left."""
    seen = SeenNumbers(window=12)
    assert [seen.add(number) for number in order] == [True] * 12
    assert not any(seen.add(number) for number in repeats)
    assert (seen.floor, seen.ranges(9)) == (12, [])

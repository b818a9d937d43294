"""A link is measured on one connection: round trip and rate, with bounds at both ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from isthmus.wan.link_probe import MAX_SAMPLE_BYTES, MAX_SAMPLES, answer_probe, probe_link

LIMIT_S = 5.0


class SlowLink:
    """A connection whose clock says that each sample takes a round trip and its bytes at a rate."""

    def __init__(self, round_trip_s: float, bytes_per_s: float) -> None:
        self.round_trip_s, self.bytes_per_s, self.now_s, self.sizes = round_trip_s, bytes_per_s, 0.0, list[int]()

    def settimeout(self, _: float) -> None:
        """Take any limit."""

    def sendall(self, data: bytes) -> None:
        self.sizes.append(len(data) - 4)
        self.now_s += self.round_trip_s + self.sizes[-1] / self.bytes_per_s

    def recv(self, _: int) -> bytes:
        return b"."


@pytest.mark.parametrize(("round_trip_s", "gbps"), [(0.0002, 20.0), (0.03, 1.0), (0.2, 0.05), (0.004, 0.002)])
def test_round_trip_and_rate_are_those_of_the_link(round_trip_s: float, gbps: float) -> None:
    """From 2 Mbit/s to 20 Gbit/s, in samples that take a quarter of a second at most beside the warm-up."""
    link = SlowLink(round_trip_s, gbps * 1e9 / 8)
    found_s, rate = probe_link(link, 3.0, clock=lambda: link.now_s)  # type: ignore[arg-type]
    assert found_s == pytest.approx(round_trip_s, rel=0.05)
    assert rate == pytest.approx(gbps, rel=0.05)
    assert max(link.sizes) <= MAX_SAMPLE_BYTES
    assert link.now_s < 3.0


def test_a_link_that_is_too_slow_is_not_measured() -> None:
    """The limit holds for all samples together."""
    link = SlowLink(0.5, 1e4)
    with pytest.raises(OSError, match="limit"):
        probe_link(link, 3.0, clock=lambda: link.now_s)  # type: ignore[arg-type]
    assert link.now_s < 12.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    caller, listener = socket.socketpair()
    with caller, listener:
        yield caller, listener


def test_both_ends_understand_each_other(ends: tuple[socket.socket, socket.socket]) -> None:
    """Over a real connection."""
    caller, listener = ends

    def answer() -> None:
        with pytest.raises(OSError, match="closed"):
            answer_probe(listener, LIMIT_S)

    answers = threading.Thread(target=answer)
    answers.start()
    round_trip_s, gbps = probe_link(caller, LIMIT_S)
    caller.close()
    answers.join()
    assert round_trip_s > 0
    assert gbps > 0


@pytest.mark.attack
@pytest.mark.parametrize("size", [0, MAX_SAMPLE_BYTES + 1, 2**32 - 1])
def test_a_sample_beyond_the_bound_ends_the_answer(size: int, ends: tuple[socket.socket, socket.socket]) -> None:
    """Before a byte of it is read."""
    caller, listener = ends
    caller.sendall(size.to_bytes(4, "big"))
    with pytest.raises(OSError, match=f"a sample of {size} bytes"):
        answer_probe(listener, LIMIT_S)


@pytest.mark.attack
def test_a_caller_that_goes_on_and_on_is_answered_a_few_times(ends: tuple[socket.socket, socket.socket]) -> None:
    """Then the listener is free again."""
    caller, listener = ends
    caller.sendall(b"\0\0\0\1x" * (MAX_SAMPLES + 4))
    answer_probe(listener, LIMIT_S)
    listener.close()
    assert len(caller.recv(64)) == MAX_SAMPLES


@pytest.mark.attack
def test_a_caller_that_drips_is_given_up_at_the_limit(ends: tuple[socket.socket, socket.socket]) -> None:
    """The limit is one of the whole, and each byte does not renew it."""
    caller, listener = ends
    caller.sendall(b"\0\0\0\x08" + b"x" * 8)
    ticks = iter(range(100))
    with pytest.raises(OSError, match="limit"):
        answer_probe(listener, 3.0, clock=lambda: next(ticks) * 1.0)


@pytest.mark.attack
def test_an_answer_that_is_none_measures_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """A listener of an older release closes, and another program says something else."""
    caller, listener = ends
    listener.sendall(b"HTTP/1.1 400")
    with pytest.raises(OSError, match="does not measure"):
        probe_link(caller, LIMIT_S)

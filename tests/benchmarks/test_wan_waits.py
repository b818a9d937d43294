"""Benchmarks of gateways and proxies end, whatever does not come, and count it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks._proxy_cuts import Courier
from benchmarks._roce_added import open_link, send_frame
from isthmus.wan.gateway.nic_port import bind_udp


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return two sockets for datagrams on loopback."""
    with closing(bind_udp(("127.0.0.1", 0))) as near, closing(bind_udp(("127.0.0.1", 0))) as far:
        yield near, far


def test_a_frame_that_does_not_come_is_missed(ends: tuple[socket.socket, socket.socket]) -> None:
    """It counts as the longest wait, and a former frame that comes late does not count for it."""
    near, far = ends
    assert send_frame(near, far.getsockname(), far, b"frame", wait_s=20.0) < 20.0
    assert far.recv(100) == b"frame"
    near.sendto(b"former", far.getsockname())
    assert send_frame(near, near.getsockname(), far, b"frame", wait_s=0.02) == 0.02


def test_gateways_that_never_open_end_the_benchmark(ends: tuple[socket.socket, socket.socket]) -> None:
    """The first frame is sent again for a time only."""
    near, far = ends
    with pytest.raises(RuntimeError, match="no frame has crossed"):
        open_link(near, near.getsockname(), far, b"frame", most_s=0.02)


@pytest.mark.parametrize("far", ["silent", "broken"])
def test_a_connection_that_brings_nothing_back_is_not_whole(far: str) -> None:
    """Whether it says so or not."""
    near, other = socket.socketpair()
    courier = Courier(near, duration_s=0.01, silent_s=0.05)
    with closing(other):
        if far == "broken":
            other.close()
        courier.run()
    assert not courier.is_whole

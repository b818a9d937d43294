"""Rules of joining by RDMA where one side states it alone, or packets are lost: the error names RDMA, and soon."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.rdma.open_device import USER_SPACE
from isthmus.comm.rdma.upgrade_channel import UpgradeError
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.reconnect import Reconnector
from isthmus.core.errors import IsthmusError, PeerError
from isthmus.wan import listen
from tests.comm.ranks import link_keys
from tests.comm.test_rdma import devices, intact
from tests.until import until

pytestmark = pytest.mark.integration

JOIN_S = 30.0
NO_RDMA = r"no messages by RDMA: .*transport: rdma"


def lose(packet: bytes) -> Iterable[bytes]:
    """Lose everything."""
    return ()


def num_files() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def join(rdma: Sequence[str | None], sites: str, join_s: float) -> list[tuple[BaseException | None, float]]:
    """Return, for two ranks with the devices `rdma`, the error that each ended with, and after how many seconds.

    Nothing is left of what they have opened.
    """
    before = num_files()
    listeners = [listen("127.0.0.1") for _ in rdma]
    ports = [one.getsockname()[1] for one in listeners]

    def make(rank: int) -> tuple[BaseException | None, float]:
        start_s = time.monotonic()
        endpoints = [Endpoint("127.0.0.1", port, rdma=rdma[rank]) for port in ports]
        keys = link_keys(sites, rank) if sites else None
        error: BaseException | None = None
        try:
            with listeners[rank] as listener:
                greeting = Greeting("job-1", 1, rank, 2)
                transport = connect_transport("thread", greeting, endpoints, listener, join_s, keys=keys)
            error = transport.loss(2 * join_s)
            transport.abort()
        except IsthmusError as found:
            error = found
        return error, time.monotonic() - start_s

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(make, range(2)))
    assert until(lambda: num_files() == before)
    return ends


@pytest.mark.parametrize("sites", ["", "ab"])
@pytest.mark.parametrize("stating", [0, 1])
def test_a_rank_that_states_rdma_alone_names_it(stating: int, sites: str) -> None:
    """Whether it dials or answers, with keys or without; the other one loses its peer."""
    with devices(intact) as (device,):
        rdma = [USER_SPACE + device.address if rank == stating else None for rank in range(2)]
        ends = join(rdma, sites, JOIN_S)
    for rank, (error, took_s) in enumerate(ends):
        assert isinstance(error, IsthmusError)
        if rank == stating:
            assert re.search(rf"rank {1 - rank}: {NO_RDMA}", str(error))
            assert took_s < JOIN_S / 2, "it gives up after a few attempts"
        else:
            assert isinstance(error, PeerError)
            assert f"peer {stating}" in str(error)


@pytest.mark.parametrize("losing", [(0,), (1,), (0, 1)])
def test_ranks_whose_packets_are_lost_both_name_it(losing: tuple[int, ...]) -> None:
    """In one direction or both: neither joins, and each error says that no message came by RDMA, soon."""
    with devices(*(lose if rank in losing else intact for rank in range(2))) as found:
        ends = join([USER_SPACE + one.address for one in found], "ab", JOIN_S)
    for rank, (error, took_s) in enumerate(ends):
        assert re.search(rf"rank {1 - rank}: {NO_RDMA}", str(error))
        assert took_s < JOIN_S / 2


def test_a_peer_that_stays_away_is_lost_with_the_last_reason() -> None:
    """A connection that is opened later, and fails for want of RDMA, says so."""

    def redial(rank: int, number: int) -> None:
        raise UpgradeError("rank 3: no messages by RDMA: timed out")

    reconnector = Reconnector(3, 0.0, redial, lambda *_: None, threading.Event())
    with pytest.raises(PeerError, match="silent for 0 s: rank 3: no messages by RDMA"):
        reconnector.reconnect(0, ConnectionError("not connected yet"), lambda: True, lambda *_: True)

"""Rules of the leg by RDMA: the transport's kit over real RoCEv2 packets, credits, lost ways, hostile peers."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest

from isthmus.comm.channel.channel import MAX_PART_BYTES, PlainChannel
from isthmus.comm.rdma.ibverbs_device import open_card
from isthmus.comm.rdma.open_device import USER_SPACE, open_device, use_device
from isthmus.comm.rdma.rdma_channel import BLOCK_BYTES, LINGER_S, NUM_BLOCKS, NUM_SLOTS, RdmaChannel
from isthmus.comm.rdma.upgrade_channel import upgrade_channel
from isthmus.comm.rdma.user_space_device import Faults, UserSpaceDevice
from isthmus.comm.tcp.connection import Connection, ConnectionOwner
from isthmus.comm.tcp.send_queue import SendQueue
from isthmus.comm.transport.check_transport import check_joined_transport
from isthmus.core.base_model import TransportKind
from isthmus.core.errors import InputError, PeerError, UnavailableError
from isthmus.wan.roce.roce_opcodes import Opcode
from isthmus.wan.roce.roce_packet import RocePacket, parse_roce
from tests.comm.ranks import transports
from tests.until import until

pytestmark = pytest.mark.integration

_numbers = count()
LIMIT_S = 20.0


def address() -> str:
    """Return an address of this machine with a free port 4791."""
    for number in _numbers:
        place = f"127.{64 + number % 64}.{random.randrange(256)}.{random.randrange(1, 255)}"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.bind((place, 4791))
            return place
    raise AssertionError


def faulty(seed: int, loss: float = 0.02, again: float = 0.02) -> Faults:
    """Return faults: packets that are lost, or arrive twice, or behind the next one."""
    draw, late = random.Random(seed), list[bytes]()

    def faults(packet: bytes) -> Iterable[bytes]:
        chance = draw.random()
        if chance < loss:
            return
        if chance < loss + again:
            late.append(packet)
        yield packet
        if chance > 1 - again:
            yield from late
            late.clear()

    return faults


@contextmanager
def devices(*all_faults: Faults) -> Iterator[list[UserSpaceDevice]]:
    """Yield a device for each of `all_faults`, known by `user-space:` and its address."""
    with ExitStack() as stack:
        found = []
        for one in all_faults:
            device = UserSpaceDevice(address(), faults=one)
            stack.callback(device.close)
            use_device(USER_SPACE + device.address, device)
            found.append(device)
        yield found


def intact(packet: bytes) -> Iterable[bytes]:
    """Lose nothing."""
    return (packet,)


def names(found: list[UserSpaceDevice]) -> Callable[[int], str]:
    """Return the device of each rank."""
    return lambda rank: USER_SPACE + found[rank].address


@contextmanager
def channels(*all_faults: Faults) -> Iterator[tuple[RdmaChannel, RdmaChannel]]:
    """Yield both ends of a connection by RDMA."""
    near, far = socket.socketpair()
    for one in (near, far):
        one.settimeout(LIMIT_S)
    with devices(*(all_faults or (intact, intact))) as (first, second), ThreadPoolExecutor(2) as pool:
        tasks = [
            pool.submit(upgrade_channel, PlainChannel(sock), device, rank)
            for rank, (sock, device) in enumerate(((far, second), (near, first)))
        ]
        try:
            yield tasks[1].result(), tasks[0].result()
        finally:
            for task in tasks:
                if task.exception() is None:
                    task.result().close()


def read(channel: RdmaChannel, num_bytes: int) -> bytes:
    """Return the next part."""
    into = bytearray(num_bytes)
    channel.read_into(memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("sites", ["", "abb"])
def test_transports_conform_by_rdma(sites: str) -> None:
    """Real packets of RoCEv2, of a NIC for each rank, keep every rule of the transport's seam, with keys too."""
    with devices(*[intact] * 3) as found:
        check_joined_transport(partial(transports, sites=sites, rdma=names(found)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_transports_conform_over_a_faulty_network(seed: int) -> None:
    """Packets that are lost, doubled and late cost time only."""
    with devices(*(faulty(10 * seed + rank) for rank in range(3))) as found:
        check_joined_transport(partial(transports, lanes=2, sites="abb", rdma=names(found)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process"])
def test_a_transport_process_conforms_by_rdma(kind: TransportKind) -> None:
    """The process of a transport opens the device itself."""
    places = [address() for _ in range(3)]
    check_joined_transport(partial(transports, kind=kind, rdma=lambda rank: USER_SPACE + places[rank]))


def test_short_messages_are_sends_and_long_ones_notifying_writes() -> None:
    """A frame is one message: a SEND into a posted receive, or a WRITE into a block that says its length."""
    packets = list[bytes]()

    def spy(packet: bytes) -> Iterable[bytes]:
        packets.append(packet)
        return (packet,)

    with channels(spy, intact) as (near, far):
        packets.clear()
        near.write([b"head", b"short"])
        assert (read(far, 4), read(far, 5)) == (b"head", b"short")
        assert packets[0][0] == Opcode.SEND_ONLY
        packets.clear()
        near.write([b"head", bytes(10_000)])
        assert (read(far, 4), read(far, 10_000)) == (b"head", bytes(10_000))
        assert [one[0] for one in packets] == [Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST_IMMEDIATE]


def test_packets_on_the_network_are_those_of_a_nic() -> None:
    """What another program sees on the wire has the headers and the ICRC of RoCEv2."""
    try:
        wire = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
    except PermissionError:
        pytest.skip("a raw socket needs root")
    with wire, channels() as (near, far):
        wire.settimeout(LIMIT_S)
        near.write([bytes(9000)])
        read(far, 9000)
        found = list[RocePacket]()
        while not found or found[-1].opcode != Opcode.WRITE_LAST_IMMEDIATE:
            frame = wire.recv(2**16)
            if frame[22:24] == (4791).to_bytes(2, "big"):
                found.append(parse_roce(frame))
        assert found[-1].extra == (9000).to_bytes(4, "big")


@pytest.mark.parametrize(("size", "room"), [(100, NUM_SLOTS), (100_000, NUM_BLOCKS)])
def test_a_writer_waits_for_room_at_the_reader(size: int, room: int) -> None:
    """A side sends what the other has posted receives or blocks for, and goes on when that is read; nothing is lost."""
    sent = [bytes([number % 256]) * size for number in range(3 * room)]
    written = threading.Semaphore(0)
    room -= room == NUM_SLOTS  # one of them had the message that tried the way

    def write(channel: RdmaChannel) -> None:
        for one in sent:
            channel.write([one])
            written.release()

    with ThreadPoolExecutor(1) as pool, channels() as (near, far):
        done = pool.submit(write, near)
        for _ in range(room):
            assert written.acquire(timeout=LIMIT_S)
        assert not written.acquire(timeout=0.2), "more than the reader has room for"
        assert [read(far, size) for _ in sent] == sent
        done.result(LIMIT_S)


def test_an_end_comes_behind_what_was_written() -> None:
    """A channel that is closed delivers its messages first; then the reader sees an end, and the writer an error."""
    with channels(faulty(1, loss=0.2), faulty(2, loss=0.2)) as (near, far):
        for number in range(10):
            near.write([bytes([number]) * 50])
        near.close()
        assert [read(far, 50)[0] for _ in range(10)] == list(range(10))
        with pytest.raises(ConnectionResetError):
            read(far, 1)
        with pytest.raises(ConnectionResetError):
            far.write([b"late"])
        with pytest.raises(ConnectionAbortedError):
            near.write([b"late"])


def test_silence_is_a_time_out() -> None:
    """A reader waits as long as the socket's time-out says, or for as long as silence is tolerated."""
    with channels() as (near, far):
        far.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            read(far, 1)
        patience = iter([True, True, False])
        with pytest.raises(TimeoutError):
            far.read_into(memoryview(bytearray(1)), lambda: next(patience))
        near.write([b"x"])
        assert read(far, 1) == b"x"


def test_a_network_without_a_way_is_named() -> None:
    """Where TCP connects and RDMA does not, joining fails with what to do, before any message of the run."""
    with (
        pytest.raises(UnavailableError, match=r"rank [01]: no messages by RDMA: .*transport: rdma"),
        channels(lambda _: (), intact),
    ):
        pass


@pytest.mark.slow
def test_a_way_that_ends_is_found_again_or_named() -> None:
    """Retries that are exceeded break the connection: it is dialled again, or its peer is lost by name."""
    cut = threading.Event()

    def cuttable(packet: bytes) -> Iterable[bytes]:
        return () if cut.is_set() else (packet,)

    with devices(cuttable, cuttable) as found:
        first, second = transports(2, heartbeat_s=5.0, peer_timeout_s=4.0, rdma=names(found))
        into = bytearray(200_000)
        received = second.receive(0, 1, "x", memoryview(into))
        cut.set()
        sent = first.send(1, 1, "x", memoryview(bytes(range(200)) * 1000))
        time.sleep(2.5)
        cut.clear()
        received.result(LIMIT_S)
        sent.result(LIMIT_S)
        assert into == bytes(range(200)) * 1000
        cut.set()
        failed = first.send(1, 2, "x", memoryview(b"lost"))
        assert isinstance(failed.exception(LIMIT_S), PeerError)
        assert "peer 1" in str(failed.exception())
        first.abort()
        second.abort()


def test_a_device_that_cannot_be_opened_is_named() -> None:
    """A rank without its device says which, where, and what to do, before it joins."""
    with devices(intact) as (taken,), pytest.raises(InputError, match="UDP port 4791"):
        open_device(f"{USER_SPACE}{taken.address}:")
    with pytest.raises(InputError, match=rf"on {socket.gethostname()}.*transport: rdma"):
        open_card("no-such-card")
    with pytest.raises(InputError, match="install rdma-core"):
        open_card(library="libno-such.so.1")


def test_a_nic_that_fails_ends_its_connections() -> None:
    """Whatever fails in its thread: nobody waits for it, and it opens no more pairs."""
    is_failing = threading.Event()

    def failing(packet: bytes) -> Iterable[bytes]:
        if is_failing.is_set():
            raise LookupError("a defect")
        return (packet,)

    with channels(intact, failing) as (near, far):
        is_failing.set()
        near.write([b"x"])
        for one in (near, far):
            with pytest.raises(ConnectionResetError):
                read(one, 2 if one is far else 1)


def test_a_nic_that_has_failed_opens_no_pair() -> None:
    """Its error says why, as does that of the pairs which it had."""

    def failing(packet: bytes) -> Iterable[bytes]:
        raise LookupError("a defect")

    with devices(intact, failing) as (first, second):
        near, far = (device.open_pair(memoryview(bytearray(10)), 0, 10, 1) for device in (first, second))
        near.connect(far.record)
        far.connect(near.record)
        far.post_receive(0, 0, 10)
        near.post_send(0, 10)
        assert until(lambda: [one for one in far.poll() if "a defect" in one.error])
        with pytest.raises(OSError, match=r"has failed.*a defect"):
            second.open_pair(memoryview(bytearray(10)), 0, 10, 1)


def test_connections_whose_way_is_lost_end_together() -> None:
    """Each may take a second to deliver what was written, but all take it at once, of several peers too."""
    cut = threading.Event()

    def cuttable(packet: bytes) -> Iterable[bytes]:
        return () if cut.is_set() else (packet,)

    with devices(*[cuttable] * 4) as found:
        all_ranks = transports(4, lanes=3, rdma=names(found))
        messages = [(peer, memoryview(bytes(2**20))) for peer in (1, 2, 3)]
        for sent in [all_ranks[0].send(peer, 1, "x", data) for peer, data in messages]:
            sent.result(LIMIT_S)
        cut.set()
        for peer, data in messages:
            all_ranks[0].send(peer, 1, "x", data)
        time.sleep(0.2)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(all_ranks[0].abort).result(2 * LINGER_S)
        for one in all_ranks[1:]:
            one.abort()


def test_a_channel_is_ready_as_long_as_the_peer_has_room() -> None:
    """Or once it has failed, so that its writer hears of it; before it says no, another channel may go on."""
    with channels() as (near, far):
        asked: list[str] = []
        for _ in range(NUM_BLOCKS):
            assert near.wait_ready(lambda: asked.append("early"))
            near.write([bytes(NUM_SLOTS * 1024)])
        assert not near.wait_ready(lambda: asked.append("full"))
        assert asked == ["full"]
        for _ in range(NUM_BLOCKS):
            read(far, NUM_SLOTS * 1024)
        assert until(near.wait_ready)
        for _ in range(NUM_BLOCKS):
            near.write([bytes(NUM_SLOTS * 1024)])
        far.shut_down()
        assert until(near.wait_ready)


def test_a_connection_takes_a_part_while_its_channel_has_room() -> None:
    """TCP, which has opened the channel and is idle now, could always send."""
    queue = SendQueue()
    owner = cast(ConnectionOwner, SimpleNamespace(send_queue=queue, close_reason=None))
    with channels() as (near, far):
        one = Connection(0, near, 0.0, owner, heartbeat_s=1.0, silence_timeout_s=LIMIT_S, part_timeout_s=LIMIT_S)
        queue.put(1, "x", memoryview(bytes(2 * MAX_PART_BYTES)), 0.0)
        for _ in range(NUM_BLOCKS):
            near.write([bytes(MAX_PART_BYTES)])
        assert one.next_fragment() is None
        for _ in range(NUM_BLOCKS):
            read(far, MAX_PART_BYTES)
        assert len(until(one.next_fragment).payload) == MAX_PART_BYTES


def test_a_message_longer_than_a_block_is_refused() -> None:
    """By the writer itself: the reader has no room for it."""
    with channels() as (near, _), pytest.raises(ValueError, match=str(BLOCK_BYTES)):
        near.write([bytes(BLOCK_BYTES + 1)])

"""Attacks on the leg by RDMA: records, credits, lengths and immediates out of bounds, and packets of strangers."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.channel.sealed_channel import SealedChannel
from isthmus.comm.rdma.rdma_channel import (
    BLOCK_BYTES,
    MEMORY_BYTES,
    NUM_BLOCKS,
    NUM_SLOTS,
    REGION_AT,
    REGION_BYTES,
    SLOT_BYTES,
    RdmaChannel,
)
from isthmus.comm.rdma.upgrade_channel import upgrade_channel
from isthmus.comm.rdma.user_space_device import UserSpaceDevice
from isthmus.comm.rdma.verbs import RECORD_BYTES, Completion, PairRecord, unpack_record
from isthmus.core.errors import IsthmusError, ProtocolError
from isthmus.noise import CipherState
from isthmus.wan.roce.roce_opcodes import UDP_PORT, Opcode
from isthmus.wan.roce.roce_packet import RethHeader, RocePacket, build_roce, frame_of_payload, parse_roce
from tests.comm.test_rdma import LIMIT_S, address, read

pytestmark = pytest.mark.attack

GOOD = PairRecord(b"\0" * 10 + b"\xff\xff\x7f\x01\x02\x03", 0, 1234, 77, 3, REGION_BYTES, 2**40, 99)


class ScriptedPair:
    """A queue pair whose completions are those that a test makes up."""

    record = GOOD

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.receives, self.completions = memory, list[int](), list[Completion]()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def connect(self, peer: PairRecord) -> None: ...

    def post_receive(self, number: int, offset: int, num_bytes: int) -> None:
        assert offset == number * SLOT_BYTES
        assert num_bytes == SLOT_BYTES
        self.receives.append(number)

    def post_send(self, offset: int, num_bytes: int) -> None: ...

    def post_write(self, offset: int, num_bytes: int, address: int, immediate: int) -> None: ...

    def fileno(self) -> int:
        return self._event

    def poll(self) -> list[Completion]:
        found, self.completions = self.completions, []
        return found

    def close(self) -> None:
        os.close(self._event)

    def send(self, message: bytes, num_bytes: int | None = None) -> Completion:
        """Return the end of a receive by a SEND."""
        number = self.receives.pop(0)
        self.memory[number * SLOT_BYTES :][: len(message)] = message
        size = len(message) if num_bytes is None else num_bytes
        return Completion(is_receive=True, number=number, num_bytes=size)

    def write(self, immediate: int) -> Completion:
        """Return the end of a receive by a WRITE."""
        return Completion(is_receive=True, number=self.receives.pop(0), immediate=immediate)

    def end(self, *many: Completion) -> None:
        self.completions = list(many)
        os.eventfd_write(self._event, 1)


@contextlib.contextmanager
def scripted() -> Iterator[tuple[RdmaChannel, ScriptedPair]]:
    """Yield a channel over a scripted pair."""
    pairs = list[ScriptedPair]()

    class Device:
        def open_pair(self, memory: memoryview, region_offset: int, region_bytes: int, depth: int) -> ScriptedPair:
            assert (len(memory), region_offset, region_bytes) == (MEMORY_BYTES, REGION_AT, REGION_BYTES)
            pairs.append(ScriptedPair(memory))
            return pairs[0]

    near, far = socket.socketpair()
    near.settimeout(LIMIT_S)
    with far:
        channel = RdmaChannel(PlainChannel(near), Device())
        channel.connect(GOOD)
        channel.start()
        try:
            yield channel, pairs[0]
        finally:
            channel.close()


def read_many(channel: RdmaChannel, num_bytes: int, times: int) -> None:
    """Read that many parts."""
    for _ in range(times):
        read(channel, num_bytes)


def head(slots: int = 0, blocks: int = 0, num_bytes: int = 0) -> bytes:
    """Return what a SEND begins with."""
    return struct.pack("!HHI", slots, blocks, num_bytes)


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_random_records_are_refused(data: bytes) -> None:
    """Bytes are a record or an error of ours, never another one."""
    with pytest.raises(ProtocolError):
        unpack_record(data, REGION_BYTES)


@given(
    st.sampled_from(
        [
            {"gid": b"\0" * 16},
            {"gid": b"\0" * 10 + b"\xff\xff\xff\xff\xff\xff"},
            {"gid": b"\0" * 10 + b"\xff\xff\xe0\0\0\1"},
            {"gid": b"\xff\x02" + b"\0" * 13 + b"\1"},
            {"number": 0},
            {"number": 1},
            {"number": 2**24},
            {"first_psn": 2**24},
            {"mtu_code": 0},
            {"mtu_code": 6},
            {"region_bytes": REGION_BYTES - 1},
            {"address": 2**64 - REGION_BYTES + 1},
        ]
    )
)
def test_a_record_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    """Addresses of no or of many hosts, numbers that no pair has, and a region that is too short or wraps."""
    assert astuple(unpack_record(GOOD.packed(), REGION_BYTES)) == astuple(GOOD)
    with pytest.raises(ProtocolError, match="refused"):
        unpack_record(replace(GOOD, **change).packed(), REGION_BYTES)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"x" * RECORD_BYTES, replace(GOOD, gid=b"\x20" * 16).packed()])
def test_a_peer_with_a_bad_record_joins_nothing(data: bytes) -> None:
    """The upgrade fails by name, nothing was sent to the gid, and the pair is gone."""
    sent = list[bytes]()

    def spy(packet: bytes) -> Iterable[bytes]:
        sent.append(packet)
        return (packet,)

    device = UserSpaceDevice(address(), faults=spy)
    near, far = socket.socketpair()
    with far:
        near.settimeout(LIMIT_S)
        far.sendall(data)
        with pytest.raises(IsthmusError, match="rank 3"):
            upgrade_channel(PlainChannel(near), device, 3)
    device.close()
    assert not sent


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        (head(slots=1), None),
        (head(blocks=1), None),
        (head(slots=2**16 - 1, blocks=2**16 - 1), None),
        (head(num_bytes=5) + b"1234", None),
        (head(num_bytes=2**32 - 1) + b"1234", None),
        (b"", None),
        (b"1234567", None),
        (head(num_bytes=SLOT_BYTES), SLOT_BYTES + 8),
    ],
)
def test_a_message_that_no_peer_sends_ends_the_channel(message: bytes, num_bytes: int | None) -> None:
    """Credit for what was never sent, a length that is not the message's, a message without its beginning."""
    with scripted() as (channel, pair):
        pair.end(pair.send(message, num_bytes))
        with pytest.raises(ConnectionResetError):
            read(channel, 1)
        with pytest.raises(ConnectionResetError):
            channel.write([b"x"])


def test_a_completion_of_no_work_ends_the_channel() -> None:
    """Whatever a driver does wrong: who writes and who reads hears of it, and the peer sees an end."""
    with scripted() as (channel, pair):
        pair.end(Completion(is_receive=False, number=0))
        with pytest.raises(ConnectionResetError, match="IndexError"):
            read(channel, 1)
        with pytest.raises(ConnectionResetError, match="IndexError"):
            channel.write([b"x"])
        assert channel.socket.recv(1) == b""


def test_a_channel_that_is_shut_down_again_waits_quietly() -> None:
    """Work that does not end takes the time of its delivery, and no more of the processor than a few looks."""
    with scripted() as (channel, pair):
        polls, poll, has_looked = 0, pair.poll, threading.Event()

        def counted() -> list[Completion]:
            nonlocal polls
            polls += 1
            has_looked.set()
            return poll()

        pair.poll = counted  # type: ignore[method-assign]
        channel.write([b"never sent"])
        channel.shut_down()
        assert has_looked.wait(LIMIT_S)
        channel.shut_down()
        channel.close()
        assert polls < 50


@pytest.mark.parametrize("error", [OSError(12, "no memory"), LookupError("no memory")])
@pytest.mark.parametrize("failing", ["post_receive", "connect"])
def test_a_channel_that_cannot_be_opened_leaves_nothing(failing: str, error: Exception) -> None:
    """Where a device takes no work, or its driver has a defect, the pair and the descriptors are given back."""
    pairs = list[ScriptedPair]()

    def fail(*_: object) -> None:
        raise error

    class Device:
        def open_pair(self, memory: memoryview, *_: int) -> ScriptedPair:
            pairs.append(ScriptedPair(memory))
            setattr(pairs[0], failing, fail)
            return pairs[0]

    near, far = socket.socketpair()
    with near, far:
        before = len(list(Path("/proc/self/fd").iterdir()))
        far.sendall(GOOD.packed())
        with pytest.raises(IsthmusError, match=r"rank 3.*no memory"):
            upgrade_channel(PlainChannel(near), Device(), 3)
        assert pairs
        near.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before - 1


@pytest.mark.parametrize("immediate", [0, BLOCK_BYTES + 1, 2**32 - 1])
def test_an_immediate_out_of_bounds_ends_the_channel(immediate: int) -> None:
    """It is the length of a block's message."""
    with scripted() as (channel, pair):
        pair.end(pair.write(immediate))
        with pytest.raises(ConnectionResetError, match="block"):
            read(channel, 1)


def test_a_peer_that_sends_beyond_its_credits_ends_the_channel() -> None:
    """Neither blocks that were not read nor receives that are kept for credits are given to it."""
    with scripted() as (channel, pair):
        pair.end(*[pair.write(10) for _ in range(NUM_BLOCKS + 1)])
        with pytest.raises(ConnectionResetError, match="block"):
            read_many(channel, 10, NUM_BLOCKS + 1)
    with scripted() as (channel, pair):
        pair.end(*[pair.send(head(num_bytes=1) + b"x") for _ in range(NUM_SLOTS + 1)])
        with pytest.raises(ConnectionResetError, match=str(NUM_SLOTS)):
            read_many(channel, 1, NUM_SLOTS + 1)


def test_a_part_that_crosses_messages_ends_the_channel() -> None:
    """A message has whole parts; a shorter one is no part of the next."""
    with scripted() as (channel, pair):
        pair.end(pair.send(head(num_bytes=3) + b"abc"))
        with pytest.raises(ConnectionResetError, match="3 bytes where 4"):
            read(channel, 4)


@given(st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 2**32 - 1)), max_size=NUM_SLOTS + 4))
def test_whatever_messages_come_are_read_or_end_the_channel(messages: list[bytes | int]) -> None:
    """Any bytes as SENDs and any immediates: parts, or an error of a connection, never another one."""
    with scripted() as (channel, pair):
        pair.end(*[pair.send(one) if isinstance(one, bytes) else pair.write(one) for one in messages])
        channel.socket.settimeout(0.01)
        with contextlib.suppress(OSError):
            read_many(channel, 3, len(messages) + 1)


WRITES: list[Callable[[PairRecord], RethHeader]] = [
    lambda one: RethHeader(one.address, one.key ^ 1, 4),
    lambda one: RethHeader(one.address - 1, one.key, 4),
    lambda one: RethHeader(one.address + REGION_BYTES - 3, one.key, 4),
    lambda one: RethHeader(one.address, one.key, 2**32 - 1),
    lambda one: RethHeader(one.address, one.key, 3),
    lambda one: RethHeader(2**64 - 1, one.key, 4),
]


@pytest.mark.parametrize("target", WRITES)
@pytest.mark.parametrize("kind", ["write", "notify"])
def test_a_write_outside_the_region_ends_the_pair(target: Callable[[PairRecord], RethHeader], kind: str) -> None:
    """A wrong key, an address before or behind, a length that is not that of the data: refused, and nothing changes."""
    device, memory = UserSpaceDevice(address()), memoryview(bytearray(MEMORY_BYTES))
    pair = device.open_pair(memory, REGION_AT, REGION_BYTES, 4)
    pair.connect(replace(pair.record, number=77, first_psn=5))
    pair.post_receive(0, 0, 100)
    opcode, extra = (Opcode.WRITE_ONLY, b"") if kind == "write" else (Opcode.WRITE_ONLY_IMMEDIATE, bytes(4))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind((device.address, 0))
        packet = RocePacket(
            source=device.address, target=device.address, opcode=opcode, queue_pair=pair.record.number, psn=5,
            source_port=stranger.getsockname()[1], reth=target(pair.record), extra=extra, payload=b"evil",
        )  # fmt: skip
        stranger.sendto(build_roce(packet)[28:], (device.address, UDP_PORT))
        assert select.select([pair], [], [], LIMIT_S)[0]
    ends = [one.error for one in pair.poll()]
    assert ends == ["the peer wrote where it may not"]
    assert bytes(memory) == bytes(MEMORY_BYTES)
    pair.close()
    device.close()


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_forged_packet_reaches_no_reader(size: int) -> None:
    """Who can change packets, with the right ICRC, breaks a connection with keys, and changes nothing that is read."""
    is_forging = False

    def forge(packet: bytes) -> Iterable[bytes]:
        parsed = parse_roce(frame_of_payload(packet, first.address, second.address, UDP_PORT))
        if is_forging and len(parsed.payload) > 20:
            parsed = replace(parsed, payload=parsed.payload[:15] + b"?" + parsed.payload[16:])
        return (build_roce(parsed)[28:],)

    first, second = UserSpaceDevice(address(), faults=forge), UserSpaceDevice(address())
    near, far = socket.socketpair()
    keys = [bytes([number]) * 32 for number in range(2)]
    ends = []
    with ThreadPoolExecutor(2) as pool:
        for sock, device, mine, other in ((near, first, *keys), (far, second, *reversed(keys))):
            sock.settimeout(LIMIT_S)
            inner = SealedChannel(sock, CipherState(mine), CipherState(other))
            ends.append(pool.submit(upgrade_channel, inner, device, 0))
    a, b = (one.result() for one in ends)
    a.write([b"x" * size])
    assert read(b, size) == b"x" * size
    is_forging = True
    a.write([b"x" * size])
    with pytest.raises(ConnectionResetError, match="authentication"):
        read(b, size)
    a.close()
    b.close()
    first.close()
    second.close()

"""Attacks on the links between ranks, by strangers, by hosts on the way, and by members of another site.

Every attack meets real transports over TCP. The transports keep their connections, their messages and their
incarnation, and an attacker without a key receives no byte.
"""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from isthmus.comm.channel.channel import PlainChannel
from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting, send_json_line
from isthmus.comm.tcp.sealed_greeting import FIRST_BYTES, SealedHandshake
from isthmus.comm.tcp.wire_format import DATA, FrameHeader, frame_parts
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.core.base_model import TransportKind
from isthmus.core.errors import IsthmusError
from isthmus.wan import listen
from tests.comm.ranks import link_keys
from tests.comm.relay import Relay
from tests.comm.test_transport import peer_behind
from tests.train.test_worker import moved
from tests.train.worker_jobs import keys_of, make_job, make_plan, run_job

pytestmark = pytest.mark.attack

SITES = ("a", "b", "b")
LIMIT_S = 30.0


class Run:
    """Three joined ranks with keys, where they listen, and the addresses of the callers that each turned away."""

    def __init__(
        self, kind: TransportKind, route: str | None, sites: Sequence[str], peer_timeout_s: float = 20.0
    ) -> None:
        self.listeners = [listen("127.0.0.1") for _ in sites]
        self.addresses = [one.getsockname() for one in self.listeners]
        self.refused: Counter[str] = Counter()
        endpoints = [Endpoint("127.0.0.1", address[1], route, 2) for address in self.addresses]

        def join(rank: int) -> JoinedTransport:
            return connect_transport(
                kind,
                Greeting("job-1", 1, rank, len(sites)),
                endpoints,
                self.listeners[rank],
                LIMIT_S,
                heartbeat_s=0.3,
                peer_timeout_s=peer_timeout_s,
                keys=link_keys(sites, rank),
                on_refused=lambda address: self.refused.update([address]),
            )

        with ThreadPoolExecutor(len(sites)) as pool:
            self.ranks = list(pool.map(join, range(len(sites))))

    def check_alive(self) -> None:
        """Every rank still exchanges messages with every other, and none was lost or restarted."""
        for mine, other in product(self.ranks, self.ranks):
            if mine is not other:
                into, data = bytearray(300_000), random.Random(mine.rank).randbytes(300_000)
                waiting = other.receive(mine.rank, 1, "x", memoryview(into))
                mine.send(other.rank, 1, "x", memoryview(data)).result(LIMIT_S)
                waiting.result(LIMIT_S)
                assert into == data
        assert [one.loss() for one in self.ranks] == [None] * len(self.ranks)


@contextmanager
def run_of(
    kind: TransportKind = "thread",
    route: str | None = None,
    sites: Sequence[str] = SITES,
    peer_timeout_s: float = 20.0,
) -> Iterator[Run]:
    run = Run(kind, route, sites, peer_timeout_s)
    try:
        yield run
    finally:
        with ThreadPoolExecutor(len(run.ranks)) as pool:
            list(pool.map(lambda one: one.close(), run.ranks))
        for one in run.listeners:
            one.close()


def answer_to(address: Any, *data: bytes) -> bytes:
    """Return every byte that a listener sends to a caller that sends `data`, until it closes."""
    with socket.create_connection(address) as caller:
        caller.settimeout(LIMIT_S)
        found = b""
        try:
            for one in data:
                caller.sendall(one)
            caller.shutdown(socket.SHUT_WR)
            while part := caller.recv(4096):
                found += part
        except TimeoutError:
            raise
        except OSError:  # closed meanwhile
            pass
        return found


def dial_as(address: Any, greeting: Greeting, keys: Any, rank: int = 0, number: int = 0) -> BaseException | None:
    """Dial with `keys`; return the error, None if the listener took the connection."""
    with socket.create_connection(address) as caller:
        caller.settimeout(LIMIT_S)
        try:
            SealedHandshake(greeting, keys, lambda: 0.0).dial(caller, rank, number)
        except (IsthmusError, OSError) as error:
            return error
        return None


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_forged_greetings_take_no_rank_and_get_no_answer(kind: TransportKind) -> None:
    """A stranger that knows run, attempt, size, incarnation and the addresses of all ranks, but no key, learns nothing.

    It greets as every rank, on every connection, as this and as a later incarnation, in the clear and with keys of its
    own; each time the listener closes without a byte.
    """
    with run_of(kind) as run:
        for (rank, address), lane, incarnation in product(enumerate(run.addresses), (0, 1), (0, 1, 2**40)):
            for posed in range(3):
                plain = Greeting("job-1", 1, posed, 3, incarnation).as_dict() | {"lane": lane}
                near, far = socket.socketpair()
                with near, far:
                    send_json_line(near, plain)
                    assert answer_to(address, far.recv(4096)) == b""
                greeting = Greeting("job-1", 1, posed, 3, incarnation)
                error = dial_as(address, greeting, link_keys(SITES, posed, "guessed"), rank, lane)
                assert isinstance(error, ConnectionResetError)
        run.check_alive()
        assert sum(run.refused.values()) == 3 * 2 * 3 * 3 * 2


def never_claimed(rank: int, number: int) -> bool:
    """Fail: nothing is claimed before the dialler has proved the key."""
    raise AssertionError(f"connection {number} of rank {rank} was claimed")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_recorded_handshake_opens_nothing(restarted: bool) -> None:
    """A host on the way replays what a member sent, byte for byte, to the rank that it was meant for and to others.

    A rank that remembers the greeting closes at once; one that has restarted since sends its own fresh key, to which
    the recorded proof does not fit. Neither displaces a connection.
    """
    sent: list[bytes] = []
    with Relay() as relay:
        relay.change = lambda data: (sent.append(data), data)[1]
        with run_of(route=relay.address) as run:
            heard = [one for one in sent if len(one) >= FIRST_BYTES]
            assert heard
            run.check_alive()
            for address, first in product(run.addresses, heard):
                assert answer_to(address, first, *heard) == b""
            if restarted:
                fresh = SealedHandshake(Greeting("job-1", 1, 0, 3), link_keys(SITES, 0), lambda: 0.0)
                opened = [found for one in heard if (found := fresh.open(one[:FIRST_BYTES])) is not None]
                assert opened
                for one in opened:
                    near, far = socket.socketpair()
                    with near, far:
                        far.sendall(b"".join(heard))
                        with pytest.raises(ConnectionResetError):
                            fresh.answer(near, one, never_claimed)
            run.check_alive()


def test_changed_bytes_cost_a_reconnect_and_change_no_message() -> None:
    """A host on the way flips bits, inserts NaN and cuts records: what arrives is what was sent, once, in order."""
    chance, nan = random.Random(3), struct.pack("<f", float("nan")) * 64
    attacks = 0

    def change(data: bytes) -> bytes:
        nonlocal attacks
        if len(data) < 2000 or chance.random() > 0.2 or attacks >= 12:
            return data
        attacks += 1
        at = chance.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        how = chance.randrange(4)
        if how == 0:
            raise ConnectionResetError
        return [flipped, data[:at] + nan + data[at + len(nan) :], data + nan][how - 1]

    with Relay() as relay, run_of(route=relay.address, sites=SITES[:2]) as run:
        relay.change = change
        low, high = run.ranks
        for number in range(40):
            data, into = chance.randbytes(400_000), bytearray(400_000)
            waiting = low.receive(1, number, "x", memoryview(into))
            high.send(0, number, "x", memoryview(data)).result(LIMIT_S)
            waiting.result(LIMIT_S)
            assert into == data
        assert attacks == 12
        assert [one.loss() for one in run.ranks] == [None, None]


def test_half_a_record_that_never_ends_costs_a_reconnect_and_no_message() -> None:
    """A host on the way lets half of a piece pass, then a byte every 0.1 s, which would take hours; so for 3 pieces.

    No read of the rank times out. The record has a time of its own, half of what a silent peer has.
    """
    held = 0

    def drips(data: bytes) -> bool:
        nonlocal held
        held += (drip := len(data) > 20_000 and held < 3)
        return drip

    with Relay() as relay, run_of(route=relay.address, sites=SITES[:2], peer_timeout_s=4) as run:
        relay.drips = drips
        low, high = run.ranks
        for number in range(12):
            data, into = random.Random(number).randbytes(300_000), bytearray(300_000)
            waiting = low.receive(1, number, "x", memoryview(into))
            high.send(0, number, "x", memoryview(data)).result(LIMIT_S)
            waiting.result(LIMIT_S)
            assert into == data
        assert held == 3
        assert [one.loss() for one in run.ranks] == [None, None]


def test_a_host_on_the_way_reads_nothing() -> None:
    """Neither tensors nor names nor labels nor the head of a frame crosses a proxy in the clear."""
    seen: list[bytes] = []
    with Relay() as relay:
        relay.change = lambda data: (seen.append(data), data)[1]
        with run_of(route=relay.address, sites=SITES[:2]) as run:
            low, high = run.ranks
            data, into = b"a secret activation " * 50_000, bytearray(1_000_000)
            waiting = low.receive(1, 7, "bfloat16[500000]", memoryview(into))
            high.send(0, 7, "bfloat16[500000]", memoryview(data)).result(LIMIT_S)
            waiting.result(LIMIT_S)
    carried = b"".join(seen)
    assert len(carried) > len(data)
    head = b"".join(map(bytes, frame_parts(FrameHeader(DATA, 0, 7, label="bfloat16[500000]"), b"")))[:18]
    for secret in (b"secret activation", b"job-1", b"bfloat16", b"isthmus", head):
        assert secret not in carried


def test_silent_connections_keep_no_member_out() -> None:
    """1. A stranger opens 600 connections and says nothing, or one byte. 2. All links break. 3. Members reconnect.

    The stranger's oldest connections make room, within the time that a member needs anyway.
    """
    with Relay() as relay, run_of(route=relay.address, sites=SITES[:2]) as run:
        silent = [socket.create_connection(run.addresses[0]) for _ in range(600)]
        for one in silent[::2]:
            with suppress(OSError):
                one.sendall(b"x")
        relay.cut()
        run.check_alive()
        for one in silent:
            one.close()


def test_a_member_of_one_site_cannot_pose_as_a_rank_of_another() -> None:
    """Site c has the keys of its own links. With them its member greets as rank 1, which belongs to site b.

    The rank that it dials knows whose key it was, and refuses; so the ranks of b keep their places, and no incarnation
    that c names counts.
    """
    sites = ("a", "b", "c")
    with run_of(sites=sites) as run:
        keys = link_keys(sites, 2)
        for incarnation in (0, 1):
            error = dial_as(run.addresses[0], Greeting("job-1", 1, 1, 3, incarnation), keys)
            assert isinstance(error, IsthmusError)
            assert "do not fit its run" in str(error)
        run.check_alive()


def test_a_stranger_cannot_take_the_place_of_a_peer_that_is_not_dialled_yet() -> None:
    """1. Ranks 1 and 3, of sites b and d, have no link. 2. A stranger or site c greets as one of them.

    Both are refused, on every connection and whether the rank that they pose as is higher or lower. 3. The two ranks
    send to each other, and have the link.
    """
    sites = ("a", "b", "c", "d")
    with run_of(sites=sites) as run:
        assert 3 not in run.ranks[1].traffic()
        for target, posed in ((1, 3), (3, 1)):
            for keys in (link_keys(sites, posed, "guessed"), link_keys(sites, 2)):
                for number, incarnation in product((0, 1), (0, 1)):
                    greeting = Greeting("job-1", 1, posed, 4, incarnation)
                    assert dial_as(run.addresses[target], greeting, keys, target, number) is not None
        assert 3 not in run.ranks[1].traffic()
        assert [one.loss() for one in run.ranks] == [None] * 4
        run.check_alive()
        assert 3 in run.ranks[1].traffic()


def test_a_message_to_one_rank_opens_nothing_at_another() -> None:
    """A greeting names, by the hash of the handshake, the rank that it is for."""
    with run_of(sites=("a", "a", "b")) as run:
        keys = link_keys(("a", "a", "b"), 2)
        assert isinstance(dial_as(run.addresses[1], Greeting("job-1", 1, 2, 3), keys, rank=0), ConnectionResetError)
        run.check_alive()


def test_a_giant_frame_head_takes_no_memory() -> None:
    """A head that announces 3 GiB, as one fragment or as the first of many, ends its connection before memory is taken.

    It is a member's: a stranger's bytes are no head. In the clear, on loopback, the bound is the same.
    """
    for header in (
        FrameHeader(DATA, label="x", message_bytes=3 * 2**30, payload_bytes=3 * 2**30),
        FrameHeader(DATA, label="x", message_bytes=3 * 2**30, payload_bytes=4),
    ):
        near, far = socket.socketpair()
        losses: list[Any] = []
        peer = peer_behind(near, losses.append)
        waiting = peer.receive(1, "x", memoryview(bytearray(4)))
        peer.start()
        PlainChannel(far).write(frame_parts(FrameHeader(DATA, tag=2, **_sizes(header)), b"1234"))
        assert waiting.exception(LIMIT_S) is not None
        peer.join(1)
        far.close()
        assert len(losses) == 1
        assert peer.matcher.unclaimed_bytes == 0


def _sizes(header: FrameHeader) -> dict[str, int]:
    return {"message_bytes": header.message_bytes, "payload_bytes": header.payload_bytes}


@pytest.mark.slow
def test_a_hijacked_stream_changes_no_loss(tmp_path: Path) -> None:
    """Workers train through a proxy that writes NaN into their streams: they reconnect, and every loss is the same.

    The keys are in no file that the workers leave, and their own file is gone.
    """
    job = make_job(tmp_path, steps=8)
    plan = make_plan(job, [2, 4], "ab")
    quiet = run_job(tmp_path / "quiet", moved(job, tmp_path / "quiet"), plan)
    chance, num_attacks = random.Random(5), 0

    def change(data: bytes) -> bytes:
        nonlocal num_attacks
        if len(data) < 300 or num_attacks >= 6 or chance.random() > 0.1:
            return data
        num_attacks += 1
        at = chance.randrange(len(data) - 64)
        return data[:at] + struct.pack("<f", float("nan")) * 16 + data[at + 64 :]

    with Relay() as relay:
        relay.change = change
        attacked = run_job(
            tmp_path / "attacked", moved(job, tmp_path / "attacked"), plan, routes=dict.fromkeys("ab", relay.address)
        )
    assert num_attacks == 6
    assert attacked.losses() == quiet.losses()
    left = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for site in "ab":
        for key in keys_of(site, plan).keys.values():
            assert key.encode() not in left
            assert bytes.fromhex(key) not in left

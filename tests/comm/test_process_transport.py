"""Rules of the transport's process: bounded memory, nothing left behind, either one's death noticed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.process.control_messages import ControlChannel, ControlMessage, pack_error, unpack_error
from isthmus.comm.process.process_transport import ProcessTransport
from isthmus.comm.process.send_window import WINDOW_BYTES, OutgoingMessage, SendWindow
from isthmus.comm.process.shared_memory_arena import SharedMemoryArena, SlotAllocator, slot_bytes
from isthmus.comm.rdma.upgrade_channel import UpgradeError
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.core.errors import InputError, PeerError, ProtocolError, RestartError, UnavailableError
from isthmus.wan import listen
from tests.comm.ranks import transports

LIMIT_S = 60.0


def both(**options: object) -> tuple[ProcessTransport, ProcessTransport]:
    first, second = transports(2, kind="process", **options)
    assert isinstance(first, ProcessTransport)
    assert isinstance(second, ProcessTransport)
    return first, second


def close(*joined: ProcessTransport) -> None:
    with ThreadPoolExecutor(len(joined)) as pool:
        list(pool.map(lambda one: one.close(), joined))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_gone(pid):
        assert time.monotonic() < deadline_s, pid
        time.sleep(0.01)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300_000)), max_size=60), st.integers(0, 400_000))
def test_slots_never_overlap_and_are_used_again(steps: list[tuple[bool, int]], keep_bytes: int) -> None:
    """What is dealt out is apart from all else that is, and what lies idle stays within its bound."""
    slots, held = SlotAllocator(keep_bytes), list[tuple[int, int]]()
    for takes, size in steps:
        if takes or not held:
            offset = slots.allocate(size)
            assert all(offset + size <= other or other + length <= offset for other, length in held if size and length)
            held.append((offset, size))
        else:
            slots.free(*held.pop(size % len(held)))
        assert slots.idle_bytes <= keep_bytes
    for one in held:
        slots.free(*one)
    end = slots.end_offset
    for _, size in held:
        slots.allocate(size)
    assert slots.end_offset == end


def test_an_arena_gives_its_pages_back() -> None:
    """Memory that is freed beyond what is kept is the system's again, and both sides see the same bytes."""
    here = SharedMemoryArena(max_idle_bytes=slot_bytes(2**20))
    there = SharedMemoryArena(os.dup(here.descriptor))
    taken = [here.allocate(2**20) for _ in range(4)]
    for offset in taken:
        here.view(offset, 2**20)[:] = b"x" * 2**20
    assert bytes(there.view(taken[3], 2**20)) == b"x" * 2**20
    assert here.allocated_bytes == 4 * 2**20
    for offset in taken:
        here.free(offset, 2**20)
    assert here.allocated_bytes == 2**20
    here.close()
    assert there.allocated_bytes == 0
    there.close()


@given(st.lists(st.integers(0, 9), max_size=30), st.data())
def test_a_window_keeps_order_and_bound(sizes: list[int], data: st.DataObject) -> None:
    """Messages are passed on in order, within the bound unless alone; in the end all are."""
    passed, out = list[OutgoingMessage](), list[OutgoingMessage]()

    def pass_on(message: OutgoingMessage) -> None:
        passed.append(message)
        out.append(message)
        assert len(out) == 1 or sum(len(one.payload) for one in out) <= 6

    window = SendWindow(pass_on, limit_bytes=6)
    for number, size in enumerate(sizes):
        window.put(OutgoingMessage(number, 1, 0, "x", memoryview(bytes(size))))
        if out and data.draw(st.booleans()):
            window.release(out.pop(data.draw(st.integers(0, len(out) - 1))))
    while out:
        window.release(out.pop())
    assert [one.number for one in passed] == list(range(len(sizes)))


def test_a_window_that_failed_fails_what_waits_and_what_comes() -> None:
    """Nothing waits for room in a transport that is broken."""
    window = SendWindow(lambda _: None, limit_bytes=1)
    messages = [OutgoingMessage(number, 1, 0, "x", memoryview(b"1")) for number in range(3)]
    for one in messages[:2]:
        window.put(one)
    window.fail(PeerError("lost"))
    window.put(messages[2])
    assert not messages[0].future.done()
    assert [str(one.future.exception(0)) for one in messages[1:]] == ["lost", "lost"]


@given(
    st.builds(
        ControlMessage,
        kind=st.integers(0, 255),
        number=st.integers(0, 2**64 - 1),
        peer=st.integers(0, 2**32 - 1),
        tag=st.integers(-(2**63), 2**63 - 1),
        offset=st.integers(0, 2**64 - 1),
        num_bytes=st.integers(0, 2**64 - 1),
        times_s=st.tuples(*[st.floats(allow_nan=False)] * 5),
        text=st.text(max_size=30),
    )
)
def test_words_are_heard_as_they_were_said(word: ControlMessage) -> None:
    """Several at once, one by one, and then that the other side is gone, in the middle of a word too."""
    near, far = socket.socketpair()
    speaker, hearer = ControlChannel(near), ControlChannel(far)
    speaker.send(word, word)
    near.sendall(word.pack()[:-1])
    speaker.close()
    assert list(hearer.receive_all()) == [word, word]
    hearer.close()


@pytest.mark.parametrize(
    "error",
    [
        PeerError("gone", hint="look"),
        RestartError("anew", incarnation=7),
        UnavailableError("no way"),
        ProtocolError("another version"),
        InputError("no card", hint="leave it out"),
    ],
)
def test_errors_cross_the_line(error: UnavailableError) -> None:
    """Kind, message, hint and incarnation arrive."""
    found = unpack_error(pack_error(error))
    assert (type(found), found.__dict__) == (type(error), error.__dict__)


@pytest.mark.parametrize(
    ("error", "kind"), [(UpgradeError("no way", hint="look"), UnavailableError), (KeyError("a"), PeerError)]
)
def test_an_error_of_another_kind_crosses_as_the_one_above(error: Exception, kind: type) -> None:
    """What is above it in the hierarchy, else a lost peer."""
    found = unpack_error(pack_error(error))
    assert (type(found), found.message) == (kind, getattr(error, "message", str(error)))


def test_a_process_without_its_card_says_so() -> None:
    """The error is that of a transport of threads: an input that the user can mend."""
    with listen("127.0.0.1") as listener:
        endpoints = [Endpoint("127.0.0.1", listener.getsockname()[1], rdma="no-card")] * 2
        with pytest.raises(InputError, match=r"no .*RDMA.*on "):
            connect_transport("process", Greeting("job-1", 1, 0, 2), endpoints, listener, LIMIT_S)


@pytest.mark.slow
def test_a_killed_process_is_a_loss_that_is_mended() -> None:
    """1. The process of rank 1 is killed. 2. Both ranks get a `RestartError`, and their waiters wake.
    3. They connect again by other processes, at the same address.
    """
    listeners = [listen("127.0.0.1") for _ in range(2)]
    endpoints = [Endpoint("127.0.0.1", one.getsockname()[1]) for one in listeners]

    def join(rank: int, incarnation: int) -> ProcessTransport:
        while True:
            try:
                greeting = Greeting("job-1", 1, rank, 2, incarnation)
                found = connect_transport("process", greeting, endpoints, listeners[rank], LIMIT_S, heartbeat_s=0.2)
            except RestartError as error:
                incarnation = error.incarnation
            else:
                assert isinstance(found, ProcessTransport)
                return found

    with ThreadPoolExecutor(2) as pool:
        low, high = pool.map(join, (0, 1), (0, 0))
        waiting = [one.receive(1 - one.rank, 1, "x", memoryview(bytearray(1))) for one in (low, high)]
        os.kill(high.process_id, signal.SIGKILL)
        own = high.loss(LIMIT_S)
        assert isinstance(own, RestartError)
        assert "the transport process of rank 1 was killed by SIGKILL" in str(waiting[1].exception(LIMIT_S))
        high.abort()
        again = pool.submit(join, 1, 1)
        assert isinstance(low.loss(LIMIT_S), RestartError)
        assert isinstance(waiting[0].exception(LIMIT_S), PeerError)
        low.abort()
        low, high = join(0, 1), again.result(LIMIT_S)
    low.send(1, 1, "x", memoryview(b"n")).result(LIMIT_S)
    close(low, high)
    for one in listeners:
        one.close()


_WORKER = """
import sys, threading
from tests.comm.ranks import transports
joined = transports(2, kind="process")
waiting = joined[1].receive(0, 1, "x", memoryview(bytearray(2**20)))
print(*(one.process_id for one in joined), flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_nothing() -> None:
    """Its transport's process ends with it, and not before; their memory has no name, and is gone with the
    two. Its configuration is not on its command line.
    """
    with subprocess.Popen([sys.executable, "-c", _WORKER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        processes = [int(one) for one in worker.stdout.readline().split()]
        for pid in processes:
            told = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[1:]
            assert told[:2] == [b"-m", b"isthmus.comm.process.transport_process"]
            assert all(one.isdigit() for one in told[2:])
            files = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
            assert "/memfd:isthmus (deleted)" in files
            os.kill(pid, signal.SIGTERM)
            assert not is_gone(pid)
        worker.kill()
    for pid in processes:
        wait_until_gone(pid)


@pytest.mark.slow
def test_memory_is_bounded_and_used_again() -> None:
    """However much is sent to one that asks for nothing, a window of it takes memory; order is kept."""
    low, high = both(lanes=2)
    size, count = 3 * 2**20, 40
    payload = bytearray(size)
    sends = [low.send(1, 5, "x", memoryview(payload)) for _ in range(count)]
    most = 0
    for number in range(count):
        buffer = bytearray(size)
        high.receive(0, 5, "x", memoryview(buffer)).result(LIMIT_S)
        most = max(most, low.shared_bytes)
        assert not any(buffer), number
        assert high.shared_bytes <= size
    for one in sends:
        one.result(LIMIT_S)
    assert most <= WINDOW_BYTES
    close(low, high)


@pytest.mark.slow
def test_sends_racing_with_the_end_are_all_answered() -> None:
    """Every future is done once the transport is closed, whichever side of the close its send fell."""
    low, high = both()
    futures: list[Future[None]] = []

    def push() -> None:
        for _ in range(2000):
            futures.append(low.send(1, 1, "x", memoryview(b"1")))

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        low.close("the test is over")
        pushing.result(LIMIT_S)
    for one in futures:
        one.exception(LIMIT_S)
    assert isinstance(low.receive(1, 1, "x", memoryview(bytearray(1))).exception(0), PeerError)
    high.close("the test is over")


@pytest.mark.slow
def test_who_cannot_be_met_is_named() -> None:
    """What ends a meeting is raised here as the same error, and the process is gone."""
    with listen("127.0.0.1") as gone:
        port = gone.getsockname()[1]
    with listen("127.0.0.1") as own:
        endpoints = [Endpoint("127.0.0.1", port)] * 2
        with pytest.raises(PeerError, match="rank 0: peer 127"):
            connect_transport("process", Greeting("j", 1, 1, 2), endpoints, own, LIMIT_S)

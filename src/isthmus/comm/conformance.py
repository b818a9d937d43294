"""What every transport and every process group must do: `check_transport`, `check_joined_transport`,
`check_process_group`.

They take all ranks of one job in this process and drive each from a thread of its own; they raise
`AssertionError` naming the rule that was broken. The fake, the TCP transport, gloo and `isthmus` all pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from isthmus.comm.transport import JoinedTransport, Transport
from isthmus.core.errors import PeerError

LIMIT_S = 30.0
"""No rule takes longer; what does has failed."""

_Result = TypeVar("_Result")
_BIG_BYTES = 3 * 2**20 + 7


def check_transport(make: Callable[[int], Sequence[Transport]]) -> None:
    """Check the rules of the transport seam; `make(n)` returns `n` new transports joined to each other."""
    whole = (_counts, _in_order_per_tag, _big_both_ways, _refuses_another_label)
    for rules in (whole, (_leave_wakes,), (_gives_up,)):
        transports = make(3)
        try:
            for rule in rules:
                rule(transports)
        finally:
            _each(transports, lambda one: one.close())


def check_joined_transport(make: Callable[[int], Sequence[JoinedTransport]]) -> None:
    """Check the rules of transports whose ranks have met: those of the seam, and both ways to part."""
    check_transport(make)
    for rule in (_part_together, _abandon):
        rule(make(2))


def check_process_group(groups: Sequence[Any]) -> None:
    """Check exchanges and collectives; `groups[r]` is rank `r` of one group of at least two ranks."""
    for rule in (_tags, _crossing, _kinds_of_tensor, _allreduce, _broadcast, _allgather):
        _each(groups, rule)
    _barrier(groups)


def _each(ranks: Sequence[Any], run: Callable[[Any], _Result]) -> list[_Result]:
    """Run `run(rank)` for all at once, each in a thread; the first error is raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(run, one) for one in ranks]]


def _expect(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(rule)


def _receive(
    transport: Transport, peer: int, tag: int, num_bytes: int, label: str = "x"
) -> tuple[bytearray, Any]:
    buffer = bytearray(num_bytes)
    return buffer, transport.receive(peer, tag, label, memoryview(buffer))


def _in_order_per_tag(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    early, early_future = _receive(b, 0, 5, 3)
    sends = [a.send(1, tag, "x", memoryview(text)) for tag, text in ((7, b"one"), (7, b"two"), (5, b"six"))]
    sends.append(a.send(1, 9, "x", memoryview(b"")))
    arrival = early_future.result(LIMIT_S)
    _expect(bytes(early) == b"six", "tags are independent")
    _expect(abs(arrival.transfer_s) < LIMIT_S, "an arrival tells when it was sent, on the receiver's clock")
    for text in (b"one", b"two"):
        buffer, future = _receive(b, 0, 7, 3)
        future.result(LIMIT_S)
        _expect(bytes(buffer) == text, "messages of one tag arrive in order")
    _receive(b, 0, 9, 0)[1].result(LIMIT_S)
    for one in sends:
        one.result(LIMIT_S)


def _big_both_ways(transports: Sequence[Transport]) -> None:
    data = bytes(range(256)) * (_BIG_BYTES // 256 + 1)

    def run(mine: Transport) -> None:
        peers = [rank for rank in range(mine.size) if rank != mine.rank]
        sends = [mine.send(peer, 1, "x", memoryview(data)[:_BIG_BYTES]) for peer in peers]
        for peer in peers:
            buffer, future = _receive(mine, peer, 1, _BIG_BYTES)
            future.result(LIMIT_S)
            _expect(buffer == data[:_BIG_BYTES], "large messages cross in both directions, unchanged")
        for one in sends:
            one.result(LIMIT_S)

    _each(transports, run)


def _refuses_another_label(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    for first in ("receive", "send"):
        steps: dict[str, Callable[[], Any]] = {
            "receive": lambda: _receive(b, 0, 2, 4, "int8[4]")[1],
            "send": lambda: a.send(1, 2, "int8[2]", memoryview(b"ab")),
        }
        futures = {first: steps.pop(first)()}
        futures |= {name: step() for name, step in steps.items()}
        _expect_peer_error(futures["receive"], "a message of another shape is refused")
    a.send(1, 2, "x", memoryview(b"good"))
    buffer, future = _receive(b, 0, 2, 4)
    future.result(LIMIT_S)
    _expect(bytes(buffer) == b"good", "a refused message leaves the connection usable")


def _counts(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    a.send(1, 3, "x", memoryview(b"12345")).result(LIMIT_S)
    _receive(b, 0, 3, 5)[1].result(LIMIT_S)
    _expect(a.loss() is None, "a whole transport knows of no loss")
    _expect(a.traffic()[1].sent_bytes == 5, "sent bytes are counted per peer")
    _expect(b.traffic()[0].received_bytes == 5, "received bytes are counted per peer")


def _leave_wakes(transports: Sequence[Transport]) -> None:
    a, b, c = transports
    a.send(1, 4, "x", memoryview(b"last"))
    waiting = _receive(b, 0, 6, 1)[1]
    a.close()
    _expect_peer_error(waiting, "an orderly end wakes those who wait for it")
    buffer, future = _receive(b, 0, 4, 4)
    future.result(LIMIT_S)
    _expect(bytes(buffer) == b"last", "what was sent before the end still arrives")
    _expect_peer_error(_receive(b, 0, 4, 4)[1], "what is asked of one that has ended fails")
    c.send(1, 4, "x", memoryview(b"c"))
    _receive(b, 2, 4, 1)[1].result(LIMIT_S)


def _gives_up(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    on_a, on_c = _receive(b, 0, 6, 1)[1], _receive(b, 2, 6, 1)[1]
    a.close("its disk is full")
    for waiting in (on_a, on_c):
        error = _expect_peer_error(waiting, "a rank that gives up wakes every waiter, whomever it waits for")
        _expect("its disk is full" in str(error), "the reason is passed on")
    _expect("its disk is full" in str(b.loss(LIMIT_S)), "a broken transport says what broke it")
    woken = threading.Event()
    b.when_lost(woken.set)
    _expect(woken.wait(LIMIT_S), "who asks to be woken of a loss is, also after it")
    _expect_peer_error(b.send(2, 6, "x", memoryview(b"y")), "nothing can be sent over a broken transport")


def _part_together(transports: Sequence[JoinedTransport]) -> None:
    a, b = transports
    a.send(1, 4, "x", memoryview(b"last"))
    _each(transports, lambda one: one.close())
    _expect([a.stragglers(), b.stragglers()] == [[], []], "ranks that end together take leave of each other")
    _expect(a.loss() is None and b.loss() is None, "an orderly end is no loss")
    _expect_peer_error(_receive(b, 0, 6, 1)[1], "a transport that has ended fails what is asked of it")


def _abandon(transports: Sequence[JoinedTransport]) -> None:
    a, b = transports
    woken = threading.Event()
    a.when_lost(woken.set)
    on_a, on_b = _receive(b, 0, 6, 1)[1], _receive(a, 1, 6, 1)[1]
    a.abandon()
    _expect(woken.is_set(), "who abandons a transport wakes those who wait for a loss")
    _expect_peer_error(on_b, "what is under way in an abandoned transport fails")
    error = _expect_peer_error(on_a, "a rank that vanishes is lost")
    _expect("peer 0" in str(error), "the error names the peer")
    b.close("its peer has vanished")
    _expect(b.stragglers() == [0], "who vanished has not taken leave")


def _expect_peer_error(future: Future[Any], rule: str) -> BaseException:
    error = future.exception(LIMIT_S)
    if not isinstance(error, PeerError):
        raise AssertionError(f"{rule}; got {error!r}")
    return error


def _tags(group: Any) -> None:
    rank, size = group.rank(), group.size()
    if rank == 0:
        works = [group.send([torch.tensor([float(tag)])], size - 1, tag) for tag in (3, 1, 2)]
    elif rank == size - 1:
        received = {tag: torch.zeros(1) for tag in (2, 3, 1)}
        works = [group.recv([tensor], 0, tag) for tag, tensor in received.items()]
    else:
        works = []
    for work in works:
        work.wait()
    if rank == size - 1:
        _expect(all(float(tensor) == tag for tag, tensor in received.items()), "messages match by tag")


def _crossing(group: Any) -> None:
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(300_000)
    works = [group.send([torch.full((300_000,), float(rank))], after, 1), group.recv([got], before, 1)]
    for work in works:
        work.wait()
    _expect(bool((got == before).all()), "sends and receives of a ring cross without deadlock")


def _kinds_of_tensor(group: Any) -> None:
    rank, size = group.rank(), group.size()
    kinds = [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(2.5),
        torch.ones(4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ]
    if rank == 0:
        for kind in kinds:
            group.send([kind.contiguous()], size - 1, 0).wait()
    elif rank == size - 1:
        for kind in kinds:
            got = torch.zeros(kind.shape, dtype=kind.dtype)
            group.recv([got], 0, 0).wait()
            _expect(torch.equal(got, kind), f"a tensor of {kind.dtype} and shape {tuple(kind.shape)} arrives")


def _allreduce(group: Any) -> None:
    rank, size = group.rank(), group.size()
    for op, expected in ((dist.ReduceOp.SUM, sum(range(size))), (dist.ReduceOp.MAX, size - 1)):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensor = torch.full((5,), float(rank), dtype=torch.float64)
        group.allreduce([tensor], options).wait()
        _expect(bool((tensor == expected).all()), f"allreduce by {op}")


def _broadcast(group: Any) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = group.size() - 1, 0
    tensor = torch.full((3,), float(group.rank()))
    group.broadcast([tensor], options).wait()
    _expect(bool((tensor == group.size() - 1).all()), "broadcast gives all the root's tensor")


def _allgather(group: Any) -> None:
    parts = [torch.zeros(2) for _ in range(group.size())]
    group.allgather([parts], [torch.full((2,), float(group.rank()))]).wait()
    _expect(all(bool((part == rank).all()) for rank, part in enumerate(parts)), "allgather keeps order")


def _barrier(groups: Sequence[Any]) -> None:
    came: list[int] = []

    def run(group: Any) -> None:
        came.append(group.rank())
        group.barrier().wait()
        _expect(len(came) == group.size(), "nobody passes a barrier before all have come")

    _each(groups, run)

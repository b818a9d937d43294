"""Conformance kit for transports: `check_transport`, `check_joined_transport`.

Each check runs all ranks of a job in threads of this process and raises `AssertionError` naming the
broken rule. The fake and both TCP transports pass. Process groups have their own kit
(`isthmus.comm.group_conformance`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from isthmus.comm.transport.transport import JoinedTransport, Transport
from isthmus.core.errors import PeerError

RULE_TIMEOUT_S = 30.0
"""Time limit for each wait in a rule."""

_Result = TypeVar("_Result")
_BIG_BYTES = 3 * 2**20 + 7


def check_transport(make: Callable[[int], Sequence[Transport]]) -> None:
    """Check the rules of `Transport`; `make(n)` returns `n` new, connected transports."""
    whole = (_counts_traffic, _in_order_per_tag, _big_both_ways, _rejects_other_label, _receives_from_any)
    for rules in (whole, (_close_wakes_receivers,), (_close_with_reason,)):
        transports = make(3)
        try:
            for rule in rules:
                rule(transports)
        finally:
            run_on_ranks(transports, lambda one: one.close())


def check_joined_transport(make: Callable[[int], Sequence[JoinedTransport]]) -> None:
    """Check the rules of `JoinedTransport`: those of `Transport`, closing together and aborting."""
    check_transport(make)
    for rule in (_close_together, _abort):
        rule(make(2))


def run_on_ranks(ranks: Sequence[Any], run: Callable[[Any], _Result]) -> list[_Result]:
    """Run `run(rank)` for all ranks concurrently and return the results; raise the first error."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(RULE_TIMEOUT_S) for future in [pool.submit(run, one) for one in ranks]]


def expect(condition: bool, rule: str) -> None:
    """Raise `AssertionError` with the `rule` unless `condition` holds."""
    if not condition:
        raise AssertionError(rule)


def _receive(transport: Transport, peer: int, tag: int, num_bytes: int, label: str = "x") -> tuple[bytearray, Any]:
    buffer = bytearray(num_bytes)
    return buffer, transport.receive(peer, tag, label, memoryview(buffer))


def _in_order_per_tag(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    early, early_future = _receive(b, 0, 5, 3)
    sends = [a.send(1, tag, "x", memoryview(text)) for tag, text in ((7, b"one"), (7, b"two"), (5, b"six"))]
    sends.append(a.send(1, 9, "x", memoryview(b"")))
    arrival = early_future.result(RULE_TIMEOUT_S)
    expect(bytes(early) == b"six", "tags are independent")
    expect(abs(arrival.transfer_s) < RULE_TIMEOUT_S, "an arrival has the send time on the receiver's clock")
    left_s = arrival.first_left_s, arrival.last_left_s
    expect(arrival.sent_s <= left_s[0] <= left_s[1], "a message leaves after it was sent, its last fragment last")
    expect(abs(left_s[1] - arrival.arrived_s) < RULE_TIMEOUT_S, "it leaves on the receiver's clock too")
    for text in (b"one", b"two"):
        buffer, future = _receive(b, 0, 7, 3)
        future.result(RULE_TIMEOUT_S)
        expect(bytes(buffer) == text, "messages of one tag arrive in order")
    _receive(b, 0, 9, 0)[1].result(RULE_TIMEOUT_S)
    for one in sends:
        one.result(RULE_TIMEOUT_S)


def _big_both_ways(transports: Sequence[Transport]) -> None:
    data = bytes(range(256)) * (_BIG_BYTES // 256 + 1)

    def run(mine: Transport) -> None:
        peers = [rank for rank in range(mine.size) if rank != mine.rank]
        sends = [mine.send(peer, 1, "x", memoryview(data)[:_BIG_BYTES]) for peer in peers]
        for peer in peers:
            buffer, future = _receive(mine, peer, 1, _BIG_BYTES)
            future.result(RULE_TIMEOUT_S)
            expect(buffer == data[:_BIG_BYTES], "large messages arrive unchanged in both directions")
        for one in sends:
            one.result(RULE_TIMEOUT_S)

    run_on_ranks(transports, run)


def _rejects_other_label(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    for first in ("receive", "send"):
        steps: dict[str, Callable[[], Any]] = {
            "receive": lambda: _receive(b, 0, 2, 4, "int8[4]")[1],
            "send": lambda: a.send(1, 2, "int8[2]", memoryview(b"ab")),
        }
        futures = {first: steps.pop(first)()}
        futures |= {name: step() for name, step in steps.items()}
        _expect_peer_error(futures["receive"], "a message of another shape is rejected")
    a.send(1, 2, "x", memoryview(b"good"))
    buffer, future = _receive(b, 0, 2, 4)
    future.result(RULE_TIMEOUT_S)
    expect(bytes(buffer) == b"good", "a rejected message leaves the connection usable")


def _receives_from_any(transports: Sequence[Transport]) -> None:
    a, b, c = transports
    first, second, third = (bytearray(2) for _ in range(3))
    futures = [b.receive_any([0, 2], 8, "x", memoryview(one)) for one in (first, second)]
    c.send(1, 8, "x", memoryview(b"cc"))
    source, arrival = futures[0].result(RULE_TIMEOUT_S)
    expect((source, bytes(first)) == (2, b"cc"), "a receive from any rank takes the first message and names its sender")
    expect(arrival.sent_s <= arrival.arrived_s + RULE_TIMEOUT_S, "it has the times of the message")
    a.send(1, 8, "x", memoryview(b"aa"))
    expect(futures[1].result(RULE_TIMEOUT_S)[0] == 0 and bytes(second) == b"aa", "the next one takes the next message")
    for sender, text in ((c, b"c2"), (a, b"a2")):
        sender.send(1, 8, "x", memoryview(text)).result(RULE_TIMEOUT_S)
    buffer, future = _receive(b, 0, 8, 2)
    future.result(RULE_TIMEOUT_S)
    source, _ = b.receive_any([0, 2], 8, "x", memoryview(third)).result(RULE_TIMEOUT_S)
    expect((bytes(buffer), source, bytes(third)) == (b"a2", 2, b"c2"), "it finds messages that have arrived")
    wrong = b.receive_any([0, 2], 8, "int8[2]", memoryview(third))
    a.send(1, 8, "x", memoryview(b"aa"))
    _expect_peer_error(wrong, "a message of another shape is rejected, whichever rank sends it")
    c.send(1, 8, "x", memoryview(b"c3"))
    buffer, future = _receive(b, 2, 8, 2)
    future.result(RULE_TIMEOUT_S)
    expect(bytes(buffer) == b"c3", "a receive that failed takes no further message")


def _counts_traffic(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    a.send(1, 3, "x", memoryview(b"12345")).result(RULE_TIMEOUT_S)
    _receive(b, 0, 3, 5)[1].result(RULE_TIMEOUT_S)
    expect(a.loss() is None, "an intact transport reports no loss")
    expect(a.traffic()[1].sent_bytes == 5, "sent bytes are counted per peer")
    expect(b.traffic()[0].received_bytes == 5, "received bytes are counted per peer")


def _close_wakes_receivers(transports: Sequence[Transport]) -> None:
    a, b, c = transports
    a.send(1, 4, "x", memoryview(b"last"))
    waiting = _receive(b, 0, 6, 1)[1]
    a.close()
    _expect_peer_error(waiting, "an orderly close fails pending receives from that rank")
    buffer, future = _receive(b, 0, 4, 4)
    future.result(RULE_TIMEOUT_S)
    expect(bytes(buffer) == b"last", "messages sent before close still arrive")
    _expect_peer_error(_receive(b, 0, 4, 4)[1], "a receive from a closed rank fails")
    c.send(1, 4, "x", memoryview(b"c"))
    _receive(b, 2, 4, 1)[1].result(RULE_TIMEOUT_S)


def _close_with_reason(transports: Sequence[Transport]) -> None:
    a, b, _ = transports
    on_a, on_c = _receive(b, 0, 6, 1)[1], _receive(b, 2, 6, 1)[1]
    a.close("its disk is full")
    for waiting in (on_a, on_c):
        error = _expect_peer_error(waiting, "a close with a reason fails all pending receives")
        expect("its disk is full" in str(error), "the error contains the reason")
    expect("its disk is full" in str(b.loss(RULE_TIMEOUT_S)), "a broken transport reports its loss")
    woken = threading.Event()
    b.add_loss_callback(woken.set)
    expect(woken.wait(RULE_TIMEOUT_S), "a loss callback runs, also when registered after the loss")
    _expect_peer_error(b.send(2, 6, "x", memoryview(b"y")), "a send over a broken transport fails")


def _close_together(transports: Sequence[JoinedTransport]) -> None:
    a, b = transports
    a.send(1, 4, "x", memoryview(b"last"))
    run_on_ranks(transports, lambda one: one.close())
    expect([a.unclosed_peers(), b.unclosed_peers()] == [[], []], "ranks that close together exchange CLOSE")
    expect(a.loss() is None and b.loss() is None, "an orderly close causes no loss")
    _expect_peer_error(_receive(b, 0, 6, 1)[1], "a receive on a closed transport fails")


def _abort(transports: Sequence[JoinedTransport]) -> None:
    a, b = transports
    woken = threading.Event()
    a.add_loss_callback(woken.set)
    on_a, on_b = _receive(b, 0, 6, 1)[1], _receive(a, 1, 6, 1)[1]
    a.abort()
    expect(woken.is_set(), "aborting a transport runs its loss callbacks")
    _expect_peer_error(on_b, "pending receives of an aborted transport fail")
    error = _expect_peer_error(on_a, "a rank that vanishes is lost")
    expect("peer 0" in str(error), "the error names the peer")
    b.close("its peer has vanished")
    expect(b.unclosed_peers() == [0], "a vanished rank counts as unclosed")


def _expect_peer_error(future: Future[Any], rule: str) -> BaseException:
    error = future.exception(RULE_TIMEOUT_S)
    if not isinstance(error, PeerError):
        raise AssertionError(f"{rule}; got {error!r}")
    return error

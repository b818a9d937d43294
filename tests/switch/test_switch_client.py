"""Rules of a switch and its workers: sums are exact under any loss, duplication and order, and failures are named."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.messages.datagram import Datagram
from isthmus.switch.fixed_point import FixedPoint, NonFiniteError, magnitude_bits
from isthmus.switch.slot_pool import SlotPool
from isthmus.switch.switch_client import (
    Abort,
    ClientState,
    Instructions,
    Received,
    Start,
    StreamSettings,
    SwitchClient,
    Timer,
)
from tests.switch.virtual_switch import Faults, LossyNetwork, VirtualClock

KEY = b"k" * 32
WIDTH = 4


class Scene:
    """`num` workers and one switch; `steps` are sums, one after the other."""

    def __init__(self, num: int, slots: int, faults: Faults, seed: int, *, pool_slots: int = 64) -> None:
        self.clock = VirtualClock()
        self.network = LossyNetwork(self.clock, faults, random.Random(seed))
        self.pool = SlotPool(pool_slots, 8, keys={7: KEY}, incarnation=5, secret=b"s")
        self.alive = True
        self.due = 0
        self.clients = [
            SwitchClient(
                StreamSettings(job=7, run=1, stream=0, worker=worker, workers=num, key=KEY, slots=slots,
                               part_integers=WIDTH)
            )
            for worker in range(num)
        ]  # fmt: skip

    def start(self, worker: int, parts: np.ndarray, delay_s: float = 0.0) -> None:
        client = self.clients[worker]
        event = Start(parts, magnitude_bits(parts))

        def begin() -> None:
            self.due -= 1
            self.act(worker, client.handle(event, self.clock.now_s))

        self.due += 1
        self.clock.at(self.clock.now_s + delay_s, begin)

    def act(self, worker: int, out: Instructions) -> None:
        for data, size in out.send:
            self.network.send(data, size, lambda data, size: self._at_switch(Datagram(("w", worker), data, size)))
        self.clock.wake(worker, out.wake_s, lambda: self._timer(worker))

    def _timer(self, worker: int) -> None:
        client = self.clients[worker]
        if client.state in (ClientState.JOINING, ClientState.SUMMING):
            self.act(worker, client.handle(Timer(), self.clock.now_s))

    def _at_switch(self, datagram: Datagram) -> None:
        if not self.alive:
            return
        for one in self.pool.handle(datagram, self.clock.now_s):
            worker = one.address[1]
            self.network.send(one.data, one.packet_bytes, lambda data, size, to=worker: self._at_worker(to, data, size))
        self.pool.check()

    def _at_worker(self, worker: int, data: bytes, size: int) -> None:
        self.act(worker, self.clients[worker].handle(Received(data, size), self.clock.now_s))

    def run(self, limit_s: float = 60.0) -> None:
        def is_over() -> bool:
            return not self.due and all(one.state in (ClientState.DONE, ClientState.FAILED) for one in self.clients)

        self.clock.run(is_over, self.clock.now_s + limit_s)


def exact_sum(parts: list[np.ndarray]) -> np.ndarray:
    """The integers that a sum must give, computed apart from switch and client."""
    point = FixedPoint(len(parts))
    scales = point.scales(np.max([magnitude_bits(one) for one in parts], axis=0))
    return np.sum([point.to_integers(one, scales).astype(np.int64) for one in parts], axis=0)


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 4), slots=st.integers(1, 9), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    loss=st.sampled_from([0.0, 0.01, 0.2]), doubled=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_sums_are_exact_under_loss_duplication_and_reordering(num, slots, sizes, loss, doubled, seed):
    """Every worker ends with the same exact integers, for one sum after another over the same slots."""
    scene = Scene(num, slots, Faults(loss, doubled), seed)
    numbers = np.random.default_rng(seed)
    for size in sizes:
        parts = [numbers.normal(size=(size, WIDTH)).astype(np.float32) for _ in range(num)]
        for worker in range(num):
            scene.start(worker, parts[worker], delay_s=float(numbers.random()))
        scene.run()
        expected = exact_sum(parts)
        for client in scene.clients:
            if client.failure:
                assert loss == 0.2, client.failure  # four probes in a row may be lost
                return
            assert client.finished.all()
            np.testing.assert_array_equal(client.sums, expected)


def test_payload_grows_with_losses_by_what_was_lost():
    """At 1 % loss a worker sends at most 5 % more integers than without: a probe finds out what is missing."""
    scene = Scene(4, 32, Faults(loss=0.01), seed=3)
    parts = [np.ones((2000, WIDTH), np.float32)] * 4
    for worker in range(4):
        scene.start(worker, parts[worker])
    scene.run()
    for client in scene.clients:
        assert client.finished.all()
        assert 1 < client.counters["payload_bytes"] / parts[0].nbytes <= 1.05


def test_dead_switch_is_named_after_the_silence():
    """A switch that dies within a sum fails every worker, with the reason, within `silence_s` of the last word."""
    scene = Scene(2, 4, Faults(delay_s=1e-3), seed=0)
    for worker in range(2):
        scene.start(worker, np.ones((400, WIDTH), np.float32))
    scene.clock.at(0.05, lambda: setattr(scene, "alive", False))
    scene.run()
    assert scene.clock.now_s < 0.05 + 2.5
    for client in scene.clients:
        assert "has sent nothing for 2 s" in client.failure
        assert not client.finished.all()


def test_restarted_switch_is_named():
    """Slots that were lost with a restart are not summed into: the workers fail at once."""
    scene = Scene(2, 4, Faults(delay_s=1e-3), seed=0)
    for worker in range(2):
        scene.start(worker, np.ones((400, WIDTH), np.float32))
    fresh = SlotPool(64, 8, keys={7: KEY}, incarnation=99, secret=b"t")
    scene.clock.at(0.05, lambda: setattr(scene, "pool", fresh))
    scene.run()
    assert {client.failure for client in scene.clients} == {
        "the switch was restarted, or has given the slots to others"
    }


def test_full_switch_refuses():
    """A stream for which no slot is left is refused at once."""
    scene = Scene(1, 64, Faults(delay_s=1e-3), seed=0, pool_slots=64)
    scene.start(0, np.ones((1, WIDTH), np.float32))
    scene.run()
    scene.clients = [
        SwitchClient(StreamSettings(job=7, run=2, stream=0, worker=0, workers=1, key=KEY, part_integers=WIDTH))
    ]
    scene.start(0, np.ones((1, WIDTH), np.float32))
    scene.run()
    assert scene.clients[0].failure == "the switch has no free slots"


def test_leave_and_lease_free_slots():
    """Slots are free after a worker leaves, and after the lease of a job that is gone."""
    scene = Scene(1, 64, Faults(delay_s=1e-3), seed=0)
    scene.start(0, np.ones((1, WIDTH), np.float32))
    scene.run()
    assert scene.pool.statistics()["slots_used"] == 64
    data, size = scene.clients[0].leave()
    scene.pool.handle(Datagram(("w", 0), data, size), scene.clock.now_s)
    assert scene.pool.statistics()["slots_used"] == 0
    scene.clients = [
        SwitchClient(StreamSettings(job=7, run=3, stream=0, worker=0, workers=1, key=KEY, part_integers=WIDTH))
    ]
    scene.start(0, np.ones((1, WIDTH), np.float32))
    scene.run()
    scene.pool.handle(Datagram(("x", 0), b"", 1), scene.clock.now_s + 121)
    assert scene.pool.statistics()["slots_used"] == 0
    assert scene.pool.statistics()["expired_streams"] == 1


def test_slow_worker_is_awaited_and_named():
    """A worker that comes late fails nothing; until then the others know which one the switch lacks."""
    scene = Scene(3, 4, Faults(delay_s=1e-3), seed=0)
    parts = np.ones((4, WIDTH), np.float32)
    for worker in (0, 1):
        scene.start(worker, parts)
    scene.start(2, parts, delay_s=10.0)
    scene.clock.run(lambda: scene.clock.now_s > 9.0, 20)
    assert scene.clients[0].pending_workers() == [2]
    scene.run()
    assert all(one.finished.all() for one in scene.clients)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_fail_every_worker(bad):
    """NaN or infinity at one worker fails all of them by the magnitude of the part, before a wrong sum exists."""
    scene = Scene(2, 2, Faults(delay_s=1e-3), seed=0)
    parts = np.ones((5, WIDTH), np.float32)
    scene.start(0, parts)
    worse = parts.copy()
    worse[3, 1] = bad
    scene.start(1, worse)
    scene.run()
    for client in scene.clients:
        assert client.failure == "a worker's values contain NaN or infinity"
        assert not client.finished[3]


def test_abort_ends_a_sum():
    """A worker stops when another one goes on without the switch."""
    scene = Scene(2, 2, Faults(delay_s=1e-3), seed=0)
    scene.start(0, np.ones((5, WIDTH), np.float32))
    scene.clock.run(lambda: scene.clock.now_s > 0.1, 1)
    scene.clients[0].handle(Abort("worker 1 goes on without the switch"), scene.clock.now_s)
    assert scene.clients[0].state is ClientState.FAILED


@given(
    st.integers(1, 64),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_fixed_point_keeps_its_bound(num, values, shuffle):
    """Sums stay within the stated error and within 32 bits, for any values of any number of workers."""
    point = FixedPoint(num)
    parts = [np.array([[shuffle.choice(values) for _ in values]], np.float32) for _ in range(num)]
    bits = np.max([magnitude_bits(one) for one in parts], axis=0)
    scales = point.scales(bits)
    total = np.sum([point.to_integers(one, scales).astype(np.int64) for one in parts], axis=0)
    assert np.abs(total).max() <= 2**31 - 1
    exact = np.sum(parts, axis=0, dtype=np.float64)
    magnitude = float(bits.view(np.float32)[0])
    try:
        got = point.to_values(total.astype(np.int32), scales)
    except NonFiniteError:
        assert np.abs(exact).max() >= 0.999 * np.finfo(np.float32).max
        return
    bound = point.error_bound(magnitude)
    rounding = np.maximum(np.abs(exact) * 2.0**-23, 2.0**-149)
    assert (np.abs(got.astype(np.float64) - exact) <= bound + rounding).all()


def test_a_switch_that_stalls_gets_one_probe_and_not_one_for_each_packet() -> None:
    """A switch or a worker that waits for a processor for 50 ms has lost nothing, so no integers come twice."""
    scene = Scene(2, 32, Faults(), 0)
    numbers = np.random.default_rng(0)
    parts = [numbers.normal(size=(400, WIDTH)).astype(np.float32) for _ in range(2)]
    held: list[tuple[Datagram, float]] = []
    answer = scene._at_switch

    def stalling(datagram: Datagram) -> None:
        if 0.006 <= scene.clock.now_s < 0.056:
            held.append((datagram, scene.clock.now_s))
            scene.clock.at(0.056, lambda: answer(held.pop(0)[0]))
        else:
            answer(datagram)

    scene._at_switch = stalling  # type: ignore[method-assign]
    for worker in range(2):
        scene.start(worker, parts[worker])
    scene.run()
    assert all(np.array_equal(client.sums, exact_sum(parts)) for client in scene.clients)
    assert [client.counters["resent"] for client in scene.clients] == [0, 0]
    assert [client.counters["probes"] for client in scene.clients] == [7, 7]

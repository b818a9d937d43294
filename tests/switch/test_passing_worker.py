"""Rules of PASSING on a virtual clock: equal integers at every worker, or a named error at each; never a hang."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.core.errors import InputError, PeerError
from isthmus.core.messages.datagram import Datagram
from isthmus.switch.fixed_point import FixedPoint, NonFiniteError, magnitude_bits
from isthmus.switch.passing_worker import (
    Actions,
    Begin,
    FromSwitch,
    FromWorker,
    Lost,
    PassingWorker,
    switch_of_part,
)
from isthmus.switch.slot_pool import SlotPool
from isthmus.switch.switch_client import StreamSettings, Timer
from tests.switch.virtual_switch import Faults, LossyNetwork, VirtualClock

KEY = b"k" * 32
WIDTH = 4
TIMEOUT_S = 30.0


class Scene:
    """`num` workers, `num_switches` switches, and messages between workers that arrive in any order of pairs."""

    def __init__(self, num: int, num_switches: int, faults: Faults, seed: int, slots: int = 4) -> None:
        self.clock, self.random = VirtualClock(), random.Random(seed)
        self.network = LossyNetwork(self.clock, faults, self.random)
        self.pools = [self.new_pool(place) for place in range(num_switches)]
        self.dead_switches: set[int] = set()
        self.dead: set[int] = set()
        self.due = 0
        self.workers = [
            PassingWorker(
                StreamSettings(job=7, run=100, stream=0, worker=one, workers=num, key=KEY, slots=slots,
                               part_integers=WIDTH),
                num_switches, TIMEOUT_S,
            )
            for one in range(num)
        ]  # fmt: skip

    def new_pool(self, incarnation: int) -> SlotPool:
        return SlotPool(16, 8, keys={7: KEY}, incarnation=incarnation, secret=b"s")

    def begin(self, worker: int, values: np.ndarray, delay_s: float = 0.0) -> None:
        def start() -> None:
            self.due -= 1
            self.feed(worker, Begin(values))

        self.due += 1
        self.clock.at(self.clock.now_s + delay_s, start)

    def feed(self, worker: int, event) -> None:
        if worker not in self.dead:
            self.act(worker, self.workers[worker].handle(event, self.clock.now_s))

    def act(self, worker: int, out: Actions) -> None:
        for place, data, size in out.packets:
            self.network.send(
                data, size, lambda data, size, at=place: self._at_switch(at, Datagram(("w", worker), data, size))
            )
        number = self.workers[worker].number
        for peer, phase, payload in out.messages:
            event = FromWorker(worker, number, phase, payload)
            delay_s = self.random.random() * 0.02
            self.clock.at(self.clock.now_s + delay_s, lambda peer=peer, event=event: self.feed(peer, event))
        self.clock.wake(worker, out.wake_s, lambda: self.feed(worker, Timer()))

    def _at_switch(self, place: int, datagram: Datagram) -> None:
        if place in self.dead_switches:
            return
        for one in self.pools[place].handle(datagram, self.clock.now_s):
            self.network.send(
                one.data, one.packet_bytes,
                lambda data, size, to=one.address[1]: self.feed(to, FromSwitch(place, data, size)),
            )  # fmt: skip

    def kill(self, worker: int) -> None:
        """A worker dies; the transport of each other one notices, at times of its own."""
        self.dead.add(worker)
        for peer in range(len(self.workers)):
            self.clock.at(
                self.clock.now_s + 1 + self.random.random(), lambda peer=peer: self.feed(peer, Lost(worker, "killed"))
            )

    def run(self) -> None:
        def is_over() -> bool:
            alive = [one for place, one in enumerate(self.workers) if place not in self.dead]
            return not self.due and not any(one.running for one in alive)

        self.clock.run(is_over, self.clock.now_s + 2 * TIMEOUT_S)


def exact(values: list[np.ndarray]) -> np.ndarray:
    """The integers of the sum, computed apart."""
    parts = [np.pad(one, (0, -len(one) % WIDTH)).reshape(-1, WIDTH) for one in values]
    point = FixedPoint(len(values))
    scales = point.scales(np.max([magnitude_bits(one) for one in parts], axis=0))
    return np.sum([point.to_integers(one, scales).astype(np.int64) for one in parts], axis=0)


def check_equal(scene: Scene, values: list[np.ndarray]) -> None:
    expected = exact(values)
    for place, worker in enumerate(scene.workers):
        if place in scene.dead:
            continue
        if worker.error is not None:
            assert scene.dead, worker.error
            assert isinstance(worker.error, PeerError)
            assert "is lost" in worker.error.message or "nothing from workers" in worker.error.message
        else:
            np.testing.assert_array_equal(worker.integers, expected)
            assert (
                worker.result.tobytes() == next(one.result for one in scene.workers if one.result is not None).tobytes()
            )


@settings(max_examples=80, deadline=None)
@given(
    num=st.integers(1, 4), num_switches=st.integers(0, 3), sizes=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    loss=st.sampled_from([0.0, 0.01, 0.2, 0.6]), doubled=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 2**32),
    switch_deaths=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 0.4), st.booleans()), max_size=3),
    worker_death=st.none() | st.tuples(st.integers(0, 3), st.floats(0, 0.4)),
)  # fmt: skip
@example(2, 1, [150], 0.0, 0.0, 1, [(0, 0.05, False)], None)
@example(2, 1, [150, 150], 0.0, 0.0, 1, [(0, 0.05, True)], None)
def test_equal_integers_or_a_named_error(num, num_switches, sizes, loss, doubled, seed, switch_deaths, worker_death):
    """Any loss, duplication and order, and any death or restart of switches or death of a worker inside a sum."""
    scene = Scene(num, num_switches, Faults(loss, doubled), seed)
    numbers = np.random.default_rng(seed)
    for place, when_s, restarts in switch_deaths:
        if place < num_switches:

            def strike(place=place, restarts=restarts) -> None:
                scene.pools[place] = scene.new_pool(99)
                if not restarts:
                    scene.dead_switches.add(place)

            scene.clock.at(when_s, strike)
    if worker_death is not None and num > 1 and worker_death[0] < num:
        scene.clock.at(worker_death[1], lambda: scene.kill(worker_death[0]))
    for size in sizes:
        values = [(numbers.normal(size=size) * 10.0 ** numbers.integers(-9, 9)).astype(np.float32) for _ in range(num)]
        for worker in range(num):
            if worker not in scene.dead:
                scene.begin(worker, values[worker], delay_s=float(numbers.random()) * 0.1)
        scene.run()
        check_equal(scene, values)
        if scene.dead or any(one.error for one in scene.workers):
            return


@pytest.mark.parametrize("when_s", [0.0, 0.011, 0.02])
def test_a_switch_that_dies_is_left_and_asked_again_later(when_s):
    """1. The switch dies within a sum. 2. The next sum does without it. 3. The one after uses it, as it is back."""
    scene = Scene(3, 1, Faults(delay_s=1e-3), seed=1)
    values = [np.full(200, 1.0 + one, np.float32) for one in range(3)]
    without_switch = []
    scene.clock.at(when_s, lambda: scene.dead_switches.add(0))
    for _ in range(3):
        for worker in range(3):
            scene.begin(worker, values[worker])
        scene.run()
        check_equal(scene, values)
        without_switch.append({worker.counters["parts_without_switch"] for worker in scene.workers})
        if scene.dead_switches:
            scene.dead_switches.clear()
            scene.pools[0] = scene.new_pool(77)
    assert [len(one) for one in without_switch] == [1, 1, 1]
    first, second, third = (one.pop() for one in without_switch)
    assert 0 < first <= 50
    assert third == second == first + 50
    assert {worker.counters["switch_failures"] for worker in scene.workers} == {1}


def test_one_worker_with_the_result_and_one_without_end_equal():
    """1. The switch sends the last results to worker 0 only and dies. 2. Worker 1 votes that it lacks them."""
    scene = Scene(2, 1, Faults(delay_s=1e-3), seed=1, slots=16)
    values = [np.linspace(-1, 1, 40, dtype=np.float32), np.linspace(5, 7, 40, dtype=np.float32)]
    deliver, seen = scene.feed, []

    def cut(worker: int, event) -> None:
        if worker == 1 and isinstance(event, FromSwitch):
            seen.append(event)
            if len(seen) > 5:  # challenge, welcome, scales of two batches, and one batch of sums
                scene.dead_switches.add(0)
                return
        deliver(worker, event)

    scene.feed = cut
    for worker in range(2):
        scene.begin(worker, values[worker])
    scene.run()
    check_equal(scene, values)
    lacked = [worker.counters["parts_without_switch"] for worker in scene.workers]
    assert lacked[0] == lacked[1] > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("num_switches", [0, 1, 2])
def test_non_finite_values_are_named_at_every_worker(bad, num_switches):
    """The error names the worker, with and without a switch."""
    scene = Scene(3, num_switches, Faults(delay_s=1e-3), seed=1)
    values = [np.ones(50, np.float32) for _ in range(3)]
    values[1][30] = bad
    for worker in range(3):
        scene.begin(worker, values[worker], delay_s=0.1 * worker)
    scene.run()
    for worker in scene.workers:
        assert isinstance(worker.error, NonFiniteError)
        assert worker.error.message == "values of worker 1 contain NaN or infinity"


def test_a_sum_beyond_float32_is_named():
    """Finite values whose sum is not finite fail every worker."""
    scene = Scene(2, 1, Faults(delay_s=1e-3), seed=1)
    for worker in range(2):
        scene.begin(worker, np.full(5, 3e38, np.float32))
    scene.run()
    assert {worker.error.message for worker in scene.workers} == {"the sum of the workers' values exceeds float32"}


def test_sizes_that_differ_are_named():
    """Ranks that disagree on the size fail, each naming the other, without waiting for the time-out."""
    scene = Scene(2, 1, Faults(delay_s=1e-3), seed=1)
    scene.begin(0, np.ones(5, np.float32))
    scene.begin(1, np.ones(9, np.float32))
    scene.run()
    assert scene.clock.now_s < 5
    assert [type(worker.error) for worker in scene.workers] == [InputError, InputError]
    assert scene.workers[0].error.message == "worker 1 sums 9 values, worker 0 5"


def test_a_worker_that_never_calls_is_named_within_the_time_out():
    """The others fail with its number."""
    scene = Scene(3, 1, Faults(delay_s=1e-3), seed=1)
    for worker in (0, 1):
        scene.begin(worker, np.ones(5, np.float32))
    scene.run()
    assert scene.clock.now_s <= TIMEOUT_S + 1
    for worker in scene.workers[:2]:
        assert worker.error.message == f"nothing from workers [2] within {TIMEOUT_S:g} s"


def test_parts_spread_evenly():
    """The hash gives each switch its share of the parts, within 5 %."""
    for num in (2, 3, 7):
        shares = np.bincount(switch_of_part(10_000, num), minlength=num) / (10_000 / num)
        assert abs(shares - 1).max() < 0.05

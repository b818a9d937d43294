"""Rules that tie schedules, their closed forms and their runs together."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError, PlanError
from isthmus.core.plan import StageTime
from isthmus.schedule import SCHEDULES, check_schedule, interleaved, make_schedule, overlapped, warm_up_counts
from isthmus.sim import SimulatedLink, run_pipeline
from isthmus.sim.pipeline.run_pipeline import operation_durations
from isthmus.sim.pipeline.schedule_bounds import critical_path_s, serial_sum_s
from isthmus.sim.pipeline.warm_up import best_warm_up
from tests.sim.bubbles import (
    dualpipe_bubble_s,
    interleaved_bubble_s,
    mixed_chips_bubble_s,
    one_f_one_b_bubble_s,
    zero_bubble_s,
)

pytestmark = pytest.mark.integration

seconds = st.floats(0.001, 0.1)
names = st.sampled_from(sorted(SCHEDULES))
transports = st.sampled_from(["buffered", "rendezvous"])
MESSAGE_BYTES = 1e5


@st.composite
def cases(draw, name=None):
    """A schedule by name with stage times and a wire of its own for every direction between stages."""
    chosen = name or draw(names)
    num_stages = 2 * draw(st.integers(1, 2)) if chosen == "dualpipe" else draw(st.integers(1, 5))
    least = 2 * num_stages if chosen == "dualpipe" else 1
    micro_batches = least + 2 * draw(st.integers(0, 4))
    times = [StageTime(forward_s=draw(seconds), backward_s=draw(seconds)) for _ in range(num_stages)]
    wires = {
        (a, b): SimulatedLink(name=f"{a}{b}", bytes_per_s=draw(st.floats(1e6, 1e9)), delay_s=draw(st.floats(0, 0.05)))
        for a in range(num_stages)
        for b in range(num_stages)
        if a != b
    }
    return make_schedule(chosen, num_stages, micro_batches), times, wires


def hop(wires):
    def seconds_of(a, b):
        return 0.0 if a == b else wires[a, b].delay_s + MESSAGE_BYTES / wires[a, b].bytes_per_s

    return seconds_of


@given(cases(), transports)
def test_a_run_lies_between_its_critical_path_and_everything_in_a_row(case, transport):
    """Every schedule, both transports, wires of their own: critical path <= simulated <= serial sum."""
    schedule, times, wires = case
    run = run_pipeline(schedule, times, wires, MESSAGE_BYTES, transport=transport)
    duration_s = operation_durations(schedule, times)
    assert run.step_s >= critical_path_s(schedule, duration_s, hop(wires)) - 1e-9
    assert run.step_s <= serial_sum_s(schedule, duration_s, hop(wires)) + 1e-9


@given(cases(), st.sampled_from(["fifo", "fair"]), transports)
def test_the_bounds_hold_on_shared_wires_too(case, sharing, transport):
    """All boundaries over one wire, shared either way: still between the two bounds."""
    schedule, times, wires = case
    one = SimulatedLink(name="one", bytes_per_s=1e7, delay_s=0.01)
    shared = dict.fromkeys(wires, one)
    run = run_pipeline(schedule, times, shared, MESSAGE_BYTES, sharing=sharing, transport=transport)
    duration_s = operation_durations(schedule, times)
    assert run.step_s >= critical_path_s(schedule, duration_s, hop(shared)) - 1e-9
    assert run.step_s <= serial_sum_s(schedule, duration_s, hop(shared)) + 1e-9


@given(cases(), transports, st.randoms(use_true_random=False))
def test_faster_is_never_slower(case, transport, draw):
    """More bandwidth, less delay or faster chips anywhere never lengthen a step.

    This holds where every direction between two stages has a wire of its own: then each stage and each wire
    serves in an order fixed by the schedule, and every time is a sum and maximum of others.
    """
    schedule, times, wires = case
    slow = run_pipeline(schedule, times, wires, MESSAGE_BYTES, transport=transport)
    faster = [StageTime(forward_s=t.forward_s * draw.random(), backward_s=t.backward_s * draw.random()) for t in times]
    wider = {
        ends: replace(w, bytes_per_s=w.bytes_per_s * (1 + draw.random()), delay_s=w.delay_s * draw.random())
        for ends, w in wires.items()
    }
    for t, w in ((faster, wires), (times, wider), (faster, wider)):
        assert run_pipeline(schedule, t, w, MESSAGE_BYTES, transport=transport).step_s <= slow.step_s + 1e-9


def test_on_a_shared_wire_a_faster_chip_can_slow_the_step():
    """Why the rule above asks for wires of their own: on a shared one, being early can be in the way.

    1. Stages 1 and 2 send over one wire. Their messages meet there.
    2. With stage 1 faster, its message comes first, and the one that the step waits for queues behind it.
    """
    found = []
    draw = random.Random(3)
    for _ in range(400):
        times = [StageTime(forward_s=draw.random(), backward_s=draw.random()) for _ in range(4)]
        one = dict.fromkeys([(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)],
                            SimulatedLink(name="one", bytes_per_s=1.0, delay_s=0.0))  # fmt: skip
        faster = [replace_speed(times[0], 0.8), *times[1:]]
        schedule = make_schedule("1f1b", 4, 3)
        slow, fast = (run_pipeline(schedule, t, one, 0.3).step_s for t in (times, faster))
        found.append(fast - slow)
    assert max(found) > 1e-6


def replace_speed(time, factor):
    return StageTime(forward_s=time.forward_s * factor, backward_s=time.backward_s * factor)


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=5), st.integers(1, 12), st.floats(0, 0.1))
def test_deeper_buffers_never_slow_a_step(pairs, micro_batches, delay_s):
    """Memory: posting more receives ahead (rendezvous) never lengthens an overlapped step."""
    times = [StageTime(forward_s=f, backward_s=b) for f, b in pairs]
    wires = {
        (a, b): SimulatedLink(name=f"{a}{b}", bytes_per_s=1e8, delay_s=delay_s)
        for a in range(len(times))
        for b in (a - 1, a + 1)
    }
    steps = [
        run_pipeline(
            overlapped(len(times), micro_batches, receive_ahead=ahead),
            times,
            wires,
            MESSAGE_BYTES,
            transport="rendezvous",
        ).step_s
        for ahead in range(4)
    ]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(steps))


@given(cases(), st.randoms(use_true_random=False), transports)
def test_what_the_checker_accepts_runs_and_what_it_calls_a_deadlock_does_not(case, draw, transport):
    """Random moves of operations: accepted schedules end; those with a deadlock do so under rendezvous."""
    schedule, times, wires = case
    stages = [list(operations) for operations in schedule.stages]
    for _ in range(draw.randrange(4)):
        operations = stages[draw.randrange(len(stages))]
        operations.insert(draw.randrange(len(operations)), operations.pop(draw.randrange(len(operations))))
    moved = replace(schedule, stages=tuple(map(tuple, stages)))
    try:
        check_schedule(moved)
    except PlanError as error:
        if "deadlock" in str(error):
            with pytest.raises(RuntimeError, match="deadlocks"):
                run_pipeline(moved, times, wires, MESSAGE_BYTES, transport="rendezvous")
        return
    run = run_pipeline(moved, times, wires, MESSAGE_BYTES, transport=transport)
    assert run.step_s > 0


def excess_s(schedule, forward_s, backward_s, weight_s=0.0):
    """Return by how much a step on equal stages and free wires exceeds one stage's computing."""
    times = [StageTime(forward_s=forward_s, backward_s=backward_s)] * schedule.num_stages
    share = [weight_s / backward_s] * schedule.num_stages
    path_s = critical_path_s(schedule, operation_durations(schedule, times, share), lambda a, b: 0.0)
    return path_s - schedule.num_micro_batches * (forward_s + backward_s)


@given(st.integers(1, 6), st.integers(1, 12), seconds, seconds, st.sampled_from(["1f1b", "gpipe", "overlapped"]))
def test_the_bubble_of_1f1b_gpipe_and_overlapped(num_stages, micro_batches, forward_s, backward_s, name):
    """(S - 1) (F + B), for any number of micro-batches."""
    schedule = make_schedule(name, num_stages, micro_batches)
    expected_s = one_f_one_b_bubble_s(num_stages, forward_s, backward_s)
    assert excess_s(schedule, forward_s, backward_s) == pytest.approx(expected_s, abs=1e-9)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), seconds, seconds)
def test_the_bubble_of_interleaved(num_stages, groups, num_chunks, forward_s, backward_s):
    """(S - 1) (F + B) / v, for whole groups of micro-batches."""
    schedule = interleaved(num_stages, groups * num_stages, num_chunks)
    expected_s = interleaved_bubble_s(num_stages, num_chunks, forward_s, backward_s)
    assert excess_s(schedule, forward_s, backward_s) == pytest.approx(expected_s, abs=1e-9)


@given(st.integers(1, 6), st.integers(0, 6), st.floats(1, 2), st.floats(1, 2), st.floats(0.5, 1))
def test_the_bubble_of_zero_bubble(num_stages, more, forward_s, input_s, weight_s):
    """(S - 1) (F + B - 2 W), where W is the shortest of the three parts."""
    schedule = make_schedule("zero_bubble", num_stages, 2 * num_stages + more)
    expected_s = zero_bubble_s(num_stages, forward_s, input_s + weight_s, weight_s)
    assert excess_s(schedule, forward_s, input_s + weight_s, weight_s) == pytest.approx(expected_s, abs=1e-9)


@given(st.integers(1, 4), st.integers(0, 3), st.floats(0.1, 1), st.floats(1, 2), st.floats(0, 1))
def test_the_bubble_of_dualpipe(half, more, weight_s, input_s, between):
    """(S / 2 - 1) (F + B - 2 W), where W <= B - W <= F <= B."""
    num_stages, backward_s, forward_s = 2 * half, input_s + weight_s, input_s + between * weight_s
    schedule = make_schedule("dualpipe", num_stages, 2 * num_stages + 2 * more)
    expected_s = dualpipe_bubble_s(num_stages, forward_s, backward_s, weight_s)
    assert excess_s(schedule, forward_s, backward_s, weight_s) == pytest.approx(expected_s, abs=1e-9)


@given(st.integers(1, 4), st.floats(0, 1), st.floats(1, 3), st.floats(0.1, 1))
def test_dualpipe_is_within_its_published_bubble(half, between, input_s, weight_s):
    """Never more than (S / 2 - 1) (F&B + B - 3 W) with F&B = F + B, where W <= B - W and W <= F <= B."""
    backward_s = input_s + weight_s
    forward_s = weight_s + between * input_s
    schedule = make_schedule("dualpipe", 2 * half, 4 * half)
    published_s = (half - 1) * (forward_s + 2 * backward_s - 3 * weight_s)
    assert excess_s(schedule, forward_s, backward_s, weight_s) <= published_s + 1e-9


def test_closed_forms_know_their_limits():
    """A weight gradient longer than the rest, or a slower chip called the faster one, is refused."""
    with pytest.raises(InputError):
        zero_bubble_s(4, 1.0, 2.0, 1.5)
    with pytest.raises(InputError):
        mixed_chips_bubble_s(1.0, 0.5, 2.0)
    with pytest.raises(InputError):
        dualpipe_bubble_s(4, 3.0, 2.0, 0.5)


@given(st.floats(0.01, 1), st.floats(1, 4), st.floats(0.5, 3), st.integers(2, 4))
def test_equation_1_a_fast_chip_waits_for_a_slow_one(forward_s, ratio, backward_ratio, num_stages):
    """Steady 1F1B: every further micro-batch costs the fast stages T_d (K - 1) (N + 1) of waiting."""
    fast = StageTime(forward_s=forward_s, backward_s=forward_s * backward_ratio)
    slow = replace_speed(fast, ratio)
    half = num_stages // 2
    times = [fast] * half + [slow] * (num_stages - half)
    few, many = (run_pipeline(make_schedule("1f1b", num_stages, m), times, {}, 0.0) for m in (12, 13))
    expected_s = mixed_chips_bubble_s(forward_s, ratio, backward_ratio)
    for stage in range(half):
        idle_s = [run.step_s - run.busy_s[stage] for run in (few, many)]
        assert idle_s[1] - idle_s[0] == pytest.approx(expected_s, abs=1e-9)


def test_equation_1_has_the_papers_example():
    """Twice the speed, backward twice the forward: three forwards; equal chips: none."""
    assert mixed_chips_bubble_s(0.5, 2.0, 2.0) == 1.5
    assert mixed_chips_bubble_s(0.5, 1.0, 2.0) == 0.0


@given(st.integers(2, 5), st.integers(8, 30), st.floats(0, 0.2))
def test_overlapped_pays_for_delay_once(num_stages, micro_batches, delay_s):
    """With the derived warm-up on equal stages, delay costs one round trip per iteration, whatever M."""
    times = [StageTime(forward_s=0.01, backward_s=0.02)] * num_stages
    wires = {
        (a, b): SimulatedLink(name=f"{a}{b}", bytes_per_s=1e9, delay_s=delay_s)
        for a in range(num_stages)
        for b in (a - 1, a + 1)
    }
    warm_up = warm_up_counts([0.03] * num_stages, [delay_s] * (num_stages - 1), micro_batches)
    hidden = run_pipeline(overlapped(num_stages, micro_batches, warm_up), times, wires, 0.0).step_s
    blocking = run_pipeline(make_schedule("1f1b", num_stages, micro_batches), times, wires, 0.0).step_s
    ideal_s = (micro_batches + num_stages - 1) * 0.03 + 2 * (num_stages - 1) * delay_s
    assert hidden == pytest.approx(ideal_s, abs=1e-9)
    assert hidden <= blocking + 1e-9


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4), st.integers(1, 10), st.floats(0, 0.2))
def test_more_memory_never_slows_the_best_warm_up(pairs, micro_batches, delay_s):
    """The best overlapped schedule within memory is never slower where more micro-batches fit."""
    times = [StageTime(forward_s=f, backward_s=b) for f, b in pairs]
    wires = {
        (a, b): SimulatedLink(name=f"{a}{b}", bytes_per_s=1e8, delay_s=delay_s)
        for a in range(len(times))
        for b in (a - 1, a + 1)
    }
    found = [
        best_warm_up(times, wires, MESSAGE_BYTES, micro_batches, [limit] * len(times)) for limit in (1, 2, 4, 7, 12)
    ]
    assert all(later[1] <= earlier[1] + 1e-9 for earlier, later in itertools.pairwise(found))
    for limit, (warm_up, _) in zip((1, 2, 4, 7, 12), found, strict=True):
        assert max(check_schedule(overlapped(len(times), micro_batches, warm_up))) <= limit
    with pytest.raises(PlanError):
        best_warm_up(times, wires, MESSAGE_BYTES, micro_batches, [0] * len(times))

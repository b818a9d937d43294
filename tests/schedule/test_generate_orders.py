"""Rules of schedules that overlap their exchanges, of chunks and routes, and of backwards cut in two."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.schedule import (
    SCHEDULES,
    Operation,
    OperationKind,
    Schedule,
    add_communication,
    check_schedule,
    dualpipe,
    forward_only,
    interleaved,
    make_schedule,
    overlapped,
    peak_receive_buffers,
    warm_up_counts,
    zero_bubble,
)
from isthmus.schedule.operation import StageChunk

stages = st.integers(1, 6)
micro_batches = st.integers(1, 14)
seconds = st.floats(0.001, 1)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(0, 4))
def test_every_name_makes_a_schedule_that_passes(name: str, half_stages: int, more: int) -> None:
    """Whatever `make_schedule` makes, `check_schedule` accepts (sizes that every schedule admits)."""
    num_stages = 2 * half_stages
    schedule = make_schedule(name, num_stages, 2 * num_stages + 2 * more)
    assert len(check_schedule(schedule)) == num_stages
    assert schedule.name == name


@given(stages, micro_batches, st.integers(1, 4), st.integers(0, 3))
def test_interleaved_takes_any_number_of_micro_batches(
    num_stages: int, num_micro_batches: int, num_chunks: int, receive_ahead: int
) -> None:
    """Also what does not fill a group of stages; the first stage's warm-up bounds what is in flight."""
    schedule = interleaved(num_stages, num_micro_batches, num_chunks, receive_ahead)
    first = min(num_micro_batches, num_stages + num_micro_batches % num_stages)
    warm_up = 2 * (num_stages - 1) + (num_chunks - 1) * first
    assert max(check_schedule(schedule)) <= warm_up + 1


@given(stages, micro_batches, st.lists(st.integers(0, 12), min_size=6, max_size=6), st.integers(0, 3))
def test_overlapped_takes_any_falling_warm_up(
    num_stages: int, num_micro_batches: int, counts: list[int], receive_ahead: int
) -> None:
    """Any falling warm-up passes, and a stage keeps its warm-up and one more in flight."""
    warm_up = sorted(counts, reverse=True)[:num_stages]
    peaks = check_schedule(overlapped(num_stages, num_micro_batches, warm_up, receive_ahead))
    assert peaks == tuple(min(count + 1, num_micro_batches) for count in warm_up)


@given(stages, micro_batches)
def test_zero_bubble_keeps_no_more_than_1f1bs_first_stage(num_stages: int, num_micro_batches: int) -> None:
    """ZB-H1: what a stage saves in activations it spends on weight gradients put off, up to 1F1B's peak."""
    peaks = check_schedule(zero_bubble(num_stages, num_micro_batches))
    assert peaks == (min(num_stages, num_micro_batches),) * num_stages


@given(st.integers(1, 4), st.integers(0, 5))
def test_dualpipe_keeps_one_more_than_there_are_stages(half_stages: int, more: int) -> None:
    """DualPipe: every stage keeps num_stages + 1 micro-batches at its fullest."""
    num_stages = 2 * half_stages
    peaks = check_schedule(dualpipe(num_stages, 2 * num_stages + 2 * more))
    assert peaks == (num_stages + 1,) * num_stages


@given(st.integers(1, 4), st.integers(0, 5))
def test_dualpipe_is_its_own_mirror_image(half_stages: int, more: int) -> None:
    """A stage computes what the stage as far from the other end does, with the directions exchanged."""
    num_stages = 2 * half_stages
    schedule = dualpipe(num_stages, 2 * num_stages + 2 * more)
    computes = ("forward", "backward", "backward_input", "backward_weight")
    orders = [[one for one in stage if one.kind in computes] for stage in schedule.stages]
    mirrored = [[Operation(one.kind, one.micro_batch ^ 1, 1 - one.chunk) for one in stage] for stage in orders]
    assert mirrored[::-1] == orders


@given(stages, micro_batches, st.lists(st.integers(0, 12), min_size=6, max_size=6), st.integers(1, 4))
def test_a_name_takes_the_arguments_of_its_schedule(
    num_stages: int, num_micro_batches: int, counts: list[int], num_chunks: int
) -> None:
    """`make_schedule` passes counts, warm-up and chunks on as they are."""
    warm_up = sorted(counts, reverse=True)[:num_stages]
    made = make_schedule("overlapped", num_stages, num_micro_batches, warm_up=warm_up)
    assert made == overlapped(num_stages, num_micro_batches, warm_up)
    made = make_schedule("interleaved", num_stages, num_micro_batches, num_chunks=num_chunks)
    assert made == interleaved(num_stages, num_micro_batches, num_chunks)


@given(st.sampled_from(["dualpipe", "interleaved", "overlapped", "zero_bubble"]), st.integers(1, 3))
def test_receive_buffers_are_bounded(name: str, receive_ahead: int) -> None:
    """At most 1 + receive_ahead receives per kind and chunk's peer are posted and not yet waited for."""
    schedule = SCHEDULES[name](4, 8, receive_ahead=receive_ahead)  # type: ignore[call-arg]
    for stage, operations in enumerate(schedule.stages):
        held: Counter[int] = Counter()
        for one in operations:
            if one.kind.startswith("receive_"):
                held[schedule.peer_stage(stage, one)] += 1
            elif one.kind.startswith("wait_receive_"):
                held[schedule.peer_stage(stage, one)] -= 1
            assert max(held.values(), default=0) <= 1 + receive_ahead + (name in ("dualpipe", "interleaved"))


@given(st.sampled_from([interleaved, overlapped, zero_bubble]), stages, micro_batches, st.integers(0, 3))
def test_receive_buffers_follow_what_is_in_flight(
    make: Callable[..., Schedule], num_stages: int, num_micro_batches: int, receive_ahead: int
) -> None:
    """A stage holds one received tensor more than it has micro-batches in flight, and those it asked ahead.

    Where weights are put off the gradients of the micro-batches that wait for them are held as well.
    """
    schedule = make(num_stages, num_micro_batches, receive_ahead=receive_ahead)
    held = peak_receive_buffers(schedule)
    for stage, (peak, most) in enumerate(zip(check_schedule(schedule), held, strict=True)):
        sources = {
            schedule.peer_stage(stage, one)
            for one in schedule.stages[stage]
            if one.kind in ("receive_forward", "receive_backward")
        }
        assert most <= peak * (1 + (make is zero_bubble)) + 1 + len(sources) * receive_ahead


def test_receive_buffers_of_a_blocking_pipeline() -> None:
    """1F1B: the last stage holds what it works on, one before it every input in flight and a gradient."""
    assert peak_receive_buffers(make_schedule("1f1b", 4, 8)) == (1, 4, 3, 1)
    assert peak_receive_buffers(forward_only(3, 5)) == (0, 1, 1)


@given(st.integers(2, 5), st.integers(2, 10), st.integers(0, 3))
def test_the_next_inputs_are_awaited_before_computing_on_this_one(
    num_stages: int, num_micro_batches: int, receive_ahead: int
) -> None:
    """Before a stage computes on an input, exactly the next receive_ahead receives of its kind are posted."""
    schedule = overlapped(num_stages, num_micro_batches, receive_ahead=receive_ahead)
    for stage, operations in enumerate(schedule.stages):
        for way, first in (("forward", 0), ("backward", num_stages - 1)):
            posted = 0
            for one in operations:
                posted += one.kind == f"receive_{way}"
                if one.kind == way and stage != first:
                    assert posted == min(one.micro_batch + 1 + receive_ahead, num_micro_batches)


@given(st.integers(2, 5), st.integers(1, 10))
def test_no_computation_waits_for_a_send(num_stages: int, num_micro_batches: int) -> None:
    """A wait for a send never comes before a message that proves it needless, except at the very end."""
    for operations in overlapped(num_stages, num_micro_batches).stages:
        waits = [i for i, one in enumerate(operations) if one.kind.startswith("wait_send")]
        last = max(i for i, one in enumerate(operations) if one.kind == "backward")
        for i in waits:
            before = next(one for one in reversed(operations[:i]) if not one.kind.startswith("wait_send"))
            assert i > last or before.kind.startswith("wait_receive")


def test_the_report_read_to_the_letter_waits_for_ever() -> None:
    """Starting the send of a forward only after the gradient came (4.2.1, steady phase) can deadlock.

    1. Stage 0 warms up with one forward more than stage 1.
    2. Stage 0 holds forward N + 1 back until backward M has arrived.
    3. Stage 1 holds backward M back until forward N + 1 has arrived.
    """
    first = _letter([("forward", 0), ("forward", 1)], is_first=True)
    last = _letter([("forward", 0)], is_first=False)
    with pytest.raises(PlanError, match="deadlock"):
        check_schedule(Schedule("letter", 3, (first, last)))


def _letter(warm_up: list[tuple[OperationKind, int]], is_first: bool) -> tuple[Operation, ...]:
    """Write one end of a pipeline of two stages and three micro-batches as section 4.2.1 says."""
    n, m, total = len(warm_up) - 1, 0, 3
    made = []

    def do(*kinds: tuple[str, int]) -> None:
        for kind, number in kinds:
            spared = ("receive_forward", "send_backward") if is_first else ("send_forward", "receive_backward")
            if kind.removeprefix("wait_") not in spared and 0 <= number < total:
                made.append(Operation(kind, number))  # type: ignore[arg-type]

    do(("receive_forward", 0), ("wait_receive_forward", 0))
    for i in range(len(warm_up)):
        do(("receive_forward", i + 1), ("forward", i), ("send_forward", i))
        do(("receive_backward", 0)) if i == n else do(("wait_receive_forward", i + 1))
    for i in range(total - len(warm_up)):
        do(("wait_receive_forward", n + 1))
        n += 1
        do(("receive_forward", n + 1)) if n + 1 < total else None
        do(("send_backward", m - 1)) if i else None
        do(("forward", n), ("wait_receive_backward", m), ("send_forward", n), ("receive_backward", m + 1))
        do(("backward", m))
        m += 1
    do(("send_backward", m - 1))
    for rest in range(m, total):
        do(("wait_receive_backward", rest), ("receive_backward", rest + 1), ("backward", rest))
        do(("send_backward", rest))
    do(*((f"wait_send_{way}", i) for way in ("forward", "backward") for i in range(total)), ("update", 0))
    return tuple(made)


@given(st.lists(seconds, min_size=1, max_size=6), st.floats(0, 3), micro_batches, st.integers(1, 20))
def test_warm_up_counts_fall_and_fit(pass_s: list[float], hop_s: float, num_micro_batches: int, limit: int) -> None:
    """Counts never rise along the pipeline, never exceed memory, and never shrink as hops grow longer."""
    count = len(pass_s)
    near = warm_up_counts(pass_s, [0.0] * (count - 1), num_micro_batches)
    far = warm_up_counts(pass_s, [hop_s] * (count - 1), num_micro_batches)
    tight = warm_up_counts(pass_s, [hop_s] * (count - 1), num_micro_batches, [limit] * count)
    assert all(a >= b for a, b in itertools.pairwise(far))
    assert all(a >= b for a, b in zip(far, near, strict=True))
    assert all(t <= f for t, f in zip(tight, far, strict=True))
    assert all(min(t + 1, num_micro_batches) <= limit for t in tight)


def test_warm_up_counts_of_equal_stages_are_those_of_1f1b() -> None:
    """Without delay: num_stages - s - 1. With half a pass each way and hop: twice that."""
    assert warm_up_counts([3.0] * 4, [0.0] * 3, 99) == (3, 2, 1, 0)
    assert warm_up_counts([3.0] * 4, [1.5] * 3, 99) == (6, 4, 2, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: overlapped(2, 4, [0, 1]),
        lambda: overlapped(2, 4, [1]),
        lambda: overlapped(2, 4, [1, -1]),
        lambda: dualpipe(3, 6),
        lambda: dualpipe(4, 6),
        lambda: interleaved(2, 4, 0),
        lambda: warm_up_counts([1.0, 1.0], [], 4),
        lambda: warm_up_counts([1.0], [], 4, [0]),
        lambda: zero_bubble(0, 1),
        lambda: overlapped(2, 2, receive_ahead=-1),
    ],
)
def test_what_cannot_be_made_is_a_plan_error(make) -> None:
    """Sizes that a schedule does not admit are answered with a `PlanError`."""
    with pytest.raises(PlanError):
        make()


def test_a_backward_is_cut_whole_or_not_at_all() -> None:
    """Half a backward, both forms of one, or weights before inputs are refused."""
    schedule = zero_bubble(2, 2)
    whole, half = Operation("backward", 0), Operation("backward_weight", 0)
    operations = schedule.stages[0]
    for wrong, why in (
        (tuple(one for one in operations if one != half), "is missing"),
        ((*operations[:-1], whole, operations[-1]), "is unexpected"),
        ((half, *(one for one in operations if one != half)), "comes before"),
        ((*(one for one in operations if one != half), half), "after the update"),
    ):
        with pytest.raises(PlanError, match=why):
            check_schedule(replace(schedule, stages=(wrong, schedule.stages[1])))


def test_routes_say_who_meets_whom() -> None:
    """Two routes in opposite directions: micro-batch 0 goes down, micro-batch 1 up."""
    schedule = dualpipe(2, 4)
    down, up = Operation("send_forward", 0, 0), Operation("send_forward", 1, 1)
    assert (schedule.peer_stage(0, down), schedule.peer_stage(1, up)) == (1, 0)
    assert schedule.virtual_stage(1, Operation("forward", 1, 1)) == 0
    with pytest.raises(ValueError, match="no peer"):
        schedule.peer_stage(1, down)
    stray = (*schedule.stages[0], Operation("forward", 0, 1))
    with pytest.raises(PlanError, match="is unexpected"):
        check_schedule(replace(schedule, stages=(stray, schedule.stages[1])))


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        ((((0, 0), (1, 0)), ((1, 0), (0, 0))), "route 1: chunk 0 of stage 1 holds virtual stages 1 and 0"),
        ((((0, 0), (1, 0), (0, 0)),), "route 0: chunk 0 of stage 0 holds virtual stages 0 and 2"),
        ((((0, 0), (1, 0)), ((1, 1),)), "route 1: 1 virtual stages, route 0 has 2"),
        ((((0, 0), (2, 0)),), "stage 2 has no chunk 0"),
        ((((0, 0), (1, 2)),), "stage 1 has no chunk 2"),
    ],
)
def test_a_piece_of_the_model_has_one_place(routes: tuple[tuple[StageChunk, ...], ...], why: str) -> None:
    """Routes that no cut of a model can serve are refused, before anything else of them is looked at."""
    with pytest.raises(PlanError, match=why):
        check_schedule(Schedule("odd", 2, ((), ()), 2, routes=routes))


def test_any_computing_order_can_be_laid_out() -> None:
    """A zig-zag of two chunks (last stage of chunk 0 is the first of chunk 1) is a route like any other."""
    route = ((0, 0), (1, 0), (1, 1), (0, 1))
    orders = tuple(
        (
            *(Operation("forward", 0, chunk) for chunk in (0, 1)),
            *(Operation("backward", 0, chunk) for chunk in (1, 0)),
        )
        for _ in range(2)
    )
    assert check_schedule(add_communication(Schedule("v", 1, orders, 2, routes=(route,)))) == (2, 2)

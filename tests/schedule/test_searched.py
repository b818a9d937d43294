"""Rules of the search for a schedule: valid, within memory, never slower than named schedules, exact where small."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.core.plan import StageTime
from isthmus.schedule import (
    Hop,
    PipelineCosts,
    Schedule,
    StageCosts,
    check_schedule,
    interleaved,
    make_schedule,
    one_f_one_b,
    overlapped,
    schedule_of_text,
    search_schedule,
    text_of_schedule,
    zero_bubble,
)
from isthmus.schedule.searched.compute_orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Step,
    time_orders,
)
from isthmus.sim import SimulatedLink, run_pipeline

seconds = st.sampled_from([0.3, 0.5, 0.8, 1.0, 1.3, 2.0])
delays = st.sampled_from([0.0, 0.5, 1.0, 4.0, 10.0])
either = st.booleans()
transfers = st.sampled_from([0.0, 0.2, 0.9])


@st.composite
def pipelines(
    draw: st.DrawFn, max_stages: int = 4, split: st.SearchStrategy[bool] = either, max_more: int = 2
) -> PipelineCosts:
    """Pipelines with unlike stages, links, memory, and stages that cannot split their backward."""
    count = draw(st.integers(1, max_stages))
    stages = tuple(
        StageCosts(
            forward_s=draw(seconds),
            backward_input_s=draw(seconds),
            backward_weight_s=draw(seconds),
            max_in_flight=count - s + draw(st.integers(0, max_more)),
            splits_backward=draw(split),
            tail_s=draw(st.sampled_from([0.0, 0.7])),
        )
        for s in range(count)
    )
    ends = [(s, s + 1) for s in range(count - 1)] + [(s + 1, s) for s in range(count - 1)]
    return PipelineCosts(
        stages=stages, hops={pair: Hop(delay_s=draw(delays), transfer_s=draw(transfers)) for pair in ends}
    )


def simulated_s(schedule: Schedule, costs: PipelineCosts) -> float:
    """Return the seconds of a step in the simulator, for stages whose backward halves take equal times."""
    times = [
        StageTime(forward_s=x.forward_s, backward_s=x.backward_input_s + x.backward_weight_s) for x in costs.stages
    ]
    links = {
        (a, b): SimulatedLink(
            name=f"{a}>{b}", bytes_per_s=1 / hop.transfer_s if hop.transfer_s else 1e18, delay_s=hop.delay_s
        )
        for (a, b), hop in costs.hops.items()
    }
    finish_s = run_pipeline(schedule, times, links, 1.0).finish_s
    return max(end_s + one.tail_s for end_s, one in zip(finish_s, costs.stages, strict=True))


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 9), st.integers(1, 3))
def test_a_searched_schedule_is_valid_and_within_memory(costs: PipelineCosts, micro_batches: int, chunks: int) -> None:
    """The checker accepts it, no stage exceeds its memory, no joined stage splits, and it is not below the bound."""
    found = search_schedule(costs, micro_batches, chunks, max_states=20)
    peaks = check_schedule(found.schedule)
    assert all(peak <= one.max_in_flight * chunks for peak, one in zip(peaks, costs.stages, strict=True))
    for stage, operations in zip(costs.stages, found.schedule.stages, strict=True):
        assert stage.splits_backward or not any(one.kind == "backward_weight" for one in operations)
    assert found.bound_s <= found.step_s
    assert found.step_s == pytest.approx(time_orders(found.orders, costs, chunks))


def named(costs: PipelineCosts, micro_batches: int, chunks: int) -> Iterator[Schedule]:
    """Yield named schedules, deep warm-ups included, that keep within the memory."""
    count = costs.num_stages
    made = [one_f_one_b(count, micro_batches), zero_bubble(count, micro_batches), overlapped(count, micro_batches)]
    made += [overlapped(count, micro_batches, [k * (count - s - 1) for s in range(count)]) for k in (1, 2, 3)]
    for schedule in [interleaved(count, micro_batches, chunks)] if chunks > 1 else made:
        peaks = check_schedule(schedule)
        if all(peak <= one.max_in_flight * chunks for peak, one in zip(peaks, costs.stages, strict=True)):
            yield schedule


@settings(max_examples=40, deadline=None)
@given(pipelines(split=st.just(True), max_more=6), st.integers(1, 10), st.integers(1, 2))
def test_no_named_schedule_within_the_memory_is_faster(costs: PipelineCosts, micro_batches: int, chunks: int) -> None:
    """In the simulator, against 1F1B, deep warm-ups, zero-bubble, and interleaved with as many chunks."""
    even = PipelineCosts(
        stages=tuple(
            StageCosts(
                forward_s=x.forward_s, backward_input_s=x.backward_input_s, backward_weight_s=x.backward_input_s,
                max_in_flight=x.max_in_flight, tail_s=x.tail_s,
            )
            for x in costs.stages
        ),
        hops=costs.hops,
    )  # fmt: skip
    found = search_schedule(even, micro_batches, chunks, max_states=50)
    assert simulated_s(found.schedule, even) <= found.step_s * (1 + 1e-9)
    for schedule in named(even, micro_batches, chunks):
        assert found.step_s <= simulated_s(schedule, even) * (1 + 1e-9), schedule.name


def all_orders(costs: PipelineCosts, micro_batches: int) -> Iterator[tuple[tuple[Step, ...], ...]]:
    """Yield every order of every stage within the memory, as a solver without any rule would try."""

    def of_stage(done: tuple[int, int, int], room: int, joined: bool) -> Iterator[tuple[Step, ...]]:
        forwards, inputs, weights = done
        if weights == micro_batches:
            yield ()
        if forwards < micro_batches and forwards - weights < room:
            for rest in of_stage((forwards + 1, inputs, weights), room, joined):
                yield ((FORWARD, 0), *rest)
        if inputs < forwards:
            step = (BACKWARD if joined else BACKWARD_INPUT), 0
            for rest in of_stage((forwards, inputs + 1, weights + joined), room, joined):
                yield (step, *rest)
        if weights < inputs:
            for rest in of_stage((forwards, inputs, weights + 1), room, joined):
                yield ((BACKWARD_WEIGHT, 0), *rest)

    stages = [list(of_stage((0, 0, 0), one.max_in_flight, not one.splits_backward)) for one in costs.stages]
    yield from itertools.product(*stages)


def exhaustive_s(costs: PipelineCosts, micro_batches: int) -> float:
    """Return the least seconds of all orders; orders that wait for each other never end."""
    best_s = float("inf")
    for orders in all_orders(costs, micro_batches):
        try:
            best_s = min(best_s, time_orders(orders, costs))
        except PlanError:
            continue
    return best_s


@settings(max_examples=15, deadline=None)
@given(pipelines(max_stages=2, max_more=1), st.integers(1, 3))
@example(
    PipelineCosts(
        stages=(
            StageCosts(forward_s=1, backward_input_s=0.5, backward_weight_s=1.3, max_in_flight=2),
            StageCosts(forward_s=0.8, backward_input_s=1, backward_weight_s=0.5, max_in_flight=2, tail_s=0.7),
        ),
        hops={(0, 1): Hop(delay_s=1, transfer_s=0.9), (1, 0): Hop(delay_s=0.5)},
    ),
    3,
)
def test_small_pipelines_are_solved_exactly(costs: PipelineCosts, micro_batches: int) -> None:
    """The search equals the best of all orders that exist, and says that it is the best."""
    found = search_schedule(costs, micro_batches)
    assert found.is_optimal
    assert found.step_s == pytest.approx(exhaustive_s(costs, micro_batches))


@settings(max_examples=10, deadline=None)
@given(pipelines(), st.integers(2, 8))
def test_what_is_dropped_does_not_enter_the_bound(costs: PipelineCosts, micro_batches: int) -> None:
    """Few states may find a slower schedule, but never a bound above the schedule of many states."""
    few, many = (search_schedule(costs, micro_batches, max_states=count) for count in (3, 300))
    assert many.step_s <= few.step_s * (1 + 1e-9)
    assert few.bound_s <= many.step_s * (1 + 1e-9)


def test_more_memory_hides_the_delay() -> None:
    """A stage on a long link that may hold more micro-batches keeps its pace; one that may not waits each round."""

    def step_s(room: int) -> float:
        stages = (StageCosts(forward_s=1, backward_input_s=1, backward_weight_s=1, max_in_flight=room),) * 2
        return search_schedule(
            PipelineCosts(stages=stages, hops={(0, 1): Hop(delay_s=6), (1, 0): Hop(delay_s=6)}), 8
        ).step_s

    assert [step_s(room) for room in (1, 2, 8)] == [17 * 8, 71, 31]


def test_weight_gradients_stay_joined_where_a_stage_cannot_split() -> None:
    """Its backward is one operation, and the gradient leaves after all of it."""
    stages = tuple(
        StageCosts(forward_s=1, backward_input_s=1, backward_weight_s=1, max_in_flight=2, splits_backward=split)
        for split in (True, False)
    )
    found = search_schedule(PipelineCosts(stages=stages), 4)
    assert text_of_schedule(found.schedule)[1] == "4(F B)"


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_text_keeps_the_order_of_computations(stages: int, micro_batches: int, chunks: int) -> None:
    """A schedule's text makes its computations again, in the same order."""
    for made in (zero_bubble(stages, micro_batches), interleaved(stages, micro_batches, chunks)):
        text = text_of_schedule(made)
        again = schedule_of_text(text, micro_batches, made.num_chunks)
        assert again.stages == made.stages
        assert again == make_schedule("searched", stages, micro_batches, num_chunks=made.num_chunks, orders=text)


def test_long_orders_have_short_text() -> None:
    """Repeated groups are written once."""
    assert text_of_schedule(zero_bubble(2, 128)) == ("2F 126(I W F) 2(I W)", "2(F I) 126(W F I) 2W")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 F, 0 I"),
        ("F", "1 F, 0 I"),
        ("F B B", "1 F, 0 I, 0 W, 2 B"),
        ("F I", "1 F, 1 I, 0 W"),
        ("F B F1", "chunk 1 of 1"),
        ("F  B", "' B' is not"),
        ("f b", "'f b' is not"),
        ("0F B", "'0F B' is not"),
        ("9999999F B", "more than 3"),
        ("9999999(F B) F", "more than 3"),
        ("2(2(F B))", "is not a computation"),
        ("F B\n", "is not a computation"),
        ("F" * 100_000, "is not a computation"),
    ],
)
def test_malformed_text_is_refused_with_its_place(text: str, problem: str) -> None:
    """Text from a file is refused before it grows, with the stage and what is wrong."""
    with pytest.raises(PlanError, match="stage 0") as caught:
        schedule_of_text([text], 1)
    assert problem in str(caught.value)


@given(st.text(alphabet="FIWB()0123456789 ", max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Any text either makes a schedule that the checker judges, or raises `PlanError`."""
    try:
        check_schedule(schedule_of_text([text], 3))
    except PlanError:
        return
    assert "F" in text


def test_orders_that_wait_for_each_other_are_refused() -> None:
    """The checker names the deadlock of a hand-written order."""
    with pytest.raises(PlanError, match=r"deadlock|before"):
        check_schedule(schedule_of_text(["F I W F I W", "2F 2(I W)"], 2))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"forward_s": -1.0}, "forward_s is -1"),
        ({"tail_s": float("nan")}, "tail_s is nan"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
    ],
)
def test_impossible_costs_are_refused(change: dict[str, float], problem: str) -> None:
    """Negative times and stages without memory are refused, with the stage."""
    usual = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0, "max_in_flight": 1}
    with pytest.raises(PlanError, match="stage 0") as caught:
        PipelineCosts(stages=(StageCosts(**{**usual, **change}),))  # type: ignore[arg-type]
    assert problem in str(caught.value)
    with pytest.raises(PlanError, match="0 micro-batches"):
        search_schedule(PipelineCosts(stages=(StageCosts(**usual),)), 0)  # type: ignore[arg-type]

"""Rules of pipeline schedules: what the generators promise, and what the checker refuses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.schedule import (
    Operation,
    Schedule,
    check_schedule,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
    peak_receive_buffers,
)

stages = st.integers(1, 6)
micro_batches = st.integers(1, 10)
names = st.sampled_from(["1f1b", "gpipe", "overlapped"])


@given(names, stages, micro_batches)
def test_every_generated_schedule_passes(name: str, num_stages: int, num_micro_batches: int) -> None:
    """A schedule made by name passes the checker for any number of stages and micro-batches."""
    schedule = make_schedule(name, num_stages, num_micro_batches)
    check_schedule(schedule)
    assert schedule.name == name
    assert schedule.num_stages == num_stages
    assert run_by_hand(schedule, random.Random(0))


@given(stages, micro_batches)
def test_1f1b_bounds_what_is_in_flight(num_stages: int, num_micro_batches: int) -> None:
    """Under 1F1B stage s keeps at most as many micro-batches as there are stages from s on."""
    peaks = check_schedule(one_f_one_b(num_stages, num_micro_batches))
    assert peaks == tuple(min(num_stages - s, num_micro_batches) for s in range(num_stages))


@given(stages, micro_batches)
def test_gpipe_keeps_every_micro_batch(num_stages: int, num_micro_batches: int) -> None:
    """Under GPipe every stage holds all micro-batches at once."""
    assert check_schedule(gpipe(num_stages, num_micro_batches)) == (num_micro_batches,) * num_stages


@given(stages, st.integers(1, 50), st.integers(1, 3))
def test_evaluation_is_forwards_in_bounded_memory(num_stages: int, num_micro_batches: int, chunks: int) -> None:
    """No backward, no update; a stage is a few messages ahead of what has arrived, whatever their number."""
    schedule = forward_only(num_stages, num_micro_batches, chunks)
    check_schedule(schedule)
    assert max(peak_receive_buffers(schedule)) <= 1
    for operations in schedule.stages:
        kinds = [one.kind for one in operations]
        assert set(kinds) <= {
            "forward", "send_forward", "receive_forward", "wait_send_forward", "wait_receive_forward"
        }  # fmt: skip
        moves = ((kind == "send_forward") - (kind == "wait_send_forward") for kind in kinds)
        assert max(itertools.accumulate(moves)) <= 17


@given(names, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_mutated_schedule_is_refused_exactly_when_it_fails(
    name: str, num_stages: int, num_micro_batches: int, num_mutations: int, draw: random.Random
) -> None:
    """After dropped, doubled or swapped operations, the checker agrees with a run by hand."""
    schedule = make_schedule(name, num_stages, num_micro_batches)
    for _ in range(num_mutations):
        schedule = mutate(schedule, draw)
    try:
        check_schedule(schedule)
        accepted = True
    except PlanError:
        accepted = False
    assert accepted == run_by_hand(schedule, draw)


@given(st.integers(2, 5), micro_batches, st.randoms(use_true_random=False))
def test_receives_posted_ahead_are_accepted(num_stages: int, num_micro_batches: int, draw: random.Random) -> None:
    """A receive may move ahead of computing and of waits: posting never blocks."""
    schedule = one_f_one_b(num_stages, num_micro_batches)
    stage = draw.randrange(1, num_stages)
    operations = schedule.stages[stage]
    ahead = tuple(one for one in operations if one.kind == "receive_forward")
    rest = tuple(one for one in operations if one.kind != "receive_forward")
    check_schedule(with_stage(schedule, stage, ahead + rest))


def test_a_refusal_names_stage_operation_and_reason() -> None:
    """The message says where the schedule fails and why."""
    schedule = one_f_one_b(2, 2)
    dropped = tuple(one for one in schedule.stages[1] if one != Operation("backward", 1))
    with pytest.raises(PlanError, match=r"stage 1, backward\(1\): is missing"):
        check_schedule(with_stage(schedule, 1, dropped))


def without(operations: tuple[Operation, ...], one: Operation) -> tuple[Operation, ...]:
    """Return `operations` less `one`."""
    return tuple(other for other in operations if other != one)


def test_each_refusal_has_one_exact_message() -> None:
    """Stage, operation and reason are named alike for each mistake of a stage's list."""
    schedule = one_f_one_b(3, 2)
    own = schedule.stages[1]
    wait, forward, backward = Operation("wait_receive_forward", 1), Operation("forward", 1), Operation("backward", 1)
    for operations, message in (
        ((*own, forward), "forward(1): appears 2 times"),
        ((*own, Operation("forward", 2)), "forward(2): is unexpected"),
        ((*without(own, wait), wait), "forward(1): comes before wait_receive_forward(1)"),
        ((*without(own, backward), backward), "send_backward(1): comes before backward(1)"),
    ):
        with pytest.raises(PlanError) as caught:
            check_schedule(with_stage(schedule, 1, operations))
        assert str(caught.value) == f"schedule, stage 1, {message}"
    last = schedule.stages[0]
    with pytest.raises(PlanError) as caught:
        check_schedule(with_stage(schedule, 0, (*without(last, backward), backward)))
    assert str(caught.value) == "schedule, stage 0, backward(1): comes after the update"


def test_a_deadlock_names_the_first_stuck_stage_and_all_others() -> None:
    """Stage 1 of three waits for a message that stage 2 sends only after it has one of stage 1; stage 0 for both."""
    schedule = one_f_one_b(3, 1)
    send, wait = Operation("send_forward", 0), Operation("wait_receive_backward", 0)
    receive = Operation("receive_backward", 0)
    late = without(without(without(schedule.stages[1], send), receive), wait)
    place = late.index(Operation("forward", 0)) + 1
    order = (*late[:place], receive, wait, send, *late[place:])
    with pytest.raises(PlanError) as caught:
        check_schedule(with_stage(schedule, 1, order))
    blocked = (
        "stage 0 at wait_receive_backward(0); stage 1 at wait_receive_backward(0); stage 2 at wait_receive_forward(0)"
    )
    assert str(caught.value) == (f"schedule, stage 0, wait_receive_backward(0): never completes (deadlock: {blocked})")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule("none", 1, ()), "schedule with 0 stages"),
        (Schedule("none", 0, ((),)), "schedule with 0 micro-batches"),
        (Schedule("none", 1, ((),), num_chunks=0), "schedule with 0 chunks"),
    ],
)
def test_a_schedule_of_nothing_is_refused(schedule: Schedule, words: str) -> None:
    """Stages, micro-batches and chunks number at least one."""
    with pytest.raises(PlanError, match=f"^{words} "):
        check_schedule(schedule)


def test_unfused_exchanges_deadlock() -> None:
    """Two neighbours that each wait for their own send before they post the receive are refused."""
    schedule = one_f_one_b(2, 3)
    blocking = [[], []]
    for stage, one in schedule:
        if not one.kind.startswith("wait_"):
            blocking[stage].append(one)
        if one.kind.startswith(("send_", "receive_")):
            blocking[stage].append(Operation("wait_" + one.kind, one.micro_batch))
    with pytest.raises(PlanError, match=r"deadlock: stage 0 at .*; stage 1 at "):
        check_schedule(replace(schedule, stages=tuple(map(tuple, blocking))))


def test_messages_must_meet_in_order() -> None:
    """A receive that meets another micro-batch's send is refused, not silently mixed up."""
    schedule = gpipe(2, 2)
    swap = {0: 1, 1: 0}
    crossed = tuple(
        replace(one, micro_batch=swap[one.micro_batch]) if "forward" in one.kind else one for one in schedule.stages[1]
    )
    with pytest.raises(PlanError) as caught:
        check_schedule(with_stage(schedule, 1, crossed))
    met = "matches receive_forward(1) of stage 1, which expects another message"
    assert str(caught.value) == f"schedule, stage 0, send_forward(0): {met}"


@pytest.mark.parametrize(("name", "num_stages", "num_micro_batches"), [("zb", 2, 2), ("1f1b", 0, 2), ("gpipe", 2, 0)])
def test_what_cannot_be_made_is_a_plan_error(name: str, num_stages: int, num_micro_batches: int) -> None:
    """An unknown name or a count below one is answered with a `PlanError`."""
    with pytest.raises(PlanError):
        make_schedule(name, num_stages, num_micro_batches)


def test_interleaved_chunks_are_followed_around_the_pipeline() -> None:
    """With two chunks on two stages a forward passes 0, 1, 0, 1, and its gradient comes back the same way."""
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    lists: list[list[Operation]] = [[], []]

    def visit(place: int, way: str, sends: bool, receives: bool) -> None:
        stage, chunk = order[place]
        if receives:
            lists[stage] += [
                Operation(f"receive_{way}", 0, chunk),
                Operation(f"wait_receive_{way}", 0, chunk),
            ]
        lists[stage].append(Operation(way, 0, chunk))
        if sends:
            lists[stage] += [Operation(f"send_{way}", 0, chunk), Operation(f"wait_send_{way}", 0, chunk)]

    for place in range(4):
        visit(place, "forward", sends=place < 3, receives=place > 0)
    for place in reversed(range(4)):
        visit(place, "backward", sends=place > 0, receives=place < 3)
    for operations in lists:
        operations.append(Operation("update", 0))
    assert check_schedule(Schedule("interleaved", 1, tuple(map(tuple, lists)), num_chunks=2)) == (2, 2)


def with_stage(schedule: Schedule, stage: int, operations: tuple[Operation, ...]) -> Schedule:
    """Return the schedule with the list of one stage replaced."""
    return replace(schedule, stages=(*schedule.stages[:stage], tuple(operations), *schedule.stages[stage + 1 :]))


def mutate(schedule: Schedule, draw: random.Random) -> Schedule:
    """Drop, double, swap or move one operation of one stage."""
    stage = draw.randrange(schedule.num_stages)
    operations = list(schedule.stages[stage])
    if not operations:
        return schedule
    here, there = draw.randrange(len(operations)), draw.randrange(len(operations))
    match draw.choice(["drop", "double", "swap", "neighbour", "move"]):
        case "drop":
            del operations[here]
        case "double":
            operations.insert(there, operations[here])
        case "swap":
            operations[here], operations[there] = operations[there], operations[here]
        case "neighbour" if here:
            operations[here - 1], operations[here] = operations[here], operations[here - 1]
        case _:
            operations.insert(there, operations.pop(here))
    return with_stage(schedule, stage, tuple(operations))


class WrongError(Exception):
    """The run by hand found a stage doing what it cannot do."""


class Hand:
    """An independent executor: values, wires with two ends, one stage moved at a time at random."""

    def __init__(self, schedule: Schedule) -> None:
        self.n, self.m = schedule.num_stages, schedule.num_micro_batches
        self.todo = [list(operations) for operations in schedule.stages]
        self.have: list[set[str]] = [set() for _ in range(self.n)]
        self.started: list[dict[str, int]] = [{} for _ in range(self.n)]
        self.out: dict[tuple[int, int], list[str]] = {}
        self.into: dict[tuple[int, int], list[str]] = {}

    def step(self, s: int) -> bool:
        """Do the next operation of stage `s`; False if it must wait."""
        one = self.todo[s][0]
        if not self.do(s, one.kind, one.micro_batch):
            return False
        self.todo[s].pop(0)
        return True

    def do(self, s: int, kind: str, m: int) -> bool:
        if kind.startswith("wait_"):
            return self.wait(s, kind.removeprefix("wait_"), m)
        if kind.startswith(("send", "receive")):
            self.start(s, kind, m)
            return True
        if kind == "update":
            need = {f"backward{i}" for i in range(self.m)}
        elif kind == "forward":
            need = {f"in-forward{m}"} if s else set()
        else:
            need = {f"forward{m}"} | ({f"in-backward{m}"} if s < self.n - 1 else set())
        self.gain(s, f"{kind}{m}", need)
        return True

    def gain(self, s: int, what: str, need: set[str]) -> None:
        if not need <= self.have[s] or what in self.have[s]:
            raise WrongError(what)
        self.have[s].add(what)

    def wire(self, s: int, kind: str) -> tuple[int, int]:
        other = s + (1 if kind in ("send_forward", "receive_backward") else -1)
        if not 0 <= other < self.n:
            raise WrongError("off the end")
        return (s, other) if kind.startswith("send") else (other, s)

    def start(self, s: int, kind: str, m: int) -> None:
        way = kind.split("_")[1]
        if kind.startswith("send") and f"{way}{m}" not in self.have[s]:
            raise WrongError("nothing to send")
        if f"{kind}{m}" in self.started[s]:
            raise WrongError("twice")
        ends = self.out if kind.startswith("send") else self.into
        queue = ends.setdefault(self.wire(s, kind), [])
        queue.append(f"{way}{m}")
        self.started[s][f"{kind}{m}"] = len(queue) - 1

    def wait(self, s: int, kind: str, m: int) -> bool:
        if f"{kind}{m}" not in self.started[s]:
            raise WrongError("waits for what was not started")
        index = self.started[s][f"{kind}{m}"]
        wire = self.wire(s, kind)
        other = (self.into if kind.startswith("send") else self.out).get(wire, [])
        if len(other) <= index:
            return False
        mine = (self.out if kind.startswith("send") else self.into)[wire]
        if other[index] != mine[index]:
            raise WrongError("another message")
        done = f"done-{kind}{m}" if kind.startswith("send") else f"in-{kind.split('_')[1]}{m}"
        self.gain(s, done, set())
        return True

    def complete(self) -> bool:
        """Everything asked for has been done, and nothing was left under way."""
        for s in range(self.n):
            want = {f"{way}{m}" for way in ("forward", "backward") for m in range(self.m)} | {"update0"}
            if s:
                want |= {f"{x}{m}" for x in ("in-forward", "done-send_backward") for m in range(self.m)}
            if s < self.n - 1:
                want |= {f"{x}{m}" for x in ("in-backward", "done-send_forward") for m in range(self.m)}
            if self.have[s] != want:
                return False
        return True


def run_by_hand(schedule: Schedule, draw: random.Random) -> bool:
    """Return whether a run in a random order of stages completes."""
    hand = Hand(schedule)
    try:
        while ready := [s for s in range(hand.n) if hand.todo[s]]:
            draw.shuffle(ready)
            if sum(hand.step(s) for s in ready) == 0:
                return False
    except WrongError:
        return False
    return hand.complete()

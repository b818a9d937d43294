"""`compile_schedule`: compiles a schedule to integer-coded instructions per stage and a list of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from isthmus.schedule import Operation, OperationKind, Schedule

COMPUTE_OPERATIONS: frozenset[OperationKind] = frozenset(("forward", "backward", "backward_input", "backward_weight"))

COMPUTE, SEND, POST_RECEIVE, WAIT_SENT, WAIT_ARRIVED = range(5)
"""Instruction codes: compute (or update), send, post a receive, wait for departure, wait for arrival."""


@dataclass(frozen=True, kw_only=True)
class PlannedMessage:
    """A message of the schedule, sent once per iteration."""

    endpoints: tuple[int, int]
    """Sending and receiving stage."""
    boundary: int
    """The stage before the boundary that it crosses; that stage's boundary bytes are its size."""
    operation: Operation


StageInstruction = tuple[int, int, Operation]
"""(instruction code, index of the message or -1, operation)."""


@dataclass(frozen=True, kw_only=True)
class CompiledSchedule:
    """A schedule, the instructions of each stage in order (`stages[s]`), and its messages."""

    schedule: Schedule
    stages: tuple[tuple[StageInstruction, ...], ...]
    messages: tuple[PlannedMessage, ...]


_COMMUNICATION: dict[OperationKind, tuple[int, bool, bool]] = {
    "send_forward": (SEND, True, True),
    "send_backward": (SEND, False, True),
    "receive_forward": (POST_RECEIVE, True, False),
    "receive_backward": (POST_RECEIVE, False, False),
    "wait_send_forward": (WAIT_SENT, True, True),
    "wait_send_backward": (WAIT_SENT, False, True),
    "wait_receive_forward": (WAIT_ARRIVED, True, False),
    "wait_receive_backward": (WAIT_ARRIVED, False, False),
}
"""By kind: instruction code, whether it is a forward message, whether this stage sends it."""


class _SameSchedule:
    """A cache key that is equal for one schedule object only; comparing operations would take longer than compiling."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameSchedule) and other.schedule is self.schedule


def compile_schedule(schedule: Schedule) -> CompiledSchedule:
    """Return `schedule` compiled; both ends of a transfer refer to the same message."""
    return _compile_cached(_SameSchedule(schedule))


@lru_cache(maxsize=16)
def _compile_cached(same: _SameSchedule) -> CompiledSchedule:
    schedule = same.schedule
    letters: list[PlannedMessage] = []
    numbers: dict[tuple[bool, int, int], int] = {}
    stages: list[tuple[StageInstruction, ...]] = []
    for stage, operations in enumerate(schedule.stages):
        orders: list[StageInstruction] = []
        for one in operations:
            exchange = _COMMUNICATION.get(one.kind)
            if exchange is None:
                orders.append((COMPUTE, -1, one))
                continue
            code, forward, sends = exchange
            sender = schedule.virtual_stage(stage, one) + (0 if sends else -1 if forward else 1)
            key = forward, one.micro_batch, sender
            if key not in numbers:
                numbers[key] = len(letters)
                letters.append(_planned_message(schedule, one, sender, sender + (1 if forward else -1)))
            orders.append((code, numbers[key], one))
        stages.append(tuple(orders))
    return CompiledSchedule(schedule=schedule, stages=tuple(stages), messages=tuple(letters))


def _planned_message(schedule: Schedule, one: Operation, sender: int, receiver: int) -> PlannedMessage:
    route = schedule.route(one.micro_batch)
    ends = route[sender][0], route[receiver][0]
    return PlannedMessage(endpoints=ends, boundary=route[min(sender, receiver)][0], operation=one)

"""`read_program`: compiles a schedule to integer-coded instructions per stage and a list of its messages."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.schedule import Kind, Operation, Schedule

COMPUTING: frozenset[Kind] = frozenset(("forward", "backward", "backward_input", "backward_weight"))

COMPUTE, SEND, POST, WAIT_LEFT, WAIT_ARRIVED = range(5)
"""Instruction codes: compute (or update), send, post a receive, wait for departure, wait for arrival."""


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A message of the schedule, sent once per iteration."""

    ends: tuple[int, int]
    """Sending and receiving stage."""
    boundary: int
    """The stage before the boundary that it crosses; that stage's boundary bytes are its size."""
    operation: Operation


Order = tuple[int, int, Operation]
"""(instruction code, index of the message or -1, operation)."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A schedule, the instructions of each stage in order (`stages[s]`), and its messages."""

    schedule: Schedule
    stages: tuple[tuple[Order, ...], ...]
    letters: tuple[Letter, ...]


_EXCHANGE: dict[Kind, tuple[int, bool, bool]] = {
    "send_forward": (SEND, True, True),
    "send_backward": (SEND, False, True),
    "receive_forward": (POST, True, False),
    "receive_backward": (POST, False, False),
    "wait_send_forward": (WAIT_LEFT, True, True),
    "wait_send_backward": (WAIT_LEFT, False, True),
    "wait_receive_forward": (WAIT_ARRIVED, True, False),
    "wait_receive_backward": (WAIT_ARRIVED, False, False),
}
"""By kind: instruction code, whether it is a forward message, whether this stage sends it."""


def read_program(schedule: Schedule) -> Program:
    """Return `schedule` compiled; both ends of a transfer refer to the same message."""
    letters: list[Letter] = []
    numbers: dict[tuple[bool, int, int], int] = {}
    stages: list[tuple[Order, ...]] = []
    for stage, operations in enumerate(schedule.stages):
        orders: list[Order] = []
        for one in operations:
            exchange = _EXCHANGE.get(one.kind)
            if exchange is None:
                orders.append((COMPUTE, -1, one))
                continue
            code, forward, sends = exchange
            sender = schedule.virtual(stage, one) + (0 if sends else -1 if forward else 1)
            key = forward, one.micro_batch, sender
            if key not in numbers:
                numbers[key] = len(letters)
                letters.append(_letter(schedule, one, sender, sender + (1 if forward else -1)))
            orders.append((code, numbers[key], one))
        stages.append(tuple(orders))
    return Program(schedule=schedule, stages=tuple(stages), letters=tuple(letters))


def _letter(schedule: Schedule, one: Operation, sender: int, receiver: int) -> Letter:
    route = schedule.route(one.micro_batch)
    ends = route[sender][0], route[receiver][0]
    return Letter(ends=ends, boundary=route[min(sender, receiver)][0], operation=one)

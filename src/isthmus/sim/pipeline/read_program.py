"""`read_program`: a schedule made ready to run: what stages do, by number, and their messages."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.schedule import Kind, Operation, Schedule

COMPUTING: frozenset[Kind] = frozenset(("forward", "backward", "backward_input", "backward_weight"))

COMPUTE, SEND, POST, WAIT_LEFT, WAIT_ARRIVED = range(5)
"""What a stage can do: compute (or update), hand a message over, post its receive, wait for either end of it.
"""


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A message before it is sent: from stage to stage, over the boundary after stage `boundary`."""

    ends: tuple[int, int]
    boundary: int
    operation: Operation


Order = tuple[int, int, Operation]
"""(what to do, number of the letter or -1, the operation it is)."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A schedule with its letters: `stages[s]` is what stage `s` does, in order."""

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
"""By kind: what the stage does, whether the message goes forward, whether this end sends it."""


def read_program(schedule: Schedule) -> Program:
    """Return the program of `schedule`; both ends of an exchange name the same letter."""
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

"""`make_program`: a schedule compiled for one stage, so that steps look nothing up between kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, get_args

from isthmus.schedule import Kind, Operation, Schedule, is_last_use

_STARTS = frozenset(kind for kind in get_args(Kind) if kind.startswith(("send_", "receive_")))


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a stage."""

    kind: Kind
    # (micro-batch, chunk).
    key: tuple[int, int]
    # Whether it starts a send or receive.
    starts: bool
    # The other stage of a message or of the wait for one.
    peer: int | None
    # Encodes micro-batch, sender and direction; equal on both sides and at the wait.
    tag: int
    # Whether it is the last use of the tensors received under `key`.
    frees: bool


Program: TypeAlias = tuple[tuple[Step, ...], ...]
"""Groups in order of execution: adjacent message starts form one group, each other step its own."""


def make_program(schedule: Schedule, stage: int) -> Program:
    """Return the program of `stage`."""
    steps = [_step(schedule, stage, operation) for operation in schedule.stages[stage]]
    groups = list[tuple[Step, ...]]()
    for starts, adjacent in groupby(steps, lambda step: step.starts):
        group = tuple(adjacent)
        groups += [group] if starts else [(step,) for step in group]
    return tuple(groups)


def _step(schedule: Schedule, stage: int, operation: Operation) -> Step:
    is_message = operation.kind.removeprefix("wait_") in _STARTS
    return Step(
        kind=operation.kind,
        key=(operation.micro_batch, operation.chunk),
        starts=operation.kind in _STARTS,
        peer=schedule.peer(stage, operation) if is_message else None,
        tag=_tag(schedule, stage, operation) if is_message else 0,
        frees=is_last_use(operation, schedule.trains),
    )


def _tag(schedule: Schedule, stage: int, exchange: Operation) -> int:
    """Return the tag of a message: positive, unique per micro-batch, sending virtual stage and direction."""
    kind = exchange.kind.removeprefix("wait_")
    sender = schedule.virtual(stage, exchange)
    forward = kind.endswith("forward")
    if kind.startswith("receive_"):
        sender += -1 if forward else 1
    number = exchange.micro_batch * schedule.num_virtual_stages + sender
    return 1 + 2 * number + (0 if forward else 1)

"""`make_stage_program`: a schedule compiled for one stage, so that steps look nothing up between kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, get_args

from isthmus.schedule import Operation, OperationKind, Schedule, is_last_use

_MESSAGE_KINDS = frozenset(kind for kind in get_args(OperationKind) if kind.startswith(("send_", "receive_")))


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One operation of a stage."""

    kind: OperationKind
    # (micro-batch, chunk).
    key: tuple[int, int]
    # Whether it starts a send or receive.
    is_message_start: bool
    # The other stage of a message or of the wait for one.
    peer: int | None
    # Encodes micro-batch, sender and direction; equal on both sides and at the wait.
    tag: int
    # Whether it is the last use of the tensors received under `key`.
    frees_buffers: bool


StageProgram: TypeAlias = tuple[tuple[ProgramStep, ...], ...]
"""Groups in order of execution: adjacent message starts form one group, each other step its own."""


def make_stage_program(schedule: Schedule, stage: int) -> StageProgram:
    """Return the program of `stage`."""
    steps = [_step(schedule, stage, operation) for operation in schedule.stages[stage]]
    groups = list[tuple[ProgramStep, ...]]()
    for starts, adjacent in groupby(steps, lambda step: step.is_message_start):
        group = tuple(adjacent)
        groups += [group] if starts else [(step,) for step in group]
    return tuple(groups)


def _step(schedule: Schedule, stage: int, operation: Operation) -> ProgramStep:
    is_message = operation.kind.removeprefix("wait_") in _MESSAGE_KINDS
    return ProgramStep(
        kind=operation.kind,
        key=(operation.micro_batch, operation.chunk),
        is_message_start=operation.kind in _MESSAGE_KINDS,
        peer=schedule.peer_stage(stage, operation) if is_message else None,
        tag=_tag(schedule, stage, operation) if is_message else 0,
        frees_buffers=is_last_use(operation, schedule.trains),
    )


def _tag(schedule: Schedule, stage: int, exchange: Operation) -> int:
    """Return the tag of a message: positive, unique per micro-batch, sending virtual stage and direction."""
    kind = exchange.kind.removeprefix("wait_")
    sender = schedule.virtual_stage(stage, exchange)
    forward = kind.endswith("forward")
    if kind.startswith("receive_"):
        sender += -1 if forward else 1
    number = exchange.micro_batch * schedule.num_virtual_stages + sender
    return 1 + 2 * number + (0 if forward else 1)

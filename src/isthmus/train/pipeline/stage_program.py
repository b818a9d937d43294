"""`make_program`: what a stage does in a step, with all that its schedule says of it worked out once.

What a step had to work out between two computations would be lost in each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, get_args

from isthmus.schedule import Kind, Operation, Schedule, is_last_use

_STARTS = frozenset(kind for kind in get_args(Kind) if kind.startswith(("send_", "receive_")))


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, by `kind`; `key` is its micro-batch and chunk.

    An exchange is with the stage `peer`, and its `tag` is the same at both ends, and at the wait for it: by
    direction, sender, micro-batch. After a step that `frees`, nothing received under its key is used again.
    """

    kind: Kind
    key: tuple[int, int]
    starts: bool
    peer: int | None
    tag: int
    frees: bool


Program: TypeAlias = tuple[tuple[Step, ...], ...]
"""In order: exchanges that are started side by side, together, and every other step alone."""


def make_program(schedule: Schedule, stage: int) -> Program:
    """Return the program of `stage`."""
    steps = [_step(schedule, stage, one) for one in schedule.stages[stage]]
    groups = list[tuple[Step, ...]]()
    for starts, some in groupby(steps, lambda step: step.starts):
        together = tuple(some)
        groups += [together] if starts else [(step,) for step in together]
    return tuple(groups)


def _step(schedule: Schedule, stage: int, one: Operation) -> Step:
    exchanges = one.kind.removeprefix("wait_") in _STARTS
    return Step(
        kind=one.kind,
        key=(one.micro_batch, one.chunk),
        starts=one.kind in _STARTS,
        peer=schedule.peer(stage, one) if exchanges else None,
        tag=_tag(schedule, stage, one) if exchanges else 0,
        frees=is_last_use(one, schedule.trains),
    )


def _tag(schedule: Schedule, stage: int, exchange: Operation) -> int:
    kind = exchange.kind.removeprefix("wait_")
    sender = schedule.virtual(stage, exchange)
    forward = kind.endswith("forward")
    if kind.startswith("receive_"):
        sender += -1 if forward else 1
    number = exchange.micro_batch * schedule.num_virtual_stages + sender
    return 1 + 2 * number + (0 if forward else 1)

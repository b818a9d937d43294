"""Orders of computations as text, as plans keep them, and the schedule that they make.

A stage's text lists its computations: `F` forward, `I` input gradient, `W` weight gradient, `B` whole backward, each
with its chunk if that is not 0 (`F1`). Micro-batches keep their order, so that the k-th `F` is that of micro-batch k. A
number repeats what follows it, one computation or several in brackets: `3F 5(I F W) 3I 3W`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from isthmus.core.errors import PlanError
from isthmus.schedule.add_communication import add_communication, require_counts
from isthmus.schedule.operation import Schedule
from isthmus.schedule.searched.compute_orders import KINDS, ComputeOrders, Step, operations_of, orders_of

_LETTERS = "FIWB"
_TOKEN = re.compile(r"([1-9][0-9]{0,6})?(?:([FIWB][0-9]{0,3})|\(([FIWB][0-9]{0,3}(?: [FIWB][0-9]{0,3})*)\))(?: |$)")
_LONGEST_GROUP = 8


def schedule_of_orders(orders: ComputeOrders, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule `searched` whose stages compute in these orders; communication overlaps computation."""
    stages = tuple(map(operations_of, orders))
    return add_communication(Schedule("searched", num_micro_batches, stages, num_chunks))


def schedule_of_text(texts: Sequence[str], num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule of `texts`, (num_stages,).

    Raises `PlanError` for text that is malformed, or that lists more or fewer computations than the counts ask for;
    `check_schedule` checks their order.
    """
    require_counts(len(texts), num_micro_batches, num_chunks)
    orders = tuple(_parse_order(stage, text, 3 * num_micro_batches * num_chunks) for stage, text in enumerate(texts))
    for stage, order in enumerate(orders):
        _require_complete(stage, order, num_micro_batches, num_chunks)
    return schedule_of_orders(orders, num_micro_batches, num_chunks)


def text_of_schedule(schedule: Schedule) -> tuple[str, ...]:
    """Return the computations of `schedule` as text, (num_stages,).

    Raises `PlanError` for a schedule with routes, or whose micro-batches do not keep their order in each chunk.
    """
    orders = orders_of(schedule)
    if schedule.routes or any(
        operations_of(order) != tuple(one for one in operations if one.kind in KINDS)
        for order, operations in zip(orders, schedule.stages, strict=True)
    ):
        raise PlanError(
            f"schedule '{schedule.name}' has no text: its micro-batches do not keep one order",
            hint="name it in the plan instead",
        )
    return tuple(_order_text([f"{_LETTERS[code]}{chunk or ''}" for code, chunk in order]) for order in orders)


def _order_text(steps: Sequence[str]) -> str:
    words, place = [], 0
    while place < len(steps):
        length, repeats = max(
            ((length, _count_repeats(steps, place, length)) for length in range(1, _LONGEST_GROUP + 1)),
            key=lambda one: (one[0] * one[1] if one[1] > 1 else 1, -one[0]),
        )
        if repeats < 2:
            length = repeats = 1
        group = " ".join(steps[place : place + length])
        words.append(f"{repeats if repeats > 1 else ''}{group if length == 1 else f'({group})'}")
        place += length * repeats
    return " ".join(words)


def _count_repeats(steps: Sequence[str], place: int, length: int) -> int:
    group, count = steps[place : place + length], 1
    while len(group) == length and steps[place + count * length : place + (count + 1) * length] == group:
        count += 1
    return count


def _parse_order(stage: int, text: str, most: int) -> tuple[Step, ...]:
    order: list[Step] = []
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise PlanError(
                f"orders, stage {stage}: '{text[place : place + 20]}' is not a computation",
                hint="write F, I, W or B with a chunk and a number before it, such as `3F 5(I F W)`",
            )
        group = [(_LETTERS.index(word[0]), int(word[1:] or 0)) for word in (token[2] or token[3]).split(" ")]
        count = int(token[1] or 1)
        if len(order) + count * len(group) > most:
            raise PlanError(
                f"orders, stage {stage}: more than {most} computations", hint="make the plan again with `isthmus plan`"
            )
        order += group * count
        place = token.end()
    return tuple(order)


def _require_complete(stage: int, order: Sequence[Step], num_micro_batches: int, num_chunks: int) -> None:
    for chunk in range(num_chunks):
        counts = [order.count((code, chunk)) for code in range(len(_LETTERS))]
        forwards, inputs, weights, whole = counts
        if forwards != num_micro_batches or inputs != weights or inputs + whole != num_micro_batches:
            listed = ", ".join(f"{count} {letter}" for count, letter in zip(counts, _LETTERS, strict=True))
            raise PlanError(
                f"orders, stage {stage}, chunk {chunk}: {listed} for {num_micro_batches} micro-batches",
                hint="make the plan again with `isthmus plan`: each micro-batch has one forward and one backward",
            )
    if beyond := sorted({chunk for _, chunk in order if chunk >= num_chunks}):
        raise PlanError(f"orders, stage {stage}: chunk {beyond[0]} of {num_chunks}", hint="chunks are counted from 0")

"""`rank_program`: the part of one rank in the steps of a collective, in the order in which it acts."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.strategies.step import Region, Step

Range = tuple[int, int]
"""First element and the one after the last."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message with another rank: the `number`-th from the sender to the receiver in this collective."""

    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class ProgramTurn:
    """Receive `parts`, combine them (`adds`) or take the only one, then send the result to `sends`."""

    elements: Range
    parts: tuple[Message, ...]
    adds: bool
    sends: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does: `first_sends`, then one turn after another.

    `results` are the ranges that the rank receives, also those that it holds from the start. Messages between two
    ranks are numbered alike on both, so a program needs no other agreement.
    """

    first_sends: tuple[tuple[Range, Message], ...]
    turns: tuple[ProgramTurn, ...]
    results: tuple[Range, ...]


def rank_program(steps: Sequence[Step], regions: Sequence[Region], rank: int) -> RankProgram:
    """Return the program of `rank` for `steps`, which are sorted by round and pass `check_steps` for `regions`.

    The rank waits for its turns by round and sends a value as soon as it holds it. Since a value sent in a round
    depends on turns of earlier rounds only, programs of this form never deadlock (induction over rounds).
    """
    counts: dict[tuple[int, int], int] = defaultdict(int)
    sends: dict[Range, list[tuple[int, Message]]] = defaultdict(list)
    parts: dict[tuple[int, Range], list[Message]] = defaultdict(list)
    adds: dict[tuple[int, Range], bool] = {}
    for step in steps:
        if rank not in (step.sender, step.receiver):
            continue
        number = counts[step.sender, step.receiver]
        counts[step.sender, step.receiver] += 1
        elements = step.start, step.stop
        if step.sender == rank:
            sends[elements].append((step.round, Message(step.receiver, number)))
        else:
            parts[step.round, elements].append(Message(step.sender, number))
            adds[step.round, elements] = step.adds
    rounds: dict[Range, list[int]] = defaultdict(list)
    for round_number, elements in sorted(parts):
        rounds[elements].append(round_number)
    first = [
        (elements, message)
        for elements, messages in sends.items()
        for round_number, message in messages
        if not rounds[elements] or round_number <= rounds[elements][0]
    ]
    turns = []
    for round_number, elements in sorted(parts):
        later = [one for one in rounds[elements] if one > round_number]
        after = tuple(
            message
            for when, message in sends.get(elements, ())
            if when > round_number and (not later or when <= later[0])
        )
        key = round_number, elements
        turns.append(ProgramTurn(elements, tuple(sorted(parts[key], key=lambda one: one.peer)), adds[key], after))
    return RankProgram(tuple(first), tuple(turns), _results({*sends, *rounds}, regions, rank))


def _results(moved: set[Range], regions: Sequence[Region], rank: int) -> tuple[Range, ...]:
    """Return the ranges that `rank` receives: the `moved` ones, and whole regions that stay where they are."""
    results, ordered = list[Range](), sorted(moved)
    for region in regions:
        if rank in region.receivers:  # a range is a piece of one region
            first, last = bisect_left(ordered, (region.start,)), bisect_left(ordered, (region.stop,))
            results += ordered[first:last] or [(region.start, region.stop)]
    return tuple(sorted(results))

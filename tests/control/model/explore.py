"""`explore`: every state that a model can reach, breadth first, each looked at once.

A model gives its start, the steps from a state, a state's key (states of one key behave alike), what is wrong
with a state, and whether it is a goal. Breadth first, so the trace to what is wrong is a shortest one.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S")


class Step(NamedTuple, Generic[S]):
    """One step: its name, the state it leads to, and whether it is a fault, on which no rule may depend."""

    name: str
    state: S
    fault: bool = False


class Model(Protocol[S]):
    """What `explore` walks through. `steps` must leave the state that it is given as it is."""

    def start(self) -> S: ...
    def steps(self, state: S) -> Iterable[Step[S]]: ...
    def key(self, state: S) -> Hashable: ...
    def wrong(self, state: S) -> str: ...
    def is_goal(self, state: S) -> bool: ...


@dataclass(kw_only=True)
class Found:
    """What was found: how much there is, and the first thing wrong, with the steps that lead to it.

    `complete` says that every reachable state was looked at; `num_goals` counts goals. `wrong` is "" where
    nothing is: then, if complete, a goal can be reached from every state without another fault.
    """

    num_states: int = 0
    num_steps: int = 0
    depth: int = 0
    num_goals: int = 0
    complete: bool = True
    wrong: str = ""
    trace: list[str] = field(default_factory=list)
    wall_s: float = 0.0


class _Graph:
    """The states met, by number: where each was first met from, and the steps that are no faults."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.parents, self.names = array("i"), list[str]()
        self.sources, self.targets = array("i"), array("i")
        self.depths, self.goals = array("i"), list[int]()

    def add(self, key: int, parent: int, name: str) -> int:
        number = self.numbers[key] = len(self.names)
        self.parents.append(parent)
        self.names.append(name)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return number

    def trace(self, number: int) -> list[str]:
        names = []
        while number > 0:
            names.append(self.names[number])
            number = self.parents[number]
        return names[::-1]

    def stuck(self) -> int | None:
        """Return the first state from which no goal can be reached without a fault."""
        before: dict[int, list[int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            before.setdefault(target, []).append(source)
        good, todo = bytearray(len(self.names)), list(self.goals)
        for number in todo:
            good[number] = 1
        while todo:
            for source in before.get(todo.pop(), ()):
                if not good[source]:
                    good[source] = 1
                    todo.append(source)
        return next((number for number in range(len(good)) if not good[number]), None)


def explore(
    model: Model[S],
    *,
    most_states: int = 10**9,
    most_s: float = 1e9,
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """Look at every state, or at the first `most_states`, for at most `most_s`; stop at the first wrong one.

    `progress` is called now and then. Keys are kept as 64-bit hashes: n states are taken for fewer with a
    probability of about n * n / 2e19.
    """
    gc.disable()  # with this many live objects a collection takes longer than all other work
    try:
        return _explore(model, most_states, most_s, progress)
    finally:
        gc.enable()


def _explore(model: Model[S], most_states: int, most_s: float, progress: Callable[[Found], None] | None) -> Found:
    begin_s, found, graph = time.perf_counter(), Found(), _Graph()
    state = model.start()
    todo = deque([(graph.add(hash(model.key(state)), -1, "start"), state)])
    while todo and not found.wrong:
        number, state = todo.popleft()
        _look(model, graph, found, number, state)
        for step in () if found.wrong else model.steps(state):
            found.num_steps += 1
            key = hash(model.key(step.state))
            target = graph.numbers.get(key)
            if target is None:
                target = graph.add(key, number, step.name)
                todo.append((target, step.state))
            if not step.fault and target != number:
                graph.sources.append(number)
                graph.targets.append(target)
        found.wall_s = time.perf_counter() - begin_s
        if progress is not None and found.num_states % 10_000 == 0:
            progress(found)
        if found.num_states >= most_states or found.wall_s > most_s:
            found.complete = not todo
            break
    if found.complete and not found.wrong:
        stuck = graph.stuck()
        if stuck is not None:
            found.wrong, found.trace = "no goal can be reached from here without a fault", graph.trace(stuck)
    return found


def _look(model: Model[S], graph: _Graph, found: Found, number: int, state: S) -> None:
    found.num_states += 1
    found.depth = max(found.depth, graph.depths[number])
    found.wrong = model.wrong(state)
    if found.wrong:
        found.trace = graph.trace(number)
    if model.is_goal(state):
        found.num_goals += 1
        graph.goals.append(number)

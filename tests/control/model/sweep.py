"""`sweep`: every state of a scenario, layer by layer of faults, whole levels at a time.

A state is looked at once, with the fewest faults that lead to it: whatever can follow later, with fewer left,
can follow then. What is found is the same as `explore` finds (`Pool` is the same model, state by state).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.control.model.canonical import Key
from tests.control.model.components import Components
from tests.control.model.kinds import Kind
from tests.control.model.pool import Pool, World, whole_key
from tests.control.model.rows import Flags, Ints
from tests.control.model.scenario import Scenario
from tests.control.model.states import States

CHUNK = 50_000
"""The number of states that are processed at a time."""

_FREE = (Kind.ORDINARY, Kind.SUBMIT, Kind.CANCEL, Kind.AGREE, Kind.EVICT)
_STUCK = "no goal can be reached from here without a fault"


@dataclass(kw_only=True)
class Swept:
    """What was found. `by_faults` is, by number of faults, the number of states first reached with it.

    `wrong` is "" where nothing is; else `trace` are the steps that lead to it, with as few faults as can be.
    `num_servers` and `num_sites` are the different ones that the states are made of.
    """

    by_faults: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_goals: int = 0
    num_servers: int = 0
    num_sites: int = 0
    wrong: str = ""
    trace: list[str] = field(default_factory=list)
    all: States
    states: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def num_states(self) -> int:
        """All states."""
        return sum(self.by_faults)


@dataclass
class _Level:
    faults: int
    states: Ints
    first: bool


class _Sweep:
    def __init__(
        self, scenario: Scenario, progress: Callable[[Swept], None] | None, components: type[Components]
    ) -> None:
        self.scenario, self.progress = scenario, progress
        self.all = States(scenario, components)
        self.met = np.empty(0, dtype=np.int64)
        self.levels, self.found = list[_Level](), Swept(all=self.all)

    def run(self) -> Swept:
        """Go through all states, then see whether from each a goal can be reached."""
        fresh = self.all.start()
        for faults in range(self.scenario.faults + 1):
            self.found.by_faults.append(0)
            fresh = self._layer(fresh, faults)
            if self.found.wrong:
                return self.found
        self._see_stuck()
        self.found.states = self.met
        return self.found

    def _layer(self, fresh: Ints, faults: int) -> Ints:
        """Look at all that can be reached from `fresh` without a fault; return what is one fault away."""
        first, next_layer = True, list[Ints]()
        while len(fresh):
            self.levels.append(_Level(faults, fresh, first))
            self.met = _merged(self.met, fresh)
            self.found.by_faults[-1] += len(fresh)
            self._judge(fresh)
            first, now = False, list[Ints]()
            for states in _chunks(fresh):
                if self.found.wrong:
                    return fresh
                free, faulty = self._step(states, faults < self.scenario.faults)
                now.append(free)
                next_layer.append(faulty)
                self._tell()
            fresh = _without(_union(now), self.met)
            if len(next_layer) > 50:
                next_layer = [_without(_union(next_layer), self.met)]
        return _without(_union(next_layer), self.met)

    def _step(self, states: Ints, may_fail: bool) -> tuple[Ints, Ints]:
        """Return what follows `states` without a fault, and with one."""
        kinds = [*Kind] if may_fail else [*_FREE, Kind.TIMEOUT]
        steps = self.all.steps(states, kinds)
        moved = (steps.kind == Kind.ORDINARY) & (steps.to != states[steps.of])
        quiet = np.ones(len(states), dtype=bool)
        quiet[steps.of[moved]] = False
        late = steps.kind == Kind.TIMEOUT
        fault = (steps.kind == Kind.FAULT) | (late & ~quiet[steps.of])
        self.found.num_steps += len(fault) if may_fail else int((~fault).sum())
        bad = steps.bad > 0 if may_fail else (steps.bad > 0) & ~fault
        if bad.any() and not self.found.wrong:
            place = int(np.flatnonzero(bad)[0])
            self._report(self.all.wrong[steps.bad[place]], int(steps.to[place]), int(states[steps.of[place]]))
        return np.unique(steps.to[~fault]), np.unique(steps.to[fault])

    def _judge(self, fresh: Ints) -> None:
        for states in _chunks(fresh):
            which, what = self.all.judge(states)
            if len(which) and not self.found.wrong:
                self._report(what, int(states[which[0]]))
            self.found.num_goals += int(self.all.goals(states).sum())

    def _see_stuck(self) -> None:
        """Go backwards from the goals until no state is added; report the first that is left."""
        pure = np.unique(self.all.pure(self.met))
        good = np.zeros(len(pure), dtype=bool)
        for states in _chunks(pure):
            good[np.searchsorted(pure, states)] = self.all.goals(states)
        levels = [np.searchsorted(pure, np.unique(self.all.pure(one.states))) for one in self.levels]
        grew = True
        while grew:
            grew = False
            for number in reversed(range(len(levels))):
                left = levels[number][~good[levels[number]]]
                grew = self._reach(pure, good, left) or grew
                levels[number] = left[~good[left]]
        if not good.all():
            first = next(level for level, left in zip(self.levels, levels, strict=True) if len(left))
            stuck = np.flatnonzero(~good[np.searchsorted(pure, self.all.pure(first.states))])
            self._report(_STUCK, int(first.states[stuck[0]]))

    def _reach(self, pure: Ints, good: Flags, left: Ints) -> bool:
        """Mark each of `left` that can reach a good state without a fault; return whether any was marked."""
        before, more = int(good.sum()), True
        while more and len(left):
            more = False
            for places in _chunks(left):
                states = pure[places]
                steps = self.all.steps(states, [Kind.ORDINARY, Kind.TIMEOUT])
                moved = (steps.kind == Kind.ORDINARY) & (steps.to != states[steps.of])
                quiet = np.ones(len(states), dtype=bool)
                quiet[steps.of[moved]] = False
                sure = (steps.kind == Kind.ORDINARY) | quiet[steps.of]
                of, to = steps.of[sure], steps.to[sure]
                reached = np.unique(of[good[np.searchsorted(pure, to)]])
                good[places[reached]] = True
                more = more or len(reached) > 0
            left = left[~good[left]]
        return int(good.sum()) > before

    def _tell(self) -> None:
        self.found.num_servers, self.found.num_sites = (
            len(self.all.parts.server_facts),
            len(self.all.parts.site_facts),
        )
        gc.freeze()
        if self.progress is not None:
            self.progress(self.found)

    def _report(self, what: str, state: int, before: int | None = None) -> None:
        """Note what is wrong, with the steps that lead there."""
        self.found.wrong = what
        way = [state] if before is None else [state, before]
        while (last := way[-1]) != int(self.levels[0].states[0]):
            way.append(self._before(last))
        self.found.trace = retrace(self.all, way[::-1])

    def _before(self, state: int) -> int:
        """Return a state of an earlier level from which a step leads to `state`."""
        number = next(i for i, level in enumerate(self.levels) if _has(level.states, state))
        level = self.levels[number]
        last = self.levels[number - 1]
        fewer = (one for one in self.levels if one.faults == level.faults - 1)
        for one in fewer if level.first else (last,):
            for states in _chunks(one.states):
                steps = self.all.steps(states, [*Kind])
                found = np.flatnonzero(steps.to == state)
                if len(found):
                    return int(states[steps.of[found[0]]])
        raise AssertionError("a state that nothing leads to")


def sweep(
    scenario: Scenario,
    *,
    progress: Callable[[Swept], None] | None = None,
    components: type[Components] = Components,
) -> Swept:
    """Look at every state of a scenario; stop at the first that is wrong."""
    gc.disable()
    try:
        return _Sweep(scenario, progress, components).run()
    finally:
        gc.enable()
        gc.unfreeze()


def key_of(states: States, state: int) -> Key:
    """Return the key of one state, as `Pool` has it."""
    at = states.columns(np.array([state]))
    sites = tuple(states.parts.site(number) for number in at.sites[0].tolist())
    return whole_key(states.parts.server(int(at.server[0])), sites, states.scenario.jobs)


def retrace(states: States, way: list[int]) -> list[str]:
    """Return the names of the steps that lead along a way, from its first state on."""
    pool, names = Pool(states.scenario), list[str]()
    world: World = pool.start()
    for state in way[1:]:
        key, left = key_of(states, state), None
        for step in pool.steps(world):
            if pool.pure_key(step.state) == key:
                names.append(step.name)
                left = step.state
                break
        assert left is not None, f"no step leads on after {names}"
        world = left
    return names


def _chunks(states: Ints) -> Iterator[Ints]:
    for begin in range(0, len(states), CHUNK):
        yield states[begin : begin + CHUNK]


def _union(parts: list[Ints]) -> Ints:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


def _merged(one: Ints, other: Ints) -> Ints:
    """Return both, sorted, as each is: the stable sort merges runs."""
    return np.sort(np.concatenate((one, other)), kind="stable")


def _without(states: Ints, met: Ints) -> Ints:
    """Return those of the sorted `states` that are not in the sorted `met`."""
    places = np.searchsorted(met, states)
    places[places == len(met)] = 0
    return states[met[places] != states] if len(met) else states


def _has(states: Ints, state: int) -> bool:
    place = int(np.searchsorted(states, state))
    return place < len(states) and int(states[place]) == state

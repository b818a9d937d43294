"""`StrategySteps`: the steps of a named strategy in phases, with what a checker and a simulator need to know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

from isthmus.strategies.regions import all_reduce
from isthmus.strategies.step import Region, Step
from isthmus.strategies.worker_grid import WorkerGrid

AggregatorKind = Literal["server", "switch"]
"""A parameter server has one network card; a switch has a port for each host, adds at line rate and multicasts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps with one purpose.

    A phase that `streams` works on each piece as soon as the phase before it has delivered that piece; any other
    starts when the phase before it is complete.
    """

    name: str
    steps: tuple[Step, ...]
    streams: bool = False


@dataclass(frozen=True, kw_only=True)
class StrategySteps(Sequence[Step]):
    """All steps of strategy `name` on `grid`, sorted by round: a sequence of `Step`, which `check_steps` proves.

    `aggregators` are the kinds of the participants after the workers. Every worker contributes and receives all
    elements (`regions`); an aggregator contributes nothing.
    """

    name: str
    grid: WorkerGrid
    aggregators: tuple[AggregatorKind, ...]
    messages: tuple[Phase, ...]
    """The phases as the strategy states them: rounds from 0 on in each, any ranges."""

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases with steps of equal or separate ranges, and rounds that count on from phase to phase."""
        return in_sequence(self.messages)

    @property
    def num_participants(self) -> int:
        """Number of workers and aggregators."""
        return self.grid.num_workers + len(self.aggregators)

    @property
    def regions(self) -> tuple[Region, ...]:
        """What the steps compute: the sum of all workers' elements, on every worker."""
        return tuple(all_reduce(self.grid.num_elements, self.grid.num_workers))

    def host_of(self, participant: int) -> int:
        """Return the host of a worker; aggregators are hosts of their own, after those of the workers."""
        beyond = participant - self.grid.num_workers
        return self.grid.hosts + beyond if beyond >= 0 else participant // self.grid.chips

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        return tuple(step for phase in self.phases for step in phase.steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, index: int | slice) -> Step | tuple[Step, ...]:
        return self._steps[index]


def in_sequence(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Return `phases`, each with rounds from 0 on and any ranges, as phases that follow each other.

    Rounds are renumbered. Every range is cut where any step begins or ends, since pieces that meet are sums of the
    same elements; empty steps and phases are left out.
    """
    phases = [Phase(one.name, tuple(s for s in one.steps if s.stop > s.start), one.streams) for one in phases]
    cuts = sorted({end for one in phases for step in one.steps for end in (step.start, step.stop)})
    after = {start: number for number, start in enumerate(cuts)}
    first, result = 0, []
    for phase in phases:
        if phase.steps:
            rounds = 1 + max(step.round for step in phase.steps)
            pieces = (
                Step(first + step.round, step.sender, step.receiver, cuts[at], cuts[at + 1], step.adds)
                for step in phase.steps
                for at in range(after[step.start], after[step.stop])
            )
            ordered = sorted(pieces, key=lambda step: (step.round, step.start))
            result.append(Phase(phase.name, tuple(ordered), phase.streams))
            first += rounds
    return tuple(result)

"""What a simulated pool came to: how long whose jobs waited, what the chips did, what the decisions cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.control.simulation.traces.trace import TraceJob

LARGER = "larger than their owner"
"""In place of an owner's name: jobs that no site of their owner could hold."""


@dataclass(slots=True, eq=False)
class JobFate:
    """What became of one job. Times are seconds of the simulated clock; `away` says that the pool ran it."""

    job: TraceJob
    started_s: float | None = None
    ended_s: float | None = None
    stopped: int = 0
    away: bool = False

    @property
    def waited_s(self) -> float | None:
        """Seconds from the submission to the first step of training; None where it never began."""
        return None if self.started_s is None else max(0.0, self.started_s - self.job.submit_s)


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waiting times of some jobs: `num_jobs` asked, `started` began and `done` ended."""

    owner: str
    num_jobs: int
    started: int
    done: int
    mean_s: float
    p95_s: float
    most_s: float

    @classmethod
    def of(cls, owner: str, fates: Sequence[JobFate]) -> Waits:
        """Return the waits of the jobs that have begun."""
        waits = sorted(fate.waited_s for fate in fates if fate.waited_s is not None)
        return cls(
            owner=owner,
            num_jobs=len(fates),
            started=len(waits),
            done=sum(fate.ended_s is not None for fate in fates),
            mean_s=sum(waits) / len(waits) if waits else 0.0,
            p95_s=percentile(waits, 0.95),
            most_s=waits[-1] if waits else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class PoolOutcome:
    """One simulated run. `utilisation` is the training of jobs done over all chips until `ended_s`.

    `preemptions` counts how often a job that trained had to make way, `failures` how often one lost a node;
    `events` are those that the coordinator took in, in `cpu_s`, planning apart. (Both are the CPU of all the
    run, shared out by the wall clock: to ask for CPU time costs more than many a decision.) `whole` says that
    every job that fits has ended.
    """

    scenario: str
    objective: str
    pool: Waits
    owners: tuple[Waits, ...]
    utilisation: float
    ended_s: float
    preemptions: int
    failures: int
    too_large: int
    events: int
    cpu_s: float
    planning_cpu_s: float
    whole: bool

    @property
    def events_per_cpu_s(self) -> float:
        """Events decided per second of CPU."""
        return self.events / self.cpu_s if self.cpu_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**asdict(self), "events_per_cpu_s": self.events_per_cpu_s}


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` of the ordered values do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def waits_by_owner(fates: Iterable[JobFate], fits: Callable[[TraceJob], bool]) -> tuple[Waits, ...]:
    """Return the waits of every owner, by name; jobs that do not fit at their owner's as `LARGER`."""
    found: dict[str, list[JobFate]] = {}
    for fate in fates:
        found.setdefault(fate.job.owner if fits(fate.job) else LARGER, []).append(fate)
    return tuple(Waits.of(owner, found[owner]) for owner in sorted(found))

"""`PoolOutcome`: waiting times per owner, utilisation, preemptions and decision cost of a simulated pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.control.simulation.traces.job_trace import TraceJob

LARGER_THAN_OWNER = "larger than their owner"
"""Stands for the owner of jobs that are too large for every site of their owner."""


@dataclass(slots=True, eq=False)
class JobOutcome:
    """The outcome of one job, in seconds of simulated time."""

    job: TraceJob
    # First start of training, and end of the job; None if not reached.
    started_s: float | None = None
    ended_s: float | None = None
    # Number of interruptions of its training, by preemption or failure.
    num_interruptions: int = 0
    # Of them, moves to other devices, and the most work that one of these lost, in seconds.
    num_moves: int = 0
    most_lost_by_move_s: float = 0.0

    @property
    def waited_s(self) -> float | None:
        """Seconds from submission to the start of training, None if it never started."""
        return None if self.started_s is None else max(0.0, self.started_s - self.job.submit_s)


@dataclass(frozen=True, kw_only=True)
class WaitStatistics:
    """Waiting times of an owner's jobs: of `num_jobs` submitted, `started` began and `done` ended."""

    owner: str
    num_jobs: int
    started: int
    done: int
    mean_s: float
    p95_s: float
    most_s: float

    @classmethod
    def from_outcomes(cls, owner: str, outcomes: Sequence[JobOutcome]) -> WaitStatistics:
        """Return the waiting times of the jobs that have started."""
        waits = sorted(fate.waited_s for fate in outcomes if fate.waited_s is not None)
        return cls(
            owner=owner,
            num_jobs=len(outcomes),
            started=len(waits),
            done=sum(fate.ended_s is not None for fate in outcomes),
            mean_s=sum(waits) / len(waits) if waits else 0.0,
            p95_s=percentile(waits, 0.95),
            most_s=waits[-1] if waits else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class PoolOutcome:
    """The outcome of one simulated run. Field names are keys of the JSON output."""

    scenario: str
    # Objective of the pool's queue, "" without one.
    objective: str
    # Waiting times of all jobs, and by owner.
    pool: WaitStatistics
    owners: tuple[WaitStatistics, ...]
    # Chip seconds of completed jobs over those of all chips until `ended_s`.
    utilisation: float
    ended_s: float
    # Interruptions of training by preemption, by node failure and by moves inside a site, and the most work that one of
    # these lost, in seconds.
    preemptions: int
    failures: int
    moves: int
    most_lost_by_move_s: float
    # Jobs that fit nowhere in this scenario.
    too_large: int
    # Events appended by the coordinator.
    events: int
    # CPU time of the coordinator and of planning: the run's CPU time, divided by wall-clock shares, since
    # measuring CPU time for each event would cost more than the event.
    cpu_s: float
    planning_cpu_s: float
    # Every job that fits has ended.
    whole: bool

    @property
    def events_per_cpu_s(self) -> float:
        """Events per CPU second of the coordinator."""
        return self.events / self.cpu_s if self.cpu_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON output."""
        return {**asdict(self), "events_per_cpu_s": self.events_per_cpu_s}


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank percentile of sorted values for the fraction `fraction`; 0 without values."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else 0.0


def waits_by_owner(outcomes: Iterable[JobOutcome], fits: Callable[[TraceJob], bool]) -> tuple[WaitStatistics, ...]:
    """Return each owner's waiting times; jobs that their owner cannot run count as `LARGER_THAN_OWNER`."""
    found: dict[str, list[JobOutcome]] = {}
    for fate in outcomes:
        found.setdefault(fate.job.owner if fits(fate.job) else LARGER_THAN_OWNER, []).append(fate)
    return tuple(WaitStatistics.from_outcomes(owner, found[owner]) for owner in sorted(found))

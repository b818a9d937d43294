"""`simulate_failures`: the time of a run with checkpoints, stage failures and lost work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval:
    """A checkpoint after every `num_iterations` iterations, which pauses training for `stall_s`."""

    num_iterations: int
    stall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Stage `stage` fails at `at_s`; all stages stop and resume `restart_s` later."""

    at_s: float
    restart_s: float
    stage: int = 0


@dataclass(frozen=True, kw_only=True)
class FailureResult:
    """Time of a run by cause; the parts sum to `total_s`.

    A failure after the end is ignored; one during a restart only extends the restart.
    """

    total_s: float
    useful_s: float
    """Time of the iterations that the run keeps."""
    repeated_s: float
    """Time of work that was repeated or interrupted."""
    stall_s: float
    """Time of checkpoints."""
    down_s: float
    """Time of restarts."""
    num_failures: int

    @property
    def goodput(self) -> float:
        """Useful time over total time."""
        return self.useful_s / self.total_s if self.total_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the goodput, for JSON."""
        return asdict(self) | {"goodput": self.goodput}


def simulate_failures(
    iteration_s: float, num_iterations: int, checkpoints: CheckpointInterval, failures: Sequence[Failure] = ()
) -> FailureResult:
    """Return the time of `num_iterations` iterations of `iteration_s` with these checkpoints and failures.

    A failure rolls back to the last completed checkpoint, or to the start. Raises `InputError` for values out
    of range.
    """
    if iteration_s <= 0 or num_iterations < 0 or checkpoints.num_iterations < 1 or checkpoints.stall_s < 0:
        raise InputError(
            f"{num_iterations} iterations of {iteration_s} s with {checkpoints}",
            hint="the iteration and the period must be positive, the other values at least 0",
        )
    coming = sorted(failures, key=lambda failure: failure.at_s)
    now_s = stall_s = down_s = work_s = 0.0
    done = saved = hit = 0
    while done < num_iterations:
        is_last = done + 1 == num_iterations
        pause_s = checkpoints.stall_s if (done + 1) % checkpoints.num_iterations == 0 and not is_last else 0.0
        if hit < len(coming) and coming[hit].at_s < now_s + iteration_s + pause_s:
            failure, hit = coming[hit], hit + 1
            spent_s = max(0.0, failure.at_s - now_s)
            work_s += min(spent_s, iteration_s)
            stall_s += max(0.0, spent_s - iteration_s)
            back_s = max(now_s, failure.at_s + failure.restart_s)
            down_s += back_s - now_s - spent_s
            now_s, done = back_s, saved
            continue
        now_s += iteration_s + pause_s
        work_s, stall_s, done = work_s + iteration_s, stall_s + pause_s, done + 1
        if done % checkpoints.num_iterations == 0:
            saved = done
    useful_s = num_iterations * iteration_s
    return FailureResult(
        total_s=now_s,
        useful_s=useful_s,
        repeated_s=work_s - useful_s,
        stall_s=stall_s,
        down_s=down_s,
        num_failures=hit,
    )


def draw_failures(
    mean_between_s: Sequence[float], restart_s: float, until_s: float, seed: int = 0
) -> tuple[Failure, ...]:
    """Return random failures up to `until_s`, on average every `mean_between_s[s]` seconds at stage `s`."""
    rng = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
    drawn = []
    for stage, mean_s in enumerate(mean_between_s):
        if mean_s <= 0:
            raise InputError(f"mean time between failures of stage {stage} is {mean_s} s", hint="it must be positive")
        at_s = rng.expovariate(1 / mean_s)
        while at_s < until_s:
            drawn.append(Failure(at_s=at_s, restart_s=restart_s, stage=stage))
            at_s += rng.expovariate(1 / mean_s)
    return tuple(sorted(drawn, key=lambda failure: (failure.at_s, failure.stage)))

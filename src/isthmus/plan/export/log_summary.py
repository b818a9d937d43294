"""`summarise_log`: a summary of a training log without its warm-up; `add_measured_run` adds it to a table of runs."""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isthmus.core.errors import FileError, InputError
from isthmus.plan.calibrate.measured_runs import MeasuredRun, RunTable, load_runs
from isthmus.plan.export.training_logs import LogFormat, LoggedInterval, TrainingLog
from isthmus.plan.time.predict import PlanForecast


@dataclass(frozen=True, kw_only=True)
class LogSummary:
    """Iteration time, memory and loss of a log.

    For a log of means over several iterations, `stdev_s`, `min_s` and `max_s` are those of the means.
    """

    format: LogFormat
    iterations: int
    """Number of iterations that count."""
    skipped: int
    """Number of iterations before them."""
    iteration_s: float
    """Median time of an iteration."""
    mean_s: float
    stdev_s: float
    min_s: float
    max_s: float
    peak_memory_bytes: float | None
    first_loss: float | None
    last_loss: float | None


def summarise_log(log: TrainingLog, warm_up: int) -> LogSummary:
    """Return the summary of `log` without intervals that include any of the first `warm_up` iterations.

    Raises `InputError` if no interval remains.
    """
    begin = log.intervals[0].last_iteration - log.intervals[0].num_iterations
    kept = [one for one in log.intervals if one.last_iteration - one.num_iterations - begin >= warm_up]
    last = log.intervals[-1].last_iteration
    if not kept:
        raise InputError(
            f"no interval after {warm_up} iterations of warm-up: the log ends with iteration {last}",
            hint="run longer, log more often, or lower --warm-up",
        )
    count = sum(one.num_iterations for one in kept)
    mean_s = sum(one.num_iterations * one.iteration_s for one in kept) / count
    variance = sum(one.num_iterations * (one.iteration_s - mean_s) ** 2 for one in kept) / count
    losses = [one.loss for one in log.intervals if one.loss is not None and math.isfinite(one.loss)]
    return LogSummary(
        format=log.format,
        iterations=count,
        skipped=last - begin - count,
        iteration_s=_median_s(kept, count),
        mean_s=mean_s,
        stdev_s=math.sqrt(variance),
        min_s=min(one.iteration_s for one in kept),
        max_s=max(one.iteration_s for one in kept),
        peak_memory_bytes=log.peak_memory_bytes,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
    )


def _median_s(kept: Sequence[LoggedInterval], count: int) -> float:
    """Return the median time of `count` iterations, each with its interval's mean."""
    ordered = sorted((one.iteration_s, one.num_iterations) for one in kept)
    ends = list(itertools.accumulate(number for _, number in ordered))
    low, high = (ordered[bisect_right(ends, place)][0] for place in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def compare_with_forecast(summary: LogSummary, forecast: PlanForecast) -> dict[str, Any]:
    """Return measurement and prediction, as `isthmus measured --json` prints them."""
    seconds = summary.iteration_s
    return {
        "plan": forecast.plan,
        "measured": {
            **vars(summary),
            "samples_per_s": forecast.samples / seconds,
            "tgs_tokens_per_card_s": forecast.tokens / seconds / forecast.num_cards,
        },
        "predicted": {
            "iteration_s": forecast.iteration_s,
            "iteration_low_s": forecast.low_s,
            "iteration_high_s": forecast.high_s,
            "samples_per_s": forecast.samples_per_s,
            "tgs_tokens_per_card_s": forecast.tgs_tokens_per_card_s,
            "peak_memory_bytes": max(stage.peak_memory_bytes for stage in forecast.result.stages),
            "calibration": forecast.calibration,
        },
        "predicted_over_measured": forecast.iteration_s / seconds,
        "within_band": forecast.low_s <= seconds <= forecast.high_s,
    }


def measured_run(summary: LogSummary, *, name: str, plan: Path, pool: Path) -> MeasuredRun:
    """Return the run of a log as a table of runs holds it.

    Megatron-LM logs what its allocator held at most; torchtitan logs what it had reserved from the device, which says
    nothing about either factor of memory alone and is left out.
    """
    allocated = summary.peak_memory_bytes if summary.format == "megatron" else None
    return MeasuredRun(
        name=name, plan=str(plan.resolve()), pool=str(pool.resolve()), iteration_s=summary.iteration_s,
        allocated_bytes=allocated,
    )  # fmt: skip


def add_measured_run(table: Path, run: MeasuredRun) -> None:
    """Add a run to a table for `isthmus calibrate`, or replace the run of the same name.

    Paths are written relative to the table's folder. Raises `FileError` if the file is not a table of runs or
    cannot be written.
    """
    known = load_runs(table) if table.exists() else None
    runs = [one for one in known.runs if one.name != run.name] if known else []
    base = table.resolve().parent
    relative_runs = [
        one.model_copy(update={"plan": os.path.relpath(one.plan, base), "pool": os.path.relpath(one.pool, base)})
        for one in (*runs, run)
    ]
    table_of_runs = RunTable(
        source=known.source if known else "logs read by `isthmus measured`", runs=tuple(relative_runs)
    )
    try:
        table.write_text(
            yaml.safe_dump(table_of_runs.model_dump(mode="json", exclude_none=True), sort_keys=False), encoding="utf-8"
        )
    except OSError as error:
        raise FileError(f"cannot be written: {error}", file=str(table)) from error

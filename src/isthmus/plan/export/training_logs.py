"""`read_training_log`: parses iteration times from logs of Megatron-LM, torchtitan, NeMo and the Isthmus runtime.

The formats are those of `training_log` and `report_memory` of Megatron-LM (core 0.16 to 0.19; Megatron Bridge prints
the same), of `MetricsProcessor.log` of torchtitan (0.1 to 0.3), of the progress lines of NeMo 2 (`Training epoch`) and
NeMo 1 (its progress bar), and of the workers' `metrics.jsonl`. Launcher prefixes,
terminal colours and all other lines are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.plan import Plan
from isthmus.core.units import GIB, MIB

LogFormat = Literal["megatron", "torchtitan", "nemo", "isthmus"]
"""The framework that wrote a training log."""

MAX_LINE_CHARS = 4096
"""Longest line that is read; no framework prints longer ones."""

MAX_ITERATION = 10**12
"""Numbers of iterations from here on are none."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(-?[0-9][0-9.,]*(?:[eE][-+]?[0-9]+)?)"
_ITERATION = re.compile(r" iteration +(\d{1,12})/ *\d+ \|")
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\): {_NUMBER}")
_BATCH = re.compile(r"global batch size: +(\d{1,12})\b")
_LOSS = re.compile(rf"lm loss: {_NUMBER}")
_MEMORY = re.compile(rf"memory \(MB\) .*\| max allocated: {_NUMBER}")
_STEP = re.compile(
    rf"(?<!validate )step: +(\d{{1,12}}) +loss: +{_NUMBER} .*memory: +{_NUMBER}GiB\([^)]*\) +tps: +{_NUMBER}"
)
_NEMO_TIME = re.compile(rf"train_step_timing in s[:=] *{_NUMBER}")
_NEMO_STEP = re.compile(rf"global_step[:=] *{_NUMBER}")
_NEMO_LOSS = re.compile(rf"reduced_train_loss[:=] *{_NUMBER}")
_NEMO_BATCH = re.compile(r"global_batch_size[:=] *(\d{1,12})\b")


@dataclass(frozen=True, kw_only=True)
class LoggedInterval:
    """A logged interval of `num_iterations` iterations; loss and memory are None if the line has none."""

    last_iteration: int
    """The last iteration, counted from 1."""
    iteration_s: float
    """Mean time of an iteration."""
    num_iterations: int = 1
    """Number of iterations, set when the intervals are sorted."""
    loss: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """The content of a log: its intervals in order, and the peak memory of any chip, if logged."""

    format: LogFormat
    intervals: tuple[LoggedInterval, ...]
    peak_memory_bytes: float | None


def read_training_log(lines: Iterable[str], plan: Plan, log_format: LogFormat | None = None) -> TrainingLog:
    """Return the log of a run of `plan`; if `log_format` is None, the format is detected from the lines.

    An iteration logged by several ranks or attempts counts once: a line with a loss takes precedence, else
    the later one. Raises `InputError` if no line has the format, or a line has another batch size.
    """
    kept = [_COLOUR.sub("", part[:MAX_LINE_CHARS]) for line in lines for part in line.split("\r")]
    forms = (log_format,) if log_format else tuple(_READERS)
    for name in forms:
        found = list(_READERS[name](kept, plan))
        timed = [one for one in found if 0 < one.iteration_s < math.inf and one.last_iteration > 0]
        if timed:
            memory = [one.memory_bytes for one in found if one.memory_bytes and 0 < one.memory_bytes < math.inf]
            intervals = tuple(_ordered_intervals(timed))
            return TrainingLog(format=name, intervals=intervals, peak_memory_bytes=max(memory, default=None))
    raise InputError(
        f"no line with an iteration time in the format of {' or '.join(forms)}",
        hint="give the log of the rank that prints iteration times: one of the last stage",
    )


def _ordered_intervals(found: Iterable[LoggedInterval]) -> Iterator[LoggedInterval]:
    """Yield each interval once, in order, with its number of iterations.

    The first interval is assumed as long as the second, but not to begin before the first iteration.
    """
    chosen: dict[int, LoggedInterval] = {}
    for one in found:
        known = chosen.get(one.last_iteration)
        if known is None or one.loss is not None or known.loss is None:
            chosen[one.last_iteration] = one
    ends = sorted(chosen)
    gap = ends[1] - ends[0] if len(ends) > 1 else ends[0]
    before = max(0, ends[0] - gap)
    for end in ends:
        yield replace(chosen[end], num_iterations=end - before)
        before = end


def _megatron(lines: Iterable[str], plan: Plan) -> Iterator[LoggedInterval]:
    for line in lines:
        if memory := _MEMORY.search(line):
            yield LoggedInterval(last_iteration=0, iteration_s=0.0, memory_bytes=_number(memory[1]) * MIB)
        place, elapsed = _ITERATION.search(line), _ELAPSED.search(line)
        if place is None or elapsed is None:
            continue
        batch, loss = _BATCH.search(line), _LOSS.search(line)
        _require_samples(plan, batch, place[1])
        yield LoggedInterval(
            last_iteration=int(place[1]),
            iteration_s=_number(elapsed[1]) / 1e3,
            loss=_number(loss[1]) if loss else None,
        )


def _torchtitan(lines: Iterable[str], plan: Plan) -> Iterator[LoggedInterval]:
    """Yield intervals with the time from tokens per second and device; only the last stage logs a loss."""
    tokens = plan.num_samples * plan.sequence_length / sum(stage.num_chips for stage in plan.stages)
    for line in lines:
        found = _STEP.search(line)
        if found is None or not 0 < _number(found[4]) < math.inf:
            continue
        loss = _number(found[2])
        yield LoggedInterval(
            last_iteration=int(found[1]),
            iteration_s=tokens / _number(found[4]),
            loss=loss if loss >= 0 else None,
            memory_bytes=_number(found[3]) * GIB,
        )


def _nemo(lines: Iterable[str], plan: Plan) -> Iterator[LoggedInterval]:
    """Yield iterations with their times; NeMo counts steps from 0, and a progress bar redraws its line."""
    for line in lines:
        seconds, step = _NEMO_TIME.search(line), _NEMO_STEP.search(line)
        if seconds is None or step is None or not 0 <= (number := _number(step[1])) < MAX_ITERATION:
            continue
        _require_samples(plan, _NEMO_BATCH.search(line), step[1])
        loss = _NEMO_LOSS.search(line)
        yield LoggedInterval(
            last_iteration=int(number) + 1,
            iteration_s=_number(seconds[1]),
            loss=_number(loss[1]) if loss else None,
        )


def _require_samples(plan: Plan, batch: re.Match[str] | None, iteration: str) -> None:
    """Raise `InputError` if a line names another number of samples than the plan has."""
    if batch and int(batch[1]) != plan.num_samples:
        raise InputError(
            f"iteration {iteration} has {batch[1]} samples, plan '{plan.id}' has {plan.num_samples}",
            hint="compare the run with the plan that it ran",
        )


def _isthmus(lines: Iterable[str], plan: Plan) -> Iterator[LoggedInterval]:  # noqa: ARG001
    """Yield intervals with the time of the slowest rank; the runtime counts steps from 0."""
    slowest: dict[int, LoggedInterval] = {}
    for line in lines:
        try:
            step = StepMetrics.model_validate_json(line)
        except ValidationError:
            continue
        seconds, known = step.values.get("step_s"), slowest.get(step.step)
        if seconds is None:
            continue
        slowest[step.step] = LoggedInterval(
            last_iteration=step.step + 1,
            iteration_s=max(seconds, known.iteration_s if known else 0.0),
            loss=step.values.get("loss", known.loss if known else None),
        )
    yield from slowest.values()


_READERS: dict[LogFormat, Callable[[Iterable[str], Plan], Iterator[LoggedInterval]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "nemo": _nemo,
    "isthmus": _isthmus,
}


def _number(text: str) -> float:
    """Return a logged number, or NaN, which no comparison keeps, for what only looks like one."""
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return math.nan
